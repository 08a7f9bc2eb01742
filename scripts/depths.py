"""How peak memory and step time grow with the number of layers, and how deep one gets.

1. `measure_depth`: one network in several modes. The rewritten ones are built first:
   each plan also simulates stock, so that what would not fit is never run.
2. `fit_trend`: a least-squares line in the number of layers, or in its square root.
3. `deepest`: the deepest network that needs at most so many bytes. Depths are tried as
   plans, which run nothing. Between two of them the peak is taken to follow
   a + b sqrt(n) (Chen et al. 2016, arXiv 1604.06174), so that few plans are needed. The
   one found is run; if it needs more than its plan said, the search goes on with the
   plans corrected by the measured ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from measuring import Built, build_step, peak_bytes, seconds_in_turn
from models import Workload
from prediction import UNSEEN_BYTES, simulated_levels

__all__ = [
    "Family",
    "Row",
    "Trend",
    "available_bytes",
    "compare_deepest",
    "deepest",
    "fit_trend",
    "measure_depth",
]

Row = dict[str, Any]
Say = Callable[[str], None]

USABLE_FRACTION = 0.7
"""Of the free memory: the rest is for the graphs, the trace and the allocator."""


@dataclass(frozen=True)
class Family:
    """Networks that differ in depth alone.

    Attributes:
        name: What they are, for tables and pictures.
        make: Takes a size (blocks, layers, length), returns the workload.
        layers: Takes a size, returns the number of layers.
        sizes: Those that are measured, ascending.
    """

    name: str
    make: Callable[[int], Workload]
    layers: Callable[[int], int]
    sizes: tuple[int, ...]


def available_bytes() -> int:
    """The memory that a process may still take, in bytes."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        import os

        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


# ---- one depth


def measure_depth(
    family: Family, size: int, modes: Sequence[str], rounds: int, say: Say
) -> list[Row]:
    """Rows of one network: peak and step time in each mode that fits in memory.

    Args:
        family: Which networks.
        size: Which of them.
        modes: "stock" first, then modes of `gradients()`.
        rounds: Steps of each that are timed, in turn.
        say: Takes a line of progress.
    """
    layers = family.layers(size)
    workload = family.make(size)
    rows: dict[str, Row] = {}
    steps: dict[str, Built] = {}
    stock_bytes = None
    for mode in (*modes[1:], "stock"):
        say(f"{family.name}, {layers} layers: {mode}")
        row: Row = {"family": family.name, "layers": layers, "mode": mode}
        rows[mode] = row
        if stock_bytes is None or _fits(stock_bytes):
            built = build_step(workload, mode)
            predicted = stock_bytes
            if built.plan is not None:
                predicted = _predicted(built)
                stock_bytes = _predicted(built, stock=True)
            row["predicted_bytes"] = predicted
            row["building_seconds"] = built.building_seconds
            if predicted is None or _fits(predicted):
                steps[mode] = built
                row["peak_bytes"] = _peak(built, workload)
                continue
        row["predicted_bytes"] = row.get("predicted_bytes", stock_bytes)
        say(f"{family.name}, {layers} layers: {mode} does not fit in memory, left out")
    _add_times(rows, steps, workload, rounds)
    return [rows[mode] for mode in modes]


def _fits(needed_bytes: int) -> bool:
    return needed_bytes <= USABLE_FRACTION * available_bytes()


def _predicted(built: Built, stock: bool = False) -> int:
    """The simulated peak of a step, which does not hold the gradients to its end.

    What the allocator's statistics do not see is left out, as it is measured without.
    """
    levels = simulated_levels(
        built.plan, least_bytes=UNSEEN_BYTES, holds_gradients=False, stock=stock
    )
    return int(levels.max())


def _peak(built: Built, workload: Workload, runs: int = 2) -> int:
    return int(peak_bytes(partial(built.call, *workload.batch), runs).most)


def _add_times(
    rows: dict[str, Row], steps: dict[str, Built], workload: Workload, rounds: int
) -> None:
    """Seconds of each mode, and ratios to stock."""
    calls = {m: partial(built.call, *workload.batch) for m, built in steps.items()}
    times = seconds_in_turn(calls, rounds)
    for mode, taken in times.items():
        # The least: whatever else the machine does only adds to it.
        rows[mode]["seconds"] = min(taken)
        if "stock" in times:
            pairs = zip(taken, times["stock"], strict=True)
            rows[mode]["time_of_stock"] = statistics.median(a / b for a, b in pairs)
            stock_bytes = rows["stock"]["peak_bytes"]
            rows[mode]["peak_of_stock"] = rows[mode]["peak_bytes"] / stock_bytes


# ---- trends


@dataclass(frozen=True)
class Trend:
    """constant + slope * layers ** power, fitted.

    Attributes:
        constant: At no layers.
        slope: For each unit of layers ** power.
        power: 1, or 1/2 for the square root.
        worst: The largest relative distance of a point from it.
    """

    constant: float
    slope: float
    power: float
    worst: float

    def __call__(self, layers: Any) -> Any:
        return self.constant + self.slope * np.asarray(layers, float) ** self.power


def fit_trend(layers: Sequence[int], values: Sequence[float], power: float) -> Trend:
    """The line through the points that is nearest by relative squares.

    Args:
        layers: At least one; with a single one the constant is 0.
        values: One for each of them, positive.
        power: See `Trend`.
    """
    x, y = np.asarray(layers, float) ** power, np.asarray(values, float)
    if len(set(layers)) > 1:
        weighted = np.stack([1 / y, x / y], axis=1)
        constant, slope = np.linalg.lstsq(weighted, np.ones_like(y), rcond=None)[0]
    else:
        constant, slope = 0.0, float(y.mean() / x[0])
    worst = float(np.abs((constant + slope * x) / y - 1).max())
    return Trend(float(constant), float(slope), power, worst)


# ---- as deep as possible


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
    """Where a + b sqrt(n) meets the budget, through the two sizes nearest to it."""
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


def compare_deepest(
    family: Family,
    size: int,
    mode: str,
    known: Mapping[int, float],
    rounds: int,
    say: Say,
) -> list[Row]:
    """Stock at a size, and the deepest network of `mode` in the same memory.

    Args:
        family: Which networks.
        size: What stock gets.
        mode: Of `gradients()`.
        known: Measured peaks of that mode by size.
        rounds: Steps of each that are timed, in turn.
        say: Takes a line of progress.

    Returns:
        Two rows, with the seconds for each layer of both; the second has `deeper` (the
        ratio of layers) and `time_of_stock` (the ratio of seconds for each layer).
    """
    stock = _Candidate.built(family, size, "stock")
    budget = stock.peak_bytes()
    say(f"{family.name}, {family.layers(size)} layers: stock needs {_mib(budget)}")
    found, peak = _deepest_that_runs(family, mode, budget, known, say)
    calls = {"stock": stock.call, mode: found.call}
    times = seconds_in_turn(calls, rounds)
    rows: list[Row] = []
    for name, candidate, needed in (("stock", stock, budget), (mode, found, peak)):
        layers = family.layers(candidate.size)
        seconds = min(times[name])
        row = {"family": family.name, "layers": layers, "mode": name}
        row |= {"peak_bytes": needed, "seconds": seconds}
        rows.append(row | {"seconds_per_layer": seconds / layers})
    deeper = rows[1]["layers"] / rows[0]["layers"]
    ratio = statistics.median(
        deep / shallow for shallow, deep in zip(*times.values(), strict=True)
    )
    rows[1] |= {"deeper": deeper, "time_of_stock": ratio / deeper}
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
        return _peak(self.step, self.workload)


def _deepest_that_runs(
    family: Family, mode: str, budget: int, known: Mapping[int, float], say: Say
) -> tuple[_Candidate, int]:
    """Step 3 of the module's outline; returns the network and its measured peak."""
    built: dict[int, _Candidate] = {}

    def build(size: int) -> _Candidate:
        if size not in built:
            started = time.monotonic()
            built[size] = _Candidate.built(family, size, mode)
            took = time.monotonic() - started
            predicted = _predicted(built[size].step)
            layers = family.layers(size)
            say(f"plan for {layers} layers: {_mib(predicted)} ({took:.0f} s to build)")
        return built[size]

    measured = dict(known)
    correction = 1.0
    while True:

        def peak_of(size: int, factor: float = correction) -> float:
            return factor * _predicted(build(size).step)

        candidate = build(deepest(peak_of, budget, measured))
        peak = candidate.peak_bytes()
        say(f"{family.layers(candidate.size)} layers, run: {_mib(peak)}")
        # A size that is known to fit is returned in the end: the loop is finite.
        if peak <= budget or candidate.size in measured:
            return candidate, peak
        measured[candidate.size] = peak
        correction = peak / _predicted(candidate.step)


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
