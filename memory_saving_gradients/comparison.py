"""`compare`: what each strategy would save and cost on somebody's own model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from memory_saving_gradients.budget import Budget
from memory_saving_gradients.dry_run import Subject
from memory_saving_gradients.errors import BudgetError, CheckpointError
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.baselines import chen, uniform
from memory_saving_gradients.study import Study
from memory_saving_gradients.sweep import Sweep
from memory_saving_gradients.trials import Trials
from memory_saving_gradients.wording import columns, percent, sizes_like

__all__ = ["Compared", "Comparison", "compare"]

_TRIED = 64
"""So many sizes of segments are tried of the literature's strategies."""


@dataclass(frozen=True)
class Compared:
    """One strategy.

    Attributes:
        name: What it is called.
        peak_bytes: Its simulated peak, in bytes above rest: activations and all
            gradients. None if it has no plan.
        peak_fraction: That as a fraction of stock's.
        saved_fraction: By what fraction the peak of the activations falls: gradients
            that are finished and only wait for the caller are not counted.
        extra_fraction: What is computed twice, as a fraction of the forward and
            backward work, estimated.
        note: Why it has no plan, or leaves the graph as it is; or "".
    """

    name: str
    peak_bytes: int | None
    peak_fraction: float | None
    saved_fraction: float | None
    extra_fraction: float | None
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """Strategies side by side. `print(comparison)` is a table.

    Attributes:
        rows: One for each strategy; the first is stock.
    """

    rows: tuple[Compared, ...]

    def __getitem__(self, name: str) -> Compared:
        """The row of a strategy by its name."""
        found = {row.name: row for row in self.rows}
        if name not in found:
            raise KeyError(f"{name!r} is none of {', '.join(found)}")
        return found[name]

    def __str__(self) -> str:
        stock = self.rows[0].peak_bytes
        assert stock is not None
        size = sizes_like(stock)
        heads = ("strategy", "peak", "of stock, %", "saved, %", "extra work, %")
        lines = [
            (
                row.name,
                "-" if row.peak_bytes is None else size(row.peak_bytes),
                percent(row.peak_fraction),
                percent(row.saved_fraction),
                percent(row.extra_fraction),
            )
            for row in self.rows
        ]
        notes = [f"{row.name}: {row.note}" for row in self.rows if row.note]
        return "\n".join(
            [
                columns(heads, lines),
                "peak: activations and all gradients; saved: of the activations' peak, "
                "without",
                "finished gradients; extra work: of forward + backward, estimated.",
                *notes,
            ]
        )


@tf.autograph.experimental.do_not_convert
def compare(
    fn_or_model: Any,
    *input_specs: Any,
    budgets: Iterable[Any] = ("70%", "50%", "30%"),
    batch_size: int | None = None,
    unknown_dim: int | None = None,
    cost: Any = None,
) -> Comparison:
    """Sets the strategies side by side on a model, without training or running it.

    Compared are stock; equal segments and the greedy ones of Chen et al., each with the
    size of segments that makes its peak lowest; `"speed"`, `"memory"` and budgets. All
    are judged by the same simulator. What `"speed"`, `"memory"` and budgets save inside
    loops, branches and called functions is in the figures; segments are of the graph
    around these.

    Args:
        fn_or_model: As in `plan`.
        input_specs: As in `plan`.
        budgets: Budgets as `checkpoints` takes them; a number is one of bytes.
        batch_size: As in `plan`.
        unknown_dim: As in `plan`.
        cost: As in `plan`.

    Returns:
        The comparison; print it.

    Raises:
        CheckpointError: A budget is none.
        CostError: `cost` holds no measured times.
        MemorySavingGradientsError, TypeError: As in `plan`.

    Example:
        >>> import keras
        >>> import memory_saving_gradients as msg
        >>> model = keras.Sequential([keras.Input([64])])
        >>> for _ in range(9):
        ...     model.add(keras.layers.Dense(64, "gelu"))
        >>> model.compile("adam", "mse")
        >>> print(msg.compare(model, batch_size=1024))

    References:
        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv
        1604.06174.
    """
    subject = Subject.of(fn_or_model, input_specs, unknown_dim, cost, "compare")
    budgets = (budgets,) if isinstance(budgets, str | Budget) else budgets
    strategies = ("speed", "memory", *map(_budget, budgets))
    wanted = [(str(one), subject.asked_for(one)[0].checkpoints) for one in strategies]
    trials = subject.trials(batch_size)
    study = trials.stock
    problem = study.problem
    counts = np.geomspace(1, max(len(problem.useful), 1), _TRIED)
    equal = uniform(problem, np.unique(counts.astype(int)).tolist())
    rows = [
        _row("stock", study, problem.everything),
        _row("uniform segments", study, _lowest(problem, equal)),
        _row("Chen's √n", study, _lowest(problem, chen(problem, _TRIED))),
    ]
    rows.extend(_planned(name, trials, checkpoints) for name, checkpoints in wanted)
    return Comparison(tuple(rows))


def _budget(one: Any) -> Any:
    """One of `budgets`, if it is a budget."""
    if isinstance(one, Budget):
        return one
    try:
        Budget(one)
    except CheckpointError as error:
        raise CheckpointError(
            f"`memory_saving_gradients.compare`: {one!r} among `budgets` is none: "
            f"{str(error).partition(': ')[2]}"
        ) from None
    return one if isinstance(one, str) else Budget(one)


def _lowest(problem: Problem, selections: Iterable[frozenset[int]]) -> frozenset[int]:
    """The selection of the lowest peak, stock's if there is none below."""
    best, found = problem.stock_peak_bytes, problem.everything
    for kept in dict.fromkeys(problem.always_kept | kept for kept in selections):
        peak = Sweep(problem.buffers, kept).peak_bytes
        if peak < best:
            best, found = peak, kept
    return found


def _row(name: str, study: Study, kept: frozenset[int]) -> Compared:
    """What the simulator says of a selection."""
    buffers = study.problem.buffers
    sweep = Sweep(buffers, kept)
    stock = Sweep(buffers, study.problem.everything)
    return Compared(
        name,
        sweep.peak_bytes,
        _over(sweep.peak_bytes, study.problem.stock_peak_bytes),
        1 - _over(sweep.peak_if_consumed, stock.peak_if_consumed),
        _over(sweep.extra_seconds, buffers.graph.seconds),
    )


def _planned(name: str, trials: Trials, checkpoints: Any) -> Compared:
    """What the library would do."""
    try:
        plan = trials.plan(checkpoints)
    except BudgetError as error:
        return Compared(name, None, None, None, None, str(error))
    stock = plan.stock_peak_if_consumed_bytes
    return Compared(
        name,
        plan.predicted_peak_bytes,
        _over(plan.predicted_peak_bytes, plan.stock_peak_bytes),
        1 - _over(plan.predicted_peak_if_consumed_bytes, stock),
        plan.extra_fraction,
        plan.reason if plan.is_stock else "",
    )


def _over(one: float, other: float) -> float:
    """A ratio; 1 if nothing is compared with nothing."""
    return one / other if other else float(one == 0)
