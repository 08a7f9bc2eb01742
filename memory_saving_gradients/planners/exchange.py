"""Under a budget: repairing a selection, filling it up, exchanging tensors.

All moves change one tensor at a time through a `Sweep`, so that every figure is that of
the exact simulator:

* `repair` brings the peak under the budget, at the least seconds for each byte;
* `refill` keeps what is dearest to redo, for each byte, wherever it fits;
* `exchange` keeps what does not fit, repairs, and takes all back unless time was won.

All are bounded by a number of simulated steps, never by the clock.
"""

from __future__ import annotations

import math
from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.planners.front import Front
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.refine import (
    dearest_first,
    fill_up,
    peak_and_near,
)
from memory_saving_gradients.sweep import Change, Sweep

__all__ = ["Search", "save_time"]

_LOOKED_AT = 6
"""How many tensors of a kind `repair` tries before each change."""

_NEAR = 64
"""What stands within this part of the peak counts as near it."""

_MOST_REPAIRS = 40
"""Changes after which a selection is given up."""

_MOST_IN_EXCHANGE = 4
"""Changes that one more kept tensor may cost."""


class Search:
    """Moves under one budget; whatever they pass through is shown to the front.

    Attributes:
        problem: The planning problem.
        budget_bytes: What the peak may be.
        front: Remembers what was seen.
        consumed_bytes: What the peak may be of a caller who consumes each gradient at
            once; None if that of the other one is all that matters.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        front: Front,
        consumed_bytes: int | None = None,
    ) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        # By how much the second limit is the tighter one.
        self._gap = 0 if consumed_bytes is None else budget_bytes - consumed_bytes
        self.front = front
        self._tensors = np.array(sorted(problem.candidates), np.int64)
        spared, size = problem.seconds_spared, problem.buffers.size
        self._spared = np.array([spared[t] for t in self._tensors.tolist()])
        self._size = np.array([size[t] for t in self._tensors.tolist()], np.int64)

    def repair(
        self,
        sweep: Sweep,
        frozen: Set[int] = frozenset(),
        most: int = _MOST_REPAIRS,
        most_seconds: float = math.inf,
    ) -> list[Change] | None:
        """Changes tensors that are alive at the peak until it is within the budget.

        Args:
            sweep: The selection, changed in place.
            frozen: Tensors not to touch.
            most: At most so many changes.
            most_seconds: Gives up as soon as the extra time is not below this.

        Returns:
            The changes, in order; None if it cannot be done: then nothing is
            changed.
        """
        changed: list[Change] = []
        height = peak_and_near(self._profile(sweep), _NEAR)
        while height[0] > self.budget_bytes:
            move = None
            if len(changed) < most and sweep.extra_seconds < most_seconds:
                move = self._cheapest_move(sweep, frozen, height)
            if move is None:
                for change in reversed(changed):
                    sweep.take_back(change)
                return None
            changed.append(sweep.toggle(move))
            height = peak_and_near(self._profile(sweep), _NEAR)
            self.front.see(sweep)
        return changed

    def refill(self, sweep: Sweep, most_work: int, rounds: int | None = None) -> None:
        """Keeps whatever fits, the dearest for its bytes first (`refine.fill_up`)."""
        fill_up(
            self.problem,
            sweep,
            lambda: self._peak(sweep) <= self.budget_bytes,
            most_work,
            rounds=rounds,
            gained=self.front.see,
        )

    def exchange(self, sweep: Sweep, most_work: int) -> None:
        """Keeps one more tensor and lets others go for it, as long as that wins
        time."""
        improved = True
        while improved:
            improved = False
            for tensor in dearest_first(self.problem, sweep):
                if sweep.work >= most_work:
                    return
                if tensor in sweep.kept:
                    continue  # kept by a repair since the list was made
                before = sweep.extra_seconds
                change = sweep.toggle(tensor)
                # By more than rounding, lest it go round in circles.
                most = before * (1 - 1e-9)
                if sweep.extra_seconds < most:
                    changed = self.repair(sweep, {tensor}, _MOST_IN_EXCHANGE, most)
                    if changed is not None:
                        if sweep.extra_seconds < most:
                            improved = True
                            self.front.see(sweep)
                            continue
                        for other in reversed(changed):
                            sweep.take_back(other)
                sweep.take_back(change)

    def _profile(self, sweep: Sweep) -> NDArray[np.int64]:
        """Live bytes at each step: the higher of the two curves, of which the
        second is raised until both have the same limit."""
        if not self._gap:
            return sweep.profile()
        return np.maximum(sweep.profile(), sweep.profile_if_consumed() + self._gap)

    def _peak(self, sweep: Sweep) -> int:
        """What must not be above the budget."""
        if not self._gap:
            return sweep.peak_bytes
        return max(sweep.peak_bytes, sweep.peak_if_consumed + self._gap)

    def _cheapest_move(
        self, sweep: Sweep, frozen: Set[int], height: tuple[int, int]
    ) -> int | None:
        """The change at the peak that costs least for each byte of its fall."""
        excess = height[0] - self.budget_bytes
        best: tuple[float, int] | None = None
        for tensor in self._at_the_peak(sweep, frozen, excess):
            before = sweep.extra_seconds
            change = sweep.toggle(tensor)
            peak, cost = self._peak(sweep), sweep.extra_seconds - before
            lower = peak < height[0] or (
                peak == height[0]
                and peak_and_near(self._profile(sweep), _NEAR) < height
            )
            sweep.take_back(change)
            if lower:
                # What lowers one of several peaks counts a little.
                fall = min(height[0] - peak, excess) + 1e-3 * excess
                price = cost / fall if cost > 0 else cost * fall
                if best is None or (price, tensor) < best:
                    best = price, tensor
        return None if best is None else best[1]

    def _at_the_peak(
        self, sweep: Sweep, frozen: Set[int], excess: int
    ) -> tuple[int, ...]:
        """What might be let go (its original is alive at the peak), and what might be
        kept lest its copy be alive there; a few of each, the most promising."""
        tensors, spared, size = self._tensors, self._spared, self._size
        originals, copies = sweep.alive_among(int(self._profile(sweep).argmax()))
        originals &= sweep.is_kept
        copies &= ~sweep.is_kept
        for mask in (originals, copies):
            mask[list(frozen)] = False
        held = np.flatnonzero(originals[tensors])
        redone = np.flatnonzero(copies[tensors])
        price = spared[held] / np.minimum(size[held], excess)
        held = held[np.argsort(price, kind="stable")]
        gain = spared[redone] / size[redone]
        redone = redone[np.argsort(-gain, kind="stable")]
        return (
            *tensors[held[:_LOOKED_AT]].tolist(),
            *tensors[redone[:_LOOKED_AT]].tolist(),
        )


def save_time(problem: Problem, sweep: Sweep, most_work: int) -> None:
    """Exchanges tensors as long as that wins time and raises neither peak.

    Args:
        problem: The planning problem.
        sweep: The selection, changed in place.
        most_work: Ends when the sweep has done so much.
    """
    search = Search(problem, sweep.peak_bytes, Front(), sweep.peak_if_consumed)
    search.exchange(sweep, most_work)
