"""The only module of `mem_util` that uses names which TensorFlow does not document."""

from __future__ import annotations

from typing import Any

__all__ = ["new_xspace"]


def new_xspace() -> Any:
    """An empty `XSpace`, the message that the profiler writes to `*.xplane.pb`.

    The profiler's TensorBoard plugin has a public copy, but nobody installs that just
    to read a trace; TensorFlow ships the same message undocumented.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace()
