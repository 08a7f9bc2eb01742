"""Which loops are split under a budget, when nobody has said.

A loop is split before its gradient is built, and so before there is anything to plan
with. What it takes is estimated, therefore: its state, once an iteration, is what it
holds if everything else is recomputed. If that of all loops takes the larger part of
the budget, those that matter are split, with the square root of their iterations: time
does not depend on how many these are, so that no other number is better.

A share of stock's peak needs that peak. It is estimated by what gradients read: results
of ops whose gradient needs the result (`tanh`), operands of ops whose gradient needs
the operands (products). Of linear ops neither is needed.
"""

from __future__ import annotations

import tensorflow as tf

from memory_saving_gradients import op_types, tf_internals_bodies
from memory_saving_gradients.budget import Budget
from memory_saving_gradients.budgeted import room
from memory_saving_gradients.split import state_bytes
from memory_saving_gradients.stored import ASSUMED_ITERATIONS, bytes_of
from memory_saving_gradients.trip_counts import iterations

__all__ = ["takes_most_of"]

_NEEDS_RESULT = frozenset(
    """Elu Exp Max Min Relu Relu6 Rsqrt Selu Sigmoid Softmax LogSoftmax Sqrt Tanh
    FusedBatchNormV3""".split()
)
_NEEDS_NOTHING = op_types.ALIAS_TYPES | frozenset(
    """Add AddN AddV2 BiasAdd Cast ConcatV2 GatherV2 Mean Neg Pack Pad PadV2 Slice Split
    SplitV StridedSlice Sub Sum TensorListFromTensor TensorListGetItem TensorListStack
    TensorListPushBack TensorListSetItem Tile Transpose Unpack""".split()
)

_LESSER = 16
"""A loop that holds less than this part of what all hold stays as it is."""


def takes_most_of(budget: Budget, loop: tf.Operation, graph: tf.Graph) -> bool:
    """Whether a loop has a large part in loops' taking most of a budget.

    Args:
        budget: The budget.
        loop: The loop.
        graph: What is differentiated; the loop may stand further inside.
    """
    graphs = [graph] if loop.graph is graph else [graph, loop.graph]
    states = [
        _states(op)
        for around in graphs
        for op in around.get_operations()
        if op.type in op_types.LOOP_TYPES
    ]
    if _LESSER * _states(loop) < sum(states):
        return False
    stock = max(map(_needed_bytes, graphs)) if budget.is_share else 0
    return 2 * sum(states) > room(budget, stock)


def _states(loop: tf.Operation) -> int:
    times = iterations(loop) or ASSUMED_ITERATIONS
    return times * state_bytes(loop, ASSUMED_ITERATIONS)


def _needed_bytes(graph: tf.Graph) -> int:
    """About as much as gradients need of what one run of a graph computes."""
    total = 0
    for op in graph.get_operations():
        for body in tf_internals_bodies.bodies_of(op):
            times = 1
            if op.type in op_types.LOOP_TYPES:
                times = iterations(op) or ASSUMED_ITERATIONS
            total += times * _needed_bytes(body)
        if op.type in op_types.CALL_TYPES | op_types.RESTING_TYPES:
            continue
        for tensor in op.outputs:
            needed = op.type in _NEEDS_RESULT or any(
                reader.type not in _NEEDS_RESULT | _NEEDS_NOTHING
                for reader in tensor.consumers()
            )
            if needed and tensor.dtype.is_floating:
                total += bytes_of(tensor, ASSUMED_ITERATIONS)
    return total
