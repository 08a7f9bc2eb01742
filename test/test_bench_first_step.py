"""The benchmark of the first step: one process for each figure, ratios of medians."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench_first_step as bench

SMALL = ["mlp", "--ways", "memory", "--jit", "off", "--rounds", "1", "--scale", "0.05"]


@pytest.mark.slow
def test_a_small_model_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "deep" / "first.json"
    monkeypatch.setattr("sys.argv", ["bench", *SMALL, "--out", str(out)])
    assert bench.main() == 0
    told = capsys.readouterr().out
    assert "The largest ratio is" in told
    stock, memory = json.loads(out.read_text("utf-8"))["rows"]
    assert (stock["way"], memory["way"]) == ("stock", "memory")
    # The first step traces, the next does not.
    assert all(row["first_median"] > row["next_median"] > 0 for row in (stock, memory))
    assert 0 < memory["planning_median"] < memory["first_median"]
    assert "planning_median" not in stock


def test_processes_take_turns_and_medians_are_compared(
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[str] = []
    seconds = iter([10.0, 12.0, 2.0, 9.0, 1.0, 14.0])

    def measured(case: bench.Case, scale: float) -> dict[str, Any]:
        calls.append(case[1])
        return {"model": "MLP", "first_seconds": next(seconds), "next_seconds": 0.5}

    monkeypatch.setattr(bench, "measured", measured)
    options = bench.parse([*SMALL, "--rounds", "3"])
    stock, memory = bench.bench(options)
    assert calls == ["stock", "memory"] * 3
    assert (stock["first_median"], memory["first_median"]) == (2.0, 12.0)
    assert memory["of_stock"] == 6
    assert "of_stock" not in stock
    assert bench.table(bench.COLUMNS, [stock, memory]).count("(9.00-14.00)") == 1


def test_a_process_that_fails_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def failing(case: bench.Case, scale: float) -> dict[str, Any]:
        raise RuntimeError("mlp stock off ended with 1: KeyError: 'x'")

    monkeypatch.setattr(bench, "measured", failing)
    monkeypatch.setattr("sys.argv", ["bench", *SMALL])
    assert bench.main() == 1
    assert "error: mlp stock off ended with 1: KeyError" in capsys.readouterr().err
