"""Puts runs of ops into lanes in which they do not overlap, and thins what is drawn."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mem_util.records import Span

__all__ = ["assign_lanes", "thin_curve", "thin_spans"]


def assign_lanes(spans: Sequence[Span]) -> dict[tuple[str, str, int], list[Span]]:
    """Splits spans by device and stream, and again where they overlap in time.

    Executor threads are many and interchangeable, so ops of a CPU are packed into as
    few lanes as their overlap needs, whatever their threads; a stream of a GPU keeps
    its own. Greedy by start, which is optimal for intervals: O(n log n).

    Args:
        spans: by start.

    Returns:
        (device, stream or "", number) to spans that do not overlap, by start.
    """
    lanes: dict[tuple[str, str, int], list[Span]] = {}
    free: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for span in spans:
        group = (span.device, span.lane if "/gpu:" in span.device else "")
        heap = free.setdefault(group, [])
        if heap and heap[0][0] <= span.start_ns:
            _, number = heapq.heappop(heap)
        else:
            number = len(heap)
        heapq.heappush(heap, (span.end_ns, number))
        lanes.setdefault((*group, number), []).append(span)
    return {key: lanes[key] for key in sorted(lanes)}


def thin_spans(spans: Sequence[Span], resolution_ns: float) -> list[Span]:
    """Joins neighbours too short to be seen, so that a picture stays small.

    Args:
        spans: of one lane, by start.
        resolution_ns: what one pixel stands for.

    Returns:
        Spans of which no two lie within one pixel; joined ones have the kind of the
        longest of them.
    """
    thinned: list[Span] = []
    longest = 0
    for span in spans:
        length = span.end_ns - span.start_ns
        last = thinned[-1] if thinned else None
        if last is None or span.end_ns - last.start_ns > resolution_ns:
            thinned.append(span)
            longest = length
            continue
        kind = span.kind if length > longest else last.kind
        longest = max(longest, length)
        end = max(last.end_ns, span.end_ns)
        thinned[-1] = Span(last.op, kind, last.device, last.lane, last.start_ns, end)
    return thinned


def thin_curve(
    times: Sequence[float], levels: Sequence[float], limit: int = 4000
) -> tuple[list[float], list[float]]:
    """Keeps the first, last, lowest and highest point of each of `limit` / 4 intervals.

    Neither the peak nor a spike narrower than a pixel is lost.

    Args:
        times: ascending.
        levels: as many.
        limit: about how many points to keep.

    Returns:
        Times and levels.
    """
    if len(times) <= limit:
        return list(times), list(levels)
    begin, width = times[0], (times[-1] - times[0]) / max(1, limit // 4) or 1.0
    kept: list[int] = []
    start = 0
    for index in range(1, len(times) + 1):
        if index < len(times) and (
            int((times[index] - begin) / width) == int((times[start] - begin) / width)
        ):
            continue
        inside = range(start, index)
        low, high = (
            min(inside, key=levels.__getitem__),
            max(inside, key=levels.__getitem__),
        )
        kept += sorted({start, low, high, index - 1})
        start = index
    return [times[i] for i in kept], [levels[i] for i in kept]
