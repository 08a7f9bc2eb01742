"""How deep a network fits into the memory that stock needs for a shallow one.

1. The budget is the measured peak of stock's step.
2. Depths are tried as plans, which run nothing. Between two depths the peak is taken to
   follow a + b sqrt(n) (Chen et al. 2016, arXiv 1604.06174), so that a few plans do.
3. The one found is run. If it needs more than its plan said, the search goes on with
   the plans corrected by the measured ratio.
4. Where stock fits the machine at that depth, it is timed there, too: its time for a
   layer is not the same at every depth.
5. If there is room for a network ten times as deep, that one is planned with all of the
   memory as its budget, so that what `memory` leaves over is given for time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from depths import (
    Family,
    Network,
    Row,
    Say,
    fits,
    predicted_bytes,
    ratio_of,
    step_peak_bytes,
)
from measuring import Built, build_step
from memory_saving_gradients import Budget, BudgetError
from models import Workload
from tables import counted, mebibytes

__all__ = ["deepest", "deepest_rows", "find_deepest", "times_as_deep"]

BUDGET = "budget"
"""How the tables call the mode of step 5."""

_MOST_BUDGETS = 3
"""How often step 5 plans anew, with less, because the run took more."""


def deepest(
    peak_of: Callable[[int], float],
    budget_bytes: float,
    known: Mapping[int, float],
    tolerance: float = 0.03,
    most_tries: int = 4,
) -> int:
    """The largest size whose peak is within a budget, to within a tolerance.

    Args:
        peak_of: The (predicted) peak of a size in bytes, growing with it.
        budget_bytes: What the peak may be.
        known: Peaks by size where they are known already; one of them must fit.
        tolerance: The search ends when at most that fraction of the budget is left.
        most_tries: Calls of `peak_of` at most.

    Returns:
        The largest size that is known, or was found, to fit.
    """
    peaks = dict(known)
    for _ in range(most_tries):
        best = max(n for n, peak in peaks.items() if peak <= budget_bytes)
        if peaks[best] >= (1 - tolerance) * budget_bytes:
            break
        guess = _guess(peaks, best, budget_bytes * (1 - tolerance / 3))
        if guess in peaks:
            break
        peaks[guess] = peak_of(guess)
    return max(n for n, peak in peaks.items() if peak <= budget_bytes)


def _guess(peaks: Mapping[int, float], best: int, budget_bytes: float) -> int:
    """Where a + b sqrt(n) meets the budget, through the two sizes nearest to it.

    Interpolated and not fitted: a search that has to close in must not be drawn away by
    sizes far from where it is.
    """
    larger = [n for n in peaks if n > best]
    smaller = [n for n in peaks if n < best]
    if larger:
        other = min(larger)
    elif smaller:
        other = max(smaller)
    else:  # one point: a law without a constant
        return max(best + 1, int(best * (budget_bytes / peaks[best]) ** 2))
    slope = (peaks[other] - peaks[best]) / (other**0.5 - best**0.5)
    if slope <= 0:
        return 2 * best if not larger else (best + other) // 2
    guess = int((best**0.5 + (budget_bytes - peaks[best]) / slope) ** 2)
    return min(max(guess, best + 1), other - 1) if larger else max(guess, best + 1)


def find_deepest(
    family: Family, mode: str, budget_bytes: int, known: Mapping[int, float], say: Say
) -> Network:
    """The deepest network that takes its steps in so much memory.

    Args:
        family: Which networks.
        mode: Of `gradients()`.
        budget_bytes: The measured peak of stock's step on a small network.
        known: Measured peaks of that mode by size; one of them must fit.
        say: Takes a line of progress.

    Returns:
        The network with `mode` and, if the machine has the memory, with stock.
    """
    say(f"{family.name}: the deepest in {_mib(budget_bytes)}")
    found, peak = _deepest_that_runs(family, mode, budget_bytes, known, say)
    modes = {mode: (found, peak)}
    if fits(predicted_bytes(found.step, stock=True)):
        depth = counted(family.layers(found.size), "layer")
        say(f"{family.name}, {depth}: stock, to compare")
        rival = replace(found, step=build_step(found.workload, "stock"))
        modes = {"stock": (rival, rival.peak_bytes())} | modes
    rows: dict[str, Row] = {}
    for name, (candidate, needed) in modes.items():
        layers = family.layers(candidate.size)
        rows[name] = {"family": family.name, "layers": layers, "mode": name}
        rows[name]["peak_bytes"] = needed
    return Network(rows, {name: built.call for name, (built, _) in modes.items()})


def times_as_deep(
    family: Family, times: int, small: int, budget_bytes: int, say: Say
) -> Network:
    """A network so many times as deep as a small one, with a budget (step 5).

    Args:
        family: Which networks.
        times: How many times as deep, at least.
        small: The size of the small one.
        budget_bytes: What its step may take.
        say: Takes a line of progress.

    Returns:
        The network with `BUDGET`; it is left out if no plan keeps to the memory.
    """
    wanted = times * family.layers(small)
    size = next(n for n in itertools.count(small) if family.layers(n) >= wanted)
    workload = family.make(size)
    allowed = budget_bytes
    for _ in range(_MOST_BUDGETS):
        budget = Budget(bytes=allowed, consumed=True)  # SGD applies each at once
        try:
            step = build_step(workload, budget)
        except BudgetError as error:
            say(f"{family.name}, {counted(wanted, 'layer')}: {error}")
            break
        candidate = _Candidate(size, workload, step)
        peak = candidate.peak_bytes()
        depth = counted(family.layers(size), "layer")
        work = 100 * step.plan.extra_fraction
        say(f"{depth} with a budget, run: {_mib(peak)}, {work:.0f} % more work")
        if peak <= budget_bytes:
            row: Row = {"family": family.name, "layers": family.layers(size)}
            row |= {"mode": BUDGET, "peak_bytes": peak}
            return Network({BUDGET: row}, {BUDGET: candidate.call})
        allowed = int(allowed * budget_bytes / peak)
    return Network({}, {})


def deepest_rows(small: Network, *others: Network) -> list[Row]:
    """Rows of all, once they have their times: small stock, deep, deep stock, budget.

    `deeper` is the ratio of layers to the first row, `layer_time_of_stock` that of the
    seconds for each layer.
    """
    first = dict(small.rows["stock"])
    rows = [first]
    for network in others:
        rows += reversed(network.rows.values())
    for row in rows:
        row["deeper"] = row["layers"] / first["layers"]
        row["seconds_per_layer"] = row["seconds"] / row["layers"]
        row["layer_time_of_stock"] = ratio_of(row, first) / row["deeper"]
    return rows


@dataclass(frozen=True)
class _Candidate:
    """A network of some size, built but not run."""

    size: int
    workload: Workload
    step: Built

    @classmethod
    def built(cls, family: Family, size: int, mode: str) -> _Candidate:
        workload = family.make(size)
        return cls(size, workload, build_step(workload, mode))

    def call(self) -> Any:
        return self.step.call(*self.workload.batch)

    def peak_bytes(self) -> int:
        return step_peak_bytes(self.step, self.workload)


def _deepest_that_runs(
    family: Family, mode: str, budget: int, known: Mapping[int, float], say: Say
) -> tuple[_Candidate, int]:
    """Steps 2 and 3 of the module's outline: the network and its measured peak."""
    built: dict[int, _Candidate] = {}

    def build(size: int) -> _Candidate:
        if size not in built:
            started = time.monotonic()
            built[size] = _Candidate.built(family, size, mode)
            took = time.monotonic() - started
            predicted = predicted_bytes(built[size].step)
            depth = counted(family.layers(size), "layer")
            work = 100 * built[size].step.plan.extra_fraction
            say(
                f"plan for {depth}: {_mib(predicted)}, {work:.0f} % more work "
                f"({took:.0f} s to build)"
            )
        return built[size]

    measured = dict(known)
    correction = 1.0
    while True:

        def peak_of(size: int, factor: float = correction) -> float:
            return factor * predicted_bytes(build(size).step)

        candidate = build(deepest(peak_of, budget, measured))
        peak = candidate.peak_bytes()
        layers = counted(family.layers(candidate.size), "layer")
        say(f"{layers}, run: {_mib(peak)}")
        # A size that is known to fit is returned in the end: the loop is finite.
        if peak <= budget or candidate.size in measured:
            return candidate, peak
        measured[candidate.size] = peak
        correction = peak / predicted_bytes(candidate.step)


def _mib(count: float) -> str:
    return f"{mebibytes(count)} MiB"


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: compare_depths.py imports it.")
