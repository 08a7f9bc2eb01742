"""FLOP formulas against counts made by hand, heavy ops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from memory_saving_gradients import cost
from memory_saving_gradients.cost import Signature


def op(
    kind: str,
    inputs: Sequence[Sequence[int]],
    *outputs: Sequence[int],
    item_bytes: int = 4,
    **attributes: Any,
) -> Signature:
    """An op on tensors of `item_bytes` an element."""

    def size(shapes: Sequence[Sequence[int]]) -> int:
        return item_bytes * sum(math.prod(shape) for shape in shapes)

    known: Mapping[str, Any] = attributes
    return Signature(kind, inputs, outputs, size(inputs), size(outputs), known)


MULTIPLY_ADD = 2
TAPS = 3 * 3

COUNTS: dict[str, tuple[Signature, float]] = {
    # (3, 4) · (4, 5): 15 results of 4 multiply-adds each.
    "MatMul": (op("MatMul", [(3, 4), (4, 5)], (3, 5)), 15 * 4 * MULTIPLY_ADD),
    "MatMul, transposed": (
        op("MatMul", [(4, 3), (4, 5)], (3, 5), transpose_a=True),
        15 * 4 * MULTIPLY_ADD,
    ),
    "BatchMatMulV2": (
        op("BatchMatMulV2", [(7, 3, 4), (7, 4, 5)], (7, 3, 5), adj_x=False),
        7 * 15 * 4 * MULTIPLY_ADD,
    ),
    "BatchMatMulV2, adjoint": (
        op("BatchMatMulV2", [(7, 4, 3), (7, 4, 5)], (7, 3, 5), adj_x=True),
        7 * 15 * 4 * MULTIPLY_ADD,
    ),
    # One set of matrices broadcast against seven.
    "BatchMatMulV2, broadcast": (
        op("BatchMatMulV2", [(1, 3, 4), (7, 4, 5)], (7, 3, 5), adj_x=False),
        7 * 15 * 4 * MULTIPLY_ADD,
    ),
    # Nine taps on 2 channels for each of 2 · 8 · 8 · 16 results.
    "Conv2D": (
        op("Conv2D", [(2, 8, 8, 2), (3, 3, 2, 16)], (2, 8, 8, 16)),
        2 * 8 * 8 * 16 * TAPS * 2 * MULTIPLY_ADD,
    ),
    # Two groups: the filter sees one of two channels.
    "Conv2D, grouped": (
        op("Conv2D", [(2, 8, 8, 2), (3, 3, 1, 16)], (2, 8, 8, 16)),
        2 * 8 * 8 * 16 * TAPS * 1 * MULTIPLY_ADD,
    ),
    "Conv2D, channels first, stride 2": (
        op("Conv2D", [(2, 2, 8, 8), (3, 3, 2, 16)], (2, 16, 4, 4)),
        2 * 4 * 4 * 16 * TAPS * 2 * MULTIPLY_ADD,
    ),
    "Conv3D": (
        op("Conv3D", [(1, 4, 4, 4, 2), (3, 3, 3, 2, 5)], (1, 4, 4, 4, 5)),
        4**3 * 5 * 27 * 2 * MULTIPLY_ADD,
    ),
    # Two channels, each with three filters of its own.
    "DepthwiseConv2dNative": (
        op("DepthwiseConv2dNative", [(1, 4, 4, 2), (3, 3, 2, 3)], (1, 4, 4, 6)),
        4 * 4 * 6 * TAPS * MULTIPLY_ADD,
    ),
    # Each gradient costs what the forward op does.
    "Conv2DBackpropInput": (
        op(
            "Conv2DBackpropInput",
            [(4,), (3, 3, 2, 16), (2, 8, 8, 16)],
            (2, 8, 8, 2),
        ),
        2 * 8 * 8 * 16 * TAPS * 2 * MULTIPLY_ADD,
    ),
    "Conv2DBackpropFilter": (
        op(
            "Conv2DBackpropFilter",
            [(2, 8, 8, 2), (4,), (2, 8, 8, 16)],
            (3, 3, 2, 16),
        ),
        2 * 8 * 8 * 16 * TAPS * 2 * MULTIPLY_ADD,
    ),
    "Conv3DBackpropInputV2": (
        op(
            "Conv3DBackpropInputV2",
            [(5,), (3, 3, 3, 2, 5), (1, 4, 4, 4, 5)],
            (1, 4, 4, 4, 2),
        ),
        4**3 * 5 * 27 * 2 * MULTIPLY_ADD,
    ),
    "Conv3DBackpropFilterV2": (
        op(
            "Conv3DBackpropFilterV2",
            [(1, 4, 4, 4, 2), (5,), (1, 4, 4, 4, 5)],
            (3, 3, 3, 2, 5),
        ),
        4**3 * 5 * 27 * 2 * MULTIPLY_ADD,
    ),
    "DepthwiseConv2dNativeBackpropInput": (
        op(
            "DepthwiseConv2dNativeBackpropInput",
            [(4,), (3, 3, 2, 3), (1, 4, 4, 6)],
            (1, 4, 4, 2),
        ),
        4 * 4 * 6 * TAPS * MULTIPLY_ADD,
    ),
    "DepthwiseConv2dNativeBackpropFilter": (
        op(
            "DepthwiseConv2dNativeBackpropFilter",
            [(1, 4, 4, 2), (4,), (1, 4, 4, 6)],
            (3, 3, 2, 3),
        ),
        4 * 4 * 6 * TAPS * MULTIPLY_ADD,
    ),
    "Einsum": (
        op("Einsum", [(2, 3, 4), (4, 5)], (2, 3, 5), equation=b"bij,jk->bik"),
        2 * 3 * 4 * 5 * MULTIPLY_ADD,
    ),
    "Einsum, equation as text": (
        op("Einsum", [(3, 4), (5, 4)], (3, 5), equation="ij,kj->ik"),
        3 * 4 * 5 * MULTIPLY_ADD,
    ),
    # Labels cannot be told apart: two FLOPs an element of the largest operand.
    "Einsum, ellipsis": (
        op("Einsum", [(2, 3, 4), (4, 5)], (2, 3, 5), equation=b"...j,jk->...k"),
        30 * 2,
    ),
    # Five transforms of eight points: 5 n log2 n each.
    "FFT": (op("FFT", [(5, 8)], (5, 8), item_bytes=8), 5 * (5 * 8 * 3)),
    "FFT2D": (op("FFT2D", [(5, 4, 8)], (5, 4, 8), item_bytes=8), 5 * (5 * 32 * 5)),
    "FFT3D": (
        op("IFFT3D", [(5, 2, 4, 8)], (5, 2, 4, 8), item_bytes=8),
        5 * (5 * 64 * 6),
    ),
    # Eight real points are five complex ones.
    "RFFT": (op("RFFT", [(5, 8), (1,)], (5, 5)), 5 * (5 * 8 * 3)),
    "IRFFT": (op("IRFFT", [(5, 5), (1,)], (5, 8)), 5 * (5 * 8 * 3)),
    # Five matrices of four rows.
    "Cholesky": (op("Cholesky", [(5, 4, 4)], (5, 4, 4)), 5 * 4**3),
    "MatrixSolve": (op("MatrixSolve", [(4, 4), (4, 2)], (4, 2)), 4**3),
    "Svd": (op("Svd", [(4, 4)], (4,), (4, 4), (4, 4)), 4**3),
    "Add": (op("AddV2", [(2, 3), (2, 3)], (2, 3)), 6),
    "Add, broadcast": (op("AddV2", [(2, 3), (3,)], (2, 3)), 6),
    "Sum reads more than it writes": (op("Sum", [(2, 3), (1,)], (2,)), 6),
    "Tanh": (op("Tanh", [(2, 3)], (2, 3)), 20 * 6),
    "TanhGrad": (op("TanhGrad", [(2, 3), (2, 3)], (2, 3)), 4 * 6),
    "unknown": (op("NobodyKnows", [(2, 3)], (5,), (2,)), 7),
    "nothing read": (op("Fill", [], (2, 3)), 6),
    "nothing written": (op("NoOp", []), 0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_flops_are_those_counted_by_hand(name: str):
    signature, expected = COUNTS[name]
    assert cost.flops(signature) == pytest.approx(expected)


def test_seconds_are_the_slower_of_arithmetic_and_traffic():
    # 1 MiB read, 1 MiB written, one FLOP an element: the memory is what takes time.
    add = op("Neg", [(1 << 18,)], (1 << 18,))
    assert cost.seconds(add) == (2 << 20) / cost.BANDWIDTH
    product = op("MatMul", [(1024, 1024)] * 2, (1024, 1024))
    assert cost.seconds(product) == 2 * 1024**3 / cost.FLOPS


@pytest.mark.parametrize(
    ("signature", "heavy"),
    [
        # 2 · 32 / 4 bytes = 16 FLOPs a byte: the scores of a small attention head.
        (op("BatchMatMulV2", [(8, 128, 32), (8, 32, 128)], (8, 128, 128)), False),
        # 2 · 1024 / 4 = 512 FLOPs a byte.
        (op("MatMul", [(64, 1024), (1024, 1024)], (64, 1024)), True),
        # Just at the line: 2 · 96 / 4 = 48.
        (op("MatMul", [(64, 96), (96, 64)], (64, 64)), True),
        (op("MatMul", [(64, 95), (95, 64)], (64, 64)), False),
        # In half precision the same product yields half the bytes.
        (op("MatMul", [(64, 48), (48, 64)], (64, 64), item_bytes=2), True),
        (op("Conv2D", [(2, 8, 8, 64), (3, 3, 64, 64)], (2, 8, 8, 64)), True),
        # A convolution of one tap on three channels: 1.5 FLOPs a byte.
        (op("Conv2D", [(2, 8, 8, 3), (1, 1, 3, 64)], (2, 8, 8, 64)), False),
        (op("Tanh", [(64, 1024)], (64, 1024)), False),
        (op("StatelessRandomUniformV2", [(2,), (2,), (1,), ()], (64, 64)), True),
        # A reduction to a scalar does many FLOPs a byte, and is no matrix product.
        (op("Sum", [(64, 1024)], ()), False),
        (op("MatMul", [(0, 4), (4, 0)], (0, 0)), False),
    ],
)
def test_heavy_is_many_flops_a_byte(signature: Signature, heavy: bool):
    assert cost.is_heavy(signature) is heavy
