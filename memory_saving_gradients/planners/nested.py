"""Below the floor: ops that are recomputed more than once.

The problem: with every op recomputed at most once, a chain of n tensors needs about
√(2n) of them at a time. Who has less memory must run some ops several times.

The model: the forward pass is cut into units (`cuts`), and the state at a cut is its
boundary. A few boundaries are stored. To differentiate a unit, the pass is run again
from the last stored boundary, and on the way boundaries are stored where there is room,
so that earlier units begin closer. With m boundaries and r runs of each unit, C(m+r, r)
units can be differentiated, which is optimal on uniform chains (Griewank & Walther
2000, revolve); networks are taken for such.

The algorithm:

1. `_Splits`: for a stretch of l units and f free places, where to store the next
   boundary: by dynamic programming over all splits, once for all.
2. `_Replay`: walks the backward slots. If a slot reads what is not there, it works out
   which ops must be run again to have all residuals of the slot's unit and the
   boundaries that shall be stored on the way. Stored boundaries above the unit are
   forgotten. What is not stored dies with its last reader: nobody has to say so.
3. The more places there are, the less is run again. So bisection finds the most places
   whose exact simulated peak is within the budget, for several sizes of unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from memory_saving_gradients.planners.cuts import candidate_cuts, selection_at
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.schedule import make_schedule, seconds_again
from memory_saving_gradients.simulate import simulate

__all__ = ["Nested", "plan_nested"]

_UNITS = (1200, 250, 100, 60, 40, 25, 16)
"""Numbers of units to try: small ones need least memory, large ones least planning."""

_MOST_PLACES = 60
"""Boundaries stored at a time, at most."""


@dataclass(frozen=True)
class Nested:
    """A plan in which ops may be recomputed several times.

    Attributes:
        kept: Ids of the tensors that are kept from the forward pass on.
        reruns: For each slot the positions whose ops are copied before it.
        peak_bytes: Its simulated peak.
        extra_seconds: The estimated time of all copies.
    """

    kept: frozenset[int]
    reruns: Mapping[int, tuple[int, ...]]
    peak_bytes: int
    extra_seconds: float


def plan_nested(problem: Problem, budget_bytes: int) -> Nested:
    """The plan of least extra time within the budget, else that of the lowest peak.

    Args:
        problem: The planning problem.
        budget_bytes: What the simulated peak may be, above rest.

    Returns:
        The plan. Its peak is above the budget if nothing that was found is within.
    """
    found: list[Nested] = []
    tried: set[int] = set()
    for units in _UNITS:
        replay = _Replay(problem, units)
        if replay.units in tried:
            continue
        tried.add(replay.units)
        low, high = 1, min(_MOST_PLACES, replay.units)
        while low <= high:
            places = (low + high) // 2
            plan = replay.plan(places)
            found.append(plan)
            if plan.peak_bytes <= budget_bytes:
                low = places + 1
            else:
                high = places - 1
    fitting = [plan for plan in found if plan.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda plan: (plan.extra_seconds, plan.peak_bytes))
    return min(found, key=lambda plan: (plan.peak_bytes, plan.extra_seconds))


class _Splits:
    """Where to store the next boundary.

    `first(l, f)`: of a stretch of l units with f free places, after how many units; 0
    if none is to be stored. The units behind it are then differentiated with f - 1
    places, those before it with f.
    """

    def __init__(self, units: int, places: int, spared: int) -> None:
        """`spared`: of the units before a boundary so many need not be run to again,
        since the boundary is all that their gradients read."""
        lengths = np.arange(units + 1)
        # Without a place every unit is run to from the start of the stretch.
        work = [lengths * (lengths + 1) / 2]
        self._first = [np.zeros(units + 1, np.int64)]
        for _ in range(places):
            fewer = work[-1]
            more = np.zeros(units + 1)
            first = np.zeros(units + 1, np.int64)
            more[1:2] = fewer[1:2]
            for length in range(2, units + 1):
                at = np.arange(1, length)
                total = at + fewer[length - at] + more[at - spared]
                best = int(np.argmin(total))
                if total[best] < fewer[length]:
                    more[length], first[length] = total[best], at[best]
                else:  # as with fewer
                    more[length] = fewer[length]
                    first[length] = self._first[-1][length]
            work.append(more)
            self._first.append(first)

    def first(self, length: int, free: int) -> int:
        return int(self._first[max(min(free, len(self._first) - 1), 0)][length])


@cache
def _splits(units: int, spared: int) -> _Splits:
    return _Splits(units, min(_MOST_PLACES, units), spared)


class _Replay:
    """The forward pass cut into units, to be run again from stored boundaries.

    Attributes:
        units: How many there are.
    """

    def __init__(self, problem: Problem, most_units: int) -> None:
        self._problem = problem
        self._buffers = problem.buffers
        cuts = candidate_cuts(problem, most_units - 1)
        self.units = len(cuts) - 1
        positions = np.arange(len(self._buffers.forward))
        self._unit = (np.searchsorted(cuts, positions, side="right") - 1).tolist()
        self._boundary = [
            selection_at(problem, [int(cut)]) - problem.always_kept for cut in cuts
        ]
        self._residuals: list[list[int]] = [[] for _ in range(self.units)]
        buffers = self._buffers
        for tensor in problem.useful_tensors:
            if buffers.backward_readers[tensor] and buffers.may_copy(tensor):
                self._residuals[self._unit_of(tensor)].append(tensor)
        self._reached = self._units_by_slot()
        enough = sum(
            boundary.issuperset(residuals)
            for residuals, boundary in zip(
                self._residuals, self._boundary[1:], strict=True
            )
        )
        self._splits = _splits(self.units, int(2 * enough > self.units))

    def plan(self, places: int) -> Nested:
        """The plan with so many boundaries stored at a time."""
        problem, buffers = self._problem, self._buffers
        last = max((n for n, found in enumerate(self._residuals) if found), default=0)
        stored = self._stored_on_the_way(0, last + 1, places)
        # What the first gradients read is there when the forward pass has ended.
        kept = problem.always_kept.union(
            self._residuals[last], *(self._boundary[c] for c in stored)
        )
        reruns = self._replayed(stored, kept, places)
        schedule = make_schedule(buffers, kept, reruns=reruns)
        seconds = seconds_again(buffers.graph, schedule)
        peak = simulate(buffers, schedule).peak_bytes
        return Nested(kept, reruns, peak, seconds)

    def _replayed(
        self, stored: list[int], kept: frozenset[int], places: int
    ) -> dict[int, tuple[int, ...]]:
        """Step 2 of the module's outline."""
        buffers = self._buffers
        stored = list(stored)
        there = set(kept)
        reruns: dict[int, tuple[int, ...]] = {}
        for slot, op in enumerate(buffers.backward):
            wanted = [t for t in buffers.reads[op] if buffers.may_copy(t)]
            if all(t in there for t in wanted):
                continue
            unit = self._reached[slot]
            while stored and stored[-1] > unit:
                stored.pop()
            start = stored[-1] if stored else 0
            on_the_way = self._stored_on_the_way(
                start, unit + 1, places - len(stored), last=unit
            )
            stored += on_the_way
            at_hand = {
                t for t in self._residuals[unit] if self._wanted_from(t, slot)
            }.union(wanted)
            # What else was at hand is not counted on: it may be gone.
            base = self._problem.always_kept.union(
                *(self._boundary[c] for c in stored if c not in on_the_way)
            )
            goals = at_hand.union(*(self._boundary[c] for c in on_the_way))
            run = self._needed(goals, base)
            reruns[slot] = tuple(run)
            there = set(base) | goals
        return reruns

    def _stored_on_the_way(
        self, start: int, stop: int, free: int, last: int | None = None
    ) -> list[int]:
        """The cuts to store at while units `start` to `stop` are run, ascending."""
        found = []
        length = stop - start
        while free > 0 and (step := self._splits.first(length, free)) > 0:
            start, length, free = start + step, length - step, free - 1
            if last is not None and start > last:
                break
            found.append(start)
        return found

    def _needed(self, goals: Iterable[int], there: frozenset[int]) -> list[int]:
        """The positions to run for these tensors, given those that are there."""
        buffers = self._buffers
        run: set[int] = set()
        pending = [t for t in goals if t not in there]
        while pending:
            maker = buffers.graph.tensors[pending.pop()].op
            position = buffers.position[maker]
            if position in run:
                continue
            run.add(position)
            pending.extend(
                t
                for t in buffers.reads[maker]
                if t not in there and buffers.may_copy(t)
            )
        return sorted(run)

    def _unit_of(self, tensor: int) -> int:
        maker = self._buffers.graph.tensors[tensor].op
        return int(self._unit[self._buffers.position[maker]])

    def _wanted_from(self, tensor: int, slot: int) -> bool:
        return self._buffers.backward_readers[tensor][-1] >= slot

    def _units_by_slot(self) -> list[int]:
        """For each slot the last unit of which it reads something that was made."""
        return [
            max(
                (
                    self._unit_of(t)
                    for t in self._buffers.reads[op]
                    if self._buffers.may_copy(t)
                ),
                default=0,
            )
            for op in self._buffers.backward
        ]
