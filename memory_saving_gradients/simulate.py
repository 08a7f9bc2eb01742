"""What a schedule costs: live bytes at every step, the peak, and who is alive there.

The model is TensorFlow's executor: a step allocates its outputs while its inputs are
still alive; an element-wise kernel writes into an input of the same size that dies at
that very step instead of allocating; a buffer dies when its last reader has run; a copy
has a buffer of its own; targets and gradients stay to the end.

`simulate` walks a schedule from the first step to the last, in linear time. It is the
definition of the model and what the user is told; `sweep.Sweep` gives the same numbers
to planners that change one tensor at a time, and tests hold the two against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.executor import executor_order
from memory_saving_gradients.schedule import Schedule, Step

__all__ = ["Alive", "Timeline", "simulate", "simulate_stock"]


@dataclass(frozen=True, slots=True)
class Alive:
    """A buffer that is alive at the peak.

    Attributes:
        tensor: Id of the tensor that owns it.
        copy: Whether it is the copy's buffer, not the original's.
    """

    tensor: int
    copy: bool


@dataclass(frozen=True)
class Timeline:
    """Live bytes over one run of forward and backward pass.

    Attributes:
        steps: What runs, in order; forward ops included.
        live_bytes: For each step the live bytes while it runs, above rest.
        at_peak: The buffers alive at the (first) peak, largest first.
        seconds: Estimated run time of the whole.
    """

    steps: tuple[Step, ...]
    live_bytes: tuple[int, ...]
    at_peak: tuple[Alive, ...]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The largest of `live_bytes`."""
        return max(self.live_bytes, default=0)

    @property
    def peak_step(self) -> int:
        """The index of the first step at which the peak is reached, -1 if none."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else -1


def simulate(buffers: Buffers, schedule: Schedule) -> Timeline:
    """Walks a schedule, forward pass first.

    Args:
        buffers: The buffer view of the graph.
        schedule: The order of the backward pass.

    Returns:
        The timeline.
    """
    forward = [Step(op) for op in buffers.forward]
    return _walk(buffers, (*forward, *schedule.steps), schedule.kept)


def simulate_stock(buffers: Buffers) -> Timeline:
    """Walks the untouched graph in the executor's order."""
    order = executor_order(buffers.graph.ops, buffers.graph)
    steps = tuple(Step(op) for op in order if buffers.makes[op])
    everything = frozenset(range(len(buffers.graph.tensors)))
    return _walk(buffers, steps, everything)


def _walk(buffers: Buffers, steps: tuple[Step, ...], held: Set[int]) -> Timeline:
    graph = buffers.graph
    count = len(graph.tensors)
    reads, makes = _instances(buffers, steps, held)
    last: dict[int, int] = {}
    for index, read in enumerate(reads):
        last.update(dict.fromkeys(read, index))
    for tensor in buffers.endless:
        last[tensor] = len(steps)

    live = 0
    during: list[int] = []
    for index, step in enumerate(steps):
        allocated = sum(buffers.size[i % count] for i in makes[index])
        dying = [i for i in reads[index] if last[i] == index]
        spared = 0
        if graph.ops[step.op].in_place and makes[index]:
            wanted = buffers.size[makes[index][0] % count]
            if any(buffers.size[i % count] == wanted for i in dying):
                spared = wanted
        during.append(live + allocated - spared)
        unread = [i for i in makes[index] if i not in last]
        freed = sum(buffers.size[i % count] for i in (*dying, *unread))
        live += allocated - freed

    alive: list[Alive] = []
    if during:
        top = during.index(max(during))
        born = {i: index for index, made in enumerate(makes) for i in made}
        alive = [
            Alive(i % count, i >= count)
            for i, index in born.items()
            if index <= top <= last.get(i, index)
        ]
        alive.sort(key=lambda a: (-buffers.size[a.tensor], a.tensor, a.copy))
    seconds = sum(graph.ops[step.op].seconds for step in steps)
    return Timeline(steps, tuple(during), tuple(alive), seconds)


def _instances(
    buffers: Buffers, steps: tuple[Step, ...], held: Set[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """For each step the buffer instances that it reads and that it makes.

    An instance is a tensor's id; that of its nth copy is shifted by n times the number
    of tensors. A step reads the newest copy made before it, but of what is held the
    original.
    """
    count = len(buffers.graph.tensors)
    newest: dict[int, int] = {}
    runs: Counter[int] = Counter()
    reads, makes = [], []
    for step in steps:
        reads.append([newest.get(t, t) for t in buffers.reads[step.op]])
        runs[step.op] += step.copy
        made = [t + runs[step.op] * count for t in buffers.makes[step.op]]
        makes.append(made)
        if step.copy:
            newest.update((i % count, i) for i in made if i % count not in held)
    return reads, makes
