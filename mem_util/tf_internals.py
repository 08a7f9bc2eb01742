"""The only module of `mem_util` that uses names which TensorFlow does not document."""

from __future__ import annotations

from typing import Any

__all__ = ["new_xspace", "variable_type"]


def new_xspace() -> Any:
    """An empty `XSpace`, the message that the profiler writes to `*.xplane.pb`.

    The profiler's TensorBoard plugin has a public copy, but nobody installs that just
    to read a trace; TensorFlow ships the same message undocumented.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace()


def variable_type(handle: Any) -> tuple[Any, Any] | None:
    """Type and shape of the variable that a resource handle is of, else None.

    A function's list of variables lacks those that TensorFlow makes for itself, such as
    the tokens that put the collective operations of `MirroredStrategy` into an order.
    Of these there is only the handle, and what it knows has no public name.
    """
    import tensorflow as tf

    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    (found,) = data.shape_and_type
    return tf.as_dtype(found.dtype), tf.TensorShape(found.shape)
