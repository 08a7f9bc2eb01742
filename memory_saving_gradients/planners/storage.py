"""The least bytes that serve a backward pass if some ops are not run twice.

In a loop what is held is held once an iteration, so that the order in which it dies
does not matter: only how much it is. This is a minimum cut (`cheapest`), with bytes as
prices of tensors. The seconds of ops, which are far less than one byte each, only break
ties.
"""

from __future__ import annotations

from collections.abc import Set

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.planners.cheapest import Cheapest

__all__ = ["least_held"]

_TO_A_BYTE = 10**9
"""Prices are whole numbers: this many to a byte, and to a second."""


def least_held(buffers: Buffers, unrepeatable: Set[int]) -> frozenset[int]:
    """The tensors to hold so that none of some ops is redone.

    Args:
        buffers: The buffer view of the graph.
        unrepeatable: Ids of ops not to be redone, besides those that are pinned.
    """
    ops = buffers.graph.ops
    cheapest = Cheapest(
        buffers,
        (tensor for op in buffers.forward for tensor in buffers.makes[op]),
        lambda tensor: _TO_A_BYTE * buffers.size[tensor],
    )

    def price(op: int) -> int | None:
        if ops[op].pin is not None or op in unrepeatable:
            return None
        return round(_TO_A_BYTE * ops[op].seconds)

    return cheapest.held(price)
