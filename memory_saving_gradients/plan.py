"""The record of one rewritten gradient: what the user gets to see."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from os import PathLike

import tensorflow as tf

from memory_saving_gradients.inside_plan import InsidePlan
from memory_saving_gradients.measured import Coverage
from memory_saving_gradients.planners import PLANNERS
from memory_saving_gradients.replay import graph_lines, rerun_lines
from memory_saving_gradients.saved import SavedPlan
from memory_saving_gradients.schedule import Schedule
from memory_saving_gradients.simulate import Timeline
from memory_saving_gradients.tf_read import Reading

__all__ = ["Plan", "forget", "last_plan", "remember"]


@dataclass(frozen=True)
class Plan:
    """What is kept, what is recomputed, and what that costs.

    Attributes:
        strategy: The `checkpoints=` argument in words.
        kept: Names of the kept tensors, in graph order.
        recomputed: Names of the recomputed ops, in graph order; empty if the graph
            was left as TensorFlow made it. Without those inside `bodies`.
        stock_peak_bytes: Simulated peak of the untouched graph, in bytes above rest:
            activations and gradients, without variables and optimizer slots.
        predicted_peak_bytes: Simulated peak of the rewired graph, likewise.
        stock_peak_if_consumed_bytes: Both peaks are those of a caller who holds all
            gradients to the end. This is the untouched graph's for one who consumes
            each as soon as it is there, as most optimizers do; in bytes.
        predicted_peak_if_consumed_bytes: That of the rewired graph, likewise.
        extra_seconds: Estimated time of the recomputation in one step, in seconds.
        extra_fraction: The same as a fraction of the forward and backward work.
        planning_seconds: How long reading, planning and rewriting took, in seconds.
        reason: Why the graph, but for `bodies`, was left as it was, or "". If bodies
            recompute, it says so.
        xla: Whether the graph is compiled by XLA, which schedules for itself.
        budget_bytes: What a budget allowed above rest, in bytes; None without one.
        resting_bytes: What a budget in total found to rest, in bytes; else None.
        consumed: Whether a budget was for a caller who consumes each gradient as it
            comes: then all peaks are, and so are `stock` and `timeline`.
        replayed: Whether it was saved before, and not searched for.
        measured: For how many ops `cost` had measured times; None without it.
        rule: How `bodies` save memory under a budget: "stock" (not at all), "speed",
            "memory", or "split", which is memory's with long loops split; else "".
        stock: The simulated run of the untouched graph: a `simulate.Timeline` with
            `steps` (which op, original or copy), `live_bytes` (for each step, in bytes
            above rest while it runs), `at_peak` (the buffers alive at the peak) and
            `seconds` (estimated, of forward and backward pass).
        timeline: The same of the rewired graph; `stock` itself if it was left alone.
        schedule: The order of the backward pass: a `schedule.Schedule` with `steps`,
            `ties` (which step waits for which) and `kept` (ids of tensors, pinned ones
            included).
        reading: What ids stand for: `reading.graph.tensors[id]` and
            `reading.graph.ops[id]` are plain data (names, bytes, estimated seconds, why
            an op is pinned), `reading.tensors[id]` and `reading.ops[id]` the objects of
            TensorFlow. It keeps the `tf.Graph` alive.
        bodies: What was done inside loops, branches and called functions, body by body:
            `name`, `runs` (iterations of a loop), `held_bytes` and `stock_bytes` (for
            each run, now and in stock), `seconds`, `recomputed`, `every` (after how
            many iterations a loop holds its state, None for each).

    The attributes up to `measured` are stable. `stock`, `timeline`, `schedule` and
    `reading` are what the planner worked with, for tools and the curious: their layout
    may change in any release.
    """

    strategy: str
    kept: tuple[str, ...]
    recomputed: tuple[str, ...]
    stock_peak_bytes: int
    predicted_peak_bytes: int
    stock_peak_if_consumed_bytes: int
    predicted_peak_if_consumed_bytes: int
    extra_seconds: float
    extra_fraction: float
    planning_seconds: float
    reason: str
    xla: bool
    budget_bytes: int | None
    resting_bytes: int | None
    stock: Timeline = field(repr=False)
    timeline: Timeline = field(repr=False)
    schedule: Schedule = field(repr=False)
    reading: Reading = field(repr=False, compare=False)
    bodies: tuple[InsidePlan, ...] = field(default=(), repr=False)
    consumed: bool = False
    replayed: bool = False
    measured: Coverage | None = None
    rule: str = ""

    @property
    def is_stock(self) -> bool:
        """Whether nothing is recomputed, neither in the graph nor inside `bodies`."""
        return bool(self.reason) and not any(b.recomputed for b in self.bodies)

    @property
    def recomputed_count(self) -> int:
        """How many ops are recomputed, those inside `bodies` included."""
        inside = sum(len(body.recomputed) for body in self.bodies)
        return len(self.recomputed) + inside

    def summary(self) -> str:
        """The plan as a text of a screenful (see `report`)."""
        # Imported late: `report` stands above this module.
        from memory_saving_gradients.report import summary

        return summary(self)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws live bytes over one step, stock and planned, into a file.

        Both are simulated. The larger kept tensors are marked where they are made; the
        peaks, and the budget if there is one, are told with their figures.

        Args:
            path: Of the picture; its suffix says which kind, such as `.png` or `.svg`.

        Raises:
            ValueError: matplotlib knows no such kind of picture.
            OSError: The file cannot be written.

        Example:
            >>> last_plan().plot("step.png")
        """
        # Imported late: `picture` stands above this module, and needs matplotlib.
        from memory_saving_gradients.picture import plot

        plot(self, path)

    def to_json(self) -> str:
        """The plan as a text to be saved, compared and given back.

        What it promises and keeps stands first, an entry a line, in graph order; last
        the forward graph that it was made for. Nothing in it depends on the process.

        Returns:
            JSON that `from_json` reads.

        Example:
            >>> import pathlib
            >>> pathlib.Path("step.plan.json").write_text(plan.to_json())
        """
        return SavedPlan(
            strategy=self.strategy,
            bodies=self.strategy if self.strategy in PLANNERS else self.rule,
            reason=self.reason,
            stock_peak_bytes=self.stock_peak_bytes,
            predicted_peak_bytes=self.predicted_peak_bytes,
            extra_fraction=self.extra_fraction,
            budget_bytes=self.budget_bytes,
            consumed=self.consumed,
            unknown_dim=self.reading.unknown_dim,
            kept=self.kept,
            recomputed=self.recomputed,
            reruns=rerun_lines(self.schedule, self.reading),
            graph=graph_lines(self.reading),
        ).to_json()

    @staticmethod
    @tf.autograph.experimental.do_not_convert
    def from_json(text: str) -> SavedPlan:
        """A saved plan, to be given as `checkpoints=`.

        In a graph like the one that it was made for, whatever things are called there,
        it makes the same rewired graph, without a search: the same tensors are kept and
        the same ops recomputed. Any other graph, or other gradients of it, raise
        `PlanMismatchError`. (Bodies of loops, branches and called functions are not
        part of a plan: they plan for themselves, in the way that it names.)

        Args:
            text: What `to_json` returned.

        Returns:
            The plan, without a graph.

        Raises:
            CheckpointError: The text is nothing that `to_json` returned.

        Example:
            >>> saved = Plan.from_json(pathlib.Path("step.plan.json").read_text())
            >>> gradients(loss, weights, checkpoints=saved)
        """
        return SavedPlan.from_json(text)

    def __str__(self) -> str:
        return self.summary()


_newest = threading.local()


def remember(plan: Plan) -> None:
    """Makes `plan` the one that `last_plan` returns in this thread."""
    _newest.plan = plan


def forget() -> None:
    """Makes `last_plan` return None in this thread, until a call has succeeded."""
    _newest.plan = None


def last_plan() -> Plan | None:
    """The plan of the newest gradient that this thread rewrote.

    Returns:
        The plan, or None if there was no such call yet or the newest one raised.
    """
    return getattr(_newest, "plan", None)
