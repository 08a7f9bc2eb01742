"""Plans, comparisons and largest batches without training: right, and without trace."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import dense_layers, weights_of

import memory_saving_gradients as msg
from memory_saving_gradients.input_specs import filled, specs_of_model

WIDTH, LAYERS, BATCH = 32, 8, 128
MIB = 2**20


def network(package: Any = keras, **compiled: Any) -> Any:
    package.utils.set_random_seed(0)
    inputs = x = package.Input([WIDTH])
    for number in range(LAYERS):
        x = package.layers.Dense(WIDTH, "gelu", name=f"dense{number}")(x)
    model = package.Model(inputs, package.layers.Dropout(0.1)(x))
    model.compile("adam", "mse", **{"jit_compile": False, **compiled})
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return network()


@pytest.fixture(scope="module")
def weights() -> list[tf.Variable]:
    return weights_of(LAYERS, WIDTH)


@pytest.fixture(scope="module")
def loss(weights: list[tf.Variable]) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda x: tf.reduce_sum(dense_layers(x, weights))


SPEC = tf.TensorSpec([BATCH, WIDTH])
OPEN = tf.TensorSpec([None, WIDTH])


# -- plan ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoints", "jit_compile"), [("memory", False), ("70%", True)]
)
def test_the_plan_of_a_model_is_that_of_its_training(
    checkpoints: str, jit_compile: bool
):
    trained = network(jit_compile=jit_compile)
    dry = msg.plan(trained, checkpoints=checkpoints, batch_size=BATCH)
    assert dry.recomputed and dry.xla == jit_compile

    @tf.function(autograph=False, jit_compile=jit_compile)
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return msg.memory_saving(trained, checkpoints).train_step((x, y))

    step.get_concrete_function(SPEC, SPEC)
    real = msg.last_plan()
    assert real is not None
    assert real.predicted_peak_bytes == dry.predicted_peak_bytes
    assert real.stock_peak_bytes == dry.stock_peak_bytes
    assert len(real.kept) == len(dry.kept)


def planned_in_training(
    loss: Callable[..., tf.Tensor], weights: list[tf.Variable]
) -> msg.Plan:
    """What is planned where the gradient is really taken."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with msg.GradientTape() as tape:
            y = loss(x)
        return tape.gradient(y, weights)

    step.get_concrete_function(SPEC)
    return msg.last_plan()


def test_the_plan_of_a_function_is_that_of_its_gradient(
    loss: Callable[..., tf.Tensor], weights: list[tf.Variable]
):
    dry = msg.plan(loss, SPEC)
    assert planned_in_training(loss, weights).kept == dry.kept


def test_what_loops_spare_inside_is_in_the_plan_as_in_training(
    weights: list[tf.Variable],
):
    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(
            tf.while_loop(
                lambda n, _: n < 6,
                lambda n, y: (n + 1, tf.tanh(tf.nn.softplus(y @ weights[0]))),
                [0, dense_layers(x, weights)],
                maximum_iterations=6,
            )[1]
        )

    dry = msg.plan(loss, SPEC)
    real = planned_in_training(loss, weights)
    assert dry.stock_peak_bytes == real.stock_peak_bytes
    assert dry.predicted_peak_bytes == real.predicted_peak_bytes
    assert dry.extra_seconds == pytest.approx(real.extra_seconds)


def test_a_model_is_as_it_was():
    untouched = network()
    before = untouched.get_weights()
    remembered = msg.last_plan()
    gc.collect()  # models of other tests, lest they go in between
    with msg.enabled("speed"):
        counted = msg.status()
        msg.plan(untouched, batch_size=BATCH)
        assert msg.status() == counted
    assert msg.last_plan() is remembered
    assert untouched.train_function is None
    assert not untouched.optimizer.built
    for one, other in zip(before, untouched.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_setting_of_the_model_does_not_count(model: Any):
    alone = msg.plan(model, batch_size=BATCH)
    msg.memory_saving(model, "speed")
    assert msg.plan(model, batch_size=BATCH).kept == alone.kept
    msg.memory_saving(model, None)


def test_layers_are_checkpoints_of_a_model(model: Any):
    plan = msg.plan(model, checkpoints=re.compile("dense[36]$"))
    assert [name.split("/")[1] for name in plan.kept] == ["dense3_1", "dense6_1"]


def test_keras_2_is_the_same():
    plan = msg.plan(network(pytest.importorskip("tf_keras")), batch_size=BATCH)
    assert plan.predicted_peak_bytes < plan.stock_peak_bytes


def test_a_function_of_tensorflow_is_looked_into(loss: Callable[..., tf.Tensor]):
    called = tf.function(loss, input_signature=[SPEC])
    assert msg.plan(called).kept == msg.plan(loss, np.ones(SPEC.shape, "f")).kept


def test_autograph_is_for_functions(weights: list[tf.Variable]):
    def loss(x: tf.Tensor) -> tf.Tensor:
        y = dense_layers(x, weights)
        if tf.reduce_sum(y) > 0:
            y = -y
        return tf.reduce_sum(y)

    assert msg.plan(loss, SPEC).recomputed


def test_a_budget_too_small_names_what_would_do(model: Any):
    with pytest.raises(msg.BudgetError) as caught:
        msg.plan(model, checkpoints="1%", batch_size=BATCH)
    least = caught.value.least_bytes
    within = msg.plan(model, checkpoints=msg.Budget(least), batch_size=BATCH)
    assert within.predicted_peak_bytes <= least


def test_with_all_of_stocks_memory_nothing_at_all_is_recomputed(model: Any):
    # Of dropout there is a cast that plans would redo, for next to nothing.
    assert msg.plan(model, checkpoints="100%", batch_size=BATCH).recomputed == ()


@pytest.mark.parametrize(
    ("what", "specs", "error", "told"),
    [
        (3, [], TypeError, "a function that returns a loss, or a Keras model"),
        (lambda x: x, [OPEN], msg.MemorySavingGradientsError, "trainable variables"),
        (lambda x: x, ["x"], TypeError, "a shape and a dtype"),
        (keras.Sequential(), [], msg.MemorySavingGradientsError, r"model\.compile"),
    ],
)
def test_what_cannot_be_planned(what: Any, specs: list, error: type, told: str):
    with pytest.raises(error, match=told):
        msg.plan(what, *specs)


# -- inputs ----------------------------------------------------------------------------


def test_targets_are_as_losses_want_them():
    inputs = keras.Input([8])
    outputs = [keras.layers.Dense(5, name=name)(inputs) for name in "ab"]
    for losses in (
        ["mse", "sparse_categorical_crossentropy"],
        {"b": keras.losses.SparseCategoricalCrossentropy(), "a": "mse"},
    ):
        model = keras.Model(inputs, outputs)
        model.compile("sgd", losses, jit_compile=False)
        x, y = filled(specs_of_model(model, "plan"), 4, "plan")
        assert (x.shape, [one.shape for one in y]) == ([4, 8], [[4, 5], [4]])
        assert [one.dtype for one in y] == [tf.float32, tf.int32]
        assert msg.plan(model, batch_size=4).stock_peak_bytes > 0


@pytest.mark.parametrize("size", [0, 1.5, True])
def test_what_is_no_size_of_a_batch(size: Any):
    with pytest.raises((TypeError, ValueError), match="`batch_size` must be"):
        filled([OPEN], size, "plan")


# -- compare ---------------------------------------------------------------------------


def test_strategies_side_by_side(loss: Callable[..., tf.Tensor]):
    budgets = ("80%", msg.Budget("100%"), "1%")
    compared = msg.compare(loss, tf.TensorSpec([8 * BATCH, WIDTH]), budgets=budgets)
    stock, memory = compared["stock"], compared["memory"]
    assert (stock.saved_fraction, stock.extra_fraction) == (0, 0)
    plan = msg.plan(loss, tf.TensorSpec([8 * BATCH, WIDTH]))
    assert stock.peak_bytes == plan.stock_peak_bytes
    assert memory.peak_bytes == plan.predicted_peak_bytes
    for name in ("uniform segments", "Chen's √n"):
        assert memory.peak_bytes <= compared[name].peak_bytes < stock.peak_bytes
    assert compared["80%"].peak_fraction <= 0.8
    assert compared["1%"].peak_bytes is None
    assert "the lowest peak that was found" in compared["1%"].note.lower()
    table = str(compared)
    assert all(row.name in table for row in compared.rows)
    with pytest.raises(KeyError, match="is none of stock, uniform"):
        compared["best"]


def test_a_model_is_compared_by_its_training_step(model: Any):
    compared = msg.compare(model, budgets=["50%"], batch_size=BATCH)
    assert [row.name for row in compared.rows][-3:] == ["speed", "memory", "50%"]
    assert compared["50%"].peak_fraction <= 0.5
    assert model.train_function is None


@pytest.mark.parametrize("budget", ["x%", "-5%", "memroy", 0.5, "dense"])
def test_what_is_no_budget_of_a_comparison(model: Any, budget: Any):
    with pytest.raises(
        msg.CheckpointError, match=f"compare`: {budget!r} among"
    ) as told:
        msg.compare(model, budgets=(budget,), batch_size=BATCH)
    assert "a budget must" in str(told.value) and "layer" not in str(told.value)


def test_a_single_budget_is_one(model: Any):
    assert msg.compare(model, budgets="50%", batch_size=BATCH).rows[-1].name == "50%"


def test_what_is_no_checkpoint_of_a_plan_speaks_of_plan(model: Any):
    with pytest.raises(msg.CheckpointError, match=r"gradients\.plan`: .*'x%'"):
        msg.plan(model, checkpoints="x%", batch_size=BATCH)


# -- largest batch ---------------------------------------------------------------------


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not(loss: Callable[..., tf.Tensor]):
    found = msg.max_batch_size(loss, "1MiB", OPEN)
    sizes = [row.batch_size for row in (found.stock, found.memory, found.budget)]
    assert 0 < 1.5 * sizes[0] < sizes[1] <= sizes[2]
    stock = msg.plan(loss, OPEN, batch_size=sizes[0]).stock_peak_bytes
    more = msg.plan(loss, OPEN, batch_size=sizes[0] + 1).stock_peak_bytes
    assert stock == found.stock.peak_bytes <= MIB < more
    within = msg.plan(loss, OPEN, checkpoints="1MiB", batch_size=sizes[2])
    assert within.predicted_peak_bytes == found.budget.peak_bytes <= MIB
    assert within.extra_fraction == found.budget.extra_fraction
    with pytest.raises(msg.BudgetError):
        more = sizes[2] + sizes[2] // 25
        msg.plan(loss, OPEN, checkpoints="1MiB", batch_size=more)
    assert str(sizes[1]) in str(found)


def test_a_model_has_a_largest_batch(model: Any):
    found = msg.max_batch_size(model, MIB)
    assert 0 < found.stock.batch_size < found.memory.batch_size
    assert found.budget.batch_size > 1.3 * found.memory.batch_size
    assert found.memory.extra_fraction > found.stock.extra_fraction == 0


def test_a_budget_of_what_memory_takes_runs_ops_once():
    model = keras.Sequential([keras.Input([64])])
    for _ in range(10):
        model.add(keras.layers.Dense(64, "gelu"))
    model.compile("sgd", "mse", jit_compile=False)
    memory = msg.plan(model, batch_size=1000)
    budget = msg.Budget(memory.predicted_peak_bytes)
    within = msg.plan(model, checkpoints=budget, batch_size=1000)
    assert within.predicted_peak_bytes <= memory.predicted_peak_bytes
    assert max(within.schedule.runs.values()) == 1


def test_the_search_ends_at_what_shapes_can_count(loss: Callable[..., tf.Tensor]):
    found = msg.max_batch_size(loss, "4000GiB", OPEN)
    assert found.stock.batch_size == found.budget.batch_size == 2**24
    assert ">= 16777216" in str(found)

    def long(x: tf.Tensor) -> tf.Tensor:
        return loss(tf.reshape(tf.tile(x, [1, 4096]), [-1, WIDTH]))

    with pytest.raises(msg.MemorySavingGradientsError, match="Give a smaller budget"):
        msg.max_batch_size(long, "4000GiB", OPEN)


def test_where_not_one_example_fits(loss: Callable[..., tf.Tensor]):
    found = msg.max_batch_size(loss, 1000, OPEN)
    assert found.stock.batch_size == found.budget.batch_size == 0


def test_what_is_no_limit_for_a_batch(loss: Callable[..., tf.Tensor]):
    with pytest.raises(msg.CheckpointError, match="is no limit"):
        msg.max_batch_size(loss, "40%", OPEN)
    with pytest.raises(msg.MemorySavingGradientsError, match="None as the first"):
        msg.max_batch_size(loss, "1MiB", SPEC)
