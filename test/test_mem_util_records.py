"""Timelines out of hand-made records: pure data, no TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_util import (
    NoMemoryDataError,
    Record,
    Span,
    Timeline,
    Trace,
    build_timeline,
    format_bytes,
    measure,
    plot_memory_timeline,
)
from mem_util.lanes import assign_lanes, thin_curve, thin_spans


def test_levels_peak_and_its_op():
    records = [
        Record(10, 100, "a", 1),
        Record(20, 50, "b", 2),
        Record(30, -100, "", 1),
        Record(40, 20, "c", 3),
        Record(50, -50, "", 2),
    ]
    line = build_timeline("/cpu:0", records)
    assert line.live_bytes == (100, 150, 50, 70, 20)
    assert (line.peak_bytes, line.peak_op, line.peak_time_ns) == (150, "b", 20)
    assert [b.op for b in line.alive_at_peak()] == ["a", "b"]
    assert [(b.op, b.end_ns) for b in line.buffers] == [
        ("a", 30),
        ("b", 50),
        ("c", None),
    ]
    assert line.ops[2] == "a", "a free is named after the op that allocated"


def test_at_equal_times_memory_is_taken_before_it_is_given_back():
    records = [
        Record(10, 100, "a", 1),
        Record(20, -100, "", 1),
        Record(20, 100, "b", 2),
    ]
    line = build_timeline("/cpu:0", records)
    assert line.live_bytes == (100, 200, 100)
    assert [b.op for b in line.alive_at_peak()] == ["a", "b"]


def test_order_of_records_does_not_matter():
    records = [Record(t, size, "x", size) for t, size in [(3, 5), (1, 7), (2, 9)]]
    assert build_timeline("d", records) == build_timeline("d", records[::-1])


def test_free_without_allocation_is_left_out_and_said():
    line = build_timeline("/cpu:0", [Record(5, -30, "", 9), Record(10, 100, "a", 1)])
    assert line.live_bytes == (100,)
    assert "1 free without an allocation" in line.notes[0]


def test_free_of_the_rest_lowers_a_known_rest():
    records = [Record(5, -30, "", 9), Record(10, 20, "a", 1)]
    line = build_timeline("/cpu:0", records, rest_bytes=80)
    assert line.live_bytes == (50, 70)
    assert line.peak_bytes == 80
    assert line.peak_op == "(alive before the first record)"
    assert line.notes == ()


@pytest.mark.parametrize("records", [[], [Record(1, -5, "", 1)], [Record(1, 0, "a")]])
def test_nothing_allocated_is_an_error_not_zero(records):
    with pytest.raises(NoMemoryDataError, match="expected allocations on /cpu:0"):
        build_timeline("/cpu:0", records)


lives = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 9)), min_size=1
)


@settings(deadline=None)  # other work on the machine is no failure
@given(lives)
def test_peak_equals_the_buffers_that_live_at_once(intervals):
    """Brute force: at each instant, add up the buffers that contain it."""
    records, buffers = [], []
    for key, (start, length, size) in enumerate(intervals):
        records += [Record(start, size, str(key), key)]
        records += [Record(start + length, -size, "", key)]
        buffers.append((start, start + length, size))
    line = build_timeline("d", records)
    instants = range(62)
    alive = [sum(s for a, b, s in buffers if a <= t <= b) for t in instants]
    assert line.peak_bytes == max(alive)
    assert sum(b.bytes for b in line.alive_at_peak()) == line.peak_bytes
    assert line.live_bytes[-1] == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-5, 5)), max_size=40))
def test_any_records_give_a_level_never_below_zero_or_an_error(pairs):
    records = [Record(t, size, "x", abs(size)) for t, size in pairs]
    try:
        line = build_timeline("d", records)
    except NoMemoryDataError:
        assert all(size <= 0 for _, size in pairs)
        return
    assert min(line.live_bytes) >= 0
    assert line.peak_bytes > 0
    assert line.times_ns == tuple(sorted(line.times_ns))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (22_681_600, "21.6 MiB"),
        (120_300_000, "115 MiB"),
        (2_700_000_000, "2.5 GiB"),
        (-1500, "-1.5 KiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def _span(start, end, device="/cpu:0", lane="", op="x", kind="X"):
    return Span(op, kind, device, lane, start, end)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_lanes_hold_all_spans_without_overlap(pairs):
    spans = sorted(
        (_span(start, start + length) for start, length in pairs),
        key=lambda span: span.start_ns,
    )
    lanes = assign_lanes(spans)
    assert sum(len(lane) for lane in lanes.values()) == len(spans)
    for lane in lanes.values():
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(lane))


def test_streams_of_a_gpu_keep_their_lanes_and_threads_of_a_cpu_are_packed():
    spans = [
        _span(0, 5, lane="thread a"),
        _span(6, 9, lane="thread b"),
        _span(0, 5, "/gpu:0", "stream:14"),
        _span(6, 9, "/gpu:0", "memcpy"),
    ]
    assert list(assign_lanes(sorted(spans, key=lambda s: s.start_ns))) == [
        ("/cpu:0", "", 0),
        ("/gpu:0", "memcpy", 0),
        ("/gpu:0", "stream:14", 0),
    ]


def test_thinned_spans_are_few_and_cover_the_same_time():
    spans = [_span(10 * i, 10 * i + 9) for i in range(50_000)]
    thinned = thin_spans(spans, resolution_ns=500)
    assert len(thinned) <= 1001
    assert (thinned[0].start_ns, thinned[-1].end_ns) == (0, spans[-1].end_ns)


def test_a_thinned_span_has_the_kind_of_the_longest():
    spans = [_span(0, 1, kind="A"), _span(1, 8, kind="B"), _span(8, 9, kind="C")]
    assert [s.kind for s in thin_spans(spans, 100)] == ["B"]


def test_thinned_curve_keeps_spike_and_dip():
    times = list(range(100_000))
    levels = [5.0] * len(times)
    levels[33_333], levels[66_666] = 9.0, 1.0
    kept_times, kept = thin_curve(times, levels)
    assert len(kept) <= 4000
    assert (kept_times[kept.index(9.0)], kept_times[kept.index(1.0)]) == (
        33_333,
        66_666,
    )
    assert (kept_times[0], kept_times[-1]) == (0, 99_999)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=99))
def test_thinned_curve_of_equal_times_survives(levels):
    assert thin_curve([1.0] * len(levels), levels, limit=8)[1]


def test_import_is_cheap():
    code = (
        "import sys, mem_util, mem_util.__main__\n"
        "heavy = {'tensorflow', 'keras', 'matplotlib', 'numpy', 'tqdm'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert not any(m.startswith('memory_saving') for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reprs_are_short():
    records = [Record(time_ns=n, bytes=2**20, op=f"op{n}") for n in range(5000)]
    line = build_timeline("/cpu:0", records)
    assert repr(line) == "<Timeline of /cpu:0: 5000 records, peak 4.9 GiB>"
    traced = Trace("a test", {"/cpu:0": line}, (), {})
    assert str(traced) == "<Trace: /cpu:0 peak 4.9 GiB, 0 runs of ops, from a test>"
    assert "empty" in repr(Timeline("/cpu:0", (), (), (), ()))


def test_what_cannot_be_measured():
    with pytest.raises(TypeError, match=r"a function to call, but got 3 of type int"):
        measure(3)
    with pytest.raises(ValueError, match=r"`warm_ups` must be at least 0, but got -1"):
        measure(print, warm_ups=-1)
    with pytest.raises(TypeError, match=r"`warm_ups` must be an int, but got 1.5"):
        measure(print, warm_ups=1.5)


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_path_that_names_no_file(path):
    with pytest.raises(ValueError, match="must name a file"):
        plot_memory_timeline(path, None, None)


def test_requested_bytes_are_without_slack_and_rest():
    records = [Record(10, 100, "a", 1, 30), Record(20, 50, "b", 2), Record(30, -100)]
    records[2] = Record(30, -100, key=1)
    line = build_timeline("/cpu:0", records, rest_bytes=1000)
    assert line.requested_curve() == ([10, 20, 30], [70, 120, 50])
    assert line.requested_bytes == 120
    assert Timeline("/cpu:0", (), (), (), ()).requested_bytes == 0
