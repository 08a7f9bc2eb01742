"""The one line in which the training of a model says what is saved.

What a step needs is seen in the second one: the first also makes optimizer slots and
what else is made once. `fit` of a single step says at its end what that one took.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from memory_saving_gradients.autodiff import Outcome
from memory_saving_gradients.keras_batch import batch_size_of, given_to_fit
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.wording import sizes_like

__all__ = ["Line"]

_log = logging.getLogger(__name__)


class Line:
    """The line of one model; it comes once for each train function that is made.

    Args:
        model: The model, whose train function is replaced while it is watched.

    Attributes:
        batch_size: That of the `fit` that runs, as far as it is known.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._plans: list[Plan] = []
        self._first: list[str] | None = None  # what the first step took
        self._silent = False
        self.batch_size: int | None = None
        self._bar = False  # whether the cursor may stand at the end of a progress bar

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
            from mem_util.allocator import counted_apart

            second = self._first is not None
            # Only if it is still in its place: `enable()` may have made another.
            if second and self._model.train_function is watched:
                self._model.train_function = function
            result, before, after = counted_apart(
                lambda: function(*args, **kwargs), reset=second
            )
            measured = [
                (device, now.peak_bytes - before.devices[device].current_bytes)
                for device, now in after.devices.items()
                if now.peak_bytes > before.devices[device].peak_bytes
            ]
            size = sizes_like(max((count for _, count in measured), default=0))
            figures = [f"{size(count)} on {device}" for device, count in measured]
            if second:
                self._say(figures, "above weights and optimizer slots")
            else:
                self._first = figures
            return result

        self._model.train_function = watched

    def around_fit(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """The model's `fit`, after which the line has come, if there was a step.

        Args:
            fit: The `fit` to call.
        """

        @functools.wraps(fit)
        def saying_fit(*args: Any, **kwargs: Any) -> Any:
            outer = self._silent, self._bar
            given = given_to_fit(fit, args, kwargs)
            verbose = given.get("verbose", "auto") if given else None
            self._silent, self._bar = verbose in (0, "0"), verbose in (1, "1", "auto")
            self.batch_size = batch_size_of(given)
            try:
                result = fit(*args, **kwargs)
                self._bar = False  # it has ended, and its line with it
                if self._first is not None:
                    self._say(
                        self._first, "in the first step, in which slots are made, too"
                    )
                return result
            finally:
                self._silent, self._bar = outer
                self.batch_size = None

        return saying_fit

    def _say(self, measured: list[str], what: str) -> None:
        plans, self._plans = self._plans, []
        if not plans:
            return
        plan = max(plans, key=lambda plan: plan.stock_peak_bytes)
        assumed = plan.reading.graph.assumed
        self._tell(
            f"{self._model.name}: predicted peak {_peaks(plan)}"
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

    def _tell(self, line: str) -> None:
        """Logs it; where nobody asked for a log, prints it as `fit` prints its own."""
        import keras

        silent = self._silent or not keras.config.is_interactive_logging_enabled()
        if silent or _log.isEnabledFor(logging.INFO):
            _log.info("%s", line)
        else:
            print(f"\n{line}" if self._bar else line)


def _peaks(plan: Plan) -> str:
    """Both peaks; if consumed, where only then something is saved."""
    new, old, why = plan.predicted_peak_bytes, plan.stock_peak_bytes, ""
    size = sizes_like(old)
    consumed = plan.predicted_peak_if_consumed_bytes, plan.stock_peak_if_consumed_bytes
    if size(new) == size(old) and consumed[0] < consumed[1]:
        (new, old), why = consumed, ", each gradient consumed as it comes"
        size = sizes_like(old)
    return f"{size(new)} instead of stock's {size(old)}{why}"
