"""`plan`: what a gradient would take, without training or running anything.

A loss function, or the training step of a Keras model, is traced once in a throw-away
graph. The gradient that it takes there is studied, and the planners do the rest on
plain data. No op is run, no variable changes, and no trace is kept.

The training step of a model is not traced further than to its first gradient: what
comes after that would have the optimizer make its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import doors, keras_models
from memory_saving_gradients.autodiff import Setting, parse_setting
from memory_saving_gradients.body_rules import BodyRule
from memory_saving_gradients.checkpoints import Checkpoints
from memory_saving_gradients.errors import MemorySavingGradientsError
from memory_saving_gradients.input_specs import filled, has_open_batch, specs_of_model
from memory_saving_gradients.keras import plain_train_step
from memory_saving_gradients.keras_wishes import asked_for
from memory_saving_gradients.measured import Measured
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.rewire import plan_of
from memory_saving_gradients.study import Study
from memory_saving_gradients.trials import Trials

__all__ = ["Subject", "plan"]


@tf.autograph.experimental.do_not_convert
def plan(
    fn_or_model: Any,
    *input_specs: Any,
    checkpoints: Any = "memory",
    batch_size: int | None = None,
    unknown_dim: int | None = None,
    cost: Any = None,
) -> Plan:
    """The plan that training would get, made without training.

    Nothing is run and nothing is left behind: the weights of a model, the slots of its
    optimizer and what `fit` has traced are as before.

    Args:
        fn_or_model: A function that returns a loss; it is differentiated with respect
            to all trainable variables that it reads. Or a Keras model (Keras 3 or
            `tf_keras`) that has been compiled: its own training step, loss and
            `jit_compile` count.
        input_specs: What the function is called with: a `tf.TensorSpec` for each
            argument, or anything else with a shape and a dtype, such as arrays; nested
            as the argument is. For a model x, y and, maybe, sample weights. If none are
            given they are those of the model's inputs and outputs.
        checkpoints: What to keep, as in `gradients`; for a model, layers as well, as in
            `memory_saving`.
        batch_size: What stands for the first dimension of each input, where that is not
            known. Without it the plan is made for batches of `unknown_dim`.
        unknown_dim: What any other dimension that is not known is taken to be.
        cost: Measured seconds of ops, as in `gradients`: of a step of the same function
            or model, whose ops have the same names.

    Returns:
        The plan.

    Raises:
        CostError: `cost` holds no measured times.
        CheckpointError: From `checkpoints` no plan can be made.
        BudgetError: No plan keeps to the budget; it names the least that would do.
        MemorySavingGradientsError: No gradient is taken, or a model's inputs or targets
            cannot be told.
        TypeError: `fn_or_model` is neither, or a spec is none.

    Example:
        >>> import keras
        >>> import memory_saving_gradients as msg
        >>> model = keras.Sequential([keras.Input([64])])
        >>> for _ in range(9):
        ...     model.add(keras.layers.Dense(64, "gelu"))
        >>> model.compile("adam", "mse")
        >>> print(msg.plan(model, checkpoints="50%", batch_size=1024))
    """
    subject = Subject.of(fn_or_model, input_specs, unknown_dim, cost, "plan")
    setting, noting = subject.asked_for(checkpoints)
    study, keep = subject.traced(batch_size, setting, noting)
    return plan_of(study, keep)


class _SeenEnough(Exception):
    """Ends a trace."""


@dataclass(frozen=True)
class Subject:
    """What somebody wants to know something of.

    Attributes:
        what: A function or a Keras model.
        specs: The inputs; none if they are the model's to tell.
        unknown_dim: What an unknown dimension is taken to be.
        cost: Measured seconds of ops; None for those of the model of costs.
        where: The public function that was called, for messages.
    """

    what: Any
    specs: tuple[Any, ...]
    unknown_dim: int | None
    cost: Measured | None
    where: str

    @classmethod
    def of(
        cls,
        what: Any,
        specs: Sequence[Any],
        unknown_dim: int | None,
        cost: Any,
        where: str,
    ) -> Subject:
        """Checks what was given.

        Raises:
            CostError: `cost` holds no measured times.
            TypeError: It is neither a function nor a model.
        """
        if not (keras_models.is_model(what) or callable(what)):
            raise TypeError(
                f"`memory_saving_gradients.{where}`: expected a function that returns "
                f"a loss, or a Keras model, but got {what!r} of type "
                f"{type(what).__name__}."
            )
        measured = parse_setting("memory", unknown_dim, cost, where=where).cost
        return cls(what, tuple(specs), unknown_dim, measured, where)

    @property
    def is_model(self) -> bool:
        """Whether it is a Keras model."""
        return keras_models.is_model(self.what)

    def asked_for(
        self, checkpoints: Any
    ) -> tuple[Setting, AbstractContextManager[Any]]:
        """What `checkpoints` means here, and where to trace."""
        if self.is_model:
            return asked_for(
                self.what, checkpoints, self.unknown_dim, self.cost, self.where
            )
        setting = parse_setting(
            checkpoints, self.unknown_dim, self.cost, where=self.where
        )
        return setting, nullcontext()

    def trials(self, batch_size: int | None = None) -> Trials:
        """The gradient under each rule for loops, branches and called functions."""

        def under(rule: BodyRule) -> Study:
            setting, noting = self.asked_for("memory")
            return self.traced(batch_size, replace(setting, rule=rule), noting)[0]

        return Trials(under)

    def traced(
        self,
        batch_size: int | None,
        setting: Setting,
        noting: AbstractContextManager[Any],
    ) -> tuple[Study, Checkpoints]:
        """Takes the gradient in a graph of its own.

        Returns:
            What was seen, and what `setting` says is to be kept there.
        """
        found: list[tuple[Study, Checkpoints]] = []

        def note(study: Study) -> None:
            found.append((study, setting.resolved(study.graph)))
            if self.is_model:
                raise _SeenEnough

        trace = self._trace_model if self.is_model else self._trace_function
        with doors.use(replace(setting, studied=note)), noting:
            trace(batch_size)
        if not found or not found[-1][0].reading.graph.results:
            raise self._nothing_seen()
        return found[-1]  # those before it stand inside the loss

    @property
    def has_open_batch(self) -> bool:
        """Whether some input has a first dimension that is not known."""
        return has_open_batch(self._inputs())

    def _inputs(self) -> Sequence[Any]:
        """The inputs as they were given, or as they are known otherwise."""
        if self.specs:
            return self.specs
        if self.is_model:
            return specs_of_model(self.what, self.where)
        return getattr(self.what, "input_signature", None) or ()

    def _trace_function(self, batch_size: int | None) -> None:
        # What is called here as a `tf.function` would be one op.
        loss_of: Callable[..., Any] = getattr(self.what, "python_function", self.what)
        specs = self._inputs()

        def step(*arguments: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(*arguments)
            return tape.gradient(loss, tape.watched_variables())

        tf.function(step).get_concrete_function(*filled(specs, batch_size, self.where))

    def _trace_model(self, batch_size: int | None) -> None:
        model = self.what
        if getattr(model, "optimizer", None) is None:
            raise MemorySavingGradientsError(
                f"`memory_saving_gradients.{self.where}`: the model {model.name!r} has "
                "no optimizer and no loss. Call `model.compile` first: it is the "
                "training step that is planned."
            )
        if not model.built:
            raise MemorySavingGradientsError(
                f"`memory_saving_gradients.{self.where}`: the model {model.name!r} has "
                "no weights yet. Call `model.build` first, or give it a `keras.Input`."
            )
        specs = self._inputs()
        train_step = plain_train_step(model)

        def step(*data: Any) -> Any:
            return train_step(data)

        jit = getattr(model, "jit_compile", False) is True
        function = tf.function(step, autograph=False, jit_compile=jit)
        with suppress(_SeenEnough):
            function.get_concrete_function(*filled(specs, batch_size, self.where))

    def _nothing_seen(self) -> MemorySavingGradientsError:
        start = f"`memory_saving_gradients.{self.where}`: "
        if self.is_model:
            return MemorySavingGradientsError(
                f"{start}the training step of {self.what.name!r} takes no gradient of "
                "its weights, or takes it with `checkpoints=` of its own."
            )
        return MemorySavingGradientsError(
            f"{start}no gradient of the function is there to plan: its result has to "
            "be a loss that depends on trainable variables."
        )
