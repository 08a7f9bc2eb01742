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
4. Masks of random draws (`settled`) are kept as far as the peak rises by little.
5. `save_time` exchanges tensors: one that is dear to recompute is kept for others that
   are cheap, at the same peak.

If no selection beats the stock graph, the same is tried once more for callers who hold
all gradients, and then everything is kept.
"""

from __future__ import annotations

from memory_saving_gradients.planners import cuts
from memory_saving_gradients.planners.exchange import save_time
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.refine import (
    CONSUMED,
    lower_peak,
    score,
    spend_slack,
)
from memory_saving_gradients.planners.settled import masks_of_dear_draws
from memory_saving_gradients.sweep import Sweep

__all__ = ["finished", "lowest_peak", "plan_memory"]

_LADDER = 8
"""Bounds tried between the least feasible one and twice as much."""

_SHORT_LADDER = 3
"""The same where scoring all of them would take longer than building the gradient."""

_RISE_FOR_MASKS = 1.15
"""How much the peak may rise to spare random draws. Of a transformer of eight layers
0.118 of stock's peak at 29 % more work become 0.135 at 26 %, and with all of its masks
kept it would be 0.155 at 22 %."""

_STARTS = 8
"""At most so many of the best proposals are refined."""


def plan_memory(problem: Problem) -> frozenset[int]:
    """Makes the peak as low as this module can, then keeps masks of random draws as far
    as the peak rises by little, then gives back time."""
    return finished(problem, lowest_peak(problem))


def finished(problem: Problem, kept: frozenset[int]) -> frozenset[int]:
    """Steps 4 and 5 of the module's outline, from what `lowest_peak` keeps."""
    if kept == problem.everything:
        return kept
    sweep = Sweep(problem.buffers, kept)
    _keep_masks(problem, sweep)
    if sweep.peak_bytes >= problem.stock_peak_bytes:
        sweep = Sweep(problem.buffers, kept)
    save_time(problem, sweep, sweep.work + problem.effort // 2)
    return frozenset(sweep.kept)


def _keep_masks(problem: Problem, sweep: Sweep) -> None:
    """Step 4 of the module's outline."""
    held = _RISE_FOR_MASKS * sweep.peak_bytes
    consumed = _RISE_FOR_MASKS * sweep.peak_if_consumed
    for mask in sorted(masks_of_dear_draws(problem) - problem.barred - sweep.kept):
        change = sweep.toggle(mask)
        if sweep.peak_bytes > held or sweep.peak_if_consumed > consumed:
            sweep.take_back(change)


def lowest_peak(problem: Problem) -> frozenset[int]:
    """Keeps what makes the simulated peak as low as this module can."""
    if not problem.candidates:
        return problem.everything
    proposals = _proposals(problem)
    found = [_refined(problem, proposals, CONSUMED)]
    if found[0].peak_bytes >= problem.stock_peak_bytes:
        found.append(_refined(problem, proposals, 0))
    lower = [s for s in found if s.peak_bytes < problem.stock_peak_bytes]
    if found[0].peak_bytes == problem.stock_peak_bytes:
        # Finished gradients dominate: their peak stays, but that of a caller who
        # consumes them falls, and by more than the other selection has to offer.
        rival = lower[0] if lower else Sweep(problem.buffers, problem.everything)
        if 4 * score(found[0])[0] < 3 * score(rival)[0]:
            return frozenset(found[0].kept)
    return frozenset(lower[0].kept) if lower else problem.everything


def _refined(problem: Problem, proposals: list[frozenset[int]], weight: int) -> Sweep:
    """The best of the proposals after refinement."""
    starts = sorted(
        (score(Sweep(problem.buffers, kept), weight), order, kept)
        for order, kept in enumerate(proposals)
    )
    best: tuple[int, float, int, Sweep] | None = None
    effort = problem.effort
    for _, order, kept in starts[:_STARTS]:
        sweep = Sweep(problem.buffers, kept)
        begun = sweep.work
        lower_peak(problem, sweep, begun + effort // 2, weight)
        spend_slack(problem, sweep, sweep.work + effort // 2)
        entry = (score(sweep, weight)[0], sweep.extra_seconds, order, sweep)
        if best is None or entry < best:
            best = entry
        effort -= sweep.work - begun
        if effort <= 0:
            break
    assert best is not None  # the dynamic programme always proposes something
    return best[-1]


def _proposals(problem: Problem) -> list[frozenset[int]]:
    """Different selections from the dynamic programme, tightest bound first.

    Where cuts serve badly (few ops, wide boundaries), refinement finds more from the
    two ends: from all that may be kept and from nothing.
    """
    found: dict[frozenset[int], None] = {}
    rungs = _SHORT_LADDER if problem.is_large else _LADDER
    for table in cuts.cut_tables(problem):
        low, high = 0, int(table.local.max()) + int(table.kept.max()) + 1
        while high - low > max(high // 500, 1):
            middle = (low + high) // 2
            if cuts.least_kept(table, middle) is None:
                low = middle
            else:
                high = middle
        for rung in range(rungs):
            bound = high * (rungs + rung) // rungs
            chosen = cuts.least_kept(table, bound)
            if chosen is not None:
                places = [int(table.cuts[index]) for index in chosen]
                found[cuts.selection_at(problem, places)] = None
    ends = () if problem.is_large else (problem.everything, problem.always_kept)
    return list(dict.fromkeys((*found, *ends)))
