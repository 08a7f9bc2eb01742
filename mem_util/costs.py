"""Measured seconds of each op, out of a trace."""

from __future__ import annotations

import json
import logging
from os import PathLike

from mem_util.paths import output_path
from mem_util.run_metadata import CUPTI_ADVICE
from mem_util.trace_data import Trace

__all__ = ["op_seconds", "write_costs"]

_logger = logging.getLogger(__name__)


def op_seconds(traced: Trace) -> dict[str, float]:
    """Mean seconds of one run of each op.

    Kernels on a GPU's streams count where there are any, because the span on the device
    itself is then only the time of launching them; kernels of one op add up.

    Args:
        traced: a trace.

    Returns:
        Op name to seconds, in the order of first runs.
    """
    for note in traced.notes:
        if note.endswith(CUPTI_ADVICE):
            _logger.warning("%s", note)
    runs: dict[str, list[float]] = {}
    kernels: dict[str, float] = {}
    for span in traced.spans:
        seconds = (span.end_ns - span.start_ns) * 1e-9
        if "/gpu:" in span.device and span.lane:
            name = span.op.partition(":")[0]
            kernels[name] = kernels.get(name, 0.0) + seconds
        else:
            runs.setdefault(span.op, []).append(seconds)
    means = {name: sum(times) / len(times) for name, times in runs.items()}
    counts = {name: len(times) for name, times in runs.items()}
    means |= {name: s / counts.get(name, 1) for name, s in kernels.items()}
    return means


def write_costs(path: str | PathLike[str], traced: Trace) -> None:
    """Writes `op_seconds(traced)` as JSON.

    The file is one object, {"op name": seconds}, an op a line in the order of first
    runs: the name as the trace has it, and the mean seconds of one run, above 0. What
    was too short for the clock is left out.

    Args:
        path: of the JSON file.
        traced: a trace.

    Raises:
        TypeError, ValueError, FileNotFoundError: no file can be written there.
    """
    file = output_path(path, "mem_util.write_costs")
    seconds = {name: s for name, s in op_seconds(traced).items() if s > 0}
    text = json.dumps(seconds, indent=1)
    file.write_text(text + "\n", encoding="utf-8")
