"""How peak memory and step time grow with the number of layers.

1. `measure_depth`: one network in several modes. The rewritten ones are built first:
   each plan also simulates stock, so that what would not fit is never run.
2. `fit_trend`: a least-squares line in the number of layers, or in its square root.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from measuring import Built, build_step, peak_bytes, seconds_in_turn
from models import Workload
from prediction import UNSEEN_BYTES, simulated_levels
from tables import counted

__all__ = [
    "FEWEST_DEPTHS",
    "Family",
    "Network",
    "Row",
    "Say",
    "Trend",
    "add_times",
    "available_bytes",
    "fit_trend",
    "fits",
    "measure_depth",
    "predicted_bytes",
    "ratio_of",
    "step_peak_bytes",
]

Row = dict[str, Any]
Say = Callable[[str], None]

FEWEST_DEPTHS = 3
"""Of which a trend can be fitted: a line goes through any two."""
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


@dataclass(frozen=True)
class Network:
    """What was measured of one network.

    Attributes:
        rows: By mode, "stock" first; a mode that does not fit has no `peak_bytes`.
        calls: By mode, a step of each that fits.
    """

    rows: dict[str, Row]
    calls: dict[str, Callable[[], Any]]


def measure_depth(family: Family, size: int, modes: Sequence[str], say: Say) -> Network:
    """Peaks of one network in each mode that fits in memory; see `add_times`.

    Args:
        family: Which networks.
        size: Which of them.
        modes: "stock" first, then modes of `gradients()`.
        say: Takes a line of progress.
    """
    layers = family.layers(size)
    name = f"{family.name}, {counted(layers, 'layer')}"
    workload = family.make(size)
    rows: dict[str, Row] = {}
    steps: dict[str, Built] = {}
    stock_bytes: int | None = None
    for mode in (*modes[1:], "stock"):
        say(f"{name}: {mode}")
        row = rows[mode] = {"family": family.name, "layers": layers, "mode": mode}
        row["predicted_bytes"] = stock_bytes
        if mode != "stock":
            steps[mode] = build_step(workload, mode)
            stock_bytes = predicted_bytes(steps[mode], stock=True)
            row["predicted_bytes"] = predicted_bytes(steps[mode])
            row["building_seconds"] = steps[mode].building_seconds
        if not fits(row["predicted_bytes"]):
            steps.pop(mode, None)
            say(f"{name}: {mode} does not fit, left out")
            continue
        if mode == "stock":
            steps[mode] = build_step(workload, mode)
        row["peak_bytes"] = step_peak_bytes(steps[mode], workload)
    calls = {m: partial(steps[m].call, *workload.batch) for m in modes if m in steps}
    return Network({mode: rows[mode] for mode in modes}, calls)


def add_times(networks: Sequence[Network], rounds: int) -> None:
    """Times all steps of all networks in turn, and adds the ratios to stock.

    In turn, since the speed of a machine drifts: so its drift meets all of them alike.
    """
    calls = {
        (number, mode): call
        for number, network in enumerate(networks)
        for mode, call in network.calls.items()
    }
    times = seconds_in_turn(calls, rounds)
    # Each round is scaled to the fastest, and the median is deaf to what else the
    # machine did for a moment.
    totals = [sum(taken[n] for taken in times.values()) for n in range(rounds)]
    for (number, mode), taken in times.items():
        row = networks[number].rows[mode]
        scaled = (t * min(totals) / s for t, s in zip(taken, totals, strict=True))
        row["seconds"], row["times"] = statistics.median(scaled), taken
    for network in networks:
        stock = network.rows.get("stock", {})
        for row in network.rows.values():
            if "times" in stock and "times" in row:
                row["time_of_stock"] = ratio_of(row, stock)
                row["peak_of_stock"] = row["peak_bytes"] / stock["peak_bytes"]


def ratio_of(row: Row, other: Row) -> float:
    """The median ratio of two rows' times, pair by pair."""
    pairs = zip(row["times"], other["times"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def fits(needed_bytes: int | None) -> bool:
    """Whether the machine has so much memory to spare; True where it is unknown."""
    return needed_bytes is None or needed_bytes <= USABLE_FRACTION * available_bytes()


def predicted_bytes(built: Built, stock: bool = False) -> int:
    """The simulated peak of a step, which does not hold the gradients to its end.

    What the allocator's statistics do not see is left out, as it is measured without.
    """
    levels = simulated_levels(
        built.plan, least_bytes=UNSEEN_BYTES, holds_gradients=False, stock=stock
    )
    return int(levels.max())


def step_peak_bytes(built: Built, workload: Workload, runs: int = 2) -> int:
    """The worst measured peak of a step over rest."""
    return int(peak_bytes(partial(built.call, *workload.batch), runs).most)


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
        layers: Three different ones at least: a line goes through any two, and then
            says nothing of whether the law holds.
        values: One for each of them, positive.
        power: See `Trend`.

    Raises:
        ValueError: There are too few.
    """
    if len(set(layers)) < FEWEST_DEPTHS:
        raise ValueError(
            f"expected at least {FEWEST_DEPTHS} depths for a trend, but got {layers}"
        )
    x, y = np.asarray(layers, float) ** power, np.asarray(values, float)
    weighted = np.stack([1 / y, x / y], axis=1)
    constant, slope = np.linalg.lstsq(weighted, np.ones_like(y), rcond=None)[0]
    worst = float(np.abs((constant + slope * x) / y - 1).max())
    return Trend(float(constant), float(slope), power, worst)


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: compare_depths.py imports it.")
