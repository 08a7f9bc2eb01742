"""Measure and see the memory of TensorFlow programs.

Works with any TensorFlow program: v1 sessions (`peak_memory`, `plot_memory_timeline`),
`tf.function`, eager code and `fit` (`measure`, `trace`). Importing this package imports
neither TensorFlow nor matplotlib; the functions do, when they are called.
"""

from mem_util.errors import (
    MemUtilError,
    NoMemoryDataError,
    NotReplayableError,
    ProfilerError,
    TraceFileError,
)
from mem_util.measure import Measurement, measure
from mem_util.records import Buffer, Record, Span, Timeline, build_timeline
from mem_util.run_metadata import read_run_metadata
from mem_util.session import peak_memory, plot_memory_timeline, trace_session
from mem_util.trace_data import PeakBytes, Trace

__all__ = [
    "Buffer",
    "Measurement",
    "MemUtilError",
    "NoMemoryDataError",
    "NotReplayableError",
    "PeakBytes",
    "ProfilerError",
    "Record",
    "Span",
    "Timeline",
    "Trace",
    "TraceFileError",
    "build_timeline",
    "measure",
    "peak_memory",
    "plot_memory_timeline",
    "read_run_metadata",
    "trace_session",
]
