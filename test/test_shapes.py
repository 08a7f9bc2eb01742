"""Shapes under an assumption are those that a run with that size has."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import fixed, session

import memory_saving_gradients as msg
from memory_saving_gradients.op_shapes import OpShapes
from memory_saving_gradients.shapes import infer
from memory_saving_gradients.tf_shapes import full_shapes

v1 = tf.compat.v1

BATCH = 6
"""What the unknown dimension is assumed to be, and what it is."""


def shapes_of(graph: tf.Graph, unknown_dim: int) -> dict[str, tuple[int, ...]]:
    """The assumed shape of each tensor by name."""
    ops = graph.get_operations()
    tensors = [tensor for op in ops for tensor in op.outputs]
    ids = {id(tensor): number for number, tensor in enumerate(tensors)}
    shapes, assumed = full_shapes(ops, ids, unknown_dim)
    assert assumed
    return {t.name: shape for t, shape in zip(tensors, shapes, strict=True)}


def by_elements(x: tf.Tensor) -> Any:
    y = tf.where(x > 0, tf.exp(x), x[:, :1])
    y = tf.nn.bias_add(tf.cast(tf.cast(y, tf.float64), tf.float32), tf.ones([8]))
    return tf.nn.softmax(tf.nn.relu(y) + tf.cumsum(x, 1)) * tf.ones([2, 1, 8])


def reshapes(x: tf.Tensor) -> Any:
    a = tf.reshape(tf.reshape(x, [-1, 4]), [-1, 2, 8])
    b = tf.reshape(x, [tf.shape(x)[0] * 2, -1])
    c = tf.reshape(tf.expand_dims(x, -1)[..., 0], tf.concat([tf.shape(x), [1]], 0))
    d = tf.squeeze(tf.reshape(x, [1, -1]), 0)
    return [a, b, c, d, tf.reshape(x, tf.reverse(tf.shape(x), [0])), tf.transpose(x)]


def products(x: tf.Tensor) -> Any:
    y = tf.reshape(x, [-1, 2, 8])
    return [
        tf.matmul(x, x, transpose_b=True),
        tf.matmul(x, x, transpose_a=True),
        tf.matmul(y, y, adjoint_b=True),
        tf.matmul(tf.ones([4, 1, 3, 2]), y),
        tf.einsum("bik,bjk->bij", y, y),
        tf.einsum("...k,kl->...l", y, tf.ones([8, 3])),
        tf.einsum("a...k,k...->a...", tf.stack([y, y]), tf.ones([8, 1])),
        tf.tensordot(y, tf.ones([8, 5]), [[2], [0]]),
    ]


def parts(x: tf.Tensor) -> Any:
    rows = tf.shape(x)[0]
    return [
        *tf.split(tf.concat([x, x], 0), 2),
        *tf.split(x, [3, -1], 1),
        *tf.unstack(tf.stack([x, x], 1), axis=1),
        x[1:-1, ::2, tf.newaxis],
        x[..., 3],
        x[rows // 2 :, 0],
        tf.slice(x, [1, 0], [-1, 4]),
        tf.slice(x, [0, 0], [rows - 2, 4]),
        tf.pad(x, [[1, 2], [0, 0]]),
        tf.tile(x, [2, 3]),
        tf.gather(x, tf.range(rows - 1)),
        tf.gather(
            tf.reshape(x, [-1, 2, 4]), tf.zeros([rows, 3], tf.int32), batch_dims=1
        ),
        tf.gather_nd(x, tf.zeros([rows, 5, 1], tf.int32)),
        tf.one_hot(tf.argmax(x, 1), 5),
        tf.math.top_k(x, 3).values,
        tf.math.unsorted_segment_sum(x, tf.range(rows), rows + 1),
        tf.scatter_nd(tf.zeros([rows, 1], tf.int32), x, [rows, 8]),
    ]


def reductions(x: tf.Tensor) -> Any:
    y = tf.reshape(x, [-1, 2, 4])
    return [
        tf.reduce_sum(y, 1),
        tf.reduce_mean(y, [0, -1], keepdims=True),
        tf.reduce_max(y),
        tf.reduce_any(y > 0, 2),
        tf.argmin(y, 1),
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(x, 1), x),
        tf.nn.softmax_cross_entropy_with_logits(x, x),
    ]


def draws(x: tf.Tensor) -> Any:
    return [
        tf.nn.dropout(x, 0.5),
        tf.random.stateless_normal(tf.shape(x[1:]), [1, 2]),
        tf.random.uniform([tf.shape(x)[0] * 3]),
        tf.fill(tf.shape(x), 1.0),
        tf.broadcast_to(x[:1], tf.shape(x)),
    ]


def images(x: tf.Tensor) -> Any:
    y = tf.reshape(tf.tile(x, [1, 24]), [-1, 8, 8, 3])
    filters = tf.ones([3, 3, 3, 2])
    y = (
        tf.nn.conv2d(y, filters, 2, "SAME")
        + tf.nn.max_pool2d(y, 2, 2, "VALID")[..., :2]
    )
    y, *_ = v1.nn.fused_batch_norm(y, tf.ones([2]), tf.zeros([2]))
    rows = tf.shape(y)[0]
    open_size = tf.image.resize(y, [rows, rows + 1], "nearest")
    return [
        tf.nn.conv2d(open_size, tf.ones([2, 2, 2, 4]), 2, "VALID"),
        tf.nn.avg_pool2d(open_size, 3, 2, "SAME"),
        tf.nn.depthwise_conv2d(open_size, tf.ones([2, 2, 2, 2]), [1] * 4, "SAME"),
        tf.nn.conv2d_transpose(y, tf.ones([3, 3, 5, 2]), [rows, 8, 8, 5], 2),
        tf.image.resize(y, [5, 5]),
    ]


@pytest.mark.parametrize(
    "model", [by_elements, reshapes, products, parts, reductions, draws, images]
)
def test_assumed_shapes_are_those_of_a_run(model: Any) -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 8])
        ys = [y for y in tf.nest.flatten(model(x)) if y.dtype.is_floating]
        tf.gradients(ys, x)
        assumed = shapes_of(graph, BATCH)
        names = [name for name in assumed if graph.get_tensor_by_name(name) is not x]
        with session(graph) as running:
            values = running.run(names, {x: fixed(BATCH, 8)})
    pairs = {
        name: (np.shape(value), assumed[name])
        for name, value in zip(names, values, strict=True)
        # TensorFlow itself is wrong about what batch norm leaves empty.
        if np.size(value) > 1
    }
    assert {n: pair for n, pair in pairs.items() if pair[0] != pair[1]} == {}


def test_where_no_rule_tells_more_each_unknown_dimension_is_the_assumption() -> None:
    unknown = OpShapes("NobodyKnows", [(3, 4)], [None], [(None, 4), None, (2,)], {}.get)
    assert infer(unknown, 7) == [(7, 4), (7, 7), (2,)]


def test_what_is_known_is_not_contradicted() -> None:
    """A rule may be told sizes that the graph could not run with."""
    wanted = np.array([-1, 5])
    op = OpShapes("Reshape", [(7, 4), (2,)], [None, wanted], [(None, 5)], {}.get)
    assert infer(op, 7) == [(5, 5)]
    op = OpShapes("AddV2", [(7, 4), (3, 4)], [None, None], [(None, 4)], {}.get)
    assert infer(op, 7) == [(7, 4)]
    op = OpShapes("MatMul", [(4,), (4, 4)], [None, None], [(None, 4)], {}.get)
    assert infer(op, 7) == [(7, 4)]


# -- a plan for any batch is that for the batch assumed --------------------------------


def transformer() -> Any:
    """Four pre-norm blocks that flatten batch and length for their products."""
    width, heads, length = 32, 4, 16
    count = 0

    def weights(*shape: int) -> tf.Variable:
        nonlocal count
        count += 1
        return tf.Variable(0.1 * fixed(*shape, seed=count))

    blocks = [
        [weights(width) for _ in range(2)]
        + [weights(width, width) for _ in range(4)]
        + [weights(width, 4 * width), weights(4 * width, width)]
        for _ in range(4)
    ]

    def flat(x: tf.Tensor, gain: Any) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return tf.reshape(
            (x - mean) * tf.math.rsqrt(variance + 1e-5) * gain, [-1, width]
        )

    def loss(x: tf.Tensor) -> tf.Tensor:
        for first, second, *attention, wide, narrow in blocks:
            y = flat(x, first)
            q, k, v = (
                tf.transpose(
                    tf.reshape(y @ w, [-1, length, heads, width // heads]), [0, 2, 1, 3]
                )
                for w in attention[:3]
            )
            scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 3.0)
            y = tf.reshape(tf.transpose(scores @ v, [0, 2, 1, 3]), [-1, width])
            y = tf.nn.dropout(y @ attention[3], 0.1)
            x += tf.reshape(y, [-1, length, width])
            y = tf.nn.gelu(flat(x, second) @ wide) @ narrow
            x += tf.reshape(y, [tf.shape(x)[0], length, width])
        return tf.reduce_mean(x**2)

    return loss, [w for block in blocks for w in block], [length, width]


def conv_net() -> Any:
    """Batch norm and dropout in every layer."""
    layers = keras.layers
    stack: list[Any] = []
    for number in range(6):
        stack += [layers.Conv2D(8, 3, padding="same"), layers.BatchNormalization()]
        stack += [layers.ReLU(), layers.Dropout(0.2)]
        stack += [layers.MaxPooling2D()] * (number == 3)
    stack += [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    model = keras.Sequential(stack)
    model.build([None, 16, 16, 3])

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(model(x, training=True) ** 2)

    return loss, model.trainable_variables, [16, 16, 3]


def mlp() -> Any:
    model = keras.Sequential([keras.layers.Dense(32, "gelu") for _ in range(8)])
    model.build([None, 32])

    def loss(x: tf.Tensor) -> tf.Tensor:
        labels = tf.zeros([tf.shape(x)[0]], tf.int32)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(x))
        )

    return loss, model.trainable_variables, [32]


def planned(model: Any, batch: int, known: bool, checkpoints: Any) -> msg.Plan:
    keras.utils.clear_session()
    loss, variables, shape = model()
    spec = tf.TensorSpec([batch if known else None, *shape])

    @tf.function(autograph=False, input_signature=[spec])
    def step(x: tf.Tensor) -> Any:
        return msg.gradients(
            loss(x), variables, checkpoints=checkpoints, unknown_dim=batch
        )

    step.get_concrete_function()
    return msg.last_plan()


def kept_bytes(plan: msg.Plan) -> list[int]:
    """The size of each tensor that is kept, in graph order."""
    return [plan.reading.graph.tensors[kept].bytes for kept in plan.schedule.kept]


@pytest.mark.parametrize("mode", ["memory", "speed"])
# At sizes where the planner's choice does not hang on the few bytes of a shape vector,
# which the graph for any batch computes and the other has as a constant.
@pytest.mark.parametrize(
    ("model", "batch"), [(transformer, 32), (conv_net, 16), (mlp, 128)]
)
def test_plan_for_any_batch_is_that_for_the_one_assumed(
    model: Any, batch: int, mode: str
) -> None:
    any_batch = planned(model, batch, False, mode)
    known = planned(model, batch, True, mode)
    assert any_batch.recomputed
    for peak in ("stock_peak_bytes", "predicted_peak_bytes"):
        assert getattr(any_batch, peak) == pytest.approx(getattr(known, peak), rel=0.01)
    graph = known.reading.graph
    if model is mlp and "Erf" in {op.type for op in graph.ops}:
        # Until TensorFlow 2.18, at least, gelu is made of erf and not of erfc, and has
        # tensors of one size of which it makes no difference which is kept.
        assert any_batch.extra_fraction == pytest.approx(known.extra_fraction, rel=1e-3)
        assert kept_bytes(any_batch) == kept_bytes(known)
    else:
        assert any_batch.kept == known.kept
