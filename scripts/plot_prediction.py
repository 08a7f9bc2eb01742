#!/usr/bin/env python3
"""Predicted against measured: the simulated timeline and the traced one, overlaid.

For each model and mode, the gradients are traced by the profiler so many times as
`--runs` says, and measured as often by the allocator's statistics. The worst traced run
is laid over the simulation, op by op, and drawn into OUT/prediction_MODEL.png. The
table says by how much the peaks differ, and at which op the largest difference of the
two curves starts. That is where the cost model is wrong. Each model and mode has a
process of its own: what ran before leaves holes in the allocator's memory, which made
its count of a U-Net a third larger.

  plan        the plan's peak of the gradients, in MiB
  seen        the same without buffers under 256 KiB, which the profiler does not see
  traced      worst traced peak: bytes that were asked for
  ratio       traced over seen; the goal is 0.90 to 1.10
  allocator   worst peak by the allocator's statistics: its chunks may be larger than
              what was asked for
  ratio       that over seen; the same goal
  off by      the largest difference at any step, traced minus predicted, in MiB
  from        the op at which more than half of that difference came up

Examples:
  plot_prediction.py                                  everything, in about ten minutes
  plot_prediction.py transformer --modes memory --runs 3
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, count, names_of, positive, refuse_unknown
from tables import MIB, markdown, mebibytes, say, table

if TYPE_CHECKING:
    from prediction import Overlay

MODES = ("memory", "speed")
MODEL_NAMES = ("mlp", "transformer", "resnet62", "unet", "densenet121")
Row = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    known = ", ".join(MODEL_NAMES)
    add("models", nargs="*", metavar="MODEL", help=f"some of: {known} (all)")
    add(
        "--modes",
        type=names_of(MODES),
        default=[*MODES],
        metavar="A,B",
        help="with commas (memory,speed)",
    )
    add("--runs", type=count(), default=10, help="runs of which the worst counts (10)")
    add("--scale", type=positive, default=1.0, help="size of the models (1.0)")
    add("--out", type=Path, default=Path("out"), help="folder of the pictures (out)")
    add("--markdown", action="store_true", help="print a table for documents")
    options = parser.parse_args(arguments)
    refuse_unknown(parser, options.models, MODEL_NAMES, "model")
    return options


def compare(name: str, mode: str, options: argparse.Namespace) -> tuple[Row, Overlay]:
    """The worst of several runs of one model in one mode."""
    import mem_util
    from measuring import build_gradients, peak_bytes
    from models import MODELS
    from prediction import overlay

    say(f"{name} {mode}: building")
    workload = MODELS[name](options.scale)
    built = build_gradients(workload, mode)
    built.call(*workload.batch)
    worst = None
    for _ in range(options.runs):
        traced = mem_util.trace(
            built.call, *workload.batch, warm_ups=0, replayable=False
        )
        found = overlay(built.plan, traced)
        if worst is None or found.measured_peak_bytes > worst.measured_peak_bytes:
            worst = found
    assert worst is not None
    counted = peak_bytes(partial(built.call, *workload.batch), options.runs)
    row = _row(workload.name, mode, worst, int(counted.most))
    say(
        f"{name} {mode}: traced {worst.ratio:.3f} of what was predicted, by the "
        f"allocator {row['allocator_over_seen']:.3f}"
    )
    return row, worst


def alone(name: str, mode: str, options: argparse.Namespace) -> tuple[Row, Overlay]:
    """`compare` in a fresh process."""
    spawned = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as process:
        return process.submit(compare, name, mode, options).result()


def _row(model: str, mode: str, worst: Overlay, allocator_bytes: int) -> Row:
    largest = worst.largest
    return {
        "model": model,
        "mode": mode,
        "plan_bytes": worst.plan_peak_bytes,
        "seen_bytes": worst.predicted_peak_bytes,
        "measured_bytes": worst.measured_peak_bytes,
        "slack_bytes": worst.slack_bytes,
        "measured_over_seen": worst.ratio,
        "allocator_bytes": allocator_bytes,
        "allocator_over_seen": allocator_bytes / worst.predicted_peak_bytes,
        "predicted_peak_op": worst.names[int(worst.predicted_bytes.argmax())],
        "measured_peak_op": worst.peak_op,
        "largest_difference_bytes": largest.bytes,
        "difference_starts_at": worst.names[largest.start],
        "difference_starts_at_type": worst.kinds[largest.start],
        "largest_at": worst.names[largest.step],
    }


def _in_mib(key: str) -> Any:
    return lambda row: mebibytes(row[key])


COLUMNS = [
    ("model", lambda row: row["model"]),
    ("mode", lambda row: row["mode"]),
    ("plan", _in_mib("plan_bytes")),
    ("seen", _in_mib("seen_bytes")),
    ("traced", _in_mib("measured_bytes")),
    ("ratio", lambda row: f"{row['measured_over_seen']:.3f}"),
    ("allocator", _in_mib("allocator_bytes")),
    ("ratio", lambda row: f"{row['allocator_over_seen']:.3f}"),
    ("off by", lambda row: f"{row['largest_difference_bytes'] / MIB:+.1f}"),
    ("from", lambda row: row["difference_starts_at"]),
]


def draw(title: str, overlays: dict[str, Overlay], path: Path) -> None:
    """One panel for each mode: the measured level as an area, the simulated a line."""
    from matplotlib.figure import Figure

    from mem_util.plot import INK

    figure = Figure(figsize=(10, 0.6 + 3.1 * len(overlays)), layout="constrained")
    panels = figure.subplots(len(overlays), squeeze=False)[:, 0]
    for axes, (mode, found) in zip(panels, overlays.items(), strict=True):
        _draw_panel(axes, mode, found)
    panels[-1].set_xlabel("steps in the order of the simulation")
    figure.suptitle(
        f"{title}: live memory, simulated and traced",
        x=0.01,
        ha="left",
        color=INK,
        fontweight="bold",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw_panel(axes: Any, mode: str, found: Overlay) -> None:
    import numpy as np

    from mem_util.plot import INK, LINES, style_axes

    blue, orange = LINES[:2]
    steps = np.arange(len(found.names))
    seen = ~np.isnan(found.measured_bytes)
    measured = found.measured_bytes[seen] / MIB
    predicted = found.predicted_bytes / MIB
    peak, promised = found.measured_peak_bytes / MIB, found.predicted_peak_bytes / MIB
    label = f"traced: peak {peak:.1f} MiB"
    axes.fill_between(steps[seen], measured, color=blue, alpha=0.22, linewidth=0)
    axes.plot(steps[seen], measured, color=blue, linewidth=0.9, label=label)
    label = f"simulated: peak {promised:.1f} MiB"
    axes.plot(steps, predicted, color=orange, linewidth=1.3, label=label)
    style_axes(axes, "live memory, MiB")
    axes.set_xlim(0, len(steps) - 1)
    top = 1.22 * max(measured.max(), predicted.max())
    axes.set_ylim(0, top)
    axes.axvline(found.first_backward, color=INK, linewidth=0.8, linestyle=":")
    for text, side in (("forward ", "right"), (" backward", "left")):
        axes.text(found.first_backward, 0.98 * top, text, ha=side, va="top", color=INK)
    axes.set_title(f"{mode}: traced / simulated {found.ratio:.3f}", loc="left")
    _mark_largest(axes, found)
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _mark_largest(axes: Any, found: Overlay) -> None:
    """A triangle over the curves where they differ most; beside the title the op."""
    from mem_util.plot import INK

    largest = found.largest
    levels = (found.predicted_bytes, found.measured_bytes)
    higher = max(float(curve[largest.step]) for curve in levels) / MIB
    above = higher + 0.03 * axes.get_ylim()[1]
    axes.plot([largest.step], [above], color=INK, marker="v", clip_on=False)
    name = found.names[largest.start]
    shown = name if len(name) <= 44 else f"...{name[-41:]}"
    axes.set_title(
        f"largest difference {largest.bytes / MIB:+.1f} MiB, from {shown}",
        loc="right",
        fontsize="small",
        color=INK,
    )


def verdict(rows: list[Row]) -> str:
    """The worst prediction by either figure, and the largest disagreement of all."""

    def worst(key: str) -> str:
        row = max(rows, key=lambda row: abs(row[key] - 1))
        return f"{100 * abs(row[key] - 1):.1f} % ({row['model']}, {row['mode']})"

    def share(row: Row) -> float:
        return abs(row["largest_difference_bytes"]) / row["seen_bytes"]

    largest = max(rows, key=share)
    return (
        f"The worst prediction is off by {worst('measured_over_seen')}; by the "
        f"allocator's count, by {worst('allocator_over_seen')}.\n"
        f"The largest difference of two curves is {100 * share(largest):.1f} % of the "
        f"predicted peak ({largest['model']}, {largest['mode']}), at "
        f"{largest['largest_at']}; it starts at {largest['difference_starts_at']}, of "
        f"type {largest['difference_starts_at_type']}."
    )


def main() -> int:
    options = parse()
    rows: list[Row] = []
    for name in options.models or MODEL_NAMES:
        overlays = {}
        for mode in options.modes:
            row, overlays[mode] = alone(name, mode, options)
            rows.append(row)
        path = options.out / f"prediction_{name}.png"
        draw(rows[-1]["model"], overlays, path)
        say(f"drew {path}")
    with (options.out / "prediction.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print((markdown if options.markdown else table)(COLUMNS, rows))
    print("\n" + verdict(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
