"""Writes a `Trace` in Chrome's trace-event format, for Perfetto or chrome://tracing.

One process for each device. In it: complete events ("X") for runs of ops, a thread for
each lane, and counter events ("C") for live bytes. Times are microseconds from the
first moment of the trace. Nothing is thinned: the viewers take 50 000 ops well.
"""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

from mem_util.errors import NoMemoryDataError
from mem_util.lanes import assign_lanes
from mem_util.paths import output_path
from mem_util.trace_data import Trace

__all__ = ["chrome_trace", "write_chrome_trace"]


def chrome_trace(traced: Trace) -> dict[str, Any]:
    """The trace as a JSON-like object.

    Args:
        traced: what to write.

    Returns:
        A dict with `traceEvents` (a list), `displayTimeUnit` and `otherData`.

    Raises:
        NoMemoryDataError: there are neither allocations nor runs of ops.
    """
    if not traced.timelines and not traced.spans:
        why = "; ".join(f"{n}: {reason}" for n, reason in traced.missing.items())
        raise NoMemoryDataError(
            "`mem_util.chrome_trace`: expected allocations or runs of ops, but got an "
            f"empty trace ({why or 'no device ran anything'})."
        )
    lanes = assign_lanes(traced.spans)
    devices = sorted({*traced.timelines, *(device for device, _, _ in lanes)})
    pids = {device: pid for pid, device in enumerate(devices, start=1)}
    events: list[dict[str, Any]] = [
        _named("process_name", pid, 0, device) for device, pid in pids.items()
    ]
    origin = traced.origin_ns
    for tid, ((device, lane, number), spans) in enumerate(lanes.items(), start=1):
        label = f"{lane or 'ops'} {number + 1}" if number else (lane or "ops")
        events.append(_named("thread_name", pids[device], tid, label))
        events += [
            {
                "name": span.kind or span.op,
                "cat": "op",
                "ph": "X",
                "pid": pids[device],
                "tid": tid,
                "ts": (span.start_ns - origin) / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {"op": span.op},
            }
            for span in spans
        ]
    for device, line in traced.timelines.items():
        events += _counter(line, pids[device], origin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": traced.source, "notes": " ".join(traced.notes)},
    }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """A metadata event: the name of a process or thread."""
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _counter(line: Any, pid: int, origin_ns: int) -> list[dict[str, Any]]:
    """Live bytes as counter events, the rest first."""
    name = f"live bytes {line.device}"
    points = [(line.times_ns[0], line.rest_bytes)]
    points += zip(line.times_ns, line.live_bytes, strict=True)
    return [
        {
            "name": name,
            "ph": "C",
            "pid": pid,
            "tid": 0,
            "ts": (time_ns - origin_ns) / 1000,
            "args": {"bytes": level},
        }
        for time_ns, level in points
    ]


def write_chrome_trace(path: str | PathLike[str], traced: Trace) -> None:
    """Writes `chrome_trace(traced)` to a ".json" file; the arguments are its own.

    Args:
        path: of the file.
        traced: what to write.

    Raises:
        NoMemoryDataError: there are neither allocations nor runs of ops.
        TypeError, ValueError, FileNotFoundError: no file can be written there.
    """
    file = output_path(path, "mem_util.write_chrome_trace")
    text = json.dumps(chrome_trace(traced), separators=(",", ":"))
    file.write_text(text, encoding="utf-8")
