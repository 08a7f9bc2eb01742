"""Keras' recurrent layers that hold their state for few steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_recurrent import MODELS, STEPS, UNITS, X, Y, layers
from tf_helpers import assert_close

import memory_saving_gradients as msg


def trained(kind: str, jit: bool, checkpoints: Any, every: Any = None) -> list[Any]:
    """The weights after a few steps of `fit`."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((STEPS, UNITS)), *MODELS[kind](), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit)
    if checkpoints is not None:
        msg.memory_saving(model, checkpoints, every=every)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return [tf.constant(weight) for weight in model.get_weights()]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_fit(kind: str, jit: bool) -> None:
    stock = trained(kind, jit, None)
    new = trained(kind, jit, "memory", every=2)
    told = msg.last_plan().summary()
    assert_close(stock, trained(kind, jit, None), new)
    assert "state held each 2 iterations" in told


def peak(jit: bool, checkpoints: Any, every: Any = None, steps: int = 100) -> int:
    """Of a training step, in bytes over rest."""
    x = np.random.default_rng(0).standard_normal((512, steps, 256)).astype(np.float32)
    model = keras.Sequential(
        [keras.Input((steps, 256)), layers.LSTM(256), layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=jit)
    if checkpoints is not None:
        msg.memory_saving(model, checkpoints, every=every)
    y = np.zeros((512, 1), np.float32)
    model.train_on_batch(x, y)
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    model.train_on_batch(x, y)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


@pytest.mark.parametrize("jit", [False, True])
def test_the_peak_of_a_layer(jit: bool) -> None:
    """What is left are the inputs, by steps and as a list. As they come they are in
    both figures, and no part of what a loop holds."""
    fed = 512 * 100 * 256 * 4
    whole = peak(jit, "memory") - fed
    assert peak(jit, "memory", every=10) - fed <= 0.8 * whole


@pytest.mark.parametrize("jit", [False, True])
def test_a_budget_that_only_a_split_loop_keeps_to(jit: bool) -> None:
    stock = peak(jit, None)
    found = peak(jit, "30%")
    plan = msg.last_plan()
    assert any(body.every == 10 for body in plan.bodies)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    # The list of the outputs counts less in the plan than it takes.
    assert found <= (0.5 if jit else 0.4) * stock


def test_a_large_budget_leaves_loops_alone() -> None:
    peak(False, "90%", steps=20)
    assert not any(body.every for body in msg.last_plan().bodies)
