"""Ops that use one resource run in the order in which they were made.

When the trace of a `tf.function` ends, TensorFlow adds control edges that say so
("automatic control dependencies"). Collective ops all use one resource, a token: those
in the gradients of synchronised batch norm under `MultiWorkerMirroredStrategy`, say. An
order of the backward pass that says otherwise would close a cycle.

TensorFlow 1's reference variables have no reads: what is computed of one reads its very
buffer, in the forward pass as it was and in a copy as it has become.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients import tf_internals
from memory_saving_gradients.trip_counts import source_of

__all__ = ["assigned_references", "users_before"]

_VARIABLES = frozenset(("Variable", "VariableV2"))


def users_before(ops: Sequence[tf.Operation]) -> dict[int, list[tf.Operation]]:
    """For the `id` of each op the latest ones before it that use its resources.

    Args:
        ops: Ops in the order of their creation.
    """
    newest: dict[int, tf.Operation] = {}
    found: dict[int, list[tf.Operation]] = {}
    for op in ops:
        if not tf_internals.is_stateful(op):
            continue
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                if id(tensor) in newest:
                    found.setdefault(id(op), []).append(newest[id(tensor)])
                newest[id(tensor)] = op
    return found


def assigned_references(ops: Sequence[tf.Operation]) -> set[int]:
    """The `id`s of the reference variables that some of the ops assign."""
    found = set()
    for op in ops:
        if op.type not in _VARIABLES and op.inputs:
            first = op.inputs[0]
            # What only reads one, `Identity` say, gives out no reference.
            gives = any(t.dtype != t.dtype.base_dtype for t in op.outputs)
            if gives and first.dtype != first.dtype.base_dtype:
                found.add(id(source_of(first)))
    return found
