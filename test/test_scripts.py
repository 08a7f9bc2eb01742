"""The scripts start, explain themselves, and measure what they say."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import demo
import memory_saving_gradients
from measuring import (
    build_gradients,
    build_step,
    largest_difference,
    paired_ratios,
    peak_bytes,
    session_peak_bytes,
)
from models import MODELS, chain
from tables import MIB, markdown, table

ROOT = Path(__file__).resolve().parents[1]
SHELL_SCRIPTS = (
    "check_all.sh",
    "demo.sh",
    "test.sh",
    "test_versions.sh",
    "train_two_workers.sh",
)
PYTHON_SCRIPTS = (
    "bench_first_step.py",
    "bench_bodies.py",
    "bench_models.py",
    "bench_peers.py",
    "bench_planners.py",
    "compare_depths.py",
    "demo.py",
    "draw_schedules.py",
    "largest_batch.py",
    "plan_gpt3_layer.py",
    "plot_pareto.py",
    "plot_prediction.py",
    "train_two_workers.py",
    "zoo.py",
)
HELPERS = sorted(
    path.name
    for path in (ROOT / "scripts").glob("*.py")
    if path.name not in PYTHON_SCRIPTS
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command that must succeed."""
    # From any folder, also where the packages are not installed but stand here.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_help_of_shell_script_works_from_any_folder(name: str, tmp_path: Path):
    text = run("bash", ROOT / "scripts" / name, "--help", cwd=tmp_path).stdout
    assert f"scripts/{name}" in text
    assert "set -euo" not in text


@pytest.mark.parametrize("name", PYTHON_SCRIPTS)
def test_help_of_python_script_does_not_wait_for_tensorflow(name: str, tmp_path: Path):
    script = ROOT / "scripts" / name
    done = run(sys.executable, "-X", "importtime", script, "--help", cwd=tmp_path)
    assert f"usage: {name}" in done.stdout
    assert "--out" in done.stdout
    assert "tensorflow" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", HELPERS)
def test_a_module_that_is_no_program_says_whose_it_is(name: str, tmp_path: Path):
    done = run(sys.executable, ROOT / "scripts" / name, "--help", cwd=tmp_path)
    assert "Not a program of its own" in done.stdout


def test_help_of_the_demo_is_complete(tmp_path: Path):
    flags = [
        set(re.findall(r"--(?!help)\w+", run(*command, "--help", cwd=tmp_path).stdout))
        for command in (
            ["bash", ROOT / "scripts" / "demo.sh"],
            [sys.executable, ROOT / "scripts" / "demo.py"],
        )
    ]
    assert flags[0] == flags[1] == {"--out", "--steps", "--batch", "--blocks"}


BAD_ARGUMENTS = {
    "demo.py": ["--steps 0", "--batch 0", "--batch 1798", "--blocks -1", "--steps x"],
    "bench_first_step.py": ["nonsense", "--jit maybe", "--rounds 0", "--ways stock"],
    "bench_models.py": [
        "--pairs 0",
        "--runs 0",
        "--scale 0",
        "--lengths 4,0",
        "--threads ,",
        "--modes memmory",
        "nonsense",
    ],
    "bench_bodies.py": ["nonsense"],
    "compare_depths.py": ["--batch 0", "--blocks 0", "--depths x", "--rounds 0"],
    "plot_prediction.py": ["--runs 0", "--scale nan", "--modes list", "nonsense"],
    "draw_schedules.py": ["--layers 1"],
    "bench_peers.py": ["--pairs 0", "--scale 0", "--peers stock", "unet"],
    "bench_planners.py": [
        "",
        "folder --planners chenn",
        "folder --budgets 0",
        "--optimal --ops 2",
        "--optimal --seconds 0",
    ],
    "largest_batch.py": ["--scale 0", "--headroom 51", "nonsense"],
    "plot_pareto.py": ["", "--scale 0", "mlp nonsense"],
    "plan_gpt3_layer.py": ["--length 0", "--heads 7", "--kept x"],
    "zoo.py": ["--runs 0", "--scale 0", "--mode collection", "--resume"],
}


@pytest.mark.parametrize(
    ("name", "words"),
    [(name, words) for name, many in BAD_ARGUMENTS.items() for words in many],
)
def test_bad_arguments_are_an_error_of_one_line(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
):
    script = importlib.import_module(name.removesuffix(".py"))
    with pytest.raises(SystemExit) as ended:
        script.parse(words.split())
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_shell_script_is_executable_and_strict(name: str):
    script = ROOT / "scripts" / name
    assert script.stat().st_mode & 0o111
    assert "\nset -euo pipefail\n" in script.read_text("utf-8")


def test_ci_runs_the_suite():
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_setup_reads_the_version_of_the_package():
    source = ROOT / "memory_saving_gradients" / "__init__.py"
    if source.exists():
        found = re.search(r'^__version__ = "(.+)"$', source.read_text("utf-8"), re.M)
        assert found is not None
        version = found.group(1)
    else:  # the suite runs on an installed wheel
        version = importlib.metadata.version("memory_saving_gradients")
    assert version == memory_saving_gradients.__version__


def test_tensorflow_is_no_requirement():
    text = (ROOT / "setup.py").read_text("utf-8")
    required = re.search(r"install_requires=\[(.*?)\]", text, re.S)
    assert required is not None
    assert "tensorflow" not in required.group(1)
    assert "tensorflow" in text


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_has_a_small_version(name: str):
    workload = MODELS[name](scale=0.05)
    assert workload.variables_bytes > 0
    assert all(isinstance(variable, tf.Variable) for variable in workload.variables)


@pytest.mark.parametrize("name", ["mlp", "transformer", "unet"])
def test_step_moves_the_variables_and_restore_puts_them_back(name: str):
    workload = MODELS[name](scale=0.05)
    before = workload.values()
    loss = build_step(workload, "stock").call(*workload.batch)
    assert np.isfinite(loss.numpy())
    moved = zip(before, workload.values(), strict=True)
    assert max(np.abs(a - b).max() for a, b in moved) > 0
    workload.restore(before)
    np.testing.assert_equal(workload.values(), before)


def test_peak_of_a_chain_is_one_activation_for_each_op():
    workload = chain(20)
    built = build_gradients(workload, "stock")
    peak = peak_bytes(lambda: built.call(*workload.batch), runs=2)
    # The unit is one activation; whether the gradient takes over the buffer of the last
    # one is the executor's affair.
    assert 19 <= peak.most / MIB <= 22
    assert built.plan is None


def test_peak_of_a_chain_in_a_session_is_the_same():
    # By records, what is fed and fetched counts as well.
    assert 19 <= session_peak_bytes(lambda: chain(20), "stock", runs=1) / MIB <= 23


def test_largest_difference_sees_what_is_wrong():
    gradients = [np.ones(3), np.array([1e-9])]
    assert largest_difference(gradients, gradients) == 0
    assert largest_difference(gradients, [np.full(3, 1.01), gradients[1]]) > 9e-3
    # A gradient that is zero but for noise is judged on the scale of the others.
    assert largest_difference(gradients, [gradients[0], np.array([-1e-9])]) < 1e-5


def test_ratios_are_taken_pair_by_pair():
    calls: list[str] = []
    seconds, ratio = paired_ratios(
        lambda: calls.append("a"), lambda: calls.append("b"), pairs=3
    )
    assert "".join(calls) == "ab" * 4
    assert ratio.least <= ratio.median <= ratio.most
    assert seconds.least >= 0


def test_table_puts_figures_to_the_right():
    rows = [{"name": "a", "figure": "9.5"}, {"name": "long", "figure": None}]
    names, figures = (lambda row: row["name"]), (lambda row: row["figure"])
    text = table([("name", names), ("figure", figures)], rows)
    assert text.splitlines() == [
        "name  figure",
        "----  ------",
        "a        9.5",
        "long       -",
    ]


def test_table_for_documents():
    rows = [{"name": "a", "figure": "9.5"}, {"name": "long", "figure": None}]
    names, figures = (lambda row: row["name"]), (lambda row: row["figure"])
    assert markdown([("name", names), ("figure", figures)], rows).splitlines() == [
        "| name | figure |",
        "| --- | --: |",
        "| a | 9.5 |",
        "| long | - |",
    ]


@pytest.mark.slow
def test_demo_trains_all_three_alike(tmp_path: Path):
    options = demo.parse(["--blocks", "1", "--batch", "8", "--steps", "1"])
    rows = demo.compare("v1 graph", demo.in_a_session, options)
    rows += demo.compare("tf.function", demo.in_a_function, options)
    assert [row["mode"] for row in rows] == [*demo.MODES] * 2
    assert max(row["difference"] for row in rows) < 1e-4
    assert all(row["peak_bytes"] > 0 for row in rows)
    demo.draw(rows, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"
    assert "speed" in table(demo.columns(rows), rows)


def test_a_word_among_modes_is_met_with_budgets_too():
    import arguments

    modes = arguments.modes_of(("memory", "speed"))
    assert modes("memory,40%") == ["memory", "40%"]
    for words in ("fast", "fast,40%"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"speed and budgets such"):
            modes(words)
    with pytest.raises(argparse.ArgumentTypeError, match=r"list of some of a$"):
        arguments.names_of(("a",))("b")
