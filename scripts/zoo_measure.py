"""Measures one architecture of `zoo.py`: gradients and peaks, stock's and ours."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memory_saving_gradients as msg
from measuring import Spread, peak_bytes, without_meta_optimizer
from zoo_models import Specimen, architectures

__all__ = ["examine", "specimen"]

Arrays = Sequence[np.ndarray | None]
ROUNDING = (1e-4, 1e-7)
"""What rounding may differ by: so much of the largest entry of a variable's gradient,
plus so much of the largest of all."""
SPREADS = 4
"""Or by so many times what stock differs by from itself."""
ABOVE = 1.02
"""A peak counts as above stock's if the median of ours is so many times the worst of
stock's: the very same graph varies by some percent from run to run."""
ON_DISK = 2**20
"""Gradients of so many bytes wait in files to be compared."""


def specimen(name: str, scale: float = 1.0) -> Specimen:
    """One architecture with the same weights in every process.

    Args:
        name: One of `architectures()`.
        scale: Of the size of the batch.
    """
    build = architectures()[name]
    keras.utils.set_random_seed(0)
    batch = inspect.signature(build).parameters["batch"].default
    return build(batch=max(1, round(batch * scale)))


class _Step:
    """Gradients in one `tf.function`, each written to a variable of its own.

    So each is consumed at once, as an optimizer does, and the peak is not filled with
    gradients of weights; and every bit of it can be read afterwards.
    """

    def __init__(
        self, subject: Specimen, slots: Sequence[tf.Variable], tape_class: Any
    ) -> None:
        self._subject, self._slots = subject, slots
        self._state = [v.numpy() for v in subject.state]
        self._connected: list[bool] = []

        @tf.function(autograph=False)
        def step(*batch: tf.Tensor) -> None:
            gradients = subject.gradients(tape_class, *batch)
            self._connected = [g is not None for g in gradients]
            for slot, gradient in zip(slots, gradients, strict=True):
                if gradient is not None:
                    slot.assign(tf.convert_to_tensor(gradient))

        self._call = step.get_concrete_function(*subject.batch)

    def __call__(self) -> None:
        """One step, after the state has been put back."""
        for variable, value in zip(self._subject.state, self._state, strict=True):
            variable.assign(value)
        self._call(*self._subject.batch)

    def gradients(self) -> Arrays:
        """The gradients of one step, None where there is none."""
        self()
        return [
            _on_disk(slot.numpy()) if connected else None
            for slot, connected in zip(self._slots, self._connected, strict=True)
        ]


def _on_disk(array: np.ndarray) -> np.ndarray:
    """An array in a file that is gone with it, if it is large.

    Six sets of gradients are compared. Those of the largest networks would not fit into
    the memory of a small machine beside each other.
    """
    if array.nbytes < ON_DISK:
        return array
    with tempfile.TemporaryFile() as file:
        kept = np.memmap(file, array.dtype, "w+", shape=array.shape)
    kept[...] = array
    return kept


def _noting(checkpoints: str, plans: list[msg.Plan]) -> Callable[[], Any]:
    """A tape that leaves its plan in a list."""

    class Noting(msg.GradientTape):
        def gradient(self, *args: Any, **kwargs: Any) -> Any:
            result = super().gradient(*args, **kwargs)
            plans.extend([self.plan] if self.plan is not None else [])
            return result

    return lambda: Noting(checkpoints=checkpoints)


def examine(
    subject: Specimen,
    checkpoints: str,
    runs: int = 5,
    measure: Callable[[Callable[[], Any], int], Spread] = peak_bytes,
) -> dict[str, Any]:
    """The figures of one architecture.

    Args:
        subject: The architecture.
        checkpoints: "memory" or "speed".
        runs: Of which the worst peak counts.
        measure: Measures them: by the allocator's count, or by what was asked for
            (`requested_bytes`), which does not depend on what the process did before.
    """
    plans: list[msg.Plan] = []
    slots = [tf.Variable(tf.zeros_like(v), trainable=False) for v in subject.variables]
    stock = _Step(subject, slots, tf.GradientTape)
    new = _Step(subject, slots, _noting(checkpoints, plans))
    reference, again, ours = stock.gradients(), stock.gradients(), new.gradients()
    peaks = [measure(step, runs) for step in (stock, new)]
    with without_meta_optimizer():
        plain = stock.gradients()
        exact = _compare(plain, [stock.gradients()], new.gradients())
    found = _compare(reference, [again, plain], ours)
    row = {
        "variables_bytes": sum(v.dtype.size * v.shape.num_elements() for v in slots),
        "stock_peak_bytes": asdict(peaks[0]),
        "peak_bytes": asdict(peaks[1]),
        "peak_of_stock": peaks[1].most / max(peaks[0].most, 1),
        **_planned(plans),
        **found,
        "exact": exact,
    }
    return row | {"wrong": list(_wrong(row))}


def _planned(plans: Sequence[msg.Plan]) -> dict[str, Any]:
    """What was planned; of several plans the peak of the greatest counts."""
    if not plans:
        return {"plans": 0, "planned_of_stock": 1.0, "extra_fraction": 0.0}
    stock = max(plan.stock_peak_if_consumed_bytes for plan in plans)
    peak = max(plan.predicted_peak_if_consumed_bytes for plan in plans)
    work = sum(plan.stock.seconds for plan in plans)
    return {
        "plans": len(plans),
        "planned_of_stock": peak / stock,
        "extra_fraction": sum(plan.extra_seconds for plan in plans) / work,
        "recomputed": sum(len(plan.recomputed) for plan in plans),
        "ops": sum(len(plan.reading.graph.ops) for plan in plans),
        "reason": next((plan.reason for plan in plans if plan.reason), ""),
    }


def _compare(stock: Arrays, others: Sequence[Arrays], new: Arrays) -> dict[str, Any]:
    """Differences between gradients, each on the scale of its variable's largest entry.

    Args:
        stock: Gradients by stock.
        others: The same by stock in other ways, which say what rounding does.
        new: The same by the library.

    Returns:
        `difference` of the library from stock and `own_difference` of stock from
        itself (a gradient that is zero but for rounding is judged on a thousandth of
        the largest of all), `of_bound` (the largest difference over what rounding may
        do: 1 is the most), `worst` (the number of that variable), and `equal_bits`.
    """
    largest = max(
        (float(np.abs(a).max(initial=0)) for a in stock if a is not None), default=0.0
    )
    difference = own_difference = of_bound = 0.0
    worst = None
    for number, (a, c, *again) in enumerate(zip(stock, new, *others, strict=True)):
        if a is None or c is None:
            if (a is None) != (c is None):
                of_bound, worst = float("inf"), number
            continue
        own = float(np.abs(a).max(initial=0))
        spread = max(float(np.abs(a - b).max(initial=0)) for b in again)
        distance = float(np.abs(a - c).max(initial=0))
        distance = distance if np.isfinite(distance) else float("inf")
        scale = own + 1e-3 * largest or 1.0
        difference = max(difference, distance / scale)
        own_difference = max(own_difference, spread / scale)
        allowed = max(ROUNDING[0] * own + ROUNDING[1] * largest, SPREADS * spread)
        if distance > of_bound * allowed:
            of_bound, worst = distance / allowed if allowed else float("inf"), number
    equal = all(_same_bits(a, c) for a, c in zip(stock, new, strict=True))
    return {
        "difference": difference,
        "own_difference": own_difference,
        "of_bound": of_bound,
        "worst": worst,
        "equal_bits": equal,
    }


def _same_bits(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _wrong(row: dict[str, Any]) -> Iterator[str]:
    """What must not be."""
    if not row["plans"]:
        yield "nothing passed the library"
    exact = row["exact"]
    if not exact["equal_bits"] and exact["of_bound"] > 1:
        yield f"gradients differ by {exact['difference']:.1e}"
    peak, stock = row["peak_bytes"]["median"], row["stock_peak_bytes"]["most"]
    if peak > ABOVE * stock:
        yield f"the peak is {peak / max(stock, 1):.3f} of stock's"


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: zoo.py imports it.")
