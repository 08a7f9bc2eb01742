"""Reads a v1 session's `RunMetadata` (or bare `StepStats`) into timelines and spans.

What is in it, by `dev_stats` entry, and what is made of it:

* `/job:.../device:CPU:0`: one `NodeExecStats` for each run of an op, with the
  allocations it made (`memory[].allocation_records`, alloc positive, free negative,
  each with its microsecond) and the time it took. Both are used.
* `/job:.../device:GPU:0`: the same; here the time is that of *launching* kernels.
* `/device:GPU:0/stream:14`, `.../stream:all`, `/device:GPU:0/memcpy`: the times of
  kernels and copies, from CUPTI. They hold no allocations, or repeat those of the
  device, so only times are read. `stream:all` repeats the others and is read only where
  it is alone.

Allocations belong to the device of their *allocator*: an op on the GPU that keeps
shapes in host memory allocates on "/cpu:0". Weights and other memory that was there
before the step are not in the records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any

from mem_util.device_names import short_device_name
from mem_util.errors import counted, got, shortened
from mem_util.progress import progress
from mem_util.records import Record, Span
from mem_util.trace_data import Trace, assemble

__all__ = [
    "CUPTI_ADVICE",
    "read_run_metadata",
    "read_step_stats",
    "short_device_name",
]

CUPTI_ADVICE = (
    "CUPTI was not loaded, so there are no kernel times, only those of launching them. "
    "Put the folder that holds libcupti.so into LD_LIBRARY_PATH before Python starts, "
    "such as: export LD_LIBRARY_PATH="
    "/usr/local/cuda/extras/CUPTI/lib64:$LD_LIBRARY_PATH. Where the driver forbids "
    "profiling to users, it also needs NVreg_RestrictProfilingToAdminUsers=0."
)

# What TensorFlow calls the allocators of host memory, also those that a GPU's ops use.
_HOST_ALLOCATOR = re.compile(r"^(cpu|mkl_?cpu|.*host.*|.*pinned.*)", re.IGNORECASE)


def allocator_device(allocator: str, device: str) -> str:
    """The device whose memory an allocator hands out to an op on `device`."""
    if "/gpu:" in device and _HOST_ALLOCATOR.match(allocator):
        return "/cpu:0"
    if found := re.match(r"GPU_(\d+)_", allocator):
        return f"/gpu:{found.group(1)}"
    return device


def read_run_metadata(run_metadata: Any) -> Trace:
    """Reads allocations and op times.

    Args:
        run_metadata: a `RunMetadata` or `StepStats` of a run with `FULL_TRACE`.

    Returns:
        The trace. A device without a usable allocation is in its `missing`, with the
        reason; nothing is raised for that.

    Raises:
        TypeError: it is neither of the two messages.
    """
    return read_step_stats(run_metadata, "read_run_metadata")


def read_step_stats(run_metadata: Any, where: str) -> Trace:
    """`read_run_metadata` for the public function `where`, which errors then name."""
    step_stats = getattr(run_metadata, "step_stats", run_metadata)
    if not hasattr(step_stats, "dev_stats"):
        advice = (
            "Pass the object that was given to `session.run(..., run_metadata=...)`."
        )
        if isinstance(run_metadata, str | PathLike):
            advice = (
                "A file is read by `mem_util.read_trace(path)`; peaks are the "
                "`peak_bytes` of what it returns."
            )
        raise TypeError(
            f"`mem_util.{where}`: expected a RunMetadata or StepStats, but got "
            f"{got(run_metadata)}. {advice}"
        )
    reader = _Reader(step_stats)
    reader.read()
    return assemble(
        source="allocation records of a v1 session",
        records=reader.records,
        spans=reader.spans,
        reasons=reader.reasons(),
        notes=reader.notes(),
        remarks=reader.remarks(),
    )


# What runs in every step, whatever is fetched.
_BOOKKEEPING = frozenset({"", "NoOp", "_Arg", "_Retval", "_Send", "_Recv"})
_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})


def _why_nothing(kinds: Iterable[str]) -> str:
    """Why nothing was recorded where ops of these types ran, as a sentence."""
    work = [kind for kind in kinds if kind not in _BOOKKEEPING]
    if python := [kind for kind in work if kind in _PYTHON]:
        return (
            f"It ran Python code ({shortened(python)}), whose memory is not "
            "TensorFlow's to record"
        )
    if xla := [kind for kind in work if "xla" in kind.lower()]:
        return f"XLA compiled what ran ({shortened(xla)}): its buffers are unrecorded"
    if not work:
        return "What is only grouped is pruned: fetch tensors"
    if not {*work} - {"Const"}:
        return (
            "A graph that is fed nothing is folded to a constant: feed a placeholder, "
            "or give the function its tensors as arguments"
        )
    return (
        f"What ran ({shortened(work)}) passes on what it is given, or XLA compiled "
        "it, whose buffers are unrecorded"
    )


class _Reader:
    """One pass over `StepStats`; what is odd is counted here and said in the notes."""

    def __init__(self, step_stats: Any) -> None:
        self._entries = [
            (*short_device_name(entry.device), entry) for entry in step_stats.dev_stats
        ]
        self.records: dict[str, list[Record]] = {}
        self.spans: list[Span] = []
        self._nodes = 0
        self._ops: dict[str, int] = {}
        self._kinds: dict[str, dict[str, None]] = {}  # in order, as a set has none
        self._timeless: dict[str, int] = {}
        self._duplicates: dict[str, int] = {}

    def read(self) -> None:
        """Fills `records` and `spans`."""
        total = sum(len(entry.node_stats) for _, _, entry in self._entries)
        with progress("Reading ops", total) as advance:
            for device, lane, entry in self._entries:
                if not lane:
                    self._read_device(device, entry)
                elif not self._repeats_others(device, lane):
                    self.spans += _lane_spans(device, lane, entry)
                advance(len(entry.node_stats))

    def _read_device(self, device: str, entry: Any) -> None:
        self._ops[device] = self._ops.get(device, 0) + len(entry.node_stats)
        kinds = self._kinds.setdefault(device, {})
        for node in self._unique_nodes(device, entry):
            kinds[_kind(node)] = None
            self._nodes += 1
            self._read_memory(device, self._nodes, node)
            if span := _node_span(device, node, ""):
                self.spans.append(span)

    def _repeats_others(self, device: str, lane: str) -> bool:
        """`stream:all` repeats what the streams hold one by one."""
        alone = not any(
            other == device and "stream" in name and not name.endswith("all")
            for other, name, _ in self._entries
        )
        return lane.endswith("all") and not alone

    def _unique_nodes(self, device: str, entry: Any) -> Iterator[Any]:
        """Leaves out exact repetitions of one run of an op."""
        seen: set[bytes] = set()
        for node in entry.node_stats:
            if node.memory and node.all_start_micros:
                text = node.SerializeToString(deterministic=True)
                if text in seen:
                    self._duplicates[device] = self._duplicates.get(device, 0) + 1
                    continue
                seen.add(text)
            yield node

    def _read_memory(self, device: str, index: int, node: Any) -> None:
        """Appends a node's allocation records, under the device of their allocator."""
        for memory in node.memory:
            where = allocator_device(memory.allocator_name, device)
            key = (device, index, memory.allocator_name)
            for item in memory.allocation_records:
                micros = item.alloc_micros if item.alloc_micros > 0 else 0
                # The clock read 0: the start of the op is the next best thing.
                micros = micros or max(node.all_start_micros, 0)
                if not micros:
                    self._timeless[where] = self._timeless.get(where, 0) + 1
                    continue
                record = Record(micros * 1000, item.alloc_bytes, node.node_name, key)
                self.records.setdefault(where, []).append(record)

    def reasons(self) -> dict[str, str]:
        """Device to why it has no allocations, for each device that ran anything."""
        return {
            device: self._reason(device)
            for device in dict.fromkeys((*self._ops, *self._timeless, *self._lanes()))
        }

    def _reason(self, device: str) -> str:
        if count := self._timeless.get(device):
            if count == 1:
                return "its one allocation record has time 0"
            return f"all its {count} allocation records have time 0, hence no order"
        if device not in self._ops:
            return (
                "it has entries of streams only, which record times but no allocations"
            )
        if not (ops := self._ops[device]):
            return "its step stats are empty: run with trace_level=FULL_TRACE"
        who = "its one op" if ops == 1 else f"none of its {ops} ops"
        verb = "allocated nothing" if ops == 1 else "allocated anything"
        return f"{who} {verb} that is recorded. {_why_nothing(self._kinds[device])}"

    def _lanes(self) -> list[str]:
        return [device for device, lane, _ in self._entries if lane]

    def notes(self) -> dict[str, list[str]]:
        """Device to what was wrong with its entries, in sentences."""
        said: dict[str, list[str]] = {}
        for device, count in self._duplicates.items():
            text = f"{device}: left out {counted(count, 'op')} recorded twice."
            said.setdefault(device, []).append(text)
        for device, count in self._timeless.items():
            records = counted(count, "allocation record")
            text = f"{device}: left out {records} with time 0."
            said.setdefault(device, []).append(text)
        return said

    def remarks(self) -> list[str]:
        """What there is to say of times; nobody who asks for bytes has to hear it."""
        return [
            f"{device}: {CUPTI_ADVICE}"
            for device in self._ops
            if "/gpu:" in device and device not in self._lanes()
        ]


def _node_span(device: str, node: Any, lane: str) -> Span | None:
    """The time an op took, in nanoseconds where they were recorded."""
    if node.all_start_nanos > 0:
        start, length = node.all_start_nanos, node.all_end_rel_nanos
    else:
        start, length = node.all_start_micros * 1000, node.all_end_rel_micros * 1000
    if start <= 0 or node.node_name.startswith("_SOURCE"):
        return None
    return Span(
        node.node_name, _kind(node), device, lane, start, start + max(length, 0)
    )


def _lane_spans(device: str, lane: str, entry: Any) -> list[Span]:
    """Kernels or copies of a stream; those of `stream:all` are named "op:Kind"."""
    spans = (_node_span(device, node, lane) for node in entry.node_stats)
    return [span for span in spans if span is not None]


def _kind(node: Any) -> str:
    """The op type, out of "MatMul" in "a/b = MatMul(c, d)" or in "a/b:MatMul"."""
    if found := re.search(r" = (\w+)\(", node.timeline_label):
        return found.group(1)
    name: str = node.node_name
    return name.rsplit(":", 1)[1] if ":" in name else ""
