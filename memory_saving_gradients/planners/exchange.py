"""Under a budget: repairing a selection, filling it up, exchanging tensors.

All moves change one tensor at a time through a `Sweep`, so that every figure is that of
the exact simulator:

* `repair` brings the peak under the budget, at the least seconds for each byte;
* `refill` keeps what is dearest to redo, for each byte, wherever it fits;
* `exchange` keeps what does not fit, repairs, and takes all back unless time was won.

All are bounded by a number of simulated steps, never by the clock.
"""

from __future__ import annotations

from collections.abc import Set

from memory_saving_gradients.planners.front import Front
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.refine import (
    dearest_first,
    fill_up,
    peak_and_near,
)
from memory_saving_gradients.sweep import Change, Sweep

__all__ = ["Search"]

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
    """

    def __init__(self, problem: Problem, budget_bytes: int, front: Front) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.front = front
        self._candidates = frozenset(problem.candidates)

    def repair(
        self, sweep: Sweep, frozen: Set[int] = frozenset(), most: int = _MOST_REPAIRS
    ) -> list[Change] | None:
        """Changes tensors that are alive at the peak until it is within the budget.

        Args:
            sweep: The selection, changed in place.
            frozen: Tensors not to touch.
            most: At most so many changes.

        Returns:
            The changes, in order; None if it cannot be done: then nothing is
            changed.
        """
        changed: list[Change] = []
        height = peak_and_near(sweep.profile(), _NEAR)
        while height[0] > self.budget_bytes:
            move = None
            if len(changed) < most:
                move = self._cheapest_move(sweep, frozen, height)
            if move is None:
                for change in reversed(changed):
                    sweep.take_back(change)
                return None
            changed.append(sweep.toggle(move))
            height = peak_and_near(sweep.profile(), _NEAR)
            self.front.see(sweep)
        return changed

    def refill(self, sweep: Sweep, most_work: int, rounds: int | None = None) -> None:
        """Keeps whatever fits, the dearest for its bytes first (`refine.fill_up`)."""
        fill_up(
            self.problem,
            sweep,
            lambda: sweep.peak_bytes <= self.budget_bytes,
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
                if sweep.extra_seconds < before:
                    changed = self.repair(sweep, {tensor}, _MOST_IN_EXCHANGE)
                    if changed is not None:
                        # By more than rounding, lest it go round in circles.
                        if sweep.extra_seconds < before * (1 - 1e-9):
                            improved = True
                            self.front.see(sweep)
                            continue
                        for other in reversed(changed):
                            sweep.take_back(other)
                sweep.take_back(change)

    def _cheapest_move(
        self, sweep: Sweep, frozen: Set[int], height: tuple[int, int]
    ) -> int | None:
        """The change at the peak that costs least for each byte of its fall."""
        excess = height[0] - self.budget_bytes
        best: tuple[float, int] | None = None
        for tensor in self._at_the_peak(sweep, frozen, excess):
            before = sweep.extra_seconds
            change = sweep.toggle(tensor)
            new, cost = (
                peak_and_near(sweep.profile(), _NEAR),
                sweep.extra_seconds - before,
            )
            sweep.take_back(change)
            if new < height:
                # What lowers one of several peaks counts a little.
                fall = min(height[0] - new[0], excess) + 1e-3 * excess
                price = cost / fall if cost > 0 else cost * fall
                if best is None or (price, tensor) < best:
                    best = price, tensor
        return None if best is None else best[1]

    def _at_the_peak(
        self, sweep: Sweep, frozen: Set[int], excess: int
    ) -> tuple[int, ...]:
        """What might be let go (its original is alive at the peak), and what might be
        kept lest its copy be alive there; a few of each, the most promising."""
        spared, size = self.problem.seconds_spared, self.problem.buffers.size
        originals, copies = sweep.alive(int(sweep.profile().argmax()))
        open_to_change = self._candidates - frozen
        held = sorted(
            open_to_change.intersection(originals) & sweep.kept,
            key=lambda t: (spared[t] / min(size[t], excess), t),
        )
        redone = sorted(
            open_to_change.intersection(copies) - sweep.kept,
            key=lambda t: (-spared[t] / size[t], t),
        )
        return (*held[:_LOOKED_AT], *redone[:_LOOKED_AT])
