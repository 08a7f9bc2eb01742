"""`while_loop`: TensorFlow's loop, with the state of few iterations held."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from saving_helpers import recording
from tf_helpers import assert_close, assert_same_bits, fixed

import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

INPUT = fixed(4, 6, seed=3)


def gradients(
    loop: Any, checkpoints: Any, steps: int = 10, jit: bool = False, **keywords: Any
) -> list[Any]:
    """The result of a loop, and its gradients."""
    w = tf.Variable(fixed(6, 6, seed=1) * 0.3)

    @tf.function(jit_compile=jit, autograph=False)
    def step(x: tf.Tensor) -> Any:
        with recording(checkpoints) as tape:
            tape.watch(x)
            _, y = loop(
                lambda i, _: i < steps,
                lambda i, y: (i + 1, tf.tanh(tf.nn.gelu(y @ w)) + 0.1 * y),
                [0, x],
                **keywords,
            )
            loss = tf.reduce_sum(y * y)
        return [y, *tape.gradient(loss, [x, w])]

    return step(tf.constant(INPUT))


@pytest.mark.parametrize("keywords", [{}, {"maximum_iterations": 10}])
@pytest.mark.parametrize("every", ["sqrt", 1, 3, 10, 50])
def test_is_what_the_loop_of_tensorflow_is(every: Any, keywords: Any) -> None:
    stock = gradients(tf.while_loop, "stock", **keywords)
    new = gradients(msg.while_loop, "memory", every=every, **keywords)
    assert_close(stock, stock, new)
    # The forward pass is the very same.
    assert_same_bits(stock[:1], new[:1])


@pytest.mark.parametrize("checkpoints", ["memory", "speed"])
def test_it_is_the_loop_of_tensorflow_to_stock(checkpoints: str) -> None:
    stock = gradients(tf.while_loop, "stock", maximum_iterations=10)
    assert_same_bits(stock, gradients(msg.while_loop, "stock", maximum_iterations=10))
    new = gradients(msg.while_loop, checkpoints, maximum_iterations=10)
    assert_close(stock, stock, new)


@pytest.mark.parametrize(("steps", "most"), [(0, 10), (1, 10), (10, 7), (10, 0)])
def test_ends_where_it_should(steps: int, most: int) -> None:
    stock = gradients(tf.while_loop, "stock", steps, maximum_iterations=most)
    new = gradients(msg.while_loop, "memory", steps, maximum_iterations=most)
    assert_close(stock, stock, new)


def test_under_xla() -> None:
    keywords = {"jit": True, "maximum_iterations": 10}
    stock = gradients(tf.while_loop, "stock", **keywords)
    again = gradients(tf.while_loop, "stock", **keywords)
    assert_close(stock, again, gradients(msg.while_loop, "memory", **keywords))


def test_a_bound_known_only_at_run_time() -> None:
    def found(loop: Any) -> Any:
        @tf.function(autograph=False)
        def step(x: tf.Tensor, most: tf.Tensor) -> Any:
            with msg.GradientTape() as tape:
                tape.watch(x)
                (y,) = loop(
                    lambda y: True, lambda y: tf.sin(y), (x,), maximum_iterations=most
                )
            return [tape.gradient(y, x)]

        return step(tf.constant(INPUT), tf.constant(37))

    assert_same_bits(found(tf.while_loop), found(msg.while_loop))


def test_arrays_and_structures() -> None:
    elements = tf.constant(fixed(9, 4, 6, seed=5))

    def found(loop: Any) -> Any:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with msg.GradientTape() as tape:
                tape.watch(x)

                def body(i: tf.Tensor, state: Any, array: Any) -> Any:
                    h = tf.tanh(state["h"] * state["c"] + elements[i])
                    state = {"h": h, "c": tf.sin(state["c"])}
                    return i + 1, state, array.write(i, h)

                array = tf.TensorArray(tf.float32, 9, element_shape=[4, 6])
                _, state, array = loop(
                    lambda i, *_: i < 9,
                    body,
                    (0, {"h": x, "c": x}, array),
                    maximum_iterations=9,
                )
                loss = tf.reduce_sum(array.stack() ** 2) + tf.reduce_sum(state["c"])
            return [tape.gradient(loss, x)]

        return step(tf.constant(INPUT))

    assert_same_bits(found(tf.while_loop), found(msg.while_loop))


def test_a_variable_that_the_body_reads_and_changes() -> None:
    def found(loop: Any) -> Any:
        v = tf.Variable(fixed(4, 6, seed=8))

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            def body(i: tf.Tensor, y: tf.Tensor) -> Any:
                y = tf.sin(y * v)
                v.assign(v * 0.9)
                return i + 1, y

            with msg.GradientTape() as tape:
                tape.watch(x)
                y = loop(lambda i, _: i < 5, body, [0, x])[1]
            return [tape.gradient(y, x), v.read_value()]

        return step(tf.constant(INPUT))

    assert_same_bits(found(tf.while_loop), found(msg.while_loop))


def test_what_has_a_side_effect_has_it_once() -> None:
    bodies, conditions = tf.Variable(0), tf.Variable(0)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        def goes_on(i: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([conditions.assign_add(1)]):
                return i < 5

        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.control_dependencies([bodies.assign_add(1)]):
                return i + 1, tf.sin(tf.sin(y))

        with msg.GradientTape() as tape:
            tape.watch(x)
            y = msg.while_loop(goes_on, body, [0, x], every=2)[1]
        return tape.gradient(y, x)

    step(tf.constant(INPUT))
    assert (bodies.numpy(), conditions.numpy()) == (5, 6)


def test_weights_that_change_after_the_loop() -> None:
    def found(loop: Any) -> Any:
        w = tf.Variable(fixed(6, 6, seed=1))

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with msg.GradientTape() as tape:
                tape.watch(x)
                y = loop(
                    lambda i, _: i < 6,
                    lambda i, y: (i + 1, tf.tanh(y @ w)),
                    [0, x],
                    maximum_iterations=6,
                )[1]
            w.assign(w * 0.0)
            return [tape.gradient(y, x)]

        return step(tf.constant(INPUT))

    assert_same_bits(found(tf.while_loop), found(msg.while_loop))


def test_eagerly_and_without_gradients() -> None:
    keywords = {"cond": lambda i, _: i < 5, "body": lambda i, y: (i + 1, tf.sin(y))}
    stock = tf.while_loop(loop_vars=[0, tf.constant(INPUT)], **keywords)[1]
    new = msg.while_loop(loop_vars=[0, tf.constant(INPUT)], **keywords)[1]
    assert_same_bits([stock], [new])
    with tf.GradientTape() as tape:
        x = tf.constant(INPUT)
        tape.watch(x)
        y = msg.while_loop(loop_vars=[0, x], back_prop=False, **keywords)[1]
    assert tape.gradient(y, x) is None


def test_every_is_a_positive_int() -> None:
    def loop(every: Any) -> None:
        msg.while_loop(lambda i: i < 5, lambda i: i + 1, [0], every=every)

    with pytest.raises(TypeError, match=r"`every` must be a number .* but got 2\.5"):
        loop(2.5)
    with pytest.raises(TypeError, match="but got True"):
        loop(True)
    with pytest.raises(ValueError, match="`every` must be at least 1, but got 0"):
        loop(0)


def test_state_is_held_for_few_iterations() -> None:
    """4 √T states or so, and what one iteration and its gradient need."""
    x = tf.constant(fixed(128, 1024))

    def peak(loop: Any, checkpoints: str) -> int:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            tape = (
                tf.GradientTape()
                if checkpoints == "stock"
                else msg.GradientTape(checkpoints=checkpoints)
            )
            with tape:
                tape.watch(x)
                y = loop(
                    lambda i, _: i < 100,
                    lambda i, y: (i + 1, tf.sin(tf.sin(y))),
                    [0, x],
                    maximum_iterations=100,
                )[1]
            return tape.gradient(y, x)

        step(x)
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        step(x)
        return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before

    state = x.shape.num_elements() * 4
    stock = peak(tf.while_loop, "stock")
    assert stock >= 200 * state
    assert peak(tf.while_loop, "memory") <= 110 * state
    assert peak(msg.while_loop, "memory") <= 30 * state
