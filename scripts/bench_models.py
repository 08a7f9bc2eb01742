#!/usr/bin/env python3
"""Measures peaks, times and gradients on the models of `models.py`.

For each model and mode, against stock gradients in the same process:
  peak       allocator peak of a step of loss, gradients and SGD over rest (worst run);
             with --jit what was asked for, as XLA asks for one block and the
             allocator may hand out one that is twice as large
  of stock   that peak over stock's
  time       seconds of the step over stock's, A and B in turn: median (least-most)
  predicted  the plan's prediction, and the measured worst peak of the gradients only
             over it
  extra      planned extra work, in % of forward + backward
  building   seconds that gradients() takes, planning and rewriting included
  differs    largest difference of any gradient from stock's, on the scale of that
             variable's largest entry; in the row of stock, that of its own second run

Besides models:
  chains     chains of 100 and 400 tanh on 1 MiB tensors: worst peak for each number of
             inter-op threads (one process for each number), and a v1 session by its
             allocation records; modes `collection` and `list` keep every tenth tensor
  building   seconds to build gradients on graphs of 1 000, 10 000 and 50 000 ops

Examples:
  bench_models.py                                everything, in about half an hour
  bench_models.py resnet62 unet --modes memory   two models, one mode
  bench_models.py transformer --modes 70%,50%    two budgets
  bench_models.py mlp --jit --out mlp.json       compiled by XLA, figures to a file
  bench_models.py chains --threads 1,4
  bench_models.py building --ops 2000,50000 --modes memory,60%
                                                 how long budgets are planned
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import (
    command_line,
    count,
    counts,
    modes_of,
    names_of,
    positive,
    refuse_unknown,
)
from bench_tables import Row, sentence, show
from tables import say

MODEL_NAMES = ("mlp", "transformer", "resnet62", "unet", "densenet121", "resnet50")
MODES = ("memory", "speed", "collection", "list")
PARTS = (*MODEL_NAMES, "chains", "building")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)

    def option(flag: str, default: Any, kind: Any, text: str) -> None:
        """One flag; a list is given with commas."""
        many = isinstance(default, list)
        parser.add_argument(
            flag,
            default=default,
            type=kind,
            metavar="A,B" if many else "N",
            help=f"{text} ({','.join(map(str, default)) if many else default})",
        )

    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"some of: {', '.join(PARTS)} (all)"
    )
    option(
        "--modes",
        ["memory", "speed"],
        modes_of(MODES[:2]),
        "modes to compare with stock, or budgets such as 40%%",
    )
    option("--pairs", 7, count(), "pairs of timed steps")
    option("--runs", 10, count(), "runs of which the worst peak counts")
    option("--scale", 1.0, positive, "size of the models; below 1 for a quick try")
    option("--chain-modes", [*MODES], names_of(MODES), "the same for chains")
    option("--lengths", [100, 400], counts, "lengths of the chains")
    option("--threads", [1, 2, 4, 16], counts, "inter-op threads for the chains")
    option("--ops", [1000, 10_000, 50_000], counts, "sizes of the graphs of `building`")
    parser.add_argument("--jit", action="store_true", help="compile the steps with XLA")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write all figures there as JSON"
    )
    # One process of `chains` with so many threads: prints its rows as JSON.
    parser.add_argument("--chain-worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    refuse_unknown(parser, options.parts, PARTS, "part")
    return options


# ---- models


def bench_model(name: str, options: argparse.Namespace) -> list[Row]:
    """Rows of one model: stock first, then each mode against it."""
    from measuring import build_gradients, largest_difference, warm_up
    from models import MODELS

    workload = MODELS[name](options.scale)
    values = workload.values()
    warm_up(options.modes)

    def gradients(built: Any) -> list[Any]:
        workload.restore(values)
        return [tensor.numpy() for tensor in built.call(*workload.batch)]

    say(f"{name}: stock")
    stock = build_gradients(workload, "stock", options.jit)
    reference = gradients(stock)
    row = _measure(workload, "stock", stock, None, options)
    rows = [row | {"difference": largest_difference(reference, gradients(stock))}]
    for mode in options.modes:
        say(f"{name}: {mode}")
        try:
            built = build_gradients(workload, mode, options.jit)
            found = largest_difference(reference, gradients(built))
            row = _measure(workload, mode, built, rows[0], options)
            rows.append(row | {"difference": found})
        except Exception as error:  # whatever it is, the other figures are wanted
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append({"model": workload.name, "mode": mode, "error": words})
        if "predicted_bytes" not in rows[0] and "error" not in rows[-1]:
            # The prediction for stock comes with any plan of the same graph.
            predicted = built.plan.stock_peak_bytes
            measured = rows[0]["gradients_peak_bytes"]["most"] / predicted
            rows[0] |= {"predicted_bytes": predicted, "of_predicted": measured}
        say(sentence(rows[-1]))
    return rows


def _measure(
    workload: Any, mode: str, built: Any, stock: Row | None, options: argparse.Namespace
) -> Row:
    """The figures of one mode, all but the difference of the gradients."""
    from measuring import build_step, paired_ratios, peaks_of

    batch, runs, jit = workload.batch, options.runs, options.jit
    gradients_peak = peaks_of(partial(built.call, *batch), runs, jit)
    step = build_step(workload, mode, jit)
    peak = peaks_of(partial(step.call, *batch), runs, jit)
    row: Row = {
        "model": workload.name,
        "mode": mode,
        "jit": jit,
        "peak_bytes": asdict(peak),
        "gradients_peak_bytes": asdict(gradients_peak),
        "building_seconds": built.building_seconds,
    }
    if stock is None:
        return row
    plan = built.plan
    rival = build_step(workload, "stock", jit)
    seconds, ratio = paired_ratios(
        partial(rival.call, *batch), partial(step.call, *batch), options.pairs
    )
    return row | {
        "peak_of_stock": peak.most / stock["peak_bytes"]["most"],
        "stock_seconds": asdict(seconds),
        "time_of_stock": asdict(ratio),
        "predicted_bytes": plan.predicted_peak_bytes,
        "of_predicted": gradients_peak.most / plan.predicted_peak_bytes,
        "extra_fraction": plan.extra_fraction,
        "building_of_stock": built.building_seconds / stock["building_seconds"],
    }


# ---- chains


def bench_chains(options: argparse.Namespace) -> list[Row]:
    """One process for each number of threads: TensorFlow takes it only at its start."""
    rows: list[Row] = []
    for threads in options.threads:
        say(f"chains with {threads} inter-op threads")
        command = [sys.executable, __file__, "--chain-worker", str(threads)]
        command += ["--chain-modes", ",".join(options.chain_modes)]
        command += ["--lengths", ",".join(map(str, options.lengths))]
        command += ["--scale", str(options.scale), "--runs", str(options.runs)]
        command += ["--jit"] * options.jit
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    return rows


def chain_worker(options: argparse.Namespace) -> list[Row]:
    """The rows of one number of threads."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(options.chain_worker)
    from measuring import build_gradients, peak_bytes, session_peak_bytes
    from models import chain

    rows = []
    for length in options.lengths:
        for mode in ("stock", *options.chain_modes):
            workload = chain(length, options.scale)
            built = build_gradients(workload, mode, options.jit)
            peak = peak_bytes(
                lambda w=workload, b=built: b.call(*w.batch), options.runs
            )
            rows.append(
                {
                    "model": workload.name,
                    "mode": mode,
                    "jit": options.jit,
                    "threads": options.chain_worker,
                    "peak_bytes": asdict(peak),
                    "predicted_bytes": built.plan and built.plan.predicted_peak_bytes,
                    "session_peak_bytes": session_peak_bytes(
                        partial(chain, length, options.scale), mode
                    ),
                }
            )
    return rows


# ---- building


def bench_building(options: argparse.Namespace) -> list[Row]:
    """Seconds to build gradients on graphs of growing size, stock and each mode."""
    from measuring import building_seconds, warm_up

    warm_up(options.modes)
    rows: list[Row] = []
    for ops in options.ops:
        stock = None
        for mode in ("stock", *options.modes):
            say(f"building: {ops} ops, {mode}")
            seconds = building_seconds(ops, mode, repeats=3 if ops <= 10_000 else 1)
            stock = stock or seconds
            rows.append(
                {
                    "ops": ops,
                    "mode": mode,
                    "seconds": seconds,
                    "of_stock": seconds / stock,
                    "microseconds_per_op": seconds / ops * 1e6,
                }
            )
    return rows


# ---- the whole


def environment() -> Row:
    """What the figures depend on."""
    import keras
    import tensorflow as tf

    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def main() -> int:
    options = parse()
    if options.chain_worker:
        print(json.dumps(chain_worker(options)))
        return 0
    started = time.monotonic()
    figures = measure(options)
    show(figures)
    say(f"{time.monotonic() - started:.0f} s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"environment": environment(), **figures}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    failures = [row for row in figures["models"] if "error" in row]
    for row in failures:
        say(sentence(row))
    return 1 if failures else 0


def measure(options: argparse.Namespace) -> dict[str, list[Row]]:
    """All rows of the parts that were asked for."""
    parts = options.parts or PARTS
    models = [name for name in MODEL_NAMES if name in parts]
    return {
        "models": [row for name in models for row in bench_model(name, options)],
        "chains": bench_chains(options) if "chains" in parts else [],
        "building": bench_building(options) if "building" in parts else [],
    }


if __name__ == "__main__":
    sys.exit(main())
