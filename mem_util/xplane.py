"""Reads the profiler's XPlane (`*.xplane.pb`) into timelines and spans.

What is in it, and what is made of it:

* Events named `MemoryAllocation` and `MemoryDeallocation`, on the lines of host
  threads: one for each call of an allocator, with its name, the address, the bytes, the
  op, and the allocator's bytes in use after it. The last is a running counter, from
  which follows what was there before (the *rest*), so that levels are absolute.
* Runs of ops on host threads: named "name:Type" by the executor, "EagerLocalExecute:
  Type" in eager code, and with a statistic `hlo_op` by XLA.
* Planes `/device:GPU:0` with a line for each stream: kernels and copies, from CUPTI.

The bytes are those of the allocator's chunks, as its counters have them; what a chunk
is larger than its tensor (up to twice) is kept as slack. Not in it: on the CPU,
allocations under 256 KiB (with oneDNN) or any (without).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mem_util.progress import progress
from mem_util.records import Record, Span
from mem_util.run_metadata import CUPTI_ADVICE, allocator_device
from mem_util.trace_data import Trace, assemble

__all__ = ["read_xspace"]

_MEMORY = {"MemoryAllocation": 1, "MemoryDeallocation": -1}
_OP = re.compile(
    r"^(?:EagerLocalExecute: (?P<eager>[A-Za-z]\w*)"
    r"|(?P<op>[\w.][\w./\\>-]*):(?P<kind>[A-Za-z_]\w*))$"
)
_GPU_PLANE = re.compile(r"^/device:GPU:(\d+)")
_GPU_ALLOCATOR = re.compile(r"GPU_\d+_")
# Lines of a GPU's plane that the profiler derives from the streams' own.
_DERIVED_LINES = {
    "Framework Name Scope",
    "Framework Ops",
    "Launch Stats",
    "Source code",
    "Steps",
    "TensorFlow Name Scope",
    "TensorFlow Ops",
    "XLA Modules",
    "XLA Ops",
    "XLA TraceMe",
}


def read_xspace(xspace: Any) -> Trace:
    """Reads allocations and op times of one host.

    Args:
        xspace: an `XSpace` message.

    Returns:
        The trace, its levels absolute. Without memory events it has no timelines and
        says why in `missing`.
    """
    found = _Found()
    for plane in xspace.planes:
        if gpu := _GPU_PLANE.match(plane.name):
            _read_gpu(_Plane(plane), f"/gpu:{gpu.group(1)}", found)
        elif plane.name.startswith("/host:"):
            _read_host(_Plane(plane), found)
    for texts in (xspace.errors, xspace.warnings):
        found.notes.setdefault("", []).extend(f"Profiler: {text}" for text in texts)
    for device in sorted({*found.records} - {span.device for span in found.spans}):
        if device.startswith("/gpu"):
            found.remarks.append(f"{device}: {CUPTI_ADVICE}")
    return assemble(
        source="memory events of the profiler",
        records=found.records,
        spans=found.spans,
        reasons=_reasons(found),
        notes=found.notes,
        rests={name: rest for name, (_, rest) in found.rests.items()},
        remarks=found.remarks,
    )


@dataclass
class _Found:
    """What one pass over the planes collects, by device."""

    records: dict[str, list[Record]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    # Time of the first record, and the bytes in use before it.
    rests: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Plane:
    """A plane with its tables of names at hand."""

    def __init__(self, plane: Any) -> None:
        self.lines = plane.lines
        self.names = {key: meta.name for key, meta in plane.event_metadata.items()}
        self._stats = {key: meta.name for key, meta in plane.stat_metadata.items()}

    def stats(self, event: Any) -> dict[str, Any]:
        """The statistics of an event by name."""
        found = {}
        for stat in event.stats:
            which = stat.WhichOneof("value")
            value = getattr(stat, which) if which else None
            if which == "ref_value":
                value = self._stats.get(value, "")
            found[self._stats.get(stat.metadata_id, "")] = value
        return found

    def events(self, line: Any) -> Iterator[tuple[str, int, int, Any]]:
        """Name, start and end in nanoseconds, and message of each event of a line."""
        names, origin = self.names, line.timestamp_ns
        for event in line.events:
            start = origin + event.offset_ps // 1000
            name = names.get(event.metadata_id, "")
            yield name, start, start + event.duration_ps // 1000, event


def _read_host(plane: _Plane, found: _Found) -> None:
    """Collects memory events and runs of ops from the threads of the host."""
    kinds = {name: _OP.match(name) for name in set(plane.names.values())}
    total = sum(len(line.events) for line in plane.lines)
    with progress("Reading events", total) as advance:
        for line in plane.lines:
            _read_thread(plane, line, kinds, found)
            advance(len(line.events))


def _read_thread(
    plane: _Plane, line: Any, kinds: Mapping[str, Any], found: _Found
) -> None:
    """Collects one thread; an allocation of no op is named after what encloses it."""
    lane = line.name or str(line.id)
    memory: list[tuple[int, int, dict[str, Any]]] = []
    enclosing: list[tuple[int, int, str]] = []
    for name, start, end, event in plane.events(line):
        if sign := _MEMORY.get(name):
            memory.append((start, sign, plane.stats(event)))
            continue
        if end > start:
            enclosing.append((start, -end, name))
        if op := kinds.get(name):
            op_name, kind = op["op"] or op["eager"], op["kind"] or op["eager"]
            found.spans.append(Span(op_name, kind, "/cpu:0", lane, start, end))
        elif end > start and event.stats and _is_hlo(plane, event):
            kind = re.sub(r"[.\d]+$", "", name)
            found.spans.append(Span(name, kind, "/cpu:0", lane, start, end))
    nameless = [t for t, sign, stats in memory if sign > 0 and not stats.get("tf_op")]
    names = _innermost(enclosing, nameless) if nameless else {}
    for time_ns, sign, stats in memory:
        _add_memory(found, stats, time_ns, sign, names.get(time_ns, ""))


def _innermost(
    enclosing: list[tuple[int, int, str]], times_ns: list[int]
) -> dict[int, str]:
    """The name, in brackets, of the innermost event around each time.

    Events of a thread nest, so a stack of those that are open is enough.

    Args:
        enclosing: (start, -end, name).
        times_ns: when.
    """
    starts = sorted(enclosing, reverse=True)
    stack: list[tuple[int, str]] = []
    names = {}
    for time_ns in sorted(times_ns):
        while starts and starts[-1][0] <= time_ns:
            start, negative_end, name = starts.pop()
            while stack and stack[-1][0] <= start:
                stack.pop()
            stack.append((-negative_end, name))
        while stack and stack[-1][0] < time_ns:
            stack.pop()
        if stack:
            names[time_ns] = f"({stack[-1][1]})"
    return names


def _is_hlo(plane: _Plane, event: Any) -> bool:
    return "hlo_op" in plane.stats(event)


def _add_memory(
    found: _Found, stats: Mapping[str, Any], time_ns: int, sign: int, fallback: str
) -> None:
    """Appends one event, and remembers the level before the earliest one."""
    allocator = str(stats.get("allocator_name", ""))
    is_gpu = _GPU_ALLOCATOR.match(allocator)
    device = allocator_device(allocator, "/gpu:0" if is_gpu else "/cpu:0")
    size = abs(int(stats.get("allocation_bytes") or stats.get("requested_bytes") or 0))
    key = (allocator, stats.get("addr"))
    op = str(stats.get("tf_op") or fallback)
    slack = max(0, size - int(stats.get("requested_bytes") or size))
    record = Record(time_ns, sign * size, op, key, slack)
    found.records.setdefault(device, []).append(record)
    in_use = stats.get("bytes_allocated")
    first, _ = found.rests.get(device, (None, 0))
    if in_use is not None and (first is None or time_ns < first):
        found.rests[device] = (time_ns, max(0, int(in_use) - sign * size))


def _read_gpu(plane: _Plane, device: str, found: _Found) -> None:
    """Collects kernels and copies from the streams of a GPU."""
    for line in plane.lines:
        lane = line.name or f"stream:{line.id}"
        if lane in _DERIVED_LINES:
            continue
        for name, start, end, event in plane.events(line):
            op = str(plane.stats(event).get("tf_op") or name)
            op_name, _, kind = op.rpartition(":")
            kind = kind if op_name else name
            found.spans.append(Span(op_name or op, kind, device, lane, start, end))


def _reasons(found: _Found) -> dict[str, str]:
    """Device to why it would have no allocations."""
    devices = {"/cpu:0", *found.records, *(span.device for span in found.spans)}
    cpu = (
        "the profiler saw no allocation; on the CPU it omits those under 256 KiB, and "
        "all of them where oneDNN is off (TF_ENABLE_ONEDNN_OPTS=0)"
    )
    gpu = "the profiler saw no allocation on it"
    return {d: cpu if d.startswith("/cpu") else gpu for d in sorted(devices)}
