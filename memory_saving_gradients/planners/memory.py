"""The strategy `memory`: the smallest peak with every op recomputed at most once.

1. Dynamic programming over cuts (`cuts`) proposes selections for a ladder of bounds on
   the peak, the least feasible one first. Its local peaks are estimates, so
   the exact simulator scores each proposal.
2. `refine` climbs down from the best one: at the step that sets the peak it tries to
   keep or to drop each tensor that is alive there, and keeps the change that lowers the
   peak. What a segmentation cannot say (keep the narrow tensor inside a block, drop one
   of two skip connections) is found here.
3. `spend_slack` gives time back: whatever costs most to recompute is kept wherever that
   leaves the peak where it is.

If no selection beats the stock graph, everything is kept.
"""

from __future__ import annotations

from memory_saving_gradients.planners import cuts
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.refine import lower_peak, score, spend_slack
from memory_saving_gradients.sweep import Sweep

__all__ = ["plan_memory"]

_LADDER = 8
"""Bounds tried between the least feasible one and twice as much."""

_STARTS = 3
"""How many of the best proposals are refined."""


def plan_memory(problem: Problem) -> frozenset[int]:
    """Keeps what makes the simulated peak as low as this module can."""
    if not problem.candidates:
        return problem.everything
    starts = sorted(
        (score(Sweep(problem.buffers, kept)), order, kept)
        for order, kept in enumerate(_proposals(problem))
    )
    best: tuple[int, float, Sweep] | None = None
    for _, _, kept in starts[:_STARTS]:
        sweep = Sweep(problem.buffers, kept)
        lower_peak(problem, sweep)
        spend_slack(problem, sweep)
        entry = (score(sweep)[0], sweep.extra_seconds, sweep)
        if best is None or entry[:2] < best[:2]:
            best = entry
    if best is None or best[2].peak_bytes >= problem.stock_peak_bytes:
        return problem.everything
    return frozenset(best[2].kept)


def _proposals(problem: Problem) -> list[frozenset[int]]:
    """Different selections from the dynamic programme, tightest bound first."""
    found: dict[frozenset[int], None] = {}
    for table in cuts.cut_tables(problem):
        low, high = 0, int(table.local.max()) + int(table.kept.max()) + 1
        while high - low > max(high // 500, 1):
            middle = (low + high) // 2
            if cuts.least_kept(table, middle) is None:
                low = middle
            else:
                high = middle
        for rung in range(_LADDER):
            bound = high * (_LADDER + rung) // _LADDER
            chosen = cuts.least_kept(table, bound)
            if chosen is not None:
                places = [int(table.cuts[index]) for index in chosen]
                found[cuts.selection_at(problem, places)] = None
    return list(found)
