"""The command line, on files."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from matplotlib import image
from mem_util_fixtures import XSpaceBuilder, chain_metadata, gpu_metadata

import mem_util
from mem_util import TraceFileError
from mem_util.__main__ import main
from mem_util.plot import LINES


@pytest.fixture
def metadata_file(tmp_path):
    path = tmp_path / "run_metadata.pb"
    path.write_bytes(gpu_metadata().SerializeToString())
    return path


def test_help_of_the_module():
    command = [sys.executable, "-m", "mem_util", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--compare" in done.stdout and "run_metadata.pb" in done.stdout


def test_table_and_files(metadata_file, tmp_path, capsys):
    files = {name: tmp_path / f"out.{name}" for name in ("png", "json", "costs")}
    options = [
        part for name, path in files.items() for part in (f"--{name}", str(path))
    ]
    assert main([str(metadata_file), "--timeline", *options]) == 0
    out = capsys.readouterr().out
    assert "14.6 KiB" in out and "conv_2" in out and "<- peak" in out
    assert image.imread(files["png"]).shape[1] == 1800
    assert json.loads(files["json"].read_text())["traceEvents"]
    assert json.loads(files["costs"].read_text())["conv_0"] == pytest.approx(8e-6)


def test_step_stats_of_older_scripts(tmp_path, capsys):
    path = tmp_path / "timeline.pb"
    path.write_bytes(chain_metadata(5, 1000).step_stats.SerializeToString())
    assert main([str(path)]) == 0
    assert "4.9 KiB" in capsys.readouterr().out


def test_newest_run_of_a_profiler_folder(tmp_path, capsys):
    for number, size in enumerate((1000, 7000)):
        build = XSpaceBuilder()
        build.memory(100, size, 1, size, op="x")
        folder = tmp_path / "plugins" / "profile" / f"run_{number}"
        folder.mkdir(parents=True)
        (folder / "host.xplane.pb").write_bytes(build.space.SerializeToString())
    assert main([str(tmp_path)]) == 0
    assert "6.8 KiB" in capsys.readouterr().out


def test_compare(tmp_path, metadata_file, capsys):
    other = tmp_path / "other.pb"
    other.write_bytes(chain_metadata(5, 82).SerializeToString())
    png = tmp_path / "both.png"
    assert main(["--compare", str(metadata_file), str(other), "--png", str(png)]) == 0
    out = capsys.readouterr().out
    assert "/cpu:0" in out and "2.500" in out and "/gpu:0" not in out
    assert image.imread(png).shape[:2] == (825, 1800)


def test_compare_a_file_with_itself(metadata_file, capsys):
    assert main(["--compare", str(metadata_file), str(metadata_file)]) == 0
    assert capsys.readouterr().out.count("1.000") == 2


def test_in_a_picture_of_equal_traces_both_are_seen(metadata_file, tmp_path):
    svg = tmp_path / "both.svg"
    given = ["--compare", str(metadata_file), str(metadata_file)]
    assert main([*given, "--device", "cpu", "--png", str(svg)]) == 0
    drawn = svg.read_text("utf-8")
    for letter in "AB":
        assert f"<!-- {letter}: {metadata_file} /cpu:0: peak" in drawn
    color = r"stroke: (#\w+)"
    dashed = {*re.findall(rf"stroke-dasharray: [1-9][^\"]*{color}", drawn)}
    assert dashed == {LINES[1]}


def test_device_without_data(metadata_file, capsys):
    assert main([str(metadata_file), "--device", "/gpu:3"]) == 1
    assert "no data for device /gpu:3" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [0.3, 0.77])
def test_truncated_file(metadata_file, capsys, cut):
    data = metadata_file.read_bytes()
    metadata_file.write_bytes(data[: int(len(data) * cut)])
    assert main([str(metadata_file)]) == 1
    assert "cut short or something else" in capsys.readouterr().err


def test_no_cut_is_taken_for_a_whole(metadata_file):
    """A prefix is an error, except where it is a complete message by chance."""
    data = metadata_file.read_bytes()
    whole = mem_util.read_trace(metadata_file).peak_bytes
    for size in range(1, len(data) - 1, 7):
        metadata_file.write_bytes(data[:size])
        with pytest.raises(TraceFileError):
            assert mem_util.read_trace(metadata_file).peak_bytes == whole


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "an empty one"), (b"hello, this is text", "cut short or something else")],
)
def test_other_files(tmp_path, content, said):
    path = tmp_path / "x.pb"
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=said):
        mem_util.read_trace(path)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_chrome_trace_is_not_read_back(indent, metadata_file, tmp_path, capsys):
    path = tmp_path / "step.json"
    assert main([str(metadata_file), "--json", str(path)]) == 0
    path.write_text(json.dumps(json.loads(path.read_text()), indent=indent))
    assert main([str(path)]) == 1
    told = capsys.readouterr().err
    for part in ("RunMetadata or StepStats", "a Chrome trace, which is for Perfetto"):
        assert part in told
    assert str(path) in told


def test_missing_file_and_empty_folder(tmp_path):
    with pytest.raises(TraceFileError, match="nothing of that name"):
        mem_util.read_trace(tmp_path / "absent.pb")
    with pytest.raises(TraceFileError, match=r"a folder without any \*.xplane.pb"):
        mem_util.read_trace(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "--compare", "b", "c"],
        ["a", "b", "--png", "x"],
        ["--compare", "a", "b", "--json", "x"],
    ],
)
def test_arguments_that_do_not_go_together(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_one_bad_trace_does_not_hide_the_others(metadata_file, tmp_path, capsys):
    assert main([str(tmp_path / "missing.pb"), str(metadata_file)]) == 1
    told = capsys.readouterr()
    assert "missing.pb" in told.err and "conv_2" in told.out


@pytest.mark.parametrize("name", ["no_folder/b.png", "b.xyz", "b.json"])
def test_a_picture_that_cannot_be_written(name, metadata_file, tmp_path, capsys):
    """It is told before the table, as one that would have to be read again."""
    for given in ([str(metadata_file)], ["--compare", *[str(metadata_file)] * 2]):
        assert main([*given, "--png", str(tmp_path / name)]) == 1
        told = capsys.readouterr()
        assert told.err.startswith("error: cannot write: `--png`: ")
        assert told.out == "" and ".tiff" not in told.err


@pytest.mark.parametrize("option", ["--png", "--json", "--costs"])
@pytest.mark.parametrize("name", ["run_metadata.pb", "run_metadata.png", "link"])
def test_no_trace_is_written_over(option, name, metadata_file, tmp_path, capsys):
    path = metadata_file.rename(tmp_path / "run_metadata.png")
    before = path.read_bytes()
    (tmp_path / "run_metadata.pb").hardlink_to(path)
    (tmp_path / "link.png").symlink_to(path)
    (tmp_path / "link").symlink_to(path)
    cases = [[str(path)]]
    if option == "--png":
        cases += [["--compare", str(tmp_path / "other"), str(path)]]
        cases += [["--compare", str(path), str(tmp_path / "other")]]
    for given in cases:
        with pytest.raises(SystemExit) as stopped:
            main([*given, option, str(tmp_path / name)])
        assert stopped.value.code == 2
        told = capsys.readouterr()
        assert f"{option}: expected a file of its own" in told.err and not told.out
    assert path.read_bytes() == before


def test_a_picture_beside_its_trace_may_have_its_name(metadata_file, tmp_path):
    path = metadata_file.rename(tmp_path / "step")
    assert main([str(path), "--png", str(path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"step", "step.png"}


def test_no_file_of_a_profiler_is_written_over(tmp_path, capsys):
    file = tmp_path / "run" / "host.xplane.pb"
    file.parent.mkdir()
    file.write_bytes(b"as it was")
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--json", str(file)])
    assert "--json: expected a file of its own" in capsys.readouterr().err
    assert file.read_bytes() == b"as it was"


def test_a_reader_that_has_seen_enough(metadata_file):
    command = f"'{sys.executable}' -m mem_util '{metadata_file}' --timeline | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(metadata_file)
    assert "Traceback" not in done.stderr


def test_top_is_a_count(metadata_file, capsys):
    with pytest.raises(SystemExit):
        main([str(metadata_file), "--top", "-3"])
    assert "expected a count" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/gpu:0", "gpu:0", "GPU:0"])
def test_a_device_by_any_of_its_names(name, metadata_file, capsys):
    assert main([str(metadata_file), "--device", name]) == 0
    assert "/gpu:0" in capsys.readouterr().out
