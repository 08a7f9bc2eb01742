"""What an op costs: the bytes of a tensor and the seconds of an op.

The problem: planning trades bytes against time, and needs both before anything runs.

The model is the roofline: an op takes as long as its arithmetic or its memory traffic,
whichever is more: max(FLOPs / `FLOPS`, bytes moved / `BANDWIDTH`). Only ratios
matter to a planner, and they vary little from machine to machine: a recent GPU has both
figures about a hundred times higher.

FLOPs come from one table of formulas by op type (`_FORMULAS`), each a function of
shapes and attributes. An op that is not in the table does `_ELEMENTWISE` FLOPs an
output element, more if it evaluates a transcendental function.

An op is *heavy* if it does many FLOPs for each byte that it yields. That is not the
same as being a matrix product: the scores of an attention head of size 32 are 16 FLOPs
a byte and cheap to redo, a dense layer of width 1024 is 512 FLOPs a byte and is not
(Korthikanti et al. 2022, arXiv 2205.05198, call the first kind "selective"
recomputation).

Shapes come without gaps (`shapes` fills them): nothing is ever counted as 0 because it
is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "BANDWIDTH",
    "FLOPS",
    "HEAVY_FLOPS_PER_BYTE",
    "Shape",
    "Signature",
    "flops",
    "is_heavy",
    "seconds",
]

FLOPS = 100e9
"""Arithmetic speed, in floating-point operations a second."""

BANDWIDTH = 10e9
"""Memory traffic, in bytes a second."""

HEAVY_FLOPS_PER_BYTE = 48.0
"""From this many FLOPs a byte of output an op counts as heavy."""

Shape = Sequence[int | None] | None
"""Dimensions, None for an unknown one; None for an unknown rank."""

_ELEMENTWISE = 1.0
_TRANSCENDENTAL = 20.0
_RANDOM = 400.0
"""A counter-based generator goes through many rounds for each number: on a CPU a draw
takes as long as reading its result ten times."""
_TRANSCENDENTAL_TYPES = frozenset(
    """Acos Acosh Asin Asinh Atan Atan2 Atanh Cos Cosh Digamma Elu Erf Erfc Erfinv
    Exp Expm1 Lgamma Log Log1p LogSoftmax Pow Selu Sigmoid Sin Sinh Softmax Softplus
    Tan Tanh SoftmaxCrossEntropyWithLogits
    SparseSoftmaxCrossEntropyWithLogits""".split()
)


@dataclass(frozen=True)
class Signature:
    """What the cost of an op depends on.

    Attributes:
        type: The op type.
        inputs: Shapes of the inputs, all dimensions known.
        outputs: Shapes of the outputs, all dimensions known.
        input_bytes: Bytes read.
        output_bytes: Bytes written.
        attributes: The attributes that formulas ask for, such as `transpose_a`.
    """

    type: str
    inputs: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[int]]
    input_bytes: int
    output_bytes: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


def flops(signature: Signature) -> float:
    """Floating-point operations of one run of an op."""
    formula = _FORMULAS.get(signature.type)
    if formula is not None and signature.inputs and signature.outputs:
        return float(formula(signature))
    rate = _ELEMENTWISE
    if signature.type.removesuffix("Grad") in _TRANSCENDENTAL_TYPES:
        rate = _TRANSCENDENTAL if not signature.type.endswith("Grad") else 4.0
    read = max((math.prod(shape) for shape in signature.inputs), default=0)
    written = sum(math.prod(shape) for shape in signature.outputs)
    return rate * max(read, written)


def seconds(signature: Signature) -> float:
    """Roofline estimate of one run of an op, in seconds."""
    moved = signature.input_bytes + signature.output_bytes
    return max(flops(signature) / FLOPS, moved / BANDWIDTH)


def is_heavy(signature: Signature) -> bool:
    """Whether recomputing the op costs much for the bytes that it yields."""
    if signature.type not in _FORMULAS:
        return False
    return flops(signature) >= HEAVY_FLOPS_PER_BYTE * max(signature.output_bytes, 1)


# -- formulas ------------------------------------------------------------------------


def _matmul(s: Signature) -> float:
    transposed = s.attributes.get("transpose_a") or s.attributes.get("adj_x")
    left = s.inputs[0]
    inner = left[-2 if transposed else -1] if len(left) > 1 else 1
    return 2.0 * math.prod(s.outputs[0]) * inner


def _convolution(filter_input: int) -> Callable[[Signature], float]:
    """Every output element reads one filter's worth of the input."""

    def count(s: Signature) -> float:
        filters = s.inputs[filter_input]
        return 2.0 * math.prod(s.outputs[0]) * math.prod(filters[:-1])

    return count


def _depthwise(s: Signature) -> float:
    return 2.0 * math.prod(s.outputs[0]) * math.prod(s.inputs[1][:2])


def _convolution_backward(s: Signature) -> float:
    """As many as the forward convolution: gradient elements times the filter's size."""
    gradient = s.inputs[2]
    result = s.outputs[0]
    # The filter is the result (…Filter) or stands second among the inputs (…Input).
    filters = result if "Filter" in s.type else s.inputs[1]
    reach = filters[:2] if s.type.startswith("Depthwise") else filters[:-1]
    return 2.0 * math.prod(gradient) * math.prod(reach)


def _einsum(s: Signature) -> float:
    equation = s.attributes.get("equation", b"")
    text = equation.decode() if isinstance(equation, bytes) else str(equation)
    sizes: dict[str, int] = {}
    operands = text.split("->")[0].split(",")
    for labels, shape in zip(operands, s.inputs, strict=False):
        if "." in labels or len(labels) != len(shape):
            return 2.0 * max(math.prod(x) for x in (*s.inputs, *s.outputs))
        sizes.update(zip(labels, shape, strict=True))
    return 2.0 * math.prod(sizes.values())


def _fft(s: Signature) -> float:
    """5 n log2 n for each transform of n points on the last one, two or three axes."""
    # A real transform has half as many points on its complex side.
    shape = max(s.inputs[0], s.outputs[0], key=math.prod)
    rank = next((d for d in (2, 3) if s.type.endswith(f"{d}D")), 1)
    points = math.prod(shape if s.type.endswith("ND") else shape[-rank:])
    return 5.0 * math.prod(shape) * math.log2(max(points, 2))


def _draw(s: Signature) -> float:
    return _RANDOM * math.prod(s.outputs[0])


def _cubic(s: Signature) -> float:
    """Factorisations and solvers of square matrices in the last two dimensions."""
    shape = s.inputs[0]
    side = shape[-1] if shape else 1
    return float(math.prod(shape)) * side


_FORMULAS: dict[str, Callable[[Signature], float]] = {
    **dict.fromkeys(
        ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "SparseMatMul"),
        _matmul,
    ),
    **dict.fromkeys(("Conv2D", "Conv3D", "Conv"), _convolution(1)),
    "DepthwiseConv2dNative": _depthwise,
    **dict.fromkeys(
        (
            "Conv2DBackpropFilter",
            "Conv2DBackpropInput",
            "Conv3DBackpropFilterV2",
            "Conv3DBackpropInputV2",
            "DepthwiseConv2dNativeBackpropFilter",
            "DepthwiseConv2dNativeBackpropInput",
        ),
        _convolution_backward,
    ),
    **dict.fromkeys(("Einsum", "XlaDot", "XlaDotV2", "XlaEinsum"), _einsum),
    **dict.fromkeys(
        """FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND RFFT RFFT2D RFFT3D IRFFT
        IRFFT2D IRFFT3D""".split(),
        _fft,
    ),
    **dict.fromkeys(
        """StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomUniform
        StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2
        StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2
        StatelessTruncatedNormal StatelessTruncatedNormalV2""".split(),
        _draw,
    ),
    **dict.fromkeys(
        """Cholesky Lu Qr Svd Eig SelfAdjointEigV2 MatrixInverse MatrixDeterminant
        LogMatrixDeterminant MatrixSolve MatrixSolveLs MatrixTriangularSolve
        MatrixExponential MatrixLogarithm MatrixSquareRoot""".split(),
        _cubic,
    ),
}
