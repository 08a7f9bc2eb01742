"""What a planner is given, and what all planners need to know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.simulate import Timeline, simulate_stock

__all__ = ["Lives", "Problem"]

_SMALL_ALONE = 4000
"""A tensor is not small if it takes more than this fraction of the stock peak ..."""

_LARGE = 10_000
"""From this many forward and backward ops on a graph is large."""

_SMALL_TOGETHER = 200
"""... or if all tensors up to its size take more than this one."""


@dataclass(frozen=True)
class Lives:
    """The lifetimes of the candidates as the recomputation of a segment sees them.

    A tensor crosses every cut between its maker and the last useful forward op that
    reads it, or whose segment's gradient reads it.

    Attributes:
        tensors: The candidates, in running order.
        made: For each the position at which it is made.
        last: For each the last position that wants it.
        size: For each its bytes.
        residual: For each whether a backward op reads it.
    """

    tensors: list[int]
    made: NDArray[np.int64]
    last: NDArray[np.int64]
    size: NDArray[np.int64]
    residual: NDArray[np.bool_]


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

    def forcing(self, tensors: Iterable[int]) -> Problem:
        """The same problem, but these tensors, unless they are barred, must be kept."""
        forced = self.forced.union(tensors).difference(self.barred)
        harder = replace(self, forced=forced)
        # What is known of the graph does not depend on what is forced.
        vars(harder).update(stock=self.stock, useful=self.useful)
        return harder

    @cached_property
    def stock(self) -> Timeline:
        """The simulated run of the untouched graph."""
        return simulate_stock(self.buffers)

    @property
    def stock_peak_bytes(self) -> int:
        """Its peak."""
        return self.stock.peak_bytes

    @cached_property
    def if_consumed(self) -> Problem:
        """The same problem of a caller who consumes each gradient as it comes."""
        nobody_waits = replace(self.buffers.graph, results=())
        return replace(self, buffers=Buffers(nobody_waits, self.buffers.backward))

    @property
    def effort(self) -> int:
        """How many simulated steps planning may look at: linear in the graph."""
        return 100_000 + 8 * len(self.buffers.graph.ops)

    @property
    def is_large(self) -> bool:
        """Whether to look at every op a few times takes longer than to build it."""
        buffers = self.buffers
        return len(buffers.forward) + len(buffers.backward) >= _LARGE

    @cached_property
    def small_bytes(self) -> int:
        """Tensors up to this size are always kept: all together they move no peak."""
        buffers = self.buffers
        counts = Counter(buffers.size[tensor] for tensor in self.useful_tensors)
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
    def useful_tensors(self) -> list[int]:
        """The tensors whose buffers these ops make, in running order."""
        buffers = self.buffers
        return [
            tensor
            for position in self.useful
            for tensor in buffers.makes[buffers.forward[position]]
        ]

    @cached_property
    def candidates(self) -> list[int]:
        """Tensors whose keeping is a question: made by an op that may be recomputed,
        needed by a residual or one themselves, and not small; in running order."""
        buffers = self.buffers
        return [
            tensor
            for tensor in self.useful_tensors
            if buffers.size[tensor] > self.small_bytes
            and buffers.pinned(tensor) is None
            and tensor not in buffers.endless
            and tensor not in self.forced
            and tensor not in self.barred
        ]

    @cached_property
    def seconds_spared(self) -> dict[int, float]:
        """For each useful tensor the seconds of what need not be redone if it is kept:
        its op, and those before it that serve nothing else."""
        buffers = self.buffers
        graph = buffers.graph
        spared: dict[int, float] = {}
        for tensor in self.useful_tensors:
            op = graph.tensors[tensor].op
            spared[tensor] = graph.ops[op].seconds + sum(
                spared[source]
                for source in buffers.reads[op]
                if source in spared
                and len(buffers.forward_readers[source]) == 1
                and not buffers.backward_readers[source]
                and len(buffers.makes[graph.tensors[source].op]) == 1
                and buffers.pinned(source) is None
            )
        return spared

    @cached_property
    def always_kept(self) -> frozenset[int]:
        """What must be kept, and small tensors that the backward pass may want."""
        buffers = self.buffers
        return self.forced.union(
            tensor
            for tensor in self.useful_tensors
            if buffers.size[tensor] <= self.small_bytes and tensor not in self.barred
        )

    @cached_property
    def everything(self) -> frozenset[int]:
        """The selection under which nothing is recomputed."""
        return self.always_kept.union(self.candidates)

    @cached_property
    def served(self) -> list[int]:
        """For each slot the position of the latest forward tensor that it reads."""
        buffers = self.buffers
        return [
            max(
                (
                    buffers.position[buffers.graph.tensors[tensor].op]
                    for tensor in buffers.reads[op]
                ),
                default=-1,
            )
            for op in buffers.backward
        ]

    @cached_property
    def lives(self) -> Lives:
        """The lifetimes of the candidates."""
        buffers = self.buffers
        useful = set(self.useful)
        made, last = [], []
        for tensor in self.candidates:
            position = buffers.position[buffers.graph.tensors[tensor].op]
            readers = (r for r in buffers.forward_readers[tensor] if r in useful)
            slots = (self.served[slot] for slot in buffers.backward_readers[tensor])
            made.append(position)
            last.append(max((position, *readers, *slots)))
        return Lives(
            self.candidates,
            np.array(made, np.int64),
            np.array(last, np.int64),
            np.array([buffers.size[t] for t in self.candidates], np.int64),
            np.array(
                [bool(buffers.backward_readers[t]) for t in self.candidates], np.bool_
            ),
        )
