"""What `mem_util` says of arguments that cannot be, and which devices it accepts."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from mem_util_fixtures import chain_metadata, gpu_metadata

import mem_util
from mem_util import read_run_metadata
from mem_util.required import require_python

v1 = tf.compat.v1


def timeline_of(path, session):
    return mem_util.plot_memory_timeline(path, session, "Tanh:0")


def test_a_session_is_asked_for(tmp_path: Path):
    with pytest.raises(TypeError, match=r"`session` must be .* got None of type None"):
        timeline_of(tmp_path / "u.json", None)


@pytest.mark.parametrize("fetches", [[], (), {}, [[], {"a": ()}]])
def test_something_to_fetch_is_asked_for(fetches, tmp_path: Path):
    with (
        v1.Session(graph=tf.Graph()) as session,
        pytest.raises(
            ValueError, match=r"line`: `fetches` must hold .* which is empty"
        ),
    ):
        mem_util.plot_memory_timeline(tmp_path / "u.json", session, fetches)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "function",
    [mem_util.peak_memory, mem_util.print_memory_timeline, mem_util.read_run_metadata],
)
def test_the_function_that_was_called_asks_for_metadata(function):
    place = rf"^`mem_util\.{function.__name__}`: expected a RunMetadata or StepStats, "
    with pytest.raises(TypeError, match=place + "but got None of .*run_metadata="):
        function(None)
    for path in ("file.pb", Path("file.pb")):
        with pytest.raises(TypeError, match=place + r".*`mem_util\.read_trace\(path"):
            function(path)


@pytest.mark.parametrize("path", [None, 5, b"u.json"])
def test_a_path_is_asked_for(path):
    with pytest.raises(TypeError, match=r"plot_memory_timeline`: `path` must be a str"):
        timeline_of(path, None)


def test_a_missing_folder_is_named(tmp_path: Path):
    traced = read_run_metadata(chain_metadata())
    path = tmp_path / "none" / "step.png"
    for write in (
        traced.save_png,
        traced.save_json,
        lambda path: mem_util.write_costs(path, traced),
        lambda path: mem_util.draw_curves(path, [("a", [0.0], [1])]),
        lambda path: timeline_of(path, None),
    ):
        with pytest.raises(FileNotFoundError, match=r"folder of `path`, .*none.*Make"):
            write(path)


def test_a_folder_is_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="which is a folder"):
        read_run_metadata(chain_metadata()).save_png(tmp_path)


def test_a_suffix_that_is_no_picture_is_named(tmp_path: Path):
    traced = read_run_metadata(chain_metadata())
    with pytest.raises(ValueError, match=r"suffix .* picture \(.*\.png.*x\.txt"):
        traced.save_png(tmp_path / "x.txt")
    traced.save_png(tmp_path / "x.SVG")
    traced.save_png(str(tmp_path / "bare"))
    assert {path.name for path in tmp_path.iterdir()} == {"x.SVG", "bare.png"}


@pytest.mark.parametrize("function", [mem_util.measure, mem_util.trace])
def test_what_cannot_be_called_is_told_in_a_line(function):
    with pytest.raises(TypeError, match=r"function to call.*\.\.\. of type Eager") as e:
        function(tf.ones([100, 100]))
    assert f"`{function.__name__}(step, x)`" in str(e.value)
    assert len(str(e.value)) < 250 and "\n" not in str(e.value)
    for count, kind in (("2", TypeError), (None, TypeError), (-1, ValueError)):
        with pytest.raises(kind, match=rf"\.{function.__name__}`: `warm_ups` must be"):
            function(len, [], warm_ups=count)


def test_a_tensor_for_a_path_or_a_session_is_told_in_a_line(tmp_path: Path):
    tensor = tf.ones([100, 100])
    for path, session in ((tensor, None), (tmp_path / "a.json", tensor)):
        with pytest.raises(TypeError, match=r"\.\.\. of type EagerTensor") as caught:
            timeline_of(path, session)
        assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [mem_util.measure, mem_util.trace])
def test_in_a_graph_nothing_can_be_measured(function):
    with (
        tf.Graph().as_default(),
        pytest.raises(RuntimeError, match=r"while a graph is built.*plot_memory_time"),
    ):
        function(lambda: 1)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "CPU",
        "/cpu",
        "cpu:0",
        "CPU:0",
        "/cpu:0",
        "device:CPU:0",
        "/device:CPU:0",
        "/job:localhost/replica:0/task:0/device:CPU:0",
    ],
)
def test_names_of_a_device_that_leave_no_doubt(name: str, capsys):
    metadata = chain_metadata(3)
    mem_util.print_memory_timeline(metadata, name)
    assert capsys.readouterr().out.startswith("/cpu:0\n")
    assert mem_util.peak_memory(metadata)[name] == 3000
    assert "/cpu:0 " in mem_util.summary(read_run_metadata(metadata), name)


@pytest.mark.parametrize("name", ["gpu", "GPU:0", "/cpu:1", "c", "", 5, None])
def test_other_devices_are_not_there(name):
    peaks = mem_util.peak_memory(chain_metadata(3))
    with pytest.raises(mem_util.MissingDeviceError, match="data for: /cpu:0"):
        peaks[name]


def test_a_kind_of_which_there_are_two_is_in_doubt():
    peaks = mem_util.PeakBytes({"/cpu:0": 1, "/cpu:1": 2}, {"/gpu:0": "it slept"})
    assert peaks["CPU:1"] == 2
    with pytest.raises(mem_util.MissingDeviceError, match="device cpu, because it is"):
        peaks["cpu"]
    with pytest.raises(mem_util.MissingDeviceError, match="because it slept"):
        peaks["gpu"]


def missing(fn, *args) -> str:
    return mem_util.measure(fn, *args).missing["/cpu:0"]


def test_numpy_alone_is_no_folded_graph():
    why = missing(lambda: np.ones([10, 10]))
    assert "constants once traced, as those of numpy" in why and "fed" not in why


def test_python_code_in_a_graph_is_named():
    @tf.function
    def fn(x):
        return tf.py_function(lambda a: a * 2, [x], tf.float32)

    why = missing(fn, tf.ones([10]))
    assert "ran Python code (EagerPyFunc)" in why and "fed" not in why


def test_an_iterator_is_named_whole():
    rows = iter(tf.data.Dataset.range(10))
    why = missing(tf.function(lambda: next(rows)))
    assert "also uses a resource" in why and "Pass a batch" in why
    assert "ResourceHandle" not in why and why.count('"') % 2 == 0


def run_session(fetches, feeds=None):
    metadata = v1.RunMetadata()
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    with v1.Session() as session:
        session.run(fetches, feeds, options=options, run_metadata=metadata)
    return metadata


def test_reasons_of_a_step_without_allocations():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [100])
        feeds = {x: np.ones(100)}
        cases = [
            (tf.tanh(tf.ones([100])), None, "folded to a constant: feed"),
            (tf.group(tf.tanh(x)), feeds, "only grouped is pruned"),
            (tf.numpy_function(np.sin, [x], tf.float32), feeds, r"Python code \(PyFun"),
            (tf.reshape(x, [10, 10]), feeds, r"Reshape\) passes on"),
        ]
        for fetches, fed, why in cases:
            with pytest.raises(mem_util.NoMemoryDataError, match=why):
                mem_util.peak_memory(run_session(fetches, fed))


def test_times_that_are_missing_are_no_matter_of_peaks(caplog):
    metadata = gpu_metadata(streams=False)
    with caplog.at_level(logging.WARNING, "mem_util"):
        mem_util.peak_memory(metadata)
        assert not caplog.records
        mem_util.op_seconds(read_run_metadata(metadata))
    assert ["CUPTI" in record.message for record in caplog.records] == [True]


def test_public_names_are_listed(monkeypatch: pytest.MonkeyPatch):
    assert dir(mem_util) == sorted(mem_util.__all__)
    assert "PeakMemory" in dir(mem_util)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    found = dict(inspect.getmembers(mem_util))
    assert set(found) == set(mem_util.__all__) - {"PeakMemory"}


def test_old_python_is_said_clearly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(ImportError, match=r"`mem_util` needs Python 3\.10 .* 3\.9"):
        require_python()


def test_no_tensorflow_is_said_in_one_line(tmp_path: Path):
    (tmp_path / "tensorflow.py").write_text("raise ModuleNotFoundError('none here')")
    (tmp_path / "a.pb").write_bytes(chain_metadata(3).SerializeToString())
    path = [str(tmp_path), str(Path(mem_util.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-m", "mem_util", "a.pb"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: `mem_util.read_trace` needs TensorFlow")
    assert "pip install tensorflow" in done.stderr and "Traceback" not in done.stderr


def test_no_tensorflow_is_said_by_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    for call in (
        lambda: mem_util.measure(len, []),
        lambda: mem_util.trace(len, []),
        lambda: mem_util.PeakMemory,
    ):
        with pytest.raises(mem_util.MissingTensorFlowError, match="pip install"):
            call()
