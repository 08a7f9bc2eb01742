"""The order in which the executor runs what nothing holds back."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hand_graphs import Builder, chain
from hypothesis import given
from random_graphs import training_graphs

from memory_saving_gradients import op_types
from memory_saving_gradients.executor import executor_order
from memory_saving_gradients.graph import TrainingGraph


def names_in_order(graph: TrainingGraph) -> list[str]:
    return [graph.ops[op].name for op in executor_order(graph.ops, graph)]


def two_branches(**attributes: bool) -> TrainingGraph:
    r"""::

    x ── a ── b ── c ──\
      \                 + (f)
       d ── e ─────────/
    """
    b = Builder()
    x = b.source()
    chain_a = x
    for name in "abc":
        chain_a = b.unary(chain_a, name=name, **attributes)
    chain_d = x
    for name in "de":
        chain_d = b.unary(chain_d, name=name, **attributes)
    b.join(chain_a, chain_d, name="f", **attributes)
    return b.finish()


def test_inexpensive_ops_take_turns():
    """Kernels on a GPU: a first-in-first-out queue, breadth first."""
    assert names_in_order(two_branches(inexpensive=True))[1:] == list("adbecf")


def test_expensive_ops_run_depth_first():
    """The last branch stays with the thread; the other one waits in the pool."""
    assert names_in_order(two_branches())[1:] == list("deabcf")


def test_an_expensive_op_waits_for_the_inexpensive_ones_of_its_thread():
    b = Builder()
    x = b.source()
    b.unary(x, name="dear")
    b.unary(b.alias(x, name="alias", inexpensive=True), name="behind")
    assert names_in_order(b.finish())[1:] == ["alias", "behind", "dear"]


def test_control_edges_hold_an_op_back():
    b = Builder()
    x = b.source()
    long = b.unary(b.unary(x, name="a"), name="b")
    b.unary(x, name="late", control_inputs=(b.tensors[long].op,))
    assert names_in_order(b.finish())[1:] == ["a", "b", "late"]


def test_order_of_a_part_takes_the_rest_as_there():
    graph = chain(3)
    part = graph.backward_ops
    assert executor_order(part, graph) == [op.id for op in part]


@given(training_graphs())
def test_order_is_topological_and_complete(graph: TrainingGraph):
    order = executor_order(graph.ops, graph)
    assert sorted(order) == [op.id for op in graph.ops]
    place = {op: index for index, op in enumerate(order)}
    for op in graph.ops:
        before = [graph.tensors[t].op for t in op.inputs]
        assert all(place[o] < place[op.id] for o in (*before, *op.control_inputs))


@pytest.mark.parametrize("name", ["Identity", "Reshape", "Shape", "NoOp", "Mul"])
def test_table_holds_no_op_that_computes(name: str):
    assert (name in op_types.INEXPENSIVE_TYPES) == (name != "Mul")


def test_executor_runs_a_chain_before_its_side_branches():
    """TensorFlow itself, on one thread: the spans of a traced run, in order.

    The main chain's next op is the last reader, so it stays with the thread.
    """
    tf1 = tf.compat.v1
    with tf1.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [64, 64])
        y, sides = x, []
        for layer in range(4):
            y = tf.tanh(y, name=f"main{layer}")
            sides.append(tf.exp(y, name=f"side{layer}"))
        total = tf.add_n([y, *sides])
        config = tf1.ConfigProto(
            inter_op_parallelism_threads=1,
            intra_op_parallelism_threads=1,
            use_per_session_threads=True,
        )
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        metadata = tf1.RunMetadata()
        options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
        with tf1.Session(graph=graph, config=config) as session:
            session.run(total, {x: np.ones([64, 64])}, options, metadata)
    spans = [
        (stats.all_start_micros, stats.node_name)
        for device in metadata.step_stats.dev_stats
        for stats in device.node_stats
        if stats.node_name.startswith(("main", "side"))
    ]
    ran = [name for _, name in sorted(spans)]
    assert ran == [f"main{n}" for n in range(4)] + [f"side{n}" for n in (3, 2, 1, 0)]
