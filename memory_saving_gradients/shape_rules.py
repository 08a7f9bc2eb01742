"""How the shapes of an op's results follow from what it reads: one rule by op type.

A rule gives for each output of an op a shape, in which None stands for a dimension that
it cannot tell. Where it can tell nothing it gives less or raises (`infer` in `shapes`
expects both). It is asked only for outputs whose static shape has gaps.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence

import numpy as np

from memory_saving_gradients import op_types
from memory_saving_gradients.cost import Shape
from memory_saving_gradients.op_shapes import OpShapes, broadcast, strided

__all__ = ["SHAPE_RULES", "ShapeRule"]

ShapeRule = Callable[[OpShapes], Sequence[Shape]]
"""What a rule is: from an op to the shapes of its outputs, as far as it can tell."""


def _like_first(op: OpShapes) -> Sequence[Shape]:
    return [op.inputs[0]]


def _like_each(op: OpShapes) -> Sequence[Shape]:
    return op.inputs


def _elementwise(op: OpShapes) -> Sequence[Shape]:
    return [broadcast(op.inputs)]


def _given_by(index: int) -> ShapeRule:
    """The shape is the value of an input."""
    return lambda op: [op.numbers(index)]


def _reshape(op: OpShapes) -> Sequence[Shape]:
    static = op.outputs[0]
    wanted: list[int | None]
    if op.values[1] is not None:
        wanted = [None if size < 0 else size for size in op.numbers(1)]
        if static is not None and len(static) == len(wanted):
            pairs = zip(wanted, static, strict=True)
            wanted = [size if size is not None else known for size, known in pairs]
    elif static is not None:
        wanted = list(static)
    else:
        return []
    if wanted.count(None) == 1:
        rest = math.prod(size for size in wanted if size is not None)
        wanted[wanted.index(None)] = math.prod(op.inputs[0]) // max(rest, 1)
    return [wanted]


def _matmul(op: OpShapes) -> Sequence[Shape]:
    batched = op.type.startswith("BatchMatMul")
    names = ("adj_x", "adj_y") if batched else ("transpose_a", "transpose_b")
    left, right = op.inputs[0], op.inputs[1]
    rows = left[-1] if op.attribute(names[0]) else left[-2]
    columns = right[-2] if op.attribute(names[1]) else right[-1]
    return [(*broadcast([left[:-2], right[:-2]]), rows, columns)]


def _einsum(op: OpShapes) -> Sequence[Shape]:
    equation = op.attribute("equation")
    text = equation.decode() if isinstance(equation, bytes) else str(equation)
    text = text.replace(" ", "")
    sources, result = text.split("->")
    spare = "".join(sorted(set(string.ascii_letters) - set(text)))
    size: dict[str, int] = {}
    dots = ""
    for labels, shape in zip(sources.split(","), op.inputs, strict=True):
        hidden = spare[: len(shape) - len(labels) + 3] if "..." in labels else ""
        dots = max(dots, hidden, key=len)
        # Dimensions under an ellipsis are aligned at their right ends.
        names = labels.replace("...", hidden[::-1])
        for label, length in zip(names, shape, strict=True):
            size[label] = max(size.get(label, 1), length)
    return [[size[label] for label in result.replace("...", dots[::-1])]]


def _transpose(op: OpShapes) -> Sequence[Shape]:
    return [[op.inputs[0][axis] for axis in op.numbers(1)]]


def _concat(op: OpShapes) -> Sequence[Shape]:
    (axis,) = op.numbers(-1)
    parts = op.inputs[:-1]
    shape: list[int] = list(parts[0])
    shape[axis] = sum(part[axis] for part in parts)
    return [shape]


def _reduced(op: OpShapes) -> Sequence[Shape]:
    shape = op.inputs[0]
    gone = {axis % len(shape) for axis in op.numbers(1)} if shape else set()
    if op.type in op_types.REDUCTION_TYPES and op.attribute("keep_dims"):
        return [[1 if axis in gone else n for axis, n in enumerate(shape)]]
    return [[n for axis, n in enumerate(shape) if axis not in gone]]


def _expand_dims(op: OpShapes) -> Sequence[Shape]:
    (axis,) = op.numbers(1)
    shape = list(op.inputs[0])
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
    return [shape]


def _squeeze(op: OpShapes) -> Sequence[Shape]:
    shape = op.inputs[0]
    gone = {axis % len(shape) for axis in op.attribute("squeeze_dims")}
    gone = gone or {axis for axis, size in enumerate(shape) if size == 1}
    return [[size for axis, size in enumerate(shape) if axis not in gone]]


def _pack(op: OpShapes) -> Sequence[Shape]:
    shape = list(op.inputs[0])
    axis = op.attribute("axis")
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, len(op.inputs))
    return [shape]


def _unpack(op: OpShapes) -> Sequence[Shape]:
    shape = list(op.inputs[0])
    del shape[op.attribute("axis")]
    return [shape] * len(op.outputs)


def _split(op: OpShapes) -> Sequence[Shape]:
    (axis,) = op.numbers(0)
    shape = list(op.inputs[1])
    shape[axis] //= len(op.outputs)
    return [shape] * len(op.outputs)


def _split_v(op: OpShapes) -> Sequence[Shape]:
    (axis,) = op.numbers(2)
    shape = op.inputs[0]
    sizes = op.numbers(1)
    left = shape[axis] - sum(size for size in sizes if size >= 0)
    place = axis % len(shape)
    return [
        [*shape[:place], size if size >= 0 else left, *shape[place + 1 :]]
        for size in sizes
    ]


def _tile(op: OpShapes) -> Sequence[Shape]:
    pairs = zip(op.inputs[0], op.numbers(1), strict=True)
    return [[size * times for size, times in pairs]]


def _pad(op: OpShapes) -> Sequence[Shape]:
    shape, around = op.inputs[0], op.numbers(1)
    pairs = zip(shape, around[::2], around[1::2], strict=True)
    return [[before + size + after for size, before, after in pairs]]


def _slice(op: OpShapes) -> Sequence[Shape]:
    triples = zip(op.inputs[0], op.numbers(1), op.numbers(2), strict=True)
    return [[n - begin if size < 0 else size for n, begin, size in triples]]


def _strided_slice(op: OpShapes) -> Sequence[Shape]:
    # One zero, repeated without taking memory: numpy knows how it is indexed.
    return [np.broadcast_to(np.int8(0), op.inputs[0])[strided(op)].shape]


def _gather(op: OpShapes) -> Sequence[Shape]:
    source, indices = op.inputs[0], op.inputs[1]
    batch = int(op.attribute("batch_dims"))
    (axis,) = op.numbers(2) if len(op.inputs) > 2 else (0,)
    axis %= len(source)
    return [[*source[:axis], *indices[batch:], *source[axis + 1 :]]]


def _resource_gather(op: OpShapes) -> Sequence[Shape]:
    static = op.outputs[0]
    if static is None:
        return []
    indices = op.inputs[1]
    return [[*indices, *static[len(indices) :]]]


def _gather_nd(op: OpShapes) -> Sequence[Shape]:
    source, indices = op.inputs[0], op.inputs[1]
    return [[*indices[:-1], *source[indices[-1] :]]]


def _one_hot(op: OpShapes) -> Sequence[Shape]:
    (depth,) = op.numbers(1)
    shape = list(op.inputs[0])
    axis = op.attribute("axis")
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, depth)
    return [shape]


def _segments(op: OpShapes) -> Sequence[Shape]:
    (count,) = op.numbers(2)
    return [[count, *op.inputs[0][len(op.inputs[1]) :]]]


def _cross_entropy(op: OpShapes) -> Sequence[Shape]:
    logits = op.inputs[0]
    return [logits[:-1], logits]


def _batch_norm(op: OpShapes) -> Sequence[Shape]:
    # The last output is room for a library on GPUs, and empty elsewhere.
    return [op.inputs[0], None, None, None, None, [0]]


def _top_k(op: OpShapes) -> Sequence[Shape]:
    (k,) = op.numbers(1)
    return [[*op.inputs[0][:-1], k]] * 2


def _windowed(op: OpShapes) -> Sequence[Shape]:
    """Convolutions and pooling: a window that moves over the inner dimensions."""
    shape = op.inputs[0]
    strides = op.attribute("strides")
    layout = str(op.attribute("data_format"))
    first = 2 if "NC" in layout else 1
    inner = range(first, first + len(shape) - 2)
    result: list[int | None] = [None] * len(shape)
    result[0] = shape[0]
    if op.type in ("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D"):
        windows = {axis: op.attribute("ksize")[axis] for axis in inner}
        result[1 if first == 2 else -1] = shape[1 if first == 2 else -1]
    else:
        dilations = op.attribute("dilations")
        windows = {
            axis: (op.inputs[1][axis - first] - 1) * dilations[axis] + 1
            for axis in inner
        }
    if "EXPLICIT" in str(op.attribute("padding")):
        return [result]
    for axis in inner:
        room = shape[axis]
        if "VALID" in str(op.attribute("padding")):
            room = room - windows[axis] + 1
        result[axis] = -(-room // strides[axis])
    return [result]


def _resized(op: OpShapes) -> Sequence[Shape]:
    batch, *_, channels = op.inputs[0]
    return [[batch, *op.numbers(1), channels]]


_ELEMENTWISE_TYPES = (
    op_types.IN_PLACE_TYPES
    - frozenset("BiasAdd FusedBatchNorm FusedBatchNormGradV3".split())
    - frozenset(("FusedBatchNormV2", "FusedBatchNormV3"))
) | frozenset(
    """ApproximateEqual BitwiseAnd BitwiseOr BitwiseXor Cast CheckNumerics Digamma
    Equal Erfinv Greater GreaterEqual Igamma Igammac Imag Invert IsFinite IsInf IsNan
    LeftShift Less LessEqual LogicalAnd LogicalNot LogicalOr NextAfter NotEqual
    OnesLike Polygamma Real RightShift Select TruncateMod ZerosLike""".split()
)

_LIKE_FIRST_TYPES = frozenset(
    """BiasAdd Bitcast Cholesky Cumprod Cumsum EnsureShape Enter Exit FusedBatchNorm
    FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2
    Identity LRN LRNGrad MatrixBandPart MatrixInverse MaxPoolGrad Merge
    NextIteration PreventGradient RandomShuffle ReverseSequence ReverseV2 Roll Snapshot
    StopGradient TensorScatterAdd TensorScatterSub TensorScatterUpdate""".split()
)

SHAPE_RULES: dict[str, ShapeRule] = {
    **dict.fromkeys(_ELEMENTWISE_TYPES, _elementwise),
    **dict.fromkeys(_LIKE_FIRST_TYPES, _like_first),
    **dict.fromkeys(("IdentityN", "ShapeN", "StatelessWhile", "While"), _like_each),
    **dict.fromkeys(("Switch", "RefSwitch"), lambda op: [op.inputs[0]] * 2),
    **dict.fromkeys(op_types.REDUCTION_TYPES, _reduced),
    **dict.fromkeys(("ArgMax", "ArgMin"), _reduced),
    **dict.fromkeys(
        ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul
    ),
    **dict.fromkeys(
        """AvgPool AvgPool3D Conv2D Conv3D DepthwiseConv2dNative MaxPool
        MaxPool3D""".split(),
        _windowed,
    ),
    **dict.fromkeys(
        """AvgPool3DGrad AvgPoolGrad Conv2DBackpropInput Conv3DBackpropInputV2
        DepthwiseConv2dNativeBackpropInput Empty Fill RandomStandardNormal
        RandomUniform RandomUniformInt StatelessRandomNormal StatelessRandomNormalV2
        StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformInt
        StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormal
        StatelessTruncatedNormalV2 StridedSliceGrad TruncatedNormal""".split(),
        _given_by(0),
    ),
    "BroadcastTo": _given_by(1),
    "ScatterNd": _given_by(2),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _pad),
    **dict.fromkeys(
        ("ResizeBilinear", "ResizeNearestNeighbor", "ResizeNearestNeighborGrad"),
        _resized,
    ),
    "ResizeBilinearGrad": lambda op: [op.inputs[1]],
    **dict.fromkeys(
        ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentProd"), _segments
    ),
    **dict.fromkeys(
        ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
        _cross_entropy,
    ),
    "ConcatV2": _concat,
    "Einsum": _einsum,
    "ExpandDims": _expand_dims,
    "FusedBatchNormV3": _batch_norm,
    "GatherNd": _gather_nd,
    "GatherV2": _gather,
    "OneHot": _one_hot,
    "Pack": _pack,
    "Reshape": _reshape,
    "ResourceGather": _resource_gather,
    "Slice": _slice,
    "Split": _split,
    "SplitV": _split_v,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Tile": _tile,
    "TopKV2": _top_k,
    "Transpose": _transpose,
    "Unpack": _unpack,
}
