"""Measure and see the memory of TensorFlow programs.

Works with any TensorFlow program: v1 sessions (`peak_memory`, `plot_memory_timeline`),
`tf.function`, eager code and `fit` (`measure`, `trace`). Importing this package imports
neither TensorFlow nor matplotlib; the functions do, when they are called.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mem_util import required as _required
from mem_util.chrome_trace import chrome_trace, write_chrome_trace
from mem_util.costs import op_seconds, write_costs
from mem_util.errors import (
    MemUtilError,
    MissingDeviceError,
    MissingTensorFlowError,
    NoMemoryDataError,
    NotReplayableError,
    ProfilerError,
    TraceFileError,
)
from mem_util.measure import Measurement, measure
from mem_util.plot import Curve, draw_curves
from mem_util.plot_trace import draw_trace
from mem_util.records import (
    Buffer,
    Record,
    Span,
    Timeline,
    build_timeline,
    format_bytes,
)
from mem_util.replay import replay
from mem_util.run_metadata import read_run_metadata
from mem_util.session import peak_memory, plot_memory_timeline, trace_session
from mem_util.text import print_memory_timeline, summary
from mem_util.trace_data import PeakBytes, Trace
from mem_util.tracing import read_trace, trace

if TYPE_CHECKING:
    from mem_util.callback import PeakMemory

__all__ = [
    "Buffer",
    "Curve",
    "Measurement",
    "MemUtilError",
    "MissingDeviceError",
    "MissingTensorFlowError",
    "NoMemoryDataError",
    "NotReplayableError",
    "PeakBytes",
    "PeakMemory",
    "ProfilerError",
    "Record",
    "Span",
    "Timeline",
    "Trace",
    "TraceFileError",
    "build_timeline",
    "chrome_trace",
    "draw_curves",
    "draw_trace",
    "format_bytes",
    "measure",
    "op_seconds",
    "peak_memory",
    "plot_memory_timeline",
    "print_memory_timeline",
    "read_run_metadata",
    "read_trace",
    "replay",
    "summary",
    "trace",
    "trace_session",
    "write_chrome_trace",
    "write_costs",
]


def __dir__() -> list[str]:
    """The public names; `PeakMemory` where there is a TensorFlow to make it of, as
    `help` and others get all that is listed."""
    there = sys.modules.get("tensorflow") or find_spec("tensorflow")
    return [name for name in __all__ if there or name != "PeakMemory"]


def __getattr__(name: str) -> Any:
    """Imports `PeakMemory` when it is asked for: its base class is TensorFlow's."""
    if name == "PeakMemory":
        _required.require_tensorflow(name)
        from mem_util.callback import PeakMemory

        return PeakMemory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
