"""Which ops may not be run twice, decided by type and by TensorFlow's registry."""

from __future__ import annotations

import tensorflow as tf

from memory_saving_gradients import op_types, tf_internals
from memory_saving_gradients.graph import Pin

__all__ = ["pin_of"]


def pin_of(op: tf.Operation) -> Pin | None:
    """Why `op` may not be recomputed, or None."""
    if op.type in op_types.PLACEHOLDER_TYPES:
        return Pin.PLACEHOLDER
    if tf_internals.in_control_flow_v1(op):
        return Pin.CONTROL_FLOW
    if op.type in op_types.CALL_TYPES:
        return Pin.CALL
    if any(
        t.dtype in (tf.resource, tf.variant) or t.dtype != t.dtype.base_dtype
        for t in (*op.inputs, *op.outputs)
    ):
        return Pin.HANDLE
    if tf_internals.is_stateful(op):
        return Pin.STATEFUL
    if op.type in op_types.SHAPE_TYPES:
        return Pin.METADATA
    return None
