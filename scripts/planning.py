"""Asks planners for plans at budgets: this library's, and those it is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tables import say

if TYPE_CHECKING:
    from baselines import Scored
    from memory_saving_gradients.planners import Problem
    from published_graphs import Published

__all__ = ["PLANNERS", "Ask", "Row", "asked", "one_decimal", "rows_of"]

Row = dict[str, Any]
Ask = Callable[[int], "Scored | None"]

PLANNERS = ("uniform", "chen", "kusumoto", "budget")
"""All that can be asked, this library's own last. Where no plan within a budget runs
every op at most once more, its own has one that runs some more often, if it can."""


def asked(problem: Problem, planner: str) -> tuple[Ask, float] | None:
    """How to ask a planner for a budget, and the seconds spent beforehand; None if
    this version of the library has no such planner."""
    import baselines
    from memory_saving_gradients.errors import MemorySavingGradientsError

    if planner != "budget":
        begun = time.process_time()
        plans = baselines.scored(problem, baselines.BASELINES[planner](problem))
        spent = time.process_time() - begun
        return lambda budget_bytes: baselines.best(plans, budget_bytes), spent
    try:
        from memory_saving_gradients.planners.again import plan_below_floor
        from memory_saving_gradients.planners.budget import plan_budget
    except ImportError:
        say("this version of the library has no planner `budget`")
        return None

    def plan(budget_bytes: int) -> Scored | None:
        try:
            kept = plan_budget(problem, budget_bytes)
        except MemorySavingGradientsError:
            return None
        # Beside it stands the untouched graph.
        plans = baselines.scored(problem, [kept])
        found = baselines.best(plans, budget_bytes)
        if found is not None:
            return found
        # As the library does: some ops are run several times.
        floor_bytes = min(plan.peak_bytes for plan in plans)
        below = plan_below_floor(problem, budget_bytes, floor_bytes)
        several = baselines.Scored(below.peak_bytes, below.extra_seconds, below.kept)
        return baselines.best([several], budget_bytes)

    return plan, 0.0


def rows_of(
    published: Published, planners: Iterable[str], budgets: Iterable[int]
) -> list[Row]:
    """For each planner a row: extra % of the forward work at each budget."""
    from published_graphs import problem_of, training_graph

    rows = []
    for planner in planners:
        # Anew, so that no planner's time is spent by another.
        problem = problem_of(training_graph(published))
        peak = problem.stock_peak_bytes
        way = asked(problem, planner)
        if way is None:
            continue
        ask, before = way
        row: Row = {
            "graph": published.name,
            "planner": planner,
            "stock_peak_bytes": peak,
            "seconds_before": before,
            "extra_percent": {},
            "peak_percent": {},
            "seconds": {},
        }
        for budget in budgets:
            begun = time.process_time()
            plan = ask(peak * budget // 100)
            row["seconds"][budget] = time.process_time() - begun
            extra = None
            if plan is not None:
                extra = 100 * plan.extra_seconds / published.forward_seconds
                row["peak_percent"][budget] = 100 * plan.peak_bytes / peak
            row["extra_percent"][budget] = extra
        rows.append(row)
    return rows


def one_decimal(value: float | None) -> str | None:
    """A figure for a table."""
    return None if value is None else f"{value:.1f}"


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
