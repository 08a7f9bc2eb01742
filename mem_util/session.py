"""Peak and timeline of a step of a v1 session."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from mem_util.errors import NoMemoryDataError, got
from mem_util.paths import output_path
from mem_util.run_metadata import read_run_metadata, read_step_stats
from mem_util.trace_data import PeakBytes, Trace

__all__ = ["peak_memory", "plot_memory_timeline", "trace_session"]


def peak_memory(run_metadata: Any) -> PeakBytes:
    """Most bytes that a step of a v1 session had allocated at once, by device.

    Weights, and whatever else was there before the step, are not counted.

    Args:
        run_metadata: the `RunMetadata` of a `session.run` with `FULL_TRACE`.

    Returns:
        Such as `{"/cpu:0": 21000000}`, in bytes. Asking it for a device that has no
        data raises a `KeyError` that says why; 0 is never given as a peak.

    Raises:
        NoMemoryDataError: there are no allocations on any device.
        TypeError: it is no `RunMetadata`.

    Example:
        >>> from google.protobuf import text_format
        >>> import tensorflow as tf
        >>> metadata = text_format.Parse('''
        ...     step_stats { dev_stats { device: "/job:localhost/device:CPU:0"
        ...         node_stats { node_name: "x" all_start_micros: 1 memory {
        ...             allocation_records { alloc_micros: 5 alloc_bytes: 64 }
        ...             allocation_records { alloc_micros: 9 alloc_bytes: -64 } } } } }
        ... ''', tf.compat.v1.RunMetadata())
        >>> peak_memory(metadata)
        {'/cpu:0': 64}
    """
    peaks = read_step_stats(run_metadata, "peak_memory").peak_bytes
    if not peaks:
        raise NoMemoryDataError(
            "`mem_util.peak_memory`: expected allocation records, but got "
            f"{_why(peaks.missing)}. Pass "
            "`options=tf.compat.v1.RunOptions(trace_level=RunOptions.FULL_TRACE)` "
            "together with `run_metadata=` to `session.run`."
        )
    return peaks


def _why(missing: dict[str, str]) -> str:
    if not missing:
        return "empty step stats"
    return "; ".join(f"none for {name} ({why})" for name, why in missing.items())


def trace_session(session: Any, fetches: Any, feed_dict: Any = None) -> Trace:
    """Runs fetches once with full tracing and reads what was recorded.

    Args:
        session: a `tf.compat.v1.Session`.
        fetches: as for `session.run`.
        feed_dict: as for `session.run`.

    Returns:
        The trace of this run.
    """
    import tensorflow as tf

    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    run_metadata = tf.compat.v1.RunMetadata()
    session.run(fetches, feed_dict, options=options, run_metadata=run_metadata)
    return read_run_metadata(run_metadata)


def _require_step(session: Any, fetches: Any) -> None:
    """Raises what is wrong with the arguments of `plot_memory_timeline`."""
    if not callable(getattr(session, "run", None)):
        raise TypeError(
            "`mem_util.plot_memory_timeline`: `session` must be a "
            f"`tf.compat.v1.Session`, but got {got(session)}. Without sessions take "
            '`mem_util.trace(step, x).save_png("step.png")`.'
        )
    if _is_empty(fetches):
        raise ValueError(
            "`mem_util.plot_memory_timeline`: `fetches` must hold tensors or ops to "
            f"run, but got {got(fetches)}, which is empty. Pass what you would pass to "
            "`session.run`."
        )


def _is_empty(fetches: Any) -> bool:
    """Whether there is nothing in a structure, however it is nested."""
    if isinstance(fetches, Mapping):
        fetches = list(fetches.values())
    return isinstance(fetches, list | tuple) and all(map(_is_empty, fetches))


def plot_memory_timeline(
    path: str | PathLike[str], session: Any, fetches: Any, feed_dict: Any = None
) -> Trace:
    """Runs fetches once with full tracing; writes a Chrome trace and a picture of it.

    Args:
        path: of the Chrome trace (".json", opens in Perfetto and chrome://tracing); the
            picture is put beside it with the suffix ".png". Either suffix, or none, may
            be given.
        session: a `tf.compat.v1.Session`.
        fetches: as for `session.run`. An op that is only grouped may be pruned: fetch
            the tensors.
        feed_dict: as for `session.run`.

    Returns:
        The trace that was drawn.

    Raises:
        NoMemoryDataError: there are neither allocations nor op times to draw.
        TypeError: `path` is no path, or `session` no session.
        ValueError: `path` names no file, or `fetches` is empty.
        FileNotFoundError: its folder does not exist.
    """
    stem = output_path(path, "mem_util.plot_memory_timeline")
    _require_step(session, fetches)
    traced = trace_session(session, fetches, feed_dict)
    if stem.suffix in {".json", ".png"}:
        stem = stem.with_suffix("")
    traced.save_json(stem.parent / f"{stem.name}.json")
    traced.save_png(stem.parent / f"{stem.name}.png")
    return traced
