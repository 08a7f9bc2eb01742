"""Several calls in one graph: right gradients, and plans that know only their own."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tf_helpers import assert_same_bits, fixed, run

import memory_saving_gradients as msg

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


def losses() -> tuple[tf.Tensor, tf.Tensor, Any]:
    """Two losses that share all layers."""
    w = v1.get_variable("w", initializer=fixed(8, 8), use_resource=True)
    y = tf.constant(fixed(8, 8))
    for _ in range(12):
        y = tf.tanh(tf.sin(y @ w) * y)
    return tf.reduce_sum(y), tf.reduce_mean(tf.exp(y)), w


@pytest.mark.parametrize("mode", ["memory", "speed"])
def test_calls_that_share_the_forward_pass(mode: str) -> None:
    with tf.Graph().as_default():
        a, b, w = losses()
        stock = [*tf.gradients(a, w), *tf.gradients(b, w)]
        plans, new = [], []
        for loss in (a, b):
            new += msg.gradients(loss, w, checkpoints=mode)
            plans.append(msg.last_plan())
            assert plans[-1].recomputed
        assert_same_bits(*run([stock, new]))
    with tf.Graph().as_default():
        _, b, w = losses()
        msg.gradients(b, w, checkpoints=mode)
        alone = msg.last_plan()
    # The second is planned as if there were no first: the README says so.
    for what in ("kept", "recomputed", "stock_peak_bytes", "predicted_peak_bytes"):
        assert getattr(plans[1], what) == getattr(alone, what)


def test_each_backward_op_is_rewired_by_the_call_that_made_it() -> None:
    with tf.Graph().as_default() as graph:
        a, b, w = losses()
        msg.gradients(a, w, checkpoints="memory")
        made = graph.get_operations()
        before = {op.name: [tensor.name for tensor in op.inputs] for op in made}
        msg.gradients(b, w, checkpoints="memory")
        after = {op.name: [tensor.name for tensor in op.inputs] for op in made}
        assert after == before


def test_one_call_for_both_losses_is_their_sum() -> None:
    with tf.Graph().as_default():
        a, b, w = losses()
        stock = tf.gradients([a, b], w)
        new = msg.gradients([a, b], w, checkpoints="memory")
        assert msg.last_plan().recomputed
        assert_same_bits(*run([stock, new]))
