"""One layer of a GPT as a symbolic graph with its gradients, read as plain data.

Nothing is run and no weight is allocated: weights, input and the causal mask are
placeholders. The layer is written as a user would: LayerNorm in float32, three
projections, attention with a causal mask and dropout, GELU, dropout before each
residual sum, everything else in float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import cost, op_types
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import Storage, TrainingGraph
from memory_saving_gradients.order import backward_order
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.tf_read import Reading, read

__all__ = ["Layer", "Shape", "build"]

DTYPE = tf.float16
PRODUCTS = ("MatMul", "BatchMatMulV2")


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer.

    Attributes:
        length: Tokens of a sequence, s.
        batch: Sequences, b.
        width: Of the residual stream, h.
        heads: Of the attention, a.
        dropout: The rate.
        stateful: Whether masks are drawn by ops with state, which cannot be repeated.
    """

    length: int = 2048
    batch: int = 1
    width: int = 12288
    heads: int = 96
    dropout: float = 0.1
    stateful: bool = False

    @property
    def unit_bytes(self) -> int:
        """s · b · h: what kept bytes are counted in."""
        return self.length * self.batch * self.width


@dataclass(frozen=True)
class Layer:
    """The training graph of a layer; an op's seconds are its floating-point operations.

    Attributes:
        problem: What planners are given.
        products: For each op id the FLOPs of a matrix product, 0 for other ops.
        draws: For each op id the integer operations of a random draw, as this library's
            cost model counts them, 0 for other ops. They are in no op's seconds.
    """

    problem: Problem
    products: tuple[float, ...]
    draws: tuple[float, ...]

    @property
    def graph(self) -> TrainingGraph:
        """The plain data."""
        return self.problem.buffers.graph


def build(shape: Shape) -> Layer:
    """Builds a layer and its gradients in a graph of their own and reads them."""
    with tf.Graph().as_default() as graph:
        x = _given("input", shape.batch, shape.length, shape.width)
        y = _Builder(shape).layer(x)
        weights = [
            op.outputs[0]
            for op in graph.get_operations()
            if op.type == "Placeholder" and "weights" in op.name
        ]
        gradient = _given("gradient", *x.shape)
        before = len(graph.get_operations())
        found = tf.gradients(y, [x, *weights], grad_ys=gradient)
        created = graph.get_operations()[before:]
        reading = read(created, [y], found, unknown_dim=1)
    return _counted(reading, reading.tensor_id(x))


def _given(name: str, *shape: Any) -> tf.Tensor:
    return tf.compat.v1.placeholder(DTYPE, shape, name=name)


class _Builder:
    """The ops of a layer; each draw has a seed of its own."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._draws = 0

    def layer(self, x: tf.Tensor) -> tf.Tensor:
        """Attention, then the feed-forward part, each around the residual stream."""
        with tf.name_scope("attention"):
            x = x + self._dropout(self._attention(self._norm(x)))
        with tf.name_scope("mlp"):
            hidden = self._dense(self._norm(x), 4 * self._shape.width, "widen")
            out = self._dense(tf.nn.gelu(hidden), self._shape.width, "narrow")
            return x + self._dropout(out)

    def _attention(self, x: tf.Tensor) -> tf.Tensor:
        shape = self._shape
        width = shape.width // shape.heads
        query, key, value = (
            tf.transpose(
                tf.reshape(
                    self._dense(x, shape.width, name),
                    [shape.batch, shape.length, shape.heads, width],
                ),
                [0, 2, 1, 3],
            )
            for name in ("query", "key", "value")
        )
        scores = tf.matmul(query, key, transpose_b=True, name="scores")
        scores = scores * tf.constant(width**-0.5, DTYPE)
        scores += _given("causal", shape.length, shape.length)
        weights = self._dropout(tf.nn.softmax(scores))
        context = tf.transpose(tf.matmul(weights, value, name="context"), [0, 2, 1, 3])
        return self._dense(tf.reshape(context, x.shape), shape.width, "project")

    def _norm(self, x: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(wide, [-1], keepdims=True)
        normed = tf.cast((wide - mean) * tf.math.rsqrt(variance + 1e-5), DTYPE)
        return normed * self._weights(x.shape[-1]) + self._weights(x.shape[-1])

    def _dense(self, x: tf.Tensor, width: int, name: str) -> tf.Tensor:
        rows = tf.reshape(x, [-1, x.shape[-1]])
        product = tf.matmul(rows, self._weights(x.shape[-1], width), name=name)
        biased = tf.nn.bias_add(product, self._weights(width))
        return tf.reshape(biased, [*x.shape[:-1], width])

    def _dropout(self, x: tf.Tensor) -> tf.Tensor:
        rate = self._shape.dropout
        if not rate:
            return x
        self._draws += 1
        if self._shape.stateful:
            return tf.nn.dropout(x, rate, seed=self._draws)
        return tf.nn.experimental.stateless_dropout(x, rate, seed=[0, self._draws])

    def _weights(self, *shape: Any) -> tf.Tensor:
        return _given("weights", *shape)


def _counted(reading: Reading, layer_input: int | None) -> Layer:
    """The plain data with FLOPs for seconds, and the layer's input as the result of the
    layer before: it is kept at this layer's expense."""
    graph = reading.graph
    flops = [
        0.0 if node.seconds == 0 else cost.flops(_signature(op))
        for node, op in zip(graph.ops, reading.ops, strict=True)
    ]
    types = [op.type for op in graph.ops]
    products = _only(flops, [kind in PRODUCTS for kind in types])
    draws = _only(flops, ["Random" in kind for kind in types])
    ops = tuple(
        replace(op, seconds=count - drawn)
        for op, count, drawn in zip(graph.ops, flops, draws, strict=True)
    )
    tensors = tuple(
        replace(t, storage=Storage.OWN) if t.id == layer_input else t
        for t in graph.tensors
    )
    graph = replace(graph, ops=ops, tensors=tensors)
    return Layer(Problem(Buffers(graph, backward_order(graph))), products, draws)


def _only(values: Sequence[float], chosen: Sequence[bool]) -> tuple[float, ...]:
    return tuple(v if c else 0.0 for v, c in zip(values, chosen, strict=True))


def _signature(op: tf.Operation) -> cost.Signature:
    return cost.Signature(
        op.type,
        [tensor.shape.as_list() for tensor in op.inputs],
        [tensor.shape.as_list() for tensor in op.outputs],
        0,
        0,
        {name: op.get_attr(name) for name in op_types.ATTRIBUTES.get(op.type, ())},
    )


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
