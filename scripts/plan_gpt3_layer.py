#!/usr/bin/env python3
"""Plans one layer of GPT-3 on paper: bytes kept for the backward pass against work.

    python scripts/plan_gpt3_layer.py
    python scripts/plan_gpt3_layer.py --stateful        # draws that cannot be repeated
    python scripts/plan_gpt3_layer.py --length 8192

The layer (2048 tokens, width 12288, 96 heads, float16, dropout 0.1) is built as a
symbolic graph, differentiated by TensorFlow and read; nothing is run and no weight is
allocated. Then all selections of kept tensors that are best for some trade of bytes
against work are found by minimum cuts, and one more below each limit of --kept.

Kept bytes are what waits between the forward and the backward pass, the layer's input
included and its output not, in units of s·b·h bytes (sequence length, batch, width).
Extra work comes over three denominators, each that of the layer's forward pass:

  products  matrix products only, 24·b·s·h² + 4·b·s²·h FLOPs, as papers count
  FLOPs     all floating-point operations (20 for an exponential or an error function)
  draws     random numbers drawn again, as a part of those drawn in the forward pass

For comparison: Korthikanti et al. 2022 (arXiv 2205.05198) count 34 + 5·a·s/h = 114
for the whole layer as Megatron-LM writes it, and 34 at 2.7 % of the products for their
selective recomputation, which redoes both products of the attention.

Writes OUT/gpt3_layer.png if --out is given.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import command_line, count, counts
from tables import Column, table

if TYPE_CHECKING:
    from transformer_layer import Layer, Shape

Row = dict[str, Any]

SELECTIVE = {"name": "selective (Megatron-LM)", "kept": 34.0, "products": 2.7}
"""Korthikanti et al. 2022, section 5, for GPT-3."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    for name, default, what in (
        ("length", 2048, "tokens of a sequence, s"),
        ("batch", 1, "sequences, b"),
        ("width", 12288, "of the layer, h"),
        ("heads", 96, "of the attention, a"),
    ):
        add(f"--{name}", type=count(), default=default, help=f"{what} ({default})")
    add("--stateful", action="store_true", help="draw masks by ops with state")
    add(
        "--kept",
        type=counts,
        default=[22],
        metavar="N,N",
        help="also the least work for so many s·b·h bytes (22)",
    )
    add("--out", type=Path, metavar="FOLDER", help="draw the picture there")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"{options.heads} heads do not share a width of {options.width}")
    return options


# ---- the front


def front(layer: Layer, shape: Shape, limits: list[int]) -> list[Row]:
    """Untouched first, then what is kept and redone at each point, least bytes last."""
    from minimum_cut import filled, hull, measured

    cuts = hull(layer.problem)
    for limit in limits:
        limit_bytes = limit * shape.unit_bytes
        below = [cut for cut in cuts if cut.kept_bytes <= limit_bytes]
        if below:
            cuts.append(filled(layer.problem, below[0], limit_bytes))
    cuts.append(measured(layer.problem, layer.problem.everything))
    rows: dict[tuple[str, ...], Row] = {}
    for cut in sorted(cuts, key=lambda cut: (-cut.kept_bytes, cut.work)):
        row = row_of(layer, shape, cut.kept)
        # Points that no figure of the table tells apart are one.
        rows.setdefault(tuple(value(row) for _, value in COLUMNS), row)
    return list(rows.values())


def row_of(layer: Layer, shape: Shape, kept: frozenset[int]) -> Row:
    """The figures of a selection, from the library's own schedule."""
    from memory_saving_gradients.schedule import make_schedule

    graph, buffers = layer.graph, layer.problem.buffers
    schedule = make_schedule(buffers, kept)
    held = sorted(schedule.kept - buffers.endless)
    forward = range(graph.forward_count)
    flops = [op.seconds for op in graph.forward_ops]

    def part(costs: Any) -> float:
        whole = sum(costs[op] for op in forward)
        redone = sum(costs[op] for op in schedule.recomputed)
        return 100 * redone / whole if whole else 0.0

    return {
        "kept": sum(buffers.size[tensor] for tensor in held) / shape.unit_bytes,
        "products": part(layer.products),
        "flops": part(flops),
        "draws": part(layer.draws),
        "redone": [
            graph.ops[op].name.split("/")[-1]
            for op in schedule.recomputed
            if layer.products[op]
        ],
        "held": {
            graph.tensors[tensor].name: buffers.size[tensor] / shape.unit_bytes
            for tensor in held
        },
    }


def best_within(rows: list[Row], kept: float) -> Row | None:
    """The row of least work among those that keep at most so many units."""
    fitting = [row for row in rows if row["kept"] <= kept + 1e-2]
    return min(fitting, key=lambda row: row["flops"], default=None)


def described(row: Row, limit: int) -> str:
    """A point in words, with what it keeps."""
    figures = (
        f"{row['products']:.2f} % of the products, {row['flops']:.2f} % of all FLOPs"
    )
    lines = [f"In {limit} s·b·h bytes: {row['kept']:.1f} at {figures}, keeping"]
    held = row["held"].items()
    lines += [f"  {size:5.1f}  {name}" for name, size in held if size > 0.05]
    return "\n".join(lines)


COLUMNS: list[Column] = [
    ("kept, s·b·h", lambda row: f"{row['kept']:.1f}"),
    ("products, %", lambda row: f"{row['products']:.2f}"),
    ("FLOPs, %", lambda row: f"{row['flops']:.2f}"),
    ("draws, %", lambda row: f"{row['draws']:.0f}"),
    ("products redone", lambda row: ", ".join(row["redone"]) or "none"),
]


# ---- the picture


def draw(rows: list[Row], path: Path) -> None:
    """The front with Megatron-LM's point, on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    from mem_util.plot import INK, LINES, style_axes

    blue, orange = LINES[:2]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, "work redone, % of the forward pass")
    shown = [row for row in rows if row["kept"] > 0]
    axes.plot(
        [row["kept"] for row in shown],
        [row["flops"] for row in shown],
        marker="o",
        color=blue,
        label="minimum cuts, % of all FLOPs",
    )
    axes.plot(
        SELECTIVE["kept"],
        SELECTIVE["products"],
        marker="D",
        linestyle="none",
        color=orange,
        label="selective recomputation, Korthikanti et al. 2022",
    )
    for before, row in pairwise(shown):
        new = [name for name in row["redone"] if name not in before["redone"]]
        if new:
            axes.annotate(
                f"{row['kept']:.0f}: + {', '.join(new)}",
                (row["kept"], row["flops"]),
                xytext=(6, 5),
                textcoords="offset points",
                fontsize=8,
                color=INK,
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_yscale("symlog", linthresh=0.01)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlim(left=0.5 * min(row["kept"] for row in shown))
    axes.set_xlabel("kept for the backward pass, in s·b·h bytes")
    axes.set_ylim(-0.002, 200)
    axes.legend(frameon=False, labelcolor=INK, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    options = parse(arguments)
    from transformer_layer import Shape, build

    shape = Shape(
        options.length,
        options.batch,
        options.width,
        options.heads,
        stateful=options.stateful,
    )
    rows = front(build(shape), shape, options.kept)
    print(table(COLUMNS, rows))
    for limit in options.kept:
        row = best_within(rows, limit)
        if row is not None:
            print(f"\n{described(row, limit)}")
    if options.out is not None:
        draw(rows, options.out / "gpt3_layer.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
