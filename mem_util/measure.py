"""Peak memory of any TensorFlow code: eager, `tf.function`, `fit`.

Three ways, from the cheapest; `measure` takes the first that has an answer and says
which one it was, per device.

1. *Allocator*: the counters of the allocators (`mem_util.allocator`), free and exact,
   but blind to small tensors on the CPU and unable to tell logical CPUs apart.
2. *Replay*: where the counters saw nothing, the function is run twice more as the graph
   of a v1 session, on copies of its variables; a session records every allocation,
   however small (`mem_util.replay`). `tf.function` must be able to trace the function.
   The first of these runs is not measured: its kernels come in another order, and it
   read up to a seventh too low on a small transformer.
3. Otherwise the device is in `missing` with the reason. 0 is never a peak.
"""

from __future__ import annotations

import gc
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mem_util.allocator import (
    SMALL_CPU_ALLOCATIONS,
    Counters,
    read_counters,
    require_eager,
    wait_for_devices,
)
from mem_util.errors import NotReplayableError, got
from mem_util.records import format_bytes
from mem_util.trace_data import PeakBytes, Trace

__all__ = [
    "Measurement",
    "add_reason",
    "combine",
    "measure",
    "merge",
    "needs_replay",
    "require_call",
]


@dataclass(frozen=True)
class Measurement:
    """What one call of a function took.

    Attributes:
        peak_bytes: most bytes alive at once during the call, by short device name,
            resting memory (weights, optimizer slots, inputs) included. A device without
            an answer raises a `KeyError` with the reason; 0 is never an answer.
        resting_bytes: alive just before the call.
        seconds: wall time of the call.
        how: device to how its peak was measured.
        not_counted: what the figures leave out, in words.
        missing: device to the reason why it has no peak.
    """

    peak_bytes: PeakBytes
    resting_bytes: Mapping[str, int]
    seconds: float
    how: Mapping[str, str]
    not_counted: tuple[str, ...]
    missing: Mapping[str, str]

    @property
    def above_rest_bytes(self) -> PeakBytes:
        """What the call itself needed on each device: peak minus rest, in bytes."""
        rests = self.resting_bytes
        above = {name: peak - rests[name] for name, peak in self.peak_bytes.items()}
        return PeakBytes(above, self.missing)

    def summary(self) -> str:
        """The figures as text, one line a device."""
        lines = [f"{self.seconds:.4g} s"]
        for name, peak in self.peak_bytes.items():
            rest = self.resting_bytes[name]
            lines.append(
                f"{name}: peak {format_bytes(peak)}, of it {format_bytes(peak - rest)} "
                f"above the rest of {format_bytes(rest)} ({self.how[name]})"
            )
        lines += [f"{name}: unknown, {why}" for name, why in self.missing.items()]
        if self.not_counted:
            lines.append(f"Not counted: {'; '.join(self.not_counted)}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        """The summary."""
        return self.summary()


def measure(
    fn: Callable[..., Any],
    *args: Any,
    warm_ups: int = 1,
    replayable: bool = True,
    **kwargs: Any,
) -> Measurement:
    """Calls a function and measures the peak of its memory.

    Args:
        fn: what to call: a `tf.function`, a function of eager ops, `model.fit`.
        *args: its arguments.
        warm_ups: calls before the measured one, so that tracing, compiling and the
            making of variables are not measured. 0 if a second call would be wrong.
        replayable: whether `fn` may be traced and run twice more, on copies of its
            variables, where the counters see nothing. Python side effects in it then
            happen again.
        **kwargs: its arguments by name.

    Returns:
        The measurement.

    Raises:
        TypeError: `fn` cannot be called, or `warm_ups` is no int.
        ValueError: `warm_ups` is negative.
        RuntimeError: a graph is being built.
        MissingTensorFlowError: there is no TensorFlow.

    Example:
        >>> import mem_util, tensorflow as tf
        >>> x = tf.random.normal([1000, 1000])
        >>> taken = mem_util.measure(lambda: tf.reduce_sum(tf.tanh(x)))
        >>> taken.above_rest_bytes["/cpu:0"] >= 4_000_000
        True
    """
    count = require_call(fn, warm_ups, "measure")
    require_eager("measure")
    for _ in range(count):
        fn(*args, **kwargs)
    gc.collect()
    wait_for_devices()
    read_counters(reset=True)
    before = read_counters()
    start = time.perf_counter()
    result = fn(*args, **kwargs)
    wait_for_devices()
    seconds = time.perf_counter() - start
    after = read_counters()
    del result
    taken = combine(before, after, seconds)
    if not replayable or not needs_replay(taken, after):
        return taken
    return _replayed(taken, fn, args, kwargs)


def require_call(fn: Any, warm_ups: Any, where: str) -> int:
    """Checks what is to be called, and how often before it is looked at.

    Args:
        fn: what the user gave to call.
        warm_ups: what the user gave as a number of calls.
        where: the public function, for messages.

    Returns:
        The number of calls.

    Raises:
        TypeError: `fn` cannot be called, or `warm_ups` is no int.
        ValueError: `warm_ups` is negative.
    """
    if not callable(fn):
        raise TypeError(
            f"`mem_util.{where}`: expected a function to call, but got {got(fn)}. Give "
            f"the function itself and its arguments: `{where}(step, x)`."
        )
    try:
        count = operator.index(warm_ups)
    except TypeError:
        raise TypeError(
            f"`mem_util.{where}`: `warm_ups` must be an int, but got {got(warm_ups)}."
        ) from None
    if count < 0:
        raise ValueError(
            f"`mem_util.{where}`: `warm_ups` must be at least 0, but got {count}."
        )
    return count


def combine(before: Counters, after: Counters, seconds: float) -> Measurement:
    """Makes a measurement of the counters before and after; zeros become reasons."""
    peaks, missing = {}, dict(after.missing)
    not_counted = []
    for name, counter in after.devices.items():
        rest = before.devices[name].current_bytes
        if name == "/cpu:0":
            not_counted.append(SMALL_CPU_ALLOCATIONS)
        if counter.peak_bytes <= rest:
            missing[name] = (
                "the allocator's statistics saw no allocation; on the CPU they omit "
                "those under 256 KiB"
            )
            continue
        peaks[name] = counter.peak_bytes
    how = dict.fromkeys(peaks, "statistics of the allocator")
    if after.pooled and "/cpu:0" in how:
        how["/cpu:0"] += f", all of {', '.join(after.pooled)} in one pool"
    rests = {name: c.current_bytes for name, c in before.devices.items()}
    return Measurement(
        PeakBytes(peaks, missing), rests, seconds, how, tuple(not_counted), missing
    )


def needs_replay(taken: Measurement, after: Counters) -> bool:
    """Whether a CPU has no peak, or shares one with other logical CPUs."""
    return bool(after.pooled) or any(name.startswith("/cpu") for name in taken.missing)


def _replayed(
    taken: Measurement,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Measurement:
    """Fills the gaps of a measurement from the allocation records of a session."""
    from mem_util.replay import replay

    try:
        traced = replay(fn, *args, **kwargs)
    except NotReplayableError as error:
        return add_reason(taken, f"it cannot be replayed in a v1 session: {error}")
    return merge(taken, traced)


def add_reason(taken: Measurement, why: str) -> Measurement:
    """The measurement with one more reason why there are gaps in it."""
    missing = {name: f"{reason}; and {why}" for name, reason in taken.missing.items()}
    peaks = PeakBytes(taken.peak_bytes, missing)
    return replace(taken, peak_bytes=peaks, missing=missing)


def merge(taken: Measurement, traced: Trace, said: str = "replayed") -> Measurement:
    """Takes CPU devices from a replay and the others from the counters.

    Args:
        taken: by the counters.
        traced: the replay.
        said: what was replayed, in words.
    """
    peaks, how = dict(taken.peak_bytes), dict(taken.how)
    missing, rests = dict(taken.missing), dict(taken.resting_bytes)
    left_out = [text for text in taken.not_counted if text != SMALL_CPU_ALLOCATIONS]
    replayed = [name for name in traced.timelines if name.startswith("/cpu")]
    if len(replayed) > 1:
        # The counters' rest is that of the pool: it says nothing of one CPU of many.
        rests |= dict.fromkeys(replayed, 0)
        left_out.append("memory that was there before the call")
    for name in replayed:
        peaks[name] = rests.setdefault(name, 0) + traced.peak_bytes[name]
        how[name] = f"{said}: {traced.source}"
        missing.pop(name, None)
    for name in missing:
        if name in traced.missing:
            missing[name] += f"; replayed in a v1 session, {traced.missing[name]}"
        elif name.startswith("/cpu") and replayed:
            missing[name] = "nothing was allocated on it"
    if not replayed:
        left_out = list(taken.not_counted)
    return replace(
        taken,
        peak_bytes=PeakBytes(peaks, missing),
        resting_bytes=rests,
        how=how,
        not_counted=tuple(left_out),
        missing=missing,
    )
