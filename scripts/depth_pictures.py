"""The two pictures of `compare_depths.py`: peak memory and step time against depth.

The ResNets have the large panel, with the fitted trends and the deepest network that
fits into the memory of a small one; transformers and chains have small ones beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depths import FEWEST_DEPTHS, Trend, fit_trend
from tables import MIB, counted

__all__ = ["draw_memory", "draw_time", "trends"]

Row = dict[str, Any]
COLORS = {"stock": "#b0413e", "memory": "#1f6f8b", "speed": "#e0a030"}
MARKERS = {"stock": "o", "memory": "D", "speed": "s"}
# Drawn last: hollow and dotted, it lets what it coincides with be seen.
HOLLOW = "speed"
INK = "#22384f"
XLABELS = {"ResNet": "layers", "transformer": "layers", "chain": "ops"}


def trends(rows: Sequence[Row]) -> dict[tuple[str, str], Trend]:
    """By family and mode: the line in n for stock, in sqrt(n) for "memory".

    There is none of fewer than three depths.
    """
    found = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        for mode, power in (("stock", 1.0), ("memory", 0.5)):
            layers, peaks = _points(rows, family, mode, "peak_bytes")
            if len(set(layers)) >= FEWEST_DEPTHS:
                found[family, mode] = fit_trend(layers, peaks, power)
    return found


def _points(
    rows: Sequence[Row], family: str, mode: str, key: str
) -> tuple[list[int], list[float]]:
    chosen = [
        r for r in rows if (r["family"], r["mode"]) == (family, mode) and key in r
    ]
    return [row["layers"] for row in chosen], [row[key] for row in chosen]


def draw_memory(
    path: Path, rows: Sequence[Row], deepest: Sequence[Row], batch: int
) -> None:
    """Peak memory against depth, with the trends."""
    figure, panels = _figure(rows)
    fitted = trends(rows)
    for number, (family, axes) in enumerate(panels.items()):
        unit, size = _unit(rows, family)
        if deepest and deepest[0]["family"] == family:
            _draw_deepest(axes, deepest, size)
        _draw_lines(axes, rows, family, "peak_bytes", "peak_of_stock", size)
        for mode in ("stock", "memory"):
            if (family, mode) in fitted:
                _draw_trend(axes, fitted[family, mode], mode, size, unit)
        axes.set_ylabel(f"peak memory, {unit}")
        _finish_panel(axes, family, batch, None if number else "upper right")
    _finish(figure, "Peak memory of a training step", path)


def draw_time(
    path: Path, rows: Sequence[Row], deepest: Sequence[Row], batch: int
) -> None:
    """Seconds of a step against depth."""
    figure, panels = _figure(rows)
    for number, (family, axes) in enumerate(panels.items()):
        _draw_lines(axes, rows, family, "seconds", "time_of_stock", 1.0)
        if deepest and deepest[0]["family"] == family:
            _draw_time_of_deepest(axes, deepest)
        axes.set_ylabel("seconds per step")
        _finish_panel(axes, family, batch, None if number else "upper left")
    _finish(figure, "Time of a training step", path)


# ---- parts


def _figure(rows: Sequence[Row]) -> tuple[Any, dict[str, Any]]:
    """The large panel to the left, the others beside it, one below the other."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["family"] for row in rows))
    figure = Figure(figsize=(10, 5), layout="constrained")
    if len(names) == 1:
        return figure, {names[0]: figure.subplots()}
    grid = figure.add_gridspec(len(names) - 1, 2, width_ratios=(2.1, 1))
    panels = {names[0]: figure.add_subplot(grid[:, 0])}
    for place, name in enumerate(names[1:]):
        panels[name] = figure.add_subplot(grid[place, 1])
    return figure, panels


def _unit(rows: Sequence[Row], family: str) -> tuple[str, int]:
    largest = max(r.get("peak_bytes", 0) for r in rows if r["family"] == family)
    return ("GiB", 2**30) if largest >= 4 * 2**30 else ("MiB", MIB)


def _draw_lines(
    axes: Any, rows: Sequence[Row], family: str, key: str, ratio_key: str, size: float
) -> None:
    """What was measured; at the end of each line stands what it is of stock's."""
    fitted = ("stock", "memory") if key == "peak_bytes" else ()
    ends: dict[str, list[tuple[str, tuple[float, float]]]] = {}
    for mode, color in COLORS.items():
        layers, values = _points(rows, family, mode, key)
        if not layers:
            continue
        axes.plot(
            layers,
            np.asarray(values) / size,
            color=color,
            marker=MARKERS[mode],
            markersize=8 if mode == HOLLOW else 5.5,
            markerfacecolor="none" if mode == HOLLOW else color,
            linestyle=":" if mode == HOLLOW else "-",
            linewidth=0 if mode in fitted else 1.6,
            label=mode,
        )
        compared, ratios = _points(rows, family, mode, ratio_key)
        if not ratios or mode == "stock" or key != "peak_bytes":
            continue
        text = f"{ratios[-1]:.2f} of stock"
        at = (compared[-1], values[layers.index(compared[-1])] / size)
        ends.setdefault(text, []).append((mode, at))
    for text, met in ends.items():  # where two lines meet, one text names both
        mode, at = met[0]
        if len(met) > 1:
            text = f"{' and '.join(mode for mode, _ in met)}:\n{text}"
        _note(axes, text, at, COLORS[mode])


def _note(axes: Any, text: str, at: tuple[float, float], color: str) -> None:
    """A small text right of a point where there is room, else above or below it."""
    offset, horizontal, vertical = (4, 7), "right", "bottom"
    if at[0] < 0.6 * axes.get_xlim()[1]:
        offset, horizontal, vertical = (9, -3), "left", "top"
    elif "\n" in text:
        offset = (4, 12)
    elif color == COLORS["memory"] and at[1] > 0.15 * axes.get_ylim()[1]:
        offset, vertical = (4, -7), "top"
    axes.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        ha=horizontal,
        va=vertical,
        fontsize="small",
        color=color,
    )


def _draw_trend(axes: Any, trend: Trend, mode: str, size: float, unit: str) -> None:
    """The fitted line under the points, over the width and height that they take."""
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    layers = np.linspace(1e-9, right, 400)
    values = trend(layers) / size
    inside = (values >= 0) & (values <= top)
    root = r"n" if trend.power == 1 else r"\sqrt{n}"
    sign = "+" if trend.slope >= 0 else "-"
    formula = f"{trend.constant / size:.3g} {sign} {abs(trend.slope) / size:.3g}"
    axes.plot(
        layers[inside],
        values[inside],
        color=COLORS[mode],
        linewidth=1.4,
        linestyle="--" if mode == "memory" else "-",
        alpha=0.85,
        label=rf"${formula}\,{root}$ {unit}",
        zorder=1,
    )
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)


def _star(axes: Any, layers: int, value: float) -> None:
    color = COLORS["memory"]
    axes.plot([layers], [value], color=color, marker="*", markersize=15, linewidth=0)


def _draw_deepest(axes: Any, deepest: Sequence[Row], size: float) -> None:
    """An arrow from stock's network to the deepest one in the same memory."""
    stock, deep = deepest[:2]
    level = stock["peak_bytes"] / size
    _star(axes, deep["layers"], deep["peak_bytes"] / size)
    arrow = {"arrowstyle": "->", "color": INK, "linestyle": ":", "linewidth": 1.3}
    ends = {"xy": (deep["layers"], level), "xytext": (stock["layers"], level)}
    axes.annotate("", **ends, arrowprops=arrow | {"shrinkB": 9})
    axes.annotate(
        f"in the memory of {counted(stock['layers'], 'layer')}: "
        f"{counted(deep['layers'], 'layer')},\n"
        f"{deep['deeper']:.1f} x as deep at {deep['layer_time_of_stock']:.2f} x "
        "the time per layer",
        (deep["layers"], level),
        xytext=(0, 12),
        textcoords="offset points",
        ha="right",
        va="bottom",
        linespacing=1.4,
        color=INK,
    )


def _draw_time_of_deepest(axes: Any, deepest: Sequence[Row]) -> None:
    """The deepest network, stock's time for it, and what it were at a constant rate."""
    stock, deep = deepest[:2]
    layers, per_layer = deep["layers"], stock["seconds_per_layer"]
    _star(axes, layers, deep["seconds"])
    axes.plot(
        [0, layers],
        [0, per_layer * layers],
        color=COLORS["stock"],
        linewidth=1.2,
        linestyle=":",
        zorder=1,
        label=f"stock's time per layer (of {counted(stock['layers'], 'layer')})",
    )
    text = f"{counted(layers, 'layer')} in stock's memory of {stock['layers']}:\n"
    text += f"{deep['layer_time_of_stock']:.2f} x the time per layer"
    for rival in deepest[2:]:
        color = COLORS["stock"]
        axes.plot([layers], [rival["seconds"]], color=color, marker="o", markersize=5.5)
        text += f",\n{deep['time_of_stock']:.2f} x stock's step of that network"
    corner = {"ha": "right", "va": "bottom", "transform": axes.transAxes}
    axes.text(0.96, 0.08, text, **corner, linespacing=1.4, color=INK)


def _finish_panel(axes: Any, family: str, batch: int, legend: str | None) -> None:
    name = f"ResNets, batch {batch}" if family == "ResNet" else f"{family}s"
    axes.set_title(name, loc="left", color=INK)
    axes.set_xlabel(XLABELS.get(family, "layers"))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.06)
    axes.grid(True, color="#e6e9ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize="small", loc=legend)


def _finish(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: compare_depths.py imports it.")
