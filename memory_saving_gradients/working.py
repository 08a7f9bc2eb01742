"""What loops, branches and calls need while they run: time, and memory of their own.

In the graph around it each of these is one op, whose outputs are all that is seen of
it. So its bodies are read, as graphs of their own, and simulated. The seconds of one
run, times the iterations, are the seconds of the op. What the peak of one run has above
the op's outputs becomes one more output, which nobody reads: it is there while the op
runs and not a step longer.

Of the gradient of a body that recomputes, the simulation was made when it was planned
(`inside`), and its peak is noted on the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import tensorflow as tf

from memory_saving_gradients import op_types, stored, tf_internals_bodies
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import Storage, TensorNode
from memory_saving_gradients.simulate import Timeline, simulate_stock
from memory_saving_gradients.tf_read import Reading, read
from memory_saving_gradients.trip_counts import iterations, runs_of

__all__ = ["peak_at_rest", "with_working_memory"]


@dataclass(frozen=True)
class _Run:
    """One run of a body: its peak above rest, its seconds, and if any op is heavy."""

    peak_bytes: int
    seconds: float
    heavy: bool


def with_working_memory(reading: Reading) -> Reading:
    """The same reading, in which loops, branches and calls take what they need.

    Args:
        reading: What `tf_read.read` returned.

    Returns:
        A reading whose graph has other seconds, and more tensors, for such ops. The
        tensors come after all others, and have none of TensorFlow's behind them.
    """
    ops, tensors = list(reading.graph.ops), list(reading.graph.tensors)
    runs: dict[int, _Run] = {}
    for number, op in enumerate(reading.ops):
        if op.type not in op_types.CALL_TYPES:
            continue
        bodies = tf_internals_bodies.bodies_of(op)
        found = [_run_of(body, reading.unknown_dim, runs) for body in bodies]
        if not found:
            continue
        times = 1
        if op.type in op_types.LOOP_TYPES:
            # A gradient runs as often as what it is of.
            forward = tf_internals_bodies.differentiated_by(op)
            times = iterations(op) or runs_of(forward or op)
        node = ops[number]
        # What a loop has gathered for its gradient is there besides: of the iteration
        # that runs it is the very same.
        gathered = {
            node.outputs[n] for n in stored.side_outputs(op, reading.unknown_dim)
        }
        own = sum(
            tensors[t].bytes // (times if t in gathered else 1)
            for t in node.outputs
            if tensors[t].storage is Storage.OWN
        )
        outputs, above = node.outputs, max(run.peak_bytes for run in found) - own
        if above > 0:
            outputs = (*outputs, len(tensors))
            name = f"{node.name} (while it runs)"
            tensors.append(TensorNode(len(tensors), name, number, above))
        ops[number] = replace(
            node,
            outputs=outputs,
            seconds=times * max(run.seconds for run in found),
            heavy=any(run.heavy for run in found),
        )
    graph = replace(reading.graph, ops=tuple(ops), tensors=tuple(tensors))
    return replace(reading, graph=graph)


def peak_at_rest(reading: Reading, timeline: Timeline) -> int:
    """The peak of a run, without what the gradients of bodies take while they run.

    That is the memory of gradients that recompute, and stock's do not.
    """
    graph, known = reading.graph, len(reading.tensors)
    return max(
        (
            live
            - sum(
                graph.tensors[t].bytes
                for t in graph.ops[step.op].outputs
                if t >= known and step.op >= graph.forward_count
            )
            for step, live in zip(timeline.steps, timeline.live_bytes, strict=True)
        ),
        default=0,
    )


def _run_of(body: tf.Graph, unknown_dim: int, runs: dict[int, _Run]) -> _Run:
    if id(body) not in runs:
        reading = with_working_memory(
            read((), list(body.outputs), (), unknown_dim=unknown_dim)
        )
        peak = tf_internals_bodies.noted_peak(body)
        if peak is None:
            peak = simulate_stock(Buffers(reading.graph, ())).peak_bytes
        heavy = any(op.heavy for op in reading.graph.ops)
        runs[id(body)] = _Run(peak, reading.graph.seconds, heavy)
    return runs[id(body)]
