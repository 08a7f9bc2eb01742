"""The simulator that planners talk to: "and if I kept this one, too?"

The problem: a planner asks for the peak of thousands of selections that differ in one
tensor, and walking the whole graph for each (`simulate`) would take minutes.

The model is that of `simulate`, bucketed by *slot*: the live bytes just before each
forward position and before each slot are arrays, to which a buffer adds its size over
the stretch in which it lives. Inside a slot (the copies, then one backward op) the
profile is walked by itself (`sweep_slots`).

The algorithm of a change (`toggle`):

1. The maker's slot is worked out again; if it moved, so may the slots of what it reads.
   A heap visits them latest first, so that each is visited once.
2. Every tensor whose copy or whose last reader moved is counted again: where its old
   stretch ended and its new one ends is noted, and all notes are added up at once.
3. The slots in which something now begins or ends are walked again.

Most changes are not to a planner's liking. What each has moved is remembered in a
`Change`, so that it can be taken back without working anything out.

On a chain with segments of s ops a change costs O(s), plus two passes of numpy, one for
the live bytes and one for the maximum.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Set

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.schedule import NEVER, copy_slots
from memory_saving_gradients.sweep_slots import Slots
from memory_saving_gradients.sweep_tables import Change, Stretch, tables_of

__all__ = ["Change", "Sweep"]

_STEPS_AN_OP = 8
"""To count a selection from scratch takes so much for each forward op, ..."""

_STEPS_A_CHANGE = 16
"""... and a change at least so much, ..."""

_PLACES_A_STEP = 256
"""... and one step more for so many places that numpy passes over."""


class Sweep:
    """A selection whose peak is known at any time and cheap to change.

    Attributes:
        buffers: The buffer view of the graph.
        kept: The current selection. Change it by `toggle` only.
        is_kept: The same as a mask over all tensors.
        slots: For each position the slot before which its copy runs, or `NEVER`.
        extra_seconds: Estimated time of all recomputation.
        work: How many steps have been looked at so far, or what takes as long (about a
            microsecond each): what a planner bounds, so that its plan does not depend
            on how busy the machine is.
    """

    def __init__(self, buffers: Buffers, kept: Set[int]) -> None:
        self.buffers = buffers
        self.kept = set(kept) | buffers.endless
        self.extra_seconds = 0.0
        tables = self._tables = tables_of(buffers)
        self.work = _STEPS_AN_OP * tables.forward_count
        self._overhead = _STEPS_A_CHANGE + len(tables.plain) // _PLACES_A_STEP
        self._inside = Slots(self._tables)
        self._stretch: dict[int, Stretch] = {}
        # The same as arrays over all tensors.
        count = len(buffers.graph.tensors)
        self.is_kept = np.zeros(count, np.bool_)
        self.is_kept[list(self.kept)] = True
        self._end = np.full(count, -1, np.int64)
        self._start = np.full(count, NEVER, np.int64)
        self._copy_end = np.full(count, -1, np.int64)
        self._profile: NDArray[np.int64] | None = None
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
        """The highest live bytes at each forward position, then within each slot. Not
        to be changed."""
        if self._profile is None:
            self._profile = self._live[:-2] + self._local
        return self._profile

    def profile_if_consumed(self) -> NDArray[np.int64]:
        """`profile` without gradients that only wait for the caller."""
        return self.profile() - self._tables.waiting

    def toggle(self, tensor: int) -> Change:
        """Keeps the forward-made `tensor` if it was not kept, and vice versa.

        Returns:
            What has moved, for `take_back`.
        """
        change = Change(tensor, self.extra_seconds)
        self.kept.symmetric_difference_update((tensor,))
        self.is_kept[tensor] ^= True
        touched: set[int] = set()
        positions: set[int] = set()
        for moved in self._move_copies(change, touched):
            self._recount(moved, change, touched, positions)
        self._shift(change.live, 1)
        self._walk_again(change, touched, positions)
        self.work += change.work + self._overhead
        return change

    def take_back(self, change: Change) -> None:
        """Undoes the newest change that has not been taken back."""
        self.kept.symmetric_difference_update((change.tensor,))
        self.is_kept[change.tensor] ^= True
        for position, slot in change.slots:
            self._inside.move_copy(position, self.slots[position], slot)
            self.slots[position] = slot
        for tensor, stretch in change.stretches:
            end, _, copy_end = stretch
            new_end, _, new_copy_end = self._stretch[tensor]
            if end != new_end:
                self._inside.move_end(2 * tensor, new_end, end)
            if copy_end != new_copy_end:
                self._inside.move_end(2 * tensor + 1, new_copy_end, copy_end)
            self._note(tensor, stretch)
        self._shift(change.live, -1)
        for place, highest in change.local:
            self._local[place] = highest
        self.extra_seconds = change.seconds

    def alive(self, index: int) -> tuple[list[int], list[int]]:
        """Which forward-made buffers are alive at an index into `profile`.

        Returns:
            The tensors whose originals are alive and those whose copies are, ascending.
        """
        originals, copies = self.alive_among(index)
        return np.flatnonzero(originals).tolist(), np.flatnonzero(copies).tolist()

    def alive_among(self, index: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """`alive` as a mask over all tensors each."""
        tables = self._tables
        slot = index - tables.forward_count
        key = slot * tables.stride
        if slot < 0:
            late, early = self._end >= 0, tables.early_stops > index
            originals = (tables.makers <= index) & (late | early)
            return originals & (tables.makers >= 0), np.zeros(len(self._end), np.bool_)
        copies = (self._copy_end >= key) & (self._start <= slot)
        return self._end >= key, copies

    # -- what a selection implies ----------------------------------------------------

    def _slot(self, position: int) -> int:
        """When the op at `position` must be copied."""
        tables, slots = self._tables, self.slots
        if tables.pinned[position]:
            return NEVER
        slot = NEVER
        for tensor in tables.makes[position]:
            if tensor not in self.kept:
                slot = min(slot, tables.late_first[tensor])
                for reader in tables.readers[tensor]:
                    if slots[reader] < slot:
                        slot = slots[reader]
        return slot

    def _stretch_of(self, tensor: int) -> Stretch:
        """When the buffers of `tensor` are alive in the backward pass."""
        tables, slots = self._tables, self.slots
        stride = tables.stride
        use = tables.late_key[tensor]
        for reader in tables.readers[tensor]:
            if slots[reader] < NEVER:
                key = slots[reader] * stride + reader
                if key > use:
                    use = key
        maker = tables.maker[tensor]
        slot = slots[maker]
        if tensor in tables.endless:
            end = tables.slot_count * stride
        elif slot == NEVER or tensor in self.kept:
            end = use
        else:
            return -1, slot, max(use, slot * stride + maker)
        if slot == NEVER:
            return end, NEVER, -1
        return end, slot, slot * stride + maker

    # -- keeping the numbers up to date ----------------------------------------------

    def _count_all(self) -> None:
        tables = self._tables
        self.slots = copy_slots(self.buffers, self.kept)
        for position in range(tables.forward_count - 1, -1, -1):
            slot = self.slots[position]
            if slot < NEVER:
                self._inside.move_copy(position, NEVER, slot)
                self.extra_seconds += tables.seconds[position]
        live: dict[int, int] = {}
        for position, made in enumerate(tables.makes):
            for tensor in made:
                size = tables.size[tensor]
                # As if nobody read it.
                self._stretch[tensor] = -1, NEVER, -1
                stop = tables.early_stop[tensor]
                live[position + 1] = live.get(position + 1, 0) + size
                live[stop] = live.get(stop, 0) - size
        change = Change(-1, 0.0, live=live)
        for tensor in self._stretch:
            self._recount(tensor, change, set(), set())
        self._live = np.cumsum(tables.live_late)
        self._shift(live, 1)
        self._local = tables.plain.copy()
        slots = {*self._inside.copies, *tables.walked}
        self._walk_again(change, slots, range(tables.forward_count))

    def _move_copies(self, change: Change, touched: set[int]) -> list[int]:
        """Step 1 of the module's outline: the tensors to be counted again."""
        tables, slots = self._tables, self.slots
        changed = {change.tensor: None}
        heap = [-tables.maker[change.tensor]]
        waiting = set(heap)
        while heap:
            position = -heapq.heappop(heap)
            slot, old = self._slot(position), slots[position]
            if slot == old:
                continue
            if old < NEVER:
                touched.add(old)
                self.extra_seconds -= tables.seconds[position]
            if slot < NEVER:
                touched.add(slot)
                self.extra_seconds += tables.seconds[position]
            self._inside.move_copy(position, old, slot)
            slots[position] = slot
            change.slots.append((position, old))
            changed.update(dict.fromkeys(tables.makes[position]))
            for tensor in tables.reads[position]:
                changed[tensor] = None
                maker = -tables.maker[tensor]
                if maker not in waiting:
                    waiting.add(maker)
                    heapq.heappush(heap, maker)
        change.work += len(changed)
        return list(changed)

    def _recount(
        self, tensor: int, change: Change, touched: set[int], positions: set[int]
    ) -> None:
        """Step 2 for one tensor. Notes what has to be walked again."""
        new, old = self._stretch_of(tensor), self._stretch[tensor]
        if new == old:
            return
        change.stretches.append((tensor, old))
        self._note(tensor, new)
        tables, live = self._tables, change.live
        stride, count = tables.stride, tables.forward_count + 1
        size = tables.size[tensor]
        end, start, copy_end = new
        old_end, old_start, old_copy_end = old
        if end != old_end:
            early = tables.early_stop[tensor]
            for key, amount in ((old_end, size), (end, -size)):
                stop = early if key < 0 else key // stride + count
                live[stop] = live.get(stop, 0) + amount
            touched.update(self._inside.move_end(2 * tensor, old_end, end))
            if (end < 0) != (old_end < 0) and tables.readers[tensor]:
                positions.add(tables.readers[tensor][-1])
        if start != old_start or copy_end != old_copy_end:
            for first, key, amount in (
                (old_start, old_copy_end, -size),
                (start, copy_end, size),
            ):
                if first < NEVER:
                    first, stop = first + count, key // stride + count
                    live[first] = live.get(first, 0) + amount
                    live[stop] = live.get(stop, 0) - amount
            if copy_end != old_copy_end:
                touched.update(
                    self._inside.move_end(2 * tensor + 1, old_copy_end, copy_end)
                )

    def _note(self, tensor: int, stretch: Stretch) -> None:
        self._stretch[tensor] = stretch
        self._end[tensor], self._start[tensor], self._copy_end[tensor] = stretch

    def _shift(self, differences: dict[int, int], sign: int) -> None:
        """Adds differences, summed up from the left, to the live bytes."""
        self._profile = None
        if not differences:
            return
        low, high = min(differences), max(differences)
        steps = np.zeros(high - low + 1, np.int64)
        steps[[place - low for place in differences]] = list(differences.values())
        if sign < 0:
            self._live[low : high + 1] -= np.cumsum(steps)
        else:
            self._live[low : high + 1] += np.cumsum(steps)

    def _walk_again(
        self, change: Change, slots: Iterable[int], positions: Iterable[int]
    ) -> None:
        """Step 3."""
        first = self._tables.forward_count
        for slot in slots:
            place = first + slot
            change.local.append((place, int(self._local[place])))
            self._local[place] = self._inside.highest(slot)
            change.work += len(self._inside.copies[slot]) + 1
        for position in positions:
            if self._tables.in_place[position] >= 0:
                change.local.append((position, int(self._local[position])))
                self._local[position] = self._walk_position(position)

    def _walk_position(self, position: int) -> int:
        """What a forward op allocates."""
        tables = self._tables
        size, wanted = tables.size, tables.in_place[position]
        for tensor in tables.reads[position]:
            if (
                size[tensor] == wanted
                and self._stretch[tensor][0] < 0
                and tables.readers[tensor][-1] == position
            ):
                return tables.allocated[position] - wanted
        return tables.allocated[position]
