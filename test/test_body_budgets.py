"""Budgets on models with loops, branches and calls: never worse than the modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tf_helpers import assert_same_bits, fixed

import memory_saving_gradients as msg

WIDTH, ROWS = 64, 256
X = fixed(ROWS, WIDTH)
Loss = Callable[[tf.Tensor, Any], tf.Tensor]


def weights(count: int = 8) -> list[tf.Variable]:
    return [tf.Variable(fixed(WIDTH, WIDTH, seed=n) / WIDTH**0.5) for n in range(count)]


def block(y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.tanh(tf.nn.softplus(y @ w) - y)


def called(y: tf.Tensor, ws: Any) -> tf.Tensor:
    for w in ws:
        y = tf.function(lambda y, w=w: block(block(y, w), w), autograph=False)(y)
    return tf.reduce_sum(y)


def chosen(y: tf.Tensor, ws: Any) -> tf.Tensor:
    for w in ws:
        y = tf.cond(
            tf.reduce_sum(y) > -1e9,
            lambda y=y, w=w: block(block(y, w), w),
            lambda y=y: tf.sin(y),
        )
    return tf.reduce_sum(y)


def looped(y: tf.Tensor, ws: Any, times: int = 20) -> tf.Tensor:
    _, y = tf.while_loop(
        lambda i, _: i < times,
        lambda i, y: (i + 1, block(block(y, ws[0]), ws[1])),
        (0, y),
        maximum_iterations=times,
    )
    for w in ws[2:]:
        y = block(y, w)
    return tf.reduce_sum(y)


MODELS = pytest.mark.parametrize("loss", [called, chosen, looped])


def recurrent() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input([25, 32]),
            keras.layers.LSTM(64, return_sequences=True),
            keras.layers.LSTM(64),
        ]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


LSTM_SPECS = (tf.TensorSpec([128, 25, 32]), tf.TensorSpec([128, 64]))


def planned(loss: Loss, ws: Any, checkpoints: Any, tape: Any = None) -> msg.Plan:
    """The plan of a gradient that is really built."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        if tape is None:
            return msg.gradients(loss(x, ws), ws, checkpoints=checkpoints)
        with tape(checkpoints=checkpoints) as recording:
            value = loss(x, ws)
        return recording.gradient(value, ws)

    step.get_concrete_function(tf.TensorSpec(X.shape))
    plan = msg.last_plan()
    assert plan is not None
    return plan


def worse_than(plan: msg.Plan, modes: list[msg.Plan]) -> list[str]:
    """Modes that fit the budget of a plan for less work."""
    assert plan.budget_bytes is not None
    return [
        mode.strategy
        for mode in modes
        if mode.predicted_peak_bytes <= plan.budget_bytes
        and plan.extra_seconds > mode.extra_seconds * (1 + 1e-6)
    ]


# -- the choice ------------------------------------------------------------------------


def test_a_recurrent_model_is_not_split_while_memory_fits() -> None:
    model = recurrent()

    def plan(checkpoints: str) -> msg.Plan:
        return msg.plan(model, *LSTM_SPECS, checkpoints=checkpoints)

    memory, speed = plan("memory"), plan("speed")
    share = 100 * memory.predicted_peak_bytes / memory.stock_peak_bytes
    budgets = {
        percent: plan(f"{percent}%") for percent in (100, 90, int(share) + 2, 30)
    }
    for found in budgets.values():
        assert found.stock_peak_bytes == memory.stock_peak_bytes
        assert found.predicted_peak_bytes <= found.budget_bytes
        assert not worse_than(found, [memory, speed])
    assert budgets[100].is_stock and budgets[100].rule == "stock"
    for percent in (90, int(share) + 2):
        assert budgets[percent].bodies
        assert not any(body.every for body in budgets[percent].bodies)
    assert budgets[30].rule == "split" and any(b.every for b in budgets[30].bodies)


@MODELS
def test_stock_is_one_whatever_the_setting(loss: Loss) -> None:
    ws = weights()
    settings = ["memory", "speed", "60%", "100%"]
    plans = [planned(loss, ws, setting) for setting in settings]
    plans += [planned(loss, ws, "memory", msg.GradientTape)]
    assert len({plan.stock_peak_bytes for plan in plans}) == 1
    assert plans[3].is_stock and not plans[3].bodies
    assert plans[3].predicted_peak_bytes <= plans[3].stock_peak_bytes


def test_stock_is_one_under_a_persistent_tape() -> None:
    def persistent(**keywords: Any) -> Any:
        return msg.GradientTape(persistent=True, **keywords)

    ws = weights()
    tapes = (msg.GradientTape, persistent)
    plans = [
        planned(called, ws, setting, tape)
        for tape in tapes
        for setting in ("memory", "speed", "60%")
    ]
    assert len({plan.stock_peak_bytes for plan in plans}) == 1


@MODELS
def test_gradients_under_budgets_are_stocks(loss: Loss) -> None:
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        ws = weights(4)

        def step(differentiate: Any, **keywords: Any) -> Any:
            @tf.function(autograph=False)
            def function(x: tf.Tensor) -> Any:
                return differentiate(loss(x, ws), ws, **keywords)

            return function(tf.constant(X))

        stock = step(tf.gradients)
        for budget in ("100%", "70%"):
            assert_same_bits(stock, step(msg.gradients, checkpoints=budget))
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def test_loops_are_split_as_somebody_says_under_any_budget() -> None:
    ws = weights(2)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        return msg.gradients(looped(x, ws), ws, checkpoints="100%", every=5)

    step.get_concrete_function(tf.TensorSpec(X.shape))
    assert {body.every for body in msg.last_plan().bodies} == {5, None}


def test_what_cannot_be_copied_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from memory_saving_gradients import rehearsal

    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError("no copy of this")

    monkeypatch.setattr(rehearsal, "studied", failing)
    plan = planned(looped, weights(2), "80%")
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.bodies


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    times=st.integers(3, 40),
    layers=st.integers(2, 6),
    budget=st.integers(30, 110),
    taped=st.booleans(),
)
def test_budgets_are_never_worse_than_the_modes(
    times: int, layers: int, budget: int, taped: bool
) -> None:
    ws = weights(layers)
    tape = msg.GradientTape if taped else None

    def loss(x: tf.Tensor, ws: Any) -> tf.Tensor:
        return looped(x, ws, times)

    modes = [planned(loss, ws, mode, tape) for mode in ("memory", "speed")]
    memory = modes[0]
    try:
        plan = planned(loss, ws, f"{budget}%", tape)
    except msg.BudgetError as error:
        assert error.least_bytes <= memory.predicted_peak_bytes
        assert memory.predicted_peak_bytes > budget * memory.stock_peak_bytes // 100
        return
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.budget_bytes == budget * plan.stock_peak_bytes // 100
    assert plan.stock_peak_bytes == memory.stock_peak_bytes
    assert not worse_than(plan, modes)
    if budget >= 100:
        assert plan.is_stock and not plan.recomputed


# -- what dry runs say -----------------------------------------------------------------


def strategies(subject: Any, *specs: Any, budgets: Any) -> None:
    """Asserts that `compare` says of strategies what their plans say."""
    compared = msg.compare(subject, *specs, budgets=budgets)
    for name in ("speed", "memory", *budgets):
        plan = msg.plan(subject, *specs, checkpoints=name)
        row = compared[name]
        assert row.peak_bytes == plan.predicted_peak_bytes
        assert row.extra_fraction == pytest.approx(plan.extra_fraction, rel=0.01)
        # A copy of the graph has zeros for what nobody differentiates, tapes have none.
        stock = pytest.approx(plan.stock_peak_bytes, rel=0.01)
        assert compared["stock"].peak_bytes == stock
    assert compared["memory"].peak_fraction < 0.6


@MODELS
def test_comparisons_see_what_is_saved_inside(loss: Loss) -> None:
    ws = weights()
    strategies(lambda x: loss(x, ws), tf.TensorSpec(X.shape), budgets=("70%",))


def test_comparisons_of_recurrent_models() -> None:
    strategies(recurrent(), *LSTM_SPECS, budgets=("90%", "30%"))


@MODELS
def test_fronts_see_what_is_saved_inside(loss: Loss) -> None:
    ws, fronts = weights(), []

    @tf.function(autograph=False)
    def look(x: tf.Tensor) -> tf.Tensor:
        value = loss(x, ws)
        fronts.append(msg.pareto(value, ws))
        return value

    look.get_concrete_function(tf.TensorSpec(X.shape))
    memory = planned(loss, ws, "memory")
    (front,) = fronts
    assert front.memory.peak_bytes == memory.predicted_peak_bytes
    assert front.memory.extra_fraction == pytest.approx(memory.extra_fraction)
    assert front.stock.peak_bytes == memory.stock_peak_bytes
    assert front.stock.extra_seconds == 0
    assert front.points[0].peak_bytes <= memory.predicted_peak_bytes


def test_batches_see_what_is_saved_inside() -> None:
    ws = weights()
    batches = msg.max_batch_size(
        lambda x: called(x, ws), "4MiB", tf.TensorSpec([None, WIDTH])
    )
    assert batches.memory.batch_size > 2 * batches.stock.batch_size
    fits = msg.plan(
        lambda x: called(x, ws),
        tf.TensorSpec([batches.memory.batch_size, WIDTH]),
    )
    assert fits.predicted_peak_bytes == batches.memory.peak_bytes <= 4 * 2**20
    assert batches.budget.batch_size >= batches.memory.batch_size


def test_a_saved_plan_knows_what_became_of_bodies() -> None:
    model = recurrent()
    plan = msg.plan(model, *LSTM_SPECS, checkpoints="30%")
    saved = msg.Plan.from_json(plan.to_json())
    assert saved.bodies == "split"
    again = msg.plan(model, *LSTM_SPECS, checkpoints=saved)
    assert again.predicted_peak_bytes == plan.predicted_peak_bytes
    msg.memory_saving(model, saved)
    model.fit(
        np.ones([128, 25, 32], "float32"),
        np.ones([128, 64], "float32"),
        batch_size=128,
        verbose=0,
    )
    assert any(body.every for body in msg.last_plan().bodies)
