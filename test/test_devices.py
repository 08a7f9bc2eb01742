"""Several devices: each copy stays where its original is, and each device saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import dense_layers, differentiate, gather_copies

import mem_util
import memory_saving_gradients as msg

v1 = tf.compat.v1

ROWS, WIDTH = 64, 32

Model = Callable[[tf.Tensor], tuple[tf.Tensor, list[Any]]]


def variables(prefix: str, count: int) -> list[Any]:
    return [v1.get_variable(f"{prefix}{i}", [WIDTH, WIDTH]) for i in range(count)]


def one_after_the_other(x: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
    """The first half of the layers on one device, the second on the other."""
    with tf.device("CPU:0"):
        first = variables("first", 10)
        y = dense_layers(x, first)
    with tf.device("CPU:1"):
        second = variables("second", 10)
        y = dense_layers(y, second)
        return tf.reduce_sum(y), first + second


def side_by_side(x: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
    """Two towers that meet in the loss only."""
    losses, weights = [], []
    for device in ("CPU:0", "CPU:1"):
        with tf.device(device):
            tower = variables(f"tower{device[-1]}", 10)
            losses.append(tf.reduce_sum(dense_layers(x, tower)))
            weights += tower
    return tf.add_n(losses), weights


def to_and_fro(x: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
    """Another device every third layer."""
    weights = variables("w", 18)
    y = x
    for index, weight in enumerate(weights):
        with tf.device(f"CPU:{index // 3 % 2}"):
            y = tf.tanh(y @ weight)
    return tf.reduce_sum(y), weights


MODELS: list[Model] = [one_after_the_other, side_by_side, to_and_fro]
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)


def rewired(model: Model, colocate: bool | None = None) -> tuple[msg.Plan, tf.Graph]:
    """A plan that recomputes, and the graph that it was written to."""
    with tf.Graph().as_default() as graph:
        loss, weights = model(v1.placeholder(tf.float32, [ROWS, WIDTH]))
        msg.gradients(
            loss, weights, checkpoints="memory", colocate_gradients_with_ops=colocate
        )
    plan = msg.last_plan()
    assert plan.recomputed
    return plan, graph


@each_model
def test_copies_stay_on_the_device_of_their_originals(model: Model):
    plan, graph = rewired(model)
    devices = set()
    for number, copy in gather_copies(plan, graph).items():
        original = plan.reading.ops[number]
        assert copy.device == original.device != ""
        assert copy.colocation_groups() or not original.colocation_groups()
        devices.add(copy.device)
    assert len(devices) == 2


def test_copies_are_colocated_as_their_originals_are():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [ROWS, WIDTH])
        anchor = tf.identity(x, "anchor")
        y = anchor
        for _ in range(20):
            with v1.colocate_with(anchor):
                y = tf.tanh(y)
        # What the caller has open around the gradients must not rub off on copies.
        with tf.device("CPU:1"), v1.colocate_with(x):
            msg.gradients(tf.reduce_sum(y), x, checkpoints="memory")
    copies = gather_copies(msg.last_plan(), graph)
    assert copies
    for copy in copies.values():
        assert copy.colocation_groups() == [b"loc:@anchor"]
        assert copy.device == ""


def test_unplaced_copies_stay_unplaced():
    plan, graph = rewired(
        lambda x: (tf.reduce_sum(dense_layers(x, w := variables("w", 12))), w)
    )
    assert {copy.device for copy in gather_copies(plan, graph).values()} == {""}


def ties_between_devices(plan: msg.Plan) -> Iterator[tuple[int, int]]:
    """Ties whose ends stand on different devices, as indices of steps."""
    steps, ops = plan.schedule.steps, plan.reading.graph.ops
    for waiting, awaited in plan.schedule.ties:
        if ops[steps[waiting].op].device != ops[steps[awaited].op].device:
            yield waiting, awaited


@each_model
def test_devices_wait_for_each_other_only_where_data_does(model: Model):
    plan, _ = rewired(model, colocate=True)
    steps, graph = plan.schedule.steps, plan.reading.graph
    for waiting, awaited in ties_between_devices(plan):
        # A copy waits for what the backward op reads for which it is made, or for the
        # seed, with which the backward pass begins.
        served = next(step.op for step in steps[waiting:] if not step.copy)
        gradients = {graph.tensors[t].op for t in plan_reads(plan, served)}
        maker = steps[awaited].op
        seed = "recompute/seed" in graph.ops[maker].name
        anywhere = not graph.ops[maker].device
        waits_for_data = steps[waiting].copy and maker in gradients
        assert seed or anywhere or waits_for_data, (waiting, awaited)


def plan_reads(plan: msg.Plan, op: int) -> set[int]:
    """The tensors that own the buffers that an op reads."""
    graph = plan.reading.graph
    return {graph.root(tensor) for tensor in graph.ops[op].inputs}


def test_towers_never_wait_for_each_other():
    plan, _ = rewired(side_by_side, colocate=True)
    ops, steps = plan.reading.graph.ops, plan.schedule.steps
    between = [
        (ops[steps[waiting].op].name, ops[steps[awaited].op].name)
        for waiting, awaited in ties_between_devices(plan)
        if "tower" in ops[steps[awaited].op].name
    ]
    assert between == []


def peaks_by_device(model: Model, mode: str) -> list[int]:
    """The middle peaks of three steps in a session with two CPUs, in bytes."""
    config = v1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=False)
    with tf.Graph().as_default() as graph, v1.Session(config=config) as session:
        x = v1.placeholder(tf.float32, [1024, WIDTH])
        loss, weights = model(x)
        gradients = differentiate(mode, loss, weights)
        session.run(v1.global_variables_initializer())
        graph.finalize()
        steps = []
        for _ in range(3):
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            metadata = v1.RunMetadata()
            session.run(gradients, {x: np.ones([1024, WIDTH])}, options, metadata)
            taken = mem_util.peak_memory(metadata)
            steps.append((taken["/cpu:0"], taken["/cpu:1"]))
    return [sorted(peaks)[1] for peaks in zip(*steps, strict=True)]


@each_model
def test_peak_falls_on_both_devices(model: Model):
    stock = peaks_by_device(model, "stock")
    new = peaks_by_device(model, "memory")
    assert all(n <= 0.75 * s for n, s in zip(new, stock, strict=True)), (new, stock)
