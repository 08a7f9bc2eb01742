#!/usr/bin/env python3
"""Measures the first step of Keras `fit`, which traces, plans and compiles.

Each figure is of a process of its own, which imports everything, builds the model,
compiles it with Adam, and then calls `fit` for one step; stock and the others in turn,
so that a machine that becomes slower does so for all of them.

  first step  seconds of that call: median (least-most)
  of stock    the median over stock's; the goal is 1.5 at most
  planning    seconds of it that planning took
  next step   seconds of a second call of `fit` for one step: what is left when
              everything has been traced

Examples:
  bench_first_step.py                                 everything, in about half an hour
  bench_first_step.py mlp --ways memory --jit on      one model, compiled by XLA
  bench_first_step.py --rounds 3 --out first.json     figures to a file
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, count, figures_of_models, names_of, refuse_unknown
from tables import markdown, say, table

MODEL_NAMES = ("mlp", "transformer", "resnet62")
WAYS = ("memory", "speed")
JIT = ("on", "off")
GOAL = 1.5
Row = dict[str, Any]
Case = tuple[str, str, str]
"""Model, way, and whether XLA compiles."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    known = ", ".join(MODEL_NAMES)
    add("models", nargs="*", metavar="MODEL", help=f"some of: {known} (all)")
    add(
        "--ways",
        type=names_of(WAYS),
        default=[*WAYS],
        metavar="A,B",
        help="of `memory_saving`, to compare with stock (memory,speed)",
    )
    add(
        "--jit",
        type=names_of(JIT),
        default=[*JIT],
        metavar="A,B",
        help="whether XLA compiles (on,off)",
    )
    add("--rounds", type=count(), default=5, metavar="N", help="processes of each (5)")
    figures_of_models(parser)
    # One process of the table: prints its seconds as JSON.
    add("--worker", choices=("stock", *WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    refuse_unknown(parser, options.models, MODEL_NAMES, "model")
    return options


# ---- one process


def worker(options: argparse.Namespace) -> Row:
    """The first and the second step of one model in one way, in seconds."""
    import keras

    import memory_saving_gradients as msg
    from models import MODELS

    (name,), (jit,) = options.models, options.jit
    workload = MODELS[name](options.scale)
    x, *labels = (tensor.numpy() for tensor in workload.batch)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model: Any = workload.model
    model.compile("adam", entropy if labels else "mse", jit_compile=jit == "on")
    if options.worker != "stock":
        msg.memory_saving(model, options.worker)

    def step() -> float:
        started = time.perf_counter()
        model.fit(x, labels[0] if labels else x, batch_size=len(x), verbose=0)
        return time.perf_counter() - started

    row = {"model": workload.name, "first_seconds": step(), "next_seconds": step()}
    plan = msg.last_plan()
    if plan is not None:
        row |= {"planning_seconds": plan.planning_seconds, "ops": len(plan.recomputed)}
    return row


def measured(case: Case, scale: float) -> Row:
    """What a fresh process says."""
    model, way, jit = case
    command = [sys.executable, __file__, model, "--worker", way, "--jit", jit]
    done = subprocess.run(
        [*command, "--scale", str(scale)], capture_output=True, text=True
    )
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(case)} ended with {done.returncode}: {words}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    say(f"{model} {way}, XLA {jit}: {row['first_seconds']:.2f} s")
    return row


# ---- all of them


def bench(options: argparse.Namespace) -> list[Row]:
    """The rows: of each model, with XLA and without, stock first."""
    names = [name for name in MODEL_NAMES if name in (options.models or MODEL_NAMES)]
    cases = [
        (name, way, jit)
        for name in names
        for jit in options.jit
        for way in ("stock", *options.ways)
    ]
    taken: dict[Case, list[Row]] = {case: [] for case in cases}
    for number in range(1, options.rounds + 1):
        say(f"round {number} of {options.rounds}")
        for case, found in taken.items():
            found.append(measured(case, options.scale))
    return [summary(case, found, taken) for case, found in taken.items()]


def summary(case: Case, found: list[Row], taken: dict[Case, list[Row]]) -> Row:
    """One row out of the figures of all rounds."""
    model, way, jit = case

    def median(rows: list[Row], key: str) -> float:
        return statistics.median(row[key] for row in rows)

    firsts = [row["first_seconds"] for row in found]
    row = {
        "model": found[0]["model"],
        "way": way,
        "jit": jit == "on",
        "first_seconds": firsts,
        "first_median": median(found, "first_seconds"),
        "next_median": median(found, "next_seconds"),
    }
    if way != "stock":
        stock = median(taken[model, "stock", jit], "first_seconds")
        row["of_stock"] = row["first_median"] / stock
    if "planning_seconds" in found[0]:
        row["planning_median"] = median(found, "planning_seconds")
    return row


def _first(row: Row) -> str:
    least, most = min(row["first_seconds"]), max(row["first_seconds"])
    return f"{row['first_median']:.2f} ({least:.2f}-{most:.2f})"


def _seconds(key: str, digits: int) -> Any:
    return lambda row: f"{row[key]:.{digits}f}" if key in row else None


COLUMNS = [
    ("model", lambda row: row["model"]),
    ("way", lambda row: row["way"]),
    ("XLA", lambda row: "on" if row["jit"] else "off"),
    ("first step s", _first),
    ("of stock", _seconds("of_stock", 2)),
    ("planning s", _seconds("planning_median", 2)),
    ("next step s", _seconds("next_median", 3)),
]


def main() -> int:
    options = parse()
    if options.worker:
        print(json.dumps(worker(options)))
        return 0
    started = time.monotonic()
    try:
        rows = bench(options)
    except RuntimeError as error:
        print(f"bench_first_step.py: error: {error}", file=sys.stderr)
        return 1
    print((markdown if options.markdown else table)(COLUMNS, rows))
    ratios = [row["of_stock"] for row in rows if "of_stock" in row]
    print(f"\nThe largest ratio is {max(ratios):.2f}; the goal is {GOAL} at most.")
    say(f"{time.monotonic() - started:.0f} s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"scale": options.scale, "rounds": options.rounds, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
