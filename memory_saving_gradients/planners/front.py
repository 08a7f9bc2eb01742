"""The best plans seen so far, whatever the budget.

A search under one budget passes through thousands of selections. Each of them is a plan
for some budget, so the better ones are remembered: no other has a lower peak and less
extra time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from memory_saving_gradients.sweep import Sweep

__all__ = ["Front", "Point"]


@dataclass(frozen=True, slots=True)
class Point:
    """A plan on the front.

    Attributes:
        peak_bytes: Its simulated peak.
        extra_seconds: The estimated time of its recomputation.
        kept: Ids of the tensors that it keeps.
    """

    peak_bytes: int
    extra_seconds: float
    kept: frozenset[int]


class Front:
    """Plans of which none is better than another, by rising peak."""

    def __init__(self) -> None:
        self._points: list[Point] = []

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def see(self, sweep: Sweep) -> None:
        """Remembers the current selection if nothing seen so far is as good."""
        peak, seconds = sweep.peak_bytes, sweep.extra_seconds
        if self._is_new(peak, seconds):
            self._insert(Point(peak, seconds, frozenset(sweep.kept)))

    def add(self, point: Point) -> None:
        """Remembers a plan that was made elsewhere, likewise."""
        if self._is_new(point.peak_bytes, point.extra_seconds):
            self._insert(point)

    def _is_new(self, peak_bytes: int, seconds: float) -> bool:
        place = bisect_right(self._points, peak_bytes, key=_peak)
        # Sums of many changes differ in their last digits.
        return not place or self._points[place - 1].extra_seconds > seconds * (1 + 1e-9)

    def _insert(self, point: Point) -> None:
        first = last = bisect_left(self._points, point.peak_bytes, key=_peak)
        while (
            last < len(self._points)
            and self._points[last].extra_seconds >= point.extra_seconds
        ):
            last += 1
        self._points[first:last] = [point]

    def best(self, budget_bytes: float) -> Point | None:
        """The plan of least extra time whose peak is within the budget, if any."""
        place = bisect_right(self._points, budget_bytes, key=_peak)
        return self._points[place - 1] if place else None

    @property
    def least_bytes(self) -> int | None:
        """The lowest peak of all, if anything has been seen."""
        return self._points[0].peak_bytes if self._points else None


def _peak(point: Point) -> int:
    return point.peak_bytes
