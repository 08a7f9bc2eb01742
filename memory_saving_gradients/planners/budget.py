"""Least extra time with the peak under a budget.

1. `TradeOff` (minimum cuts) gives a ladder of selections from nothing kept to all.
2. `Segments` (dynamic programming over cuts and these modes) combines them into
   selections for bounds around the budget.
3. `Search` repairs each with the exact simulator, fills it up, and exchanges tensors in
   the best ones.
4. What was best of all that was seen is the plan (`Front`).

If nothing fits, the search begins once more from the lowest peak that can be found.
Every op is recomputed at most once.

More memory must never cost more time. On tiny graphs all selections are tried, on small
ones all budgets of a fixed ladder are searched and the best of everything is taken, so
that this holds exactly; on larger ones it holds as far as the search is good.

References: Kusumoto et al. 2019 (arXiv 1905.11722) for the dynamic programme; Jain et
al. 2020 (arXiv 1910.02653) for the problem.
"""

from __future__ import annotations

from collections.abc import Sequence

from memory_saving_gradients.planners.exchange import Search
from memory_saving_gradients.planners.front import Front
from memory_saving_gradients.planners.memory import finished, lowest_peak
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.refine import lower_peak
from memory_saving_gradients.planners.segments import Segments
from memory_saving_gradients.planners.trade_off import TradeOff
from memory_saving_gradients.sweep import Sweep

__all__ = ["everything_tried", "explored", "ladder", "plan_budget"]

_RUNGS = 10
"""Selections on the ladder between nothing and everything kept, ..."""

_FEW_RUNGS = 4
"""... and on that of large graphs."""

_SCALES = (1.02, 0.98, 1.07, 0.94, 1.13, 1.25)
"""Bounds for the dynamic programme, as fractions of the budget: its local peaks are
estimates, mostly too high."""

_WAYS = 3
"""Selections taken for each bound."""

_NEAREST = 3
"""Rungs of the ladder from which a search starts: those nearest to the budget."""

_STEPS = 600_000
"""What a search may take (see `Sweep.work`), ..."""

_STEPS_AN_OP = 30
"""... and so much more for each op."""

_TINY = 10
"""Up to this many candidates all selections are tried."""

_SMALL = 24
"""Up to this many candidates all budgets are searched."""

_LEVELS = 20
"""Budgets on the ladder, as fractions of the stock peak."""


def plan_budget(problem: Problem, budget_bytes: int) -> frozenset[int]:
    """Keeps what makes the extra time least with the peak within `budget_bytes`.

    Args:
        problem: The planning problem.
        budget_bytes: What the simulated peak may be: activations, all gradients and
            workspace, above what rests.

    Returns:
        Ids of the tensors that are kept. If no selection that was found fits, that of
        the lowest peak.
    """
    if budget_bytes >= problem.stock_peak_bytes:
        return problem.everything
    count = len(problem.candidates)
    if count <= _TINY:
        front = everything_tried(problem)
    else:
        front = explored(
            problem, ladder(problem) if count <= _SMALL else (budget_bytes,)
        )
    best = front.best(budget_bytes)
    if best is None:
        best = next(iter(front))
    return best.kept


def everything_tried(problem: Problem) -> Front:
    """The front of all selections, each one toggle from the one before (Gray code)."""
    front = Front()
    sweep = Sweep(problem.buffers, problem.everything)
    front.see(sweep)
    for number in range(1, 1 << len(problem.candidates)):
        lowest_bit = (number & -number).bit_length() - 1
        sweep.toggle(problem.candidates[lowest_bit])
        front.see(sweep)
    return front


def ladder(problem: Problem, levels: int = _LEVELS) -> list[int]:
    """Budgets from little to nearly all of the stock peak, evenly spaced."""
    return [problem.stock_peak_bytes * n // levels for n in range(1, levels)]


def explored(problem: Problem, budgets: Sequence[int]) -> Front:
    """All that searches under these budgets have found.

    Args:
        problem: The planning problem.
        budgets: Bytes, ascending.

    Returns:
        The front, with the stock graph on it and, if some budget is below all that was
        found otherwise, the plan of `memory`.
    """
    front = Front()
    modes = _modes(problem, front)
    if not problem.candidates:
        return front
    segments = Segments(problem, list(modes))
    lowest: list[frozenset[int]] = []
    for budget in reversed(budgets):
        if budget >= problem.stock_peak_bytes:
            continue
        if not lowest:
            starts = _starts(segments, modes, budget)
            _search(problem, budget, front, starts)
        if front.best(budget) is None:
            lowest = lowest or _lowest(problem, front, modes)
            _search(problem, budget, front, lowest)
            if front.best(budget) is None:
                break
    return front


def _lowest(
    problem: Problem, front: Front, modes: dict[frozenset[int], int]
) -> list[frozenset[int]]:
    """The lowest peaks that can be found: where to begin if nothing fits. (`memory`
    thinks of those, too, who consume gradients at once.)"""
    found = []
    lowest = lowest_peak(problem)
    # What `memory` makes of it may lie lower still.
    front.see(Sweep(problem.buffers, finished(problem, lowest)))
    for kept in (lowest, min(modes, key=modes.__getitem__)):
        sweep = Sweep(problem.buffers, kept)
        front.see(sweep)
        lower_peak(problem, sweep, sweep.work + problem.effort // 2, weight=0)
        front.see(sweep)
        found.append(frozenset(sweep.kept))
    return found


def _modes(problem: Problem, front: Front) -> dict[frozenset[int], int]:
    """The ladder between nothing and everything kept, each rung with its peak."""
    rungs = TradeOff(problem).ladder(_FEW_RUNGS if problem.is_large else _RUNGS)
    modes = dict.fromkeys((problem.always_kept, *rungs, problem.everything), 0)
    for kept in modes:
        sweep = Sweep(problem.buffers, kept)
        front.see(sweep)
        modes[kept] = sweep.peak_bytes
    return modes


def _starts(
    segments: Segments, modes: dict[frozenset[int], int], budget: int
) -> list[frozenset[int]]:
    """Different selections to start from, the most promising first."""
    found: dict[frozenset[int], None] = {}
    for scale in _SCALES:
        found.update(dict.fromkeys(segments.selections(int(scale * budget), _WAYS)))
    near = sorted(modes, key=lambda kept: abs(modes[kept] - budget))
    return list(found | dict.fromkeys(near[:_NEAREST]))


def _search(
    problem: Problem, budget: int, front: Front, starts: list[frozenset[int]]
) -> None:
    """Repairs, fills up and improves, until its steps are spent."""
    search = Search(problem, budget, front)
    left = _STEPS + _STEPS_AN_OP * len(problem.buffers.graph.ops)
    found: list[tuple[float, int, Sweep]] = []
    for order, kept in enumerate(starts):
        if left <= 0 and found:
            break
        sweep = Sweep(problem.buffers, kept)
        if 2 * sweep.peak_bytes <= 3 * budget and search.repair(sweep) is not None:
            search.refill(sweep, sweep.work + max(left, 0) // 8, rounds=1)
            found.append((sweep.extra_seconds, order, sweep))
        left -= sweep.work
    improved: set[frozenset[int]] = set()
    for _, _, sweep in sorted(found, key=lambda f: f[:2]):
        if left <= 0:
            break
        kept = frozenset(sweep.kept)
        if kept in improved:
            continue
        improved.add(kept)
        begun = sweep.work
        search.exchange(sweep, begun + left)
        search.refill(sweep, sweep.work + max(left, 0) // 8)
        left -= sweep.work - begun
