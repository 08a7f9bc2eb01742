"""The simulator that planners talk to: "and if I kept this one, too?"

The problem: a planner asks for the peak of thousands of selections that differ in one
tensor, and walking the whole graph for each (`simulate`) would take minutes.

The model is that of `simulate`, bucketed by *slot*: the live bytes just before each
forward position and before each slot are arrays, to which a buffer adds its size over
the stretch in which it lives. Inside a slot (the copies, then one backward op) the
profile is walked by itself.

The algorithm of a change (`toggle`):

1. The maker's slot is worked out again; if it moved, so may the slots of what it reads.
   A heap visits them latest first, so that each is visited once.
2. Every tensor whose copy or whose last reader moved is counted again: its old stretch
   is subtracted, its new one added.
3. The slots in which something now begins or ends are walked again.

On a chain with segments of s ops a change costs O(s), plus one pass of numpy for the
maximum.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Set

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.schedule import NEVER

__all__ = ["Sweep"]


class Sweep:
    """A selection whose peak is known at any time and cheap to change.

    Attributes:
        buffers: The buffer view of the graph.
        kept: The current selection. Change it by `toggle` only.
        slots: For each position the slot before which its copy runs, or `NEVER`.
        extra_seconds: Estimated time of all recomputation.
        work: How many steps have been looked at so far: what a planner bounds, so that
            its plan does not depend on how busy the machine is.
    """

    def __init__(self, buffers: Buffers, kept: Set[int]) -> None:
        self.buffers = buffers
        self.kept = set(kept) | buffers.endless
        ops = [buffers.graph.ops[op] for op in buffers.forward]
        size = buffers.size
        self._forward_count = len(ops)
        self._slot_count = len(buffers.backward)
        self._stride = self._forward_count + 1
        self._readers = buffers.forward_readers
        self._late = buffers.backward_readers
        self._reads = [buffers.reads[op.id] for op in ops]
        self._makes = [buffers.makes[op.id] for op in ops]
        self._allocated = [sum(size[t] for t in made) for made in self._makes]
        self._pinned = [op.pin is not None for op in ops]
        self._in_place = [op.in_place for op in ops]
        self._seconds = [op.seconds for op in ops]
        self._maker = [buffers.position[t.op] for t in buffers.graph.tensors]
        self.slots = [NEVER] * self._forward_count
        self.extra_seconds = 0.0
        self.work = 0
        # One axis for both passes: forward positions, then slots. Live bytes before
        # each place stand there as differences until all has been counted once.
        places = self._forward_count + self._slot_count
        self._live = np.zeros(places + 2, np.int64)
        self._local = np.zeros(places, np.int64)
        self._waiting = np.zeros(places, np.int64)
        self._copies: list[set[int]] = [set() for _ in range(self._slot_count)]
        # For each slot: which buffers end in it, by key of the step that ends them.
        self._ending: list[dict[tuple[int, bool], int]] = [
            {} for _ in range(self._slot_count)
        ]
        self._stretch: dict[int, tuple[int, int, int]] = {}
        self._counting_all = True
        self._count_all()

    @property
    def peak_bytes(self) -> int:
        """The peak of the current selection."""
        return int(self.profile().max(initial=0))

    @property
    def peak_if_consumed(self) -> int:
        """The peak if each gradient were consumed as soon as it is there."""
        return int(self.profile_if_consumed().max(initial=0))

    def profile(self) -> NDArray[np.int64]:
        """The highest live bytes at each forward position, then within each slot."""
        return self._live[:-2] + self._local

    def profile_if_consumed(self) -> NDArray[np.int64]:
        """`profile` without gradients that only wait for the caller."""
        return self.profile() - self._waiting

    def toggle(self, tensor: int) -> None:
        """Keeps the forward-made `tensor` if it was not kept, and vice versa."""
        self.kept.symmetric_difference_update((tensor,))
        self._settle([self._maker[tensor]], {tensor})

    def alive(self, index: int) -> tuple[list[int], list[int]]:
        """Which forward-made buffers are alive at an index into `profile`.

        Returns:
            The tensors whose originals are alive and those whose copies are, ascending.
        """
        slot = index - self._forward_count
        originals, copies = [], []
        for tensor, (end, start, copy_end) in self._stretch.items():
            if slot < 0:
                uses = (self._maker[tensor], *self._readers[tensor][-1:])
                last = max(uses) if end < 0 else self._forward_count
                if uses[0] <= index <= last:
                    originals.append(tensor)
                continue
            if end >= 0 and slot <= end // self._stride:
                originals.append(tensor)
            if start <= slot <= copy_end // self._stride:
                copies.append(tensor)
        return sorted(originals), sorted(copies)

    # -- what a selection implies ----------------------------------------------------

    def _slot(self, position: int) -> int:
        """When the op at `position` must be copied."""
        if self._pinned[position]:
            return NEVER
        slot = NEVER
        for tensor in self._makes[position]:
            if tensor not in self.kept:
                if self._late[tensor]:
                    slot = min(slot, self._late[tensor][0])
                for reader in self._readers[tensor]:
                    slot = min(slot, self.slots[reader])
        return slot

    def _last_use(self, tensor: int) -> int:
        """The key of the last step of the backward pass that reads `tensor`, or -1.

        A step's key is slot · stride + place within the slot: a copy's place is its
        position, the backward op comes after all copies.
        """
        late = self._late[tensor]
        key = late[-1] * self._stride + self._forward_count if late else -1
        for reader in self._readers[tensor]:
            if self.slots[reader] < NEVER:
                key = max(key, self.slots[reader] * self._stride + reader)
        return key

    def _stretch_of(self, tensor: int) -> tuple[int, int, int]:
        """The original's last key (-1: dies in the forward pass), and for the copy the
        first slot and the last key (`NEVER` and -1: no copy)."""
        maker = self._maker[tensor]
        slot = self.slots[maker]
        use = self._last_use(tensor)
        if tensor in self.buffers.endless:
            end = self._slot_count * self._stride
        elif slot == NEVER or tensor in self.kept:
            end = use
        else:
            return -1, slot, max(use, slot * self._stride + maker)
        return (
            (end, NEVER, -1)
            if slot == NEVER
            else (
                end,
                slot,
                slot * self._stride + maker,
            )
        )

    # -- keeping the numbers up to date ----------------------------------------------

    def _count_all(self) -> None:
        for position in range(self._forward_count - 1, -1, -1):
            self._move_copy(position, self._slot(position))
        for made in self._makes:
            for tensor in made:
                self._recount(tensor, set(), set())
        self._count_backward_made()
        self._counting_all = False
        self._live = np.cumsum(self._live)
        self._walk_again(range(self._slot_count), range(self._forward_count))

    def _count_backward_made(self) -> None:
        """Gradient buffers never move: their stretches and deaths are counted once."""
        buffers = self.buffers
        size = buffers.size
        self._made_late = [
            sum(size[t] for t in buffers.makes[op]) for op in buffers.backward
        ]
        self._dying_late: list[list[int]] = [[] for _ in buffers.backward]
        waiting = np.zeros(self._slot_count + 2, np.int64)
        for slot, op in enumerate(buffers.backward):
            for tensor in buffers.makes[op]:
                end = self._late[tensor][-1] if self._late[tensor] else slot
                if tensor in buffers.endless:
                    waiting[end + 1] += size[tensor]
                    end = self._slot_count
                else:
                    self._dying_late[end].append(
                        size[tensor] if end > slot else -size[tensor]
                    )
                self._add(self._forward_count + slot + 1, end, size[tensor])
        self._waiting[self._forward_count :] = np.cumsum(waiting)[: self._slot_count]

    def _settle(self, positions: Iterable[int], changed: set[int]) -> None:
        heap = [-position for position in positions]
        slots: set[int] = set()
        while heap:
            position = -heapq.heappop(heap)
            while heap and -heap[0] == position:
                heapq.heappop(heap)
            slot = self._slot(position)
            old = self.slots[position]
            if slot == old:
                continue
            slots.update(s for s in (old, slot) if s < NEVER)
            self._move_copy(position, slot)
            changed.update(self._makes[position])
            for tensor in self._reads[position]:
                maker = self._maker[tensor]
                if maker >= 0:
                    changed.add(tensor)
                    heapq.heappush(heap, -maker)
        readers: set[int] = set()
        self.work += len(changed)
        for tensor in changed:
            self._recount(tensor, slots, readers)
        self._walk_again(slots, readers)

    def _move_copy(self, position: int, slot: int) -> None:
        old = self.slots[position]
        if old < NEVER:
            self._copies[old].discard(position)
            self.extra_seconds -= self._seconds[position]
        if slot < NEVER:
            self._copies[slot].add(position)
            self.extra_seconds += self._seconds[position]
        self.slots[position] = slot

    def _recount(self, tensor: int, slots: set[int], readers: set[int]) -> None:
        """Replaces a tensor's stretches and notes what has to be walked again."""
        new = self._stretch_of(tensor)
        old = self._stretch.get(tensor)
        if new == old:
            return
        if old is not None:
            slots.update(self._apply(tensor, old, -1))
        slots.update(self._apply(tensor, new, 1))
        self._stretch[tensor] = new
        if self._readers[tensor]:
            readers.add(self._readers[tensor][-1])

    def _apply(
        self, tensor: int, stretch: tuple[int, int, int], sign: int
    ) -> list[int]:
        end, start, copy_end = stretch
        amount = sign * self.buffers.size[tensor]
        born = self._maker[tensor] + 1
        touched = []
        if end < 0:
            if self._readers[tensor]:
                last = self._readers[tensor][-1]
                self._add(born, last - self._forward_count, amount)
        else:
            self._add(born, end // self._stride, amount)
            touched.append(self._note_end(tensor, False, end, sign))
        if start < NEVER:
            first = self._forward_count + start + 1
            self._add(first, copy_end // self._stride, amount)
            touched.append(self._note_end(tensor, True, copy_end, sign))
        return [slot for slot in touched if slot < self._slot_count]

    def _note_end(self, tensor: int, copy: bool, key: int, sign: int) -> int:
        slot = key // self._stride
        if slot < self._slot_count:
            if sign > 0:
                self._ending[slot][tensor, copy] = key
            else:
                del self._ending[slot][tensor, copy]
        return slot

    def _add(self, first: int, last_slot: int, amount: int) -> None:
        """Adds to the live bytes from place `first` up to before `last_slot` and in it.

        Forward positions count as slots below 0.
        """
        stop = self._forward_count + min(last_slot, self._slot_count) + 1
        if self._counting_all:
            self._live[first] += amount
            self._live[stop] -= amount
        else:
            self._live[first:stop] += amount

    def _walk_again(self, slots: Iterable[int], positions: Iterable[int]) -> None:
        for slot in slots:
            self._local[self._forward_count + slot] = self._walk_slot(slot)
            self.work += len(self._copies[slot]) + 1
        for position in positions:
            self._local[position] = self._walk_position(position)

    def _walk_position(self, position: int) -> int:
        size = self.buffers.size
        made = self._makes[position]
        allocated = self._allocated[position]
        if self._in_place[position]:
            for tensor in self._reads[position]:
                if (
                    size[tensor] == size[made[0]]
                    and self._maker[tensor] >= 0
                    and self._stretch[tensor][0] < 0
                    and self._readers[tensor][-1] == position
                ):
                    return allocated - size[made[0]]
        return allocated

    def _walk_slot(self, slot: int) -> int:
        """The highest live bytes within a slot, above those before it."""
        size = self.buffers.size
        ends: dict[int, list[tuple[int, bool]]] = {}
        for instance, key in self._ending[slot].items():
            ends.setdefault(key - slot * self._stride, []).append(instance)
        running = highest = 0
        for position in sorted(self._copies[slot]):
            made = self._makes[position]
            allocated = self._allocated[position]
            ending = ends.get(position, ())
            spared = 0
            if self._in_place[position] and any(
                size[t] == size[made[0]] and not (copy and t in made)
                for t, copy in ending
            ):
                spared = size[made[0]]
            highest = max(highest, running + allocated - spared)
            running += allocated - sum(size[t] for t, _ in ending)
        op = self.buffers.backward[slot]
        made = self.buffers.makes[op]
        dying = [size[t] for t, _ in ends.get(self._forward_count, ())]
        dying.extend(amount for amount in self._dying_late[slot] if amount > 0)
        spared = 0
        if self.buffers.graph.ops[op].in_place and size[made[0]] in dying:
            spared = size[made[0]]
        return max(highest, running + self._made_late[slot] - spared)
