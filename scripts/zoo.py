#!/usr/bin/env python3
"""Compares our tape with stock's on every architecture of keras.applications and more.

The others are a GPT-like decoder, an encoder-decoder, a vision transformer, U-Nets on
squares and cubes, a GAN whose step has two tapes, and a frozen backbone with a head.
Weights, seeds and batch are the same for both tapes; each takes its gradients in one
`tf.function`, which writes every gradient to a variable, as an optimizer consumes it.

  weights    their size
  peak       worst allocator peak over rest of all runs, stock's and ours, and the ratio
  planned    the ratio that the plan predicts
  extra      planned extra work, in % of forward + backward
  bits       whether all gradients are stock's in every bit, with Grappler's
             meta-optimizer off; if not, the largest difference over what rounding may
             do
  differs    with default options: the largest difference of a gradient from stock's, on
             the scale of that variable's largest entry
  own        the same of stock from itself: a second run, and without the meta-optimizer
  verdict    "ok", or what is wrong: gradients beyond rounding, a peak above stock's

Each architecture has a process of its own. What fails is told in its row and does not
stop the others. The exit code is 1 if a verdict is not "ok".

Examples:
  zoo.py                                       everything, in about an hour
  zoo.py ViT GAN MobileNet --mode speed        three architectures
  zoo.py --out zoo.json --markdown             figures to a file, a table for documents
  zoo.py --out zoo.json --resume               only what the file has not yet
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, count, positive
from tables import markdown, mebibytes, say, table

MODES = ("memory", "speed")
Row = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="some architectures (all)")
    add("--mode", choices=MODES, default="memory", help="of our tape (memory)")
    add("--runs", type=count(), default=5, metavar="N", help="runs for the peak (5)")
    add(
        "--scale",
        type=positive,
        default=1.0,
        metavar="N",
        help="size of the batches; below 1 for a quick try (1.0)",
    )
    add("--list", action="store_true", help="print the names and end")
    add("--markdown", action="store_true", help="print a table for documents")
    add("--out", type=Path, metavar="FILE", help="write all figures there as JSON")
    add("--resume", action="store_true", help="take the rows that FILE has already")
    # One process of the table: prints its row as JSON.
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.resume and options.out is None:
        parser.error("--resume needs --out FILE")
    return options


# ---- one row


def worker(options: argparse.Namespace) -> Row:
    """The row of one architecture."""
    from zoo_measure import examine, specimen

    (name,) = options.names
    return examine(specimen(name, options.scale), options.mode, options.runs)


def measure(name: str, options: argparse.Namespace) -> Row:
    """The row of one architecture, from a process of its own."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--worker", "--mode", options.mode]
    command += ["--runs", str(options.runs), "--scale", str(options.scale)]
    done = subprocess.run([*command, "--", name], capture_output=True, text=True)
    row: Row = {"name": name, "mode": options.mode, "scale": options.scale}
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        row |= {"error": f"ended with {done.returncode}: {words}"}
    else:
        row |= json.loads(done.stdout.splitlines()[-1])
    say(f"{name}: {verdict(row)} ({time.monotonic() - started:.0f} s)")
    return row


# ---- the table


def verdict(row: Row) -> str:
    """ "ok", or what is wrong with a row."""
    if "error" in row:
        return f"FAILED: {row['error']}"
    return "; ".join(row["wrong"]) or "ok"


def _bits(row: Row) -> str:
    exact = row["exact"]
    return "equal" if exact["equal_bits"] else f"{exact['of_bound']:.1g} of bound"


COLUMNS = [
    ("architecture", lambda row: row["name"]),
    ("weights MiB", lambda row: mebibytes(row["variables_bytes"])),
    ("stock MiB", lambda row: mebibytes(row["stock_peak_bytes"]["most"])),
    ("ours MiB", lambda row: mebibytes(row["peak_bytes"]["most"])),
    ("of stock", lambda row: f"{row['peak_of_stock']:.3f}"),
    ("planned", lambda row: f"{row['planned_of_stock']:.3f}"),
    ("extra", lambda row: f"{100 * row['extra_fraction']:.1f} %"),
    ("bits", _bits),
    ("differs", lambda row: f"{row['difference']:.0e}"),
    ("own", lambda row: f"{row['own_difference']:.0e}"),
    ("verdict", verdict),
]


def columns() -> list[Any]:
    """The columns, with a gap where a row has failed."""

    def safe(head: str, value: Any) -> Any:
        def cell(row: Row) -> Any:
            if "error" in row and head not in ("architecture", "verdict"):
                return None
            return value(row)

        return head, cell

    return [safe(head, value) for head, value in COLUMNS]


def wanted(options: argparse.Namespace) -> list[str]:
    """The names that were asked for, in the order of the zoo."""
    from zoo_models import architectures

    known = list(architectures())
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        raise SystemExit(
            f"zoo.py: error: no such architecture: {', '.join(unknown)}. "
            "`zoo.py --list` prints all names."
        )
    return [name for name in known if not options.names or name in options.names]


def earlier(options: argparse.Namespace) -> dict[str, Row]:
    """The rows that the file of an earlier run has, but for those that failed."""
    if not (options.resume and options.out.exists()):
        return {}
    return {
        row["name"]: row
        for row in json.loads(options.out.read_text())
        if verdict(row) == "ok"
        and (row["mode"], row["scale"]) == (options.mode, options.scale)
    }


def main() -> int:
    options = parse()
    if options.worker:
        print(json.dumps(worker(options)))
        return 0
    names = wanted(options)
    if options.list:
        print("\n".join(names))
        return 0
    known = earlier(options)
    for number, name in enumerate(names, 1):
        if name not in known:
            say(f"{number} of {len(names)}: {name}")
            known[name] = measure(name, options)
        if options.out:  # After each, lest an hour's figures be lost.
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    rows = [known[name] for name in names]
    print((markdown if options.markdown else table)(columns(), rows))
    wrong = [row["name"] for row in rows if verdict(row) != "ok"]
    say(f"{len(rows)} architectures, not ok: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
