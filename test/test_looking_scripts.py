"""The scripts that plan without running, on models small enough for a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import largest_batch
import plot_pareto


def test_a_front_is_drawn_written_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["mlp", "--scale", "0.1", "--compare", "--out", str(tmp_path)]
    assert plot_pareto.main(words) == 0
    assert (tmp_path / "pareto.png").stat().st_size > 10_000
    front = json.loads((tmp_path / "pareto.json").read_text("utf-8"))["MLP"]
    assert {"points", "memory", "speed", "knee", "stock"} == set(front)
    assert front["knee"] in front["points"]
    told = capsys.readouterr().out
    assert all(word in told for word in ("knee", "90%", "Chen's", "uniform"))


@pytest.mark.slow
def test_what_is_said_to_fit_is_measured_to_fit(tmp_path: Path):
    # Large enough tensors, or the allocator's statistics do not see them; and a process
    # of its own, since in an aged one chunks are larger.
    words = ["--scale", "0.1", "--budget", "40MiB", "--out", str(tmp_path)]
    command = [sys.executable, largest_batch.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "largest_batch.json").read_text("utf-8"))
    batches = [row["batch"] for row in rows]
    assert 0 < 2 * batches[0] < batches[1] <= batches[2]
    for row in rows:
        assert 0.9 < row["requested_bytes"] / row["predicted_bytes"] < 1.02
    assert "40MiB" in done.stdout


def test_a_share_is_no_limit_for_a_batch():
    with pytest.raises(SystemExit, match="no limit"):
        largest_batch.main(["--scale", "0.05", "--budget", "40%"])
