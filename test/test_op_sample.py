"""A fair sample of TensorFlow's op set goes through the rewriter once.

Every op stands between a tanh that is kept and a softsign whose gradient reads what the
op leads to, so that the op is recomputed. All stand in one graph, which is
differentiated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import assert_same_bits, fixed, run

import memory_saving_gradients as msg

raw = tf.raw_ops

Build = Callable[[tf.Tensor], Any]

ROWS, COLUMNS = 4, 8


def positive(x: tf.Tensor) -> tf.Tensor:
    return tf.abs(x) + 0.5


def image(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [1, 4, 4, 2])


def volume(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [1, 2, 4, 2, 2])


def square(x: tf.Tensor) -> tf.Tensor:
    """Two well-conditioned matrices of 4 by 4."""
    return tf.reshape(x, [2, 4, 4]) + 3.0 * tf.eye(4)


def definite(x: tf.Tensor) -> tf.Tensor:
    m = square(x)
    return tf.matmul(m, m, transpose_b=True) + tf.linalg.diag([1.0, 2.0, 3.0, 4.0])


def complexes(x: tf.Tensor) -> tf.Tensor:
    return tf.complex(x, 0.5 * x)


def sparse(x: tf.Tensor) -> dict[str, Any]:
    """The elements of x on the diagonal bands of a matrix."""
    places = np.argwhere(np.ones([ROWS, COLUMNS]))
    return {"places": places, "values": tf.reshape(x, [-1]), "shape": [ROWS, COLUMNS]}


ROTATED = np.roll(np.arange(ROWS), 1)
FILTER = fixed(2, 2, 2, 3)
FILTER_3D = fixed(2, 2, 2, 2, 3)
OTHER = fixed(ROWS, COLUMNS, seed=9)

UNARY = """Abs Acos Asin Asinh Atan Atanh Ceil Cos Cosh Elu Erf Erfc Erfinv Exp Expm1
Floor Log1p Neg Rint Round Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square Tan Tanh
Relu Relu6 LeakyRelu Selu LogSoftmax Softmax Identity StopGradient Snapshot ZerosLike
OnesLike BesselI0e BesselI1e""".split()

FEATURES = "Elu Softplus Softsign Relu Relu6 LeakyRelu Selu".split()
LOGITS = "LogSoftmax Softmax".split()
INPUT = "Identity StopGradient Snapshot".split()

OF_POSITIVE = """Digamma Inv Reciprocal Lgamma Log Rsqrt Sqrt BesselJ0 BesselJ1 BesselY0
BesselY1 BesselK0 BesselK1 BesselK0e BesselK1e BesselI0 BesselI1 Dawsn Expint FresnelCos
FresnelSin Spence""".split()

BINARY = """Add AddV2 Sub Mul Div RealDiv DivNoNan Maximum Minimum Pow SquaredDifference
FloorDiv FloorMod Mod TruncateDiv TruncateMod Atan2 Xdivy Xlogy Xlog1py MulNoNan
""".split()

REDUCTIONS = "Sum Mean Prod Max Min EuclideanNorm".split()

COMPARISONS = (
    "Less LessEqual Greater GreaterEqual Equal NotEqual ApproximateEqual".split()
)

FFTS = "FFT IFFT FFT2D IFFT2D".split()


def unary(name: str, prepare: Build) -> Build:
    argument = "x"
    if name in FEATURES:
        argument = "features"
    elif name in LOGITS:
        argument = "logits"
    elif name in INPUT:
        argument = "input"
    return lambda x: getattr(raw, name)(**{argument: prepare(x)})


def given(name: str, arguments: Callable[[tf.Tensor], dict[str, Any]]) -> Build:
    return lambda x: getattr(raw, name)(**arguments(x))


def plain(x: tf.Tensor) -> tf.Tensor:
    return x


def by_names() -> dict[str, Build]:
    found: dict[str, Build] = {}
    for name in UNARY:
        if hasattr(raw, name):
            domain = positive if name in ("Sqrt", "Log1p") else plain
            found[name] = unary(name, domain)
    for name in OF_POSITIVE:
        if hasattr(raw, name):
            found[name] = unary(name, positive)
    for name in BINARY:
        found[name] = given(
            name, lambda x: {"x": positive(x), "y": positive(tf.constant(OTHER) + x)}
        )
    for name in REDUCTIONS:
        found[name] = given(
            name, lambda x: {"input": positive(x), "axis": [1], "keep_dims": True}
        )
    for name in COMPARISONS:
        found[name] = given(name, lambda x: {"x": x, "y": OTHER})
    for name in FFTS:
        found[name] = given(name, lambda x: {"input": complexes(x)})
    return found


ELEMENTWISE: dict[str, Build] = {
    "Acosh": lambda x: raw.Acosh(x=positive(x) + 1.0),
    "AddN": lambda x: raw.AddN(inputs=[x, 2 * x, x * x]),
    "Betainc": lambda x: raw.Betainc(
        a=tf.ones_like(x), b=2 * tf.ones_like(x), x=tf.sigmoid(x)
    ),
    "Cast": lambda x: raw.Cast(x=x, DstT=tf.float64),
    "CastToHalf": lambda x: raw.Cast(x=x, DstT=tf.float16),
    "CastToInt": lambda x: raw.Cast(x=4 * x, DstT=tf.int32),
    "ClipByValue": lambda x: raw.ClipByValue(
        t=x, clip_value_min=-0.5, clip_value_max=0.5
    ),
    "Igamma": lambda x: raw.Igamma(a=positive(x), x=positive(2 * x)),
    "Igammac": lambda x: raw.Igammac(a=positive(x), x=positive(2 * x)),
    "Ndtri": lambda x: raw.Ndtri(x=tf.sigmoid(x)),
    "NextAfter": lambda x: raw.NextAfter(x1=x, x2=OTHER),
    "Polygamma": lambda x: raw.Polygamma(a=tf.ones_like(x), x=positive(x)),
    "RandomGammaGrad": lambda x: raw.RandomGammaGrad(
        alpha=positive(x), sample=positive(OTHER)
    ),
    "Select": lambda x: raw.Select(condition=x > 0, x=x, y=x * x),
    "SelectV2": lambda x: raw.SelectV2(condition=x > 0, t=x, e=x * x),
    "Zeta": lambda x: raw.Zeta(x=positive(x) + 1.0, q=positive(2 * x)),
    "Cumsum": lambda x: raw.Cumsum(x=x, axis=1, reverse=True),
    "Cumprod": lambda x: raw.Cumprod(x=positive(x), axis=1, exclusive=True),
    "CumulativeLogsumexp": lambda x: raw.CumulativeLogsumexp(x=x, axis=1),
    "L2Loss": lambda x: raw.L2Loss(t=x),
    "ArgMax": lambda x: raw.ArgMax(input=x, dimension=1),
    "ArgMin": lambda x: raw.ArgMin(input=x, dimension=0),
    "All": lambda x: raw.All(input=x > -0.5, axis=[1]),
    "Any": lambda x: raw.Any(input=x > 0.5, axis=[1]),
    "LogicalAnd": lambda x: raw.LogicalAnd(x=x > 0, y=x < 0.5),
    "LogicalNot": lambda x: raw.LogicalNot(x=x > 0),
    "IsFinite": lambda x: raw.IsFinite(x=x),
    "BitwiseAnd": lambda x: raw.BitwiseAnd(x=tf.cast(x * 9, tf.int32), y=5),
    "RightShift": lambda x: raw.RightShift(x=tf.cast(x * 99, tf.int32), y=1),
    "Complex": lambda x: raw.Complex(real=x, imag=2 * x),
    "ComplexAbs": lambda x: raw.ComplexAbs(x=complexes(x)),
    "Real": lambda x: raw.Real(input=complexes(x)),
    "Imag": lambda x: raw.Imag(input=complexes(x)),
    "Conj": lambda x: raw.Conj(input=complexes(x)),
    "Angle": lambda x: raw.Angle(input=complexes(positive(x))),
    "RFFT": lambda x: raw.RFFT(input=x, fft_length=[8]),
    "IRFFT": lambda x: raw.IRFFT(input=complexes(x), fft_length=[14]),
    "RFFT2D": lambda x: raw.RFFT2D(input=x, fft_length=[4, 8]),
    "IRFFT2D": lambda x: raw.IRFFT2D(input=complexes(x), fft_length=[4, 14]),
    "QuantizeAndDequantizeV2": lambda x: raw.QuantizeAndDequantizeV2(
        input=x, input_min=-1.0, input_max=1.0, range_given=True
    ),
    "QuantizeAndDequantizeV4": lambda x: raw.QuantizeAndDequantizeV4(
        input=x, input_min=-0.5, input_max=0.5, range_given=True
    ),
    "FakeQuantWithMinMaxArgs": lambda x: raw.FakeQuantWithMinMaxArgs(
        inputs=x, min=-1.0, max=1.0
    ),
    "FakeQuantWithMinMaxVars": lambda x: raw.FakeQuantWithMinMaxVars(
        inputs=x, min=tf.reduce_min(x), max=tf.reduce_max(x)
    ),
}

SHAPES: dict[str, Build] = {
    "BatchToSpaceND": lambda x: raw.BatchToSpaceND(
        input=tf.reshape(x, [4, 2, 4]), block_shape=[2], crops=[[0, 1]]
    ),
    "BroadcastTo": lambda x: raw.BroadcastTo(input=x, shape=[3, ROWS, COLUMNS]),
    "ConcatV2": lambda x: raw.ConcatV2(values=[x, x * x], axis=1),
    "DepthToSpace": lambda x: raw.DepthToSpace(
        input=tf.reshape(x, [1, 2, 4, 4]), block_size=2
    ),
    "Diag": lambda x: raw.Diag(diagonal=x[0]),
    "DiagPart": lambda x: raw.DiagPart(input=x[:, :4]),
    "DynamicPartition": lambda x: raw.DynamicPartition(
        data=x, partitions=tf.cast(x[:, 0] > 0, tf.int32), num_partitions=2
    ),
    "DynamicStitch": lambda x: raw.DynamicStitch(
        indices=[[0, 2], [3, 1]], data=[x[:2], x[2:]]
    ),
    "EnsureShape": lambda x: raw.EnsureShape(input=x, shape=[ROWS, COLUMNS]),
    "ExpandDims": lambda x: raw.ExpandDims(input=x, axis=1),
    "ExtractImagePatches": lambda x: raw.ExtractImagePatches(
        images=image(x),
        ksizes=[1, 2, 2, 1],
        strides=[1, 1, 1, 1],
        rates=[1, 1, 1, 1],
        padding="VALID",
    ),
    "Fill": lambda x: raw.Fill(dims=[3, 2], value=x[0, 0]),
    "Gather": lambda x: raw.Gather(params=x, indices=ROTATED),
    "GatherV2": lambda x: raw.GatherV2(params=x, indices=[1, 1, 5], axis=1),
    "GatherNd": lambda x: raw.GatherNd(params=x, indices=[[0, 1], [3, 7], [0, 1]]),
    "IdentityN": lambda x: raw.IdentityN(input=[x, x * x]),
    "InvertPermutation": lambda x: raw.InvertPermutation(x=tf.argsort(x[0])),
    "MatrixBandPart": lambda x: raw.MatrixBandPart(input=x, num_lower=1, num_upper=2),
    "MatrixDiag": lambda x: raw.MatrixDiag(diagonal=x),
    "MatrixDiagPart": lambda x: raw.MatrixDiagPart(input=square(x)),
    "MatrixDiagPartV3": lambda x: raw.MatrixDiagPartV3(
        input=square(x), k=1, padding_value=0.0
    ),
    "MatrixDiagV3": lambda x: raw.MatrixDiagV3(
        diagonal=x, k=0, num_rows=-1, num_cols=-1, padding_value=0.0
    ),
    "MatrixSetDiag": lambda x: raw.MatrixSetDiag(input=x, diagonal=x[0, :4] * 2),
    "MirrorPad": lambda x: raw.MirrorPad(
        input=x, paddings=[[1, 1], [2, 0]], mode="REFLECT"
    ),
    "OneHot": lambda x: raw.OneHot(
        indices=tf.argmax(x, 1), depth=8, on_value=x[0, 0], off_value=0.0
    ),
    "Pack": lambda x: raw.Pack(values=[x, x * x], axis=1),
    "Pad": lambda x: raw.Pad(input=x, paddings=[[0, 1], [2, 0]]),
    "PadV2": lambda x: raw.PadV2(
        input=x, paddings=[[0, 1], [2, 0]], constant_values=x[0, 0]
    ),
    "ParallelConcat": lambda x: raw.ParallelDynamicStitch(
        indices=[[0, 2], [3, 1]], data=[x[:2], x[2:]]
    ),
    "Reshape": lambda x: tf.sin(raw.Reshape(tensor=tf.sin(x), shape=[2, -1])),
    "Reverse": lambda x: raw.Reverse(tensor=x, dims=[True, False]),
    "ReverseV2": lambda x: raw.ReverseV2(tensor=x, axis=[1]),
    "ReverseSequence": lambda x: raw.ReverseSequence(
        input=x, seq_lengths=[1, 8, 3, 2], seq_dim=1, batch_dim=0
    ),
    "Roll": lambda x: raw.Roll(input=x, shift=3, axis=1),
    "ScatterNd": lambda x: raw.ScatterNd(
        indices=[[1], [4], [1], [0]], updates=x, shape=[6, COLUMNS]
    ),
    "Slice": lambda x: raw.Slice(input=x, begin=[1, 2], size=[2, -1]),
    "SpaceToBatchND": lambda x: raw.SpaceToBatchND(
        input=x, block_shape=[2], paddings=[[0, 0]]
    ),
    "SpaceToDepth": lambda x: raw.SpaceToDepth(input=image(x), block_size=2),
    "Split": lambda x: raw.Split(axis=1, value=x, num_split=4)[:3],
    "SplitV": lambda x: raw.SplitV(value=x, size_splits=[1, 5, 2], axis=1, num_split=3)[
        1
    ],
    "Squeeze": lambda x: raw.Squeeze(input=tf.sin(x)[None]),
    "StridedSlice": lambda x: tf.sin(x)[::-2, 1:7:3],
    "TensorScatterAdd": lambda x: raw.TensorScatterAdd(
        tensor=x, indices=[[0], [2], [0]], updates=x[:3]
    ),
    "TensorScatterSub": lambda x: raw.TensorScatterSub(
        tensor=x, indices=[[0], [2]], updates=x[:2]
    ),
    "TensorScatterUpdate": lambda x: raw.TensorScatterUpdate(
        tensor=x, indices=[[0], [2]], updates=x[2:]
    ),
    "TensorScatterMax": lambda x: raw.TensorScatterMax(
        tensor=x, indices=[[0], [2]], updates=x[2:]
    ),
    "TensorStridedSliceUpdate": lambda x: raw.TensorStridedSliceUpdate(
        input=x, begin=[1], end=[3], strides=[1], value=x[:2]
    ),
    "Tile": lambda x: raw.Tile(input=x, multiples=[2, 1]),
    "TopKV2": lambda x: raw.TopKV2(input=x, k=3)[0],
    "Transpose": lambda x: raw.Transpose(x=x, perm=[1, 0]),
    "Unique": lambda x: raw.Unique(x=tf.cast(4 * x[0], tf.int32))[1],
    "Unpack": lambda x: raw.Unpack(value=x, num=4)[1:],
    "Where": lambda x: raw.Where(condition=x > 0),
    "Bucketize": lambda x: raw.Bucketize(input=x, boundaries=[-0.5, 0.0, 0.5]),
    "LowerBound": lambda x: raw.LowerBound(
        sorted_inputs=tf.sort(x), values=tf.constant(OTHER)
    ),
}

SEGMENTS: dict[str, Build] = {
    **{
        name: given(name, lambda x: {"data": x, "segment_ids": [0, 0, 1, 3]})
        for name in "SegmentSum SegmentMean SegmentMax SegmentMin".split()
    },
    **{
        f"UnsortedSegment{name}": given(
            f"UnsortedSegment{name}",
            lambda x: {
                "data": positive(x),
                "segment_ids": [2, 0, 2, 1],
                "num_segments": 3,
            },
        )
        for name in "Sum Max Min Prod".split()
    },
    **{
        name: given(
            name, lambda x: {"data": x, "indices": [0, 3, 1], "segment_ids": [0, 0, 2]}
        )
        for name in "SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN".split()
    },
}

WINDOW = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
WINDOW_3D = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 1, 1, 1, 1], "padding": "VALID"}
UNIT = {"strides": [1, 1, 1, 1], "padding": "SAME"}

NETWORKS: dict[str, Build] = {
    "AvgPool": lambda x: raw.AvgPool(value=image(x), **WINDOW),
    "AvgPool3D": lambda x: raw.AvgPool3D(input=volume(x), **WINDOW_3D),
    "BiasAdd": lambda x: raw.BiasAdd(value=image(x), bias=x[0, :2]),
    "CTCLoss": lambda x: raw.CTCLoss(
        inputs=tf.reshape(x, [4, 2, 4]),
        labels_indices=tf.constant([[0, 0], [0, 1], [1, 0]], tf.int64),
        labels_values=[0, 1, 2],
        sequence_length=[4, 4],
    )[0],
    "Conv2D": lambda x: raw.Conv2D(input=image(x), filter=FILTER, **UNIT),
    "Conv2DBackpropInput": lambda x: raw.Conv2DBackpropInput(
        input_sizes=[1, 4, 4, 2],
        filter=FILTER,
        out_backprop=tf.tile(image(x)[..., :1], [1, 1, 1, 3]),
        **UNIT,
    ),
    "Conv2DBackpropFilter": lambda x: raw.Conv2DBackpropFilter(
        input=image(x),
        filter_sizes=[2, 2, 2, 3],
        out_backprop=tf.tile(image(x)[..., :1], [1, 1, 1, 3]),
        **UNIT,
    ),
    "Conv3D": lambda x: raw.Conv3D(
        input=volume(x), filter=FILTER_3D, strides=[1] * 5, padding="SAME"
    ),
    "DepthwiseConv2dNative": lambda x: raw.DepthwiseConv2dNative(
        input=image(x), filter=FILTER, **UNIT
    ),
    "Dilation2D": lambda x: raw.Dilation2D(
        input=image(x), filter=FILTER[..., 0], rates=[1, 1, 1, 1], **UNIT
    ),
    "FusedBatchNorm": lambda x: raw.FusedBatchNorm(
        x=image(x), scale=x[0, :2], offset=x[1, :2], mean=[0.0] * 2, variance=[1.0] * 2
    )[0],
    "FusedBatchNormV3": lambda x: raw.FusedBatchNormV3(
        x=image(x), scale=x[0, :2], offset=x[1, :2], mean=[0.0] * 2, variance=[1.0] * 2
    )[0],
    "FusedBatchNormV3Inference": lambda x: raw.FusedBatchNormV3(
        x=image(x),
        scale=x[0, :2],
        offset=x[1, :2],
        mean=x[2, :2],
        variance=positive(x[3, :2]),
        is_training=False,
    )[0],
    "InTopKV2": lambda x: raw.InTopKV2(predictions=x, targets=[1, 2, 3, 4], k=3),
    "LRN": lambda x: raw.LRN(input=image(x), depth_radius=1),
    "MaxPool": lambda x: raw.MaxPool(input=image(x), **WINDOW),
    "MaxPoolV2": lambda x: raw.MaxPoolV2(input=image(x), **WINDOW),
    "MaxPool3D": lambda x: raw.MaxPool3D(input=volume(x), **WINDOW_3D),
    "MaxPoolWithArgmax": lambda x: raw.MaxPoolWithArgmax(input=image(x), **WINDOW)[0],
    "SoftmaxCrossEntropyWithLogits": lambda x: raw.SoftmaxCrossEntropyWithLogits(
        features=x, labels=tf.nn.softmax(2 * x)
    )[0],
    "SparseSoftmaxCrossEntropyWithLogits": lambda x: (
        raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=[1, 2, 3, 4])[0]
    ),
}

LINEAR: dict[str, Build] = {
    "BatchMatMul": lambda x: raw.BatchMatMul(x=square(x), y=square(2 * x), adj_x=True),
    "BatchMatMulV2": lambda x: raw.BatchMatMulV2(x=square(x), y=square(2 * x)),
    "BandedTriangularSolve": lambda x: raw.BandedTriangularSolve(
        matrix=tf.stack([positive(x[0]), x[1]]), rhs=tf.transpose(x)
    ),
    "Cholesky": lambda x: raw.Cholesky(input=definite(x)),
    "Cross": lambda x: raw.Cross(a=x[:, :3], b=x[:, 3:6]),
    "Eig": lambda x: tf.abs(raw.Eig(input=definite(x), Tout=tf.complex64)[0]),
    "Einsum": lambda x: raw.Einsum(inputs=[x, square(x)], equation="ab,cad->cbd"),
    "LogMatrixDeterminant": lambda x: raw.LogMatrixDeterminant(input=square(x))[1],
    "MatMul": lambda x: raw.MatMul(a=x, b=OTHER, transpose_b=True),
    "MatrixDeterminant": lambda x: raw.MatrixDeterminant(input=square(x)),
    "MatrixInverse": lambda x: raw.MatrixInverse(input=square(x), adjoint=True),
    "MatrixSolve": lambda x: raw.MatrixSolve(matrix=square(x), rhs=square(2 * x)),
    "MatrixSolveLs": lambda x: raw.MatrixSolveLs(
        matrix=square(x), rhs=square(2 * x), l2_regularizer=tf.constant(0.1, tf.float64)
    ),
    "MatrixSquareRoot": lambda x: tf.stop_gradient(
        raw.MatrixSquareRoot(input=definite(x))
    ),
    "MatrixTriangularSolve": lambda x: raw.MatrixTriangularSolve(
        matrix=square(x), rhs=square(2 * x)
    ),
    "Qr": lambda x: raw.Qr(input=square(x)),
    "SelfAdjointEigV2": lambda x: raw.SelfAdjointEigV2(input=definite(x))[0],
    "Svd": lambda x: raw.Svd(input=square(x))[0],
    "TridiagonalSolve": lambda x: raw.TridiagonalSolve(
        diagonals=tf.stack([x[0], x[1] + 3.0, x[2]]), rhs=tf.transpose(x)
    ),
    "TridiagonalMatMul": lambda x: raw.TridiagonalMatMul(
        superdiag=x[None, 0],
        maindiag=x[None, 1],
        subdiag=x[None, 2],
        rhs=tf.transpose(x),
    ),
}

IMAGES: dict[str, Build] = {
    "AdjustContrastv2": lambda x: tf.stop_gradient(
        raw.AdjustContrastv2(
            images=tf.tile(image(x)[..., :1], [1, 1, 1, 3]), contrast_factor=0.7
        )
    ),
    "CropAndResize": lambda x: raw.CropAndResize(
        image=image(x), boxes=[[0.1, 0.1, 0.8, 0.9]], box_ind=[0], crop_size=[3, 3]
    ),
    "ImageProjectiveTransformV3": lambda x: raw.ImageProjectiveTransformV3(
        images=image(x),
        transforms=[[1.0, 0.2, 0.0, 0.1, 1.0, 0.3, 0.0, 0.0]],
        output_shape=[4, 4],
        fill_value=0.0,
        interpolation="BILINEAR",
    ),
    "RGBToHSV": lambda x: raw.RGBToHSV(images=tf.sigmoid(x[:, :3])),
    "ResizeBicubic": lambda x: raw.ResizeBicubic(images=image(x), size=[7, 5]),
    "ResizeBilinear": lambda x: raw.ResizeBilinear(images=image(x), size=[7, 5]),
    "ResizeNearestNeighbor": lambda x: raw.ResizeNearestNeighbor(
        images=image(x), size=[7, 5]
    ),
    "ScaleAndTranslate": lambda x: raw.ScaleAndTranslate(
        images=image(x), size=[6, 6], scale=[1.5, 1.5], translation=[0.0, 0.0]
    ),
}

SPARSE: dict[str, Build] = {
    "SparseTensorDenseMatMul": lambda x: raw.SparseTensorDenseMatMul(
        a_indices=sparse(x)["places"],
        a_values=sparse(x)["values"],
        a_shape=sparse(x)["shape"],
        b=tf.transpose(x),
    ),
    "SparseReduceSum": lambda x: raw.SparseReduceSum(
        input_indices=sparse(x)["places"],
        input_values=sparse(x)["values"],
        input_shape=sparse(x)["shape"],
        reduction_axes=[1],
    ),
    "SparseSoftmax": lambda x: raw.SparseSoftmax(
        sp_indices=sparse(x)["places"],
        sp_values=sparse(x)["values"],
        sp_shape=sparse(x)["shape"],
    ),
    "SparseAdd": lambda x: raw.SparseAdd(
        a_indices=sparse(x)["places"],
        a_values=sparse(x)["values"],
        a_shape=sparse(x)["shape"],
        b_indices=sparse(x)["places"][::3],
        b_values=sparse(x)["values"][::3],
        b_shape=sparse(x)["shape"],
        thresh=0.0,
    )[1],
    "SparseDenseCwiseMul": lambda x: raw.SparseDenseCwiseMul(
        sp_indices=sparse(x)["places"],
        sp_values=sparse(x)["values"],
        sp_shape=sparse(x)["shape"],
        dense=OTHER,
    ),
    "SparseToDense": lambda x: raw.SparseToDense(
        sparse_indices=sparse(x)["places"],
        output_shape=sparse(x)["shape"],
        sparse_values=sparse(x)["values"],
        default_value=0.0,
    ),
    "SparseReorder": lambda x: raw.SparseReorder(
        input_indices=sparse(x)["places"][::-1],
        input_values=sparse(x)["values"],
        input_shape=sparse(x)["shape"],
    )[1],
    "RaggedTensorToTensor": lambda x: tf.RaggedTensor.from_row_lengths(
        tf.sin(x), [1, 0, 3]
    ).to_tensor(),
    "RaggedGather": lambda x: (
        tf.gather(tf.RaggedTensor.from_row_lengths(tf.sin(x), [1, 0, 3]), [2, 0]).values
    ),
}

STRINGS: dict[str, Build] = {
    "AsString": lambda x: raw.StringToNumber(
        string_tensor=raw.AsString(input=tf.round(8 * x))
    ),
    "StringLength": lambda x: raw.StringLength(input=raw.AsString(input=x)),
    "StringToHashBucketFast": lambda x: raw.StringToHashBucketFast(
        input=raw.AsString(input=tf.round(8 * x)), num_buckets=7
    ),
    "EncodeBase64": lambda x: raw.StringLength(
        input=raw.EncodeBase64(input=raw.AsString(input=x))
    ),
    "StatelessRandomUniformV2": lambda x: (
        x
        * raw.StatelessRandomUniformV2(
            shape=[ROWS, COLUMNS], key=[7], counter=[1, 2], alg=1
        )
    ),
}

SAMPLE: dict[str, Build] = {
    **by_names(),
    **ELEMENTWISE,
    **SHAPES,
    **SEGMENTS,
    **NETWORKS,
    **LINEAR,
    **IMAGES,
    **SPARSE,
    **STRINGS,
}


# They share the buffer of what they read and count as one with it.
ALIASES = frozenset(
    """EnsureShape ExpandDims Identity IdentityN Reshape Snapshot Squeeze
    StopGradient""".split()
)

WITHOUT_GRADIENT = frozenset("Mod RandomGammaGrad Snapshot TruncateMod".split())


def summed(output: Any) -> tf.Tensor:
    """All of an op's outputs in one number that each element enters differently."""
    total = tf.zeros([])
    for tensor in tf.nest.flatten(
        list(output) if isinstance(output, tuple) else output
    ):
        if tensor.dtype.is_complex:
            tensor = tf.math.real(tensor) + 0.5 * tf.math.imag(tensor)
        flat = tf.reshape(tf.cast(tensor, tf.float32), [-1])
        count = tf.cast(tf.size(flat), tf.float32)
        weights = 0.5 + tf.range(count) / tf.maximum(count, 1.0)
        total += tf.math.divide_no_nan(tf.reduce_sum(flat * weights), count)
    return total


@dataclass(frozen=True)
class Sandwich:
    """What became of one op.

    Attributes:
        types: The types of the ops between tanh and softsign.
        recomputed: The types of those that are recomputed.
        stock: The gradient.
        new: The gradient by the library.
    """

    types: set[str]
    recomputed: set[str]
    stock: np.ndarray
    new: np.ndarray


@pytest.fixture(scope="module")
def sandwiches() -> Iterator[dict[str, Sandwich]]:
    with tf.Graph().as_default() as graph:
        xs, kept, between, losses = [], [], [], []
        for number, (name, build) in enumerate(SAMPLE.items()):
            x = tf.constant(fixed(ROWS, COLUMNS, seed=number))
            first = tf.tanh(x)
            start = len(graph.get_operations())
            with tf.name_scope(name):
                middle = summed(build(first))
                if name in WITHOUT_GRADIENT:
                    middle = tf.stop_gradient(middle)
            between.append(graph.get_operations()[start:])
            losses.append(tf.reduce_sum(tf.nn.softsign(first + middle)))
            xs.append(x)
            kept.append(first)
        loss = tf.add_n(losses)
        stock = tf.gradients(loss, xs)
        new = msg.gradients(loss, xs, checkpoints=kept)
        names = set(msg.last_plan().recomputed)
        found = run([stock, new])
    yield {
        name: Sandwich(
            {op.type for op in ops},
            {op.type for op in ops if op.name in names},
            *gradients,
        )
        for name, ops, *gradients in zip(SAMPLE, between, *found, strict=True)
    }


@pytest.mark.parametrize("name", SAMPLE)
def test_a_recomputed_op_gives_stocks_gradient(
    name: str, sandwiches: dict[str, Sandwich]
) -> None:
    sandwich = sandwiches[name]
    assert_same_bits([sandwich.stock], [sandwich.new])
    assert np.abs(sandwich.new).max() > 0
    if name in sandwich.types:
        assert name in sandwich.recomputed | ALIASES


def test_the_sample_is_fair(sandwiches: dict[str, Sandwich]) -> None:
    recomputed = set().union(*(s.recomputed for s in sandwiches.values()))
    assert len(SAMPLE) >= 200
    assert len(recomputed) >= 180
