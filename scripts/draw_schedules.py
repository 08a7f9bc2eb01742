#!/usr/bin/env python3
"""Draws what is alive when, for three ways of backpropagating through a short chain.

A chain of layers of which each keeps its result for its gradient, as `tanh` does, is
written down by hand as a `TrainingGraph`. Three selections are laid out and simulated
by the library itself: everything kept, every third result kept, and what the planner of
`memory` chooses.

Each column of a picture is a step. A dark cell is computed in that step, a pale one is
held; below stands how many there are. The number of cells of every column is checked
against the library's simulation.

Writes OUT/schedules.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import command_line, count

# Last, so that an installed package wins over the checkout.
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

if TYPE_CHECKING:
    from memory_saving_gradients.buffers import Buffers
    from memory_saving_gradients.graph import TrainingGraph
    from memory_saving_gradients.schedule import Schedule
    from memory_saving_gradients.simulate import Timeline

INK = "#22384f"
FAINT = "#8a949e"
# What is computed in a step, and what is held.
COLORS = {
    "forward": ("#1f6fb2", "#bcd6ec"),
    "copy": ("#e07b1a", "#f8d9b5"),
    "gradient": ("#2a9461", "#bfe3d0"),
}
# The line between the forward and the backward pass.
TURN: dict[str, Any] = {"linewidth": 0.8, "linestyle": (0, (2, 2)), "zorder": 0}
NAMES = {
    "forward": "first computation",
    "copy": "recomputation",
    "gradient": "gradient",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=ROOT / "docs" / "images",
        help="folder of the picture (docs/images)",
    )
    add("--layers", type=count(least=2), default=9, help="length of the chain (9)")
    return parser.parse_args(arguments)


# ---- the chain


def chain(layers: int) -> TrainingGraph:
    """A chain by hand; every tensor takes one byte, but for the loss and its seed.

    ::

        x ── t1 ── t2 ── … ── tn ── loss
             │     │          │      │
        g0 ─ g1 ── g2 ── … ── gn ── seed
    """
    from memory_saving_gradients.graph import (
        OpNode,
        Pin,
        Storage,
        TensorNode,
        TrainingGraph,
        check,
    )

    ops: list[OpNode] = []
    tensors: list[TensorNode] = []

    def add(name: str, inputs: tuple[int, ...], size: int, **attributes: Any) -> int:
        number = len(ops)
        storage = attributes.pop("storage", Storage.OWN)
        tensors.append(TensorNode(number, name, number, size, storage))
        ops.append(OpNode(number, name, "Op", inputs, (number,), **attributes))
        return number

    x = add("x", (), 1, storage=Storage.RESTING, pin=Pin.PLACEHOLDER)
    last = x
    results = []
    for number in range(1, layers + 1):
        last = add(f"t{number}", (last,), 1, seconds=1.0, in_place=True)
        results.append(last)
    loss = add("loss", (last,), 0)
    seed = add("seed", (), 0, control_inputs=(loss,))
    gradient = add(f"g{layers}", (seed,), 1)
    for number, result in reversed(list(enumerate(results))):
        inputs = (gradient, result)
        gradient = add(f"g{number}", inputs, 1, seconds=1.0, in_place=True)
    graph = TrainingGraph(
        tuple(ops), tuple(tensors), loss + 1, targets=(loss,), results=(gradient,)
    )
    check(graph)
    return graph


@dataclass(frozen=True)
class Panel:
    """One way of backpropagating, simulated.

    Attributes:
        title: What is kept, in words.
        buffers: The buffer view of the chain.
        schedule: The order of the backward pass.
        timeline: The simulated run.
    """

    title: str
    buffers: Buffers
    schedule: Schedule
    timeline: Timeline

    @property
    def columns(self) -> list[int]:
        """The steps that are drawn: those that make a tensor of some size."""
        buffers = self.buffers
        return [
            index
            for index, step in enumerate(self.timeline.steps)
            if any(buffers.size[tensor] for tensor in buffers.makes[step.op])
        ]

    @property
    def turn(self) -> int:
        """The first column of the backward pass."""
        count, steps = self.buffers.graph.forward_count, self.timeline.steps
        return [steps[index].op >= count for index in self.columns].index(True)


def panels(layers: int) -> list[Panel]:
    """The three panels, from left to right."""
    from memory_saving_gradients.buffers import Buffers
    from memory_saving_gradients.order import backward_order
    from memory_saving_gradients.planners import PLANNERS, Problem
    from memory_saving_gradients.schedule import make_schedule
    from memory_saving_gradients.simulate import simulate

    graph = chain(layers)
    buffers = Buffers(graph, backward_order(graph))
    selections = {
        "Keep everything": frozenset(range(1, layers + 1)),
        "Keep every third": frozenset(range(3, layers + 1, 3)),
        'checkpoints="memory"': PLANNERS["memory"](Problem(buffers)),
    }
    made = []
    for title, kept in selections.items():
        schedule = make_schedule(buffers, kept)
        made.append(Panel(title, buffers, schedule, simulate(buffers, schedule)))
    return made


# ---- cells


@dataclass(frozen=True)
class Cell:
    """A tensor alive in a step.

    Attributes:
        column: Which of the drawn steps.
        row: 1 for the first layer, 0 for gradients.
        kind: A key of `COLORS`.
        computed: Whether it is computed in this step.
    """

    column: int
    row: int
    kind: str
    computed: bool


def cells(panel: Panel) -> list[Cell]:
    """What is alive when; checked against the timeline that the library simulates."""
    size, endless = panel.buffers.size, panel.buffers.endless
    layers = sum(size[: panel.buffers.graph.forward_count])
    columns = panel.columns
    found = []
    for (tensor, is_copy), (first, last) in _lifetimes(panel).items():
        end = len(panel.timeline.steps) - 1 if tensor in endless else last
        row = tensor if tensor <= layers else 0
        kind = "copy" if is_copy else "forward" if row else "gradient"
        found += [
            Cell(column, row, kind, index == first)
            for column, index in enumerate(columns)
            if size[tensor] and first <= index <= end
        ]
    for column, index in enumerate(columns):
        drawn = sum(cell.column == column for cell in found)
        live = panel.timeline.live_bytes[index]
        if drawn != live:
            raise RuntimeError(f"step {index}: {drawn} cells for {live} live tensors")
    return found


def _lifetimes(panel: Panel) -> dict[tuple[int, bool], tuple[int, int]]:
    """For each buffer, an original's or a copy's, the steps from which and to which it
    lives; one that is written over by the step that reads it last ends before it."""
    buffers, steps = panel.buffers, panel.timeline.steps
    recomputed = set(panel.schedule.recomputed) - panel.schedule.kept
    first: dict[tuple[int, bool], int] = {}
    last: dict[tuple[int, bool], int] = {}
    reads: list[list[tuple[int, bool]]] = []
    for index, step in enumerate(steps):
        late = step.copy or step.op >= buffers.graph.forward_count
        reads.append([(t, late and t in recomputed) for t in buffers.reads[step.op]])
        last.update(dict.fromkeys(reads[-1], index))
        for tensor in buffers.makes[step.op]:
            first[tensor, step.copy] = last[tensor, step.copy] = index
    for index, step in enumerate(steps):
        dying = [buffer for buffer in reads[index] if last[buffer] == index]
        if buffers.graph.ops[step.op].in_place and dying:
            last[dying[0]] -= 1
    return {buffer: (first[buffer], last[buffer]) for buffer in first}


# ---- the picture


def draw(layers: int, path: Path) -> None:
    """All panels side by side in one PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    made = panels(layers)
    steps = max(len(panel.columns) for panel in made)
    most = max(panel.timeline.peak_bytes for panel in made)
    figure = Figure(figsize=(10, 3.9))
    axes = figure.subplots(2, 3, sharey="row", height_ratios=[layers + 2, 4.5])
    for number, panel in enumerate(made):
        _grid(axes[0][number], panel, layers)
        _levels(axes[1][number], panel, most)
        for each in axes[:, number]:
            each.set_xlim(-0.8, steps - 0.2)
    axes[0][0].set_yticks([-0.6, 1, layers], ["gradient", "layer 1", f"layer {layers}"])
    axes[1][0].set_ylabel("live tensors", color=INK, fontsize=9)
    handles = [Patch(color=dark, label=NAMES[k]) for k, (dark, _) in COLORS.items()]
    handles.append(Patch(color="#d5dade", label="held (pale)"))
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.0,
        handleheight=1.0,
    )
    figure.subplots_adjust(
        left=0.075, right=0.995, top=0.86, bottom=0.155, wspace=0.05, hspace=0.06
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=170)


def _squares(panel: Panel) -> Iterator[tuple[Any, str]]:
    from matplotlib.patches import Rectangle

    for cell in cells(panel):
        row = cell.row if cell.row else -0.6
        dark, pale = COLORS[cell.kind]
        corner = (cell.column - 0.43, row - 0.41)
        yield Rectangle(corner, 0.86, 0.82), dark if cell.computed else pale


def _grid(axes: Any, panel: Panel, layers: int) -> None:
    """Steps to the right, layers upwards; in words what it comes to."""
    from matplotlib.collections import PatchCollection

    squares, colors = zip(*_squares(panel), strict=True)
    axes.add_collection(
        PatchCollection(squares, facecolors=list(colors), edgecolors="none")
    )
    axes.set_ylim(-1.2, layers + 0.6)
    axes.axvline(panel.turn - 0.5, color=FAINT, **TURN)
    twice = len(panel.schedule.recomputed)
    words = f"peak {panel.timeline.peak_bytes}, " + (
        f"{twice} layers computed twice" if twice else "nothing computed twice"
    )
    axes.set_title(words, color=INK, fontsize=9.5, loc="left", pad=5)
    axes.text(
        0,
        1.15,
        panel.title,
        transform=axes.transAxes,
        color=INK,
        fontsize=11.5,
        fontweight="bold",
    )
    _bare(axes)
    axes.set_xticks([])


def _levels(axes: Any, panel: Panel, most: int) -> None:
    """How many tensors are alive in each step, the peak in ink."""
    live = [panel.timeline.live_bytes[index] for index in panel.columns]
    peak = panel.timeline.peak_bytes
    colors = [INK if level == peak else "#c3ccd4" for level in live]
    axes.bar(range(len(live)), live, width=0.86, color=colors)
    axes.axvline(panel.turn - 0.5, color=FAINT, **TURN)
    axes.set_ylim(0, most * 1.08)
    axes.set_yticks([0, most // 2, most])
    _bare(axes)
    middles = [(panel.turn - 1) / 2, (panel.turn + len(live) - 1) / 2]
    axes.set_xticks(middles, ["forward", "backward"])


def _bare(axes: Any) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)


def main() -> int:
    options = parse()
    if options.layers < 2:
        sys.exit("draw_schedules.py: expected --layers of at least 2")
    path = options.out / "schedules.png"
    draw(options.layers, path)
    print(f"{path}, {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
