#!/usr/bin/env python3
"""Compares planners on plain data: extra work at budgets, nothing trained or measured.

    python scripts/bench_planners.py FOLDER              # published graphs
    python scripts/bench_planners.py FOLDER cg_vgg19     # some of them
    python scripts/bench_planners.py --optimal           # distance to the optimum

FOLDER holds published training graphs as text files: VGG19, ResNet50, ResNet152,
DenseNet161, GoogLeNet, U-Net and PSPNet, from the public repository
https://github.com/pfnet-research/recompute of Kusumoto et al. 2019 (arXiv 1905.11722).

A budget is a part of the peak of the untouched graph. What a plan costs is the work of
all that is recomputed as a part of the forward pass, where a convolution counts 10 and
everything else 1. The plans of all planners are laid out and simulated by the library
itself, so that they are judged on equal terms:

  uniform   equal segments, the best number of them
  chen      Chen et al. 2016 (arXiv 1604.06174), greedy segments, the best of a sweep
  kusumoto  the approximate dynamic programme over lower sets, the best of a sweep
  budget    this library's planner

Seconds are those of the processor: for all that is done beforehand, and for the budget
that took longest.

With --optimal the planners are held against the exact one on uniform chains and on
random graphs: the plan of least extra work of all that run an op again at most once
(`once`), and what any plan that runs ops more often must at least pay (`often`). A time
limit may leave a gap; then both ends of it are shown. SciPy is needed (extra
[optimal]).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, count, counts, names_of, positive
from planning import PLANNERS, Row, one_decimal, rows_of
from tables import Column, say, table

BUDGETS = (90, 80, 70, 60, 50, 40, 30)
CHAINS = (10, 20, 30)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="FOLDER", help="published graphs")
    add("graphs", nargs="*", metavar="GRAPH", help="some of them, by file name (all)")
    add(
        "--planners",
        type=names_of(PLANNERS),
        default=[*PLANNERS],
        metavar="A,B",
        help=f"some of {','.join(PLANNERS)}",
    )
    add(
        "--budgets",
        type=counts,
        default=[*BUDGETS],
        metavar="N,N",
        help=f"in %% of the untouched peak ({','.join(map(str, BUDGETS))})",
    )
    add(
        "--floors",
        type=Path,
        metavar="FILE",
        help="figures to compare with, as JSON: "
        '{"cg_vgg19": {"90": 5.8, "50": null}, ...}',
    )
    add("--optimal", action="store_true", help="compare with the exact planner")
    add("--chains", type=counts, default=[*CHAINS], metavar="N,N", help="(10,20,30)")
    add("--random", type=count(0), default=40, metavar="N", help="random graphs (40)")
    add("--ops", type=count(3), default=16, metavar="N", help="ops of each (16)")
    add(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="S",
        help="time limit of the exact planner for each budget (60)",
    )
    add("--out", "--json", type=Path, metavar="FILE", help="write all figures as JSON")
    options = parser.parse_args(arguments)
    if options.folder is None and not options.optimal:
        parser.error("pass a FOLDER of published graphs, --optimal, or both")
    return options


# ---- the published graphs


def columns_for(budgets: Iterable[int]) -> list[Column]:
    """The columns of a table of planners."""

    def at(budget: int) -> Column:
        return (
            f"{budget} %",
            lambda row: one_decimal(row["extra_percent"].get(budget)),
        )

    return [
        ("graph", lambda row: row["graph"]),
        ("planner", lambda row: row["planner"]),
        *(at(budget) for budget in budgets),
        ("s before", lambda row: one_decimal(row.get("seconds_before"))),
        (
            "s a budget",
            lambda row: one_decimal(max(row["seconds"].values(), default=None)),
        ),
    ]


def slowest(row: Row) -> float | None:
    """The seconds of the budget that took longest."""
    return max(row["seconds"].values(), default=None)


def floors_row(name: str, floors: dict[str, dict[str, float | None]]) -> list[Row]:
    """The figures to compare with, as a row of the table, if there are any."""
    if name not in floors:
        return []
    extra = {int(budget): value for budget, value in floors[name].items()}
    return [
        {"graph": name, "planner": "(floor)", "extra_percent": extra, "seconds": {}}
    ]


def misses(rows: Iterable[Row]) -> list[str]:
    """Where this library's planner is behind another row of the same graph.

    Floors are compared at the precision of their single decimal.
    """
    rows = list(rows)
    found = []
    for ours in (row for row in rows if row["planner"] == "budget"):
        for other in rows:
            if other["graph"] != ours["graph"] or other is ours:
                continue
            for budget, extra in ours["extra_percent"].items():
                theirs = other["extra_percent"].get(budget)
                if theirs is None:
                    continue
                slack = 0.05 if other["planner"] == "(floor)" else 1e-9
                if extra is None or extra > theirs + slack:
                    found.append(
                        f"{ours['graph']} at {budget} %: {one_decimal(extra) or 'none'}"
                        f", {other['planner']} {one_decimal(theirs)}"
                    )
    return found


def bench_published(options: argparse.Namespace) -> list[Row]:
    """The table of the published graphs."""
    import published_graphs

    paths = published_graphs.paths_in(options.folder, options.graphs)
    floors = json.loads(options.floors.read_text("utf-8")) if options.floors else {}
    rows: list[Row] = []
    for path in paths:
        say(path.stem)
        rows += floors_row(path.stem, floors)
        published = published_graphs.parse(path)
        rows += rows_of(published, options.planners, options.budgets)
    print("Extra % of the forward work at a budget in % of the untouched peak:\n")
    print(table(columns_for(options.budgets), rows))
    if "budget" in {row["planner"] for row in rows}:
        behind = misses(rows)
        print(f"\n`budget` is behind at {len(behind)} places" + ":" * bool(behind))
        print("\n".join(f"  {line}" for line in behind))
    return rows


# ---- the program


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    options = parse(arguments)
    rows: list[Row] = []
    if options.folder is not None:
        rows += bench_published(options)
    if options.optimal:
        from optimum_tables import bench_optimal

        rows += bench_optimal(options)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1), "utf-8")
        say(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
