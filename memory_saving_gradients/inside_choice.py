"""What is kept in the body of a loop, a branch or a called function.

Automatic strategies compare two plans. One keeps nothing but what the body was given;
the other is that of the outer strategy for the body alone. What a body keeps is there
as often as there are such bodies (iterations, calls) before the backward pass begins,
and what it recomputes only once. So the plan is taken for which

    times * (bytes kept) + (peak of the body) - (bytes kept)

is less. For `speed` the first is the one of least bytes with which nothing heavy is
recomputed. A budget goes by one of these two, or leaves bodies alone (`trials`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients import op_types, selection
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.checkpoints import Auto, Checkpoints, Keep, Where
from memory_saving_gradients.measured import Measured
from memory_saving_gradients.planners import PLANNERS, Problem
from memory_saving_gradients.planners.settled import casts_of_what_rests
from memory_saving_gradients.planners.storage import least_held
from memory_saving_gradients.schedule import (
    Schedule,
    least_significant,
    make_schedule,
    tied,
)
from memory_saving_gradients.simulate import simulate
from memory_saving_gradients.tf_read import Reading
from memory_saving_gradients.twins import original_of

__all__ = ["Inside", "planned_inside"]


@dataclass(frozen=True)
class Inside:
    """How the bodies inside a gradient shall save memory.

    Attributes:
        checkpoints: What to keep.
        unknown_dim: What an unknown dimension is taken to be while planning.
        times: How many bodies of this kind are there before the first is
            differentiated.
        runs: As in `InsidePlan`.
        stock_runs: As in `InsidePlan`.
        assumed: As in `InsidePlan`.
        at_most: As in `InsidePlan`.
        cost: Measured seconds of ops; None for those of the model.
        verify: Whether what is recomputed is compared with what it was.
    """

    checkpoints: Checkpoints
    unknown_dim: int
    times: int
    runs: int = 1
    stock_runs: int = 1
    assumed: bool = False
    at_most: bool = False
    cost: Measured | None = None
    verify: bool = False

    @property
    def replays(self) -> bool:
        """Whether loops inside a loop are run again, instead of storing for it."""
        return self.checkpoints != Auto("speed")

    def keeps(self, tensor: tf.Tensor) -> bool:
        """Whether the user wants this very tensor to be kept."""
        if isinstance(self.checkpoints, Where):
            return selection.accepts(self.checkpoints.predicate, tensor)
        if isinstance(self.checkpoints, Keep):
            tensor = original_of(tensor)
            return any(
                entry is tensor or entry is tensor.op or _names(entry, tensor)
                for entry in self.checkpoints.tensors
                if isinstance(entry, str | tf.Operation) or tf.is_symbolic_tensor(entry)
            )
        return False


def _names(entry: Any, tensor: tf.Tensor) -> bool:
    return isinstance(entry, str) and tensor.name in (entry, f"{entry}:0")


def planned_inside(
    wish: Inside,
    buffers: Buffers,
    reading: Reading,
    starts: set[int],
) -> Schedule:
    """The better of the plans that the module's outline speaks of."""
    problem = Problem(buffers, barred=casts_of_what_rests(buffers) | _lists(reading))
    candidates: list[frozenset[int]] = [frozenset()]
    if isinstance(wish.checkpoints, Auto):
        if wish.checkpoints.mode == "speed":
            heavy = frozenset(op.id for op in reading.graph.forward_ops if op.heavy)
            candidates = [least_held(buffers, heavy)]
        if problem.candidates:
            candidates.append(PLANNERS[wish.checkpoints.mode](problem))
    found = []
    for order, kept in enumerate(candidates):
        schedule = make_schedule(buffers, kept)
        held = sum(buffers.size[t] for t in schedule.kept if buffers.pinned(t) is None)
        peak = simulate(buffers, schedule).peak_bytes
        significant_bytes = least_significant(buffers, peak)
        schedule = tied(buffers, schedule, starts, significant_bytes)
        found.append(((wish.times - 1) * held + peak, order, schedule))
    return min(found, key=lambda entry: entry[:2])[-1]


def _lists(reading: Reading) -> frozenset[int]:
    """What loops are run again for: of their lists nobody knows how long they are."""
    return frozenset(
        tensor
        for op in reading.graph.forward_ops
        if op.type in op_types.CALL_TYPES
        for tensor in op.outputs
    )
