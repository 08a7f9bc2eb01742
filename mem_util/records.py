"""Allocation records, and the timeline of live bytes that they add up to.

Problem. A profiler reports memory as a stream of small facts: *this op took so many
bytes then*, *so many bytes were given back then*. People want to know how much was
alive at once, when, and which tensors it was. The streams are not clean: frees arrive
whose allocation came before the trace, several facts carry one time stamp, records are
lost, clocks read zero.

Model. A `Record` is one such fact, on one device. A `Buffer` is an allocation together
with the free that ended it, if any did. A `Timeline` is one device's live bytes after
each record, over a known *rest* (what was alive before the first record, 0 if the
source does not say).

Algorithm (`build_timeline`), O(n log n) for n records:

1. Sort by (time, -bytes): at equal times memory is taken before it is given back, which
   is what an executor does (an op's output exists before its input may go), and which
   never reads too low.
2. Pair each free with the oldest open allocation of the same key. A free with no
   partner returns memory of the rest. It lowers the level when the rest is known,
   otherwise it is left out and counted in a note.
3. The level is the running sum; the peak is its first maximum.

Times are integer nanoseconds: a float cannot hold today's date to the nanosecond.
Nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mem_util.errors import NoMemoryDataError, counted

__all__ = [
    "Buffer",
    "Record",
    "Span",
    "Timeline",
    "build_timeline",
    "byte_unit",
    "format_bytes",
]


@dataclass(frozen=True, slots=True)
class Record:
    """One change of a device's live bytes.

    Attributes:
        time_ns: when, in nanoseconds of any one clock.
        bytes: how many; positive when taken, negative when given back.
        op: the op that allocated; for a free it may be empty.
        key: what pairs a free with its allocation (an address, or node and size).
        slack_bytes: how many of `bytes` were not asked for: an allocator hands out
            chunks that may be larger than the tensor.
    """

    time_ns: int
    bytes: int
    op: str = ""
    key: object = None
    slack_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory from its allocation to its free; `end_ns` is None if it was not seen."""

    op: str
    bytes: int
    start_ns: int
    end_ns: int | None
    slack_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """One run of an op: on `device`, in `lane` (a stream, a thread, or empty)."""

    op: str
    kind: str
    device: str
    lane: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Timeline:
    """Live bytes of one device after each record, rest included.

    Attributes:
        device: short name, such as "/cpu:0".
        times_ns: when each record happened, ascending.
        live_bytes: bytes alive after each record.
        ops: the op of each record.
        buffers: all allocations, by start.
        rest_bytes: alive before the first record, as far as the source says.
        notes: what was wrong with the records, in sentences.
    """

    device: str
    times_ns: tuple[int, ...]
    live_bytes: tuple[int, ...]
    ops: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    rest_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """What it is of, and its peak: a timeline may have a million records."""
        peak = f"peak {format_bytes(self.peak_bytes)}" if self.live_bytes else "empty"
        return f"<Timeline of {self.device}: {len(self.ops)} records, {peak}>"

    @cached_property
    def peak_index(self) -> int:
        """Position of the first record after which most bytes are alive."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, rest included."""
        return max(self.live_bytes[self.peak_index], self.rest_bytes)

    @property
    def peak_op(self) -> str:
        """The op whose allocation set the peak."""
        if self.rest_bytes >= self.live_bytes[self.peak_index]:
            return "(alive before the first record)"
        return self.ops[self.peak_index]

    @property
    def peak_time_ns(self) -> int:
        """When the peak was first reached."""
        return self.times_ns[self.peak_index]

    @cached_property
    def peak_slack_bytes(self) -> int:
        """How much less the peak were if each chunk were as small as its tensor."""
        return sum(buffer.slack_bytes for buffer in self.alive_at_peak())

    def alive_at_peak(self, count: int | None = None) -> list[Buffer]:
        """The buffers alive at the peak, the largest first, at most `count` of them.

        Args:
            count: how many to return; all by default.
        """
        # A buffer freed in the peak's own instant is alive at the peak: step 1 above.
        time = self.peak_time_ns
        alive = [
            buffer
            for buffer in self.buffers
            if buffer.start_ns <= time
            and (buffer.end_ns is None or buffer.end_ns >= time)
        ]
        return sorted(alive, key=lambda b: (-b.bytes, b.start_ns, b.op))[:count]

    def curve(self, origin_ns: int | None = None) -> tuple[list[float], list[int]]:
        """Seconds since `origin_ns` (the first record by default) and live bytes."""
        origin = self.times_ns[0] if origin_ns is None else origin_ns
        return [(t - origin) * 1e-9 for t in self.times_ns], list(self.live_bytes)

    def requested_curve(self) -> tuple[list[int], list[int]]:
        """Times in nanoseconds, and from each on the bytes alive that ops asked for.

        Chunks may be up to twice as large as what was asked for; here they count as if
        they were not larger. What was alive before the trace is left out, also when it
        goes.
        """
        changes = []
        for buffer in self.buffers:
            requested = buffer.bytes - buffer.slack_bytes
            changes.append((buffer.start_ns, -requested))
            if buffer.end_ns is not None:
                changes.append((buffer.end_ns, requested))
        changes.sort()  # at equal times memory is taken first: step 1 above
        return [time for time, _ in changes], list(accumulate(-n for _, n in changes))

    @property
    def requested_bytes(self) -> int:
        """Most bytes alive at once that ops asked for, without rest."""
        return max(self.requested_curve()[1], default=0)


def build_timeline(
    device: str,
    records: Iterable[Record],
    rest_bytes: int | None = None,
    notes: Sequence[str] = (),
) -> Timeline:
    """Adds up records of one device (the algorithm is in the module's docstring).

    Args:
        device: short name, such as "/cpu:0".
        records: in any order.
        rest_bytes: alive before the first record; None if unknown, then frees without
            an allocation are left out.
        notes: sentences to put in front of the timeline's own.

    Returns:
        The timeline.

    Raises:
        NoMemoryDataError: nothing was allocated.
    """
    ordered = sorted(records, key=lambda r: (r.time_ns, -r.bytes))
    if not any(record.bytes > 0 for record in ordered):
        raise NoMemoryDataError(
            f"`mem_util.build_timeline`: expected allocations on {device}, but got "
            f"{counted(len(ordered), 'record')} without any. Trace a step that "
            "computes something."
        )
    paired, buffers, unmatched = _pair(ordered, keep_unmatched=rest_bytes is not None)
    level = rest_bytes or 0
    levels = []
    for record in paired:
        # Known rests are read from running counters, which can be some bytes off.
        level = max(0, level + record.bytes)
        levels.append(level)
    said = list(notes)
    if unmatched and rest_bytes is None:
        frees = counted(unmatched, "free")
        said.append(f"{device}: left out {frees} without an allocation.")
    return Timeline(
        device,
        tuple(record.time_ns for record in paired),
        tuple(levels),
        tuple(record.op for record in paired),
        tuple(buffers),
        rest_bytes or 0,
        tuple(said),
    )


def _pair(
    ordered: Sequence[Record], keep_unmatched: bool
) -> tuple[list[Record], list[Buffer], int]:
    """Step 2: returns records to add up, all buffers, and the count of lone frees."""
    waiting: dict[tuple[object, int], deque[int]] = {}
    ends: dict[int, int] = {}  # of the allocation at a position of `ordered`
    kept: list[Record] = []
    unmatched = 0
    for index, record in enumerate(ordered):
        if record.bytes == 0:
            continue
        key = (record.key, abs(record.bytes))
        if record.bytes > 0:
            waiting.setdefault(key, deque()).append(index)
            kept.append(record)
            continue
        if open_ones := waiting.get(key):
            begun = open_ones.popleft()
            ends[begun] = record.time_ns
            op = ordered[begun].op
            kept.append(Record(record.time_ns, record.bytes, op, record.key))
            continue
        unmatched += 1
        if keep_unmatched:
            kept.append(record)
    buffers = [
        Buffer(
            record.op, record.bytes, record.time_ns, ends.get(index), record.slack_bytes
        )
        for index, record in enumerate(ordered)
        if record.bytes > 0
    ]
    return kept, buffers, unmatched


def byte_unit(largest: float) -> tuple[str, int]:
    """The unit that suits so many bytes, and its size: powers of 1024.

    These are the units of TensorFlow's allocators and of its errors of memory.
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(largest) >= size:
            return unit, size
    return "B", 1


def format_bytes(count: float) -> str:
    """Bytes as people write them: 22 681 600 is "21.6 MiB"."""
    unit, size = byte_unit(count)
    digits = 1 if size > 1 and abs(count) < 100 * size else 0
    return f"{count / size:.{digits}f} {unit}"
