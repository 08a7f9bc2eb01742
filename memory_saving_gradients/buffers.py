"""Buffers, not tensors: the view of a training graph that memory planning needs.

TensorFlow's executor frees a buffer when the last op that reads it has run. Which ops
read a buffer is not what the edges say: `Reshape` and `Identity` hand their input's
buffer on, so that whoever reads their output reads *that* buffer; a variable read or a
constant takes no buffer at all; `Shape` runs early and holds nothing. `Buffers`
resolves all this once:

1. every op's inputs become the buffers that it really reads (`reads`), named by the
   tensor that owns them, with everything at rest left out;
2. ops that allocate nothing (aliases, sources at rest) drop out of the order;
3. forward ops get a *position*: the place in which the executor runs them;
4. backward ops get a *slot* (see `order.backward_order`).

Linear in the size of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from memory_saving_gradients.executor import executor_order
from memory_saving_gradients.graph import OpNode, Pin, Storage, TrainingGraph
from memory_saving_gradients.op_types import CALL_TYPES

__all__ = ["Buffers"]


class Buffers:
    """A training graph with its edges resolved to buffers (see the module docstring).

    Attributes:
        graph: The training graph.
        forward: Op ids by position, in the order in which they will run.
        backward: Op ids by slot, in the order that will be enforced.
        size: For each tensor id the bytes of the buffer that it owns, else 0.
        reads: For each op id the ids of the tensors that own the buffers it reads.
        makes: For each op id the ids of the tensors whose buffers it allocates.
    """

    def __init__(self, graph: TrainingGraph, backward: Sequence[int]) -> None:
        self.graph = graph
        tensors = graph.tensors
        self.size = [t.bytes if t.storage is Storage.OWN else 0 for t in tensors]
        self._behind = _buffers_behind(graph)
        self.reads = [self._read_by(op) for op in graph.ops]
        self.makes = [
            tuple(t for t in op.outputs if tensors[t].storage is Storage.OWN)
            for op in graph.ops
        ]
        self.forward = [
            op for op in executor_order(graph.forward_ops, graph) if self.makes[op]
        ]
        self.backward = [op for op in backward if self.makes[op]]
        self.position = _inverse(self.forward, len(graph.ops))
        self.slot = _inverse(self.backward, len(graph.ops))

    def behind(self, tensor: int) -> tuple[int, ...]:
        """The owners of the buffers that are read by whoever reads `tensor`."""
        return self._behind[tensor]

    def _read_by(self, op: OpNode) -> tuple[int, ...]:
        if op.metadata_only or not op.inputs:
            return ()
        found: dict[int, None] = {}
        for tensor in op.inputs:
            found.update(dict.fromkeys(self._behind[tensor]))
        return tuple(found)

    @cached_property
    def forward_readers(self) -> list[list[int]]:
        """For each tensor id the positions that read its buffer, ascending."""
        found: list[list[int]] = [[] for _ in self.graph.tensors]
        for position, op in enumerate(self.forward):
            for tensor in self.reads[op]:
                found[tensor].append(position)
        return found

    @cached_property
    def backward_readers(self) -> list[list[int]]:
        """For each tensor id the slots that read its buffer, ascending."""
        found: list[list[int]] = [[] for _ in self.graph.tensors]
        for slot, op in enumerate(self.backward):
            for tensor in self.reads[op]:
                found[tensor].append(slot)
        return found

    @cached_property
    def endless(self) -> frozenset[int]:
        """Buffers that stay to the end: what is differentiated and the gradients."""
        ends = (*self.graph.targets, *self.graph.results)
        return frozenset(owner for tensor in ends for owner in self._behind[tensor])

    @cached_property
    def residuals(self) -> list[int]:
        """Forward-made tensors whose buffers a backward op reads, in graph order."""
        return [
            tensor.id
            for tensor in self.graph.tensors
            if self.position[tensor.op] >= 0 and self.backward_readers[tensor.id]
        ]

    def pinned(self, tensor: int) -> Pin | None:
        """Why the buffer's op may not be recomputed, or None."""
        return self.graph.ops[self.graph.tensors[tensor].op].pin

    def may_copy(self, tensor: int) -> bool:
        """Whether the buffer's op is a forward op that may be run again, and whether
        that is of any use: what is `endless` is there in any case."""
        return (
            self.position[self.graph.tensors[tensor].op] >= 0
            and self.pinned(tensor) is None
            and tensor not in self.endless
        )


def _buffers_behind(graph: TrainingGraph) -> list[tuple[int, ...]]:
    """For each tensor the buffers it stands for: its own, or its source's and those
    of the other inputs of the aliasing op (a copy of `Reshape` needs the shape,
    too)."""
    found: list[tuple[int, ...]] = [()] * len(graph.tensors)
    for op in graph.ops:
        for tensor in op.outputs:
            node = graph.tensors[tensor]
            if node.storage is Storage.OWN:
                found[tensor] = (tensor,)
            elif node.storage is Storage.ALIAS:
                merged: dict[int, None] = {}
                # A call hands on one of its arguments, whatever it does to others.
                is_call = op.type in CALL_TYPES
                for source in (node.source,) if is_call else op.inputs:
                    assert source is not None
                    merged.update(dict.fromkeys(found[source]))
                found[tensor] = tuple(merged)
    return found


def _inverse(order: Sequence[int], count: int) -> list[int]:
    """For each op id its place in `order`, or -1."""
    places = [-1] * count
    for place, op in enumerate(order):
        places[op] = place
    return places
