"""What the exact planner may run again, and the memory that no plan of it moves."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.planners.problem import Problem

__all__ = ["Reruns"]


class Reruns:
    """What may be run again and carried, and the memory that nobody can change.

    Attributes:
        useful: Positions of the forward ops whose results the backward pass needs.
        made: For each of them the tensors that it makes.
        maker: For each of these tensors that position.
        reads: For each useful position the tensors that matter among those it reads.
        late_reads: For each slot the same of its backward op.
        readers: For each tensor the useful positions that read it.
        copied: Tensors whose copy may serve instead of the original.
        again: The positions that make any of these.
        carried: Tensors that may be carried out of the forward pass.
        needs: For each slot what may have to be run again for it.
    """

    def __init__(self, problem: Problem) -> None:
        buffers = self.buffers = problem.buffers
        self.useful = problem.useful
        self.made = {p: buffers.makes[buffers.forward[p]] for p in self.useful}
        self.maker = {tensor: p for p in self.useful for tensor in self.made[p]}
        self.reads = {p: self._that_matter(buffers.forward[p]) for p in self.useful}
        self.late_reads = [self._that_matter(op) for op in buffers.backward]
        self.readers: dict[int, list[int]] = {tensor: [] for tensor in self.maker}
        for position in self.useful:
            for tensor in self.reads[position]:
                self.readers[tensor].append(position)
        self.copied = {
            tensor
            for tensor in self.maker
            if buffers.pinned(tensor) is None
            and tensor not in problem.always_kept
            and tensor not in buffers.endless
        }
        self.again = {self.maker[tensor] for tensor in self.copied}
        self.carried = set(self.maker) - (problem.barred & self.copied)
        self.needs = [self._behind(reads) for reads in self.late_reads]

    def _that_matter(self, op: int) -> tuple[int, ...]:
        """The tensors among those an op reads that the backward pass may want."""
        return tuple(t for t in self.buffers.reads[op] if t in self.maker)

    def _behind(self, tensors: Iterable[int]) -> set[int]:
        """The positions that may have to be run again to have these tensors."""
        found: set[int] = set()
        stack = [self.maker[tensor] for tensor in tensors]
        while stack:
            position = stack.pop()
            if position not in found and position in self.again:
                found.add(position)
                stack.extend(self.maker[tensor] for tensor in self.reads[position])
        return found

    @cached_property
    def last_run(self) -> dict[int, int]:
        """For each position the last slot for which it may have to be run again."""
        found: dict[int, int] = {}
        for slot, needed in enumerate(self.needs):
            found.update(dict.fromkeys(needed, slot))
        return found

    @cached_property
    def last_use(self) -> dict[int, int]:
        """For each tensor the last slot in which it may be read."""
        found: dict[int, int] = {}
        for slot, needed in enumerate(self.needs):
            found.update(dict.fromkeys(self.late_reads[slot], slot))
            for position in sorted(needed):
                found.update(dict.fromkeys(self.reads[position], slot))
        return found

    def wanted(self, op: int) -> int | None:
        """The bytes of an input that the op would take over, None if it takes none."""
        buffers = self.buffers
        if not buffers.graph.ops[op].in_place or not buffers.makes[op]:
            return None
        return buffers.size[buffers.makes[op][0]]

    def last_read(self, tensor: int) -> int:
        """The last forward position that reads a tensor, or that of its maker."""
        return max((self.maker[tensor], *self.buffers.forward_readers[tensor]))

    @cached_property
    def others(self) -> NDArray[np.int64]:
        """Bytes of forward-made buffers that no plan moves, alive before each position:
        those that no backward op needs."""
        buffers = self.buffers
        live = np.zeros(len(buffers.forward) + 2, np.int64)
        for position, op in enumerate(buffers.forward):
            for tensor in buffers.makes[op]:
                if tensor not in self.maker:
                    live[position + 1] += buffers.size[tensor]
                    if tensor not in buffers.endless:
                        end = max((position, *buffers.forward_readers[tensor]))
                        live[end + 1] -= buffers.size[tensor]
        return np.cumsum(live)

    @cached_property
    def gradients(self) -> NDArray[np.int64]:
        """Bytes of backward-made buffers, and of forward ops' that are not `useful` and
        stay to the end, alive before each slot."""
        buffers = self.buffers
        live = np.zeros(len(buffers.backward) + 2, np.int64)
        for tensor in buffers.endless:
            early = buffers.position[buffers.graph.tensors[tensor].op] >= 0
            if early and tensor not in self.maker:
                live[0] += buffers.size[tensor]
        for slot, op in enumerate(buffers.backward):
            for tensor in buffers.makes[op]:
                readers = buffers.backward_readers[tensor]
                live[slot + 1] += buffers.size[tensor]
                if tensor not in buffers.endless:
                    end = readers[-1] if readers else slot
                    live[end + 1] -= buffers.size[tensor]
        return np.cumsum(live)

    def gradient_dies(self, slot: int) -> bool:
        """Whether a gradient dies at the slot whose buffer its op would take over."""
        buffers = self.buffers
        op = buffers.backward[slot]
        return any(
            buffers.size[t] == self.wanted(op)
            and buffers.backward_readers[t][-1] == slot
            and t not in buffers.endless
            and buffers.slot[buffers.graph.tensors[t].op] >= 0
            for t in buffers.reads[op]
        )


def _in_question(problem: Problem, position: int) -> tuple[int, ...]:
    """What an op makes, without what is kept anyway, if that is not all it makes."""
    made = problem.buffers.makes[problem.buffers.forward[position]]
    return tuple(t for t in made if t not in problem.always_kept) or made
