#!/usr/bin/env python3
"""Compares what a Keras user can do about memory today with this library.

Each way trains the same model, from the same weights and seeds, on the same batch, with
`train_on_batch` and plain SGD:
  stock             as it is
  RematScope ...    built within `keras.RematScope(mode)` (Keras 3)
  recompute_grad    cut into blocks, each within `tf.recompute_grad`
  memory, speed     `memory_saving_gradients.memory_saving(model, mode)`

  peak        allocator peak of a step over rest (worst of the runs), and of stock's;
              with --jit what was asked for, see bench_models.py
  time        seconds of the step over stock's, A and B in turn: median (least-most)
  gradients   largest difference of any gradient from stock's in the first step, which
              Grappler's meta-optimizer does not touch, on the scale of that variable's
              largest entry; above 1e-3 (with --jit 0.2, as XLA rounds otherwise) they
              are called wrong: the recomputation then has another dropout mask, say
  statistics  whether batch statistics are as after one step of stock: "once"; "twice"
              if the recomputation has updated them again; "-" if there are none
  seeds       whether the counters of random seeds are as after one step of stock

A way that raises an error has it in its row. The exit code is 1 if that is one of ours,
or one of ours has wrong gradients or statistics.

Examples:
  bench_peers.py                                 everything
  bench_peers.py mlp --peers memory              one model, one way
  bench_peers.py resnet50 --jit --out peers.json compiled by XLA, figures to a file
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, count, figures_of_models, names_of, refuse_unknown
from tables import markdown, mebibytes, say, table

MODELS = ("mlp", "transformer", "resnet50", "densenet121")
OURS = ("memory", "speed")
PEERS = ("RematScope activations", "RematScope full", "recompute_grad", *OURS)
WRONG, WRONG_BY_XLA = 1e-3, 0.2
"""Rounding stays below; a mask drawn anew gives about 1. XLA fuses, and batch norm
makes of that as much as a tenth in gradients that would be zero."""

Row = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help=f"some of: {', '.join(MODELS)}")
    add(
        "--peers",
        type=names_of(PEERS),
        default=[*PEERS],
        metavar="A,B",
        help=f"ways to compare with stock ({','.join(PEERS)})",
    )
    add("--pairs", type=count(), default=7, metavar="N", help="timed pairs (7)")
    add("--runs", type=count(), default=5, metavar="N", help="runs for the peak (5)")
    add("--jit", action="store_true", help="compile the steps with XLA")
    figures_of_models(parser)
    options = parser.parse_args(arguments)
    refuse_unknown(parser, options.models, MODELS, "model")
    return options


# ---- measuring


def bench(name: str, options: argparse.Namespace) -> list[Row]:
    """The rows of one model: stock first, then each peer against it."""
    from measuring import peaks_of, without_meta_optimizer
    from peers import PEERS as WAYS
    from peers import compiled

    say(f"{name}: stock")
    stock = compiled(name, WAYS["stock"], options.scale, options.jit)
    before = stock.state_values()
    with without_meta_optimizer():
        stock.step()
    first = (stock.gradients(), before, stock.state_values())
    peak = peaks_of(stock.step, options.runs, options.jit)
    rows: list[Row] = [{"model": name, "peer": "stock", "peak_bytes": asdict(peak)}]
    for peer in options.peers:
        say(f"{name}: {peer}")
        row: Row = {"model": name, "peer": peer}
        try:
            rival = compiled(name, WAYS[peer], options.scale, options.jit)
            row |= _compared(rival, stock, first, options)
            row["peak_of_stock"] = row["peak_bytes"]["most"] / max(peak.most, 1)
        except Exception as error:  # that is what the row shall say
            row["error"] = phrase(error)
        rows.append(row)
    return rows


def _compared(rival: Any, stock: Any, first: Any, options: argparse.Namespace) -> Row:
    """The figures of one peer; its first step is compared with that of stock."""
    from measuring import (
        largest_difference,
        paired_ratios,
        peaks_of,
        without_meta_optimizer,
    )

    gradients, before, after = first
    with without_meta_optimizer():
        rival.step()
    difference = largest_difference(gradients, rival.gradients())
    limit = WRONG_BY_XLA if options.jit else WRONG
    # Not `difference > limit`: NaN is wrong, too.
    row: Row = {"difference": difference, "wrong": not difference <= limit}
    row |= _state(before, after, rival.state_values())
    row["peak_bytes"] = asdict(peaks_of(rival.step, options.runs, options.jit))
    _, ratio = paired_ratios(stock.step, rival.step, options.pairs)
    return row | {"time_of_stock": asdict(ratio)}


def _state(before: Any, stock: Any, found: Any) -> Row:
    """What a step has left behind: batch statistics, and counters of seeds."""
    import numpy as np

    row: Row = {"statistics": None, "seeds": None}
    moved = [
        (a, b, c)
        for a, b, c in zip(before, stock, found, strict=True)
        if not np.array_equal(a, b)
    ]
    floats = [parts for parts in moved if np.issubdtype(parts[0].dtype, np.floating)]
    counters = [parts for parts in moved if np.issubdtype(parts[0].dtype, np.integer)]
    if floats:
        # One update moves by d; a second one, from there, by nearly as much again.
        shares = [np.abs(c - a).max() / np.abs(b - a).max() for a, b, c in floats]
        row["statistics"] = "once" if max(shares) < 1.3 else "twice"
    if counters:
        same = all(np.array_equal(b, c) for _, b, c in counters)
        row["seeds"] = "as stock" if same else "drawn again"
    return row


def phrase(error: Exception) -> str:
    """An error in one line: without colours, Keras's first line and the rest."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("Exception encountered")]
    words = (telling or lines or [""])[0]
    words = textwrap.shorten(words, 90, placeholder=" ...")
    return f"{type(error).__name__}: {words}".rstrip(" :")


# ---- the table


def _peak(row: Row) -> str | None:
    return mebibytes(row["peak_bytes"]["most"]) if "peak_bytes" in row else None


def _share(row: Row) -> str | None:
    return f"{row['peak_of_stock']:.3f}" if "peak_of_stock" in row else None


def _time(row: Row) -> str | None:
    spread = row.get("time_of_stock")
    return spread and "{median:.2f} ({least:.2f}-{most:.2f})".format(**spread)


def _gradients(row: Row) -> str | None:
    if "error" in row:
        return f"raises {row['error']}"
    if "difference" not in row:
        return None
    return f"{row['difference']:.0e}{' WRONG' if row['wrong'] else ''}"


COLUMNS = [
    ("model", lambda row: row["model"]),
    ("way", lambda row: row["peer"]),
    ("peak MiB", _peak),
    ("of stock", _share),
    ("time of stock", _time),
    ("statistics", lambda row: row.get("statistics")),
    ("seeds", lambda row: row.get("seeds")),
    ("gradients", _gradients),
]


def is_fault(row: Row) -> bool:
    """Whether a row of ours is not as it must be."""
    return row["peer"] in OURS and (
        "error" in row
        or row["wrong"]
        or row["statistics"] == "twice"
        or row["seeds"] == "drawn again"
    )


def main() -> int:
    options = parse()
    rows = [
        row
        for name in MODELS
        if name in (options.models or MODELS)
        for row in bench(name, options)
    ]
    print((markdown if options.markdown else table)(COLUMNS, rows))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"jit": options.jit, "scale": options.scale, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(map(is_fault, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
