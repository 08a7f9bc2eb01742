"""A little below the floor: some ops are recomputed twice, all others once at most.

The problem: with every op recomputed at most once there is a lowest peak, and a copy is
alive from the first slot that needs it to the last. Who has a little less memory need
not run everything several times (`nested`): it is enough to let go of a few buffers
that only wait while the peak passes, and to make them once more.

The algorithm, from several selections of low peaks:

1. At the peak, for each buffer that waits there (nobody reads or makes it then): run
   its op again before the next step that reads it, and with it what it reads and is
   gone by then. What is simulated to cost least for each byte of the fall is done,
   until the peak is within the budget.
2. What is copied is kept instead, or copied once less, wherever that fits and spares
   time.

Each question is a simulation of the whole schedule, so their number is bounded: on
large graphs there are few.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memory_saving_gradients.planners.budget import explored
from memory_saving_gradients.planners.nested import Nested, plan_nested
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.schedule import (
    NEVER,
    copies_by_slot,
    copy_slots,
    make_schedule,
    reads_what_is_there,
    seconds_again,
)
from memory_saving_gradients.simulate import Timeline, simulate

__all__ = ["plan_again", "plan_below_floor"]

_STEPS = 250_000
"""Simulated steps for all questions together: half of them for each part."""

_SCALES = (1.0, 1.06, 1.15, 1.3)
"""Budgets whose plans are starts, as fractions of the budget."""

_LOWEST = 2
"""So many plans of the lowest peaks are starts, too."""

_FILLED = 2
"""The best so many are filled up."""

_LOOKED_AT = 10
"""Buffers that are thought of at each peak, largest first."""

_A_LITTLE = 1.5
"""A budget is a little below the floor if that is at most so many times it."""

_MOST_CHANGES = 30
"""Changes after which a selection is given up."""

Reruns = Mapping[int, tuple[int, ...]]


def plan_below_floor(problem: Problem, budget_bytes: int, floor_bytes: int) -> Nested:
    """The plan of least extra time within a budget that takes several runs of some ops.

    Args:
        problem: The planning problem.
        budget_bytes: What the simulated peak may be, above rest.
        floor_bytes: The lowest peak found with every op recomputed at most once.

    Returns:
        The plan. Its peak is above the budget if nothing that was found is within.
    """
    nested = plan_nested(problem, budget_bytes)
    if problem.is_large or floor_bytes > _A_LITTLE * budget_bytes:
        return nested
    again = plan_again(problem, budget_bytes)
    if again is None or (
        nested.peak_bytes <= budget_bytes
        and nested.extra_seconds <= again.extra_seconds
    ):
        return nested
    return again


def plan_again(problem: Problem, budget_bytes: int) -> Nested | None:
    """The plan of least extra time within the budget that is found this way.

    Args:
        problem: The planning problem.
        budget_bytes: What the simulated peak may be, above rest.

    Returns:
        The plan; None if there is none within the budget.
    """
    starts = _starts(problem, budget_bytes)
    search = _Search(problem, budget_bytes)
    lowered = []
    for number, kept in enumerate(starts):
        search.allow(_STEPS // 2 // len(starts))
        plan = search.lowered(search.start(kept))
        if plan is not None:
            lowered.append((plan.nested.extra_seconds, number, plan))
    found = []
    for _, _, plan in sorted(lowered, key=lambda entry: entry[:2])[:_FILLED]:
        search.allow(_STEPS // 2 // _FILLED)
        found.append(search.filled(plan).nested)
    return min(found, key=lambda n: (n.extra_seconds, n.peak_bytes), default=None)


def _starts(problem: Problem, budget_bytes: int) -> list[frozenset[int]]:
    """The best plans of somewhat larger budgets, and those of the lowest peaks."""
    bounds = [int(scale * budget_bytes) for scale in _SCALES]
    front = explored(problem, bounds)
    best = [front.best(bound) for bound in reversed(bounds)]
    lowest = itertools.islice(front, _LOWEST)
    return list(
        dict.fromkeys(point.kept for point in (*best, *lowest) if point is not None)
    )


@dataclass(frozen=True)
class _Plan:
    """A plan and its simulated run."""

    nested: Nested
    timeline: Timeline


class _Search:
    """Questions about plans under one budget, as long as there are steps for them."""

    def __init__(self, problem: Problem, budget_bytes: int) -> None:
        self._problem = problem
        self._buffers = problem.buffers
        self._budget = budget_bytes
        self._left = 0

    def allow(self, steps: int) -> None:
        """Questions may take so many steps from now on."""
        self._left = steps

    def start(self, kept: frozenset[int]) -> _Plan:
        """The plan of a selection."""
        slots = copy_slots(self._buffers, kept | self._buffers.endless)
        reruns = copies_by_slot(slots)
        return self._asked(kept, {slot: tuple(run) for slot, run in reruns.items()})

    def lowered(self, plan: _Plan) -> _Plan | None:
        """Step 1 of the module's outline."""
        for _ in range(_MOST_CHANGES):
            if plan.nested.peak_bytes <= self._budget:
                return plan
            best: tuple[float, int] | None = None
            chosen = plan
            for order, other in enumerate(self._changed(plan)):
                fall = plan.nested.peak_bytes - max(
                    other.nested.peak_bytes, self._budget
                )
                cost = other.nested.extra_seconds - plan.nested.extra_seconds
                if fall > 0:
                    price = cost / fall if cost > 0 else cost * fall
                    if best is None or (price, order) < best:
                        best, chosen = (price, order), other
            if best is None:
                return None
            plan = chosen
        return None

    def filled(self, plan: _Plan) -> _Plan:
        """Step 2."""
        graph, forward = self._buffers.graph, self._buffers.forward
        runs = Counter(p for run in plan.nested.reruns.values() for p in run)
        for position in sorted(
            runs, key=lambda p: (-graph.ops[forward[p]].seconds * runs[p], p)
        ):
            made = frozenset(self._buffers.makes[forward[position]])
            slots = [s for s, run in plan.nested.reruns.items() if position in run]
            # All of its copies; then, if it has several, one of them.
            for without in (slots, *([slot] for slot in slots[1:])):
                if self._left <= 0:
                    return plan
                kept = plan.nested.kept | (made if without == slots else frozenset())
                if kept & made & self._problem.barred:
                    continue
                reruns = {
                    slot: tuple(p for p in run if p != position or slot not in without)
                    for slot, run in plan.nested.reruns.items()
                }
                other = self._asked(kept, reruns)
                if (
                    other.nested.peak_bytes <= self._budget
                    and other.nested.extra_seconds < plan.nested.extra_seconds
                ):
                    plan = other
                    break
        return plan

    def _changed(self, plan: _Plan) -> Iterable[_Plan]:
        """The plans in which one buffer does not wait at the peak."""
        run = _Run(self._problem, plan.timeline, plan.nested)
        for tensor in run.waiting[:_LOOKED_AT]:
            if self._left <= 0:
                return
            slot, positions = run.made_again(tensor)
            before = plan.nested.reruns.get(slot, ())
            reruns = {**plan.nested.reruns, slot: tuple(sorted({*before, *positions}))}
            yield self._asked(plan.nested.kept - {tensor}, reruns)

    def _asked(self, kept: frozenset[int], reruns: Reruns) -> _Plan:
        schedule = make_schedule(self._buffers, kept, reruns=reruns)
        timeline = simulate(self._buffers, schedule)
        self._left -= len(timeline.steps)
        seconds = seconds_again(self._buffers.graph, schedule)
        # A change may be sound by itself, and not after others.
        possible = reads_what_is_there(self._buffers, schedule)
        peak = timeline.peak_bytes if possible else NEVER
        return _Plan(Nested(kept, reruns, peak, seconds), timeline)


class _Run:
    """When tensors are read and made in a simulated run.

    Attributes:
        waiting: Those alive at the peak that nobody reads or makes there but that
            somebody reads later, largest first; only what may be made again.
    """

    def __init__(self, problem: Problem, timeline: Timeline, plan: Nested) -> None:
        self._problem = problem
        self._plan = plan
        buffers = self._buffers = problem.buffers
        self._slot_of: list[int] = []
        self._reads: dict[int, list[int]] = {}
        self._made: dict[int, list[int]] = {}
        # Forward steps stand in slot 0. To ask about their readers finds nothing.
        slot = 0
        for index, step in enumerate(timeline.steps):
            self._slot_of.append(slot)
            late = buffers.slot[step.op] >= 0
            slot += late
            for tensor in buffers.reads[step.op]:
                self._reads.setdefault(tensor, []).append(index)
            for tensor in buffers.makes[step.op]:
                self._made.setdefault(tensor, []).append(index)
        peak = self._peak = timeline.peak_step
        busy = {
            *buffers.reads[timeline.steps[peak].op],
            *buffers.makes[timeline.steps[peak].op],
        }
        # An original that was read in the backward pass stays: nobody may read one
        # whose copies are read by others.
        begun = len(buffers.forward)
        alive = dict.fromkeys(
            a.tensor
            for a in timeline.at_peak
            if a.copy or not any(begun <= n < peak for n in self._reads_of(a.tensor))
        )
        self.waiting = [
            tensor
            for tensor in alive
            if tensor not in busy
            and self._may_copy(tensor)
            and self._next_read(tensor, peak) is not None
        ]

    def made_again(self, tensor: int) -> tuple[int, list[int]]:
        """The slot of its next reader, and what to run there to have it."""
        reader = self._next_read(tensor, self._peak)
        assert reader is not None
        slot = self._slot_of[reader]
        run: set[int] = set()
        pending = [tensor]
        while pending:
            maker = self._buffers.graph.tensors[pending.pop()].op
            position = self._buffers.position[maker]
            if position in run:
                continue
            run.add(position)
            pending.extend(
                t
                for t in self._buffers.reads[maker]
                if self._may_copy(t) and not self._is_there(t, slot)
            )
        return slot, sorted(run)

    def _is_there(self, tensor: int, slot: int) -> bool:
        """Whether it is alive when the slot begins: made before, and read later."""
        first = bisect_left(self._slot_of, slot, lo=self._peak)
        made = self._made.get(tensor, [])
        again = next((n for n in made if n >= first), len(self._slot_of))
        return any(first <= n <= again for n in self._reads_of(tensor))

    def _next_read(self, tensor: int, after: int) -> int | None:
        """The next step of the backward pass that reads it before it is made anew."""
        made = next(
            (n for n in self._made.get(tensor, []) if n > after), len(self._slot_of)
        )
        return next((n for n in self._reads_of(tensor) if after < n < made), None)

    def _reads_of(self, tensor: int) -> list[int]:
        return self._reads.get(tensor, [])

    def _may_copy(self, tensor: int) -> bool:
        kept = self._problem.always_kept
        return tensor not in kept and self._buffers.may_copy(tensor)
