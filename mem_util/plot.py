"""Timelines of live bytes as pictures, and what all pictures here share.

`draw_curves` lays any number of timelines over each other. It takes plain numbers, so
that it also serves timelines that were not measured but predicted. Everything is drawn
with matplotlib's Agg canvas alone (no window, no global state, no display needed) and
thinned to what a pixel can show. A whole trace is drawn by `mem_util.plot_trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from mem_util.errors import NoMemoryDataError
from mem_util.lanes import thin_curve
from mem_util.paths import picture_path
from mem_util.records import byte_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "DPI",
    "INK",
    "LINES",
    "Curve",
    "byte_unit",
    "curves_figure",
    "draw_curves",
    "draw_level",
    "new_figure",
    "style_axes",
]

DPI = 150
INK = "#22384f"
LINES = ("#1f6fb2", "#e07b1a", "#2a9461", "#8a5bb0", "#b0413e", "#6b6b6b")
_WIDTH_INCHES = 12.0


@dataclass(frozen=True)
class Curve:
    """Live bytes over time, measured or predicted, as plain numbers.

    Attributes:
        label: what the legend calls it.
        times: ascending; seconds, or steps, or a fraction of the step.
        live_bytes: the level from each time on, in bytes.
        dashed: whether the line has gaps, through which one below it is seen.
    """

    label: str
    times: Sequence[float]
    live_bytes: Sequence[float]
    dashed: bool = False

    @property
    def line_style(self) -> str:
        """What matplotlib calls it."""
        return "--" if self.dashed else "-"


def draw_curves(
    path: str | PathLike[str],
    curves: Iterable[Curve | tuple[str, Sequence[float], Sequence[float]]],
    title: str = "Live bytes",
    x_label: str = "time (s)",
) -> None:
    """Lays timelines over each other, the peak of each marked, and writes a picture.

    Args:
        path: of the picture; the suffix says which kind, a PNG without one.
        curves: `Curve`s, or tuples (label, times, bytes).
        title: what stands above.
        x_label: what the times are, with their unit.

    Raises:
        NoMemoryDataError: there is no curve, or one without points.
        TypeError, ValueError, FileNotFoundError: no picture can be written there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_curves(
        ...         f"{folder}/both.png",
        ...         [("measured", [0.0, 0.1], [5e6, 1e6]), ("predicted", [0], [5e6])],
        ...     )
    """
    file = picture_path(path, "mem_util.draw_curves")
    curves_figure(curves, title, x_label).savefig(file, dpi=DPI)


def curves_figure(
    curves: Iterable[Curve | tuple[str, Sequence[float], Sequence[float]]],
    title: str = "Live bytes",
    x_label: str = "time (s)",
) -> Figure:
    """The figure of `draw_curves`, with its arguments."""
    given = [c if isinstance(c, Curve) else Curve(*c) for c in curves]
    empty = [c.label for c in given if not len(c.times)]
    if empty or not given:
        raise NoMemoryDataError(
            "`mem_util.draw_curves`: expected curves with points, but got "
            f"{'none' if not given else 'no points for ' + ', '.join(empty)}."
        )
    figure = new_figure(5.5)
    axes = figure.add_subplot()
    unit, size = byte_unit(max(max(c.live_bytes) for c in given))
    for number, curve in enumerate(given):
        color = LINES[number % len(LINES)]
        draw_level(axes, curve, size, color, fill=0.10)
        peak = max(range(len(curve.times)), key=curve.live_bytes.__getitem__)
        at, level = curve.times[peak], curve.live_bytes[peak] / size
        label = f"{curve.label}: peak {format_bytes(curve.live_bytes[peak])}"
        axes.plot(
            [at],
            [level],
            f"o{curve.line_style}",
            color=color,
            markersize=7,
            markerfacecolor="none" if curve.dashed else color,
            label=label,
        )
    style_axes(axes, f"live memory ({unit})")
    axes.set_xlabel(x_label)
    axes.margins(x=0.01)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none")
    return figure


def new_figure(height_inches: float) -> Figure:
    """A figure of its own, outside of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes, y_label: str) -> None:
    axes.set_ylabel(y_label)
    axes.grid(True, color="#e6e9ec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_level(axes: Axes, curve: Curve, size: float, color: str, fill: float) -> None:
    """The level as steps, with the area below."""
    times, levels = thin_curve(curve.times, curve.live_bytes)
    scaled = [level / size for level in levels]
    axes.fill_between(times, scaled, step="post", color=color, alpha=fill, linewidth=0)
    style = curve.line_style
    axes.step(times, scaled, where="post", color=color, linewidth=1.4, linestyle=style)
