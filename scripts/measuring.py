"""How the benchmarks measure: peaks, paired times and differences of gradients.

Peaks are those of TensorFlow's own allocator over the level at which it rests before
the call, the worst of several runs. It does not count allocations under 256 KiB on a
CPU. Times of A and B are taken in turn in one process, and only their ratios are
reported: the machine's speed drifts by more than what is to be seen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import mem_util
import memory_saving_gradients as msg
from models import Workload, chain

__all__ = [
    "Built",
    "Spread",
    "build_gradients",
    "build_step",
    "building_seconds",
    "largest_difference",
    "paired_ratios",
    "peak_bytes",
    "peaks_of",
    "requested_bytes",
    "seconds_in_turn",
    "session_peak_bytes",
    "take_gradients",
    "warm_up",
    "without_meta_optimizer",
]

CPU = "CPU:0"
LEARNING_RATE = 1e-4
Key = TypeVar("Key")
Mode = str | msg.Budget


@dataclass(frozen=True)
class Spread:
    """The middle and the ends of several measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Built:
    """A traced function, and what building its gradients took.

    Attributes:
        call: Takes the batch of the workload.
        plan: What was planned; None for stock gradients.
        building_seconds: One call of `gradients()`, planning and rewriting included.
    """

    call: Callable[..., Any]
    plan: Any
    building_seconds: float


def take_gradients(loss: tf.Tensor, variables: Sequence[tf.Variable], mode: Mode):
    """Gradients in one of the modes.

    Args:
        loss: A scalar.
        variables: What is differentiated.
        mode: "stock"; "list" (the collection, given as a list of tensors); or anything
            that `checkpoints=` takes.
    """
    if mode == "stock":
        return tf.gradients(loss, list(variables))
    checkpoints: Any = mode
    if mode == "list":
        checkpoints = tf.compat.v1.get_collection("checkpoints")
    return msg.gradients(loss, list(variables), checkpoints=checkpoints)


def _build(
    workload: Workload, mode: Mode, jit: bool, finish: Callable[..., Any]
) -> Built:
    """Traces loss and gradients, and whatever `finish` makes of them."""
    noted: dict[str, Any] = {}

    @tf.function(jit_compile=jit, autograph=False)
    def function(*batch):
        loss = workload.loss(*batch)
        started = time.perf_counter()
        gradients = take_gradients(loss, workload.variables, mode)
        noted["seconds"] = time.perf_counter() - started
        noted["plan"] = None if mode == "stock" else msg.last_plan()
        return finish(loss, gradients)

    concrete = function.get_concrete_function(*workload.batch)
    return Built(concrete, noted["plan"], noted["seconds"])


def build_step(workload: Workload, mode: Mode, jit: bool = False) -> Built:
    """A training step: loss, gradients, and plain SGD."""

    def finish(loss: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        for variable, gradient in zip(workload.variables, gradients, strict=True):
            variable.assign_sub(LEARNING_RATE * tf.convert_to_tensor(gradient))
        return loss

    return _build(workload, mode, jit, finish)


def build_gradients(workload: Workload, mode: Mode, jit: bool = False) -> Built:
    """The gradients only, returned: what a plan predicts the peak of."""

    def finish(loss: tf.Tensor, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    return _build(workload, mode, jit, finish)


def peak_bytes(run: Callable[[], Any], runs: int = 10) -> Spread:
    """Peaks of several runs over the resting level, after one run to warm up."""
    run()
    peaks = []
    for _ in range(runs):
        rest = tf.config.experimental.get_memory_info(CPU)["current"]
        tf.config.experimental.reset_memory_stats(CPU)
        run()
        peaks.append(tf.config.experimental.get_memory_info(CPU)["peak"] - rest)
    return Spread.of(peaks)


def requested_bytes(run: Callable[[], Any], runs: int = 2) -> Spread:
    """What several runs asked the allocator for at their peaks, over rest.

    A step that XLA has compiled asks for one block, and is handed out a chunk that may
    be twice as large: what the allocator counts then says little about the step.
    """
    traces = [mem_util.trace(run) for _ in range(runs)]
    return Spread.of([trace.requested_bytes["/cpu:0"] for trace in traces])


def peaks_of(run: Callable[[], Any], runs: int, jit: bool) -> Spread:
    """The peaks of several runs over rest, of whatever tells more of the step."""
    return requested_bytes(run, runs) if jit else peak_bytes(run, runs)


def session_peak_bytes(make: Callable[[], Workload], mode: str, runs: int = 3) -> int:
    """The worst peak of the gradients in a v1 session, by allocation records.

    Args:
        make: Makes the workload in the graph that is then the default one.
        mode: As in `take_gradients`.
        runs: How many traced runs.
    """
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        workload = make()
        loss = workload.loss(*workload.batch)
        gradients = take_gradients(loss, workload.variables, mode)
        session.run(v1.global_variables_initializer())
        # What is fed cannot be folded: without it the graph would be one constant.
        feed = {tensor: session.run(tensor) for tensor in workload.batch}
        peaks = []
        for _ in range(runs):
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            metadata = v1.RunMetadata()
            session.run(gradients, feed, options, metadata)
            peaks.append(mem_util.peak_memory(metadata)["/cpu:0"])
    return max(peaks)


def building_seconds(ops: int, mode: str, repeats: int = 3) -> float:
    """The median time to build gradients on a fresh graph of about so many ops."""
    seconds = []
    for _ in range(repeats):
        with tf.Graph().as_default():
            loss, weights = _residual_network(blocks=ops // 5)
            started = time.perf_counter()
            take_gradients(loss, weights, mode)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _residual_network(blocks: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Blocks of five ops on small tensors: a placeholder, and x + tanh(x @ w) * x."""
    x = tf.compat.v1.placeholder(tf.float32, [8, 8])
    weights = []
    for _ in range(blocks):
        weights.append(tf.compat.v1.placeholder(tf.float32, [8, 8]))
        x = x + tf.tanh(x @ weights[-1]) * x
    return tf.reduce_sum(x), weights


@contextmanager
def without_meta_optimizer() -> Iterator[None]:
    """Calls inside run without Grappler: equal graphs give equal bits then."""
    options = tf.config.optimizer
    before = options.get_experimental_options().get("disable_meta_optimizer", False)
    options.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        options.set_experimental_options({"disable_meta_optimizer": before})


def warm_up(modes: Sequence[str]) -> None:
    """Builds each once, so that imports and registries do not count as building."""
    for mode in ("stock", *modes):
        build_gradients(chain(20, scale=0.01), mode)


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def seconds_in_turn(
    runs: Mapping[Key, Callable[[], Any]], rounds: int
) -> dict[Key, list[float]]:
    """Times several functions in turn, after one call of each to warm up."""
    for run in runs.values():
        run()
    times: dict[Key, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run))
    return times


def paired_ratios(
    first: Callable[[], Any], second: Callable[[], Any], pairs: int = 7
) -> tuple[Spread, Spread]:
    """Times two functions in turn.

    Returns:
        Seconds of `first`, and seconds of `second` over those of `first`, pair by pair.
    """
    times = seconds_in_turn({"first": first, "second": second}, pairs)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    return Spread.of(times["first"]), Spread.of(ratios)


def largest_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest difference of two lists of gradients, on the scale of the first.

    Each variable counts by its own largest entry, plus a thousandth of the largest of
    all: a gradient that is mathematically zero is not judged relatively.
    """
    floor = 1e-3 * max(np.abs(a).max() for a in one)
    if floor == 0:
        return max(float(np.abs(b).max()) for b in other)
    return max(
        float(np.abs(a - b).max() / (np.abs(a).max() + floor))
        for a, b in zip(one, other, strict=True)
    )


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the benchmarks import it.")
