"""Timelines as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mem_util.errors import NoMemoryDataError, counted
from mem_util.records import Timeline, format_bytes
from mem_util.run_metadata import read_step_stats
from mem_util.trace_data import Trace

__all__ = ["print_memory_timeline", "summary", "timeline_lines"]


def print_memory_timeline(
    run_metadata: Any, device: str | None = None, ignore_less_than_bytes: int = 0
) -> None:
    """Prints each change of live bytes in a step of a v1 session, and the peak.

    Args:
        run_metadata: the `RunMetadata` of a `session.run` with `FULL_TRACE`.
        device: the one device to print, such as "/gpu:0", "GPU:0" or "gpu"; all by
            default.
        ignore_less_than_bytes: changes smaller than this are counted, not printed.

    Raises:
        MissingDeviceError: the device has no allocations; the message says why.
        NoMemoryDataError: none has any.
        TypeError: it is no `RunMetadata`.
    """
    traced = read_step_stats(run_metadata, "print_memory_timeline")
    if not traced.timelines and device is None:
        reasons = [f"{name}: {why}" for name, why in traced.missing.items()]
        raise NoMemoryDataError(
            "`mem_util.print_memory_timeline`: expected allocation records, but got "
            f"{'; '.join(reasons) or 'empty step stats'}. `session.run` records them "
            "with `options=tf.compat.v1.RunOptions(trace_level=RunOptions.FULL_TRACE)` "
            "and `run_metadata=`."
        )
    names = list(traced.timelines) if device is None else [device]
    for name in names:
        for line in timeline_lines(traced.timeline(name), ignore_less_than_bytes):
            print(line)
    if device is None:
        for name, reason in traced.missing.items():
            print(f"{name}: no data, because {reason}.")
    for note in traced.notes:
        print(f"Note: {note}")


def timeline_lines(
    timeline: Timeline, ignore_less_than_bytes: int = 0
) -> Iterator[str]:
    """Yields a table: milliseconds, change and level in bytes, op; the peak marked."""
    yield f"{timeline.device}"
    yield f"{'time (ms)':>12} {'change (B)':>15} {'live (B)':>15}  op"
    before = timeline.rest_bytes
    for index, time_ns in enumerate(timeline.times_ns):
        level = timeline.live_bytes[index]
        change, before = level - before, level
        is_peak = index == timeline.peak_index
        if abs(change) < ignore_less_than_bytes and not is_peak:
            continue
        time_ms = (time_ns - timeline.times_ns[0]) * 1e-6
        mark = "  <- peak" if is_peak else ""
        op = timeline.ops[index] or "(no op)"
        yield f"{time_ms:12.3f} {change:+15,d} {level:15,d}  {op}{mark}"
    yield f"peak {format_bytes(timeline.peak_bytes)}, set by {timeline.peak_op}"


def summary(traced: Trace, device: str | None = None, top: int = 5) -> str:
    """The peak of each device, and the largest tensors alive at it, as text.

    Args:
        traced: the trace.
        device: the one device to show, such as "/gpu:0", "GPU:0" or "gpu"; all by
            default.
        top: how many tensors to list.

    Raises:
        MissingDeviceError: `device` has no allocations; the message says why.
    """
    names = list(traced.timelines)
    if device is not None:
        names = [traced.timeline(device).device]
    lines = [f"From {traced.source}: {counted(len(traced.spans), 'run')} of ops."]
    if names:
        lines.append(
            f"{'device':<10} {'peak':>10} {'rest':>10} {'above rest':>11} "
            f"{'at (ms)':>10}  set by"
        )
    for name in names:
        line = traced.timeline(name)
        at_ms = (line.peak_time_ns - traced.origin_ns) * 1e-6
        lines.append(
            f"{name:<10} {format_bytes(line.peak_bytes):>10} "
            f"{format_bytes(line.rest_bytes):>10} "
            f"{format_bytes(line.peak_bytes - line.rest_bytes):>11} "
            f"{at_ms:>10.3f}  {line.peak_op or '(no op)'}"
        )
    for name in names:
        if slack := traced.timeline(name).peak_slack_bytes:
            lines.append(
                f"{name}: {format_bytes(slack)} of the peak is what the allocator's "
                "chunks are larger than their tensors."
            )
        lines += _alive_lines(traced.timeline(name), top)
    if device is None:
        lines += [f"{n}: no data, because {why}." for n, why in traced.missing.items()]
    lines += [f"Note: {note}" for note in traced.notes]
    return "\n".join(lines)


def _alive_lines(line: Timeline, top: int) -> list[str]:
    """The largest tensors alive at the peak, and how much the others come to."""
    alive = line.alive_at_peak()
    shown, others = alive[:top], alive[top:]
    lines = [f"Alive at the peak of {line.device}:"] if shown else []
    lines += [f"{format_bytes(b.bytes):>12}  {b.op or '(no op)'}" for b in shown]
    if shown and others:
        total = format_bytes(sum(buffer.bytes for buffer in others))
        lines.append(f"{total:>12}  {counted(len(others), 'other')} together")
    return lines
