"""Sizes that are not known when the graph is made."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tf_helpers import assert_same_bits, fixed, session

import memory_saving_gradients as msg

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

W = fixed(8, 8)


def model(x: tf.Tensor, w: Any) -> tf.Tensor:
    y = x
    for _ in range(4):
        y = tf.tanh(tf.nn.softplus(y @ w) - 0.3 * y)
        size = tf.shape(y)
        y = tf.reshape(y, [-1, 4]) * tf.cast(size[0], tf.float32)
        y = tf.tanh(tf.reshape(y, size) + tf.reduce_mean(y))
        y = tf.concat([y, y * y], 0)[: size[0]]
    return tf.reduce_sum(y * y)


@pytest.mark.parametrize("checkpoints", ["memory", "speed"])
@pytest.mark.parametrize("shape", [[None, 8], [None, None], None])
def test_right_for_every_size_in_a_session(shape: Any, checkpoints: str) -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, shape)
        w = tf.constant(W)
        loss = model(x, w)
        stock = tf.gradients(loss, [x, w])
        new = msg.gradients(loss, [x, w], checkpoints=checkpoints)
        assert msg.last_plan().recomputed
        with session(graph) as running:
            for batch in (1, 3, 64, 257):
                assert_same_bits(*running.run([stock, new], {x: fixed(batch, 8)}))


def test_right_for_every_size_in_one_trace_of_a_function() -> None:
    w = tf.Variable(W)
    traces = []

    @tf.function(
        autograph=False, input_signature=[tf.TensorSpec([None, 8], tf.float32)]
    )
    def step(x: tf.Tensor) -> Any:
        traces.append(x)
        loss = model(x, w)
        stock = tf.gradients(loss, [x, w])
        return stock, msg.gradients(loss, [x, w], checkpoints="memory")

    for batch in (1, 5, 100):
        assert_same_bits(*step(tf.constant(fixed(batch, 8))))
    assert len(traces) == 1


def planned(**keywords: Any) -> msg.Plan:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 8])
        y = x
        for _ in range(12):
            y = tf.tanh(tf.exp(tf.sin(y)))
        msg.gradients(y, x, checkpoints="memory", **keywords)
        return msg.last_plan()


def test_the_assumption_is_stated_and_can_be_set() -> None:
    assert "taken to be 64" in planned().summary()
    text = planned(unknown_dim=1000).summary()
    assert "taken to be 1000" in text
    assert "unknown_dim=" in text


def test_sizes_are_in_proportion_to_the_assumption() -> None:
    small, large = planned(unknown_dim=10), planned(unknown_dim=1000)
    assert small.stock_peak_bytes > 0
    # But for a shape vector, which is of one size whatever the shape.
    for peak in ("stock_peak_bytes", "predicted_peak_bytes"):
        expected = 100 * getattr(small, peak)
        assert getattr(large, peak) == pytest.approx(expected, abs=1000)
    assert large.recomputed == small.recomputed


def test_with_all_sizes_known_nothing_is_assumed() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(4, 8))
        msg.gradients(tf.tanh(tf.exp(tf.sin(x))), x, checkpoints="memory")
        assert "taken to be" not in msg.last_plan().summary()


def planned_layers(
    checkpoints: Any, rows: int | None = None, **keywords: Any
) -> msg.Plan:
    """The plan of eight layers, of which weights make the larger gradients."""
    with tf.Graph().as_default():
        y = v1.placeholder(tf.float32, [rows, 64])
        weights = [tf.constant(fixed(64, 64, seed=n)) for n in range(8)]
        for w in weights:
            y = tf.nn.gelu(y @ w)
        loss = tf.reduce_sum(y)
        msg.gradients(loss, weights, checkpoints=checkpoints, **keywords)
        return msg.last_plan()


@pytest.mark.parametrize("checkpoints", ["memory", "speed"])
def test_small_batches_are_not_assumed_where_gradients_dominate(
    checkpoints: str,
) -> None:
    open_plan, known = planned_layers(checkpoints), planned_layers(checkpoints, 1024)
    assert open_plan.predicted_peak_bytes == known.predicted_peak_bytes
    assert "taken to be 1024" in open_plan.summary()
    # What is said counts.
    assert planned_layers(checkpoints, unknown_dim=64).reading.unknown_dim == 64


def test_a_share_of_stocks_peak_is_planned_for_the_same_batches() -> None:
    """A number of bytes is not: it is what it is for the batch that is assumed."""

    plan = planned_layers("35%")
    assert (
        plan.reading.unknown_dim == planned_layers("memory").reading.unknown_dim == 1024
    )
    assert plan.predicted_peak_bytes <= 0.35 * plan.stock_peak_bytes
    plan = planned_layers("400KiB")
    assert plan.reading.unknown_dim == 64
    assert plan.predicted_peak_bytes <= 400 * 2**10


def test_a_saved_plan_brings_its_assumption_along() -> None:
    plan = planned_layers("memory")
    again = planned_layers(msg.Plan.from_json(plan.to_json()))
    assert again.predicted_peak_bytes == plan.predicted_peak_bytes
