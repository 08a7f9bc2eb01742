"""One journey: a stock gradient in, the same gradient in less memory out.

1. `tf_read` turns the graph into plain data, `schedule` orders the backward ops.
2. A strategy, or the user, selects what is kept.
3. The selection is laid out and simulated; an automatic one is dropped if it gains
   too little.
4. `tf_write` rewires the backward ops.
5. What was done is remembered as a `Plan` and logged in one line.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import fences, selection, tf_internals
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.checkpoints import Auto, Checkpoints
from memory_saving_gradients.gain import Gain, gain_of
from memory_saving_gradients.inside import InsidePlan
from memory_saving_gradients.order import backward_order
from memory_saving_gradients.plan import Plan, remember
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.settled import casts_of_what_rests, masks_of_draws
from memory_saving_gradients.schedule import (
    Schedule,
    Step,
    make_schedule,
)
from memory_saving_gradients.simulate import Timeline, simulate
from memory_saving_gradients.tf_read import Reading, read
from memory_saving_gradients.tf_write import Rewiring, write
from memory_saving_gradients.verify import verified
from memory_saving_gradients.wording import counted, sizes_like

__all__ = ["StockGradient", "rewire"]

_SLOW_PLANNING_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StockGradient:
    """What TensorFlow's autodiff has built.

    Attributes:
        graph: Where it was built.
        targets: What was differentiated.
        seeds: The gradients that backpropagation starts from.
        gradients: What autodiff returned.
        created: The ops that it created, in order of creation.
        foreign: Ops that other threads created meanwhile in the midst of these: read,
            but never changed.
        bodies: What was done inside loops, branches and called functions.
    """

    graph: tf.Graph
    targets: Sequence[Any]
    seeds: Sequence[Any]
    gradients: Sequence[Any]
    created: Sequence[tf.Operation]
    foreign: Sequence[tf.Operation] = ()
    bodies: Sequence[InsidePlan] = ()


@dataclass(frozen=True)
class _Decision:
    """A schedule, what it is predicted to do, and why it is stock's if it is."""

    schedule: Schedule
    timeline: Timeline
    stock: Timeline
    gain: Gain
    reason: str
    chosen: int


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Planning allocates many small objects and frees few: each full collection would
    walk every op of the graph in vain, a fifth of the planning time at 10 000 ops."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_garbage_collection_paused()
def rewire(
    built: StockGradient, checkpoints: Checkpoints, *, unknown_dim: int, verify: bool
) -> tuple[list[Any], Rewiring | None, Plan]:
    """Makes the backward pass that was just built recompute instead of hold.

    Args:
        built: The stock gradient.
        checkpoints: What to keep; a collection has been looked up already.
        unknown_dim: What an unknown dimension is taken to be.
        verify: Whether the gradients shall depend on an assertion that every
            recomputed tensor is what it was the first time.

    Returns:
        The gradients, what was redirected (None if the graph stays as it is), and the
        plan.
    """
    started = time.perf_counter()
    graph = built.graph
    seeds = [seed for seed in built.seeds if isinstance(seed, tf.Tensor)]
    results = tf.nest.flatten(list(built.gradients), expand_composites=True)
    reading = read(
        built.created,
        [y for y in built.targets if tf.is_symbolic_tensor(y)],
        [part for part in results if part is not None],
        seeds,
        unknown_dim=unknown_dim,
        foreign=built.foreign,
    )
    seed_ops = {id(seed.op) for seed in seeds}
    starts = {n for n, op in enumerate(reading.ops) if id(op) in seed_ops}
    buffers = Buffers(reading.graph, backward_order(reading.graph, starts))
    decision = _decide(checkpoints, buffers, starts, reading, graph)
    gradients, rewiring = list(built.gradients), None
    if not decision.reason:
        with tf_internals.creation_scope(graph):
            fences.hold_back(seeds, reading)
        rewiring = write(graph, reading, buffers, decision.schedule)
        if verify:
            gradients = verified(gradients, reading, rewiring, graph)
    elapsed = time.perf_counter() - started
    plan = _plan(checkpoints, reading, decision, elapsed, graph)
    plan = _with_bodies(plan, built.bodies)
    remember(plan)
    _report(plan)
    return gradients, rewiring, plan


def _decide(
    checkpoints: Checkpoints,
    buffers: Buffers,
    starts: set[int],
    reading: Reading,
    graph: tf.Graph,
) -> _Decision:
    """Steps 2 and 3 of the module's outline."""
    barred = casts_of_what_rests(buffers)
    if tf_internals.in_xla(graph):
        # XLA computes a mask where it is used, from the draw, and then holds the draw,
        # four times as large: with masks kept a transformer took 379 MiB, with draws
        # redone 291 (of 1263).
        barred |= reading.draws()
    problem = Problem(buffers, barred=barred)
    problem = problem.forcing(masks_of_draws(problem) | reading.settled())
    stock = problem.stock
    kept = selection.select(checkpoints, problem, reading, graph)
    schedule = make_schedule(
        buffers, kept, seeds=starts, significant_bytes=stock.peak_bytes // 2000
    )
    timeline = simulate(buffers, schedule)
    extra = sum(reading.graph.ops[op].seconds for op in schedule.recomputed)
    gain = gain_of(buffers, kept, stock, timeline, extra)
    reason = _reason_for_stock(checkpoints, problem, schedule, gain)
    if reason:
        steps = tuple(Step(op) for op in buffers.backward)
        schedule = Schedule(steps, (), frozenset(buffers.residuals))
        timeline = stock
        gain = replace(
            gain,
            peak_bytes=gain.stock_bytes,
            peak_if_consumed_bytes=gain.stock_if_consumed_bytes,
            extra_fraction=0.0,
        )
    chosen = len(kept - problem.forced)
    return _Decision(schedule, timeline, stock, gain, reason, chosen)


def _reason_for_stock(
    checkpoints: Checkpoints, problem: Problem, schedule: Schedule, gain: Gain
) -> str:
    """Why the graph is left as it is, or "". What the user selects is obeyed."""
    if not problem.buffers.graph.results:
        return "none of the `xs` reaches the `ys`, so that every gradient is None"
    if schedule.recomputed:
        return gain.reason_against() if isinstance(checkpoints, Auto) else ""
    if not problem.candidates:
        return "there is nothing that could be recomputed to save memory"
    if isinstance(checkpoints, Auto):
        return "no plan that was tried has a lower peak than stock"
    return "with these tensors kept there is nothing left to recompute"


def _plan(
    checkpoints: Checkpoints,
    reading: Reading,
    decision: _Decision,
    elapsed: float,
    graph: tf.Graph,
) -> Plan:
    ops = reading.graph.ops
    tensors = reading.graph.tensors
    schedule = decision.schedule
    extra = sum(ops[op].seconds for op in schedule.recomputed)
    return Plan(
        strategy=selection.describe(checkpoints, decision.chosen),
        kept=tuple(
            tensors[t].name
            for t in sorted(schedule.kept)
            if ops[tensors[t].op].pin is None and t not in reading.graph.targets
        ),
        recomputed=tuple(ops[op].name for op in schedule.recomputed),
        stock_peak_bytes=decision.stock.peak_bytes,
        predicted_peak_bytes=decision.timeline.peak_bytes,
        stock_peak_if_consumed_bytes=decision.gain.stock_if_consumed_bytes,
        predicted_peak_if_consumed_bytes=decision.gain.peak_if_consumed_bytes,
        extra_seconds=extra,
        extra_fraction=decision.gain.extra_fraction,
        planning_seconds=elapsed,
        reason=decision.reason,
        xla=bool(tf_internals.in_xla(graph)),
        stock=decision.stock,
        timeline=decision.timeline,
        schedule=schedule,
        reading=reading,
    )


def _with_bodies(plan: Plan, bodies: Sequence[InsidePlan]) -> Plan:
    """The plan with what loops, branches and calls spare, and with what that costs.

    What they hold now is in the graph that was simulated. What stock holds more is held
    at the end of the forward pass.
    """
    spared = sum(body.spared_bytes for body in bodies)
    seconds = sum(body.stock_runs * body.seconds / body.branches for body in bodies)
    return replace(
        plan,
        stock_peak_bytes=plan.stock_peak_bytes + max(spared, 0),
        stock_peak_if_consumed_bytes=plan.stock_peak_if_consumed_bytes + max(spared, 0),
        extra_seconds=plan.extra_seconds + seconds,
        extra_fraction=plan.extra_fraction
        + (seconds / (plan.stock.seconds + 3 * seconds) if seconds else 0.0),
        bodies=tuple(bodies),
    )


def _report(plan: Plan) -> None:
    """One INFO line a call."""
    note = f" (left as it was: {plan.reason})" if plan.is_stock else ""
    slow = plan.planning_seconds > _SLOW_PLANNING_SECONDS
    size = sizes_like(plan.stock_peak_bytes)
    _log.info(
        "%s: peak %s instead of %s, %.0f %% more work, %s recomputed%s; "
        "planned in %.1f s%s",
        plan.strategy,
        size(plan.predicted_peak_bytes),
        size(plan.stock_peak_bytes),
        100 * plan.extra_fraction,
        counted(plan.recomputed_count, "op"),
        note,
        plan.planning_seconds,
        f", over {_SLOW_PLANNING_SECONDS:.0f} s: the graph has "
        f"{len(plan.reading.ops)} ops"
        if slow
        else "",
    )
