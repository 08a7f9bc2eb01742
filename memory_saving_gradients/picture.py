"""A plan as a picture: live bytes over one step, as stock and as planned."""

from __future__ import annotations

import math
import textwrap
from itertools import accumulate
from os import PathLike
from typing import TYPE_CHECKING, Any

from mem_util.paths import picture_path
from mem_util.plot import (
    DPI,
    INK,
    LINES,
    Curve,
    byte_unit,
    draw_level,
    new_figure,
    style_axes,
)
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.simulate import Timeline
from memory_saving_gradients.wording import counted, sizes_like

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

_STOCK, _PLANNED, _BUDGET = LINES[0], LINES[1], "#111111"
"""Blue and orange, which nobody takes for each other, and a black dashed line."""

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))

_MARKED = 0.005
"""Kept tensors are marked from about this fraction of the planned peak on."""

_NAME = 56
"""Characters of a name that the legend has room for."""

_WIDE = 100
"""Characters of a line of the title."""


def plot(plan: Plan, path: str | PathLike[str]) -> None:
    """Draws a plan into a file.

    Args:
        plan: The plan.
        path: Of the picture; the suffix says which kind, such as `.png` or `.svg`.
    """
    file = picture_path(path, "memory_saving_gradients.Plan.plot")
    figure(plan).savefig(file, dpi=DPI)


def figure(plan: Plan) -> Figure:
    """The picture as a figure of matplotlib."""
    drawing = new_figure(6.0)
    axes = drawing.add_subplot()
    unit, size = byte_unit(plan.stock_peak_bytes)
    longest = max(plan.stock.seconds, plan.timeline.seconds)
    second, time_unit = next((t for t in _TIMES if longest >= t[0]), _TIMES[-1])
    runs = []
    if plan.is_stock or plan.timeline is not plan.stock:
        runs.append(("stock", plan.stock, _STOCK))
    else:
        _mark_stock(axes, plan, size)
    if not plan.is_stock:
        runs.append(("planned", plan.timeline, _PLANNED))
    for label, timeline, color in runs:
        starts = _starts(plan, timeline, second)
        levels = [*timeline.live_bytes, *timeline.live_bytes[-1:]]
        if levels:
            draw_level(axes, Curve(label, starts, levels), size, color, fill=0.12)
            _mark_peak(axes, plan, label, timeline, starts, size, color)
    _mark_kept(axes, plan, second, size)
    if plan.budget_bytes is not None:
        axes.axhline(
            plan.budget_bytes / size,
            color=_BUDGET,
            linestyle=(0, (6, 3)),
            linewidth=1.3,
            label=f"budget: {sizes_like(plan.stock_peak_bytes)(plan.budget_bytes)}",
        )
    _mark_turn(axes, plan, second)
    style_axes(axes, f"live memory above rest ({unit})")
    axes.set_xlabel(f"estimated time ({time_unit})")
    axes.margins(x=0.01)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.set_title(_title(plan), loc="left", fontweight="bold", color=INK)
    # Outside, where it covers nothing.
    if axes.get_legend_handles_labels()[0]:
        drawing.legend(loc="outside lower left", frameon=False)
    return drawing


def _title(plan: Plan) -> str:
    size = sizes_like(plan.stock_peak_bytes)
    if plan.is_stock:
        return textwrap.fill(f"One step, left as it was: {plan.reason}", _WIDE)
    return (
        f"One step, checkpoints: {plan.strategy}\n"
        f"{size(plan.predicted_peak_bytes)} instead of {size(plan.stock_peak_bytes)} "
        f"for {100 * plan.extra_fraction:.1f} % more work"
    )


def _mark_stock(axes: Axes, plan: Plan, size: float) -> None:
    """Stock's peak, where all that is recomputed is inside of bodies: the graph that
    was simulated is the same, and there is no curve of its own."""
    text = sizes_like(plan.stock_peak_bytes)(plan.stock_peak_bytes)
    label = f"stock: peak {text}, with loops and the like that hold everything"
    axes.axhline(plan.stock_peak_bytes / size, color=_STOCK, linewidth=1.6, label=label)


def _starts(plan: Plan, timeline: Timeline, second: float) -> list[float]:
    """When each step starts, and when the last one ends."""
    ops = plan.reading.graph.ops
    times = (ops[step.op].seconds / second for step in timeline.steps)
    return list(accumulate(times, initial=0.0))


def _mark_peak(
    axes: Axes,
    plan: Plan,
    label: str,
    timeline: Timeline,
    starts: list[float],
    size: float,
    color: str,
) -> None:
    from matplotlib.patheffects import withStroke

    at = timeline.peak_step
    step = timeline.steps[at]
    name = plan.reading.graph.ops[step.op].name
    if len(name) > _NAME:
        name = f"...{name[3 - _NAME :]}"
    text = sizes_like(plan.stock_peak_bytes)(timeline.peak_bytes)
    doing = f"while {name} is recomputed" if step.copy else f"at {name}"
    x, y = starts[at], timeline.peak_bytes / size
    marker: dict[str, Any] = {"color": color, "markersize": 8, "zorder": 4}
    axes.plot([x], [y], "o-", label=f"{label}: peak {text}, {doing}", **marker)
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 9),
        textcoords="offset points",
        ha="center",
        color=INK,
        fontweight="bold",
        # A rim, and no box: it hides less of the curves behind.
        path_effects=[withStroke(linewidth=3, foreground="white")],
        zorder=5,
    )


def _mark_kept(axes: Axes, plan: Plan, second: float, size: float) -> None:
    """Triangles where the planned run makes what it keeps."""
    graph = plan.reading.graph
    held = set(plan.kept)
    # A round size: it is a rule of thumb, and stands in the legend.
    least = 2 ** math.floor(math.log2(max(_MARKED * plan.predicted_peak_bytes, 1)))
    unit, unit_size = byte_unit(least)
    large = [t for t in graph.tensors if t.name in held and t.bytes >= least]
    makers = {t.op for t in large}
    starts = _starts(plan, plan.timeline, second)
    found = [
        (starts[n], plan.timeline.live_bytes[n] / size)
        for n, step in enumerate(plan.timeline.steps)
        if step.op in makers and not step.copy
    ]
    if not found or plan.timeline is plan.stock:
        return
    axes.plot(
        [x for x, _ in found],
        [y for _, y in found],
        "v",
        color="white",
        markeredgecolor=INK,
        markersize=7,
        zorder=3,
        label=f"made here and kept: {counted(len(large), 'tensor')} of {len(held)}, "
        f"those of {least // unit_size} {unit} and more",
    )


def _mark_turn(axes: Axes, plan: Plan, second: float) -> None:
    """Where the backward pass begins."""
    first = len(plan.timeline.steps) - len(plan.schedule.steps)
    if plan.timeline is plan.stock or not 0 < first < len(plan.timeline.steps):
        return
    axes.axvline(
        _starts(plan, plan.timeline, second)[first],
        color="#6b6b6b",
        linestyle=":",
        linewidth=1.2,
        label="the planned backward pass begins",
    )
