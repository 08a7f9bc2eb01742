#!/usr/bin/env python3
"""Peak memory against extra time, over all budgets, for some of the models.

Nothing is trained or run: the gradients of each model are built, in a copy of its
graph, and planned. Drawn into OUT/pareto.png, side by side, are the front with its knee
(the point from which on less memory costs most) and where `memory` and `speed` are;
OUT/pareto.json has all points. The table has the plans at each tenth of stock's peak.

  peak         simulated, of activations and gradients
  extra work   what is computed twice, of forward + backward, estimated

`--compare` prints another table: stock, equal segments and the greedy ones of Chen et
al., `speed`, `memory` and budgets of 70, 50 and 30 % side by side.

Examples:
  plot_pareto.py transformer resnet62     two models, in a minute or two
  plot_pareto.py mlp --scale 0.25
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, positive, refuse_unknown
from tables import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memory_saving_gradients import Pareto
    from models import Workload

MODEL_NAMES = ("mlp", "transformer", "resnet62", "unet", "densenet121", "resnet50")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help=f"some of {', '.join(MODEL_NAMES)}")
    add("--scale", type=positive, default=1.0, help="size of the models (1.0)")
    add("--compare", action="store_true", help="print the strategies side by side, too")
    add("--out", type=Path, default=Path("out"), help="folder of the picture (out)")
    options = parser.parse_args(arguments)
    refuse_unknown(parser, options.models, MODEL_NAMES, "model")
    return options


def front_of(workload: Workload) -> Pareto:
    """The front of the gradients of a model."""
    import tensorflow as tf

    import memory_saving_gradients as msg

    found: list[Pareto] = []

    @tf.function(autograph=False)
    def look(*batch: tf.Tensor) -> tf.Tensor:
        loss = workload.loss(*batch)
        found.append(msg.pareto(loss, workload.variables))
        return loss

    look.get_concrete_function(*workload.batch)
    return found[0]


def as_json(front: Pareto) -> dict[str, Any]:
    """A front as plain data."""
    return {**asdict(front), "stock": asdict(front.stock)}


# ---- the picture


def draw(fronts: dict[str, Pareto], path: Path) -> None:
    """All fronts side by side."""
    from matplotlib.figure import Figure

    from mem_util.plot import DPI

    figure = Figure(figsize=(5.5 * len(fronts), 4.2), layout="constrained")
    places = figure.subplots(1, len(fronts), squeeze=False)[0]
    for axes, (name, front) in zip(places, fronts.items(), strict=True):
        _draw_front(axes, name, front)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _draw_front(axes: Axes, name: str, front: Pareto) -> None:
    from mem_util.plot import INK, LINES, style_axes

    def of_stock(peak_bytes: int) -> float:
        return 100 * peak_bytes / front.stock.peak_bytes

    style_axes(axes, "extra work, % of forward + backward")
    axes.plot(
        [of_stock(point.peak_bytes) for point in front.points],
        [100 * point.extra_fraction for point in front.points],
        color=LINES[0],
        marker=".",
        label="budgets",
    )
    marks = (("memory", "s"), ("speed", "D"), ("knee", "o"))
    for (mark, shape), color in zip(marks, LINES[1:4], strict=True):
        point = getattr(front, mark)
        axes.plot(
            of_stock(point.peak_bytes),
            100 * point.extra_fraction,
            marker=shape,
            markersize=9,
            markerfacecolor="none" if mark == "knee" else color,
            markeredgecolor=color,
            markeredgewidth=2,
            linestyle="none",
            label=mark,
        )
    axes.set_title(name, color=INK)
    axes.set_xlabel("peak, % of stock's")
    axes.set_xlim(0, 103)
    axes.set_ylim(bottom=-0.5)
    axes.legend(frameon=False, labelcolor=INK)


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    options = parse(arguments)
    import memory_saving_gradients as msg
    from models import MODELS

    fronts: dict[str, Pareto] = {}
    tables = []
    for model in options.models:
        say(f"{model}: planning")
        workload = MODELS[model](options.scale)
        front = fronts[workload.name] = front_of(workload)
        tables.append(f"{workload.name}\n{front}")
        if options.compare:
            say(f"{model}: comparing")
            tables.append(str(msg.compare(workload.loss, *workload.batch)))
    draw(fronts, options.out / "pareto.png")
    data = {name: as_json(front) for name, front in fronts.items()}
    (options.out / "pareto.json").write_text(json.dumps(data, indent=1), "utf-8")
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
