"""Several replicas, a thread each, build one graph and take turns while they do.

`MirroredStrategy` runs the replicas' Python that way. With synchronised batch norm a
turn ends in the middle of a gradient, and the backward passes meet: ops of one depend
on ops of the other. Each replica plans for itself, and changes nothing of the others'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients import op_types

__all__ = ["in_the_midst", "makers_of_what_is_read", "sizes_here"]


def in_the_midst(
    new: Sequence[tf.Operation], mine: Sequence[tf.Operation]
) -> list[tf.Operation]:
    """The new ops of other threads that mine depend on.

    They are no forward pass: some may depend on mine in turn. Synchronised batch norm
    makes such, where the replicas' gradients meet.
    """
    if len(new) == len(mine):
        return []
    known, own = set(map(id, new)), set(map(id, mine))
    found: set[int] = set()
    stack = list(mine)
    while stack:
        op = stack.pop()
        for other in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if id(other) in known and id(other) not in own and id(other) not in found:
                found.add(id(other))
                stack.append(other)
    return [op for op in new if id(op) in found]


def sizes_here(
    sizes: Sequence[int], tensors: Sequence[tf.Tensor], created: Sequence[tf.Operation]
) -> list[int]:
    """The sizes, 0 where the bytes are another replica's.

    That replica plans for itself: what it holds must not hide what this one could save.
    """
    devices = Counter(op.device for op in created if op.device)
    if not devices:
        return list(sizes)
    mine = devices.most_common(1)[0][0]
    return [
        size if tensor.op.device in ("", mine) else 0
        for size, tensor in zip(sizes, tensors, strict=True)
    ]


def makers_of_what_is_read(readers: Sequence[tf.Operation]) -> set[int]:
    """The `id`s of the ops whose buffers these ops read, aliases included."""
    found: set[int] = set()
    stack = [tensor.op for op in readers for tensor in op.inputs]
    while stack:
        op = stack.pop()
        if id(op) not in found:
            found.add(id(op))
            if op.type in op_types.ALIAS_TYPES:
                stack.extend(tensor.op for tensor in op.inputs)
    return found
