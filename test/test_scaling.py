"""Planning and rewriting grow with the graph as they should: counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf
from hand_graphs import Builder

import memory_saving_gradients as msg
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.order import backward_order
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.memory import plan_memory
from memory_saving_gradients.schedule import make_schedule
from memory_saving_gradients.simulate import simulate

v1 = tf.compat.v1


def blocks(count: int) -> None:
    """In the default graph `count` blocks of five ops, and their gradients."""
    x = v1.placeholder(tf.float32, [8, 8])
    weights = []
    for _ in range(count):
        weights.append(v1.placeholder(tf.float32, [8, 8]))
        x = x + tf.tanh(x @ weights[-1]) * x
    msg.gradients(tf.reduce_sum(x), weights, checkpoints="memory")


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts the calls of functions of the library, by module."""
    found: Counter[str] = Counter()
    own = msg.__name__

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            if module.startswith(own):
                found[module.removeprefix(own + ".")] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


@pytest.mark.slow
def test_reading_and_writing_are_linear():
    calls = []
    for count in (25, 100):
        with tf.Graph().as_default(), counted_calls() as found:
            blocks(count)
        assert msg.last_plan().recomputed
        calls.append(found)
    for module in ("tf_read", "tf_write", "buffers", "schedule", "cost", "simulate"):
        small, large = calls[0][module], calls[1][module]
        assert 0 < small <= large <= 5 * small, (module, small, large)


def test_planner_simulates_a_bounded_number_of_steps():
    calls = []
    for length in (250, 1000):
        problem = Problem(hand_made(length))
        with counted_calls() as found:
            plan_memory(problem)
        calls.append(found["sweep"] + found["planners.refine"])
    assert 0 < calls[0] <= calls[1] <= 5 * calls[0]


def hand_made(length: int) -> Buffers:
    """A chain of unit tensors whose gradients read them, without TensorFlow."""
    builder = Builder()
    source = tensor = builder.source()
    for _ in range(length):
        tensor = builder.unary(tensor)
    graph = builder.differentiate(tensor, [source])
    return Buffers(graph, backward_order(graph))


@contextmanager
def shallow_stack(spare: int) -> Iterator[None]:
    """Leaves room for few nested calls only."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + spare)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def test_no_recursion_on_a_long_chain():
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [8])
        for _ in range(1200):
            y = tf.raw_ops.Tanh(x=y)
        every = [graph.get_tensor_by_name(f"Tanh_{i}:0") for i in range(50, 1200, 50)]
        with shallow_stack(spare=200):
            msg.gradients(tf.reduce_sum(y), x, checkpoints=every)
            assert len(msg.last_plan().recomputed) > 1100
            # Once more: the edges of the first call are undone and redone.
            msg.gradients(tf.reduce_sum(y), x, checkpoints="memory")


@pytest.mark.slow
def test_no_recursion_on_twenty_thousand_ops():
    length = 20_000
    with shallow_stack(spare=200):
        buffers = hand_made(length)
        schedule = make_schedule(buffers, plan_memory(Problem(buffers)))
        peak = simulate(buffers, schedule).peak_bytes
    # All activations, the seed and one gradient: what stock takes.
    assert peak <= length + 2
