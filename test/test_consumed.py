"""Budgets for who consumes each gradient as it comes: what waits counts nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from random_graphs import random_selection, training_graphs
from saving_helpers import dense_layers, weights_of

import memory_saving_gradients as msg
from mem_util import measure
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import TrainingGraph
from memory_saving_gradients.order import backward_order
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.sweep import Sweep

MIB = 2**20
WIDTH, LAYERS = 512, 24
"""A gradient of each layer takes 1 MiB, and an activation a quarter of that."""


@given(graph=training_graphs())
def test_peak_without_those_that_wait(graph: TrainingGraph):
    problem = Problem(Buffers(graph, backward_order(graph)))
    kept = random_selection(problem.buffers, random.Random(0)) | problem.buffers.endless
    held = Sweep(problem.buffers, kept)
    consumed = Sweep(problem.if_consumed.buffers, kept)
    assert consumed.extra_seconds == pytest.approx(held.extra_seconds)
    # It may be less: an op may write over a gradient for which nobody waits.
    assert consumed.peak_bytes <= held.peak_if_consumed <= held.peak_bytes


def step_of(checkpoints: object, weights: list[tf.Variable]):
    """A training step that applies each gradient at once."""

    @tf.function
    def step(x):
        loss = tf.reduce_sum(dense_layers(x, weights) ** 2)
        for w, gradient in zip(
            weights, msg.gradients(loss, weights, checkpoints=checkpoints), strict=True
        ):
            w.assign_sub(1e-6 * gradient)

    return step


def planned(checkpoints: object) -> msg.Plan:
    weights = weights_of(LAYERS, WIDTH)
    step_of(checkpoints, weights).get_concrete_function(tf.TensorSpec([128, WIDTH]))
    return msg.last_plan()


def test_gradients_alone_break_a_budget_only_for_who_holds_them():
    with pytest.raises(msg.BudgetError, match="The lowest peak"):
        planned("6MiB")
    plan = planned(msg.Budget("6MiB", consumed=True))
    assert plan.consumed
    assert plan.recomputed
    assert plan.predicted_peak_bytes <= 6 * MIB < plan.stock_peak_bytes
    assert plan.predicted_peak_bytes == plan.predicted_peak_if_consumed_bytes
    assert plan.stock_peak_bytes == plan.stock_peak_if_consumed_bytes
    assert max(plan.timeline.live_bytes) == plan.predicted_peak_bytes
    assert plan.strategy == "a budget of 6.00 MiB for gradients consumed as they come"
    assert "6.00 MiB above rest" in plan.summary()


def test_shares_are_of_what_stock_takes_then():
    plan = planned(msg.Budget("50%", consumed=True))
    assert plan.budget_bytes == plan.stock_peak_if_consumed_bytes // 2
    assert plan.stock_peak_bytes < LAYERS * MIB  # what the gradients alone take
    assert planned(msg.Budget("100%", consumed=True)).is_stock


def test_a_step_keeps_to_it():
    weights = weights_of(LAYERS, WIDTH)
    x = tf.random.stateless_normal([512, WIDTH], [1, 2])  # 1 MiB for each layer
    step = step_of(msg.Budget("40%", consumed=True), weights)
    taken = measure(step, x).above_rest_bytes["/cpu:0"]
    # Chunks of the allocator are up to twice the request.
    assert taken <= 1.05 * msg.last_plan().budget_bytes + MIB
    assert taken < LAYERS * MIB


def test_fit_keeps_to_it():
    keras = tf.keras
    model = keras.Sequential([keras.Input([WIDTH])])
    for _ in range(LAYERS):
        model.add(keras.layers.Dense(WIDTH, "tanh"))
    model.compile("sgd", "mse", jit_compile=False)
    msg.memory_saving(model, msg.Budget("40%", consumed=True))
    x = np.zeros([512, WIDTH], np.float32)
    model.fit(x, x, batch_size=512, verbose=0)
    plan = msg.last_plan()
    assert plan.consumed
    assert plan.predicted_peak_bytes <= plan.budget_bytes < LAYERS * MIB


def test_saved_and_replayed():
    plan = planned(msg.Budget("50%", consumed=True))
    again = planned(msg.Plan.from_json(plan.to_json()))
    assert again.consumed
    assert again.predicted_peak_bytes == plan.predicted_peak_bytes
    assert again.recomputed_count == plan.recomputed_count


@pytest.mark.slow
def test_largest_batch_is_larger():
    model = tf.keras.Sequential([tf.keras.Input([WIDTH])])
    for _ in range(LAYERS):
        model.add(tf.keras.layers.Dense(WIDTH, "tanh"))
    model.compile("sgd", "mse")
    held = msg.max_batch_size(model, "40MiB")
    consumed = msg.max_batch_size(model, msg.Budget("40MiB", consumed=True))
    for one, other in (
        (held.stock, consumed.stock),
        (held.memory, consumed.memory),
        (held.budget, consumed.budget),
    ):
        assert one.batch_size < other.batch_size
        assert other.peak_bytes <= 40 * MIB
