"""What happens within the slots of a `sweep.Sweep`: copies, then one backward op."""

from __future__ import annotations

from collections import defaultdict

from memory_saving_gradients.schedule import NEVER
from memory_saving_gradients.sweep_tables import Tables

__all__ = ["Slots"]


class Slots:
    """Which copies run in each slot, and which forward-made buffers end there.

    A buffer is twice its tensor's id, and one more if it is the copy's.

    Attributes:
        copies: For each slot the positions whose copies run in it.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.copies: defaultdict[int, set[int]] = defaultdict(set)
        # By the place within the slot of the step that reads the buffers last.
        self._ending: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)

    def move_copy(self, position: int, old: int, new: int) -> None:
        """Has a copy run in another slot; `NEVER` is none."""
        if old < NEVER:
            self.copies[old].discard(position)
        if new < NEVER:
            self.copies[new].add(position)

    def move_end(self, buffer: int, old: int, new: int) -> list[int]:
        """Has a buffer end at another key; -1 is none.

        Returns:
            The slots that this concerns.
        """
        tables = self._tables
        slots = []
        if old >= 0:
            slot, place = divmod(old, tables.stride)
            if slot < tables.slot_count:
                slots.append(slot)
                ending = self._ending[slot][place]
                ending.remove(buffer)
                if not ending:
                    del self._ending[slot][place]
        if new >= 0:
            slot, place = divmod(new, tables.stride)
            if slot < tables.slot_count:
                slots.append(slot)
                self._ending[slot].setdefault(place, []).append(buffer)
        return slots

    def highest(self, slot: int) -> int:
        """The highest live bytes within a slot, above those before it."""
        tables = self._tables
        size, ending = tables.size, self._ending[slot]
        running = highest = 0
        for position in sorted(self.copies[slot]):
            before, running = running, running + tables.allocated[position]
            top = running
            dying = ending.get(position)
            if dying is not None:
                wanted = tables.in_place[position]
                made = tables.makes[position]
                for buffer in dying:
                    amount = size[buffer >> 1]
                    running -= amount
                    # Its own copy, which nobody reads, is not to be written into.
                    if amount == wanted and not (buffer & 1 and buffer >> 1 in made):
                        top = before + tables.allocated[position] - wanted
            if top > highest:
                highest = top
        top = running + tables.late_made[slot]
        wanted = tables.late_in_place[slot]
        if wanted >= 0 and (
            wanted in tables.late_dying[slot]
            or any(
                size[buffer >> 1] == wanted
                for buffer in ending.get(tables.forward_count, ())
            )
        ):
            top -= wanted
        return max(highest, top)
