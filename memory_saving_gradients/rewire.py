"""One journey: a stock gradient in, the same gradient in less memory out.

1. `study` turns the graph into plain data, a planning problem.
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

from memory_saving_gradients import fences, replay, selection, tf_internals
from memory_saving_gradients.budgeted import (
    Allowance,
    Choice,
    allowance,
    assumed_sizes,
    chosen_within,
)
from memory_saving_gradients.checkpoints import (
    Auto,
    Budget,
    Checkpoints,
    SavedPlan,
    is_of_who_consumes,
    is_relative,
)
from memory_saving_gradients.gain import Gain, gain_of
from memory_saving_gradients.inside_plan import InsidePlan
from memory_saving_gradients.measured import Measured
from memory_saving_gradients.plan import Plan, remember
from memory_saving_gradients.schedule import (
    Schedule,
    Step,
    least_significant,
    make_schedule,
    seconds_again,
    tied,
)
from memory_saving_gradients.simulate import Timeline, simulate
from memory_saving_gradients.study import StockGradient, Study, examine
from memory_saving_gradients.tf_write import Rewiring, write
from memory_saving_gradients.verify import verified
from memory_saving_gradients.wording import counted, sizes_like

__all__ = ["plan_of", "rewire"]

_SLOW_PLANNING_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Decision:
    """A schedule, what it is predicted to do, and why it is stock's if it is."""

    schedule: Schedule
    timeline: Timeline
    stock: Timeline
    gain: Gain
    reason: str
    chosen: int
    allowed: Allowance | None


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
    built: StockGradient,
    checkpoints: Checkpoints,
    *,
    unknown_dim: int | None,
    cost: Measured | None,
    verify: bool,
) -> tuple[list[Any], Rewiring | None, Plan]:
    """Makes the backward pass that was just built recompute instead of hold.

    Args:
        built: The stock gradient.
        checkpoints: What to keep; a collection has been looked up already.
        unknown_dim: What an unknown dimension is taken to be; None if nobody said.
        cost: Measured seconds of ops; None for those of the model.
        verify: Whether the gradients shall depend on an assertion that every
            recomputed tensor is what it was the first time.

    Returns:
        The gradients, what was redirected (None if the graph stays as it is), and the
        plan.
    """
    started = time.perf_counter()
    graph = built.graph
    if unknown_dim is None and isinstance(checkpoints, SavedPlan):
        unknown_dim = checkpoints.unknown_dim
    study = examine(built, unknown_dim, cost, relative=is_relative(checkpoints))
    study = study.as_asked(checkpoints)
    decision = _decide(checkpoints, study)
    gradients, rewiring = list(built.gradients), None
    if not decision.reason:
        reading = study.reading
        with tf_internals.creation_scope(graph):
            fences.hold_back(built.tensor_seeds, reading)
        rewiring = write(graph, reading, study.problem.buffers, decision.schedule)
        if verify:
            gradients = verified(gradients, reading, rewiring, graph)
    plan = _plan(checkpoints, study, decision, time.perf_counter() - started)
    plan = _with_bodies(plan, study)
    remember(plan)
    _report(plan)
    return gradients, rewiring, plan


@_garbage_collection_paused()
def plan_of(study: Study, checkpoints: Checkpoints, *, quietly: bool = False) -> Plan:
    """What `rewire` would do with the gradient that was studied; nothing is changed.

    Args:
        study: The gradient.
        checkpoints: What to keep.
        quietly: Whether nothing is logged, since it is one plan of several.
    """
    started = time.perf_counter()
    study = study.as_asked(checkpoints)
    decision = _decide(checkpoints, study, quietly)
    elapsed = study.seconds + time.perf_counter() - started
    return _with_bodies(_plan(checkpoints, study, decision, elapsed), study)


def _decide(checkpoints: Checkpoints, study: Study, quietly: bool = False) -> _Decision:
    """Steps 2 and 3 of the module's outline."""
    problem, reading = study.problem, study.reading
    buffers = problem.buffers
    stock = problem.stock
    allowed = None
    if isinstance(checkpoints, SavedPlan):
        choice = Choice(
            replay.kept_as_saved(checkpoints, reading),
            replay.reruns_as_saved(checkpoints, reading, buffers),
        )
    elif isinstance(checkpoints, Budget):
        allowed = allowance(checkpoints, study.stock_peak_bytes, reading)
        choice = chosen_within(
            allowed, checkpoints, problem, reading, study.stock_peak_bytes, quietly
        )
    else:
        choice = Choice(selection.select(checkpoints, problem, reading, study.graph))
    schedule = make_schedule(buffers, choice.kept, reruns=choice.reruns)
    if isinstance(checkpoints, SavedPlan):
        replay.require_same_work(checkpoints, schedule, reading)
    timeline = simulate(buffers, schedule)
    significant_bytes = least_significant(buffers, timeline.peak_bytes)
    schedule = tied(buffers, schedule, study.starts, significant_bytes)
    extra = seconds_again(reading.graph, schedule)
    gain = gain_of(buffers, choice.kept, stock, timeline, extra)
    if choice.reruns is not None:
        gain = replace(gain, peak_if_consumed_bytes=timeline.peak_bytes)
    reason = _reason_for_stock(checkpoints, study, schedule, gain, allowed)
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
    chosen = len(choice.kept - problem.forced)
    return _Decision(schedule, timeline, stock, gain, reason, chosen, allowed)


def _reason_for_stock(
    checkpoints: Checkpoints,
    study: Study,
    schedule: Schedule,
    gain: Gain,
    allowed: Allowance | None,
) -> str:
    """Why the graph is left as it is, or "". What the user selects is obeyed."""
    problem = study.problem
    if not study.reading.graph.results:
        return "none of the `xs` reaches the `ys`, so that every gradient is None"
    if isinstance(checkpoints, SavedPlan):
        return checkpoints.reason
    if allowed is not None and problem.stock_peak_bytes <= allowed.bytes:
        return f"stock's own peak is within the budget{assumed_sizes(study.reading)}"
    if schedule.recomputed:
        return gain.reason_against() if isinstance(checkpoints, Auto) else ""
    if allowed is not None:
        return ""  # the enforced order may be what keeps to the budget
    if not problem.candidates:
        return "there is nothing that could be recomputed to save memory"
    if isinstance(checkpoints, Auto):
        return "no plan was found whose peak is below stock's"
    return "with these tensors kept there is nothing left to recompute"


def _plan(
    checkpoints: Checkpoints, study: Study, decision: _Decision, elapsed: float
) -> Plan:
    reading = study.reading
    ops = reading.graph.ops
    tensors = reading.graph.tensors
    schedule = decision.schedule
    extra = seconds_again(reading.graph, schedule)
    saved = checkpoints if isinstance(checkpoints, SavedPlan) else None
    strategy = selection.describe(checkpoints, decision.chosen)
    budget = decision.allowed.bytes if decision.allowed else None
    return Plan(
        strategy=saved.strategy if saved else strategy,
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
        reason=decision.reason if saved else _beside(decision.reason, study.bodies),
        xla=study.xla,
        budget_bytes=saved.budget_bytes if saved else budget,
        resting_bytes=decision.allowed.resting_bytes if decision.allowed else None,
        stock=decision.stock,
        timeline=decision.timeline,
        schedule=schedule,
        measured=study.coverage,
        reading=reading,
        consumed=is_of_who_consumes(checkpoints),
        replayed=saved is not None,
    )


def _beside(reason: str, bodies: Sequence[InsidePlan]) -> str:
    """The reason, without a claim about what is inside of loops and the like."""
    if not reason or not any(body.recomputed for body in bodies):
        return reason
    return (
        f"{reason}, but for what is recomputed inside loops, branches and called "
        "functions"
    )


def _with_bodies(plan: Plan, study: Study) -> Plan:
    """The plan with what loops, branches and calls spare, and with what that costs.

    What they hold now, and the seconds of what they recompute, are in the graph that
    was simulated.
    """
    stock = study.stock
    extra = plan.extra_seconds + sum(body.seconds_in_all for body in study.bodies)
    return replace(
        plan,
        stock_peak_bytes=stock.peak_bytes,
        stock_peak_if_consumed_bytes=stock.peak_if_consumed_bytes,
        extra_seconds=extra,
        extra_fraction=extra / stock.seconds if stock.seconds > 0 else 0.0,
        bodies=tuple(study.bodies),
        rule=study.rule,
    )


def _report(plan: Plan) -> None:
    """One INFO line a call."""
    note = f" (left as it was: {plan.reason})" if plan.is_stock else ""
    slow = plan.planning_seconds > _SLOW_PLANNING_SECONDS
    size = sizes_like(plan.stock_peak_bytes)
    _log.info(
        "%s: peak %s instead of %s, %.0f %% more work, %s recomputed%s; "
        "planned in %.1f s%s",
        f"{plan.strategy}, as saved" if plan.replayed else plan.strategy,
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
