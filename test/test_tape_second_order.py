"""Gradients of the tapes' gradients, by tapes and by `tf.gradients`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tensorflow as tf
from tape_helpers import chain, check, found, variables
from tf_helpers import assert_close, assert_same_bits

import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

TAPES = {"stock": tf.GradientTape, "ours": msg.GradientTape}


def penalty(inner: Any, outer: Any, ws: Any, x: tf.Tensor) -> Any:
    with outer() as outside:
        with inner() as inside:
            inside.watch(x)
            energy = tf.reduce_sum(chain(x, ws))
        of_x = inside.gradient(energy, x)
        loss = tf.reduce_mean((tf.norm(of_x, axis=1) - 1) ** 2)
    return outside.gradient(loss, ws)


@cache
def of_tapes(inner: str, outer: str, jit: bool) -> list[Any]:
    """The gradients of the penalty; stock's are what all mixes have to give."""
    ws = variables()

    def build(pair: Any, x: tf.Tensor) -> Any:
        return penalty(TAPES[pair[0]], TAPES[pair[1]], ws, x)

    return found(build, (inner, outer), jit)


@pytest.mark.parametrize(
    ("inner", "outer"), [("ours", "stock"), ("stock", "ours"), ("ours", "ours")]
)
@pytest.mark.parametrize("jit", [False, True])
def test_second_order(inner: str, outer: str, jit: bool) -> None:
    stock = of_tapes("stock", "stock", jit)
    new = of_tapes(inner, outer, jit)
    assert msg.last_plan().recomputed
    if jit:
        assert_close(stock, stock, new)
    else:
        assert_same_bits(stock, new)


@pytest.mark.parametrize("outer", ["stock", "ours"])
def test_symbolic_gradients_through_a_tapes_gradient(outer: str) -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        read = [tf.identity(w) * 1.0 for w in ws]
        with tape() as recording:
            recording.watch(x)
            energy = tf.reduce_sum(chain(x, read))
        loss = tf.reduce_sum(recording.gradient(energy, x) ** 2)
        if tape is tf.GradientTape or outer == "stock":
            return tf.gradients(loss, [*ws, *read])
        return msg.gradients(loss, [*ws, *read], checkpoints="memory")

    stock = found(build, tf.GradientTape)
    assert_close(stock, stock, found(build, msg.GradientTape))


@pytest.mark.parametrize("where", ["function", "loop", "branch"])
def test_a_body_with_a_rewired_gradient_is_differentiated(where: str) -> None:
    """The body's edges are those of autodiff while the op around it is."""
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        def force(x: tf.Tensor) -> tf.Tensor:
            with tape() as recording:
                recording.watch(x)
                # Read here, where the copies bypass what is read.
                energy = tf.reduce_sum(chain(x, [w * 1.0 for w in ws]))
            return recording.gradient(energy, x)

        with tf.GradientTape() as outside:
            if where == "function":
                y = tf.function(force, autograph=False)(x)
            elif where == "branch":
                y = tf.cond(tf.reduce_sum(x) < 1e9, lambda: force(x), lambda: x)
            else:
                (y,) = tf.while_loop(
                    lambda _: True,
                    lambda y: (force(y),),
                    (x,),
                    maximum_iterations=3,
                )
            loss = tf.reduce_sum(y**2)
        return outside.gradient(loss, ws)

    check(build)


def test_forward_over_reverse() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            with tape() as recording:
                recording.watch(x)
                loss = tf.reduce_sum(chain(x, ws))
            of_x = recording.gradient(loss, x)
        return accumulator.jvp(of_x)

    check(build)


@pytest.mark.parametrize("pfor", [True, False])
@pytest.mark.parametrize("kind", ["jacobian", "batch_jacobian"])
def test_jacobians_are_stocks(kind: str, pfor: bool) -> None:
    ws = variables(3)

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape(persistent=True) as recording:
            recording.watch(x)
            y = chain(x, ws)
        take = getattr(recording, kind)
        first = take(y, x, experimental_use_pfor=pfor)
        return [first, recording.gradient(y, ws)]

    check(build)
