"""What a planner is given, and what all planners need to know of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.simulate import simulate_stock

__all__ = ["Problem"]

_SMALL_ALONE = 4000
"""A tensor is not small if it takes more than this fraction of the stock peak ..."""

_SMALL_TOGETHER = 200
"""... or if all tensors up to its size take more than this one."""


@dataclass(frozen=True)
class Problem:
    """A planning problem.

    Attributes:
        buffers: The graph, its forward ops in running order, its backward ops in the
            order that will be enforced.
        forced: Tensors that must be kept, whatever else is: no question for a planner.
        barred: Tensors that automatic planning shall not keep.
    """

    buffers: Buffers
    forced: frozenset[int] = frozenset()
    barred: frozenset[int] = frozenset()

    @cached_property
    def stock_peak_bytes(self) -> int:
        """The simulated peak of the untouched graph."""
        return simulate_stock(self.buffers).peak_bytes

    @property
    def effort(self) -> int:
        """How many simulated steps planning may look at: linear in the graph."""
        return 100_000 + 8 * len(self.buffers.graph.ops)

    @cached_property
    def small_bytes(self) -> int:
        """Tensors up to this size are always kept: all together they move no peak."""
        buffers = self.buffers
        counts = Counter(
            buffers.size[tensor]
            for position in self.useful
            for tensor in buffers.makes[buffers.forward[position]]
        )
        room = self.stock_peak_bytes // _SMALL_TOGETHER
        largest = 0
        for size, count in sorted(counts.items()):
            room -= size * count
            if room < 0 or size > self.stock_peak_bytes // _SMALL_ALONE:
                break
            largest = size
        return largest

    @cached_property
    def useful(self) -> list[int]:
        """Positions of the forward ops on which some residual depends, ascending."""
        buffers = self.buffers
        wanted = set(buffers.residuals)
        found = []
        for position in range(len(buffers.forward) - 1, -1, -1):
            op = buffers.forward[position]
            if wanted.intersection(buffers.makes[op]):
                found.append(position)
                wanted.update(buffers.reads[op])
        return found[::-1]

    @cached_property
    def candidates(self) -> list[int]:
        """Tensors whose keeping is a question: made by an op that may be recomputed,
        needed by a residual or one themselves, and not small; in running order."""
        buffers = self.buffers
        return [
            tensor
            for position in self.useful
            for tensor in buffers.makes[buffers.forward[position]]
            if buffers.size[tensor] > self.small_bytes
            and buffers.pinned(tensor) is None
            and tensor not in buffers.endless
            and tensor not in self.forced
            and tensor not in self.barred
        ]

    @cached_property
    def always_kept(self) -> frozenset[int]:
        """What must be kept, and small tensors that the backward pass may want."""
        buffers = self.buffers
        return self.forced.union(
            tensor
            for position in self.useful
            for tensor in buffers.makes[buffers.forward[position]]
            if buffers.size[tensor] <= self.small_bytes
        )

    @cached_property
    def everything(self) -> frozenset[int]:
        """The selection under which nothing is recomputed."""
        return self.always_kept.union(self.candidates)
