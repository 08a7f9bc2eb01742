"""A budget in a real graph: what it allows, and what is kept under it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tensorflow as tf

from memory_saving_gradients import tf_internals
from memory_saving_gradients.budget import Budget
from memory_saving_gradients.errors import BudgetError, CheckpointError
from memory_saving_gradients.graph import variables_read
from memory_saving_gradients.planners import Problem, plan_budget
from memory_saving_gradients.planners.again import plan_below_floor
from memory_saving_gradients.planners.nested import Nested
from memory_saving_gradients.schedule import make_schedule
from memory_saving_gradients.simulate import Timeline, simulate
from memory_saving_gradients.sweep import Sweep
from memory_saving_gradients.tf_read import Reading
from memory_saving_gradients.user_code import user_line
from memory_saving_gradients.wording import sizes_like

__all__ = ["Allowance", "Choice", "allowance", "assumed_sizes", "chosen_within"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Allowance:
    """What a budget comes to in one graph.

    Attributes:
        bytes: What the peak may be, above rest.
        total_bytes: What the whole program may use, if the budget was given so.
        resting_bytes: What of that rests: variables, optimizer slots.
    """

    bytes: int
    total_bytes: int | None = None
    resting_bytes: int | None = None


@dataclass(frozen=True)
class Choice:
    """What is kept, and what is run again more than once.

    Attributes:
        kept: Ids of the tensors that are kept.
        reruns: As in `make_schedule`; None if every op is recomputed at most once.
    """

    kept: frozenset[int]
    reruns: Mapping[int, tuple[int, ...]] | None = None


def allowance(budget: Budget, stock_peak_bytes: int, reading: Reading) -> Allowance:
    """What the budget leaves for the forward and backward pass.

    Args:
        budget: The budget.
        stock_peak_bytes: What percentages are of.
        reading: The gradient.

    Raises:
        CheckpointError: The device is not there, or has no limit of its own.
        BudgetError: What rests takes all of it.
    """
    if budget.above_rest:
        return Allowance(budget.allowed(stock_peak_bytes))
    device = _device(budget)
    total = budget.total_bytes
    if total is None:
        total = _memory_of(device)
    resting = max(_given_out(device), _variable_bytes(reading))
    if resting >= total:
        size = sizes_like(total)
        raise BudgetError(
            f"What rests on {device}, variables and the like, takes {size(resting)} "
            f"({resting} bytes), all of the {size(total)} of {budget}. Recomputation "
            "saves nothing of that: use a smaller model, a leaner optimizer, or half "
            "precision."
        )
    return Allowance(total - resting, total, resting)


def chosen_within(
    allowed: Allowance,
    budget: Budget,
    problem: Problem,
    reading: Reading,
    stock_peak_bytes: int,
    quietly: bool,
) -> Choice:
    """What is kept under the budget.

    Only if no plan fits that recomputes every op at most once, some are recomputed
    more often.

    Args:
        allowed: What the budget comes to.
        budget: The budget.
        problem: The question.
        reading: The gradient.
        stock_peak_bytes: Stock's peak, of bodies that are stock's, too.
        quietly: Whether nothing is logged.

    Raises:
        BudgetError: No plan that was found is within the budget.
    """
    kept = plan_budget(problem, allowed.bytes)
    if allowed.bytes >= problem.stock_peak_bytes:
        return Choice(kept)
    least = Sweep(problem.buffers, kept).peak_bytes
    if least <= allowed.bytes:
        return Choice(kept)
    nested = plan_below_floor(problem, allowed.bytes, least)
    if nested.peak_bytes <= allowed.bytes:
        if not quietly:
            _warn(budget, nested, least, problem)
        return Choice(nested.kept, nested.reruns)
    choice = Choice(kept)
    if nested.peak_bytes < least:
        choice = Choice(nested.kept, nested.reruns)
    raise _too_little(allowed, budget, problem, reading, choice, stock_peak_bytes)


def _warn(budget: Budget, nested: Nested, least: int, problem: Problem) -> None:
    """That ops run several times, and from where on they would not."""
    runs = Counter(p for run in nested.reruns.values() for p in run)
    if max(runs.values(), default=1) == 1:  # it is only their order that is another
        return
    size = sizes_like(problem.stock_peak_bytes)
    _log.warning(
        "%s: with every op recomputed at most once the lowest peak is %s, so that some "
        "are recomputed up to %d times, %.1f times on average.",
        budget,
        size(least),
        max(runs.values()),
        sum(runs.values()) / len(runs),
    )


def _too_little(
    allowed: Allowance,
    budget: Budget,
    problem: Problem,
    reading: Reading,
    choice: Choice,
    stock: int,
) -> BudgetError:
    """What to say if `choice`, the plan of the lowest peak, is too much."""
    graph, buffers = reading.graph, problem.buffers
    schedule = make_schedule(buffers, choice.kept, reruns=choice.reruns)
    timeline = simulate(buffers, schedule)
    step = timeline.steps[timeline.peak_step]
    op = graph.ops[step.op]
    least = timeline.peak_bytes
    size = sizes_like(stock)
    is_plain = budget.above_rest and not budget.is_share
    alike = sizes_like(allowed.bytes)
    is_near = alike(least) == alike(allowed.bytes)  # only bytes tell one from the other
    allows = f"{allowed.bytes} bytes" if is_near else size(allowed.bytes)
    needs = f"{least} bytes (" if is_near else f"{size(least)} ({least} bytes; "
    left = f", which is {allows} above rest"
    if is_plain:
        left = f" ({allows})" if is_near else ""
    error: BudgetError = BudgetError(
        f"No plan keeps to {budget}{left}. The lowest peak that was found is "
        f"{needs}stock's is {size(stock)}), reached "
        f"{'while recomputing' if step.copy else 'at'} {op.type} {op.name}"
        f"{_largest(timeline, reading, size)}. Allow that much, or make what is alive "
        "then smaller: activations by a smaller batch, gradients by fewer weights."
        f"{_hint_of_assumption(reading)}"
    )
    return error


def assumed_sizes(reading: Reading) -> str:
    """What in a clause tells which sizes the figures rest on; "" if all are known."""
    if not reading.graph.assumed:
        return ""
    return (
        f" if unknown dimensions are {reading.unknown_dim}, as was assumed (give the "
        "size of your batches as `unknown_dim=`)"
    )


def _hint_of_assumption(reading: Reading) -> str:
    if not reading.graph.assumed:
        return ""
    return (
        f" All of that is for unknown dimensions of {reading.unknown_dim}, as was "
        "assumed: if your batches have another size, say so by `unknown_dim=`."
    )


def _largest(timeline: Timeline, reading: Reading, size: Callable[[int], str]) -> str:
    """The largest tensor at the peak; "" if none is large."""
    if not timeline.at_peak:
        return ""
    first = reading.graph.tensors[timeline.at_peak[0].tensor]
    if 20 * first.bytes < timeline.peak_bytes:
        return ""
    where = ""
    if first.op < reading.graph.forward_count:
        where = f" ({user_line(reading.ops[first.op])})"
    return f", where {first.name}{where} takes {size(first.bytes)}"


def _variable_bytes(reading: Reading) -> int:
    """Bytes of the variables that the forward pass reads."""
    tensors = reading.graph.tensors
    return sum(tensors[r[0]].bytes for r in variables_read(reading.graph).values())


def _device(budget: Budget) -> str:
    """The device that is meant, as TensorFlow's memory functions want it."""
    known = [d.name for d in tf.config.list_logical_devices()]
    short = [name.removeprefix("/device:") for name in known]
    if budget.device is None:
        gpus = [name for name in short if name.startswith("GPU:")]
        return gpus[0] if gpus else "CPU:0"
    asked = budget.device.upper().lstrip("/").removeprefix("DEVICE:")
    asked = asked if ":" in asked else f"{asked}:0"
    if asked not in short:
        raise CheckpointError(
            f"`memory_saving_gradients.Budget`: there is no device {budget.device!r}. "
            f"TensorFlow sees {', '.join(short)}."
        )
    return asked


def _given_out(device: str) -> int:
    """What the device's allocator has given out at this moment."""
    with tf.init_scope():
        try:
            info = tf.config.experimental.get_memory_info(device)
        except ValueError:  # it keeps no count
            return 0
    return int(info["current"])


def _memory_of(device: str) -> int:
    """All that TensorFlow may use on a device."""
    limit = tf_internals.memory_limit(device)
    if device.startswith("CPU") or limit <= 0:
        raise CheckpointError(
            f"`memory_saving_gradients.Budget`: TensorFlow sets itself no limit on "
            f'{device}. Say how much there is: `Budget(total="8GiB", '
            f'device="{device}")`.'
        )
    return limit
