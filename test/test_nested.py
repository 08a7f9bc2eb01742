"""Ops that are recomputed more than once: schedules, and graphs made of them."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import tensorflow as tf
from hand_graphs import ZOO, chain, unet, view
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import training_graphs
from tf_helpers import ROUTES, Work, check, fixed

import memory_saving_gradients as msg
from memory_saving_gradients.graph import TrainingGraph
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.again import plan_again
from memory_saving_gradients.planners.memory import plan_memory
from memory_saving_gradients.planners.nested import Nested, plan_nested
from memory_saving_gradients.schedule import Schedule, make_schedule
from memory_saving_gradients.simulate import simulate
from memory_saving_gradients.sweep import Sweep


def problem_of(graph: TrainingGraph) -> Problem:
    return Problem(view(graph))


def scheduled(problem: Problem, plan: Nested) -> Schedule:
    buffers = problem.buffers
    return make_schedule(buffers, plan.kept, reruns=plan.reruns)


def assert_legal(problem: Problem, schedule: Schedule) -> None:
    """What a step reads is there: kept, or copied before it; nothing pinned is run."""
    buffers = problem.buffers
    ops = buffers.graph.ops
    copied: set[int] = set()
    for step in schedule.steps:
        for tensor in buffers.reads[step.op]:
            maker = buffers.graph.tensors[tensor].op
            if maker >= buffers.graph.forward_count or tensor in schedule.kept:
                continue
            assert maker in copied, (ops[step.op].name, ops[maker].name)
        if step.copy:
            assert ops[step.op].pin is None
            copied.add(step.op)


@given(graph=training_graphs(), share=st.integers(5, 100))
def test_every_schedule_is_legal_and_its_figures_are_the_simulators(
    graph: TrainingGraph, share: int
):
    problem = problem_of(graph)
    plan = plan_nested(problem, problem.stock_peak_bytes * share // 100)
    schedule = scheduled(problem, plan)
    assert_legal(problem, schedule)
    assert simulate(problem.buffers, schedule).peak_bytes == plan.peak_bytes
    seconds = sum(graph.ops[s.op].seconds for s in schedule.steps if s.copy)
    assert plan.extra_seconds == pytest.approx(seconds)


@pytest.mark.parametrize("name", ZOO)
def test_named_graphs(name: str):
    problem = problem_of(ZOO[name]())
    for share in (20, 40, 80):
        plan = plan_nested(problem, problem.stock_peak_bytes * share // 100)
        assert_legal(problem, scheduled(problem, plan))


@pytest.mark.parametrize("length", [60, 200])
def test_chain_in_less_than_single_recomputation_needs(length: int):
    problem = problem_of(chain([1] * length))
    floor = Sweep(problem.buffers, plan_memory(problem)).peak_bytes
    budget = floor * 2 // 3
    plan = plan_nested(problem, budget)
    assert plan.peak_bytes <= budget
    # revolve: m places and r runs of each serve C(m + r, r) ops; three tensors are in
    # the air.
    places = budget - 3
    runs = next(r for r in range(length) if math.comb(places + r, r) >= length)
    assert plan.extra_seconds <= runs * length


def test_more_memory_never_costs_more_time_on_a_chain():
    problem = problem_of(chain([1] * 120))
    found = [plan_nested(problem, budget).extra_seconds for budget in range(7, 40, 3)]
    assert found == sorted(found, reverse=True)


def test_nothing_fits():
    problem = problem_of(chain([1] * 30))
    plan = plan_nested(problem, 1)
    assert 1 < plan.peak_bytes <= plan_nested(problem, 2).peak_bytes


# -- a little below the floor ----------------------------------------------------------


@given(graph=training_graphs(), share=st.integers(60, 99))
def test_what_runs_again_is_legal_within_the_budget_and_the_simulators(
    graph: TrainingGraph, share: int
):
    problem = problem_of(graph)
    floor = Sweep(problem.buffers, plan_memory(problem)).peak_bytes
    budget = floor * share // 100
    plan = plan_again(problem, budget)
    if plan is None:
        return
    assert plan.peak_bytes <= budget
    assert plan.kept >= problem.always_kept
    schedule = scheduled(problem, plan)
    assert_legal(problem, schedule)
    assert simulate(problem.buffers, schedule).peak_bytes == plan.peak_bytes
    seconds = sum(graph.ops[s.op].seconds for s in schedule.steps if s.copy)
    assert plan.extra_seconds == pytest.approx(seconds)


def test_a_little_below_the_floor_a_network_with_skips_runs_little_again():
    problem = problem_of(unet(4))
    floor = Sweep(problem.buffers, plan_memory(problem)).peak_bytes
    budget = floor - 1
    plan, everything = plan_again(problem, budget), plan_nested(problem, budget)
    assert plan is not None and plan.peak_bytes <= budget
    assert everything.peak_bytes > budget or (
        plan.extra_seconds < everything.extra_seconds
    )


# -- in TensorFlow ---------------------------------------------------------------------


def network(weights: list[tf.Variable], inputs: list[tf.Tensor]) -> tf.Tensor:
    y = inputs[0]
    for weight in weights:
        # An alias and an op of two outputs, so that each run has its own of both.
        y = tf.reshape(tf.tanh(y @ weight), [-1, 2, 16])
        left, right = tf.unstack(y, axis=1)
        y = tf.concat([right, left * left], -1)
    return tf.reduce_sum(y * y)


def work() -> Work:
    weights = [fixed(32, 32, seed=n) / 6 for n in range(24)]
    return Work(network, weights, [fixed(512, 32)])


def least(share: float) -> msg.Budget:
    """This share of what single recomputation needs."""

    @tf.function
    def step(x):
        weights = [tf.constant(w) for w in work().weights]
        loss = network(weights, [x])
        return msg.gradients(loss, weights, checkpoints="memory")

    step.get_concrete_function(tf.TensorSpec([512, 32]))
    return msg.Budget(int(share * msg.last_plan().predicted_peak_bytes))


def test_a_u_net_below_its_floor_is_written():
    """Changes that are sound one by one may not be so together."""
    keras = tf.keras
    layers = keras.layers
    inputs = x = keras.Input([64, 64, 3])
    skips = []
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, padding="same")(x)
        skips.append(layers.ReLU()(layers.BatchNormalization()(x)))
        x = layers.MaxPool2D()(skips[-1])
    for filters in (64, 32, 16):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skips.pop()])
        x = layers.Conv2D(filters, 3, padding="same", activation="gelu")(x)
    model = keras.Model(inputs, layers.Conv2D(1, 1)(x))

    @tf.function(autograph=False)
    def step(x):
        loss = tf.reduce_mean(model(x, training=True) ** 2)
        return msg.gradients(loss, model.trainable_variables, checkpoints="50%")

    step.get_concrete_function(tf.TensorSpec([32, 64, 64, 3]))
    plan = msg.last_plan()
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert max(plan.schedule.runs.values()) == 2


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_are_stocks(route: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "memory_saving_gradients"):
        check(work(), route, least(0.8))
    plan = msg.last_plan()
    assert max(plan.schedule.runs.values()) > 1
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert "times on average" in plan.summary()
    assert any("recomputed up to" in r.message for r in caplog.records)


def test_verified():
    weights = [tf.Variable(w) for w in work().weights]
    budget = least(0.8)

    @tf.function
    def step(x):
        loss = network(weights, [x])
        return msg.gradients(loss, weights, checkpoints=budget, verify=True)

    step(tf.constant(fixed(512, 32)))
    assert max(msg.last_plan().schedule.runs.values()) > 1


def test_saved_and_replayed():
    budget = least(0.8)

    def planned(checkpoints: object) -> msg.Plan:
        weights = [tf.Variable(w) for w in work().weights]

        @tf.function
        def step(x):
            loss = network(weights, [x])
            return msg.gradients(loss, weights, checkpoints=checkpoints)

        step.get_concrete_function(tf.TensorSpec([512, 32]))
        return msg.last_plan()

    plan = planned(budget)
    text = plan.to_json()
    again = planned(msg.Plan.from_json(text))
    assert again.schedule == plan.schedule
    assert again.timeline == plan.timeline
    assert again.to_json() == text
    edited = text.replace(' "reruns": [\n  "', ' "reruns": [\n  "x')
    with pytest.raises(msg.PlanMismatchError, match="edited by hand"):
        planned(msg.Plan.from_json(edited))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_every_run_is_in_the_graph_that_is_executed(jit_compile: bool):
    """Neither Grappler nor XLA takes two copies of an op for one."""
    x = tf.constant(fixed(256, 1024))  # 1 MiB
    lengths = {}

    def step_of(checkpoints):
        @tf.function(jit_compile=jit_compile)
        def step(x):
            y = x
            for _ in range(60):
                y = tf.tanh(y)
            return msg.gradients(tf.reduce_sum(y), x, checkpoints=checkpoints)

        return step

    for checkpoints in ("memory", "8MiB"):
        step = step_of(checkpoints)
        step(x)
        if jit_compile:
            text = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
            lengths[checkpoints] = text.count(" tanh(")
        else:
            lengths[checkpoints] = sum(
                op.type == "Tanh"
                for op in step.get_concrete_function(x).graph.get_operations()
            )
    assert lengths["8MiB"] > lengths["memory"] > 60


def test_peak_and_bits_of_a_chain():
    from mem_util import measure

    x = tf.constant(fixed(250_000))

    def step_of(differentiate):
        @tf.function
        def step(x):
            y = x
            for _ in range(100):
                y = tf.tanh(y)
            return differentiate(tf.reduce_sum(y), x)[0]

        return step

    step = step_of(lambda y, x: msg.gradients(y, x, checkpoints="9MB"))
    stock = step_of(tf.gradients)(x)
    assert measure(step, x).above_rest_bytes["/cpu:0"] <= 10e6
    np.testing.assert_array_equal(step(x), stock)
    plan = msg.last_plan()
    assert plan.schedule.runs.total() <= 1.7 * 100
