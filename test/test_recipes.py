"""Ways in which people train: a few steps of each give stock's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tape_helpers import chain, variables
from tf_helpers import assert_close, assert_same_bits, fixed

import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

layers = keras.layers

ROWS, WIDTH = 8, 8


def dense(count: int = 5) -> Any:
    hidden = [layers.Dense(WIDTH, "softplus", name=f"d{i}") for i in range(count)]
    return keras.Sequential([keras.Input([WIDTH]), *hidden])


def compiled(optimizer: Any, jit: bool = False, model: Any = None) -> Any:
    model = dense() if model is None else model
    model.compile(optimizer, "mse", jit_compile=jit)
    return model


def fit(model: Any, rows: int = 2 * ROWS, **keywords: Any) -> None:
    x, y = fixed(rows, WIDTH), fixed(rows, WIDTH, seed=1)
    options = {"batch_size": ROWS, "verbose": 0, "shuffle": False, **keywords}
    model.fit(x, y, **options)


def check(
    make: Callable[[], Any], train: Callable[[Any], None] = fit, close: bool = False
) -> msg.Plan:
    """Asserts that a model trains to stock's weights, optimizer included."""

    def trained(save: bool) -> list[Any]:
        keras.utils.set_random_seed(1)
        model = make()
        if save:
            msg.memory_saving(model)
        train(model)
        state = [*model.variables, *model.optimizer.variables]
        return [np.asarray(v.numpy()) for v in state]

    before = msg.last_plan()
    stock, new = trained(False), trained(True)
    plan = msg.last_plan()
    assert plan is not before
    assert plan.recomputed, plan.summary()
    if close:
        assert_close(stock, stock, new)
    else:
        assert_same_bits(stock, new)
    return plan


# -- optimizers ------------------------------------------------------------------------

optimizers = keras.optimizers

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optimizers.Adam(0.01),
    "clipped by the global norm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipped by each norm": lambda: optimizers.SGD(0.1, clipnorm=0.1),
    "accumulating": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "moving average": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    check(
        lambda: compiled(OPTIMIZERS[name]()),
        lambda model: fit(model, rows=4 * ROWS),
    )


@pytest.mark.slow
def test_all_at_once_under_xla() -> None:
    def optimizer() -> Any:
        return optimizers.Adam(
            0.01, global_clipnorm=0.1, gradient_accumulation_steps=2, use_ema=True
        )

    check(
        lambda: compiled(optimizer(), jit=True),
        lambda model: fit(model, rows=4 * ROWS),
        close=True,
    )


@pytest.mark.parametrize("way", ["unrolled", "loop"])
def test_accumulation_by_hand(way: str) -> None:
    """Four micro batches in one step, their gradients clipped together."""

    def trained(tape: Any) -> list[Any]:
        ws = variables()

        def gradients(x: tf.Tensor) -> list[tf.Tensor]:
            with tape() as recording:
                loss = tf.reduce_mean(chain(x, ws) ** 2)
            return recording.gradient(loss, ws)

        @tf.function(autograph=False)
        def step(batch: tf.Tensor) -> None:
            parts = tf.split(batch, 4)
            if way == "unrolled":
                sums = gradients(parts[0])
                for part in parts[1:]:
                    more = gradients(part)
                    sums = [a + b for a, b in zip(sums, more, strict=True)]
            else:
                stacked = tf.stack(parts)

                def add(number: tf.Tensor, *sums: tf.Tensor) -> Any:
                    found = gradients(stacked[number])
                    added = [a + b for a, b in zip(sums, found, strict=True)]
                    return [number + 1, *added]

                zeros = [tf.zeros_like(w) for w in ws]
                _, *sums = tf.while_loop(
                    lambda number, *_: number < 4, add, [tf.constant(0), *zeros]
                )
            clipped, _ = tf.clip_by_global_norm(sums, 0.1)
            for w, g in zip(ws, clipped, strict=True):
                w.assign_sub(g)

        for number in range(2):
            step(tf.constant(fixed(4 * ROWS, WIDTH, seed=number)))
        return [w.numpy() for w in ws]

    before = msg.last_plan()
    stock, new = trained(tf.GradientTape), trained(msg.GradientTape)
    assert msg.last_plan() is not before
    assert msg.last_plan().recomputed
    assert_same_bits(stock, new)


# -- what is trained -------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [slice(0, 1), slice(1, None), slice(0, 3)])
def test_frozen_layers(frozen: slice) -> None:
    def make() -> Any:
        model = dense(6)
        for layer in model.layers[frozen]:
            layer.trainable = False
        return compiled("sgd", model=model)

    check(make)


def test_a_frozen_backbone_with_a_head() -> None:
    def make() -> Any:
        backbone = dense(4)
        backbone.trainable = False
        head = [layers.Dense(WIDTH, "softplus") for _ in range(5)]
        return compiled(
            "adam", model=keras.Sequential([keras.Input([WIDTH]), backbone, *head])
        )

    check(make)


@pytest.mark.parametrize("jit", [False, True])
def test_adapters_of_low_rank(jit: bool) -> None:
    def make() -> Any:
        model = dense()
        for layer in model.layers:
            layer.enable_lora(2)
        assert len(model.trainable_variables) == 3 * len(model.layers)
        return compiled("sgd", jit, model)

    check(make, close=jit)


# -- data ------------------------------------------------------------------------------


def pipeline(rows: int, drop_remainder: bool = False) -> tf.data.Dataset:
    x, y = fixed(rows, WIDTH), fixed(rows, WIDTH, seed=1)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(rows, seed=1).batch(ROWS, drop_remainder=drop_remainder)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_pipelines_and_a_last_partial_batch(drop_remainder: bool) -> None:
    def train(model: Any) -> None:
        model.fit(pipeline(2 * ROWS + 3, drop_remainder), verbose=0, shuffle=False)

    plan = check(lambda: compiled("sgd"), train)
    # Where batches may be of any size, the plan is for an assumed one.
    assert bool(plan.reading.graph.assumed) != drop_remainder


def test_class_weights() -> None:
    def make() -> Any:
        model = dense()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
        return model

    def train(model: Any) -> None:
        labels = np.arange(2 * ROWS) % 3
        model.fit(
            fixed(2 * ROWS, WIDTH),
            labels,
            class_weight={0: 1.0, 1: 5.0, 2: 0.1},
            batch_size=ROWS,
            verbose=0,
        )

    check(make, train)


def test_lengths_that_change_from_batch_to_batch() -> None:
    def make() -> Any:
        x = keras.Input([None], dtype="int32")
        y = layers.Embedding(20, WIDTH)(x)
        for _ in range(3):
            y = layers.Dense(WIDTH, "gelu")(layers.Conv1D(WIDTH, 3, padding="same")(y))
        y = layers.Dense(WIDTH)(layers.GlobalMaxPooling1D()(y))
        return compiled("sgd", model=keras.Model(x, y))

    def train(model: Any) -> None:
        for number, length in enumerate((5, 9, 5, 3)):
            draw = np.random.default_rng(number)
            x = draw.integers(0, 20, [ROWS, length]).astype(np.int32)
            model.train_on_batch(x, fixed(ROWS, WIDTH, seed=number))

    check(make, train)


def test_ragged_batches() -> None:
    def trained(tape: Any) -> list[Any]:
        table = tf.Variable(fixed(20, WIDTH))
        ws = variables()

        @tf.function(
            autograph=False,
            input_signature=[tf.RaggedTensorSpec([None, None], tf.int32)],
        )
        def step(ids: tf.RaggedTensor) -> Any:
            with tape() as recording:
                rows = tf.gather(table, ids.flat_values)
                values = ids.with_values(chain(rows, ws))
                means = tf.reduce_mean(values, axis=1)
                loss = tf.reduce_sum(tf.abs(means))
            return recording.gradient(loss, [table, *ws])

        found: list[Any] = []
        for rows in ([[1, 2, 3], [4]], [[5], [6, 7], [8, 9, 10, 11]]):
            result = step(tf.ragged.constant(rows, dtype=tf.int32))
            assert isinstance(result[0], tf.IndexedSlices)
            found += result
        return found

    stock, new = trained(tf.GradientTape), trained(msg.GradientTape)
    assert msg.last_plan().recomputed
    assert_same_bits(stock, new)
