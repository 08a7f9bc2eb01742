"""Allocation records of v1 sessions, made by hand: what is odd, and what a GPU adds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tensorflow as tf
from mem_util_fixtures import (
    CPU,
    GPU,
    ORIGIN_US,
    add_node,
    chain_metadata,
    gpu_metadata,
)

import mem_util
from mem_util import NoMemoryDataError, peak_memory, read_run_metadata
from mem_util.run_metadata import allocator_device, short_device_name


@pytest.mark.parametrize(
    ("name", "short", "rest"),
    [
        (CPU, "/cpu:0", ""),
        (GPU, "/gpu:0", ""),
        ("/device:GPU:1/stream:all", "/gpu:1", "stream:all"),
        (f"{GPU}/memcpy", "/gpu:0", "memcpy"),
        ("/job:worker/replica:0/task:0/cpu:0", "/cpu:0", ""),
        ("/job:worker/replica:0/task:3/device:CPU:1", "/task:3/cpu:1", ""),
        ("/job:ps/replica:0/task:0/device:CPU:0", "/job:ps/cpu:0", ""),
        ("something else", "something else", ""),
    ],
)
def test_short_device_name(name, short, rest):
    assert short_device_name(name) == (short, rest)


@pytest.mark.parametrize(
    ("allocator", "device", "owner"),
    [
        ("GPU_0_bfc", "/gpu:0", "/gpu:0"),
        ("GPU_1_bfc", "/cpu:0", "/gpu:1"),
        ("gpu_host_bfc", "/gpu:0", "/cpu:0"),
        ("cuda_host_bfc", "/gpu:1", "/cpu:0"),
        ("cpu", "/gpu:0", "/cpu:0"),
        ("mklcpu", "/cpu:1", "/cpu:1"),
        ("", "/gpu:0", "/gpu:0"),
    ],
)
def test_memory_belongs_to_the_device_of_its_allocator(allocator, device, owner):
    assert allocator_device(allocator, device) == owner


def test_cpu_only():
    assert peak_memory(chain_metadata(ops=4, size=1000)) == {"/cpu:0": 4000}


def test_step_stats_alone_serve_as_well():
    assert peak_memory(chain_metadata().step_stats) == {"/cpu:0": 4000}


def test_absent_device_says_so_and_is_a_key_error():
    peaks = peak_memory(chain_metadata())
    with pytest.raises(KeyError, match="no data for device /gpu:0, because it is not"):
        peaks["/gpu:0"]
    assert peaks.get("/gpu:0") is None


def test_two_devices():
    metadata = chain_metadata(ops=2, size=10)
    second = CPU.replace("CPU:0", "CPU:1")
    metadata.MergeFrom(chain_metadata(ops=3, size=100, device=second))
    assert peak_memory(metadata) == {"/cpu:0": 20, "/cpu:1": 300}


def test_gpu_memory_and_times():
    traced = read_run_metadata(gpu_metadata())
    assert traced.peak_bytes == {"/cpu:0": 164, "/gpu:0": 15_000}
    lanes = {(span.device, span.lane) for span in traced.spans}
    assert lanes == {
        ("/cpu:0", ""),
        ("/gpu:0", ""),
        ("/gpu:0", "stream:14"),
        ("/gpu:0", "memcpy"),
    }, "stream:all repeats stream:14"
    kinds = {span.kind for span in traced.spans if span.lane}
    assert kinds == {"Conv2D", "MEMCPYHtoD"}
    assert traced.notes == ()


def test_stream_all_is_read_where_it_is_alone():
    metadata = gpu_metadata(streams=False)
    add_node(metadata, "/device:GPU:0/stream:all", "conv_0:Conv2D", ORIGIN_US + 20, 8)
    spans = read_run_metadata(metadata).spans
    assert [s.op for s in spans if s.lane == "stream:all"] == ["conv_0:Conv2D"]


def test_missing_cupti_is_said_with_the_remedy():
    traced = read_run_metadata(gpu_metadata(streams=False))
    assert traced.peak_bytes["/gpu:0"] == 15_000
    assert any("CUPTI was not loaded" in note for note in traced.notes)
    assert any("export LD_LIBRARY_PATH=" in note for note in traced.notes)


def test_streams_without_the_device_itself():
    metadata = tf.compat.v1.RunMetadata()
    add_node(metadata, "/device:GPU:0/stream:14", "conv:Conv2D", ORIGIN_US, 8)
    with pytest.raises(NoMemoryDataError, match="entries of streams only"):
        peak_memory(metadata)


def test_empty_metadata():
    with pytest.raises(NoMemoryDataError, match="FULL_TRACE"):
        peak_memory(tf.compat.v1.RunMetadata())


def test_empty_step_stats_of_a_device():
    metadata = tf.compat.v1.RunMetadata()
    metadata.step_stats.dev_stats.add(device=CPU)
    with pytest.raises(NoMemoryDataError, match="its step stats are empty"):
        peak_memory(metadata)


def test_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="expected a RunMetadata or StepStats, but got"):
        peak_memory({"step_stats": None})


def test_one_zero_timestamp_takes_the_start_of_the_op():
    metadata = chain_metadata(ops=2, size=10)
    late = ORIGIN_US + 5
    add_node(metadata, CPU, "x", late, 1, [(0, 7), (ORIGIN_US + 6, -7)])
    line = read_run_metadata(metadata).timelines["/cpu:0"]
    assert line.times_ns[0] == ORIGIN_US * 1000, "not at the epoch"
    assert [b.start_ns for b in line.buffers if b.op == "x"] == [late * 1000]


def test_only_zero_timestamps_have_no_order_hence_no_peak():
    metadata = tf.compat.v1.RunMetadata()
    add_node(metadata, CPU, "x", 0, 1, [(0, 7), (0, -7)])
    with pytest.raises(
        NoMemoryDataError, match="all its 2 allocation records have time"
    ):
        peak_memory(metadata)


def test_an_op_recorded_twice_counts_once():
    metadata = chain_metadata(ops=3, size=10)
    entry = metadata.step_stats.dev_stats[0]
    entry.node_stats.add().CopyFrom(entry.node_stats[1])
    traced = read_run_metadata(metadata)
    assert traced.peak_bytes == {"/cpu:0": 30}
    assert "1 op recorded twice" in traced.notes[0]


def test_two_equal_outputs_of_one_op_count_twice():
    metadata = tf.compat.v1.RunMetadata()
    t = ORIGIN_US
    add_node(metadata, CPU, "split", t, 1, [(t, 9), (t, 9), (t + 5, -9), (t + 6, -9)])
    assert peak_memory(metadata) == {"/cpu:0": 18}


def test_free_without_allocation():
    metadata = chain_metadata(ops=2, size=10)
    add_node(metadata, CPU, "x", ORIGIN_US, 1, [(ORIGIN_US, -500)])
    traced = read_run_metadata(metadata)
    assert traced.peak_bytes == {"/cpu:0": 20}
    assert "left out 1 free" in traced.notes[0]


def test_negative_times_and_lengths():
    metadata = chain_metadata(ops=2, size=10)
    node = add_node(metadata, CPU, "x", -5, -3, [(-7, 40), (ORIGIN_US, -40)])
    node.all_start_nanos = -5000
    traced = read_run_metadata(metadata)
    assert traced.peak_bytes == {"/cpu:0": 20}
    assert all(span.end_ns >= span.start_ns > 0 for span in traced.spans)


def test_print_memory_timeline(capsys):
    mem_util.print_memory_timeline(gpu_metadata(), device="/gpu:0")
    out = capsys.readouterr().out
    assert "/cpu:0" not in out
    assert "peak 14.6 KiB, set by conv_2" in out
    assert out.count("<- peak") == 1
    mem_util.print_memory_timeline(gpu_metadata(), ignore_less_than_bytes=1000)
    out = capsys.readouterr().out
    assert "/cpu:0" in out and "feed" not in out


def test_print_memory_timeline_of_an_absent_device():
    with pytest.raises(NoMemoryDataError, match="no data for device /gpu:7"):
        mem_util.print_memory_timeline(chain_metadata(), device="/gpu:7")


def test_op_seconds_prefers_kernels_to_launches():
    seconds = mem_util.op_seconds(read_run_metadata(gpu_metadata()))
    assert seconds["conv_0"] == pytest.approx(8e-6)
    assert seconds["feed"] == pytest.approx(5e-6)


def test_costs_leave_out_what_was_too_short_for_the_clock(tmp_path):
    traced = read_run_metadata(chain_metadata(3))
    spans = [
        replace(s, end_ns=s.start_ns) if s.op == "op_1" else s for s in traced.spans
    ]
    path = tmp_path / "costs.json"
    mem_util.write_costs(path, replace(traced, spans=spans))
    text = path.read_text("utf-8")
    assert [line.partition(":")[0] for line in text.splitlines()] == [
        "{",
        ' "op_0"',
        ' "op_2"',
        "}",
    ]


def test_timeline_of_nothing_is_an_error_and_no_silence():
    with pytest.raises(NoMemoryDataError, match="FULL_TRACE"):
        mem_util.print_memory_timeline(tf.compat.v1.RunMetadata())
