"""The order of the backward ops, which no selection of kept tensors changes.

Among the ops that are ready runs the one that serves the latest part of the forward
pass: the gradient of a layer's weights as soon as its inputs are there, before an
earlier layer is touched. What leads to nothing but a result has no reason to wait.

Two kinds of ops follow a rule of their own: those that depend on no seed stand just
before the first op that reads them, and the gradient of a convolution's bias follows
that of its filter (`filter_gradients`).

Linear up to the logarithm of a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Set

from memory_saving_gradients.graph import TrainingGraph

__all__ = ["backward_order", "filter_gradients"]

_AT_ONCE = 1 << 60
"""The place that an op serves which leads to nothing but a result."""


def backward_order(graph: TrainingGraph, seeds: Set[int] = frozenset()) -> list[int]:
    """Orders the backward ops (step 1 of the module's outline).

    Args:
        graph: The training graph.
        seeds: Ids of backward ops that everything starts from: they run first.

    Returns:
        The ids of all backward ops in the order in which they shall run.
    """
    first = graph.forward_count
    serves = _places_served(graph, seeds)
    before = _waits(graph)
    late = _downstream(graph, seeds, before)
    waiting = [0] * len(graph.ops)
    dependents: list[list[int]] = [[] for _ in graph.ops]
    ready: list[tuple[int, int]] = []
    for op in graph.backward_ops:
        if op.id in late:
            needed = [other for other in before[op.id - first] if other in late]
            waiting[op.id] = len(needed)
            for other in needed:
                dependents[other].append(op.id)
            if not needed:
                ready.append((-serves[op.id], op.id))
    heapq.heapify(ready)
    order: dict[int, None] = {}
    while ready:
        current = heapq.heappop(ready)[1]
        _emit(current, before, first, order)
        for other in dependents[current]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (-serves[other], other))
    for op in graph.backward_ops:
        _emit(op.id, before, first, order)
    return list(order)


def _waits(graph: TrainingGraph) -> list[list[int]]:
    """For each backward op the backward ops that it waits for, ascending."""
    filters = filter_gradients(graph)
    found = []
    for op in graph.backward_ops:
        before = {graph.tensors[tensor].op for tensor in op.inputs}
        before.update(op.control_inputs)
        if op.id in filters:
            before.add(filters[op.id])
        found.append(sorted(o for o in before if o >= graph.forward_count))
    return found


def _downstream(
    graph: TrainingGraph, seeds: Set[int], before: list[list[int]]
) -> set[int]:
    """The backward ops that depend on a seed; all of them if there is none."""
    if not seeds:
        return {op.id for op in graph.backward_ops}
    found = set(seeds)
    for op in graph.backward_ops:
        if not found.isdisjoint(before[op.id - graph.forward_count]):
            found.add(op.id)
    return found


def _emit(op: int, before: list[list[int]], first: int, order: dict[int, None]) -> None:
    """Appends an op to the order, after what it still lacks.

    That is what depends on no seed: it reads only forward tensors, and were it run when
    it is ready, at the start, its result would be held until here.
    """
    stack = [op]
    while stack:
        missing = [o for o in before[stack[-1] - first] if o not in order]
        if missing:
            stack.extend(reversed(missing))
        else:
            order[stack.pop()] = None


def filter_gradients(graph: TrainingGraph) -> dict[int, int]:
    """For each bias gradient the filter gradient of the same convolution.

    oneDNN has one kernel for both, and TensorFlow merges the two ops on a CPU if they
    have the same control inputs. What ran between them would close a cycle: it would
    wait for one half of the merged op and be read by the other.
    """
    filters = {
        op.inputs[2]: op.id
        for op in graph.backward_ops
        if op.type == "Conv2DBackpropFilter"
    }
    return {
        op.id: filters[op.inputs[0]]
        for op in graph.backward_ops
        if op.type == "BiasAddGrad" and op.inputs[0] in filters
    }


def _places_served(graph: TrainingGraph, seeds: Set[int]) -> list[int]:
    """For each op the latest forward op whose result it, or what follows it, reads."""
    serves = [-1] * len(graph.ops)
    for op in reversed(graph.backward_ops):
        own = -1
        if not op.metadata_only:
            for tensor in op.inputs:
                producer = graph.tensors[tensor].op
                if producer < graph.forward_count:
                    own = max(own, producer)
        # `serves` holds here what the consumers, visited before, have handed down.
        serves[op.id] = max(own, serves[op.id])
        if op.id in seeds or serves[op.id] < 0:
            serves[op.id] = _AT_ONCE
        else:
            for tensor in op.inputs:
                producer = graph.tensors[tensor].op
                if producer >= graph.forward_count:
                    serves[producer] = max(serves[producer], serves[op.id])
    return serves
