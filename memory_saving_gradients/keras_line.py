"""The one line in which the training of a model says what is saved.

What a step needs is seen in the second one: the first also makes optimizer slots and
what else is made once. `fit` of a single step says at its end what that one took.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients.autodiff import Outcome
from memory_saving_gradients.keras_batch import (
    batch_size_of,
    given_to_fit,
    given_to_running_fit,
)
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.user_code import level_of_caller
from memory_saving_gradients.wording import sizes_like

__all__ = ["Line"]

_FED_TYPES = frozenset(("IteratorGetNext", "Placeholder"))
"""Ops that bring the batch; of variables they bring handles of a few bytes."""

_SLACK = 1.1
"""By how much more than a budget a step may take without a warning: allocators round
up, and what is measured has what the optimizer needs in it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Taken:
    """What a step took on a device.

    Attributes:
        device: Which one, in words.
        bytes: The peak above what was held before.
        lasting_bytes: What of that was still held after it, such as optimizer slots.
    """

    device: str
    bytes: int
    lasting_bytes: int


class Line:
    """The line of one model; it comes once for each train function that is made.

    Args:
        model: The model, whose train function is replaced while it is watched.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._plans: list[Plan] = []
        self._first: list[_Taken] | None = None  # what the first step took
        self._in_fit = False
        self._silent = False
        self._batch_size: int | None = None
        self._replicas = 1
        self._bar = False  # whether the cursor may stand at the end of a progress bar

    def batch_size(self) -> int | None:
        """The size of what a replica gets of a batch of the `fit` that runs.

        None if that is not known. Call it where the training step is traced.
        """
        self._replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return self._batch_size and -(-self._batch_size // self._replicas)

    def note(self, outcome: Outcome) -> None:
        """Notes what was planned for a gradient of the train function."""
        if outcome.plan is not None:
            self._plans.append(outcome.plan)

    def watch(self) -> None:
        """Has the model's train function, newly made, watched for two steps."""
        self._plans.clear()
        self._first = None
        function = self._model.train_function

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if tf.config.functions_run_eagerly():
                return function(*args, **kwargs)
            given = {} if self._in_fit else given_to_running_fit(self._model)
            with self._during(given) if given else nullcontext():
                return self._step(function, watched, args, kwargs)

        self._model.train_function = watched

    def _step(self, function: Any, watched: Any, args: Any, kwargs: Any) -> Any:
        """Runs one step and says what it took, if it is the second."""
        from mem_util.allocator import counted_apart

        second = self._first is not None
        # Only if it is still in its place: `enable()` may have made another.
        if second and self._model.train_function is watched:
            self._model.train_function = function
        result, before, after = counted_apart(
            lambda: function(*args, **kwargs), reset=second
        )
        taken = []
        for device, now in after.devices.items():
            was = before.devices[device]
            if now.peak_bytes > was.peak_bytes:
                pooled = device in after.pooled
                name = "all logical CPU devices together" if pooled else device
                lasting = max(now.current_bytes - was.current_bytes, 0)
                taken.append(_Taken(name, now.peak_bytes - was.current_bytes, lasting))
        if second:
            self._say(taken, "above weights and optimizer slots")
        else:
            self._first = taken
        return result

    def around_fit(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """The model's `fit`, after which the line has come, if there was a step.

        Args:
            fit: The `fit` to call.
        """

        @functools.wraps(fit)
        def saying_fit(*args: Any, **kwargs: Any) -> Any:
            with self._during(given_to_fit(fit, args, kwargs)):
                result = fit(*args, **kwargs)
                self._bar = False  # it has ended, and its line with it
                if self._first is not None:
                    self._say(
                        self._first, "in the first step, in which slots are made, too"
                    )
                return result

        return saying_fit

    @contextmanager
    def _during(self, given: Mapping[str, Any]) -> Iterator[None]:
        """A call of `fit`, or a part of one, that was given this."""
        outer = self._in_fit, self._silent, self._bar
        verbose = given.get("verbose", "auto") if given else None
        self._in_fit = True
        self._silent, self._bar = verbose in (0, "0"), verbose in (1, "1", "auto")
        self._batch_size = batch_size_of(given)
        try:
            yield
        finally:
            self._in_fit, self._silent, self._bar = outer
            self._batch_size = None

    def _say(self, taken: Sequence[_Taken], what: str) -> None:
        plans, self._plans = self._plans, []
        if not plans:
            return
        plan = max(plans, key=lambda plan: plan.stock_peak_bytes)
        assumed = plan.reading.graph.assumed
        size = sizes_like(max((one.bytes for one in taken), default=0))
        measured = [f"{size(one.bytes)} on {one.device}" for one in taken]
        self._tell(
            f"{self._model.name}: predicted peak {_peaks(plan)}"
            + (f" on each of {self._replicas} replicas" if self._replicas > 1 else "")
            + (
                f" (for batches of {plan.reading.unknown_dim}, see `unknown_dim`)"
                if assumed
                else ""
            )
            + (
                f", measured {', '.join(measured)} {what}"
                if measured
                else ", not measured (the allocator's statistics show no peak)"
            )
            + (f"; left as it was: {plan.reason}" if plan.is_stock else "")
        )
        # A function that makes variables, such as slots, is traced twice.
        graph = _graph_of(plan)
        above = _above_budget([p for p in plans if _graph_of(p) is graph], taken)
        if above:
            warnings.warn(
                f"`memory_saving_gradients.memory_saving`: a step of "
                f"{self._model.name!r} {above} {_advice(plan)}",
                stacklevel=level_of_caller(),
            )

    def _tell(self, line: str) -> None:
        """Logs it; where nobody asked for a log, prints it as `fit` prints its own."""
        import keras

        silent = self._silent or not keras.config.is_interactive_logging_enabled()
        if silent or _log.isEnabledFor(logging.INFO):
            _log.info("%s", line)
        else:
            print(f"\n{line}" if self._bar else line)


def _graph_of(plan: Plan) -> Any:
    """The graph that a plan was made in, None if it is empty."""
    return next((op.graph for op in plan.reading.ops), None)


def _above_budget(plans: Sequence[Plan], taken: Sequence[_Taken]) -> str:
    """By how much a step went beyond the budget of its gradients, or ""."""
    budgets = [plan.budget_bytes for plan in plans if plan.budget_bytes is not None]
    if len(budgets) < len(plans):
        return ""  # one of them has no limit
    # Replicas have a device each; on one device the peaks of several may add up.
    allowed = max(budgets) if len(taken) >= len(plans) else sum(budgets)
    fed = max(map(_bytes_fed, plans), default=0)
    for one in sorted(taken, key=lambda one: one.lasting_bytes - one.bytes):
        needed = one.bytes - one.lasting_bytes - fed
        if needed > _SLACK * allowed:
            size = sizes_like(needed)
            return (
                f"took {size(needed)} on {one.device} besides its input, "
                f"{size(needed - allowed)} more than its budget of {size(allowed)}."
            )
    return ""


def _advice(plan: Plan) -> str:
    """What to do where a budget was not kept."""
    if plan.reading.graph.assumed:
        return (
            f"Batches of {plan.reading.unknown_dim} were assumed when it was planned: "
            "if yours are larger, say so by `unknown_dim=`; if not, give a smaller "
            "budget."
        )
    return (
        "A budget counts what activations and gradients ask for; what is measured has "
        "in it what allocators hand out beyond that (on a CPU mostly the cause: their "
        "chunks are larger) and what the optimizer needs for a moment. Give a smaller "
        "budget."
    )


def _bytes_fed(plan: Plan) -> int:
    """The size of a batch, which comes during the step and rests for a plan."""
    graph = plan.reading.graph
    return sum(
        tensor.bytes
        for op in graph.forward_ops
        if op.type in _FED_TYPES
        for tensor in (graph.tensors[output] for output in op.outputs)
    )


def _peaks(plan: Plan) -> str:
    """Both peaks; if consumed, where only then something is saved."""
    new, old, why = plan.predicted_peak_bytes, plan.stock_peak_bytes, ""
    size = sizes_like(old)
    consumed = plan.predicted_peak_if_consumed_bytes, plan.stock_peak_if_consumed_bytes
    if size(new) == size(old) and consumed[0] < consumed[1]:
        (new, old), why = consumed, ", each gradient consumed as it comes"
        size = sizes_like(old)
    return f"{size(new)} instead of stock's {size(old)}{why}"
