"""Traces a call of any TensorFlow function, and reads traces from files."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from mem_util.allocator import (
    SMALL_CPU_ALLOCATIONS,
    require_eager,
    wait_for_devices,
)
from mem_util.errors import NotReplayableError, ProfilerError, TraceFileError, shortened
from mem_util.measure import require_call
from mem_util.required import require_tensorflow
from mem_util.trace_data import Trace

__all__ = ["profiler_files", "read_trace", "trace"]


def trace(
    fn: Callable[..., Any],
    *args: Any,
    warm_ups: int = 1,
    replayable: bool = True,
    **kwargs: Any,
) -> Trace:
    """Calls a function under the profiler and reads its memory events and op times.

    Args:
        fn: what to call: a `tf.function`, a function of eager ops, `model.fit`.
        *args: its arguments.
        warm_ups: calls before the traced one, so that tracing and compiling are not in
            it. 0 if a second call would be wrong.
        replayable: whether `fn` may be run again in a v1 session, on copies of its
            variables, where the profiler saw no allocation or there are several logical
            CPUs, which it cannot tell apart. `source` then says so. There it runs
            twice: the kernels of the first run come in another order.
        **kwargs: its arguments by name.

    Returns:
        The trace. Levels include what was alive before the call, if not replayed.

    Raises:
        TypeError: `fn` cannot be called, or `warm_ups` is no int.
        ValueError: `warm_ups` is negative.
        ProfilerError: another profiler is running, or it left nothing behind.
        RuntimeError: a graph is being built.
        MissingTensorFlowError: there is no TensorFlow.
    """
    count = require_call(fn, warm_ups, "trace")
    require_eager("trace")
    import tensorflow as tf

    for _ in range(count):
        fn(*args, **kwargs)
    gc.collect()
    wait_for_devices()
    traced = _profile(fn, args, kwargs)
    cpus = len(tf.config.list_logical_devices("CPU"))
    if not replayable or (cpus == 1 and "/cpu:0" in traced.timelines):
        return _saying(traced, f"Not counted: {SMALL_CPU_ALLOCATIONS}.")
    from mem_util.replay import replay

    try:
        replayed = replay(fn, *args, **kwargs)
    except NotReplayableError as error:
        return _saying(traced, f"Not replayed in a v1 session: {error}")
    note = "The profiler saw no allocation"
    if cpus > 1:
        note = f"The profiler cannot tell {cpus} logical CPUs apart"
    source = f"{replayed.source}, in which the call was replayed"
    return _saying(replace(replayed, source=source), f"{note}, so it was replayed.")


def _saying(traced: Trace, note: str) -> Trace:
    return replace(traced, notes=(*traced.notes, note))


def _profile(fn: Callable[..., Any], args: Any, kwargs: Any) -> Trace:
    """Runs a call under the profiler, in a folder that is deleted afterwards."""
    import tensorflow as tf

    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
    )
    with tempfile.TemporaryDirectory(prefix="mem_util_") as folder:
        try:
            tf.profiler.experimental.start(folder, options)
        except tf.errors.AlreadyExistsError as error:
            raise ProfilerError(
                "`mem_util.trace`: expected to start the profiler, but it is already "
                "running. Stop it first: tf.profiler.experimental.stop()."
            ) from error
        try:
            result = fn(*args, **kwargs)
            wait_for_devices()
        finally:
            tf.profiler.experimental.stop()
        del result
        return read_trace(folder)


def read_trace(path: str | PathLike[str]) -> Trace:
    """Reads a trace from a file or folder.

    Args:
        path: a serialised `RunMetadata` or `StepStats` (`run_metadata.pb`,
            `timeline.pb`), an `*.xplane.pb`, or a folder with some of the latter, of
            which the newest is read.

    Returns:
        The trace.

    Raises:
        TraceFileError: it does not exist, is cut short, or is something else.
        MissingTensorFlowError: there is no TensorFlow, which knows the format.
    """
    file, others = _locate(Path(path))
    data = file.read_bytes()
    if not data:
        raise TraceFileError(_wanted(file, "an empty one"))
    if data[:64].lstrip().startswith(b"{") and b'"traceEvents"' in data:
        shown = "a Chrome trace, which is for Perfetto and chrome://tracing to show"
        raise TraceFileError(_wanted(file, f"{shown}, and is not read back"))
    require_tensorflow("read_trace")
    if file.name.endswith(".xplane.pb"):
        from mem_util.tf_internals import new_xspace
        from mem_util.xplane import read_xspace

        traced = read_xspace(_parsed(new_xspace(), data, file))
    else:
        from mem_util.run_metadata import read_run_metadata

        traced = read_run_metadata(_step_stats(data, file))
    if others:
        names = shortened(sorted(other.name for other in others))
        traced = _saying(traced, f"Read {file.name} and not {names} beside it.")
    return traced


def _locate(path: Path) -> tuple[Path, list[Path]]:
    """The file to read, and the hosts of the same run that are not read."""
    if not path.exists():
        raise TraceFileError(_wanted(path, "nothing of that name"))
    if path.is_file():
        return path, []
    found = profiler_files(path)
    if not found:
        raise TraceFileError(_wanted(path, "a folder without any *.xplane.pb"))
    newest = found[-1]
    return newest, [f for f in found if f.parent == newest.parent and f != newest]


def profiler_files(folder: Path) -> list[Path]:
    """What the profiler left in a folder and those in it, the newest last."""
    found = folder.rglob("*.xplane.pb")
    return sorted(found, key=lambda file: (file.stat().st_mtime, file.name))


def _step_stats(data: bytes, file: Path) -> Any:
    """Reads `RunMetadata` or, failing that, the bare `StepStats` of older scripts."""
    import tensorflow as tf

    metadata = tf.compat.v1.RunMetadata()
    stats = type(metadata.step_stats)()
    for message in (metadata, stats):
        try:
            parsed = _parsed(message, data, file)
        except TraceFileError:
            continue
        found = getattr(parsed, "step_stats", parsed)
        if any(entry.device.startswith("/") for entry in found.dev_stats):
            return found
    # Parsed once more for the message: bytes that are neither, or have no devices.
    found = _parsed(metadata, data, file).step_stats
    if found.dev_stats:
        raise TraceFileError(_wanted(file, "one with devices of no name"))
    return found


def _parsed(message: Any, data: bytes, file: Path) -> Any:
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise TraceFileError(
            _wanted(file, f"{len(data)} bytes that are cut short or something else")
        ) from error
    return message


def _wanted(path: Path, but_got: str) -> str:
    return (
        "`mem_util.read_trace`: expected a serialised RunMetadata or StepStats, or a "
        f"folder or file of the profiler (*.xplane.pb), but got {but_got}: {path}. "
        "Write one with run_metadata.SerializeToString() or "
        "tf.profiler.experimental.start(folder)."
    )
