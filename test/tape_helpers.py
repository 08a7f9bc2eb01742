"""Comparing the library's tape with TensorFlow's, the same way in every test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_helpers import assert_close, assert_same_bits, fixed

import memory_saving_gradients as msg

__all__ = ["chain", "check", "found", "variables"]

Build = Callable[[Any, tf.Tensor], Any]


def chain(y: tf.Tensor, ws: Any) -> tf.Tensor:
    for w in ws:
        y = tf.tanh(tf.nn.softplus(y @ w) - 0.3 * y)
    return y


def variables(count: int = 6) -> list[tf.Variable]:
    return [tf.Variable(fixed(8, 8, seed=i)) for i in range(count)]


def found(build: Build, tape: Any, jit: bool = False) -> list[Any]:
    """What `build` returns in a `tf.function`, as a flat list."""
    return stepping(build, tape, jit)()


def stepping(build: Build, tape: Any, jit: bool = False) -> Callable[[], list[Any]]:
    """Runs `build` in a `tf.function`, traced at the first call."""

    @tf.function(autograph=False, jit_compile=jit)
    def step(x: tf.Tensor) -> Any:
        return build(tape, x)

    return lambda: tf.nest.flatten(step(tf.constant(fixed(4, 8))))


def check(build: Build, recomputes: bool = True, jit: bool = False) -> None:
    """Asserts that both tapes give the same bits (under XLA, the same numbers)."""
    of_stock = stepping(build, tf.GradientTape, jit)
    stock = of_stock()
    plans: list[msg.Plan | None] = []

    class Noting(msg.GradientTape):
        def gradient(self, *args: Any, **kwargs: Any) -> Any:
            result = super().gradient(*args, **kwargs)
            plans.append(self.plan)
            return result

    new = found(build, Noting, jit)
    assert any(plan and plan.recomputed for plan in plans) == recomputes
    if jit:
        assert_close(stock, of_stock(), new)
    else:
        assert_same_bits(stock, new)
