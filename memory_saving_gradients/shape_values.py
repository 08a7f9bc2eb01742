"""What the small integers are of which shapes are made: one rule by op type.

`tf.reshape(x, [tf.shape(x)[0] * 4, -1])` computes a shape while the graph runs. Under
an assumption for what is unknown, all of it can be computed while the graph is read.
These are the ops that occur in such arithmetic, in models and in what autodiff makes of
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from memory_saving_gradients.op_shapes import OpShapes, strided

__all__ = ["VALUE_RULES", "ValueRule"]

ValueRule = Callable[[OpShapes], Iterable[Any]]
"""From an op to the values of its outputs; raises where they cannot be told."""


def _each_shape(op: OpShapes) -> Iterable[Any]:
    return op.inputs


def _size(op: OpShapes) -> Iterable[Any]:
    return [np.prod(op.inputs[0], dtype=np.int64)]


def _same(op: OpShapes) -> Iterable[Any]:
    return [op.array(0)]


def _binary(function: Callable[[Any, Any], Any]) -> ValueRule:
    return lambda op: [function(op.array(0), op.array(1))]


def _reduced(function: Any) -> ValueRule:
    def rule(op: OpShapes) -> Iterable[Any]:
        keep = bool(op.attribute("keep_dims"))
        return [function.reduce(op.array(0), tuple(op.numbers(1)), keepdims=keep)]

    return rule


def _pack(op: OpShapes) -> Iterable[Any]:
    arrays = [op.array(index) for index in range(len(op.inputs))]
    return [np.stack(arrays, op.attribute("axis"))]


def _unpack(op: OpShapes) -> Iterable[Any]:
    return np.moveaxis(op.array(0), op.attribute("axis"), 0)


def _concat(op: OpShapes) -> Iterable[Any]:
    arrays = [op.array(index) for index in range(len(op.inputs) - 1)]
    (axis,) = op.numbers(-1)
    return [np.concatenate(arrays, axis)]


def _concat_offset(op: OpShapes) -> Iterable[Any]:
    (axis,) = op.numbers(0)
    offset = np.zeros_like(op.array(1))
    found = []
    for index in range(1, len(op.inputs)):
        found.append(offset.copy())
        offset[axis] += op.array(index)[axis]
    return found


def _split(op: OpShapes) -> Iterable[Any]:
    (axis,) = op.numbers(0)
    return np.split(op.array(1), len(op.outputs), axis)


def _slice(op: OpShapes) -> Iterable[Any]:
    pairs = zip(op.numbers(1), op.numbers(2), strict=True)
    index = [slice(a, None if size < 0 else a + size) for a, size in pairs]
    return [op.array(0)[tuple(index)]]


def _gather(op: OpShapes) -> Iterable[Any]:
    (axis,) = op.numbers(2)
    return [np.take(op.array(0), op.array(1), axis)]


def _squeeze(op: OpShapes) -> Iterable[Any]:
    return [op.array(0).squeeze(tuple(op.attribute("squeeze_dims")) or None)]


def _fill(op: OpShapes) -> Iterable[Any]:
    return [np.full(op.numbers(0), op.array(1))]


def _tile(op: OpShapes) -> Iterable[Any]:
    return [np.tile(op.array(0), op.numbers(1))]


def _range(op: OpShapes) -> Iterable[Any]:
    start, limit, delta = (op.numbers(index)[0] for index in range(3))
    return [np.arange(start, limit, delta)]


def _inverted(op: OpShapes) -> Iterable[Any]:
    return [np.argsort(op.array(0))]


def _stitched(op: OpShapes) -> Iterable[Any]:
    """`DynamicStitch`: parts of a vector, put in their places."""
    half = len(op.inputs) // 2
    indices = [op.array(index).ravel() for index in range(half)]
    parts = [op.array(half + index).ravel() for index in range(half)]
    result = np.zeros(1 + max(int(i.max(initial=-1)) for i in indices), np.int64)
    for index, part in zip(indices, parts, strict=True):
        result[index] = part
    return [result]


def _shape_pair(op: OpShapes) -> list[tuple[int, int]]:
    """Two shapes that are broadcast against each other, aligned at the right."""
    pairs = itertools.zip_longest(
        reversed(op.numbers(0)), reversed(op.numbers(1)), fillvalue=1
    )
    return list(pairs)[::-1]


def _broadcast_args(op: OpShapes) -> Iterable[Any]:
    return [[b if a == 1 else a for a, b in _shape_pair(op)]]


def _broadcast_gradient_args(op: OpShapes) -> Iterable[Any]:
    """The axes over which the gradients of both operands are summed."""
    found: tuple[list[int], list[int]] = ([], [])
    for axis, pair in enumerate(_shape_pair(op)):
        for size, other, axes in zip(pair, pair[::-1], found, strict=True):
            # Two ones are summed over in vain, for both.
            if size == 1 and (other != 1 or pair == (1, 1)):
                axes.append(axis)
    return found


_BINARY: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "Add": np.add,
        "AddV2": np.add,
        "Equal": np.equal,
        "FloorDiv": np.floor_divide,
        "FloorMod": np.mod,
        "Greater": np.greater,
        "GreaterEqual": np.greater_equal,
        "Less": np.less,
        "LessEqual": np.less_equal,
        "Maximum": np.maximum,
        "Minimum": np.minimum,
        "Mul": np.multiply,
        "NotEqual": np.not_equal,
        "Sub": np.subtract,
    }
)

_REDUCED: Mapping[str, Any] = MappingProxyType(
    {"Max": np.maximum, "Min": np.minimum, "Prod": np.multiply, "Sum": np.add}
)


def _select(op: OpShapes) -> Sequence[Any]:
    return [np.where(op.array(0), op.array(1), op.array(2))]


VALUE_RULES: Mapping[str, ValueRule] = MappingProxyType(
    {
        **{name: _binary(function) for name, function in _BINARY.items()},
        **{name: _reduced(function) for name, function in _REDUCED.items()},
        **dict.fromkeys(("Cast", "EnsureShape", "Identity", "StopGradient"), _same),
        **dict.fromkeys(("Shape", "ShapeN"), _each_shape),
        **dict.fromkeys(("Select", "SelectV2"), _select),
        "BroadcastArgs": _broadcast_args,
        "BroadcastGradientArgs": _broadcast_gradient_args,
        "BroadcastTo": lambda op: [np.broadcast_to(op.array(0), op.numbers(1))],
        "ConcatOffset": _concat_offset,
        "ConcatV2": _concat,
        "DynamicStitch": _stitched,
        "ExpandDims": lambda op: [np.expand_dims(op.array(0), op.numbers(1)[0])],
        "Fill": _fill,
        "GatherV2": _gather,
        "InvertPermutation": _inverted,
        "Neg": lambda op: [-op.array(0)],
        "OnesLike": lambda op: [np.ones(op.inputs[0])],
        "Pack": _pack,
        "Range": _range,
        "Rank": lambda op: [len(op.inputs[0])],
        "Reshape": lambda op: [op.array(0).reshape(op.numbers(1))],
        "ReverseV2": lambda op: [np.flip(op.array(0), tuple(op.numbers(1)))],
        "Size": _size,
        "Slice": _slice,
        "Split": _split,
        "Squeeze": _squeeze,
        "StridedSlice": lambda op: [op.array(0)[strided(op)]],
        "Tile": _tile,
        "Transpose": lambda op: [op.array(0).transpose(op.numbers(1))],
        "Unpack": _unpack,
        "ZerosLike": lambda op: [np.zeros(op.inputs[0])],
    }
)
