"""Edges resolved to buffers."""

from __future__ import annotations

import networkx as nx
from hand_graphs import Builder, chain, chain_with_aliases, view
from hypothesis import given
from random_graphs import training_graphs

from memory_saving_gradients.graph import Pin, Storage, TrainingGraph


def test_alias_of_an_alias_is_the_buffer_it_stands_for():
    """h ══ Reshape ══ Identity ── reader."""
    b = Builder()
    h = b.unary(b.source(), 7)
    last = b.alias(b.alias(h))
    reader = b.unary(last)
    buffers = view(b.finish())
    assert buffers.behind(last) == (h,)
    assert buffers.reads[b.tensors[reader].op] == (h,)
    assert buffers.size[h] == 7
    assert buffers.size[last] == 0


def test_reader_of_a_reshape_needs_the_computed_shape_too():
    b = Builder()
    h = b.unary(b.source())
    shape = b.add((b.source(),), (1,))[0]
    assert view(b.finish()).behind(h) == (h,)
    reshaped = b.alias(h, shape)
    assert view(b.finish()).behind(reshaped) == (h, shape)


def test_identity_of_several_stands_for_all_of_them():
    """One copy of an `IdentityN` hands every one of its inputs on."""
    b = Builder()
    x = b.source()
    one, two = b.unary(x), b.unary(x)
    left, right = b.add((one, two), (1, 1), Storage.ALIAS, (one, two), type="IdentityN")
    graph = b.finish()
    assert view(graph).behind(left) == view(graph).behind(right) == (one, two)
    assert [graph.root(t) for t in (left, right)] == [one, two]


def test_what_rests_takes_and_holds_nothing():
    b = Builder()
    weights = b.source(1000)
    h = b.dense(b.source(1000), b.alias(weights), 3)
    buffers = view(b.finish())
    assert buffers.size[weights] == 0
    assert buffers.reads[b.tensors[h].op] == ()
    assert buffers.makes[b.tensors[weights].op] == ()
    assert buffers.forward == [b.tensors[h].op]


def test_shape_of_a_tensor_holds_nothing():
    b = Builder()
    h = b.unary(b.source())
    shape = b.add((h,), (1,), metadata_only=True, pin=Pin.METADATA)[0]
    buffers = view(b.finish())
    assert buffers.reads[b.tensors[shape].op] == ()
    assert buffers.forward_readers[h] == []
    assert buffers.pinned(shape) is Pin.METADATA
    assert buffers.pinned(h) is None


def test_tensor_read_twice_by_one_op_is_one_buffer():
    b = Builder()
    h = b.unary(b.source())
    square = b.join(h, b.alias(h), h)
    assert view(b.finish()).reads[b.tensors[square].op] == (h,)


def test_endless_are_targets_and_results_through_aliases():
    b = Builder()
    x = b.source()
    h = b.unary(b.unary(x))
    target = b.alias(h)
    graph = b.differentiate(target, [x])
    buffers = view(graph)
    assert buffers.endless == {h, graph.root(graph.results[0])}


def test_residuals_are_read_by_the_backward_pass():
    """In a chain of tanh each output, in one of sums none."""
    assert view(chain(4)).residuals == [1, 2, 3, 4]
    b = Builder()
    x = last = b.source()
    for _ in range(3):
        last = b.join(last)
    assert view(b.differentiate(last, [x])).residuals == []


def test_residuals_are_named_by_the_owner_of_the_buffer():
    graph = chain_with_aliases(3)
    owners = view(graph).residuals
    assert [graph.tensors[t].storage for t in owners] == [Storage.OWN] * 3


@given(training_graphs())
def test_buffers_read_are_those_reached_over_aliases(
    graph: TrainingGraph,
):
    """What an op reads, by networkx: owners that reach it through aliases only."""
    buffers = view(graph)
    over_aliases = nx.DiGraph()
    over_aliases.add_nodes_from(t.id for t in graph.tensors)
    for tensor in graph.tensors:
        if tensor.storage is Storage.ALIAS:
            for source in graph.ops[tensor.op].inputs:
                over_aliases.add_edge(tensor.id, source)
    for op in graph.ops:
        expected = {
            t
            for read in (() if op.metadata_only else op.inputs)
            for t in (read, *nx.descendants(over_aliases, read))
            if graph.tensors[t].storage is Storage.OWN
        }
        assert set(buffers.reads[op.id]) == expected
        assert len(buffers.reads[op.id]) == len(expected)


@given(training_graphs())
def test_readers_and_reads_say_the_same(graph: TrainingGraph):
    buffers = view(graph)
    for order, readers, places in (
        (buffers.forward, buffers.forward_readers, buffers.position),
        (buffers.backward, buffers.backward_readers, buffers.slot),
    ):
        assert all(buffers.makes[op] for op in order)
        assert [places[op] for op in order] == list(range(len(order)))
        for tensor, found in enumerate(readers):
            assert found == sorted(found)
            assert found == [
                place for place, op in enumerate(order) if tensor in buffers.reads[op]
            ]
