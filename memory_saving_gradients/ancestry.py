"""Which ops a training graph consists of, and in what order they stand."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from toposort import toposort_flatten

from memory_saving_gradients import control_flow_v1, op_types, tf_internals

__all__ = ["ancestors", "in_order", "used"]


def used(
    created: Sequence[tf.Operation], results: Sequence[tf.Tensor]
) -> list[tf.Operation]:
    """The created ops that will run: those with state and those that a result needs.

    Autodiff also differentiates with respect to constants, such as the 0.5 in a gelu;
    nobody reads these gradients and TensorFlow prunes them before it runs a graph.
    """
    candidates = set(map(id, created))
    stack = [tensor.op for tensor in results]
    stack.extend(op for op in created if tf_internals.is_stateful(op))
    found: set[int] = set()
    while stack:
        op = stack.pop()
        if id(op) in candidates and id(op) not in found:
            found.add(id(op))
            stack.extend(tensor.op for tensor in op.inputs)
            stack.extend(op.control_inputs)
    return [op for op in created if id(op) in found]


def ancestors(
    created: Sequence[tf.Operation], targets: Sequence[tf.Tensor]
) -> list[tf.Operation]:
    """The ops that existed before and that a target or a created op depends on."""
    backward = set(map(id, created))
    found: dict[int, tf.Operation] = {}
    stack = [tensor.op for tensor in targets]
    for op in created:
        stack.extend(tensor.op for tensor in op.inputs)
        stack.extend(op.control_inputs)
    while stack:
        op = stack.pop()
        if id(op) in found or id(op) in backward:
            continue
        found[id(op)] = op
        stack.extend(tensor.op for tensor in op.inputs)
        stack.extend(op.control_inputs)
    return list(found.values())


def in_order(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Ops in the order of their creation, or sorted topologically where that is none.

    Edges that go back (a v1 loop's `NextIteration`) are left out of the order. An op
    reads a later one, too, where an earlier call of this library rewired it.
    """
    ordered = sorted(ops, key=tf_internals.creation_index)
    places = {id(op): place for place, op in enumerate(ordered)}
    frames = control_flow_v1.frames(ordered)
    before: dict[int, set[int]] = {}
    straight = True
    for place, op in enumerate(ordered):
        if op.type in ("Merge", "RefMerge"):
            before[place] = {
                places[id(t.op)]
                for t in op.inputs
                if id(t.op) in places and t.op.type not in op_types.BACK_EDGE_TYPES
            }
            continue
        needed = [t.op for t in op.inputs]
        needed += [*op.control_inputs, *frames.get(id(op), ())]
        before[place] = {places[id(o)] for o in needed if id(o) in places}
        straight = straight and all(other < place for other in before[place])
    if straight:
        return ordered
    return [ordered[place] for place in toposort_flatten(before, sort=True)]
