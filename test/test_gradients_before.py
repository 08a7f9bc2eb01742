"""A loop that has been differentiated already: gradients in any order, at any cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from saving_helpers import differentiate
from tf_helpers import assert_close, assert_same_bits, fixed

import mem_util
import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

WIDTH, TIMES = 256, 10
INPUT = fixed(1024, WIDTH, seed=1) / 8.0  # 1 MiB
WEIGHT = fixed(WIDTH, WIDTH, seed=2) / WIDTH**0.5


def looped(x: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda i, _: i < TIMES,
        lambda i, y: (i + 1, y + tf.nn.gelu(y @ w)),
        [0, x],
        maximum_iterations=TIMES,
    )[1]


def gelus(count: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """A traced function of so many loops."""
    weight = tf.Variable(WEIGHT)

    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> tf.Tensor:
        for _ in range(count):
            x = looped(tf.sin(x), weight)
        return x

    return function


def step_of(function: Callable[[tf.Tensor], tf.Tensor], mode: str, **keywords: Any):
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        loss = tf.reduce_mean(function(x) ** 2)
        if mode == "stock":
            return tf.gradients(loss, x)
        return msg.gradients(loss, x, checkpoints=mode, **keywords)

    return step


def taken(step: Any) -> tuple[list[Any], int]:
    """The gradients of a step, and its peak in bytes."""
    x = tf.constant(INPUT)
    return step(x), mem_util.measure(step, x).above_rest_bytes["/cpu:0"]


@pytest.mark.parametrize("keywords", [{}, {"every": "sqrt"}])
@pytest.mark.parametrize("count", [1, 2])
def test_after_stocks_gradient_of_the_same_function(
    count: int, keywords: dict[str, Any]
) -> None:
    function = gelus(count)
    stock, stock_bytes = taken(step_of(function, "stock"))
    new, new_bytes = taken(step_of(function, "memory", **keywords))
    assert_same_bits(stock, new)
    # The loops gather all for the gradient before. Zeros for that would double it.
    assert new_bytes <= 1.1 * stock_bytes
    plan = msg.last_plan()
    assert plan.predicted_peak_bytes >= 0.9 * new_bytes
    assert plan.predicted_peak_bytes <= plan.stock_peak_bytes
    assert "for an earlier gradient it gathers" in plan.summary()


def test_the_order_of_gradients_does_not_matter() -> None:
    function = gelus(1)
    alone = taken(step_of(gelus(1), "stock"))[0]
    first, first_bytes = taken(step_of(function, "memory"))
    second, _ = taken(step_of(function, "stock"))
    third, third_bytes = taken(step_of(function, "memory"))
    for found in (first, second, third):
        assert_same_bits(alone, found)
    assert third_bytes <= 1.1 * first_bytes
    assert "earlier gradient" not in msg.last_plan().summary()


def both(modes: tuple[str, str]) -> Any:
    """Two gradients through one loop, in one graph."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        y = looped(x, tf.constant(WEIGHT))
        losses = tf.reduce_mean(y**2), tf.reduce_mean(tf.sin(y))
        return [
            differentiate(mode, loss, x)[0]
            for mode, loss in zip(modes, losses, strict=True)
        ]

    return step


def test_two_gradients_through_one_loop() -> None:
    found = {
        (first, second): taken(both((first, second)))
        for first in ("stock", "memory")
        for second in ("stock", "memory")
    }
    stock, stock_bytes = found["stock", "stock"]
    for new, new_bytes in found.values():
        assert_close(stock, stock, new)
        assert new_bytes <= 1.1 * stock_bytes
    assert found["memory", "memory"][1] < 0.3 * stock_bytes


def test_a_persistent_tape_asked_twice() -> None:
    def found(tape: Any) -> tuple[list[Any], int]:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with tape(persistent=True) as recording:
                recording.watch(x)
                y = looped(x, tf.constant(WEIGHT))
                losses = tf.reduce_mean(y**2), tf.reduce_mean(tf.sin(y))
            return [recording.gradient(loss, x) for loss in losses]

        return taken(step)

    stock, stock_bytes = found(tf.GradientTape)
    new, new_bytes = found(msg.GradientTape)
    assert_same_bits(stock, new)
    assert new_bytes < 0.5 * stock_bytes


def test_second_order_through_a_loop_twice_differentiated() -> None:
    """The lists that the first gradient made have gradients of their own here."""

    def found(first: str, second: str) -> Any:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            y = looped(x, tf.constant(WEIGHT))
            (of_x,) = differentiate(first, tf.reduce_sum(y**2), x)
            return differentiate(second, tf.reduce_sum(of_x**2), x)

        return step(tf.constant(INPUT[:8]))

    stock = found("stock", "stock")
    assert_close(stock, stock, found("memory", "memory"))
    assert_close(stock, stock, found("stock", "memory"))
    assert_close(stock, stock, found("memory", "stock"))
