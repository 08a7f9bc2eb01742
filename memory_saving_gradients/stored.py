"""What loops and branches hold for their gradients: the bytes of their side outputs.

A loop appends what its gradient will read to lists, once an iteration, and a branch
wraps it. In the graph around, these are handles of a few bytes.
"""

from __future__ import annotations

import tensorflow as tf

from memory_saving_gradients import op_types, tf_internals_bodies
from memory_saving_gradients.trip_counts import (
    ASSUMED_ITERATIONS,
    iterations,
    source_of,
)

__all__ = ["ASSUMED_ITERATIONS", "bytes_of", "side_outputs"]


def side_outputs(op: tf.Operation, unknown_dim: int) -> dict[int, int]:
    """For each output of a loop or branch that holds intermediates: how many bytes.

    Args:
        op: Any op.
        unknown_dim: What an unknown dimension is taken to be.
    """
    if op.type not in op_types.CALL_TYPES:
        return {}
    times = 1
    if op.type in op_types.LOOP_TYPES:
        times = iterations(op) or ASSUMED_ITERATIONS
    found: dict[int, int] = {}
    for number, tensor in tf_internals_bodies.exported(op):
        held = times * _held(tensor, unknown_dim)
        # Of the branches only one is taken.
        found[number] = max(found.get(number, 0), held)
    return found


def bytes_of(tensor: tf.Tensor, unknown_dim: int) -> int:
    """The size of a tensor, as far as its shape is known; 0 if not even its rank is."""
    if tensor.shape.rank is None:
        return 0
    count = tensor.dtype.size or 8
    for size in tensor.shape.as_list():
        count *= unknown_dim if size is None else size
    return int(count)


def _held(tensor: tf.Tensor, unknown_dim: int) -> int:
    source = source_of(tensor)
    if source.op.type == "ReadVariableOp":  # it shares the variable's buffer
        return 0
    if source.dtype == tf.variant:
        return side_outputs(source.op, unknown_dim).get(source.value_index, 8)
    return bytes_of(tensor, unknown_dim)
