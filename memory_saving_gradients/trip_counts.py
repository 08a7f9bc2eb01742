"""How often a loop runs, as far as its graph says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    op_types,
    tf_internals_bodies,
    tf_internals_loops,
)

__all__ = [
    "ASSUMED_ITERATIONS",
    "Split",
    "iterations",
    "may_end_early",
    "runs_of",
    "source_of",
    "split_of",
    "why_whole",
]

ASSUMED_ITERATIONS = 64
"""What a loop is taken to run if nothing in the graph says how often it does."""

_BRANCHES = frozenset(("If", "StatelessIf"))

# The attribute of a loop that has become a loop of loops.
_SPLIT = "_memory_saving_gradients_split"


@dataclass(frozen=True)
class Split:
    """How a loop was split (see `split`).

    Attributes:
        every: The iterations of an inner loop.
        iterations: Those of the loop before, None if nothing said.
        ends_early: Whether they may have been fewer.
        chunks: How many inner loops there may be, in the loop's graph; negative if
            there is no bound.
    """

    every: int
    iterations: int | None
    ends_early: bool
    chunks: tf.Tensor

    def note(self, loop: tf.Operation) -> None:
        """Remembers it for the loop."""
        setattr(loop, _SPLIT, self)


def split_of(loop: tf.Operation | None) -> Split | None:
    """How a loop was split, None if it is as it was."""
    return getattr(loop, _SPLIT, None)


def runs_of(op: tf.Operation) -> int:
    """How often what is inside an op is taken to run: in a loop, each iteration."""
    if op.type not in op_types.LOOP_TYPES:
        return 1
    return iterations(op) or ASSUMED_ITERATIONS


def iterations(loop: tf.Operation | None) -> int | None:
    """How often a loop runs at the most; None if nothing says.

    That is `maximum_iterations`, or follows from a condition such as `i < n` on a
    counter to which the body adds a constant. Of a loop of loops it is the number of
    inner loops, if need be of as many iterations as are assumed.
    """
    if loop is None:
        return None
    split = split_of(loop)
    if split is not None:
        return -(-(split.iterations or ASSUMED_ITERATIONS) // split.every)
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
        elif _is_both(test.op):
            pending.append(source_of(test.op.inputs[0]))
        elif test.op.type in ("Less", "LessEqual"):
            found = _counted(loop, condition, body, test.op)
            if found is not None:
                return found
    return None


def why_whole(loop: tf.Operation, body: tf.Graph) -> str:
    """Why a loop in a loop, or around one, is not split, or "".

    A function that a loop calls counts as inside it, as far as it was traced there.
    """
    around: tf.Graph | None = loop.graph
    while around is not None and not tf_internals_bodies.is_loop_body(around):
        around = getattr(around, "outer_graph", None)
    if around is not None:
        return "it stands inside another loop"
    # TensorFlow gives graphs that it changes again and again the same name.
    if tf_internals_loops.may_be_differentiated_twice(loop.graph) and any(
        op.type in op_types.LOOP_TYPES
        for graph in (body, *tf_internals_bodies.graphs_inside(body))
        for op in graph.get_operations()
    ):
        return "there is a loop inside it, and a tape that may be asked twice"
    return ""


def _is_both(op: tf.Operation) -> bool:
    """Whether an op is what AutoGraph makes of a loop with `break`: a branch that is
    False unless its condition holds."""
    branches = tf_internals_bodies.bodies_of(op) if op.type in _BRANCHES else []
    if len(branches) < 2 or op.inputs[0].dtype != tf.bool:
        return False
    value = tf.get_static_value(source_of(branches[1].outputs[0]))
    return value is not None and not value.any()


def may_end_early(loop: tf.Operation) -> bool:
    """Whether it depends on what a loop computes when it ends.

    So it is if the condition reads anything but counters and what stays as it is (a
    loop with `break` does).
    """
    split = split_of(loop)
    if split is not None:
        return split.ends_early
    condition, body = tf_internals_bodies.graphs_of_loop(loop)
    if condition is None or body is None:
        return True
    pending, seen = [condition.outputs[0]], set[int]()
    while pending:
        tensor = pending.pop()
        place = _place(condition, tensor)
        if place is not None and not _is_told(body, place):
            return True
        if place is None and id(tensor.op) not in seen:
            seen.add(id(tensor.op))
            pending.extend(tensor.op.inputs)
    return False


def _is_told(body: tf.Graph, place: int) -> bool:
    """Whether a loop variable is the same in all iterations, or a counter."""
    after = source_of(body.outputs[place])
    if _place(body, after) == place:
        return True
    terms = [source_of(t) for t in after.op.inputs]
    own = [_place(body, t) for t in terms]
    if after.op.type not in ("Add", "AddV2") or place not in own:
        return False
    step = terms[1 - own.index(place)]
    number = _place(body, step)
    if number is None:
        return tf.get_static_value(step) is not None
    return _place(body, source_of(body.outputs[number])) == number


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
