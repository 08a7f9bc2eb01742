"""Keras' recurrent layers: a step of training is stock's, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import assert_same_bits, fixed

import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

STEPS, UNITS = 6, 4
layers = keras.layers

MODELS: dict[str, Callable[[], list[Any]]] = {
    "lstm": lambda: [
        layers.LSTM(UNITS, return_sequences=True),
        layers.LSTM(UNITS),
    ],
    "gru": lambda: [layers.GRU(UNITS, return_sequences=True), layers.GRU(UNITS)],
    "cells": lambda: [
        layers.RNN([layers.LSTMCell(UNITS), layers.SimpleRNNCell(UNITS)])
    ],
    "bidirectional": lambda: [layers.Bidirectional(layers.LSTM(UNITS))],
    "dropout": lambda: [
        layers.GRU(UNITS, dropout=0.2, recurrent_dropout=0.2, seed=1),
    ],
    "masked": lambda: [layers.Masking(0.0), layers.LSTM(UNITS)],
    "convolutional": lambda: [
        layers.Reshape((STEPS, 2, UNITS // 2, 1)),
        layers.ConvLSTM2D(2, 2, padding="same"),
        layers.Flatten(),
    ],
}

X = fixed(8, STEPS, UNITS, seed=1)
X[:2, 4:] = 0.0  # ends of sequences, for those who mask
Y = fixed(8, 1, seed=2)


def trained(kind: str, checkpoints: str | None, **keywords: Any) -> list[Any]:
    """The weights after some steps of `fit`."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((STEPS, UNITS)), *MODELS[kind](), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False, **keywords)
    if checkpoints is not None:
        msg.memory_saving(model, checkpoints)
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [tf.constant(weight) for weight in model.get_weights()]


@pytest.mark.parametrize("kind", MODELS)
def test_fit(kind: str) -> None:
    stock, new = trained(kind, None), trained(kind, "memory")
    assert_same_bits(stock, new)
    bodies = msg.last_plan().bodies
    assert bodies and not msg.last_plan().is_stock
    assert all(body.stock_runs >= STEPS for body in bodies if "while" in body.name)


def test_steps_per_execution() -> None:
    stock = trained("lstm", None, steps_per_execution=2)
    assert_same_bits(stock, trained("lstm", "memory", steps_per_execution=2))


def test_layers_in_a_step_of_ones_own() -> None:
    model = [layers.LSTM(UNITS, return_sequences=True), layers.GRU(UNITS)]

    def gradients(tape: Any) -> Any:
        @tf.function
        def step(x: tf.Tensor) -> Any:
            with tape() as recording:
                y = x
                for layer in model:
                    y = layer(y)
                loss = tf.reduce_sum(y * y)
            weights = [v.value for layer in model for v in layer.trainable_variables]
            return recording.gradient(loss, weights)

        return step(tf.constant(X))

    gradients(tf.GradientTape)  # builds the layers
    assert_same_bits(gradients(tf.GradientTape), gradients(msg.GradientTape))


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_the_peak_of_two_layers(jit: bool) -> None:
    """Half of stock's at the most: the states of two layers and what goes around."""
    x = tf.random.stateless_normal([256, 100, 256], [0, 1])

    def peak(checkpoints: str | None) -> int:
        model = keras.Sequential(
            [
                keras.Input((100, 256)),
                layers.LSTM(256, return_sequences=True),
                layers.LSTM(256),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse", jit_compile=jit)
        if checkpoints is not None:
            msg.memory_saving(model, checkpoints)
        y = np.zeros((256, 1), np.float32)
        model.train_on_batch(x, y)
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        model.train_on_batch(x, y)
        return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before

    assert peak("memory") <= 0.5 * peak(None)
