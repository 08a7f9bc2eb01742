"""How far planners are from the optimum on small graphs: the tables of that."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

import small_graphs
from memory_saving_gradients.planners.optimal import plan_optimal
from planning import Row, one_decimal, rows_of
from published_graphs import Published, problem_of, training_graph
from tables import Column, say, table

__all__ = ["bench_optimal", "shares"]

AS_GOOD = 1.05
"""A plan is as good as the optimum if it costs at most this much of it."""


def bench_optimal(options: argparse.Namespace) -> list[Row]:
    """Chains one by one, random graphs as shares."""
    rows = []
    for length in options.chains:
        rows += against_optimum(small_graphs.chain(length), options)
    if rows:
        print("\nExtra % of the forward work on uniform chains:\n")
        print(table(optimum_columns(options.planners), rows))
    random_rows = []
    for seed in range(options.random):
        published = small_graphs.random_dag(seed, options.ops)
        random_rows += against_optimum(published, options)
    if random_rows:
        print(f"\n{options.random} random graphs of {options.ops} ops and a loss:\n")
        print(table(SHARE_COLUMNS, shares(random_rows, options.planners)))
    return rows + random_rows


def against_optimum(published: Published, options: argparse.Namespace) -> list[Row]:
    """For each budget the extra work of all planners, the optimum and the bound."""
    say(published.name)
    planned = rows_of(published, options.planners, options.budgets)
    problem = problem_of(training_graph(published))
    largest = max(problem.buffers.size)
    rows = []
    for budget in options.budgets:
        budget_bytes = problem.stock_peak_bytes * budget // 100
        row: Row = {"graph": published.name, "budget": budget, "exact": {}}
        row["planners"] = {
            entry["planner"]: entry["extra_percent"][budget] for entry in planned
        }
        for runs in ("once", "often"):
            begun = time.perf_counter()
            found = plan_optimal(
                problem, budget_bytes, runs=runs, time_limit_seconds=options.seconds
            )
            row["exact"][runs] = {
                "status": found.status,
                "extra_percent": percent(found.extra_seconds, published),
                "bound_percent": percent(found.lower_bound_seconds, published),
                "seconds": time.perf_counter() - begun,
            }
        # Whether a plan would still be there with one tensor less room.
        roomy = plan_optimal(
            problem,
            max(budget_bytes - largest, 1),
            time_limit_seconds=options.seconds,
        )
        row["roomy"] = roomy.kept is not None
        rows.append(row)
    return rows


def percent(seconds: float, published: Published) -> float | None:
    """Work as a part of the forward pass; None where there is no plan."""
    if seconds == float("inf"):
        return None
    return 100 * seconds / published.forward_seconds


def exact_text(entry: Row) -> str | None:
    """An optimum, or the two ends of what is known."""
    if entry["status"] == "infeasible":
        return None
    low, high = one_decimal(entry["bound_percent"]), one_decimal(entry["extra_percent"])
    return low if entry["status"] == "optimal" else f"{low} to {high or '?'}"


def optimum_columns(planners: Iterable[str]) -> list[Column]:
    """The columns of the table of chains."""

    def of(planner: str) -> Column:
        return planner, lambda row: one_decimal(row["planners"].get(planner))

    def exact(runs: str) -> Column:
        return f"exact, {runs}", lambda row: exact_text(row["exact"][runs])

    return [
        ("graph", lambda row: row["graph"]),
        ("budget", lambda row: f"{row['budget']} %"),
        *(of(planner) for planner in planners),
        exact("once"),
        exact("often"),
        (
            "s",
            lambda row: one_decimal(sum(e["seconds"] for e in row["exact"].values())),
        ),
    ]


SHARE_COLUMNS: list[Column] = [
    ("planner", lambda row: row["planner"]),
    ("budgets with a proven optimum", lambda row: row["proven"]),
    ("within 5 %", lambda row: row["within"]),
    ("worst, extra % of forward over optimum", lambda row: one_decimal(row["worst"])),
    ("no plan where there is one", lambda row: row["none"]),
    ("... with room for a tensor more", lambda row: row["none_roomy"]),
]


def shares(rows: Iterable[Row], planners: Iterable[str]) -> list[Row]:
    """How often each planner is as good as the optimum of plans that run ops once."""
    proven = [row for row in rows if row["exact"]["once"]["status"] == "optimal"]
    found = []
    for planner in planners:
        pairs = [
            (row["planners"][planner], row["exact"]["once"]["extra_percent"], row)
            for row in proven
            if planner in row["planners"]
        ]
        if not pairs:
            continue
        planned = [(ours, best) for ours, best, _ in pairs if ours is not None]
        within = sum(ours <= best * AS_GOOD + 1e-9 for ours, best in planned)
        unsolved = [row for ours, _, row in pairs if ours is None]
        found.append(
            {
                "planner": planner,
                "proven": len(pairs),
                "within": f"{100 * within / len(pairs):.0f} %",
                "worst": max((ours - best for ours, best in planned), default=None),
                "none": len(unsolved),
                "none_roomy": sum(row["roomy"] for row in unsolved),
            }
        )
    return found


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
