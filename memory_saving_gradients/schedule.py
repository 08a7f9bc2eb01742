"""From a selection of kept tensors to the order in which everything runs.

The problem: a backward graph leaves its order to the executor. Recomputation saves
memory only if it happens late, and a simulated peak is worth something only if what was
simulated is what runs.

The model: a *step* is a backward op or a copy of a forward op. Steps stand in one total
order, and a *tie* says that a step waits for another one. How a tie is made real (a
control edge, a data edge) is the writer's business.

The algorithm:

1. `order.backward_order` (independent of the selection): among the backward ops that
   are ready run the one that serves the latest part of the forward pass, so that the
   gradient of a layer's weights runs as soon as its inputs are there, before an earlier
   layer is touched. The place an op serves is the latest residual that it or any op
   downstream of it reads; ops that lead to nothing but a result have no reason to wait.
2. `copy_slots`: walking the forward ops backwards, an op is recomputed if one of its
   outputs is read in the backward pass and not kept, and its copy runs just before the
   first step that needs it. On a chain this is exactly recomputation by segments; on
   other graphs it needs no segments. (A planner may say otherwise, `reruns`, if ops
   shall run more than twice: then a step reads the newest copy made before it.)
3. `make_schedule`: the steps in order.
4. `tied`: each waits for the one before it on the same device, even if it reads from it
   (Grappler moves data edges). A copy waits, too, for gradients that come from another
   device, and whatever has a device for the step before it that has none. A tie costs
   time, so backward ops whose buffers are too small to move the peak run when they
   like. What is small hangs on the peak of the plan and not on stock's: the deeper a
   network, the further these two are apart.

Linear up to the logarithm of a heap.

Why not fence only the entry of each segment, as JAX and the original did: on several
threads the rest of the segment then races with the weight gradients of the one
before it. A U-Net's peak wandered between 82 and 110 MiB that way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import TrainingGraph
from memory_saving_gradients.order import filter_gradients

__all__ = [
    "NEVER",
    "Schedule",
    "Step",
    "copies_by_slot",
    "copy_slots",
    "lay_out",
    "least_significant",
    "make_schedule",
    "next_backward",
    "reads_what_is_there",
    "seconds_again",
    "tied",
]

NEVER = 1 << 60
"""A slot after all slots: what needs no copy."""

_LARGE_ALONE = 2000
"""A buffer above this fraction of the peak is never small ..."""

_ROOM = 20
"""... and all small ones together, alive at once, add at most this fraction of it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One op of the backward pass.

    Attributes:
        op: The op's id; for a copy, the id of the forward op that is copied.
        copy: Whether it is a copy.
    """

    op: int
    copy: bool = False


@dataclass(frozen=True)
class Schedule:
    """The order of the backward pass.

    Attributes:
        steps: All steps in order.
        ties: Pairs of indices into `steps`: the first waits for the second. None until
            the schedule is `tied`.
        kept: The tensors whose original buffers backward ops and copies read.
    """

    steps: tuple[Step, ...]
    ties: tuple[tuple[int, int], ...]
    kept: frozenset[int]

    @property
    def runs(self) -> Counter[int]:
        """For each copied op how often it is copied."""
        return Counter(step.op for step in self.steps if step.copy)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The ids of the copied ops, in graph order."""
        return tuple(sorted(self.runs))


def copy_slots(buffers: Buffers, kept: Set[int]) -> list[int]:
    """When each forward op is recomputed (step 2 of the module's outline).

    Args:
        buffers: The buffer view of the graph.
        kept: Ids of the tensors that are kept. Pinned ones need not be listed.

    Returns:
        For each position the slot before which its copy runs, `NEVER` for no copy.
    """
    slots = [NEVER] * len(buffers.forward)
    ops = buffers.graph.ops
    needed = [readers[0] if readers else NEVER for readers in buffers.backward_readers]
    for position in range(len(slots) - 1, -1, -1):
        op = buffers.forward[position]
        if ops[op].pin is not None:
            continue
        slot = min(
            (needed[tensor] for tensor in buffers.makes[op] if tensor not in kept),
            default=NEVER,
        )
        slots[position] = slot
        if slot < NEVER:
            for tensor in buffers.reads[op]:
                needed[tensor] = min(needed[tensor], slot)
    return slots


def copies_by_slot(slots: Sequence[int]) -> dict[int, list[int]]:
    """For each slot the positions whose copies run before it, ascending."""
    found: dict[int, list[int]] = {}
    for position, slot in enumerate(slots):
        if slot < NEVER:
            found.setdefault(slot, []).append(position)
    return found


def lay_out(buffers: Buffers, reruns: Mapping[int, Sequence[int]]) -> tuple[Step, ...]:
    """The steps in order: each slot's copies in forward order, then its backward op."""
    steps: list[Step] = []
    for slot, op in enumerate(buffers.backward):
        steps.extend(
            Step(buffers.forward[position], copy=True)
            for position in reruns.get(slot, ())
        )
        steps.append(Step(op))
    return tuple(steps)


def make_schedule(
    buffers: Buffers,
    kept: Set[int],
    *,
    reruns: Mapping[int, Sequence[int]] | None = None,
) -> Schedule:
    """Lays out the backward pass for a selection; `tied` makes its order binding.

    Args:
        buffers: The buffer view of the graph.
        kept: Ids of the tensors that are kept.
        reruns: For each slot the positions whose ops are copied before it, ascending,
            where an op is to be copied more than once (see `planners.nested`); None
            for what `copy_slots` says.

    Returns:
        The schedule, with `kept` cut down to what the backward pass reads.
    """
    kept = kept | buffers.endless
    if reruns is None:
        reruns = copies_by_slot(copy_slots(buffers, kept))
    steps = lay_out(buffers, reruns)
    redone = {buffers.forward[p] for run in reruns.values() for p in run}
    needed = _needed_tensors(buffers, redone)
    held = frozenset(
        t for t in needed if t in kept or buffers.graph.tensors[t].op not in redone
    )
    return Schedule(steps, (), held)


def reads_what_is_there(buffers: Buffers, schedule: Schedule) -> bool:
    """Whether each step reads only what is kept, or was copied before it.

    The original of what is copied is gone by then: nobody may read it.
    """
    redone = schedule.runs
    gone = {t for op in redone for t in buffers.makes[op]} - schedule.kept
    for step in schedule.steps:
        if not gone.isdisjoint(buffers.reads[step.op]):
            return False
        if step.copy:
            gone.difference_update(buffers.makes[step.op])
    return True


def tied(
    buffers: Buffers, schedule: Schedule, seeds: Set[int], significant_bytes: int = 0
) -> Schedule:
    """The schedule with its ties, but for backward ops that touch only small buffers.

    Args:
        buffers: The buffer view of the graph.
        schedule: Not tied yet.
        seeds: Ids of the backward ops that everything starts from.
        significant_bytes: The size of the least buffer that is not small.
    """
    ties = _ties(buffers, schedule.steps, seeds, significant_bytes)
    return replace(schedule, ties=tuple(ties))


def least_significant(buffers: Buffers, peak_bytes: int) -> int:
    """From which size on buffers can move a peak of `peak_bytes`, in bytes."""
    counts = Counter(size for size in buffers.size if size)
    room = peak_bytes // _ROOM
    least = 0
    for size, count in sorted(counts.items()):
        room -= size * count
        if room < 0 or size > peak_bytes // _LARGE_ALONE:
            break
        least = size + 1
    return least


def _needed_tensors(buffers: Buffers, redone: Set[int]) -> list[int]:
    """Forward-made tensors that a backward op or a copy reads, in graph order."""
    wanted = set(buffers.residuals)
    for op in redone:
        wanted.update(buffers.reads[op])
    return sorted(wanted)


def _ties(
    buffers: Buffers,
    steps: tuple[Step, ...],
    seeds: Set[int],
    significant_bytes: int,
) -> list[tuple[int, int]]:
    """Step 4 of the module's outline, left out where all buffers are smaller."""
    ops = buffers.graph.ops
    ties: list[tuple[int, int]] = []
    start: int | None = None
    newest: dict[str, int] = {}
    slot_entered: dict[str, int] = {}
    backward_step: dict[int, int] = {}
    serving = next_backward(steps)
    filters = filter_gradients(buffers.graph)
    for index, step in enumerate(steps):
        op = ops[step.op]
        if not step.copy:
            backward_step[op.id] = index
            if op.id in filters:
                # Nobody waits for it, and it waits for what its partner waits for.
                partner = backward_step[filters[op.id]]
                first, last = (
                    bisect_left(ties, (at,)) for at in (partner, partner + 1)
                )
                ties.extend((index, waited) for _, waited in ties[first:last])
                continue
        if not step.copy and op.id in seeds:
            start = index
            continue
        touched = (*buffers.reads[op.id], *buffers.makes[op.id])
        biggest = max((buffers.size[t] for t in touched), default=0)
        if not op.free_order or (not step.copy and biggest < significant_bytes):
            continue
        previous = newest.get(op.device, start)
        if previous is not None:
            ties.append((index, previous))
        unplaced = newest.get("", -1)
        if op.device and (previous is None or previous < unplaced):
            # A tape does not place its gradients where the forward pass was: they may
            # run on any device, this one included.
            ties.append((index, unplaced))
        if step.copy and slot_entered.get(op.device) != serving[index]:
            slot_entered[op.device] = serving[index]
            ties.extend(
                (index, backward_step[maker])
                for maker in _gradient_makers(buffers, steps[serving[index]].op)
                if ops[maker].device != op.device
                and backward_step.get(maker, previous) not in (previous, unplaced)
            )
        newest[op.device] = index
    return ties


def seconds_again(graph: TrainingGraph, schedule: Schedule) -> float:
    """The estimated time of all copies of a schedule, in seconds."""
    return sum(graph.ops[op].seconds * times for op, times in schedule.runs.items())


def next_backward(steps: tuple[Step, ...]) -> list[int]:
    """For each step the index of the backward step that it, as a copy, serves first."""
    following = [0] * len(steps)
    current = len(steps)
    for index in range(len(steps) - 1, -1, -1):
        if not steps[index].copy:
            current = index
        following[index] = current
    return following


def _gradient_makers(buffers: Buffers, op: int) -> list[int]:
    """The free-standing backward ops that make what backward op `op` reads."""
    graph = buffers.graph
    makers = {graph.tensors[tensor].op for tensor in buffers.reads[op]}
    return [
        maker
        for maker in sorted(makers)
        if maker >= graph.forward_count and graph.ops[maker].free_order
    ]
