"""What the README says can be run runs, and what it names is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from document_helpers import ROOT, blocks_of, run_as_reader

README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FIRST_FOLDERS = ("docs", "scripts", "test", ".ci")

# What a user does who wants to see the log; in the first line, so that all others have
# the numbers that the README prints.
PREAMBLE = "import logging; logging.basicConfig(level=logging.INFO); "


def blocks(language: str) -> list[str]:
    """The fenced code blocks of the README in one language."""
    return blocks_of(README, language)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess:
    """All examples, one after the other in one process, as a reader would try them."""
    folder = tmp_path_factory.mktemp("readme")
    return run_as_reader(PREAMBLE + "\n".join(blocks("python")), folder)


def test_examples_run(output: subprocess.CompletedProcess):
    assert len(blocks("python")) >= 5
    assert output.returncode == 0, output.stderr[-3000:]


def test_first_example_saves_what_the_readme_prints(
    output: subprocess.CompletedProcess,
):
    pattern = r"^(stock|memory): (\d+) MiB$"
    told = dict(re.findall(pattern, blocks("text")[0], re.M))
    found = dict(re.findall(pattern, output.stdout, re.M))
    assert told.keys() == found.keys() == {"stock", "memory"}
    for name, peak in found.items():
        # Two-sided, in the unit of the example: two activations of 2 MiB. The chunks
        # that the allocator hands out differ by that much from run to run.
        assert abs(int(peak) - int(told[name])) <= 2 * 2, name


def figures(line: str) -> list[float]:
    """The numbers of a line of a plan, without those in names of ops and files."""
    return [float(number) for number in re.findall(r"(?<![\w.:/])\d+\.?\d*\b", line)]


def test_plan_looks_as_printed_in_the_readme(output: subprocess.CompletedProcess):
    (printed,) = (text for text in blocks("text") if text.startswith("Checkpoints:"))
    start = output.stdout.index("Checkpoints:")
    lines = printed.splitlines()
    found = output.stdout[start:].splitlines()[: len(lines)]
    of_erf = "Gelu/Erfc" not in "".join(found)
    assert "Gelu/Erfc" in printed
    for told, line in zip(lines, found, strict=True):
        words = r"^ *[A-Z]?[a-z ]+"  # names of ops change with the planner
        if re.match(words, told):
            assert re.match(words, line), line
        place = r"train\.py:\d+"
        assert re.findall(place, told) == re.findall(place, line)
        if "planning took" not in told:
            # TensorFlow 2.16 and 2.18 make gelu of erf, which is an op more or less to
            # a layer than what the README shows; 3 % is what that is in all.
            *expected, last = figures(told) or [0.0]
            *given, count = figures(line) or [0.0]
            an_op = int(of_erf and told.endswith(" ops"))
            assert given == pytest.approx(expected, rel=0.03), line
            assert count == pytest.approx(last, rel=0.03, abs=an_op), line
    assert len(figures(lines[1])) == 3  # both peaks and their ratio


def test_each_call_logs_one_line(output: subprocess.CompletedProcess):
    lines = re.findall(
        r"^INFO:memory_saving_gradients.rewire\b.*$", output.stderr, re.M
    )
    assert lines
    assert all("instead of" in line for line in lines)


def test_examples_are_short():
    first = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(first) <= 20
    lines = "".join(blocks("python")).splitlines()
    assert [line for line in lines if len(line) > 88] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_that_a_document_names_exist(name: str):
    text = (ROOT / name).read_text("utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    local = [link for link in links if not link.startswith("http")]
    folders = "|".join(map(re.escape, FIRST_FOLDERS))
    named = re.findall(rf"(?<![\w./])(?:{folders})/[\w./-]*\w", text)
    missing = {path for path in (*local, *named) if not (ROOT / path).exists()}
    assert missing == set()


def test_every_program_is_in_the_table_of_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    parts = "Not a program of its own"
    programs = [
        p for p in (ROOT / "scripts").glob("*.py") if parts not in p.read_text()
    ]
    assert len(programs) > 10
    named = [p for p in (ROOT / "scripts").iterdir() if p.name in text]
    stems = {path.stem for path in named}
    assert {path.stem for path in programs} <= stems


def test_links_within_the_readme_lead_somewhere():
    headings = re.findall(r"^#+ (.+)$", README, re.M)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors


def test_pictures_are_small():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < 150_000, picture


def test_schedules_are_drawn_from_the_simulation(tmp_path: Path):
    import draw_schedules

    everything, third, memory = draw_schedules.panels(9)
    peaks = [panel.timeline.peak_bytes for panel in (everything, third, memory)]
    assert peaks == [10, 5, 4]  # what the README says of its picture
    assert len(third.schedule.recomputed) == len(memory.schedule.recomputed)
    draw_schedules.draw(5, tmp_path / "five.png")
    assert (tmp_path / "five.png").read_bytes()[:4] == b"\x89PNG"
