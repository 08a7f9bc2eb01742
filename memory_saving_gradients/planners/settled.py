"""What is settled before anybody plans: tensors to keep, and tensors not to.

A draw that cannot be repeated is held as long as anything made of it may be asked for
again. What is made of it alone and is smaller (a mask of bools) serves as well, so this
is kept: `masks_of_draws`, which also serve those who select by hand.

A draw that can be repeated costs about ten times what reading its result does: its mask
is worth a little memory to `memory` (`masks_of_dear_draws`).

A cast costs one pass over memory. There is no point in holding one of a variable, which
is there anyway and would be there twice: `casts_of_what_rests`, for automatic
strategies.
"""

from __future__ import annotations

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import Pin
from memory_saving_gradients.planners.problem import Problem

__all__ = [
    "casts_of_what_rests",
    "masks_of_dear_draws",
    "masks_of_draws",
    "narrowed",
]


def masks_of_draws(problem: Problem) -> frozenset[int]:
    """For each draw that cannot be repeated the smaller tensor to keep, if any."""
    buffers = problem.buffers
    found = set()
    for draw in problem.useful_tensors:
        if buffers.pinned(draw) is Pin.STATEFUL:
            mask = narrowed(buffers, draw)
            if buffers.size[mask] < buffers.size[draw]:
                found.add(mask)
    return frozenset(found)


def masks_of_dear_draws(problem: Problem) -> frozenset[int]:
    """For each draw that could be repeated the smaller tensor to keep, if any."""
    buffers = problem.buffers
    graph = buffers.graph
    found = set()
    for draw in problem.useful_tensors:
        kind = graph.ops[graph.tensors[draw].op].type
        if kind.startswith(("StatelessRandom", "StatelessTruncated")):
            mask = narrowed(buffers, draw)
            if buffers.size[mask] < buffers.size[draw]:
                found.add(mask)
    return frozenset(found)


def casts_of_what_rests(buffers: Buffers) -> frozenset[int]:
    """Casts of variables, inputs and constants, which are recomputed from these."""
    return frozenset(
        tensor
        for op in buffers.graph.forward_ops
        if op.type == "Cast" and op.pin is None and not buffers.reads[op.id]
        for tensor in buffers.makes[op.id]
    )


def narrowed(buffers: Buffers, tensor: int) -> int:
    """The last tensor, no bigger, of those that alone are made of the one before.

    Whoever keeps it need not keep or redo what came before: a bias has been added, a
    dropout mask of bools been made of random floats.
    """
    while True:
        readers = buffers.forward_readers[tensor]
        if len(readers) != 1 or buffers.backward_readers[tensor]:
            return tensor
        made = buffers.makes[buffers.forward[readers[0]]]
        if (
            len(made) != 1
            or made[0] in buffers.endless
            or buffers.pinned(made[0]) is not None
            or buffers.size[made[0]] > buffers.size[tensor]
        ):
            return tensor
        tensor = made[0]
