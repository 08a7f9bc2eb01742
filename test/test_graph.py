"""What a legal training graph is: `check` and the views of a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hand_graphs import ZOO, Builder, chain, residual_blocks
from hypothesis import given
from random_graphs import training_graphs

from memory_saving_gradients.errors import IllegalGraphError
from memory_saving_gradients.graph import Pin, Storage, TrainingGraph, check


def with_op(graph: TrainingGraph, number: int, **changes: Any) -> TrainingGraph:
    ops = list(graph.ops)
    ops[number] = replace(ops[number], **changes)
    return replace(graph, ops=tuple(ops))


def with_tensor(graph: TrainingGraph, number: int, **changes: Any) -> TrainingGraph:
    tensors = list(graph.tensors)
    tensors[number] = replace(tensors[number], **changes)
    return replace(graph, tensors=tuple(tensors))


@pytest.mark.parametrize("name", ZOO)
def test_hand_made_graphs_are_legal(name: str):
    check(ZOO[name]())


@given(training_graphs())
def test_random_graphs_are_legal(graph: TrainingGraph):
    check(graph)


def test_empty_graph_is_legal():
    check(TrainingGraph((), (), 0))


# A chain of three: op and tensor 0 is the source, 1 to 3 the chain, 4 the seed.
@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (with_tensor(chain(3), 2, id=1), "has id 1"),
        (with_tensor(chain(3), 2, bytes=-1), "-1 bytes"),
        (with_tensor(chain(3), 2, op=1), "does not make"),
        (with_tensor(chain(3), 2, op=99), "made by no op"),
        (with_tensor(chain(3), 2, op=-1), "made by no op"),
        (with_tensor(chain(3), 2, storage=Storage.ALIAS), "with source None"),
        (with_tensor(chain(3), 2, source=1), "with source 1"),
        (
            with_tensor(chain(3), 3, storage=Storage.ALIAS, source=1),
            "aliases what op3 does not read",
        ),
        (with_op(chain(3), 2, id=5), "has id 5"),
        (with_op(chain(3), 2, inputs=(2,)), "made after it"),
        (with_op(chain(3), 2, inputs=(3,)), "made after it"),
        (with_op(chain(3), 2, inputs=(6,)), "made after it"),
        (with_op(chain(3), 2, inputs=(99,)), "reads no tensor"),
        (with_op(chain(3), 2, inputs=(-1,)), "reads no tensor"),
        (with_op(chain(3), 2, control_inputs=(2,)), "waits for"),
        (with_op(chain(3), 2, control_inputs=(6,)), "waits for"),
        (with_op(chain(3), 2, control_inputs=(-1,)), "waits for"),
        (with_op(chain(3), 3, outputs=(2, 3)), "op3 does not make op2:0"),
        (with_op(chain(3), 3, outputs=(3, 99)), "makes no tensor"),
        (replace(chain(3), forward_count=99), "99 forward ops"),
        (replace(chain(3), forward_count=-1), "-1 forward ops"),
        (replace(chain(3), targets=(99,)), "target"),
        (replace(chain(3), results=(-1,)), "result"),
    ],
)
def test_illegal_graphs_are_told_apart(broken: TrainingGraph, what: str):
    with pytest.raises(IllegalGraphError, match=what):
        check(broken)


def test_forward_op_that_reads_a_gradient_is_illegal():
    graph = chain(3)
    seed = graph.backward_ops[0].outputs[0]
    with pytest.raises(IllegalGraphError, match="made after it"):
        check(with_op(graph, graph.forward_count - 1, inputs=(seed,)))


def test_forward_and_backward_ops_share_the_graph_out():
    graph = residual_blocks(2)
    assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
    assert (*graph.forward_ops, *graph.backward_ops) == graph.ops
    assert graph.backward_ops[0].name == "seed"
    assert graph.seconds == sum(op.seconds for op in graph.ops)


def test_consumers_are_listed_once_and_ascending():
    b = Builder()
    x = b.source()
    twice = b.join(x, x)
    b.join(twice, x, twice)
    graph = b.finish()
    assert graph.consumers == ((1, 2), (2,), ())


def test_root_of_an_alias_of_an_alias():
    b = Builder()
    shape = b.add((), (0,), pin=Pin.METADATA)[0]
    h = b.unary(b.source())
    other = b.unary(h)
    first = b.alias(b.alias(h, shape))
    left, right = b.add((first, other), (1, 1), Storage.ALIAS, (first, other))
    graph = b.finish()
    assert [graph.root(t) for t in (h, first, left, right)] == [h, h, h, other]
