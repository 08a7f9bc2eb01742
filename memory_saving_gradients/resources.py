"""Ops that use one resource run in the order in which they were made.

When the trace of a `tf.function` ends, TensorFlow adds control edges that say so
("automatic control dependencies"). Collective ops all use one resource, a token: those
in the gradients of synchronised batch norm under `MultiWorkerMirroredStrategy`, say. An
order of the backward pass that says otherwise would close a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients import tf_internals

__all__ = ["users_before"]


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
