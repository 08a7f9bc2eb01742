"""A plan's simulated timeline beside the traced one, step by step.

The problem: the simulation knows steps and no clock, the trace knows a clock and no
steps. A busy step lasts a thousand times as long as a small one, and two threads run
ops in an order of their own, so neither axis can simply be stretched over the other.

They are aligned by the names of ops. For each simulated step, the measured level is the
most that was alive while the op of that name ran, from its start to its end. Nothing is
assumed about the order in between. A step without a run of its own (Grappler folded or
fused it) has no measured level. Levels count the bytes that were asked for: the
allocator's chunks are larger by an amount that depends on what lay in its bins before.
Buffers that the profiler does not see are left out of the simulation as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import mem_util

__all__ = [
    "UNSEEN_BYTES",
    "Disagreement",
    "Overlay",
    "overlay",
    "simulated_levels",
    "step_names",
]

UNSEEN_BYTES = 256 * 1024
"""What is smaller is seen neither by the profiler nor by the allocator on a CPU."""


@dataclass(frozen=True)
class Disagreement:
    """Where a simulation is most wrong.

    Attributes:
        step: The step at which the two differ most.
        start: The step at which more than half of that difference came up.
        bytes: Measured minus predicted at `step`.
    """

    step: int
    start: int
    bytes: int


@dataclass(frozen=True)
class Overlay:
    """Live bytes of one run, as predicted and as measured, for each simulated step.

    Attributes:
        names: The op of each step.
        kinds: The type of each of these ops.
        predicted_bytes: Alive while it runs, as simulated, small buffers left out.
        measured_bytes: The same as traced, above rest; NaN where the op did not run.
        first_backward: The number of forward steps.
        plan_peak_bytes: The plan's figure, small buffers included.
        measured_peak_bytes: The traced one, over all of the run.
        slack_bytes: How much larger the traced peak is in the allocator's chunks.
        peak_op: What allocated last at the measured peak.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    predicted_bytes: np.ndarray
    measured_bytes: np.ndarray
    first_backward: int
    plan_peak_bytes: int
    measured_peak_bytes: int
    slack_bytes: int
    peak_op: str

    @property
    def predicted_peak_bytes(self) -> int:
        """The simulated peak of what can be seen."""
        return int(self.predicted_bytes.max())

    @property
    def ratio(self) -> float:
        """The measured peak over the predicted one."""
        return self.measured_peak_bytes / self.predicted_peak_bytes

    @property
    def largest(self) -> Disagreement:
        """The largest difference at any step, and where it starts."""
        difference = np.nan_to_num(self.measured_bytes - self.predicted_bytes)
        step = int(np.abs(difference).argmax())
        # In the direction of the largest, so that noise of the other sign is no start.
        towards = difference[: step + 1] * np.sign(difference[step])
        seen = ~np.isnan(self.measured_bytes[: step + 1])
        below = np.flatnonzero((towards <= towards[step] / 2) & seen)
        start = int(below[-1]) + 1 if below.size else 0
        return Disagreement(step, start, int(difference[step]))


def step_names(plan: Any) -> list[str]:
    """The name of the op that each step of a plan's timeline runs.

    A copy is named after its original, as the library does in a graph in which one
    gradient was taken.
    """
    ops = plan.reading.graph.ops
    return [
        f"recompute/{ops[step.op].name}" if step.copy else ops[step.op].name
        for step in plan.timeline.steps
    ]


def simulated_levels(
    plan: Any,
    *,
    least_bytes: int = 0,
    holds_gradients: bool = True,
    stock: bool = False,
) -> np.ndarray:
    """The plan's schedule simulated once more, as a measuring tool would see it.

    Args:
        plan: What `last_plan()` returned.
        least_bytes: Buffers under that size count as nothing: the allocator's
            statistics and the profiler do not see those under 256 KiB on a CPU.
        holds_gradients: Whether the caller holds all gradients to the end, as the plan
            assumes; otherwise each is gone when it has been made and read, as in SGD.
        stock: Whether the untouched graph is meant.

    Returns:
        Live bytes at each step of `plan.timeline`, or of `plan.stock`.
    """
    from memory_saving_gradients.buffers import Buffers
    from memory_saving_gradients.order import backward_order
    from memory_saving_gradients.simulate import simulate, simulate_stock

    graph = plan.reading.graph
    if not holds_gradients:
        graph = replace(graph, results=())
    buffers = Buffers(graph, backward_order(graph))
    buffers.size = [size if size >= least_bytes else 0 for size in buffers.size]
    if plan.recomputed and not stock:
        return np.array(simulate(buffers, plan.schedule).live_bytes)
    return np.array(simulate_stock(buffers).live_bytes)


def overlay(plan: Any, trace: mem_util.Trace, device: str = "/cpu:0") -> Overlay:
    """Lays a traced run of the gradients over the simulated one.

    Args:
        plan: What `last_plan()` returned for the graph that ran.
        trace: `mem_util.trace` of one call.
        device: Whose memory it is.
    """
    names = step_names(plan)
    graph, steps = plan.reading.graph, plan.timeline.steps
    timeline = trace.timeline(device)
    times, levels = map(np.array, timeline.requested_curve())
    top = int(levels.argmax())
    chunks = timeline.peak_bytes - timeline.rest_bytes
    return Overlay(
        names=tuple(names),
        kinds=tuple(graph.ops[step.op].type for step in steps),
        predicted_bytes=simulated_levels(plan, least_bytes=UNSEEN_BYTES).astype(float),
        measured_bytes=_levels_while_running(trace.spans, names, times, levels),
        first_backward=sum(
            not step.copy and step.op < graph.forward_count for step in steps
        ),
        plan_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=int(levels[top]),
        slack_bytes=chunks - int(levels[top]),
        peak_op=_allocated_last(timeline.buffers, int(times[top])),
    )


def _levels_while_running(
    spans: Sequence[mem_util.Span],
    names: Sequence[str],
    times: np.ndarray,
    levels: np.ndarray,
) -> np.ndarray:
    """For each name the highest level during its first span, else NaN."""
    ran: dict[str, mem_util.Span] = {}
    for span in spans:
        ran.setdefault(span.op, span)
    found = np.full(len(names), np.nan)
    for index, name in enumerate(names):
        if name not in ran:
            continue
        # From the level at which it starts, which is 0 before the first record.
        first = np.searchsorted(times, ran[name].start_ns, side="left") - 1
        last = np.searchsorted(times, ran[name].end_ns, side="right")
        found[index] = levels[max(first, 0) : last].max(initial=0)
    return found


def _allocated_last(buffers: Sequence[mem_util.Buffer], time_ns: int) -> str:
    before = [buffer for buffer in buffers if buffer.start_ns <= time_ns]
    return max(before, key=lambda buffer: buffer.start_ns).op


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: plot_prediction.py imports it.")
