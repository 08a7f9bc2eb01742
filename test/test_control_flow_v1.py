"""Loops, branches and calls: right, pinned, and never an error of the planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from tf_helpers import EXACT_ROUTES, Work, assert_same_bits, check, fixed, run, session

import memory_saving_gradients as msg

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


@pytest.fixture(params=[1, 2])
def control_flow(request: pytest.FixtureRequest) -> Iterator[int]:
    """Which generation of loops and branches a graph gets."""
    if request.param == 2:
        yield 2
        return
    v1.disable_control_flow_v2()
    yield 1
    v1.enable_control_flow_v2()


def block(y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.tanh(tf.nn.softplus(y @ w) - 0.3 * y)


def around(middle: Any) -> Any:
    """A model of blocks that can be recomputed, with `middle` among them."""

    def forward(ws: Any, xs: Any) -> Any:
        y = xs[0]
        for w in ws:
            y = block(block(y, w), w)
        y = middle(y, ws)
        for w in ws:
            y = block(block(y, w), w)
        return tf.reduce_sum(y * y)

    return forward


def loop(y: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, y: (i + 1, block(y, ws[0])), [0, y]
    )[1]


def loop_until_a_value(y: tf.Tensor, ws: Any) -> tf.Tensor:
    def goes_on(y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(y * y) > 4.0

    # Each round halves what is there, so three or four rounds do.
    return tf.while_loop(goes_on, lambda y: (tf.tanh(y) * 0.5,), [y])[0]


def loop_in_a_loop(y: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, loop(y, ws)), [0, y])[
        1
    ]


def loop_that_reads_what_is_recomputed(y: tf.Tensor, ws: Any) -> tf.Tensor:
    outer = tf.exp(tf.sin(y))
    return tf.while_loop(
        lambda i, _: i < 3,
        lambda i, h: (i + 1, block(h * outer, ws[0]) + tf.sin(outer)),
        [0, tf.tanh(outer)],
    )[1]


def branch(y: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.cond(
        tf.reduce_sum(y) > 0.0,
        lambda: block(tf.sin(y), ws[0]),
        lambda: block(tf.exp(y), ws[1]),
    )


def branch_in_a_loop(y: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, y: (i + 1, branch(y, ws)), [0, y]
    )[1]


def several_branches(y: tf.Tensor, ws: Any) -> tf.Tensor:
    which = tf.cast(tf.abs(tf.reduce_sum(y)), tf.int32) % 3
    return tf.switch_case(
        which,
        [lambda: block(y, ws[0]), lambda: tf.sin(y), lambda: block(tf.exp(y), ws[1])],
    )


def mapped(y: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.map_fn(lambda row: tf.tanh(row * tf.reduce_sum(row)), y)


def scanned(y: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.scan(lambda state, row: tf.tanh(state + tf.sin(row)), y)


MIDDLES = [
    loop,
    loop_until_a_value,
    loop_in_a_loop,
    loop_that_reads_what_is_recomputed,
    branch,
    branch_in_a_loop,
    several_branches,
    mapped,
    scanned,
]

WEIGHTS = [fixed(8, 8, seed=1), fixed(8, 8, seed=2)]
INPUTS = [fixed(8, 8, seed=3)]


@pytest.mark.parametrize("middle", MIDDLES)
def test_in_a_session(middle: Any, control_flow: int) -> None:
    check(Work(around(middle), WEIGHTS, INPUTS), "session")


@pytest.mark.parametrize("middle", [loop, branch_in_a_loop, several_branches, scanned])
def test_in_a_function(middle: Any) -> None:
    plan = check(Work(around(middle), WEIGHTS, INPUTS), "function")
    graph = plan.reading.ops[0].graph
    assert not any(
        graph.get_operation_by_name(name).type in ("While", "StatelessWhile", "If")
        for name in plan.recomputed
    )


@pytest.mark.parametrize("middle", [loop, branch])
def test_version_1_contexts_are_pinned(middle: Any) -> None:
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            xs, ws = [tf.constant(INPUTS[0])], [tf.constant(w) for w in WEIGHTS]
            msg.gradients(around(middle)(ws, xs), ws, checkpoints="memory")
            plan = msg.last_plan()
            assert plan.recomputed
            for name in plan.recomputed:
                operation = graph.get_operation_by_name(name)
                assert operation._get_control_flow_context() is None
    finally:
        v1.enable_control_flow_v2()


def test_a_loop_is_a_reason_in_the_summary() -> None:
    with tf.Graph().as_default():
        y = x = tf.constant(INPUTS[0])
        for _ in range(3):
            y = loop(tf.exp(tf.sin(y)), [x, x])
        msg.gradients(tf.sin(y) * 2.0, x, checkpoints="memory")
        summary = msg.last_plan().summary()
        assert "Never recomputed" in summary
        assert "StatelessWhile while" in summary


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_loop_as_long_as_a_placeholder_says(length: int, control_flow: int) -> None:
    with tf.Graph().as_default() as graph:
        count = v1.placeholder(tf.int32, [])
        w = tf.constant(WEIGHTS[0])
        y = block(block(tf.constant(INPUTS[0]), w), w)
        y = tf.while_loop(
            lambda i, _: i < count, lambda i, y: (i + 1, block(y, w)), [0, y]
        )[1]
        loss = tf.reduce_sum(block(block(y, w), w))
        stock = tf.gradients(loss, w)
        new = msg.gradients(loss, w, checkpoints="memory")
        assert msg.last_plan().recomputed
        with session(graph) as running:
            assert_same_bits(*running.run([stock, new], {count: length}))


def test_gradients_taken_inside_a_loop(control_flow: int) -> None:
    def descended(differentiate: Any) -> Any:
        with tf.Graph().as_default():
            w = tf.constant(WEIGHTS[0])

            def step(i: tf.Tensor, x: tf.Tensor) -> Any:
                y = block(block(block(x, w), w), w)
                (gradient,) = differentiate(tf.reduce_sum(y * y), [x])
                return i + 1, x - 0.1 * gradient

            x = tf.while_loop(lambda i, _: i < 3, step, [0, tf.constant(INPUTS[0])])[1]
            return run([x])

    def rewired(ys: Any, xs: Any) -> Any:
        return msg.gradients(ys, xs, checkpoints="memory")

    assert_same_bits(descended(tf.gradients), descended(rewired))


def test_gradients_taken_inside_a_branch(control_flow: int) -> None:
    def found(differentiate: Any) -> Any:
        with tf.Graph().as_default():
            w = tf.constant(WEIGHTS[0])
            x = tf.constant(INPUTS[0])
            outside = block(block(x, w), w)

            def yes() -> tf.Tensor:
                y = block(block(block(outside, w), w), w)
                return differentiate(tf.reduce_sum(y * y), [outside])[0]

            return run([tf.cond(tf.reduce_sum(x) > -1e9, yes, lambda: x)])

    def rewired(ys: Any, xs: Any) -> Any:
        return msg.gradients(ys, xs, checkpoints="memory")

    assert_same_bits(found(tf.gradients), found(rewired))


def test_a_session_that_ran_the_loop_before(control_flow: int) -> None:
    """Stock's gradient of a loop that a session ran may fail, but not otherwise."""

    def found(differentiate: Any) -> Any:
        with tf.Graph().as_default() as graph:
            ws = [tf.constant(w) for w in WEIGHTS]
            loss = around(loop)(ws, [tf.constant(INPUTS[0])])
            with session(graph) as running:
                running.run(loss)
                gradients = differentiate(loss, ws)
                try:
                    return running.run(gradients)
                except tf.errors.OpError as error:
                    return type(error)

    def rewired(ys: Any, xs: Any) -> Any:
        return msg.gradients(ys, xs, checkpoints="memory")

    stock, new = found(tf.gradients), found(rewired)
    if isinstance(stock, type):
        assert new is stock
    else:
        assert_same_bits(stock, new)


# -- calls -----------------------------------------------------------------------------


@tf.function(autograph=False)
def called(y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return block(block(y, w), w)


@tf.function(autograph=False)
def calling(y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return called(tf.sin(called(y, w)), w)


@tf.recompute_grad
def redone(y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return block(block(y, w), w)


CALLS = [called, calling, redone]


@pytest.mark.parametrize("route", EXACT_ROUTES)
@pytest.mark.parametrize("function", CALLS)
def test_calls(function: Any, route: str) -> None:
    def middle(y: tf.Tensor, ws: Any) -> tf.Tensor:
        for w in (*ws, *ws):
            y = tf.exp(tf.sin(function(y, tf.convert_to_tensor(w))))
        return y

    check(Work(around(middle), WEIGHTS, INPUTS), route)


def test_calls_that_read_variables_which_then_change() -> None:
    def found(differentiate: Any) -> Any:
        v = tf.Variable(WEIGHTS[0])

        @tf.function(autograph=False)
        def reading(y: tf.Tensor) -> tf.Tensor:
            return block(block(y, v), v)

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            y = tf.sin(tf.exp(tf.tanh(x)))
            for _ in range(3):
                y = tf.sin(tf.exp(reading(y)))
            v.assign(v * 0.5)
            return differentiate(y, [v, x])

        return step(tf.constant(INPUTS[0]))

    def rewired(ys: Any, xs: Any) -> Any:
        return msg.gradients(ys, xs, checkpoints="memory")

    assert_same_bits(found(tf.gradients), found(rewired))


def test_a_loop_written_for_autograph() -> None:
    w = tf.Variable(WEIGHTS[0])

    @tf.function
    def step(x: tf.Tensor, n: tf.Tensor) -> Any:
        y = tf.exp(tf.sin(tf.tanh(x)))
        for _ in tf.range(n):
            y = block(y, w)
        y = tf.exp(tf.sin(tf.tanh(y)))
        return tf.gradients(y, [w, x]), msg.gradients(y, [w, x], checkpoints="memory")

    assert_same_bits(*step(tf.constant(INPUTS[0]), tf.constant(4)))


def test_the_loop_whose_gradient_is_known() -> None:
    w = tf.Variable(0.9)

    @tf.function
    def step(x: tf.Tensor, n: tf.Tensor) -> Any:
        y = x
        for _ in tf.range(n):
            y = tf.tanh(w * y)
        return msg.gradients(tf.reduce_sum(y), w, checkpoints="memory")

    (gradient,) = step(tf.ones([3]), tf.constant(4))
    # By tf.GradientTape, eagerly, and by differences.
    assert gradient.numpy() == pytest.approx(_by_differences(0.9), rel=1e-4)


def _by_differences(at: float, step: float = 1e-4) -> float:
    import math

    def loss(w: float) -> float:
        y = 1.0
        for _ in range(4):
            y = math.tanh(w * y)
        return 3 * y

    return (loss(at + step) - loss(at - step)) / (2 * step)
