"""What loops and branches hold for their gradients: the bytes of their side outputs.

A loop appends what its gradient will read to lists, once an iteration, and a branch
wraps it. In the graph around, these are handles of a few bytes.
"""

from __future__ import annotations

import tensorflow as tf

from memory_saving_gradients import op_types, tf_internals, tf_internals_bodies
from memory_saving_gradients.trip_counts import runs_of, source_of

__all__ = [
    "bytes_of",
    "copies_list",
    "leading_nowhere",
    "lists_handed_through",
    "shared_outputs",
    "side_outputs",
]

_BRANCHES = frozenset("Case If StatelessCase StatelessIf".split())


def side_outputs(op: tf.Operation, unknown_dim: int) -> dict[int, int]:
    """For each output of a loop, branch or call that holds intermediates: its bytes.

    Args:
        op: Any op.
        unknown_dim: What an unknown dimension is taken to be.
    """
    if op.type not in op_types.CALL_TYPES:
        return {}
    if op.type not in op_types.LOOP_TYPES | _BRANCHES:
        return _handed_out(op, unknown_dim)
    times = runs_of(op)
    states = _next_states(op)
    best: dict[int, int] = {}
    numbers: dict[int, int] = {}
    exported = tf_internals_bodies.exported(op)
    for branch, body in enumerate(tf_internals_bodies.bodies_of(op)):
        read = _read_of_branch(op, branch)
        found: dict[int, int] = {}
        for number, tensor in exported:
            if not any(t is tensor for t in body.outputs[number].op.inputs):
                continue  # of another branch
            is_held = number in read and id(tensor) not in states
            found[number] = times * _held(tensor, unknown_dim) if is_held else 0
        numbers.update(dict.fromkeys(found, 0))
        # Of the branches only one is taken: the one that holds most counts.
        if sum(found.values()) > sum(best.values()):
            best = found
    return numbers | best


def shared_outputs(op: tf.Operation) -> dict[int, int]:
    """For each output of a call or branch that is an earlier one, too: which one.

    The result of a function is often what its gradient wants, as well, and is given out
    twice.
    """
    if op.type not in op_types.CALL_TYPES or op.type in op_types.LOOP_TYPES:
        return {}
    shared: list[dict[int, int]] = []
    for body in tf_internals_bodies.bodies_of(op):
        first: dict[int, int] = {}
        same: dict[int, int] = {}
        for number, tensor in enumerate(body.outputs[: len(op.outputs)]):
            wrapped = tensor.op.type == "OptionalFromValue"
            source = source_of(tensor.op.inputs[0] if wrapped else tensor)
            place = first.setdefault(id(source), number)
            if place < number and source.op.type not in op_types.RESTING_TYPES:
                same[number] = place
        shared.append(same)
    if not shared:
        return {}
    # Of the branches one is taken, nobody knows which.
    return {
        number: place
        for number, place in shared[0].items()
        if all(same.get(number) in (place, None) for same in shared)
    }


def lists_handed_through(op: tf.Operation) -> set[int]:
    """The numbers of a loop's results that are the very lists that it was given: what
    its body only reads, such as that of all inputs of a recurrent layer."""
    if op.type not in op_types.LOOP_TYPES:
        return set()
    return {
        number
        for body in tf_internals_bodies.bodies_of(op)
        for number, (given, result) in enumerate(
            zip(body.inputs, body.outputs, strict=False)
        )
        if result.dtype == tf.variant and source_of(result) is given
    }


def copies_list(op: tf.Operation) -> bool:
    """Whether an op makes a list as large as what it is made of."""
    is_list = bool(op.outputs) and op.outputs[0].dtype == tf.variant
    return is_list and op.type in ("TensorListFromTensor", "ZerosLike")


def leading_nowhere(body: tf.Graph) -> set[int]:
    """The numbers of inputs on which nothing depends that a body returns or does."""
    pending = [t.op for t in body.outputs]
    pending += [op for op in body.get_operations() if tf_internals.is_stateful(op)]
    reached: set[int] = set()
    while pending:
        op = pending.pop()
        if id(op) not in reached:
            reached.add(id(op))
            pending.extend(t.op for t in op.inputs)
    return {n for n, t in enumerate(body.inputs) if id(t.op) not in reached}


def bytes_of(tensor: tf.Tensor, unknown_dim: int) -> int:
    """The size of a tensor, as far as its shape is known; 0 if not even its rank is."""
    if tensor.shape.rank is None:
        return 0
    count = tensor.dtype.size or 8
    for size in tensor.shape.as_list():
        count *= unknown_dim if size is None else size
    return int(count)


def _handed_out(op: tf.Operation, unknown_dim: int) -> dict[int, int]:
    """The same of a call: what loops and branches in it hold, it hands out."""
    return {
        number: _held(tensor, unknown_dim) if op.outputs[number].consumers() else 0
        for body in tf_internals_bodies.bodies_of(op)
        for number, tensor in enumerate(body.outputs[: len(op.outputs)])
        if source_of(tensor).op.type in op_types.LOOP_TYPES | _BRANCHES
        and tensor.dtype == tf.variant
    }


def _read_of_branch(op: tf.Operation, branch: int) -> set[int]:
    """The numbers of outputs that somebody reads if this branch is taken.

    Who reads what a branch holds is the same branch of the gradient.
    """
    if op.type in op_types.LOOP_TYPES:
        return set(range(len(op.outputs)))
    count = len(tf_internals_bodies.bodies_of(op))
    read: set[int] = set()
    unread: dict[int, set[int]] = {}
    for number, tensor in enumerate(op.outputs):
        for reader in tensor.consumers():
            bodies = tf_internals_bodies.bodies_of(reader)
            if len(bodies) != count or reader.type not in _BRANCHES:
                read.add(number)
                continue
            if id(reader) not in unread:
                unread[id(reader)] = leading_nowhere(bodies[branch])
            places = [n for n, t in enumerate(reader.inputs) if t is tensor]
            if any(place - 1 not in unread[id(reader)] for place in places):
                read.add(number)
    return read


def _next_states(op: tf.Operation) -> set[int]:
    """The `id`s of states of which a loop holds what they are made of as well: that is
    the state of the next iteration, in the same buffer."""
    if op.type not in op_types.LOOP_TYPES or tf_internals.in_xla(op.graph):
        return set()
    pushed = [
        tensor
        for number, tensor in tf_internals_bodies.exported(op)
        for body in tf_internals_bodies.bodies_of(op)
        if body.outputs[number].op.type == "TensorListPushBack"
    ]
    held = {id(source_of(tensor)) for tensor in pushed}
    return {
        id(state)
        for body in tf_internals_bodies.bodies_of(op)
        for state, following in zip(body.inputs, body.outputs, strict=False)
        if following is not state and id(source_of(following)) in held - {id(state)}
    }


def _held(tensor: tf.Tensor, unknown_dim: int) -> int:
    source = source_of(tensor)
    if source.op.type == "ReadVariableOp":  # it shares the variable's buffer
        return 0
    if source.dtype == tf.variant:
        return side_outputs(source.op, unknown_dim).get(source.value_index, 8)
    return bytes_of(tensor, unknown_dim)
