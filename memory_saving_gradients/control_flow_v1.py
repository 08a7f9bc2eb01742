"""What the loops and branches of TensorFlow 1 demand of an order.

Their ops stand in the graph itself, and three rules of the executor are not edges:

1. A loop gives nothing out before all has come in: each `Exit` waits for every `Enter`
   of its frame (`frames`).
2. What stands behind a `Switch` and before a `Merge` may be *dead*, that is, never run;
   whatever waits for a dead op dies with it.
3. Autodiff adds to a loop of the forward pass the stacks on which it puts its
   intermediates. What such a loop waits for must not wait for the loop.

So ordering edges may be attached to none of the ops that `unorderable` finds, and none
may start there.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients import tf_internals

__all__ = ["frames", "unorderable"]

_ENTER_TYPES = frozenset(("Enter", "RefEnter"))
_EXIT_TYPES = frozenset(("Exit", "RefExit"))
_SWITCH_TYPES = frozenset(("Switch", "RefSwitch", "_SwitchN"))
_MERGE_TYPES = frozenset(("Merge", "RefMerge"))


def frames(ops: Sequence[tf.Operation]) -> dict[int, list[tf.Operation]]:
    """For the `id` of each `Exit` among `ops` the `Enter`s of the same loop."""
    enters: dict[int, list[tf.Operation]] = {}
    for op in ops:
        if op.type in _ENTER_TYPES:
            context = tf_internals.control_flow_context(op)
            enters.setdefault(id(context), []).append(op)
    if not enters:
        return {}
    return {
        id(op): enters.get(id(tf_internals.control_flow_context(op)), [])
        for op in ops
        if op.type in _EXIT_TYPES
    }


def unorderable(
    ops: Sequence[tf.Operation], frames: dict[int, list[tf.Operation]]
) -> set[int]:
    """The `id`s of the ops to which no ordering edge may be attached.

    Args:
        ops: Sorted topologically.
        frames: Of these ops.
    """
    dead: set[int] = set()
    found: set[int] = set()
    for op in ops:
        if op.type in _SWITCH_TYPES or _dies(op, dead, frames):
            dead.add(id(op))
        if (
            id(op) in dead
            or tf_internals.in_control_flow_v1(op)
            or any(tensor.dtype == tf.resource for tensor in op.outputs)
        ):
            found.add(id(op))
    return found


def _dies(
    op: tf.Operation, dead: set[int], frames: dict[int, list[tf.Operation]]
) -> bool:
    """Whether an op may be dead because of one that it depends on."""
    if op.type in _MERGE_TYPES:
        return False
    if op.type in _EXIT_TYPES:
        return any(id(enter) in dead for enter in frames.get(id(op), ()))
    return any(id(tensor.op) in dead for tensor in op.inputs) or any(
        id(other) in dead for other in op.control_inputs
    )
