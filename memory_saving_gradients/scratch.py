"""A copy of the graph that is being built, to try things out in.

What autodiff makes can never be taken out of a graph again, and calls it changes, too.
So whoever only wants to know builds in a copy, which is dropped. Copied is what the
`ys` depend on, op by op. Variables are the same ones: nothing is ever run.

Loops and branches get bodies of their own. Those of TensorFlow 1, which are made of
many ops and of contexts that only Python knows, stand in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients import tf_internals, tf_internals_scratch
from memory_saving_gradients.errors import MemorySavingGradientsError
from memory_saving_gradients.selection import plain_variable

__all__ = ["copied"]


def copied(
    graph: tf.Graph, ys: Sequence[tf.Tensor], xs: Sequence[Any]
) -> tuple[tf.Graph, list[tf.Tensor], list[tf.Tensor]]:
    """A graph with the same `ys`, made of the same `xs`.

    Args:
        graph: The graph that holds the `ys`.
        ys: What is to be differentiated.
        xs: Tensors or variables. What the `ys` do not depend on is left out.

    Returns:
        The copy, and in it the `ys` and `xs`; variables as their handles.

    Raises:
        MemorySavingGradientsError: Loops or branches of TensorFlow 1 are in the way.
    """
    scratch = tf_internals_scratch.empty_graph()
    made: dict[int, tf.Tensor] = {}
    with tf_internals.creation_scope(scratch):
        for op in _upstream(ys):
            if tf_internals.in_control_flow_v1(op):
                raise MemorySavingGradientsError(
                    "`memory_saving_gradients.pareto` looks at a copy of the graph, "
                    "but loops and branches of TensorFlow 1 cannot be copied "
                    f"({op.type} {op.name}). Call `plan` or `compare` with the "
                    "function that computes the loss: they trace it anew."
                )
            inputs = [made[id(tensor)] for tensor in op.inputs]
            copy = tf_internals_scratch.copy_apart(scratch, op, inputs)
            made.update(zip(map(id, op.outputs), copy.outputs, strict=True))
    sources = (made.get(id(_standing_for(plain_variable(x), graph))) for x in xs)
    return scratch, [made[id(y)] for y in ys], [x for x in sources if x is not None]


def _upstream(ys: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """The ops that the `ys` depend on, in order of creation."""
    found: dict[int, tf.Operation] = {}
    stack = [y.op for y in ys]
    while stack:
        op = stack.pop()
        if id(op) not in found:
            found[id(op)] = op
            stack.extend(tensor.op for tensor in op.inputs)
    return sorted(found.values(), key=tf_internals.creation_index)


def _standing_for(x: Any, graph: tf.Graph) -> Any:
    """The tensor of the graph that a variable, or a tensor from outside, is there."""
    if not isinstance(x, tf.Tensor):
        # Variables of TensorFlow 1 that are no resources have no handle.
        x = x.handle if hasattr(x, "handle") else x.op.outputs[0]
    if getattr(x, "graph", None) is graph or not hasattr(graph, "captures"):
        return x
    outside = _standing_for(x, graph.outer_graph)
    inside = [inner for outer, inner in graph.captures if outer is outside]
    return inside[0] if inside else x
