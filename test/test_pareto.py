"""The front of peak against extra time, and that looking at it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import dense_layers, weights_of

import memory_saving_gradients as msg

v1 = tf.compat.v1
WIDTH, LAYERS = 32, 12
X = np.ones([256, WIDTH], np.float32)


def seen(loss: Callable[[tf.Tensor], tf.Tensor], xs: Any, jit: bool = False) -> Any:
    """The front of a loss, which has left the graph as it was."""
    found = []

    @tf.function(jit_compile=jit, autograph=False)
    def look(x: tf.Tensor) -> tf.Tensor:
        y = loss(x)
        graph = v1.get_default_graph()
        before = definition(graph), len(graph.captures)
        found.append(msg.pareto(y, xs))
        assert (definition(graph), len(graph.captures)) == before
        return y

    look.get_concrete_function(tf.TensorSpec(X.shape))
    return found[0]


def definition(graph: tf.Graph) -> bytes:
    return graph.as_graph_def().SerializeToString(deterministic=True)


@pytest.fixture(scope="module")
def weights() -> list[tf.Variable]:
    return weights_of(LAYERS, WIDTH)


@pytest.fixture(scope="module")
def front(weights: list[tf.Variable]) -> msg.Pareto:
    return seen(lambda x: tf.reduce_sum(dense_layers(x, weights)), weights)


def test_no_point_betters_another(front: msg.Pareto):
    assert len(front.points) > 3
    for point, higher in pairwise(front.points):
        assert point.peak_bytes < higher.peak_bytes
        assert point.extra_seconds > higher.extra_seconds
    assert front.stock.extra_fraction == 0
    assert front.knee in front.points


def test_its_marks_are_the_plans_of_gradients(
    front: msg.Pareto, weights: list[tf.Variable]
):
    for mode in ("memory", "speed"):

        @tf.function(autograph=False)
        def step(x: tf.Tensor, mode: str = mode) -> list[tf.Tensor]:
            loss = tf.reduce_sum(dense_layers(x, weights))
            return msg.gradients(loss, weights, checkpoints=mode)

        step.get_concrete_function(tf.TensorSpec(X.shape))
        plan, mark = msg.last_plan(), getattr(front, mode)
        assert plan.predicted_peak_bytes == mark.peak_bytes
        assert plan.extra_seconds == pytest.approx(mark.extra_seconds)
        assert plan.stock_peak_bytes == front.stock.peak_bytes


def test_a_budget_gets_the_best_point_within(front: msg.Pareto):
    assert front.within(front.stock.peak_bytes) == front.stock
    assert front.within(front.stock.peak_bytes - 1) == front.points[-2]
    assert front.within(front.points[0].peak_bytes - 1) is None


def test_a_budget_of_the_front_may_be_in_words(front: msg.Pareto):
    half = front.within(0.5 * front.stock.peak_bytes)
    assert front.within("50%") == front.within(msg.Budget("50%")) == half
    assert front.within("1GiB") == front.stock
    for wrong in (None, "half", [5], True):
        with pytest.raises(msg.CheckpointError):
            front.within(wrong)
    for wrong in (msg.Budget(total="1GiB"), msg.Budget("50%", consumed=True)):
        with pytest.raises(msg.CheckpointError, match="expects a budget above rest"):
            front.within(wrong)


def test_the_table_names_what_is_marked(front: msg.Pareto):
    for word in ("stock", "memory", "speed", "knee", "least", "90%"):
        assert word in str(front)


def test_gradients_taken_afterwards_are_stocks(weights: list[tf.Variable]):
    @tf.custom_gradient
    def bent(x: tf.Tensor) -> Any:
        y = tf.exp(-x * x)
        return y, lambda g: -2 * g * x * y

    called = tf.function(lambda x, w: tf.tanh(x @ w))

    def gradients(x: tf.Tensor, look: bool) -> list[tf.Tensor]:
        y = bent(dense_layers(x, weights[:-1]))
        loss = tf.reduce_sum(called(y, weights[-1]))
        if look:
            assert msg.pareto(loss, [x, *weights]).stock.peak_bytes > 0
        return tf.gradients(loss, weights)

    stock, looked = (
        tf.function(gradients, autograph=False)(X, look) for look in (False, True)
    )
    for one, other in zip(stock, looked, strict=True):
        np.testing.assert_array_equal(one, other)


def test_after_rewritten_gradients_the_graph_is_still_rewritten(
    weights: list[tf.Variable],
):
    @tf.function(autograph=False)
    def look(x: tf.Tensor) -> tf.Tensor:
        loss = tf.reduce_sum(dense_layers(x, weights))
        (gradient,) = msg.gradients(loss, x, checkpoints="memory")
        before = definition(gradient.graph)
        norm = tf.reduce_sum(gradient**2)
        grown = definition(gradient.graph)
        msg.pareto(norm, weights)
        assert definition(gradient.graph) == grown != before
        return norm

    x = tf.constant(X)
    look.get_concrete_function(x)


@pytest.mark.parametrize("use_resource", [False, True])
def test_in_a_graph_of_tensorflow_1(use_resource: bool):
    with tf.Graph().as_default() as graph:
        y = v1.placeholder(tf.float32, X.shape)
        for number in range(LAYERS):
            y = tf.tanh(
                y
                @ v1.get_variable(
                    f"w{number}", [WIDTH, WIDTH], use_resource=use_resource
                )
            )
        loss = tf.reduce_sum(y)
        before = definition(graph)
        front = msg.pareto(loss, v1.trainable_variables())
        assert definition(graph) == before
    assert front.points[0].peak_bytes < 0.6 * front.stock.peak_bytes


def test_nothing_is_remembered_or_counted(weights: list[tf.Variable]):
    with msg.enabled("memory"):
        plan, counted = msg.last_plan(), msg.status()
        seen(lambda x: tf.reduce_sum(dense_layers(x, weights)), weights)
        assert (msg.last_plan(), msg.status()) == (plan, counted)


def test_where_nothing_depends_on_the_sources(weights: list[tf.Variable]):
    with pytest.raises(msg.MemorySavingGradientsError, match="none of the `xs`"):
        seen(lambda x: tf.reduce_sum(dense_layers(x, weights[:3])), weights[3:])


def in_a_loop(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    return tf.while_loop(
        lambda n, _: n < 3,
        lambda n, y: (n + 1, tf.tanh(y @ weights[0])),
        [0, x],
        maximum_iterations=5,
    )[1]


def in_a_branch(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    return tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: tf.tanh(tf.sin(x @ weights[0]) @ weights[1]),
        lambda: x @ weights[1],
    )


def in_a_case(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    return tf.switch_case(
        tf.cast(x[0, 0], tf.int32),
        [lambda: tf.tanh(x @ weights[0]), lambda: tf.sin(x @ weights[1])],
    )


def in_a_branch_in_a_loop(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    def body(n: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        step = tf.cond(
            n > 1, lambda: tf.tanh(y @ weights[0]), lambda: tf.sin(y @ weights[1])
        )
        return n + 1, step

    return tf.while_loop(lambda n, _: n < 3, body, [0, x], maximum_iterations=5)[1]


def called_in_a_loop(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    called = tf.function(lambda y: tf.tanh(y @ weights[0]), autograph=False)
    return tf.while_loop(
        lambda n, _: n < 3,
        lambda n, y: (n + 1, called(y)),
        [0, x],
        maximum_iterations=5,
    )[1]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "inner",
    [in_a_loop, in_a_branch, in_a_case, in_a_branch_in_a_loop, called_in_a_loop],
    ids=lambda f: f.__name__,
)
def test_loops_and_branches_are_looked_at(
    inner: Callable[..., tf.Tensor], jit: bool, weights: list[tf.Variable]
):
    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(dense_layers(inner(x, weights), weights[2:]))

    fronts = []

    def step(x: tf.Tensor, look: bool) -> list[tf.Tensor]:
        y = loss(x)
        graph = v1.get_default_graph()
        before = definition(graph)
        for _ in range(2 * look):
            fronts.append(msg.pareto(y, weights))
        assert definition(graph) == before
        return tf.gradients(y, weights, unconnected_gradients="zero")

    stock, looked = (
        tf.function(step, autograph=False, jit_compile=jit)(tf.constant(X), look)
        for look in (False, True)
    )
    for one, other in zip(stock, looked, strict=True):
        np.testing.assert_array_equal(one, other)
    assert fronts[0] == fronts[1]
    assert fronts[0].points[0].peak_bytes < 0.9 * fronts[0].stock.peak_bytes
    if not jit:
        compared = msg.compare(loss, tf.TensorSpec(X.shape), budgets=[])
        assert fronts[0].stock.peak_bytes == compared["stock"].peak_bytes
        assert fronts[0].memory.peak_bytes == compared["memory"].peak_bytes


def test_loops_of_tensorflow_1_are_refused():
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, X.shape)
            y = tf.while_loop(lambda y: tf.norm(y) > 1, lambda y: [tf.tanh(y)], [x])
            with pytest.raises(
                msg.MemorySavingGradientsError, match=r"compare.*trace it anew"
            ):
                msg.pareto(tf.reduce_sum(y), x)
    finally:
        v1.enable_control_flow_v2()


def test_eagerly_it_says_what_to_do(weights: list[tf.Variable]):
    with pytest.raises(msg.EagerExecutionError, match=r"tf\.function"):
        msg.pareto(tf.constant(1.0), weights)
