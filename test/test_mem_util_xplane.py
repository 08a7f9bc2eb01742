"""The profiler's XPlane, made by hand."""

from __future__ import annotations

from mem_util_fixtures import XSpaceBuilder

from mem_util.tf_internals import new_xspace
from mem_util.xplane import read_xspace


def test_the_undocumented_message_is_where_it_is_sought():
    space = new_xspace()
    space.planes.add(name="/host:CPU")
    assert type(space).FromString(space.SerializeToString()) == space


def test_levels_are_absolute_and_named_after_ops():
    build = XSpaceBuilder()
    build.memory(100, 1000, address=1, in_use=6000, op="a")
    build.memory(200, 3000, address=2, in_use=9000, op="b")
    build.memory(300, -1000, address=1, in_use=8000)
    build.memory(400, -500, address=77, in_use=7500)  # was there before the trace
    line = read_xspace(build.space).timelines["/cpu:0"]
    assert line.rest_bytes == 5000
    assert line.live_bytes == (6000, 9000, 8000, 7500)
    assert (line.peak_bytes, line.peak_op) == (9000, "b")
    assert [(b.op, b.end_ns) for b in line.alive_at_peak()] == [("b", None), ("a", 300)]
    assert line.ops == ("a", "b", "a", "")


def test_slack_of_chunks_at_the_peak():
    build = XSpaceBuilder()
    build.memory(100, 1000, address=1, in_use=1000, op="a", slack=300)
    build.memory(200, -1000, address=1, in_use=0, slack=300)
    build.memory(300, 2000, address=2, in_use=2000, op="b", slack=500)
    line = read_xspace(build.space).timelines["/cpu:0"]
    assert (line.peak_bytes, line.peak_slack_bytes) == (2000, 500)


def test_one_address_used_twice():
    build = XSpaceBuilder()
    for start, op in ((100, "a"), (300, "b")):
        build.memory(start, 64, address=1, in_use=64, op=op)
        build.memory(start + 100, -64, address=1, in_use=0)
    line = read_xspace(build.space).timelines["/cpu:0"]
    assert [(b.op, b.start_ns, b.end_ns) for b in line.buffers] == [
        ("a", 100, 200),
        ("b", 300, 400),
    ]


def test_ops_of_the_executor_and_of_eager_code():
    build = XSpaceBuilder()
    build.op("scope/x_1:Tanh", 100, 200)
    build.op("EagerLocalExecute: MatMul", 300, 400)
    build.op("ExecutorState::Process", 0, 500)
    build.op("EagerLocalExecute: __inference_step_57", 0, 500)
    build.op("MemoryAllocation", 1, 2)
    spans = read_xspace(build.space).spans
    assert [(s.op, s.kind, s.start_ns, s.end_ns) for s in spans] == [
        ("scope/x_1", "Tanh", 100, 200),
        ("MatMul", "MatMul", 300, 400),
    ]


def test_an_allocation_of_no_op_is_named_after_what_encloses_it():
    build = XSpaceBuilder()
    build.op("Iterator::Prefetch", 0, 900)
    build.op("Iterator::Batch", 100, 200)
    for index, time_ns in enumerate((50, 150, 300, 950)):
        build.memory(time_ns, 64, index, 64 * (index + 1))
    assert read_xspace(build.space).timelines["/cpu:0"].ops == (
        "(Iterator::Prefetch)",
        "(Iterator::Batch)",
        "(Iterator::Prefetch)",
        "",
    )


def test_gpu_memory_with_kernels():
    build = XSpaceBuilder()
    build.memory(100, 1000, 1, 1000, op="conv", allocator="GPU_0_bfc")
    build.memory(110, 50, 2, 50, op="shape", allocator="gpu_host_bfc")
    build.kernel("conv:Conv2D", 120, 180)
    traced = read_xspace(build.space)
    assert traced.peak_bytes == {"/cpu:0": 50, "/gpu:0": 1000}
    assert [(s.op, s.kind, s.lane) for s in traced.spans] == [
        ("conv", "Conv2D", "Stream #14(Compute)")
    ], "lines that the profiler derives from streams are left out"
    assert traced.notes == ()


def test_gpu_memory_without_kernels_names_the_remedy():
    build = XSpaceBuilder()
    build.memory(100, 1000, 1, 1000, op="conv", allocator="GPU_0_bfc")
    notes = read_xspace(build.space).notes
    assert any("CUPTI" in note and "LD_LIBRARY_PATH" in note for note in notes)


def test_nothing_in_it_is_a_reason_not_a_zero():
    traced = read_xspace(new_xspace())
    assert traced.peak_bytes == {}
    assert "256 KiB" in traced.missing["/cpu:0"]


def test_warnings_of_the_profiler_are_passed_on():
    space = new_xspace()
    space.warnings.append("No GPU was found")
    assert read_xspace(space).notes == ("Profiler: No GPU was found",)
