"""Whatever is kept of a body: its gradient has an order, and equals stock's."""

from __future__ import annotations

import hashlib
from typing import Any

import networkx as nx
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bodies import (
    INPUT,
    SEQUENCE,
    Model,
    call_in_loop,
    called,
    cases,
    copies_inside,
    loop_in_call,
    lstm,
    repeated,
    scanned,
    stepping,
    variables,
)
from tf_helpers import assert_same_bits

from memory_saving_gradients import inside
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.schedule import Schedule, make_schedule, tied
from memory_saving_gradients.tf_read import Reading

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


def require_order(graph: Any) -> None:
    """Asserts that in no function of a graph ops wait for each other in a circle."""
    for function in graph.as_graph_def().library.function:
        edges = nx.DiGraph()
        for node in function.node_def:
            for read in node.input:
                edges.add_edge(read.lstrip("^").split(":")[0], node.name)
        assert nx.is_directed_acyclic_graph(edges), function.signature.name


def keep_some(monkeypatch: pytest.MonkeyPatch, share: float, salt: int) -> list[str]:
    """Has each body keep a share of its tensors; returns the names of all that are.

    The same tensors whenever the same body is differentiated: of functions TensorFlow
    builds gradients until the next one asks for nothing new.
    """
    kept: list[str] = []

    def planned(
        wish: Any, buffers: Buffers, reading: Reading, starts: set[int]
    ) -> Schedule:
        chosen = {
            tensor.id
            for tensor in reading.graph.tensors
            if buffers.position[tensor.op] >= 0
            and buffers.size[tensor.id]
            and reading.tensors[tensor.id].dtype != tf.variant
            and _luck(tensor.name, salt) < share
        }
        kept.extend(reading.graph.tensors[t].name for t in chosen)
        return tied(buffers, make_schedule(buffers, chosen), starts)

    monkeypatch.setattr(inside, "planned_inside", planned)
    return kept


def _luck(name: str, salt: int) -> float:
    digest = hashlib.sha256(f"{salt} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


@pytest.fixture(scope="module")
def keras_layers() -> dict[str, Model]:
    """An LSTM and a GRU, with weights that do not change."""
    import keras

    keras.utils.set_random_seed(1)
    found: dict[str, Model] = {}
    for kind in ("LSTM", "GRU"):
        layer = getattr(keras.layers, kind)(6, return_sequences=True)

        def model(x: tf.Tensor, ws: Any, layer: Any = layer) -> tf.Tensor:
            return layer(tf.transpose(SEQUENCE + x, [1, 0, 2])) @ ws[0]

        model(tf.constant(INPUT), variables())
        found[kind] = model
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LSTM", "GRU", lstm, scanned, cases, called, loop_in_call]
)
def test_any_share_may_be_kept(name: Any, keras_layers: dict[str, Model]) -> None:
    model = keras_layers[name] if isinstance(name, str) else name
    stock, _ = stepping(model, "stock")

    @settings(max_examples=6)
    @given(st.sampled_from([0.1, 0.3, 0.5, 0.8]), st.integers(0, 2**16), st.booleans())
    def holds(share: float, salt: int, persistent: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            keep_some(patch, share, salt)
            new, graph = stepping(model, "memory", persistent)
        require_order(graph)
        assert_same_bits(stock, new)

    holds()


@pytest.mark.parametrize("salt", range(3))
@pytest.mark.parametrize("model", [lstm, call_in_loop])
def test_some_may_be_kept(
    model: Model, salt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, _ = stepping(model, "stock")
    kept = keep_some(monkeypatch, 0.5, salt)
    new, graph = stepping(model, "memory")
    assert kept
    require_order(graph)
    assert_same_bits(stock, new)


@pytest.mark.parametrize(
    "kept",
    [
        ("matmul_1:0", "split:3", "Sigmoid:0", "mul:0", "add_1:0"),
        ("add:0", "split:0", "split:2", "mul:0", "Sigmoid_1:0"),
    ],
)
def test_one_output_of_an_op_is_kept_and_another_recomputed(
    kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads the one before the copy has its turn must not wait for the copy."""

    def planned(
        wish: Any, buffers: Buffers, reading: Reading, starts: set[int]
    ) -> Schedule:
        names = {f"recompute/while/{name}" for name in kept}
        chosen = {t.id for t in reading.graph.tensors if t.name in names}
        assert len(chosen) == len(kept)
        return tied(buffers, make_schedule(buffers, chosen), starts)

    stock, _ = stepping(lstm, "stock")
    monkeypatch.setattr(inside, "planned_inside", planned)
    new, graph = stepping(lstm, "memory")
    require_order(graph)
    assert_same_bits(stock, new)
    assert "while/split" in copies_inside(graph)


def test_one_output_of_an_op_is_kept_by_name() -> None:
    stock, _ = stepping(lstm, "stock")
    new, graph = stepping(lstm, ["while/split:2"])
    require_order(graph)
    assert_same_bits(stock, new)
    # Held by an accumulator that the gradient reads.
    held = [
        node.input[1]
        for function in graph.as_graph_def().library.function
        for node in function.node_def
        if node.op == "TensorListPushBack"
    ]
    assert any(name.startswith("while/split:output:2") for name in held), held


def forked(x: tf.Tensor, ws: Any) -> tf.Tensor:
    def once(y: tf.Tensor) -> tf.Tensor:
        y = tf.tanh(y @ ws[0])
        return tf.sin(y) + tf.sin(tf.sin(tf.exp(y)) @ ws[1])

    return repeated(once, x)


def test_what_is_held_waits_for_no_gradient() -> None:
    """The gradient of `sin` asks for its input where ops wait for what comes in.

    Others read that input, too, and may have their turn before.
    """
    stock, _ = stepping(forked, "stock")
    new, graph = stepping(forked, ["while/Tanh:0"])
    require_order(graph)
    assert_same_bits(stock, new)
    taken = [
        node
        for function in graph.as_graph_def().library.function
        for node in function.node_def
        if "TensorListPopBack" in node.name
    ]
    assert taken
    for node in taken:
        assert not any(read.startswith("^") for read in node.input), node
