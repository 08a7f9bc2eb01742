"""How often a loop runs, as far as its graph says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients import op_types, tf_internals_bodies

__all__ = ["Split", "iterations", "source_of", "split_of"]

# The attribute of a loop that has become a loop of loops.
_SPLIT = "_memory_saving_gradients_split"


@dataclass(frozen=True)
class Split:
    """How a loop was split (see `split`).

    Attributes:
        every: The iterations of an inner loop.
        iterations: Those of the loop before, None if nothing said.
        chunks: How many inner loops there may be, in the loop's graph; negative if
            there is no bound.
    """

    every: int
    iterations: int | None
    chunks: tf.Tensor

    def note(self, loop: tf.Operation) -> None:
        """Remembers it for the loop."""
        setattr(loop, _SPLIT, self)


def split_of(loop: tf.Operation | None) -> Split | None:
    """How a loop was split, None if it is as it was."""
    return getattr(loop, _SPLIT, None)


def iterations(loop: tf.Operation | None) -> int | None:
    """How often a loop runs at the most; None if nothing says.

    That is `maximum_iterations`, or follows from a condition such as `i < n` on a
    counter to which the body adds a constant.
    """
    if loop is None:
        return None
    split = split_of(loop)
    if split is not None:
        return split.iterations and -(-split.iterations // split.every)
    most = tf.get_static_value(loop.inputs[1])
    if most is not None and most >= 0:
        return max(int(most), 1)
    condition, body = tf_internals_bodies.graphs_of_loop(loop)
    if condition is None or body is None:
        return None
    pending = [source_of(condition.outputs[0])]
    while pending:
        test = pending.pop()
        if test.op.type == "LogicalAnd":
            pending.extend(map(source_of, test.op.inputs))
        elif test.op.type in ("Less", "LessEqual"):
            found = _counted(loop, condition, body, test.op)
            if found is not None:
                return found
    return None


def _counted(
    loop: tf.Operation, condition: tf.Graph, body: tf.Graph, test: tf.Operation
) -> int | None:
    """The iterations until a counter has reached a limit."""
    counter, limit = map(source_of, test.inputs)
    place = _place(condition, counter)
    if place is None:
        return None
    step = source_of(body.outputs[place]).op
    if step.type not in ("Add", "AddV2"):
        return None
    terms = [source_of(t) for t in step.inputs]
    own = [_place(body, t) for t in terms]
    if place not in own:
        return None
    values = (
        tf.get_static_value(loop.inputs[place]),
        _value(loop, body, condition, limit),
        _value(loop, body, body, terms[1 - own.index(place)]),
    )
    if any(value is None or value.ndim for value in values):
        return None
    start, end, by = (float(value) for value in values)
    if by <= 0:
        return None
    count = (end - start) / by
    whole = (
        int(count) if test.type == "Less" and count == int(count) else int(count) + 1
    )
    return max(whole, 1)


def _value(
    loop: tf.Operation, body: tf.Graph, graph: tf.Graph, tensor: tf.Tensor
) -> Any:
    """What a tensor of the condition or the body is in all iterations, if known."""
    place = _place(graph, tensor)
    if place is None:
        return tf.get_static_value(tensor)
    if _place(body, source_of(body.outputs[place])) != place:
        return None
    return tf.get_static_value(loop.inputs[place])


def source_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose buffer a tensor lives in."""
    while tensor.op.type in op_types.ALIAS_TYPES and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor


def _place(graph: tf.Graph, tensor: tf.Tensor) -> int | None:
    """The number of the loop variable that a tensor of a body is."""
    return next((n for n, t in enumerate(graph.inputs) if t is tensor), None)
