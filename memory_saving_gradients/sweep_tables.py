"""What `sweep.Sweep` keeps its books in.

`Tables` are what it asks again and again and no selection changes, laid out as lists. A
planner makes dozens of sweeps of one graph, so these are worked out once for each graph
(`tables_of`) and forgotten with it. A `Change` is what one more kept tensor, or one
less, has moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.schedule import NEVER

__all__ = ["Change", "Stretch", "Tables", "tables_of"]

Stretch = tuple[int, int, int]
"""The original's last key (-1: it dies in the forward pass), and for the copy the first
slot and the last key (`NEVER` and -1: no copy)."""


@dataclass(slots=True)
class Change:
    """What a toggle has moved, to be taken back.

    Attributes:
        tensor: The tensor that was toggled.
        seconds: The extra time before.
        work: What the change cost.
        slots: Old slots by position.
        stretches: Old stretches by tensor.
        live: By how much the live bytes change from a place on.
        local: Old values of the profile above the live bytes, by place.
    """

    tensor: int
    seconds: float
    work: int = 0
    slots: list[tuple[int, int]] = field(default_factory=list)
    stretches: list[tuple[int, Stretch]] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    local: list[tuple[int, int]] = field(default_factory=list)


class Tables:
    """A graph by forward positions, slots and tensors.

    Attributes:
        forward_count: How many forward positions there are.
        slot_count: How many slots.
        stride: A step's key is slot · stride + place within the slot: a copy's place
            is its position, the backward op comes after all copies.
        size: For each tensor the bytes of its buffer.
        endless: Tensors that stay to the end.
        maker: For each tensor the position of its op, -1 for what is made late.
        readers: For each tensor the positions that read it, ascending.
        early_stop: For each tensor the place before which its original is dead if the
            backward pass does not read it.
        makers: `maker` as an array.
        early_stops: `early_stop` as an array.
        late_first: For each tensor the first slot that reads it, or `NEVER`.
        late_key: For each tensor the key of the last backward op that reads it, or -1.
        reads: For each position what it reads of what was made before it.
        makes: For each position what it makes.
        allocated: For each position the bytes of that.
        in_place: For each position the bytes that it may take over, -1 for none.
        pinned: For each position whether it may not be copied.
        seconds: For each position its estimated time.
        late_in_place: For each slot the bytes that its op may take over, -1 for none.
        late_made: For each slot the bytes that its op makes.
        late_dying: For each slot the bytes of each gradient buffer that its op reads
            last, but not of those it made itself.
        live_late: Changes of the bytes of gradient buffers at each place.
        waiting: For each place the bytes of gradients that only wait for the caller.
        plain: For each place what its op allocates, were nothing taken over.
        walked: Slots whose backward op may take something over.
    """

    def __init__(self, buffers: Buffers) -> None:
        graph = buffers.graph
        ops = [graph.ops[op] for op in buffers.forward]
        size = self.size = buffers.size
        self.forward_count = len(ops)
        self.slot_count = len(buffers.backward)
        self.stride = self.forward_count + 1
        self.endless = buffers.endless
        self.maker = [buffers.position[t.op] for t in graph.tensors]
        self.readers = buffers.forward_readers
        self.early_stop = [
            (readers[-1] if readers else maker) + 1
            for readers, maker in zip(self.readers, self.maker, strict=True)
        ]
        self.makers = np.array(self.maker, np.int64)
        self.early_stops = np.array(self.early_stop, np.int64)
        late = buffers.backward_readers
        self.late_first = [slots[0] if slots else NEVER for slots in late]
        self.late_key = [
            slots[-1] * self.stride + self.forward_count if slots else -1
            for slots in late
        ]
        self.reads = [
            [t for t in buffers.reads[op.id] if self.maker[t] >= 0] for op in ops
        ]
        self.makes = [buffers.makes[op.id] for op in ops]
        self.allocated = [sum(size[t] for t in made) for made in self.makes]
        self.in_place = [
            size[made[0]] if op.in_place else -1
            for op, made in zip(ops, self.makes, strict=True)
        ]
        self.pinned = [op.pin is not None for op in ops]
        self.seconds = [op.seconds for op in ops]
        self._count_backward_made(buffers)

    def _count_backward_made(self, buffers: Buffers) -> None:
        """Gradient buffers never move: their stretches and deaths are counted once."""
        size, late = self.size, buffers.backward_readers
        made_by = [buffers.makes[op] for op in buffers.backward]
        self.late_made = [sum(size[t] for t in made) for made in made_by]
        self.late_in_place = [
            size[made[0]] if buffers.graph.ops[op].in_place else -1
            for op, made in zip(buffers.backward, made_by, strict=True)
        ]
        self.walked = [s for s, taken in enumerate(self.late_in_place) if taken >= 0]
        self.late_dying: list[list[int]] = [[] for _ in buffers.backward]
        places = self.forward_count + self.slot_count
        live = np.zeros(places + 2, np.int64)
        waiting = np.zeros(self.slot_count + 2, np.int64)
        for slot, made in enumerate(made_by):
            for tensor in made:
                end = late[tensor][-1] if late[tensor] else slot
                if tensor in buffers.endless:
                    waiting[end + 1] += size[tensor]
                    end = self.slot_count
                elif end > slot:
                    self.late_dying[end].append(size[tensor])
                live[self.forward_count + slot + 1] += size[tensor]
                live[self.forward_count + end + 1] -= size[tensor]
        self.live_late = live
        self.waiting = np.zeros(places, np.int64)
        self.waiting[self.forward_count :] = np.cumsum(waiting)[: self.slot_count]
        self.plain = np.array([*self.allocated, *self.late_made], np.int64)


_KNOWN: WeakKeyDictionary[Buffers, Tables] = WeakKeyDictionary()


def tables_of(buffers: Buffers) -> Tables:
    """The tables of a graph, made when they are first asked for."""
    found = _KNOWN.get(buffers)
    if found is None:
        found = _KNOWN[buffers] = Tables(buffers)
    return found
