"""Depths compared: trends, and the search for the deepest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import matplotlib.image
import pytest

import compare_depths
import deepest
import depths
from depth_pictures import draw_memory, draw_time, trends
from measuring import seconds_in_turn
from models import chain
from tables import MIB

ROOT = Path(__file__).resolve().parents[1]
MODES = compare_depths.MODES
# An activation of 512 KiB: the allocator's statistics see it.
CHAINS = depths.Family("chain", partial(chain, scale=0.5), lambda n: n, (8, 16))


def silent(text: str) -> None:
    pass


# ---- the scripts


@pytest.mark.parametrize("name", ["compare_depths.py", "plot_prediction.py"])
def test_help_of_python_script_does_not_wait_for_tensorflow(name: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", ROOT / "scripts" / name, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"usage: {name}" in done.stdout
    assert "--out" in done.stdout
    assert "tensorflow" not in done.stderr


def test_run_all_tests_explains_itself_from_any_folder(tmp_path: Path):
    script = ROOT / "test" / "run_all_tests.sh"
    assert script.stat().st_mode & 0o111
    assert "\nset -euo pipefail\n" in script.read_text("utf-8")
    done = subprocess.run(
        [script, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "./run_all_tests.sh" in done.stdout
    assert "set -euo" not in done.stdout
    last = subprocess.run([script, "--quick", "-h"], capture_output=True, text=True)
    assert last.stdout == done.stdout


def test_run_all_tests_lists_what_it_hands_on(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        compare_depths.parse(["--help"], with_suite=True)
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    head = (ROOT / "test" / "run_all_tests.sh").read_text("utf-8")
    assert options >= {"--no-suite", "--quick", "--lengths"}
    assert set(re.findall(r"^#   (--[a-z-]+)", head, re.MULTILINE)) == options


def test_run_all_tests_tells_a_wrong_argument_first(tmp_path: Path):
    """Before there is an environment, and with a Python that has nothing installed."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    venv = tmp_path / "venv"
    for wrong in ("--bogus", "--rounds=0", "--no-s"):
        done = subprocess.run(
            [ROOT / "test" / "run_all_tests.sh", "--no-suite", wrong],
            env=os.environ | {"MSG_VENV": str(venv), "PYTHON": str(python)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and not venv.exists()
        assert done.stderr.startswith("usage: run_all_tests.sh [-h] [--no-suite]")
        assert "\nrun_all_tests.sh: error: " in done.stderr


def test_run_all_tests_hands_its_arguments_on(tmp_path: Path):
    """A stand-in for the environment's Python prints what it is called with."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "called: $*"\n')
    python.chmod(0o755)
    checkout = tmp_path / "checkout"
    for name in ("scripts/_venv.sh", "test/run_all_tests.sh"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    with (checkout / "scripts" / "_venv.sh").open("a") as file:
        file.write(f"\nensure_venv() {{ VENV_PYTHON={python}; }}\n")

    def called(*arguments: str) -> list[str]:
        script = checkout / "test" / "run_all_tests.sh"
        command = ["bash", script, *arguments]
        done = subprocess.run(
            command,
            env=os.environ | {"MSG_VENV": str(python.parents[1])},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    compare = f"called: {checkout}/scripts/compare_depths.py"
    # What it would be told is checked before the suite takes its time.
    check = "called: -c import compare_depths; compare_depths.parse(with_suite=True)"
    suite = "called: -m pytest -n 2 --dist worksteal"
    assert called() == [check, suite, f"{compare} --out {checkout}/out"]
    assert called("--no-suite", "--quick", "--out", "x") == [
        f"{check} --no-suite --quick --out x",
        f"{compare} --quick --out x",
    ]


def test_setting_takes_what_the_command_line_says():
    options = compare_depths.parse(["--quick", "--blocks", "2,1", "--lengths", ""])
    setting = compare_depths.setting_of(options)
    assert (setting.blocks, setting.lengths) == ((1, 2), ())
    assert setting.batch == compare_depths.QUICK.batch


def test_reference_is_one_of_the_blocks(capsys: pytest.CaptureFixture[str]):
    words = ["--quick", "--blocks", "1,5", "--reference"]
    options = compare_depths.parse([*words, "5"])
    assert compare_depths.setting_of(options).reference == 5
    with pytest.raises(SystemExit):
        compare_depths.parse([*words, "3"])
    assert "must be one of the blocks, 1, 5" in capsys.readouterr().err


def test_batch_is_halved_until_the_reference_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(depths, "available_bytes", lambda: 2**30)
    setting = compare_depths.setting_of(compare_depths.parse([]))
    assert setting.batch in (1280 // 2**k for k in range(1, 6))


def test_available_memory_is_plausible():
    assert 2**28 < depths.available_bytes() < 2**46


# ---- trends and the search


def test_trend_recovers_its_law():
    layers = [4, 9, 25, 64]
    found = depths.fit_trend(layers, [3 + 2 * n**0.5 for n in layers], 0.5)
    assert (found.constant, found.slope) == pytest.approx((3, 2))
    assert found.worst < 1e-9
    assert found(100) == pytest.approx(23)


def test_trend_tells_how_wrong_it_is():
    found = depths.fit_trend([1, 2, 4, 8], [1, 2, 4, 8], 0.5)
    assert found.worst > 0.1


def test_a_trend_takes_three_depths(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"at least 3 depths for a trend, but got"):
        depths.fit_trend([4, 9, 9], [6.0, 9.0, 9.0], 0.5)
    rows = [
        {"family": family, "layers": n, "mode": "stock", "peak_bytes": 2.0 * n * MIB}
        for family, sizes in (("ResNet", (8, 20)), ("chain", (25, 50, 100)))
        for n in sizes
    ]
    assert list(trends(rows)) == [("chain", "stock")]
    compare_depths.show(rows, [], compare_depths.QUICK)
    told = capsys.readouterr().out
    assert "ResNet: too few depths for a trend, which takes three" in told
    assert "chain, stock: peak = 0.0 + 2.00 n MiB" in told


def test_each_setting_has_the_depths_for_a_trend():
    for setting in (compare_depths.QUICK, compare_depths.FULL):
        for sizes in (setting.blocks, setting.depths, setting.lengths):
            assert len(sizes) >= depths.FEWEST_DEPTHS


def test_one_layer_is_no_layers():
    lines: list[str] = []
    one = depths.Family("chain", partial(chain, scale=0.5), lambda n: n // 8, (8,))
    depths.measure_depth(one, 8, ("stock",), lines.append)
    assert lines == ["chain, 1 layer: stock"]


@pytest.mark.parametrize("power", [0.4, 0.5, 0.7])
@pytest.mark.parametrize("known", [(3,), (1, 3, 10)])
def test_deepest_is_found_in_few_plans(power: float, known: tuple[int, ...]):
    calls = []

    def peak(size: int) -> float:
        calls.append(size)
        return 5 + 7 * size**power

    budget = peak(200)
    calls.clear()
    before = {n: 5 + 7 * n**power for n in known}
    found = deepest.deepest(peak, budget, before, tolerance=0.03, most_tries=6)
    assert 0.9 * budget <= 5 + 7 * found**power <= budget
    assert len(calls) <= 6


def test_deepest_stays_within_the_budget_on_a_law_with_a_step():
    def peak(size: int) -> float:
        return 10.0 if size < 50 else 1000.0

    assert 4 <= deepest.deepest(peak, 20, {2: 10.0, 4: 10.0}) < 50


def test_deepest_of_a_chain_fits_when_it_is_run():
    small = depths.measure_depth(CHAINS, 16, ("stock", "memory"), silent)
    budget = small.rows["stock"]["peak_bytes"]
    large = deepest.find_deepest(CHAINS, "memory", budget, {4: 2 * MIB}, silent)
    depths.add_times([small, large], rounds=1)
    stock, deep, rival = deepest.deepest_rows(small, large)
    assert deep["peak_bytes"] <= stock["peak_bytes"]
    # A chain needs about 2 sqrt(n) activations: 64 of them in the memory of 16.
    assert deep["deeper"] >= 3
    assert deep["layers"] == rival["layers"] == deep["deeper"] * 16
    per_layer = deep["seconds_per_layer"] / stock["seconds_per_layer"]
    assert deep["layer_time_of_stock"] == pytest.approx(per_layer)
    ratio = deep["seconds"] / rival["seconds"]
    assert deep["time_of_stock"] == pytest.approx(ratio)
    assert rival["peak_bytes"] > 3 * deep["peak_bytes"]


def test_network_twice_as_deep_takes_the_memory_as_its_budget():
    small = depths.measure_depth(CHAINS, 16, ("stock",), silent)
    budget = small.rows["stock"]["peak_bytes"]
    twice = deepest.times_as_deep(CHAINS, 2, 16, budget, silent)
    depths.add_times([small, twice], rounds=1)
    stock, deep = deepest.deepest_rows(small, twice)
    assert (deep["mode"], deep["layers"], deep["deeper"]) == ("budget", 32, 2)
    assert 0.7 * budget < deep["peak_bytes"] <= budget == stock["peak_bytes"]


def test_no_network_if_no_plan_keeps_to_the_memory():
    said: list[str] = []
    none = deepest.times_as_deep(CHAINS, 8, 16, MIB // 2, said.append)
    assert not none.rows and not none.calls
    assert "budget" in said[-1]


# ---- one depth


def test_rows_of_a_depth():
    network = depths.measure_depth(CHAINS, 16, MODES, silent)
    depths.add_times([network], rounds=1)
    assert list(network.rows) == list(network.calls) == list(MODES)
    rows = list(network.rows.values())
    stock, memory, _ = rows
    assert stock["peak_of_stock"] == stock["time_of_stock"] == 1
    assert memory["peak_of_stock"] < 0.6
    for row in rows:
        # Within two activations.
        assert abs(row["peak_bytes"] - row["predicted_bytes"]) <= MIB


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(depths, "available_bytes", lambda: 8 * MIB)
    network = depths.measure_depth(CHAINS, 16, MODES, said.append)
    depths.add_times([network], rounds=1)
    stock, *others = network.rows.values()
    assert "peak_bytes" not in stock
    for row in others:
        assert stock["predicted_bytes"] > row["peak_bytes"]
        assert row["seconds"] > 0
        assert "time_of_stock" not in row
    assert "left out" in said[-1]


def test_functions_are_timed_in_turn():
    calls: list[str] = []
    runs = {name: partial(calls.append, name) for name in "abc"}
    times = seconds_in_turn(runs, rounds=2)
    assert "".join(calls) == "abc" * 3
    assert [len(taken) for taken in times.values()] == [2, 2, 2]


def test_comparison_prints_and_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = "x --quick --blocks= --depths= --lengths 8,12,16 --rounds 1 --out"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(tmp_path)])
    assert compare_depths.main() == 0
    printed, progress = capsys.readouterr()
    assert "chain, memory: peak = " in printed
    assert "chain, 16 layers: stock" in progress
    lines = (tmp_path / "depths.csv").read_text("utf-8").splitlines()
    assert len(lines) == 1 + 3 * len(MODES)
    assert lines[0].startswith("part,family,layers,mode")
    for name in ("memory.png", "time.png"):
        assert matplotlib.image.imread(tmp_path / name).shape == (500, 1000, 4)


def test_pictures_of_several_families(tmp_path: Path):
    def row(family: str, mode: str, layers: int, peak: float) -> dict:
        row = {"family": family, "mode": mode, "layers": layers, "peak_bytes": peak}
        row |= {"seconds": layers / 100, "seconds_per_layer": 0.01}
        row |= {"peak_of_stock": 0.5, "time_of_stock": 1.2, "deeper": 10.0}
        return row | {"layer_time_of_stock": 1.25}

    families = ("ResNet", "transformer", "chain")
    rows = [
        row(family, mode, n, 2**33 * n)
        for family in families
        for mode in MODES
        for n in (8, 20)
    ]
    pair = [row("ResNet", "stock", 8, 2**36), row("ResNet", "memory", 80, 2**36)]
    for draw in (draw_memory, draw_time):
        draw(tmp_path / "a.png", rows, pair, 32)
        image = matplotlib.image.imread(tmp_path / "a.png")
        assert image.shape == (500, 1000, 4)
        assert image[..., :3].std() > 0.05
