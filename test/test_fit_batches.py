"""The size of a batch in `fit`: where it is found out, and where it is assumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import fixed

import memory_saving_gradients as msg
from mem_util.allocator import read_counters
from memory_saving_gradients import tf_internals_data
from memory_saving_gradients.keras_batch import batch_size_of
from memory_saving_gradients.keras_line import _advice

WIDTH = 64
VERSION = tuple(map(int, tf.__version__.split(".")[:2]))

Dataset = tf.data.Dataset


def rows(count: int = 40) -> Any:
    return Dataset.from_tensor_slices(fixed(count, 8))


def dense(depth: int = 10, width: int = WIDTH) -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, "gelu") for _ in range(depth)]
    model = keras.Sequential([keras.Input([width]), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def batches(size: int, count: int = 2, width: int = WIDTH) -> Any:
    data = fixed(size * count, width)
    return Dataset.from_tensor_slices((data, data)).batch(size)


def unknowable(size: int, count: int = 2, width: int = WIDTH) -> Any:
    """Batches of which nobody can know beforehand how large they are."""

    def generated() -> Iterator[Any]:
        for _ in range(count):
            yield fixed(size, width), fixed(size, width)

    spec = tf.TensorSpec([None, width])
    made = Dataset.from_generator(generated, output_signature=(spec, spec))
    return made.apply(tf.data.experimental.assert_cardinality(count))


# -- what a pipeline says --------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        lambda: rows().batch(16),
        lambda: rows().batch(16, num_parallel_calls=2),
        lambda: rows().batch(16, drop_remainder=True),
        lambda: rows().padded_batch(16),
        lambda: rows().ragged_batch(16),
        lambda: rows().batch(16).map(lambda x: (x, 2 * x)),
        lambda: rows().batch(16).map(lambda x: x, num_parallel_calls=2).prefetch(2),
        lambda: rows().batch(16).shuffle(4, seed=1).repeat(3).take(2).skip(1),
        lambda: rows().batch(16).cache().with_options(tf.data.Options()),
        lambda: rows().batch(16).filter(lambda x: True).shard(2, 0),
        lambda: rows().batch(16).apply(tf.data.experimental.assert_cardinality(3)),
        lambda: Dataset.zip((rows().batch(16), rows().batch(16))),
        lambda: rows().batch(16).concatenate(rows().batch(16)),
        lambda: rows().batch(5).unbatch().batch(16),
        lambda: rows().batch(5).batch(16),
        lambda: Dataset.sample_from_datasets([rows().batch(16), rows().batch(16)]),
    ],
)
def test_a_pipeline_says_how_large_its_batches_are(made: Callable[[], Any]) -> None:
    assert batch_size_of({"x": made()}) == 16


@pytest.mark.parametrize(
    "made",
    [
        rows,
        lambda: rows().batch(16).unbatch(),
        lambda: rows().batch(16).map(tf.shape).flat_map(Dataset.from_tensor_slices),
        lambda: Dataset.range(9).batch(tf.random.uniform([], 2, 5, tf.int64)).take(0),
        lambda: unknowable(16),
    ],
)
def test_where_nothing_says_it_nothing_is_guessed(made: Callable[[], Any]) -> None:
    with tf.Graph().as_default():  # where a size need not be a number yet
        assert batch_size_of({"x": made()}) is None


def test_what_is_unknown_beside_a_known_batch_is_no_batch() -> None:
    lengths = Dataset.range(1, 9).map(lambda n: tf.zeros([n]))
    assert batch_size_of({"x": lengths.padded_batch(4, drop_remainder=True)}) is None
    assert batch_size_of({"x": lengths.padded_batch(4)}) == 4


def test_nothing_is_drawn_from_a_dataset() -> None:
    drawn: list[int] = []

    def generated() -> Iterator[Any]:
        drawn.append(1)
        yield fixed(1, 8)[0]

    made = Dataset.from_generator(generated, output_signature=tf.TensorSpec([8]))
    assert batch_size_of({"x": made.batch(4).map(lambda x: x)}) == 4
    assert not drawn


def test_a_tensorflow_that_tells_nothing_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(tf_internals_data._CLASSES) == 3
    monkeypatch.setattr(tf_internals_data, "_CLASSES", [])
    assert batch_size_of({"x": rows().batch(16).take(1)}) is None


# -- budgets ---------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["50%", "memory"])
def test_fit_plans_for_the_batches_of_a_dataset(budget: str) -> None:
    model = msg.memory_saving(dense(), budget)
    model.fit(batches(512), verbose=0, shuffle=False)
    plan = msg.last_plan()
    assert plan is not None
    assert plan.reading.unknown_dim == 512
    known = msg.plan(dense(), checkpoints=budget, batch_size=512)
    # A graph of unknown sizes has ops of its own: with TensorFlow 2.16 another plan.
    tolerance = 0.0 if VERSION >= (2, 20) else 0.02
    assert plan.predicted_peak_bytes == pytest.approx(
        known.predicted_peak_bytes, rel=tolerance, abs=0
    )
    assert plan.recomputed and plan.predicted_peak_bytes < plan.stock_peak_bytes * 0.6


def test_a_budget_in_bytes_is_kept_for_the_batches_of_a_dataset() -> None:
    model = msg.memory_saving(dense(width=256), "12MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a budget that was not kept
        model.fit(batches(1024, width=256), verbose=0, shuffle=False)
    plan = msg.last_plan()
    assert plan is not None
    assert plan.predicted_peak_bytes <= 12 * 2**20 < plan.stock_peak_bytes


def test_a_share_is_kept_where_nothing_says_how_large_batches_are() -> None:
    model = msg.memory_saving(dense(), "50%")
    model.fit(unknowable(512), verbose=0, shuffle=False)
    plan = msg.last_plan()
    assert plan is not None
    assert plan.reading.unknown_dim == 1024  # gradients are half of it with 64
    assert plan.predicted_peak_bytes <= plan.stock_peak_bytes // 2


def test_an_error_says_which_size_was_assumed() -> None:
    assumed = r"unknown dimensions of 64, as was assumed.*`unknown_dim=`"
    with pytest.raises(msg.BudgetError, match=assumed):
        msg.memory_saving(dense(), "100KiB").fit(
            unknowable(8), verbose=0, shuffle=False
        )
    with pytest.raises(msg.BudgetError) as known:
        msg.plan(dense(), checkpoints="100KiB", batch_size=64)
    assert "assumed" not in str(known.value)


def test_what_is_left_to_stock_for_an_assumed_size_says_so() -> None:
    model = msg.memory_saving(dense(), "100MiB")
    model.fit(unknowable(8), verbose=0, shuffle=False)
    plan = msg.last_plan()
    assert plan is not None and plan.is_stock
    assert "within the budget if unknown dimensions are 64, as was assumed" in (
        plan.reason
    )
    assert "`unknown_dim=`" in plan.reason


@pytest.mark.parametrize("count", [1, 2])
def test_fit_warns_of_a_step_that_took_more_than_its_budget(count: int) -> None:
    model = dense(width=256)
    model.compile("adam", "mse", jit_compile=False)
    msg.memory_saving(model, "8MiB")
    read_counters(reset=True)  # else an earlier peak would hide that of the first step
    with pytest.warns(UserWarning, match="more than its budget of 8.00 MiB") as caught:
        model.fit(unknowable(2048, count, width=256), verbose=0, shuffle=False)
    (told,) = [str(w.message) for w in caught if "its budget" in str(w.message)]
    assert f"a step of {model.name!r} took" in told
    assert "Batches of 64 were assumed" in told and "`unknown_dim=`" in told
    plan = msg.last_plan()
    assert plan is not None
    assert plan.is_stock


def test_what_is_beyond_a_budget_has_two_causes() -> None:
    model = dense()
    plan = msg.plan(model, checkpoints="50%", batch_size=64)
    assert "larger) and what the optimizer needs" in _advice(plan)


def test_arrays_say_how_large_a_batch_is() -> None:
    x = np.zeros([40, 8])
    assert batch_size_of({"x": x}) == 32
    assert batch_size_of({"x": x[:8]}) == 8
    assert batch_size_of({"x": [x, x], "batch_size": 16}) == 16
    assert batch_size_of({}) is None
