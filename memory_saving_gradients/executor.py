"""The order in which TensorFlow's executor runs ops that nothing holds back.

The executor is not one queue. A thread takes an op from the pool and runs it, and deals
with the ops that are ready then, in the order of their edges:

* what its kernel calls inexpensive (an alias, a shape, a constant, everything on a GPU)
  goes into the thread's own queue, first in, first out;
* of the others the last one stays with the thread, if its own queue is empty; the rest
  go to the front of the pool, for whoever is free.

So a chain of expensive ops runs depth first, and a side branch waits until its thread
has nothing better to do, rather than in turn as a single queue would have it. On a
transformer with dropout the difference is that between a random mask being drawn when
it is needed and all masks being drawn at the start.

With one thread this is what happens; with several, idle threads take side branches
earlier. Pure: plain data in, plain data out. Linear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from memory_saving_gradients.graph import OpNode, TrainingGraph

__all__ = ["executor_order"]


def executor_order(ops: Sequence[OpNode], graph: TrainingGraph) -> list[int]:
    """The ids of `ops` in the order in which a single-threaded executor runs them.

    Inputs that `ops` do not make count as being there.

    Args:
        ops: The ops to order, each after those that it reads.
        graph: Where they come from.

    Returns:
        Their ids, each after those that it depends on.
    """
    waiting, dependents = _dependencies(ops, graph)
    pool = deque(op.id for op in ops if not waiting[op.id])
    order: list[int] = []
    while pool:
        own = deque((pool.popleft(),))
        while own:
            current = own.popleft()
            order.append(current)
            ready = []
            for other in dependents[current]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
            _dispatch(ready, graph, own, pool)
    return order


def _dispatch(
    ready: Iterable[int], graph: TrainingGraph, own: deque[int], pool: deque[int]
) -> None:
    """Shares out the ops that have become ready on one thread."""
    last: int | None = None
    for op in ready:
        if graph.ops[op].inexpensive:
            own.append(op)
            continue
        if last is not None:
            pool.appendleft(last)
        last = op
    if last is not None:
        if own:
            pool.appendleft(last)
        else:
            own.append(last)


def _dependencies(
    ops: Sequence[OpNode], graph: TrainingGraph
) -> tuple[dict[int, int], dict[int, list[int]]]:
    """How many of `ops` each one waits for, and which wait for it."""
    waiting: dict[int, int] = {}
    dependents: dict[int, list[int]] = {op.id: [] for op in ops}
    for op in ops:
        before = dict.fromkeys(graph.tensors[tensor].op for tensor in op.inputs)
        before.update(dict.fromkeys(op.control_inputs))
        needed = [other for other in before if other in dependents]
        waiting[op.id] = len(needed)
        for other in needed:
            dependents[other].append(op.id)
    return waiting, dependents
