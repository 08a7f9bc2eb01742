"""Splitting a loop's history: a loop of loops in the place of a loop.

The gradient of a loop needs the state of each iteration: T of them for T iterations.
A loop of loops needs fewer. The outer one runs T / k times, the inner one k times; the
gradient holds the state at the beginning of each inner loop, runs that loop again when
its turn comes, and so has T / k + k states at the most: 2 √T for k = √T (Griewank 1992,
*Achieving logarithmic growth*; Chen et al. 2016, arXiv 1604.06174).

No loop has to be written like that. When its gradient is about to be built, the op gets
another body and another condition, in place:

1. What the body reads of variables is read in the new body, once each k iterations.
   (The loop changes none of these variables: one that does is not split.)
2. The new body runs an inner loop over copies of the original graphs (`twins`), k times
   or until the original condition says no. It has no state and may be run again.
3. The op counts inner loops now: nobody but its gradient asks. The original condition
   is given k times that, which is exact where it matters: an inner loop that ended
   before its k-th iteration was the last one.
4. The gradient is built as ever, of the op as it is now. In the gradient body the inner
   loop is run again as a whole (`tf_capture`) and not stored.

Lists that the loop only writes to (the outputs of a recurrent layer) are no state: the
inner loop that is run again writes to the list that the loop began with, and nobody
reads that. So under XLA, where each held list would be a copy of all of its elements,
none is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    op_types,
    tf_internals,
    tf_internals_bodies,
    tf_internals_loops,
    trip_counts,
    twins,
)
from memory_saving_gradients.every import Every, steps_of
from memory_saving_gradients.stored import bytes_of

__all__ = [
    "as_differentiated",
    "held_again",
    "of_outer",
    "seek",
    "split_loop",
    "stand_in",
    "state_bytes",
]

_LITTLE = 64
"""Bytes of a state (counters and the like) for which no loop is run again."""

# The attribute of a body that names with respect to what it is differentiated.
_SOUGHT = "_memory_saving_gradients_sought"

# That of what makes a list: what stands for that list.
_STAND_IN = "_memory_saving_gradients_stand_in"

# That of an inner loop, which is run again: which inputs are lists only written to.
_AGAIN = "_memory_saving_gradients_again"


def held_again(op: tf.Operation) -> frozenset[int] | None:
    """Which inputs of an inner loop are lists only written to, None if it is none."""
    return getattr(op, _AGAIN, None)


def of_outer(tensor: tf.Tensor) -> tf.Tensor:
    """What an inner loop was given, for an output of it that is just that."""
    op = tensor.op
    if held_again(op) is None:
        return tensor
    _, body = tf_internals_bodies.graphs_of_loop(op)
    if body is None or not tf_internals_loops.hands_on(body, tensor.value_index):
        return tensor
    return op.inputs[tensor.value_index]


def stand_in(loop: tf.Operation, place: int) -> tf.Tensor:
    """What an inner loop that is run again may have for a list that it only writes to.

    The list that the loop began with. But XLA would copy it, full of zeros as it is,
    each time. There one element will do: what lies outside is written to the last.
    """
    given = loop.inputs[place]
    while given.op.type == "Identity":
        given = given.op.inputs[0]
    if given.op.type != "TensorListReserve" or not tf_internals.in_xla(loop.graph):
        return loop.inputs[place]
    known = getattr(given.op, _STAND_IN, None)
    if known is None:
        with tf_internals_loops.beside(given.op):
            known = tf.raw_ops.TensorListReserve(
                element_shape=given.op.inputs[0],
                num_elements=1,
                element_dtype=given.op.get_attr("element_dtype"),
            )
        setattr(given.op, _STAND_IN, known)
    return known


def seek(body: tf.Graph, sources: Sequence[Any]) -> None:
    """Notes with respect to what a loop's body is about to be differentiated."""
    setattr(body, _SOUGHT, frozenset(map(id, sources)))


def as_differentiated(op: Any, given: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What stock's gradient of a loop shall be given.

    What a loop of loops holds, it holds as often as there are inner loops.

    For an inner loop stock lets gradients of lists that the loop reads (the inputs of a
    recurrent layer) begin with a list full of zeros. Empty lists do as well. And where
    nobody asks for their gradients none are computed; stock knows that of loops
    on a tape only.

    Args:
        op: Any loop, or what a tape has remembered of it.
        given: The gradients of its results.

    Returns:
        The same, or what shall be taken instead.
    """
    loop = op.outputs[0].op
    if (split := trip_counts.split_of(loop)) is not None:
        inputs = [loop.inputs[0], split.chunks, *list(loop.inputs)[2:]]
        skipped = getattr(op, "skip_input_indices", None)
        op = tf_internals_loops.AsDifferentiated(inputs, loop.outputs, skipped)
    sought = getattr(loop.graph, _SOUGHT, None)
    _, body = tf_internals_bodies.graphs_of_loop(loop)
    if held_again(loop) is None or sought is None or body is None:
        return op, list(given)
    around = {id(tensor) for tensor in loop.graph.inputs}
    unwanted = tuple(
        place
        for place, tensor in enumerate(loop.inputs)
        if id(tensor) in around and id(tensor) not in sought
    )
    results = list(given)
    for place, tensor in enumerate(loop.inputs):
        if tensor.dtype == tf.variant and tf_internals_loops.hands_on(body, place):
            results[place] = None if place in unwanted else _empty_like(tensor)
    op = tf_internals_loops.AsDifferentiated(loop.inputs, loop.outputs, unwanted)
    return op, results


def _empty_like(list_: tf.Tensor) -> tf.Tensor:
    """A list as long as another one, of elements that are not there, which is zeros."""
    return tf.raw_ops.TensorListReserve(
        element_shape=tf.raw_ops.TensorListElementShape(
            input_handle=list_, shape_type=tf.int32
        ),
        num_elements=tf.raw_ops.TensorListLength(input_handle=list_),
        element_dtype=tf_internals_loops.element_type(list_),
    )


def state_bytes(loop: tf.Operation, unknown_dim: int) -> int:
    """Bytes of what is held once an iteration if the rest is recomputed."""
    _, body = tf_internals_bodies.graphs_of_loop(loop)
    if body is None:
        return 0
    return sum(
        bytes_of(body.inputs[place], unknown_dim)
        for place in range(2, tf_internals_loops.explicit_inputs(loop))
        if not tf_internals_loops.hands_on(body, place)
        and body.inputs[place].dtype != tf.variant
    )


def split_loop(loop: tf.Operation, every: Every) -> str:
    """Makes a loop hold its state each `every` iterations, if that is of any use.

    Args:
        loop: A `While` whose gradient is about to be built.
        every: How many iterations, or `SQRT`.

    Returns:
        Why it is left as it is, or "".
    """
    if trip_counts.split_of(loop) is not None or held_again(loop) is not None:
        return ""
    condition, body = tf_internals_bodies.graphs_of_loop(loop)
    if condition is None or body is None or body.deferred_external_captures:
        return "what it runs is not known to Python"
    if reason := trip_counts.why_whole(loop, body):
        return reason
    if tf_internals_loops.has_been_differentiated(loop):
        return "another gradient of it is there"
    steps = steps_of(every, loop)
    known = trip_counts.iterations(loop)
    ends_early = trip_counts.may_end_early(loop)
    if steps <= 1 or (known is not None and steps >= known):
        return f"it has no more than {known} iterations" if steps > 1 else ""
    if state_bytes(loop, trip_counts.ASSUMED_ITERATIONS) <= _LITTLE:
        return "it has next to no state"
    try:
        parts = _parts(loop, condition, body)
    except twins.Unrepeatable as reason:
        return str(reason)
    with tf_internals_loops.beside(loop), tf_internals_bodies.no_recording():
        tf_internals_loops.replace_graphs(loop, *_graphs(loop, steps, parts))
        most = loop.inputs[1]
        static = tf.get_static_value(most)
        if static is not None and static < 0:
            chunks = most
        elif static is not None:
            chunks = tf.constant(-(-static // steps), most.dtype)
        else:
            # Negative means that there is no bound.
            chunks = tf.where(most < 0, most, (most + (steps - 1)) // steps)
    tf_internals_loops.one_at_a_time(loop)
    trip_counts.Split(steps, known, ends_early, chunks).note(loop)
    return ""


@dataclass(frozen=True)
class _Parts:
    """What of a loop matters for splitting it.

    Attributes:
        reads: For the numbers of the inputs that are variables' handles an op that
            reads one.
        tests: The same of the condition alone.
        written: Numbers of the inputs that are lists which the loop only writes to.
    """

    reads: dict[int, tf.Operation]
    tests: dict[int, tf.Operation]
    written: frozenset[int]


def _parts(loop: tf.Operation, condition: tf.Graph, body: tf.Graph) -> _Parts:
    """What matters; raises `Unrepeatable`."""
    count = tf_internals_loops.explicit_inputs(loop)
    if len(body.inputs) != len(loop.inputs) or len(condition.inputs) != len(
        loop.inputs
    ):
        raise twins.Unrepeatable("its graphs do not fit")
    found = []
    for graph in (condition, body):
        handles = {
            id(t): place
            for place, t in enumerate(graph.inputs)
            if t.dtype == tf.resource and place >= count
        }
        found.append(twins.variables_read(graph, handles))
    lists = [
        place
        for place in range(2, count)
        if body.inputs[place].dtype == tf.variant
        and not tf_internals_loops.hands_on(body, place)
    ]
    written = frozenset(
        place
        for place in lists
        if not condition.inputs[place].consumers() and _is_only_written(body, place)
    )
    if tf_internals.in_xla(loop.graph) and len(written) < len(lists):
        raise twins.Unrepeatable(
            "it reads from a list that it writes to, of which XLA would hold copies"
        )
    return _Parts({**found[0], **found[1]}, found[0], written)


def _is_only_written(body: tf.Graph, place: int) -> bool:
    """Whether a loop's body does nothing with a list but put elements into it."""
    pending = [body.inputs[place]]
    while pending:
        tensor = pending.pop()
        for reader in tensor.consumers():
            is_list = reader.inputs[0] is tensor and not any(
                t is tensor for t in list(reader.inputs)[1:]
            )
            if reader.type not in _WRITERS or not is_list:
                return False
            pending.append(reader.outputs[0])
        others = [n for n, t in enumerate(body.outputs) if t is tensor and n != place]
        if others:
            return False
    return True


_WRITERS = frozenset(("Identity", "TensorListPushBack", "TensorListSetItem"))


def _graphs(loop: tf.Operation, steps: int, parts: _Parts) -> tuple[tf.Graph, tf.Graph]:
    """The condition and the body of the loop of loops."""
    old_condition, _ = tf_internals_bodies.graphs_of_loop(loop)
    assert old_condition is not None

    def start(inputs: Sequence[tf.Tensor]) -> list[Any]:
        """What the original graphs shall see at the beginning of an inner loop."""
        tensors = [None if t.dtype == tf.resource else t for t in inputs]
        tensors[0] = inputs[0] * steps
        return tensors

    def condition(inputs: list[tf.Tensor]) -> tf.Tensor:
        given = {
            id(i): t
            for i, t in zip(old_condition.inputs, start(inputs), strict=True)
            if t is not None
        }
        values = {
            id(old_condition.inputs[place]): value
            for place, value in _values(parts.tests, inputs).items()
        }
        results = [old_condition.outputs[0]]
        return twins.copied(old_condition, results, given, values)[0]

    def body(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        values = _values(parts.reads, inputs)
        results = twins.loop_of_copies(loop, start(inputs), values, steps, "every")
        count = tf_internals_loops.explicit_inputs(loop)
        made = [t.op for t in results[2:count] if t is not None]
        inner = next(op for op in made if op.type in op_types.LOOP_TYPES)
        _mark(inner, [inputs[place] for place in sorted(parts.written)])
        return [inputs[0] + 1, inputs[1], *results[2:count]]

    return tf_internals_loops.graphs_like(loop, "_every", condition, body)


def _mark(inner: tf.Operation, written: Sequence[tf.Tensor]) -> None:
    """Notes that an inner loop is to be run again, and what it only writes to."""
    places = frozenset(
        place
        for place, tensor in enumerate(inner.inputs)
        if any(tensor is list_ for list_ in written)
    )
    setattr(inner, _AGAIN, places)


def _values(
    reads: dict[int, tf.Operation], inputs: Sequence[tf.Tensor]
) -> dict[int, tf.Tensor]:
    """Reads variables in the graph that is being built."""
    graph = tf.compat.v1.get_default_graph()
    return {
        place: tf_internals_bodies.copy_whole(graph, read, [inputs[place]]).outputs[0]
        for place, read in sorted(reads.items())
    }
