"""What the guide says can be run runs, and what it prints is what comes."""

from __future__ import annotations

import re
import subprocess

import pytest
from document_helpers import ROOT, blocks_of, run_as_reader

GUIDE = (ROOT / "docs" / "guide.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The fenced code blocks of the guide in one language."""
    return blocks_of(GUIDE, language)


def scripts() -> list[str]:
    """The blocks as a reader tries them: each import of the library starts anew."""
    found: list[list[str]] = []
    for block in blocks("python"):
        if "\nimport memory_saving_gradients as msg\n" in block:
            found.append([])
        found[-1].append(block)
    return ["\n".join(parts) for parts in found]


@pytest.fixture(scope="module")
def outputs(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("guide")
    return [run_as_reader(script, folder) for script in scripts()]


@pytest.mark.slow
def test_examples_run(outputs: list[subprocess.CompletedProcess[str]]):
    assert len(outputs) == 2
    for output in outputs:
        assert output.returncode == 0, output.stderr[-3000:]


@pytest.mark.slow
def test_fit_says_what_it_saves(outputs: list[subprocess.CompletedProcess[str]]):
    line = r"^.*predicted peak.*instead of stock's.*measured.*$"
    assert re.findall(line, outputs[0].stdout, re.M)


@pytest.mark.slow
def test_the_plan_is_as_printed(outputs: list[subprocess.CompletedProcess[str]]):
    (printed,) = blocks("text")
    start = outputs[0].stdout.index("Checkpoints:")
    told = printed.splitlines()
    found = outputs[0].stdout[start:].splitlines()[: len(told)]
    for one, other in zip(told, found, strict=True):
        figure = r"(?<![\w.:/])\d+\.?\d*\b"  # not in names of ops and files
        assert len(re.findall(figure, one)) == len(re.findall(figure, other)), other
        place = r"train\.py:\d+"
        assert re.findall(place, one) == re.findall(place, other)
        words = re.match(r"^ *[A-Z]?[a-z ]*", one)
        assert words is not None
        # Names of layers change with the planner, words do not.
        if re.match(r"^[A-Z]|^  (predicted|extra|kept|planning)", one):
            assert other.startswith(words.group()), other
    peaks = [re.findall(r"[\d.]+", text[1]) for text in (told, found)]
    assert [float(n) for n in peaks[0]] == pytest.approx(
        [float(n) for n in peaks[1]], rel=0.05
    )


def test_every_block_checks_what_it_shows():
    without = [
        block
        for block in blocks("python")
        if not re.search(r"\bassert|print\(plan\)|logging", block)
    ]
    assert without == []
    lines = "".join(blocks("python")).splitlines()
    assert [line for line in lines if len(line) > 88] == []


def test_links_lead_somewhere():
    headings = re.findall(r"^#+ (.+)$", GUIDE, re.M)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", GUIDE)) <= anchors
    for link in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert link.startswith("http") or (ROOT / "docs" / link).exists(), link
