"""`pareto`: what less memory costs, over all budgets at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import doors
from memory_saving_gradients.autodiff import as_list, parse_setting
from memory_saving_gradients.body_rules import BodyRule
from memory_saving_gradients.checkpoints import Auto, Budget
from memory_saving_gradients.errors import (
    CheckpointError,
    EagerExecutionError,
    MemorySavingGradientsError,
)
from memory_saving_gradients.planners.budget import explored
from memory_saving_gradients.planners.front import Front, Point
from memory_saving_gradients.rehearsal import studied
from memory_saving_gradients.study import Study
from memory_saving_gradients.trials import Trials
from memory_saving_gradients.wording import columns, percent, sizes_like

__all__ = ["Pareto", "ParetoPoint", "pareto"]

_LEVELS = 10
"""Budgets are searched at each tenth of the stock peak; plans between are found
underway."""


@dataclass(frozen=True, order=True)
class ParetoPoint:
    """A plan.

    Attributes:
        peak_bytes: Its simulated peak, in bytes above rest: activations and gradients.
        extra_seconds: Estimated time of its recomputation.
        extra_fraction: The same as a fraction of the forward and backward work.
    """

    peak_bytes: int
    extra_seconds: float
    extra_fraction: float


@dataclass(frozen=True)
class Pareto:
    """Peak against extra time. `print(front)` is a table.

    Attributes:
        points: Plans of which none has both a lower peak and less extra time than
            another, by rising peak. The last is stock.
        memory: What `checkpoints="memory"` gives; stock if it leaves the graph alone.
        speed: What `checkpoints="speed"` gives, likewise.
        knee: The point from which on less memory costs most: the farthest from the
            straight line between the ends of the front.
    """

    points: tuple[ParetoPoint, ...]
    memory: ParetoPoint
    speed: ParetoPoint
    knee: ParetoPoint

    @property
    def stock(self) -> ParetoPoint:
        """The graph as it is: the highest peak and no extra time."""
        return self.points[-1]

    def within(self, budget: float | str | Budget) -> ParetoPoint | None:
        """The plan of least extra time under a budget; None if there is none.

        Args:
            budget: A number of bytes, a size such as `"4GiB"`, a share of stock's peak,
                `"50%"`, or a `Budget` of such.

        Raises:
            CheckpointError: It is none of these.
        """
        if isinstance(budget, float):
            allowed = budget
        else:
            limit = budget if isinstance(budget, Budget) else Budget(budget)
            if limit.consumed or not limit.above_rest:
                raise CheckpointError(
                    "`memory_saving_gradients.Pareto.within` expects a budget above "
                    "rest for who holds all gradients, as the peaks of the front are, "
                    f"but got {limit!r}. Give bytes or a share, such as "
                    '"4GiB" or "50%".'
                )
            allowed = limit.allowed(self.stock.peak_bytes)
        fitting = [p for p in self.points if p.peak_bytes <= allowed]
        return fitting[-1] if fitting else None

    def __str__(self) -> str:
        stock = self.stock.peak_bytes
        size = sizes_like(stock)
        named = [
            ("least", self.points[0]),
            ("memory", self.memory),
            ("speed", self.speed),
            ("knee", self.knee),
            ("stock", self.stock),
        ]
        for tenth in range(1, _LEVELS):
            point = self.within(stock * tenth / _LEVELS)
            if point is not None:
                named.append((f"{100 * tenth // _LEVELS}%", point))
        rows = [
            (
                name,
                size(point.peak_bytes),
                percent(point.peak_bytes / stock if stock else 1.0),
                percent(point.extra_fraction),
            )
            for name, point in sorted(named, key=lambda entry: entry[1])
        ]
        return columns(("plan", "peak", "of stock, %", "extra work, %"), rows)


@tf.autograph.experimental.do_not_convert
def pareto(
    ys: Any, xs: Any, *, unknown_dim: int | None = None, cost: Any = None
) -> Pareto:
    """Peak memory against extra time of a gradient, over all budgets.

    Call it where `gradients` would be called, while a graph is built. The gradient is
    built in a copy of the graph, which is dropped: the graph is left as it was.

    Every op is recomputed at most once. Budgets below the lowest peak of the front may
    be kept all the same by running some ops several times: ask `plan` for one of those.

    What can be saved inside loops, branches and called functions is in the figures. On
    large graphs it takes some ten times as long as the plan of one budget.

    Args:
        ys: A tensor or a list of tensors to differentiate.
        xs: A tensor, variable (TensorFlow 1, 2 or Keras 3) or a list of such.
        unknown_dim: What a dimension that is not known statically (a batch size) is
            taken to be while planning, at least 1; None means as in `gradients`.
        cost: Measured seconds of ops, as in `gradients`.

    Returns:
        The front; print it.

    Raises:
        CostError: `cost` holds no measured times.
        EagerExecutionError: There is no graph: called outside a `tf.function`.
        MemorySavingGradientsError: The `ys` depend on none of the `xs`, or on loops or
            branches of TensorFlow 1, which cannot be copied.

    Example:
        >>> @tf.function
        ... def look(x):
        ...     y = x
        ...     for _ in range(20):
        ...         y = tf.tanh(y)
        ...     print(pareto(tf.reduce_sum(y), x))

    References:
        Satopää et al. 2011, Finding a "Kneedle" in a Haystack, for the knee.
    """
    if tf.executing_eagerly():
        raise EagerExecutionError(
            "`memory_saving_gradients.pareto` looks at a graph, but was called "
            "eagerly, where there is none. Call it inside a `tf.function` (the loss "
            "must be computed in it, too), or try `compare`, which takes a function."
        )
    setting = parse_setting("memory", unknown_dim, cost, where="pareto")

    def under(rule: BodyRule) -> Study:
        with doors.busy():
            return studied(replace(setting, rule=rule), as_list(ys), as_list(xs))

    trials = Trials(under)
    if not trials.stock.reading.graph.results:
        raise MemorySavingGradientsError(
            "`memory_saving_gradients.pareto`: the `ys` depend on none of the `xs`, so "
            "that every gradient is None. Compute the `ys` from the `xs`, in the same "
            "graph."
        )
    return front_of(trials)


def front_of(trials: Trials) -> Pareto:
    """The front of a gradient, under all rules for what it has inside."""
    stock = trials.stock.stock
    front = Front()
    levels = [stock.peak_bytes * n // _LEVELS for n in range(1, _LEVELS)]
    for study in trials.studies():
        inside = sum(body.seconds_in_all for body in study.bodies)
        for p in explored(study.problem, levels):
            front.add(Point(p.peak_bytes, p.extra_seconds + inside, p.kept))
    memory, speed = (trials.plan(Auto(mode)) for mode in ("memory", "speed"))
    for plan in (memory, speed):
        front.add(
            Point(plan.predicted_peak_bytes, plan.extra_seconds, plan.schedule.kept)
        )

    def point(peak_bytes: int, extra: float) -> ParetoPoint:
        fraction = extra / stock.seconds if stock.seconds else 0.0
        return ParetoPoint(peak_bytes, extra, fraction)

    points = tuple(point(p.peak_bytes, p.extra_seconds) for p in front)
    if points[-1].peak_bytes < stock.peak_bytes:  # something is saved for nothing
        points = (*points, point(stock.peak_bytes, 0.0))
    return Pareto(
        points,
        point(memory.predicted_peak_bytes, memory.extra_seconds),
        point(speed.predicted_peak_bytes, speed.extra_seconds),
        _knee(points),
    )


def _knee(points: tuple[ParetoPoint, ...]) -> ParetoPoint:
    """The point farthest below the line between the two ends."""
    low, high = points[0], points[-1]
    width = high.peak_bytes - low.peak_bytes or 1
    height = low.extra_seconds - high.extra_seconds or 1.0

    def depth(point: ParetoPoint) -> float:
        along = (point.peak_bytes - low.peak_bytes) / width
        return 1 - along - (point.extra_seconds - high.extra_seconds) / height

    return max(points, key=depth)
