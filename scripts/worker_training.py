"""What each of several workers trains, by `fit` and by a loop of its own."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

__all__ = ["train"]


def make_model(layers: int, width: int) -> Any:
    """Dense layers with synchronised batch norm; the same weights at each call.

    Two things of Keras 3.15 fail on several workers, whatever takes the gradients, and
    are gone round here: before `fit` it averages a pair (x, y) of all workers, to build
    metrics, and after a step their results, along an axis that these do not have.
    """
    import keras
    import tensorflow as tf

    class Model(keras.Sequential):
        def _maybe_symbolic_build(self, *_: Any, **__: Any) -> None:
            one = np.zeros((1, width), np.float32)
            self._symbolic_build(data_batch=(one, one[:, :1]))

        def train_step(self, data: Any) -> dict[str, Any]:
            results = super().train_step(data)
            return {name: tf.reshape(value, [1]) for name, value in results.items()}

    keras.utils.set_random_seed(1)
    parts: list[Any] = [keras.Input([width])]
    for _ in range(layers):
        parts.append(keras.layers.Dense(width))
        parts.append(keras.layers.BatchNormalization(momentum=0.5, synchronized=True))
        parts.append(keras.layers.Activation("gelu"))
    return Model([*parts, keras.layers.Dense(1)])


def train(
    strategy: Any, way: str, arguments: argparse.Namespace, workers: int
) -> tuple[Any, int]:
    """A model after its steps, and the peak of a step above rest, in bytes."""
    import keras
    import tensorflow as tf

    import mem_util

    rows, width = arguments.batch * workers, arguments.width
    draw = np.random.default_rng(0).standard_normal
    x = draw((rows * arguments.steps, width)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(
        rows, drop_remainder=True
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    data = data.with_options(options)
    with strategy.scope():
        model = make_model(arguments.layers, width)
        optimizer = keras.optimizers.SGD(0.1)
        # Collectives of several workers cannot be compiled by XLA.
        model.compile(optimizer, "mse", jit_compile=False)
    if way == "fit":
        with strategy.scope():
            model._maybe_symbolic_build()
        model.fit(data.take(1), verbose=0, shuffle=False)  # traces and warms up
        taken = mem_util.measure(
            lambda: model.fit(data.skip(1), verbose=0, shuffle=False), replayable=False
        )
        return model, taken.above_rest_bytes["/cpu:0"]
    return model, loop(strategy, model, data, workers)


def loop(strategy: Any, model: Any, data: Any, workers: int) -> int:
    """Trains by a loop as people write it; returns the peak above rest, in bytes."""
    import tensorflow as tf

    import mem_util

    optimizer = model.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / workers
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        losses = strategy.run(replica, [x, y])
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    peaks = [
        mem_util.measure(step, *batch, replayable=False).above_rest_bytes["/cpu:0"]
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    return max(peaks[1:])  # the first one also holds what tracing left behind


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: train_two_workers.py imports it.")
