"""Large traces: how long reading and drawing take, and how much memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from typing import ClassVar

import pytest
from mem_util_fixtures import XSpaceBuilder, chain_metadata

import mem_util
from mem_util.xplane import read_xspace


def timed(fn, *args):
    start = time.process_time()  # other work on the machine is no failure
    result = fn(*args)
    return result, time.process_time() - start


@pytest.fixture(scope="module")
def figure_was_drawn_once(tmp_path_factory):
    """Imports matplotlib and fills its font cache outside of the timed part."""
    traced = mem_util.read_run_metadata(chain_metadata(2))
    traced.save_png(tmp_path_factory.mktemp("once") / "x.png")


def test_10_000_ops_of_a_session(tmp_path, figure_was_drawn_once):
    path = tmp_path / "run_metadata.pb"
    path.write_bytes(chain_metadata(10_000).SerializeToString())
    traced, parsing = timed(mem_util.read_trace, path)
    _, drawing = timed(traced.save_png, tmp_path / "x.png")
    assert traced.peak_bytes == {"/cpu:0": 10_000_000}
    assert parsing <= 2
    assert drawing <= 3


def test_10_000_ops_of_the_profiler():
    build = XSpaceBuilder()
    for index in range(10_000):
        build.memory(100 * index, 64, index, 64 * (index + 1), op="x")
        build.op("x:Tanh", 100 * index, 100 * index + 50)
    for index in range(10_000):
        time_ns = 1_000_000 + 100 * index
        build.memory(time_ns, -64, index, 64 * (9_999 - index))
    traced, parsing = timed(read_xspace, build.space)
    assert traced.peak_bytes == {"/cpu:0": 640_000}
    assert parsing <= 2


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_50_000_ops_within_15_seconds_and_1_gb(tmp_path):
    path = tmp_path / "run_metadata.pb"
    path.write_bytes(chain_metadata(50_000).SerializeToString())
    code = (
        "import re, sys, time\n"
        "from mem_util.__main__ import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        # Not ru_maxrss, which a process inherits from the one that started it.
        "status = open('/proc/self/status').read()\n"
        "peak = int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1])\n"
        "print(time.process_time(), 1024 * peak)\n"
    )
    png, json = tmp_path / "x.png", tmp_path / "x.json"
    command = [sys.executable, "-c", code, str(path), "--png", str(png)]
    done = subprocess.run(
        [*command, "--json", str(json)], capture_output=True, text=True, check=True
    )
    seconds, peak_bytes = map(float, done.stdout.splitlines()[-1].split())
    assert seconds < 15
    assert peak_bytes < 1e9
    assert png.stat().st_size < 1e6


class FakeTqdm:
    """Records how it is called."""

    calls: ClassVar[list[dict[str, object]]] = []

    def __init__(self, **options):
        self.calls.append({**options, "steps": 0})

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, steps):
        self.calls[-1]["steps"] += steps


def test_progress_bar_only_where_someone_looks(monkeypatch):
    fake = types.ModuleType("tqdm")
    fake.tqdm = FakeTqdm
    monkeypatch.setitem(sys.modules, "tqdm", fake)
    for tty in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda tty=tty: tty)
        mem_util.read_run_metadata(chain_metadata(3))
        call = FakeTqdm.calls[-1]
        assert (call["total"], call["steps"]) == (3, 3)
        assert (call["disable"], call["delay"]) == (not tty, 1.0)


def test_no_tqdm_no_bar(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert mem_util.peak_memory(chain_metadata(3)) == {"/cpu:0": 3000}
