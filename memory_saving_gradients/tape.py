"""`GradientTape`: TensorFlow's tape, whose gradients need less memory.

It calls the stock tape's methods; these look up the function that `doors` has wrapped.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import doors, tf_internals
from memory_saving_gradients.autodiff import (
    Outcome,
    Setting,
    setting_or_stock,
)
from memory_saving_gradients.plan import Plan

__all__ = ["GradientTape"]

_unconverted = tf.autograph.experimental.do_not_convert


class GradientTape(tf_internals.StockTape):
    """`tf.GradientTape` with one more argument, `checkpoints`.

    In a graph (a `tf.function`, compiled with XLA or not) TensorFlow builds the
    backward pass as ever, and it is then rewired to recompute most of what it reads
    from the forward pass instead of holding it. `jacobian` and `batch_jacobian` are
    stock's: TensorFlow makes another graph of the gradient that they take.

    Called eagerly it *is* the stock tape: the forward pass has already been run and
    held when `gradient()` is called. A warning says so, once. (A `tf.function` that is
    called meanwhile saves what it can inside.)

    Args:
        persistent: As in `tf.GradientTape`: whether `gradient()` may be called more
            than once.
        watch_accessed_variables: As in `tf.GradientTape`.
        checkpoints: What to keep, as in `memory_saving_gradients.gradients`; None is
            the stock tape, also where `enable()` says otherwise.
        unknown_dim: What a dimension that is not known statically (a batch size) is
            taken to be while planning, as in `gradients`.
        cost: Measured seconds of ops, as in `memory_saving_gradients.gradients`.
        verify: Whether to compare, at run time, each recomputed tensor with the
            original and fail if a bit differs. Costs all the memory that was saved.
        every: After how many iterations loops hold their state, as in
            `memory_saving_gradients.gradients`.

    Raises:
        CheckpointError: `checkpoints` is nothing that it may be.
        CostError: `cost` holds no measured times.
        TypeError, ValueError: `unknown_dim` or `every` is no positive int.

    Example:
        >>> @tf.function
        ... def step(x):
        ...     with GradientTape() as tape:
        ...         tape.watch(x)
        ...         y = x
        ...         for _ in range(20):
        ...             y = tf.tanh(y)
        ...     return tape.gradient(y, x)
    """

    @_unconverted
    def __init__(
        self,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
        checkpoints: Any = "memory",
        *,
        unknown_dim: int | None = None,
        cost: Any = None,
        verify: bool = False,
        every: int | str | None = None,
    ) -> None:
        """Makes a tape; `with` starts it. The arguments are those of the class.

        Args:
            persistent: As in `tf.GradientTape`.
            watch_accessed_variables: As in `tf.GradientTape`.
            checkpoints: What to keep, as in `memory_saving_gradients.gradients`.
            unknown_dim: What an unknown dimension is taken to be while planning.
            cost: Measured seconds of ops.
            verify: Whether recomputed tensors are compared at run time.
            every: After how many iterations loops hold their state.

        Raises:
            CheckpointError: `checkpoints` is nothing that it may be.
            CostError: `cost` holds no measured times.
            TypeError, ValueError: `unknown_dim` or `every` is no positive int.
        """
        self._newest_plan: Plan | None = None
        self._setting: Setting | None = setting_or_stock(
            checkpoints, unknown_dim, cost, verify, every, where="GradientTape"
        )
        self._inside = ExitStack()
        super().__init__(persistent, watch_accessed_variables)

    @_unconverted
    def __enter__(self) -> GradientTape:
        """Starts recording. Functions called from now on save memory inside."""
        self._inside.enter_context(doors.use_inside(self._setting))
        super().__enter__()
        return self

    @_unconverted
    def __exit__(self, *error: Any) -> None:
        """Stops recording."""
        self._inside.close()
        super().__exit__(*error)

    @property
    def plan(self) -> Plan | None:
        """The plan of the newest `gradient()`, None if there was nothing to plan."""
        return self._newest_plan

    @_unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradient of `target` with respect to `sources`, in less memory.

        Args:
            target: A tensor, or a structure of tensors, to differentiate.
            sources: A tensor or variable (also of Keras 3), or a structure of such.
            output_gradients: Gradients that the targets receive, or None for ones.
            unconnected_gradients: What is returned for a source that the targets do not
                depend on: None ("none") or zeros ("zero").

        Returns:
            Gradients (tensors, `tf.IndexedSlices` or None) in the structure of
            `sources`.

        Raises:
            CheckpointError: From `checkpoints` no plan can be made.
            VerificationUnavailableError: `verify=True` under XLA.
            RuntimeError, TypeError, ValueError: Whatever `tf.GradientTape` raises.
        """
        if tf.executing_eagerly() and self._setting is not None:
            _warn_once()
        # Made for each call: held on to, it would keep a dropped tape alive.
        setting = self._setting and replace(self._setting, done=self._note)
        with doors.use(setting):
            return super().gradient(
                target, sources, output_gradients, unconnected_gradients
            )

    @_unconverted
    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As in `tf.GradientTape`, in as much memory; the README says why."""
        with self._as_stock():
            return super().jacobian(*args, **kwargs)

    @_unconverted
    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As in `tf.GradientTape`, in as much memory; the README says why."""
        with self._as_stock():
            return super().batch_jacobian(*args, **kwargs)

    def _note(self, outcome: Outcome) -> None:
        self._newest_plan = outcome.plan

    @contextmanager
    def _as_stock(self) -> Iterator[None]:
        """Both methods above call `gradient()`, which shall be stock's then."""
        setting, self._setting = self._setting, None
        try:
            with doors.use(None):
                yield
        finally:
            self._setting = setting


_warned = threading.Event()


def _warn_once() -> None:
    if not _warned.is_set():
        _warned.set()
        warnings.warn(
            "`memory_saving_gradients.GradientTape` was used eagerly, where it is the "
            "stock tape and saves nothing, but inside of the `tf.function`s that were "
            "called: the forward pass has been run and held already. Put the forward "
            "pass and the call of `gradient()` into a `tf.function`.",
            stacklevel=4,
        )
