"""Reads the shapes of a `tf.Graph` and fills their gaps by an assumption (`shapes`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients import shapes

__all__ = ["full_shapes"]


def full_shapes(
    ops: Sequence[tf.Operation], ids: dict[int, int], unknown_dim: int
) -> tuple[list[shapes.FullShape], list[int]]:
    """The shapes of the outputs of all ops, without gaps.

    Args:
        ops: Sorted topologically.
        ids: For the `id` of each output of `ops` its number, counted op by op.
        unknown_dim: What an unknown dimension is taken to be where it begins.

    Returns:
        The shapes by number, and the numbers of those that rest on the assumption.
    """
    static = [_static_shape(tensor) for op in ops for tensor in op.outputs]
    if all(shape is not None and None not in shape for shape in static):
        return [tuple(tensor.shape) for op in ops for tensor in op.outputs], []
    assumed = [n for n, shape in enumerate(static) if shape is None or None in shape]
    full: list[shapes.FullShape] = []
    values: list[Any] = []
    for op in ops:
        outputs = static[len(full) : len(full) + len(op.outputs)]
        # Without what is made later, by the back edges of v1 loops.
        inputs = [
            ids[id(t)] for t in op.inputs if ids.get(id(t), len(full)) < len(full)
        ]
        read = shapes.OpShapes(
            op.type,
            [full[i] for i in inputs],
            [values[i] for i in inputs],
            outputs,
            op.get_attr,
        )
        told = _values(op, read)
        inferred = shapes.infer(read, unknown_dim)
        full.extend(
            shape if value is None else value.shape
            for shape, value in zip(inferred, told, strict=True)
        )
        values.extend(told)
    return full, assumed


def _values(op: tf.Operation, read: shapes.OpShapes) -> Sequence[Any]:
    """The values of the op's outputs, if they are integers of which shapes are made."""
    if not all(t.dtype.is_integer or t.dtype.is_bool for t in op.outputs):
        return [None] * len(op.outputs)
    if op.type != "Const":
        return shapes.values(read)
    small = op.outputs[0].shape.num_elements() <= shapes.MOST_ELEMENTS
    return [tf.get_static_value(op.outputs[0]) if small else None]


def _static_shape(tensor: tf.Tensor) -> list[int | None] | None:
    return None if tensor.shape.rank is None else tensor.shape.as_list()
