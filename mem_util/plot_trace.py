"""One trace as a picture: live bytes, what is alive at the peak, when each op ran."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

from mem_util.errors import NoMemoryDataError, counted
from mem_util.lanes import assign_lanes, thin_spans
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
from mem_util.records import Span, Timeline, format_bytes
from mem_util.trace_data import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_trace", "trace_figure"]

_WIDTH_PIXELS = 1400  # of the axes, about
_MAX_LANES = 12
_MAX_BARS = 10
_PEAK, _GREY = "#c8102e", "#b8bfc6"
_KINDS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#b07aa1",
    "#edc948",
    "#76b7b2",
    "#e15759",
    "#9c755f",
)
_OTHER_KIND = "other"


def draw_trace(
    path: str | PathLike[str], traced: Trace, title: str | None = None
) -> None:
    """Writes `trace_figure(traced, title)` to a picture.

    Args:
        path: of the picture; the suffix says which kind, a PNG without one.
        traced: what to draw.
        title: what stands above; the trace's source by default.

    Raises:
        NoMemoryDataError: there are neither timelines nor spans.
        TypeError, ValueError, FileNotFoundError: no picture can be written there.
    """
    file = picture_path(path, "mem_util.draw_trace")
    trace_figure(traced, title).savefig(file, dpi=DPI)


def trace_figure(traced: Trace, title: str | None = None) -> Figure:
    """Draws a trace: for each device live bytes and its largest tensors, then op spans.

    Args:
        traced: what to draw. Either timelines or spans may be missing.
        title: what stands above; the trace's source by default.

    Returns:
        The figure. Its axes come in rows of two: time on the left, a ranking on the
        right; a row for each device, and one for spans.

    Raises:
        NoMemoryDataError: there are neither timelines nor spans.
    """
    lanes = _busiest(assign_lanes(traced.spans))
    devices = list(traced.timelines.values())
    if not devices and not lanes:
        why = "; ".join(f"{n}: {reason}" for n, reason in traced.missing.items())
        raise NoMemoryDataError(
            "`mem_util.draw_trace`: expected allocations or runs of ops, but got an "
            f"empty trace ({why or 'no device ran anything'})."
        )
    heights = [3.4] * len(devices)
    if lanes:
        heights.append(0.9 + 0.26 * max(len(lanes), 4))
    figure = new_figure(sum(heights) + 0.8)
    grid = figure.add_gridspec(
        len(heights), 2, width_ratios=(3.1, 1.0), height_ratios=heights
    )
    seconds, time_unit, time_size = _time_axis(traced)
    first: Any = None
    for row, line in enumerate(devices):
        axes = figure.add_subplot(grid[row, 0], sharex=first)
        first = first or axes
        _draw_device(axes, line, traced.origin_ns, time_size, seconds / time_size)
        _draw_alive(figure.add_subplot(grid[row, 1]), line)
    if lanes:
        axes = figure.add_subplot(grid[-1, 0], sharex=first)
        first = first or axes
        totals = _time_by_kind(traced.spans)
        resolution_ns = seconds * 1e9 / _WIDTH_PIXELS
        _draw_lanes(axes, lanes, totals, traced.origin_ns, time_size, resolution_ns)
        _draw_kinds(figure.add_subplot(grid[-1, 1]), totals)
    axes.set_xlabel(f"time ({time_unit})")
    first.set_xlim(0, seconds / time_size)
    for row in range(len(heights) - 1):
        figure.axes[2 * row].tick_params(labelbottom=False)
    _titles(figure, traced, title)
    return figure


def _titles(figure: Figure, traced: Trace, title: str | None) -> None:
    """The title, and below the picture why devices or times are missing."""
    text = title or f"Memory timeline ({traced.source})"
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold", color=INK)
    said = [f"{name}: no data, because {why}." for name, why in traced.missing.items()]
    said += traced.notes
    if said:
        lines = [part for note in said for part in textwrap.wrap(note, 170)]
        figure.supxlabel(
            "\n".join(lines[:6]), x=0.01, ha="left", fontsize=7.5, color="#555555"
        )


def _time_axis(traced: Trace) -> tuple[float, str, float]:
    """Seconds that the trace lasts, the unit of its axis, and that unit in seconds."""
    ends = [line.times_ns[-1] for line in traced.timelines.values()]
    ends += [span.end_ns for span in traced.spans]
    seconds = max((max(ends) - traced.origin_ns) * 1e-9, 1e-9)
    if seconds >= 2:
        return seconds, "s", 1.0
    return (seconds, "ms", 1e-3) if seconds >= 1e-3 else (seconds, "µs", 1e-6)


def _draw_device(
    axes: Axes, line: Timeline, origin_ns: int, time_size: float, end: float
) -> None:
    """One device's live bytes, its rest, and its peak with the op that set it."""
    seconds, levels = line.curve(origin_ns)
    unit, size = byte_unit(line.peak_bytes)
    times = [0.0, *(s / time_size for s in seconds), end]
    curve = Curve("", times, [line.rest_bytes, *levels, levels[-1]])
    draw_level(axes, curve, size, LINES[0], fill=0.22)
    if line.rest_bytes:
        axes.axhline(line.rest_bytes / size, color="#777777", linestyle=":", lw=1)
        rest = f" at rest {format_bytes(line.rest_bytes)}"
        axes.annotate(
            rest,
            (1.0, line.rest_bytes / size),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color="#555555",
        )
    at = (line.peak_time_ns - origin_ns) * 1e-9 / time_size
    peak = line.peak_bytes / size
    axes.plot([at], [peak], "o", color=_PEAK, markersize=6, zorder=5)
    axes.set_ylim(0, peak * 1.22)
    note = axes.annotate(
        f"peak {format_bytes(line.peak_bytes)}, set by {_shorten(line.peak_op, 40)}",
        (at, peak),
        textcoords="offset points",
        xytext=(8 if at < end / 2 else -8, 9),
        ha="left" if at < end / 2 else "right",
        color=_PEAK,
        fontweight="bold",
        fontsize=9.5,
    )
    note.set_in_layout(False)  # a long name must not squeeze the axes
    style_axes(axes, f"live memory, {line.device} ({unit})")


def _draw_alive(axes: Axes, line: Timeline) -> None:
    """The largest tensors alive at the peak, as bars, and what the others come to."""
    alive = line.alive_at_peak()
    shown, others = alive[:_MAX_BARS], alive[_MAX_BARS:]
    unit, size = byte_unit(shown[0].bytes if shown else 1)
    labels = [_shorten(buffer.op or "(no op)", 32) for buffer in shown]
    values = [buffer.bytes / size for buffer in shown]
    places = range(len(shown))
    axes.barh(places, values, color=LINES[0], alpha=0.35, height=0.72)
    # Names lie over the bars: beside them they would take half of the width.
    for place, label in zip(places, labels, strict=True):
        axes.text(0, place, f" {label}", va="center", fontsize=7.5, color=INK)
    axes.set_ylim(_MAX_BARS - 0.4, -0.6)
    axes.set_yticks([])
    total = format_bytes(sum(buffer.bytes for buffer in others))
    rest = f"\nand {counted(len(others), 'other')}, {total}" if others else ""
    axes.set_xlabel(f"size ({unit}){rest}", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_title("largest tensors alive at the peak", fontsize=9, color=INK)
    style_axes(axes, "")


def _busiest(
    lanes: dict[tuple[str, str, int], list[Span]],
) -> dict[tuple[str, str, int], list[Span]]:
    """At most `_MAX_LANES` lanes, those with most work, in their order."""

    def work(key: tuple[str, str, int]) -> int:
        return sum(span.end_ns - span.start_ns for span in lanes[key])

    chosen = set(sorted(lanes, key=work, reverse=True)[:_MAX_LANES])
    return {key: spans for key, spans in lanes.items() if key in chosen}


def _time_by_kind(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by kind of op, most first; small kinds are joined under "other"."""
    totals: dict[str, float] = {}
    for span in spans:
        kind = span.kind or _OTHER_KIND
        totals[kind] = totals.get(kind, 0.0) + (span.end_ns - span.start_ns) * 1e-9
    ranked = sorted(totals, key=lambda kind: (-totals[kind], kind))
    visible = sum(totals.values()) / 500
    named = [kind for kind in ranked if kind != _OTHER_KIND and totals[kind] > visible]
    kept = named[: len(_KINDS)]
    result = {kind: totals[kind] for kind in kept}
    rest = sum(totals[kind] for kind in ranked if kind not in result)
    return {**result, _OTHER_KIND: rest} if rest else result


def _colors(totals: dict[str, float]) -> dict[str, str]:
    named = [kind for kind in totals if kind != _OTHER_KIND]
    return dict(zip(named, _KINDS, strict=False))


def _draw_lanes(
    axes: Axes,
    lanes: dict[tuple[str, str, int], list[Span]],
    totals: dict[str, float],
    origin_ns: int,
    time_size: float,
    resolution_ns: float,
) -> None:
    """When each op ran, one row a lane, coloured by kind."""
    from matplotlib.collections import PolyCollection

    colors = _colors(totals)
    boxes, faces, edges = [], [], []
    for row, spans in enumerate(lanes.values()):
        for span in thin_spans(spans, resolution_ns):
            # At least half a pixel wide, or the picture would show less than there is.
            length = max(span.end_ns - span.start_ns, resolution_ns / 2)
            left = (span.start_ns - origin_ns) * 1e-9 / time_size
            right = left + length * 1e-9 / time_size
            low, high = row - 0.4, row + 0.4
            boxes.append([(left, low), (left, high), (right, high), (right, low)])
            faces.append(colors.get(span.kind, _GREY))
            # A white edge tells neighbours apart, where there is room for one.
            edges.append(0.6 if length > 6 * resolution_ns else 0.0)
    axes.add_collection(
        PolyCollection(boxes, facecolors=faces, edgecolors="white", linewidths=edges)
    )
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    labels = []
    for device, lane, number in lanes:
        name = f"{device} {_shorten(lane, 18)}".strip()
        labels.append(f"{name} [{number + 1}]" if number else name)
    axes.set_yticks(range(len(lanes)), labels, fontsize=8)
    style_axes(axes, "runs of ops")


def _draw_kinds(axes: Axes, totals: dict[str, float]) -> None:
    """The legend of `_draw_lanes`, as bars of the time that each kind took."""
    colors = _colors(totals)
    places = range(len(totals))
    unit, size = ("ms", 1e-3) if max(totals.values()) >= 1e-4 else ("µs", 1e-6)
    values = [seconds / size for seconds in totals.values()]
    axes.barh(places, values, color=[colors.get(k, _GREY) for k in totals], height=0.72)
    # oneDNN's prefix would be all that is left to read of these names.
    names = [_shorten(kind.removeprefix("_MklNative"), 18) for kind in totals]
    axes.set_yticks(places, names, fontsize=7.5)
    axes.set_ylim(len(totals) - 0.4, -0.6)
    axes.set_xlabel(f"time of all runs ({unit})", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=5)
    style_axes(axes, "")


def _shorten(name: str, limit: int) -> str:
    """Cuts the beginning off a long name: names in one scope differ at their ends."""
    return name if len(name) <= limit else f"…{name[len(name) - limit + 1 :]}"
