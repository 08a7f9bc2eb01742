"""A sample of the zoo: whole architectures, whose gradients must be stock's."""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zoo
import zoo_measure
from measuring import requested_bytes
from zoo_models import BY_HAND, architectures

SAMPLE = {
    "GPT-like": 0.25,
    "3-D U-Net": 0.5,
    "GAN": 0.5,
    "MobileNet": 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_gradients_are_those_of_stock_in_less_memory(name: str):
    subject = zoo_measure.specimen(name, SAMPLE[name])
    row = zoo_measure.examine(subject, "memory", 1, requested_bytes)
    assert row["wrong"] == []
    assert row["exact"]["equal_bits"]
    assert row["plans"] == (2 if name == "GAN" else 1)
    assert row["recomputed"] > 10
    assert row["peak_of_stock"] < 0.9
    assert zoo.verdict({"name": name, **row}) == "ok"


@pytest.mark.slow
def test_where_nothing_can_be_saved_the_graph_stays_stocks():
    row = zoo_measure.examine(zoo_measure.specimen("frozen backbone", 0.5), "memory", 1)
    assert row["exact"]["equal_bits"]
    assert row["recomputed"] == row["extra_fraction"] == 0
    assert row["planned_of_stock"] == 1
    assert row["reason"]


def test_every_application_is_in_the_zoo():
    names = set(architectures())
    assert {"VGG16", "ResNet50", "DenseNet121", "EfficientNetB7", "NASNetLarge"} < names
    assert "resnet" not in names  # modules are no architectures
    assert len(names) > 40


# -- the checks themselves -------------------------------------------------------------


def compared(new: list[Any], again: list[Any] | None = None) -> dict[str, Any]:
    stock = [np.array([1.0, 2.0]), np.array([1e-9]), None]
    return zoo_measure._compare(stock, [stock, again or stock], new)


def test_a_wrong_gradient_is_seen():
    right = [np.array([1.0, 2.0]), np.array([1e-9]), None]
    assert compared(right)["equal_bits"]
    assert compared(right)["of_bound"] == 0
    off = compared([np.array([1.0, 2.001]), right[1], None])
    assert not off["equal_bits"]
    assert off["difference"] == pytest.approx(5e-4, rel=0.01)
    assert off["of_bound"] == pytest.approx(5, rel=0.01)
    assert off["worst"] == 0
    assert compared([right[0], np.array([np.nan]), None])["of_bound"] == np.inf
    assert compared([right[0], right[1], np.zeros(1)])["of_bound"] == np.inf


def test_rounding_is_no_fault():
    noise = [np.array([1.0, 2.0]), np.array([-1e-9]), None]
    assert compared(noise)["of_bound"] < 1
    shaken = [np.array([1.0, 2.001]), np.array([1e-9]), None]
    assert compared([np.array([1.0, 2.002]), shaken[1], None], shaken)["of_bound"] < 1


def row(**changes: Any) -> dict[str, Any]:
    exact = {"equal_bits": True, "of_bound": 0.0, "difference": 0.0}
    peak = {"median": 10, "least": 10, "most": 10}
    found = {"plans": 1, "exact": exact, "stock_peak_bytes": peak, "peak_bytes": peak}
    return found | changes


def test_what_is_wrong_is_said():
    assert list(zoo_measure._wrong(row())) == []
    assert list(zoo_measure._wrong(row(plans=0))) == ["nothing passed the library"]
    higher = {"median": 11, "least": 10, "most": 11}
    assert list(zoo_measure._wrong(row(peak_bytes=higher))) == [
        "the peak is 1.100 of stock's"
    ]
    exact = {"equal_bits": False, "of_bound": 2.0, "difference": 0.01}
    assert list(zoo_measure._wrong(row(exact=exact))) == ["gradients differ by 1.0e-02"]


def test_what_fails_does_not_stop_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def failing(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nKeyError: 'x'\n")

    file = tmp_path / "zoo.json"
    words = ["zoo.py", "GAN", "ViT", "--out", str(file)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(subprocess, "run", failing)
    assert zoo.main() == 1
    shown = capsys.readouterr().out
    assert shown.count("FAILED: ended with 1: KeyError: 'x'") == 2
    assert file.read_text().count('"error"') == 2
    # A row that failed is made anew.
    monkeypatch.setattr("sys.argv", [*words, "--resume"])
    assert zoo.earlier(zoo.parse([*words[1:], "--resume"])) == {}


def test_an_unknown_name_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["zoo.py", "LeNet"])
    with pytest.raises(SystemExit, match="no such architecture: LeNet"):
        zoo.main()


# -- the document ----------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[1]


def table_in_the_documents() -> tuple[list[str], list[list[str]]]:
    """Heads and rows."""
    text = (ROOT / "docs" / "zoo.md").read_text("utf-8")
    lines = text.split("<!-- zoo: begin -->")[1].split("<!-- zoo: end -->")[0]
    rows = [line.strip("|").split(" | ") for line in lines.splitlines() if "|" in line]
    return [head.strip() for head in rows[0]], rows[2:]


def test_the_table_in_the_documents_has_no_fault():
    heads, body = table_in_the_documents()
    assert heads == [head for head, _ in zoo.COLUMNS]
    names = [cells[0].strip() for cells in body]
    assert names == list(architectures())
    for cells in body:
        assert cells[heads.index("bits")] == "equal"
        assert cells[-1].strip() == "ok"


def test_the_readme_sums_the_table_up():
    heads, body = table_in_the_documents()
    place = heads.index("of stock")
    found = {cells[0].strip(): float(cells[place]) for cells in body}
    ratios = [found[name] for name in found if name not in BY_HAND]
    half = sum(ratio <= 0.5 for ratio in ratios)
    summary = (
        f"takes {statistics.median(ratios):.2f} of stock's peak in the median of "
        f"{len(ratios)}, and no more than half in {half} of them"
    )
    assert summary in " ".join((ROOT / "README.md").read_text("utf-8").split())
