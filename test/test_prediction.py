"""Predicted against measured: simulated timelines laid over traced ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest

import plot_prediction
from measuring import build_gradients
from mem_util import Record, Span, build_timeline, trace
from models import chain
from prediction import (
    _levels_while_running,
    overlay,
    simulated_levels,
    step_names,
)
from tables import MIB

# Op, start and end.
RUNS = [("d", 5, 8), ("a", 10, 15), ("b", 18, 25)]


@pytest.fixture(scope="module")
def chain_overlay():
    workload = chain(30)
    built = build_gradients(workload, "memory")
    traced = trace(built.call, *workload.batch, replayable=False)
    return built.plan, overlay(built.plan, traced)


def test_prediction_of_a_chain_is_what_is_traced(chain_overlay):
    _, found = chain_overlay
    assert abs(found.measured_peak_bytes - found.predicted_peak_bytes) <= MIB
    # Grappler fuses forward ops that run on the same buffer, and no others.
    assert not np.isnan(found.measured_bytes[found.first_backward + 5 :]).any()
    # Step by step, and not only at the peak: within two activations.
    assert abs(found.largest.bytes) <= 2 * MIB


def test_the_first_op_of_a_run_has_a_level():
    records = [Record(12, 100, "a", 1), Record(20, 50, "b", 2), Record(30, -100, key=1)]
    curve = build_timeline("/cpu:0", records).requested_curve()
    times, levels = map(np.array, curve)
    spans = [Span(name, "Op", "/cpu:0", "", *ends) for name, *ends in RUNS]
    found = _levels_while_running(spans, ["a", "c", "b", "d"], times, levels)
    np.testing.assert_array_equal(found, [100, np.nan, 150, 0])


def test_largest_disagreement_names_the_op_where_it_starts(chain_overlay):
    _, found = chain_overlay
    wrong = found.predicted_bytes.copy()
    wrong[20:30] += 40 * MIB
    wrong[25] += 5 * MIB
    largest = SimpleNamespace(
        predicted_bytes=wrong, measured_bytes=found.predicted_bytes.copy()
    )
    largest = type(found).largest.fget(largest)
    assert (largest.start, largest.step, largest.bytes) == (20, 25, -45 * MIB)


def test_copies_are_found_under_their_names(chain_overlay):
    plan, _ = chain_overlay
    names = step_names(plan)
    assert len(set(names)) == len(names)
    assert sum(name.startswith("recompute/") for name in names) >= 10


def test_simulation_can_leave_out_what_nobody_sees(chain_overlay):
    plan, _ = chain_overlay
    assert simulated_levels(plan).max() == plan.predicted_peak_bytes
    assert simulated_levels(plan, stock=True).max() == plan.stock_peak_bytes
    assert simulated_levels(plan, least_bytes=2 * MIB).max() == 0
    assert simulated_levels(plan, holds_gradients=False)[-1] <= 3 * MIB


def test_prediction_is_drawn(tmp_path: Path, chain_overlay):
    _, found = chain_overlay
    plot_prediction.draw("chain 30", {"memory": found, "b": found}, tmp_path / "p.png")
    image = matplotlib.image.imread(tmp_path / "p.png")
    assert image.shape[1] == 1000
    assert image[..., :3].std() > 0.05


@pytest.mark.slow
def test_prediction_is_compared_with_trace_and_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = "x mlp --modes memory --runs 2 --scale 0.4 --out"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tmp_path)])
    assert plot_prediction.main() == 0
    told = capsys.readouterr().out
    assert "it starts at " in told and ", of type " in told
    assert (tmp_path / "prediction_mlp.png").exists()
    heads, row = (tmp_path / "prediction.csv").read_text("utf-8").splitlines()
    found = dict(zip(heads.split(","), row.split(","), strict=True))
    assert float(found["measured_over_seen"]) == pytest.approx(1, abs=0.1)
    # The allocator's chunks are as large as what was asked for, or larger.
    assert int(found["allocator_bytes"]) >= 0.95 * int(found["measured_bytes"])


def test_the_worst_prediction_is_named():
    def row(mode: str, traced: float, counted: float, off: float) -> dict:
        found = {"model": "U-Net", "mode": mode, "measured_over_seen": traced}
        found |= {"allocator_over_seen": counted, "seen_bytes": 100}
        found |= {"largest_difference_bytes": off, "largest_at": f"{mode}_end"}
        found |= {"difference_starts_at": f"{mode}_start"}
        return found | {"difference_starts_at_type": "Mul"}

    rows = [row("memory", 1.02, 1.3, -20), row("speed", 0.95, 1.1, 10)]
    assert plot_prediction.verdict(rows) == (
        "The worst prediction is off by 5.0 % (U-Net, speed); by the allocator's "
        "count, by 30.0 % (U-Net, memory).\nThe largest difference of two curves is "
        "20.0 % of the predicted peak (U-Net, memory), at memory_end; it starts at "
        "memory_start, of type Mul."
    )
