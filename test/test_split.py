"""Loops that hold their state for few iterations: split in place, and right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import assert_close, assert_same_bits, fixed, run

import memory_saving_gradients as msg
from memory_saving_gradients.tf_internals_bodies import graphs_inside

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

v1 = tf.compat.v1

X = fixed(4, 6, seed=3)
ELEMENTS = fixed(7, 4, 6, seed=5)

Loss = Callable[[tf.Tensor, tf.Variable], tf.Tensor]


def weight() -> tf.Variable:
    return tf.Variable(fixed(6, 6, seed=1) * 0.3)


def gradients(loss: Loss, every: Any, jit: bool = False, **keywords: Any) -> list[Any]:
    """Of a loss, by the input and by a weight; stock's if `every` is "stock"."""
    w = weight()

    @tf.function(jit_compile=jit, autograph=False)
    def step(x: tf.Tensor) -> Any:
        tape = tf.GradientTape(**keywords)
        if every != "stock":
            tape = msg.GradientTape(every=every, **keywords)
        with tape:
            tape.watch(x)
            result = loss(x, w)
        return tape.gradient(result, [x, w])

    return step(tf.constant(X))


def is_split(split: bool = True) -> bool:
    """Whether the newest plan tells of a loop that was split (or of none)."""
    return any(body.every for body in msg.last_plan().bodies) is split


def compare(loss: Loss, every: Any = 3, split: bool = True, **keywords: Any) -> None:
    """With respect to what goes through the loop the bits are stock's.

    Of what all iterations share, sums come in groups: each of the less than 16 sums may
    be off by half a unit in the last place of what is summed.
    """
    stock = gradients(loss, "stock", **keywords)
    new = gradients(loss, every, **keywords)
    assert is_split(split), msg.last_plan()
    if keywords.get("jit"):
        assert_close(stock, gradients(loss, "stock", **keywords), new)
        return
    assert_same_bits(stock[:1], new[:1])
    off = tf.reduce_max(tf.abs(stock[1] - new[1]))
    assert off <= 16 * 2.0**-24 * tf.norm(stock[1], 1)


def cell(y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.tanh(tf.nn.gelu(y @ w)) + 0.1 * y


def looped(body: Callable[..., Any], steps: Any = 7, most: Any = 7) -> Loss:
    """A loop over a body `(i, y, w) -> y`."""

    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        y = tf.while_loop(
            lambda i, _: i < steps,
            lambda i, y: (i + 1, body(i, y, w)),
            [0, x],
            maximum_iterations=most,
        )[1]
        return tf.reduce_sum(y * y)

    return loss


# -- trip counts -----------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5, 6, 7, 20])
def test_trip_counts(steps: int, jit: bool) -> None:
    compare(looped(lambda i, y, w: cell(y, w), steps, 7), jit=jit)


@pytest.mark.parametrize("every", [1, 2, 7, 100, "sqrt"])
def test_every(every: Any) -> None:
    compare(looped(lambda i, y, w: cell(y, w)), every, split=every in (2, "sqrt"))


@pytest.mark.parametrize("most", [None, 7, "tensor"])
def test_a_number_known_only_at_run_time(most: Any) -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        steps = tf.cast(tf.reduce_sum(x * 0.0), tf.int32) + 5
        bound = steps + 1 if most == "tensor" else most
        return looped(lambda i, y, w: cell(y, w), steps, bound)(x, w)

    compare(loss)
    assert any(body.assumed for body in msg.last_plan().bodies) is (most != 7)


def test_an_end_that_depends_on_the_state() -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        (y,) = tf.while_loop(
            lambda y: tf.reduce_max(tf.abs(y)) > 0.2,
            lambda y: (0.8 * tf.sin(y @ w + y),),
            [x],
            maximum_iterations=50,
        )
        return tf.reduce_sum(y * y)

    compare(loss)


# -- what a loop consists of -----------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_states_of_several_kinds_and_an_array(jit: bool) -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        elements = tf.TensorArray(tf.float32, 7, element_shape=[4, 6])
        elements = elements.unstack(tf.constant(ELEMENTS) * x)

        def body(i: Any, state: Any, count: Any, same: Any, array: Any) -> Any:
            h = tf.tanh(state["h"] @ w + elements.read(i) * same)
            state = {"h": h, "c": tf.sin(state["c"]) + tf.cast(count, tf.float32)}
            return i + 1, state, count * 2 % 5, same, array.write(i, h)

        array = tf.TensorArray(tf.float32, 7, element_shape=[4, 6])
        start = (0, {"h": x, "c": x}, tf.constant(3), x + 1.0, array)
        _, state, _, _, array = tf.while_loop(
            lambda i, *_: i < 7, body, start, maximum_iterations=7
        )
        return tf.reduce_sum(array.stack() ** 2) + tf.reduce_sum(state["c"])

    stock, new = (gradients(loss, every, jit) for every in ("stock", 3))
    assert is_split()
    # The elements are what all iterations share, here: two sums in another order.
    assert_close(stock, stock, new)


def test_an_array_that_is_read_and_written() -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        array = tf.TensorArray(
            tf.float32, 8, element_shape=[4, 6], clear_after_read=False
        )
        array = array.write(0, x)

        def body(i: Any, y: Any, array: Any) -> Any:
            y = tf.tanh(array.read(i) @ w + y)
            return i + 1, y, array.write(i + 1, y)

        y = tf.while_loop(
            lambda i, *_: i < 7, body, (0, x, array), maximum_iterations=7
        )[1]
        return tf.reduce_sum(y * y)

    stock, new = gradients(loss, "stock"), gradients(loss, 3)
    assert is_split()
    assert_close(stock, stock, new)
    gradients(loss, 3, jit=True)
    assert "from a list that it writes to" in str(msg.last_plan())


def test_shapes_that_grow() -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        y = tf.while_loop(
            lambda i, _: i < 7,
            lambda i, y: (i + 1, tf.concat([tf.sin(y), tf.tanh(y[:1] @ w)], 0)),
            [0, x],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 6])],
        )[1]
        return tf.reduce_sum(y * y)

    compare(loss)


def test_masks_are_the_same_again() -> None:
    def body(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
        mask = tf.random.stateless_uniform([4, 6], tf.stack([i, 3])) < 0.6
        return tf.where(mask, cell(y, w), 0.0)

    compare(looped(body))


@tf.custom_gradient
def _odd(y: tf.Tensor) -> Any:
    inner = tf.sin(y)
    return inner * y, lambda dy: dy * inner * 3.0


def _in_call(y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.function(lambda y: _odd(cell(y, w)), autograph=False)(y)


def _in_branch(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.cond(i % 2 == 0, lambda: _odd(y @ w), lambda: tf.tanh(y))


def _in_case(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.switch_case(
        i % 3, [lambda: tf.sin(y), lambda: tf.cos(y @ w), lambda: _in_call(y, w)]
    )


def _in_loop(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda j, _: j < i % 4,
        lambda j, y: (j + 1, cell(y, w)),
        [0, y],
        maximum_iterations=4,
    )[1]


def _checked(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
    tf.debugging.assert_less(i, 7)
    return tf.debugging.check_numerics(cell(y, w), "no number")


def _with_a_gradient(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
    return y - 0.1 * tf.gradients(tf.reduce_sum(tf.tanh(y @ w)), y)[0]


BODIES: dict[str, Callable[..., Any]] = {
    "custom gradient": lambda i, y, w: _odd(y @ w),
    "recomputed by TensorFlow": lambda i, y, w: tf.recompute_grad(tf.sin)(y @ w),
    "called function": lambda i, y, w: _in_call(y, w),
    "compiled function": lambda i, y, w: tf.function(
        lambda y: cell(y, w), jit_compile=True
    )(y),
    "branch": _in_branch,
    "case": _in_case,
    "loop": _in_loop,
    "checks": _checked,
    "gradient": _with_a_gradient,
}


# `tf.recompute_grad` in a loop does not compile under `memory`, split or not.
COMPILED = [(kind, True) for kind in BODIES if kind != "recomputed by TensorFlow"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "jit"), [*((k, False) for k in BODIES), *COMPILED])
def test_bodies(kind: str, jit: bool) -> None:
    if jit and kind in ("called function", "compiled function", "case"):
        # Stock cannot: "must be a compile-time constant". The executor's will do.
        stock = gradients(looped(BODIES[kind]), "stock")
        new = gradients(looped(BODIES[kind]), 3, jit=True)
        assert_close(stock, stock, new)
        return
    stock, new = (gradients(looped(BODIES[kind]), e, jit) for e in ("stock", 3))
    assert is_split(), msg.last_plan()
    assert_close(stock, stock, new)


def test_checks_still_fail() -> None:
    def body(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
        tf.debugging.assert_less(i, 5, "five are too many")
        return cell(y, w)

    with pytest.raises(tf.errors.InvalidArgumentError, match="five are too many"):
        gradients(looped(body), 3)


def test_weights_that_change_after_the_loop() -> None:
    def found(every: Any) -> Any:
        w = weight()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with msg.GradientTape(every=every) as tape:
                tape.watch(x)
                y = looped(lambda i, y, w: tf.tanh(y @ w))(x, w)
            w.assign(w * 0.0)
            return [tape.gradient(y, x)]

        return step(tf.constant(X))

    assert_same_bits(found(None), found(3))


# -- ways of writing loops -------------------------------------------------------------


def _scanned(x: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.scan(lambda y, e: cell(y, w) + e, tf.constant(ELEMENTS), x)


def _folded(x: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.foldl(lambda y, e: cell(y, w) + e, tf.constant(ELEMENTS), x)


def _autograph(x: tf.Tensor, w: Any) -> tf.Tensor:
    @tf.function
    def run(y: tf.Tensor) -> tf.Tensor:
        for i in tf.range(7):
            y = cell(y, w) + tf.cast(i, tf.float32)
        return y

    return run(x)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", [_scanned, _folded, _autograph])
def test_ways(way: Callable[..., Any], jit: bool) -> None:
    compare(lambda x, w: tf.reduce_sum(way(x, w) ** 2), jit=jit)


def test_scan_is_that_of_tensorflow() -> None:
    def loss(scan: Any) -> Loss:
        return lambda x, w: tf.reduce_sum(
            scan(lambda y, e: cell(y, w) + e, tf.constant(ELEMENTS), x) ** 2
        )

    stock, new = gradients(loss(tf.scan), "stock"), gradients(loss(msg.scan), None)
    assert is_split()
    assert_close(stock, stock, new)
    eager = msg.scan(lambda y, e: y + e, tf.constant(ELEMENTS))
    assert_same_bits([tf.scan(lambda y, e: y + e, tf.constant(ELEMENTS))], [eager])


# -- what is left alone ----------------------------------------------------------------


def _drawing(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
    return cell(y, w) * tf.random.uniform([4, 6], seed=1)


def test_a_body_that_draws_is_left_alone() -> None:
    tf.random.set_seed(1)
    gradients(looped(_drawing), 3)
    assert is_split(False)
    assert "RandomUniform" in str(msg.last_plan())
    assert "may not be run again" in str(msg.last_plan())


def test_a_body_that_changes_a_variable_is_left_alone() -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        def body(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
            y = cell(y, w)
            w.assign(w * 0.9)
            return y

        return looped(body)(x, w)

    stock, new = gradients(loss, "stock"), gradients(loss, 3)
    assert is_split(False)
    assert_same_bits(stock, new)


def test_a_loop_without_state_is_left_alone() -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        ys = tf.map_fn(lambda e: cell(e, w) * x, tf.constant(ELEMENTS))
        return tf.reduce_sum(ys * ys)

    compare(loss, split=False)


def test_a_loop_that_was_differentiated_is_left_alone() -> None:
    w = weight()

    def found(every: Any) -> list[Any]:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            y = looped(lambda i, y, w: cell(y, w))(x, w)
            first = tf.gradients(y, [x, w])
            return [
                *first,
                *msg.gradients(y, [x, w], checkpoints="memory", every=every),
            ]

        return step(tf.constant(X))

    assert_same_bits(found(None), found(3))
    assert is_split(False)


# -- ways of differentiating -----------------------------------------------------------


def test_in_a_session() -> None:
    def found(every: Any) -> list[Any]:
        with tf.Graph().as_default():
            w = v1.get_variable("w", initializer=fixed(6, 6, seed=1), use_resource=True)
            x = v1.placeholder(tf.float32, [4, 6])
            y = looped(lambda i, y, w: cell(y, w))(x, w)
            made = msg.gradients(y, [x, w], checkpoints="memory", every=every)
            return run(made, {x: X})

    stock = found(None)
    assert_close(stock, stock, found(3))
    assert is_split()


def test_of_a_persistent_tape() -> None:
    def found(every: Any) -> list[Any]:
        w = weight()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with msg.GradientTape(persistent=True, every=every) as tape:
                tape.watch(x)
                y = looped(lambda i, y, w: cell(y, w))(x, w)
                z = y * y
            first = tape.gradient(y, x)
            names = [
                op.name
                for graph in graphs_inside(first.graph)
                for op in graph.get_operations()
            ]
            assert any("every" in name for name in names) is (every is not None)
            return [first, tape.gradient(z, [x, w])[0], tape.gradient(z, w)]

        return step(tf.constant(X))

    stock, new = found(None), found(3)
    assert_same_bits(stock[:2], new[:2])
    assert_close(stock, stock, new)


@pytest.mark.parametrize("inner", [None, 3])
@pytest.mark.parametrize("outer", [None, 3])
def test_second_order_of_tapes(inner: Any, outer: Any) -> None:
    def found(inner: Any, outer: Any) -> list[Any]:
        w = weight()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with msg.GradientTape(every=outer) as around:
                around.watch(x)
                with msg.GradientTape(every=inner) as tape:
                    tape.watch(x)
                    y = looped(lambda i, y, w: cell(y, w))(x, w)
                first = tape.gradient(y, x)
                penalty = tf.reduce_sum(first * first)
            return around.gradient(penalty, [x, w])

        return step(tf.constant(X))

    stock = found(None, None)
    assert_close(stock, stock, found(inner, outer))


def test_second_order_of_gradients() -> None:
    def found(every: Any) -> list[Any]:
        w = weight()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            y = looped(lambda i, y, w: cell(y, w))(x, w)
            (first,) = msg.gradients(y, x, checkpoints="memory", every=every)
            return msg.gradients(
                tf.reduce_sum(first * first), [x, w], checkpoints="memory", every=every
            )

        return step(tf.constant(X))

    stock = found(None)
    assert_close(stock, stock, found(3))


def _called(x: tf.Tensor, w: Any) -> tf.Tensor:
    inner = looped(lambda i, y, w: cell(y, w))
    return tf.function(lambda x: inner(x, w), autograph=False)(x)


def _chosen(x: tf.Tensor, w: Any) -> tf.Tensor:
    inner = looped(lambda i, y, w: cell(y, w))
    return tf.cond(
        tf.reduce_sum(x) > -1e9, lambda: inner(x, w), lambda: tf.reduce_sum(x)
    )


@pytest.mark.parametrize("loss", [_called, _chosen])
def test_inside_others(loss: Loss) -> None:
    stock, new = gradients(loss, "stock"), gradients(loss, 3)
    assert is_split()
    assert_close(stock, stock, new)


@pytest.mark.parametrize(
    "checkpoints", ["speed", "collection", lambda t: t.op.type == "Sin", "99%"]
)
def test_other_settings(checkpoints: Any) -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        y = looped(lambda i, y, w: cell(y, w))(x, w)
        v1.add_to_collection("checkpoints", tf.sin(y))
        return tf.cos(tf.exp(v1.get_collection("checkpoints")[0]))

    w = weight()

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        y = loss(x, w)
        return msg.gradients(y, [x, w], checkpoints=checkpoints, every=3)

    stock = gradients(loss, "stock")
    assert_close(stock, stock, step(tf.constant(X)))
    assert is_split()


def test_tensors_of_the_body_are_kept() -> None:
    w, kept = weight(), []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        def body(i: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
            kept.append(tf.sin(y @ w))
            return tf.tanh(kept[0])

        kept.append(tf.exp(looped(body)(x, w)))
        return msg.gradients(
            tf.cos(tf.sin(kept[-1])), [x, w], checkpoints=kept, every=3
        )

    with pytest.warns(UserWarning, match="it belongs to another graph"):
        step(tf.constant(X))  # as for the graph around
    (inner,) = (body for body in msg.last_plan().bodies if body.replayed)
    assert inner.held_bytes >= 2 * X.nbytes


def test_a_setting_of_the_process() -> None:
    loss = looped(lambda i, y, w: cell(y, w))
    stock = gradients(loss, "stock")
    with msg.enabled(every=3):
        new = gradients(loss, "stock")
        assert is_split()
    assert_close(stock, stock, new)


# -- what it is for --------------------------------------------------------------------


def test_the_plan_tells_what_is_held() -> None:
    def loss(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        return looped(lambda i, y, w: cell(y, w), 100, 100)(x, w)

    gradients(loss, None)
    whole = msg.last_plan()
    gradients(loss, "sqrt")
    plan = msg.last_plan()
    (outer,) = (body for body in plan.bodies if body.every)
    (inner,) = (body for body in plan.bodies if not body.every)
    state = X.nbytes
    assert (outer.every, outer.runs, outer.held_bytes // state) == (10, 10, 1)
    assert (inner.runs, inner.stock_runs, inner.held_bytes // state) == (10, 100, 1)
    assert plan.stock_peak_bytes >= 200 * state
    assert plan.predicted_peak_bytes <= 60 * state
    # Each iteration runs three times, instead of two.
    assert plan.extra_fraction >= 1.9 * whole.extra_fraction
    assert plan.stock_peak_bytes == whole.stock_peak_bytes
    assert "held each 10 iterations" in plan.summary()


def test_lists_are_not_held_as_often_as_states() -> None:
    """Inputs and outputs are there for all steps: what is held besides is little."""
    x, w = tf.constant(fixed(64, 128, 1024)), tf.Variable(1.5)
    size = x.shape.num_elements() * 4

    def peak(every: Any) -> float:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with msg.GradientTape(every=every) as tape:
                elements = tf.TensorArray(tf.float32, 64, element_shape=[128, 1024])
                elements = elements.unstack(x)
                _, _, made = tf.while_loop(
                    lambda i, *_: i < 64,
                    lambda i, y, made: (
                        i + 1,
                        tf.sin(tf.sin(y) * w + elements.read(i)),
                        made.write(i, tf.cos(y)),
                    ),
                    [0, x[0], tf.TensorArray(tf.float32, 64, element_shape=x[0].shape)],
                    maximum_iterations=64,
                )
                loss = tf.reduce_sum(made.stack())
            return tape.gradient(loss, w)

        step(x)
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        step(x)
        after = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return (after - before) / size

    assert peak(8) <= peak(None) - 0.5


def test_every_is_checked() -> None:
    with pytest.raises(TypeError, match=r"GradientTape`: `every` must be a number"):
        msg.GradientTape(every=2.5)
    with pytest.raises(TypeError, match="but got True"):
        msg.enable(every=True)
    with pytest.raises(ValueError, match=r'at least 1, but got 0\. Give "sqrt"'):
        msg.GradientTape(every=0)


def inner_loop(y: tf.Tensor, w: Any, times: int = 4) -> tf.Tensor:
    return tf.while_loop(
        lambda j, _: j < times,
        lambda j, y: (j + 1, tf.tanh(y @ w) + tf.sin(y)),
        [0, y],
        maximum_iterations=times,
    )[1]


NESTS: dict[str, Callable[[tf.Tensor, Any], tf.Tensor]] = {
    "loop": inner_loop,
    "two loops": lambda y, w: tf.sin(inner_loop(inner_loop(y, w), w, 3)),
    "loop in a loop": lambda y, w: tf.while_loop(
        lambda j, _: j < 3,
        lambda j, y: (j + 1, 0.5 * inner_loop(y, w)),
        [0, y],
        maximum_iterations=3,
    )[1],
    "loop in a call": lambda y, w: tf.function(
        lambda y: inner_loop(y, w), autograph=False
    )(y),
    "loop in a branch": lambda y, w: tf.cond(
        tf.reduce_sum(y) > 0.0, lambda: inner_loop(y, w), lambda: tf.sin(y)
    ),
    "scan": lambda y, w: tf.scan(
        lambda a, e: tf.tanh(a @ w + e), tf.stack([y, 2.0 * y, y * y]), y
    )[-1],
}


@pytest.mark.parametrize("kind", NESTS)
@pytest.mark.parametrize("variable", [False, True])
def test_loops_with_loops_inside(kind: str, variable: bool) -> None:
    """A decoder whose cell runs a loop."""
    start = fixed(16, 16, seed=2) / 4.0

    def step(differentiate: Any, **keywords: Any) -> list[np.ndarray]:
        w = (tf.Variable if variable else tf.constant)(start)

        @tf.function(autograph=False)
        def function(x: tf.Tensor) -> Any:
            def outer(i: tf.Tensor, y: tf.Tensor) -> Any:
                return i + 1, tf.sin(NESTS[kind](y, w) @ w)

            _, y = tf.while_loop(lambda i, _: i < 7, outer, (0, x))
            return differentiate(tf.reduce_sum(tf.tanh(y) * y), [x, w], **keywords)

        return function(tf.constant(fixed(8, 16)))

    stock = step(tf.gradients)
    new = step(msg.gradients, checkpoints="memory", every=3)
    assert any(body.every == 3 for body in msg.last_plan().bodies)
    # Gradients of weights are summed in groups.
    assert_same_bits(stock[:1], new[:1])
    assert_close(stock, stock, new)
    with contextlib.suppress(msg.BudgetError):
        assert_close(stock, stock, step(msg.gradients, checkpoints="60%"))


def test_a_loop_inside_a_loop_is_not_split() -> None:
    def step(differentiate: Any, **keywords: Any) -> list[np.ndarray]:
        @tf.function(autograph=False)
        def function(x: tf.Tensor) -> Any:
            w = tf.constant(fixed(16, 16, seed=2) / 4.0)

            def outer(i: tf.Tensor, y: tf.Tensor) -> Any:
                return i + 1, inner_loop(y, w, 9)

            _, y = tf.while_loop(lambda i, _: i < 2, outer, (0, x))
            return differentiate(tf.reduce_sum(tf.tanh(y) * y), [x], **keywords)

        return function(tf.constant(fixed(8, 16)))

    stock = step(tf.gradients)
    assert_same_bits(stock, step(msg.gradients, checkpoints="memory", every=3))
    assert "it stands inside another loop" in msg.last_plan().summary()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "loop in a loop", "loop in a call"])
def test_second_order_through_loops_with_loops_inside(kind: str) -> None:
    """Tapes put each loop into a function, in which it stands inside a loop all the
    same: split there, it had no gradient."""

    def step(tape: Any, **keywords: Any) -> list[np.ndarray]:
        w = tf.constant(fixed(16, 16, seed=2) / 4.0)

        @tf.function(autograph=False)
        def function(x: tf.Tensor) -> Any:
            with tape(persistent=True, **keywords) as outside:
                outside.watch(x)
                with tape(**keywords) as inside:
                    inside.watch(x)
                    y = tf.while_loop(
                        lambda i, _: i < 5,
                        lambda i, y: (i + 1, tf.sin(NESTS[kind](y, w) @ w)),
                        (0, x),
                    )[1]
                    loss = tf.reduce_sum(tf.tanh(y) * y)
                loss = tf.reduce_sum(inside.gradient(loss, x) ** 2)
            return [outside.gradient(loss, x)]

        return function(tf.constant(fixed(8, 16)))

    stock = step(tf.GradientTape)
    assert_close(stock, stock, step(msg.GradientTape, checkpoints="memory", every=2))
