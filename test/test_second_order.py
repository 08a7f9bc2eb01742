"""Gradients of gradients, and several gradients of one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from tf_helpers import (
    EXACT_ROUTES,
    Work,
    assert_close,
    assert_same_bits,
    fixed,
    gradients_of_both,
    run,
    session,
)

import memory_saving_gradients as msg

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

Differentiate = Callable[..., list[Any]]


def rewired(ys: Any, xs: Any, **keywords: Any) -> list[Any]:
    found = msg.gradients(ys, xs, checkpoints="memory", **keywords)
    assert msg.last_plan().recomputed
    return found


MIXES = {
    "both rewired": (rewired, rewired),
    "inner rewired": (rewired, tf.gradients),
    "outer rewired": (tf.gradients, rewired),
}


def chain(y: tf.Tensor, ws: Any) -> tf.Tensor:
    for w in ws:
        y = tf.tanh(tf.nn.softplus(y @ w) - 0.3 * y)
    return y


def assert_same_on(
    route: str,
    build: Callable[[list[Any], list[tf.Tensor], Any, Any], list[Any]],
    mix: tuple[Differentiate, Differentiate],
) -> None:
    """`build` differentiates twice, with the two functions that it is given."""
    weights = [fixed(8, 8, seed=i) for i in range(4)]

    def found(inner: Differentiate, outer: Differentiate) -> list[Any]:
        if route == "session":
            with tf.Graph().as_default():
                ws = [
                    v1.get_variable(f"w{i}", initializer=w, use_resource=True)
                    for i, w in enumerate(weights)
                ]
                return run(build(ws, [tf.constant(fixed(4, 8))], inner, outer))
        ws = [tf.Variable(w) for w in weights]

        @tf.function(autograph=False, jit_compile=route == "jitted")
        def step(x: tf.Tensor) -> list[Any]:
            return build(ws, [x], inner, outer)

        return step(tf.constant(fixed(4, 8)))

    stock = found(tf.gradients, tf.gradients)
    # Sums of three and more may start with whichever operand's buffer is free.
    assert_close(stock, stock, found(*mix))


def penalty(ws: Any, xs: Any, inner: Differentiate, outer: Differentiate) -> Any:
    """WGAN-GP: the critic's gradient by its input shall have length one."""
    (of_x,) = inner(tf.reduce_sum(chain(xs[0], ws)), xs)
    length = tf.sqrt(tf.reduce_sum(of_x**2, 1))
    return outer(tf.reduce_mean((length - 1) ** 2), ws)


def inner_step(ws: Any, xs: Any, inner: Differentiate, outer: Differentiate) -> Any:
    """MAML: the loss after one step of descent."""
    values = [tf.convert_to_tensor(w) for w in ws]
    steps = inner(tf.reduce_mean(chain(xs[0], values) ** 2), values)
    moved = [w - 0.1 * step for w, step in zip(values, steps, strict=True)]
    return outer(tf.reduce_mean(chain(xs[0], moved) ** 2), ws)


def by_intermediates(
    ws: Any, xs: Any, inner: Differentiate, outer: Differentiate
) -> Any:
    middle = chain(xs[0], ws[:2])
    y = chain(middle, ws[2:])
    (of_middle,) = inner(tf.reduce_sum(tf.exp(y)), [middle])
    return outer(tf.reduce_sum(tf.sin(of_middle)), [middle, y, *xs, *ws])


def by_what_copies_bypass(
    ws: Any, xs: Any, inner: Differentiate, outer: Differentiate
) -> Any:
    y, passed = xs[0], []
    for w in ws:
        read = tf.identity(w) * 1.0
        h = tf.nn.softplus(y @ read)
        y = tf.tanh(h - 0.3 * y)
        passed += [read, h, y]
    first = inner(tf.reduce_sum(tf.exp(y)), [xs[0], *ws])
    return outer([tf.reduce_sum(tf.sin(g)) for g in first], passed)


def gradient_as_a_force(
    ws: Any, xs: Any, inner: Differentiate, outer: Differentiate
) -> Any:
    """The energy's gradient in the middle of a model."""
    (force,) = inner(tf.reduce_sum(chain(xs[0], ws[:2]) ** 2), xs)
    return outer(tf.reduce_sum(chain(xs[0] - force, ws[2:])), ws)


BUILDS = [
    penalty,
    inner_step,
    by_intermediates,
    by_what_copies_bypass,
    gradient_as_a_force,
]


@pytest.mark.parametrize(
    ("build", "route", "mix"),
    [(build, route, "both rewired") for build in BUILDS for route in EXACT_ROUTES]
    + [(build, "session", "outer rewired") for build in BUILDS]
    # Stock is guarded: it finds the edges as autodiff made them, not the copies.
    + [(build, "session", "inner rewired") for build in BUILDS],
)
def test_second_order(build: Any, route: str, mix: str) -> None:
    assert_same_on(route, build, MIXES[mix])


def test_second_order_under_xla() -> None:
    assert_same_on("jitted", penalty, MIXES["both rewired"])


@pytest.mark.parametrize("route", ["session"])
def test_third_order(route: str) -> None:
    def build(ws: Any, xs: Any, inner: Differentiate, outer: Differentiate) -> Any:
        (first,) = inner(tf.reduce_sum(chain(xs[0], ws[:2])), xs)
        (second,) = inner(tf.reduce_sum(first**3), xs)
        return outer(tf.reduce_sum(second**2), [*xs, *ws[:2]])

    assert_same_on(route, build, (rewired, rewired))


@pytest.mark.parametrize("route", EXACT_ROUTES)
def test_hessians_after_a_rewired_gradient(route: str) -> None:
    def build(ws: Any, xs: Any, inner: Differentiate, outer: Differentiate) -> Any:
        loss = tf.reduce_sum(chain(xs[0], ws))
        return [*inner(loss, xs), *tf.hessians(loss, xs)]

    assert_same_on(route, build, (rewired, rewired))


def test_hessians_with_the_library_in_place_of_stock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorflow.python.ops import gradients_impl

    def build(ws: Any, xs: Any, *_: Any) -> Any:
        return tf.hessians(tf.reduce_sum(chain(xs[0], ws)), xs)

    with tf.Graph().as_default():
        ws, xs = [tf.constant(fixed(8, 8))] * 6, [tf.constant(fixed(4, 8))]
        stock = run(build(ws, xs))
    with tf.Graph().as_default():
        monkeypatch.setattr(gradients_impl, "gradients", msg.gradients_memory)
        ws, xs = [tf.constant(fixed(8, 8))] * 6, [tf.constant(fixed(4, 8))]
        assert_close(stock, stock, run(build(ws, xs)))


def test_a_tape_through_a_rewired_gradient() -> None:
    ws = [tf.Variable(fixed(8, 8, seed=i)) for i in range(6)]

    @tf.function(autograph=False)
    def step(x: tf.Tensor, differentiate: Differentiate) -> list[Any]:
        with tf.GradientTape() as tape:
            (of_x,) = differentiate(tf.reduce_sum(chain(x, ws)), [x])
            loss = tf.reduce_sum(of_x**2)
        return tape.gradient(loss, ws)

    x = tf.constant(fixed(4, 8))
    stock = step(x, tf.gradients)
    assert_close(stock, stock, step(x, rewired))


def test_forward_over_reverse() -> None:
    ws = [tf.Variable(fixed(8, 8, seed=i)) for i in range(6)]

    @tf.function(autograph=False)
    def product(x: tf.Tensor, differentiate: Differentiate) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            (of_x,) = differentiate(tf.reduce_sum(chain(x, ws)), [x])
        return [accumulator.jvp(of_x)]

    x = tf.constant(fixed(4, 8))
    stock = product(x, tf.gradients)
    assert stock[0] is not None
    assert_close(stock, stock, product(x, rewired))


# -- several gradients of one graph ----------------------------------------------------


def test_two_losses_of_one_graph() -> None:
    with tf.Graph().as_default():
        ws = [tf.constant(fixed(8, 8, seed=i)) for i in range(6)]
        y = chain(tf.constant(fixed(4, 8)), ws)
        losses = [tf.reduce_sum(y * y), tf.reduce_sum(tf.exp(chain(y, ws)))]
        stock = [tf.gradients(loss, ws) for loss in losses]
        new = [rewired(loss, ws) for loss in losses]
        again = rewired(losses[0], ws)
        stock, new, again = run([stock, new, again])
    for one, other in zip([*stock, stock[0]], [*new, again], strict=True):
        assert_same_bits(one, other)


def test_stock_gradients_after_rewired_ones() -> None:
    with tf.Graph().as_default():
        ws = [tf.constant(fixed(8, 8, seed=i)) for i in range(6)]
        loss = tf.reduce_sum(chain(tf.constant(fixed(4, 8)), ws) ** 2)
        new = rewired(loss, ws)
        assert_same_bits(*run([tf.gradients(loss, ws), new]))


def test_gradients_taken_after_a_session_ran() -> None:
    with tf.Graph().as_default() as graph:
        ws = [
            v1.get_variable(f"w{i}", initializer=fixed(8, 8, seed=i), use_resource=True)
            for i in range(6)
        ]
        loss = tf.reduce_sum(chain(tf.constant(fixed(4, 8)), ws) ** 2)
        with session(graph) as running:
            running.run(v1.global_variables_initializer())
            running.run(loss)
            stock = tf.gradients(loss, ws)
            running.run(stock)
            inputs = {
                op: (list(op.inputs), list(op.control_inputs))
                for op in graph.get_operations()
            }
            new = rewired(loss, ws)
            once = running.run(new)
            more = rewired(tf.exp(loss), ws)
            for op, before in inputs.items():
                assert [t.name for t in op.inputs] == [t.name for t in before[0]]
                assert list(op.control_inputs) == before[1]
            reference, twice, _ = running.run([stock, new, more])
    assert_same_bits(reference, once)
    assert_same_bits(reference, twice)


def test_second_order_after_a_session_ran_the_first() -> None:
    """A session ignores changes to ops that it ran; the second gradient is new."""
    with tf.Graph().as_default() as graph:
        ws = [tf.constant(fixed(8, 8, seed=i)) for i in range(6)]
        x = tf.constant(fixed(4, 8))
        loss = tf.reduce_sum(chain(x, ws))
        (stock,) = tf.gradients(loss, x)
        stock = tf.gradients(tf.reduce_sum(stock**2), [x, *ws])
        (new,) = rewired(loss, x)
        with session(graph) as running:
            first = running.run(new)
            second = rewired(tf.reduce_sum(new**2), [x, *ws])
            expected, found, same = running.run([stock, second, new])
    assert_close(expected, expected, found)
    assert_same_bits([first], [same])


@pytest.mark.parametrize("route", EXACT_ROUTES)
def test_accumulating_over_micro_batches(route: str) -> None:
    def forward(ws: Any, xs: Any) -> Any:
        return [tf.reduce_sum(chain(part, ws)) for part in tf.split(xs[0], 4)]

    work = Work(forward, [fixed(8, 8, seed=i) for i in range(3)], [fixed(16, 8)])
    stock, _, new = gradients_of_both(work, route)
    assert_close(stock, stock, new)
