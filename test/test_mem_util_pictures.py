"""Pictures and Chrome traces, of hand-made traces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from matplotlib import image
from mem_util_fixtures import chain_metadata, counter_values, gpu_metadata

import mem_util
from mem_util import NoMemoryDataError, read_run_metadata
from mem_util.plot import curves_figure
from mem_util.plot_trace import trace_figure
from mem_util.records import Span
from mem_util.trace_data import Trace

MIB = 2**20
EMPTY = Trace("nothing", {}, (), {"/cpu:0": "it was idle"})


def check_format(data):
    """The parts of the trace-event format that the viewers insist on."""
    assert set(data) >= {"traceEvents", "displayTimeUnit"}
    assert data["displayTimeUnit"] in {"ms", "ns"}
    names = set()
    for event in data["traceEvents"]:
        assert event["ph"] in {"X", "C", "M"}
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            names.add((event["name"], event["pid"], event["tid"]))
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0
        assert ("process_name", event["pid"], 0) in names
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert ("thread_name", event["pid"], event["tid"]) in names
        else:
            assert all(isinstance(v, int) for v in event["args"].values())


def check_nesting(events):
    """On one thread, complete events must not overlap."""
    threads = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for rows in threads.values():
        rows.sort(key=lambda e: (e["ts"], e["dur"]))
        for a, b in pairwise(rows):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-3


@pytest.mark.parametrize("metadata", [chain_metadata(20), gpu_metadata()])
def test_chrome_trace(tmp_path, metadata):
    traced = read_run_metadata(metadata)
    path = tmp_path / "step.json"
    traced.save_json(path)
    data = json.loads(path.read_text())
    check_format(data)
    check_nesting(data["traceEvents"])
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(traced.spans)
    counters = counter_values(data["traceEvents"])
    assert {f"live bytes {n}": p for n, p in traced.peak_bytes.items()} == {
        name: max(values) for name, values in counters.items()
    }


def test_chrome_trace_of_nothing():
    with pytest.raises(NoMemoryDataError, match=r"an empty trace .*it was idle"):
        mem_util.chrome_trace(EMPTY)


def test_picture_of_a_cpu(tmp_path):
    traced = read_run_metadata(chain_metadata(20, 1_000_000))
    traced.save_png(tmp_path / "step.png")
    pixels = image.imread(tmp_path / "step.png")
    assert pixels.shape[1] == 1800 and 700 <= pixels.shape[0] <= 1200
    assert pixels.std() > 0.05, "a blank page"


def test_axes_and_marks():
    figure = trace_figure(read_run_metadata(gpu_metadata()))
    rows = figure.axes
    assert len(rows) == 6, "two devices and the spans, each with a ranking"
    assert rows[0].get_ylabel() == "live memory, /cpu:0 (B)"
    assert rows[2].get_ylabel() == "live memory, /gpu:0 (KiB)"
    assert rows[4].get_xlabel() == "time (µs)"
    texts = [text.get_text() for text in rows[2].texts]
    assert any(t.startswith("peak 14.6 KiB, set by conv_2") for t in texts)
    bars = [text.get_text().strip() for text in rows[3].texts]
    assert bars == ["conv_0", "conv_1", "conv_2"]
    lanes = [label.get_text() for label in rows[4].get_yticklabels()]
    assert lanes == ["/cpu:0", "/gpu:0", "/gpu:0 memcpy", "/gpu:0 stream:14"]
    assert rows[0].get_xlim() == rows[4].get_xlim()


def test_the_peak_mark_sits_on_the_peak():
    line = read_run_metadata(chain_metadata(4, 1_000_000)).timelines["/cpu:0"]
    figure = trace_figure(Trace("x", {"/cpu:0": line}, (), {}))
    mark = next(ln for ln in figure.axes[0].lines if ln.get_marker() == "o")
    assert list(mark.get_ydata()) == [pytest.approx(4_000_000 / MIB)]
    assert mark.get_xdata()[0] == pytest.approx(30), "microseconds from the start"


def test_spans_alone_are_drawn_and_the_reason_is_written_below():
    span = Span("a", "MatMul", "/cpu:0", "", 10, 2_000_010)
    figure = trace_figure(Trace("x", {}, (span,), {"/cpu:0": "all is small"}))
    assert len(figure.axes) == 2
    assert "all is small" in figure.get_supxlabel()


def test_picture_of_nothing():
    with pytest.raises(NoMemoryDataError, match=r"an empty trace .*it was idle"):
        trace_figure(EMPTY)


def test_no_window_is_asked_for():
    figure = trace_figure(read_run_metadata(chain_metadata()))
    assert type(figure.canvas).__name__ == "FigureCanvasAgg"
    assert figure.canvas.manager is None, "pyplot holds on to no figure"


def test_curves_of_plain_numbers(tmp_path):
    curves = [
        ("measured", [0.0, 1.0, 2.0], [5 * MIB, 9 * MIB, MIB]),
        mem_util.Curve("predicted", [0.0, 1.0, 2.0], [5 * MIB, 8 * MIB, MIB]),
    ]
    figure = curves_figure(curves, title="Both", x_label="step")
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "live memory (MiB)")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["measured: peak 9.0 MiB", "predicted: peak 8.0 MiB"]
    mem_util.draw_curves(tmp_path / "both.png", curves)
    assert image.imread(tmp_path / "both.png").shape[:2] == (825, 1800)


@pytest.mark.parametrize("curves", [[], [("a", [], [])]])
def test_curves_without_points(tmp_path, curves):
    with pytest.raises(NoMemoryDataError, match="expected curves with points"):
        mem_util.draw_curves(tmp_path / "x.png", curves)
