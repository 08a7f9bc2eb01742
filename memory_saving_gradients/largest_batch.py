"""`max_batch_size`: the largest batch that fits, found without running anything.

The peak of a strategy grows as a·B + c with the size B of a batch: activations grow
with it, the gradients of weights do not. So

1. the peaks at two sizes give a and c, and with them a guess;
2. the strategy plans at that very size, and the line is drawn anew through the sizes
   next to the answer, until they leave no other guess.

Small sizes may lie on another line, that of the weights' gradients. So recomputing
strategies begin at what fits for stock, which costs nothing to find: no plan is needed.

The peak of a budget is the lowest that its planners can reach, ops recomputed several
times included. A few of them run again (`planners.again`) is a matter of the budget, of
which no line tells. So plans of somewhat larger batches are tried at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients.budgeted import allowance
from memory_saving_gradients.checkpoints import Auto, Budget, Checkpoints
from memory_saving_gradients.dry_run import Subject
from memory_saving_gradients.errors import (
    BudgetError,
    CheckpointError,
    MemorySavingGradientsError,
)
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.planners.budget import explored
from memory_saving_gradients.planners.nested import plan_nested
from memory_saving_gradients.trials import Trials
from memory_saving_gradients.wording import columns, percent, sizes_like

__all__ = ["FittingBatch", "FittingBatches", "max_batch_size"]

_SMALL = (8, 16)
"""Sizes through which the first line is drawn, ..."""

_STEP = 3
"""... and so many times what fits for stock is the second size for what recomputes."""

_MOST = 2**24
"""Examples beyond which nothing is looked at: TensorFlow counts with 32 bits in shapes,
where a batch is multiplied by lengths."""

_PARTS = 32
"""The budget's batch is the largest but for one of so many parts of it."""

_STOCK = Budget("100%")

_GUESSES = 8
"""Lines that are drawn at most. Two or three do."""


@dataclass(frozen=True)
class FittingBatch:
    """The largest batch of one strategy.

    Attributes:
        name: "stock", "memory" or "budget".
        batch_size: The largest batch that fits; 0 if not even one example does, and
            2^24 if that many or more do.
        peak_bytes: The simulated peak at that size, in bytes above rest.
        extra_fraction: What is computed twice there, as a fraction of the forward and
            backward work, estimated.
        bytes_per_example: By how much the peak grows with each example.
        fixed_bytes: What it would be without any.
    """

    name: str
    batch_size: int
    peak_bytes: int
    extra_fraction: float
    bytes_per_example: float
    fixed_bytes: float


@dataclass(frozen=True)
class FittingBatches:
    """The largest batches under a budget. `print(batches)` is a table.

    Attributes:
        budget_bytes: What the peak may be, in bytes above rest.
        stock: Of the graph as it is.
        memory: With `checkpoints="memory"`.
        budget: With `checkpoints=` the budget itself: no other strategy fits more. Some
            ops may be recomputed several times; the extra work says what that costs.
    """

    budget_bytes: int
    stock: FittingBatch
    memory: FittingBatch
    budget: FittingBatch

    def __str__(self) -> str:
        size = sizes_like(self.budget_bytes)
        heads = ("strategy", "largest batch", "peak", "an example", "extra work, %")
        rows = [
            (
                row.name,
                f">= {_MOST}" if row.batch_size == _MOST else str(row.batch_size),
                size(row.peak_bytes) if row.batch_size else "-",
                size(round(row.bytes_per_example)),
                percent(row.extra_fraction if row.batch_size else None),
            )
            for row in (self.stock, self.memory, self.budget)
        ]
        return f"In {size(self.budget_bytes)} above rest:\n{columns(heads, rows)}"


@tf.autograph.experimental.do_not_convert
def max_batch_size(
    fn_or_model: Any,
    budget: Any,
    *input_specs: Any,
    unknown_dim: int | None = None,
    cost: Any = None,
) -> FittingBatches:
    """The largest batches that fit into a budget, without training or running anything.

    What fits is told by the simulated peaks, to the byte: no headroom is left. An
    allocator hands out chunks that are larger than what was asked for, mostly by a few
    percent (by up to a sixth where ops run several times), and keeps what it had for
    other things. So where the budget is all that a device has, ask for a fifth less.

    Args:
        fn_or_model: As in `plan`.
        budget: What the peak may be above rest, such as `"4GiB"` or a number of bytes,
            or a `Budget`, `Budget(total="8GiB")`, say. A share is none.
        input_specs: As in `plan`: where the first dimension is None, the size of the
            batch goes.
        unknown_dim: As in `plan`.
        cost: As in `plan`. They decide what is kept and how much work is extra, and
            are taken as they are for every size: what counts is how ops compare.

    Returns:
        The largest batch of stock, of `"memory"` and of the budget as `checkpoints=`.
        Under a budget some ops are recomputed several times where that lets more fit,
        and its batch is the largest that `plan` keeps to it to within 4 %.
        Batches of more than 2^24 examples are not looked at.

    Raises:
        CheckpointError: `budget` is none.
        CostError: `cost` holds no measured times.
        MemorySavingGradientsError, TypeError: As in `plan`; or no input has an open
            first dimension, or TensorFlow cannot build batches of a size that fits.

    Example:
        >>> import keras
        >>> import memory_saving_gradients as msg
        >>> model = keras.Sequential([keras.Input([64])])
        >>> for _ in range(9):
        ...     model.add(keras.layers.Dense(64, "gelu"))
        >>> model.compile("adam", "mse")
        >>> print(msg.max_batch_size(model, "100MiB"))
    """
    where = "max_batch_size"
    subject = Subject.of(fn_or_model, input_specs, unknown_dim, cost, where)
    limit = _limit(budget)
    if not subject.has_open_batch:
        raise MemorySavingGradientsError(
            "`memory_saving_gradients.max_batch_size`: no input says where the size of "
            "the batch goes. Give specs with None as the first dimension, such as "
            '`tf.TensorSpec([None, 64], "float32")`.'
        )
    studies = _Studies(subject)
    first = studies.at(_SMALL[0]).stock
    allowed = allowance(limit, first.stock_peak_bytes, first.reading).bytes
    exactly = Budget(allowed, consumed=limit.consumed)
    stock = studies.row("stock", _of_stock, _STOCK, exactly, _SMALL)
    fits = stock.batch_size
    sizes = (fits, _STEP * fits) if fits else _SMALL
    if sizes[1] > _MOST:
        sizes = (fits // _STEP, fits)
    return FittingBatches(
        allowed,
        stock,
        studies.row("memory", _of_memory, Auto("memory"), exactly, sizes),
        studies.row("budget", _lowest, exactly, exactly, sizes),
    )


def _limit(budget: Any) -> Budget:
    """The budget as an object.

    Raises:
        CheckpointError: It is none, or a share of what grows with the batch.
    """
    limit = budget if isinstance(budget, Budget) else Budget(budget)
    if limit.is_share:
        raise CheckpointError(
            "`memory_saving_gradients.max_batch_size`: stock's peak grows with the "
            f"batch, so that {limit} is no limit. Give bytes, such as "
            '"4GiB", or `Budget(total="8GiB")`.'
        )
    return limit


def _of_stock(trials: Trials, limit: Budget) -> int:
    return trials.stock.as_asked(limit).stock_peak_bytes


def _of_memory(trials: Trials, limit: Budget) -> int:
    return _peak(trials.plan(Auto("memory")), limit)


def _lowest(trials: Trials, limit: Budget) -> int:
    """The lowest peak that the planners of budgets reach."""
    problems = [study.as_asked(limit).problem for study in trials.studies()]
    once = [explored(problem, (1,)).least_bytes for problem in problems]
    often = [plan_nested(problem, 1).peak_bytes for problem in problems]
    return min(least for least in (*once, *often) if least is not None)


def _peak(plan: Plan, limit: Budget) -> int:
    """The peak of a plan, of whom the budget is for."""
    if limit.consumed:
        return plan.predicted_peak_if_consumed_bytes
    return plan.predicted_peak_bytes


class _Studies:
    """The gradient at sizes of a batch, each traced once."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._known: dict[int, Trials] = {}

    def at(self, batch_size: int) -> Trials:
        """The gradient for batches of this size."""
        if batch_size not in self._known:
            self._known[batch_size] = self._traced(batch_size)
        return self._known[batch_size]

    def _traced(self, batch_size: int) -> Trials:
        """The same, newly traced.

        Raises:
            MemorySavingGradientsError: Some shape is more than TensorFlow can count,
                though smaller batches were built.
        """
        trials = self._subject.trials(batch_size)
        try:
            trials.studies()
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            if not self._known or isinstance(error, MemorySavingGradientsError):
                raise
            raise MemorySavingGradientsError(
                "`memory_saving_gradients.max_batch_size`: a batch of "
                f"{batch_size} examples might fit into the budget, but TensorFlow "
                f"cannot build one ({error}). Give a smaller budget."
            ) from error
        return trials

    def row(
        self,
        name: str,
        peak_of: Callable[[Trials, Budget], int],
        keep: Checkpoints,
        limit: Budget,
        sizes: tuple[int, int],
    ) -> FittingBatch:
        """The largest batch of a strategy, and its plan."""
        allowed = limit.allowed(0)
        found = _largest(lambda size: peak_of(self.at(size), limit), allowed, sizes)
        if found.fits == 0:
            return FittingBatch(name, 0, 0, 0.0, found.slope, found.start)
        fits = found.fits if keep is not limit else self._beyond(found.fits, limit)
        plan = self.at(fits).plan(keep, quietly=True)
        peak, extra = _peak(plan, limit), plan.extra_fraction
        return FittingBatch(name, fits, peak, extra, found.slope, found.start)

    def _beyond(self, fits: int, limit: Budget) -> int:
        """The largest batch that plans keep to the budget, from one that is known."""
        step = width = max(fits // _PARTS, 1)
        while self._keeps_to(limit, fits + width):
            fits, width = fits + width, 2 * width
        while width > step:
            width //= 2
            if self._keeps_to(limit, fits + width):
                fits += width
        return fits

    def _keeps_to(self, limit: Budget, batch_size: int) -> bool:
        """Whether a plan for batches of this size keeps to the budget."""
        if batch_size > _MOST:
            return False
        try:
            self.at(batch_size).plan(limit, quietly=True)
        except BudgetError:
            return False
        return True


@dataclass(frozen=True)
class _Line:
    """The largest batch that is known to fit, and the last line that was drawn."""

    fits: int
    slope: float
    start: float


def _largest(
    peak_at: Callable[[int], int], allowed: int, sizes: tuple[int, int]
) -> _Line:
    """Steps 1 and 2 of the module's outline."""
    peaks = {size: peak_at(size) for size in sizes}
    for _ in range(_GUESSES):
        fitting = sorted(size for size, peak in peaks.items() if peak <= allowed)
        others = sorted(set(peaks) - set(fitting))
        low = fitting[-1] if fitting else 0
        one, other = _next_to_the_answer(fitting, others)
        slope = (peaks[other] - peaks[one]) / (other - one)
        start = peaks[other] - slope * other
        if slope > 0:
            guess = max(int((allowed - start) / slope), low)
        else:  # Gradients of weights are all that counts so far.
            guess = _STEP * max(peaks) if fitting else low
        guess = min(guess, _MOST)
        if others:
            guess = min(guess, others[0] - 1)
        if guess == low:
            break
        peaks[guess] = peak_at(guess)
    fits = max((size for size, peak in peaks.items() if peak <= allowed), default=0)
    return _Line(fits, slope, start)


def _next_to_the_answer(fitting: list[int], others: list[int]) -> tuple[int, int]:
    """Two of the known sizes: those on both sides of it where there are both."""
    if fitting and others:
        return fitting[-1], others[0]
    one, other = fitting[-2:] or others[:2]
    return one, other
