#!/usr/bin/env python3
"""Trains a small ResNet on real images, with stock gradients, "memory" and "speed".

A pre-activation ResNet with batch norm learns the handwritten digits that come with
scikit-learn, resized to 32 x 32, by plain SGD: once as a v1 graph in a session, once as
a `tf.function`. Nothing differs between the rows but the call that takes the gradients.

  peak         most live bytes over rest in a training step (v1: by allocation records,
               worst of three; tf.function: by the allocator's statistics)
  step         median seconds of a step; the three take their steps in turn
  difference   largest difference of any gradient from stock's, over the largest entry
               of that gradient

Prints one table, and draws the live bytes over the step into OUT/demo.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np

from arguments import command_line, count
from demo_network import IMAGES, Batch, Weights, digits, loss_of, resnet
from tables import MIB, mebibytes, table

MODES = ("stock", "memory", "speed")
LEARNING_RATE = 0.2


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out"), help="folder of the picture (out)")
    add("--steps", type=count(), default=8, help="training steps of each row (8)")
    add(
        "--batch",
        type=count(most=IMAGES),
        default=128,
        help=f"images in a batch, at most {IMAGES} (128)",
    )
    add(
        "--blocks",
        type=count(),
        default=5,
        help="blocks in each of the three stages (5)",
    )
    return parser.parse_args(arguments)


# ---- the one line that differs, and what both kinds of training share


def gradients_of(loss: Any, weights: Weights, mode: str) -> list[Any]:
    """The line that a user changes."""
    import tensorflow as tf

    import memory_saving_gradients

    if mode == "stock":
        return tf.gradients(loss, weights.variables)
    return memory_saving_gradients.gradients(loss, weights.variables, checkpoints=mode)


def descend(weights: Weights, gradients: Sequence[Any]) -> list[Any]:
    """Plain SGD."""
    return [
        variable.assign_sub(LEARNING_RATE * gradient)
        for variable, gradient in zip(weights.variables, gradients, strict=True)
    ]


@dataclass(frozen=True)
class Trainer:
    """One way of training with one kind of gradients, ready for its steps.

    Attributes:
        step: Trains on a batch and returns the loss.
        gradients: The gradients of a batch, as arrays; changes nothing.
        peak: Runs a step; bytes over rest, and the curve (seconds, bytes) if known.
    """

    step: Callable[[Batch], float]
    gradients: Callable[[Batch], list[np.ndarray]]
    peak: Callable[[Batch], tuple[int, Any]]


def in_a_session(mode: str, blocks: int, size: int) -> Trainer:
    """A v1 graph of its own, with its session."""
    import tensorflow as tf

    import mem_util

    v1 = tf.compat.v1
    weights = Weights()
    with tf.Graph().as_default() as graph:
        images = v1.placeholder(tf.float32, [size, 32, 32, 1])
        labels = v1.placeholder(tf.int32, [size])
        loss = loss_of(weights, blocks, images, labels)
        gradients = gradients_of(loss, weights, mode)
        train = tf.group(descend(weights, gradients))
        initialize = v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run(initialize)

    def fed(batch: Batch) -> dict[Any, np.ndarray]:
        return dict(zip((images, labels), batch, strict=True))

    def peak(batch: Batch) -> tuple[int, Any]:
        fetches = [loss, train]
        traces = [mem_util.trace_session(session, fetches, fed(batch)) for _ in "123"]
        timelines = [trace.timeline("/cpu:0") for trace in traces]
        # The worst peak counts; the least disturbed run is the one to look at.
        curve = min((line.curve() for line in timelines), key=lambda c: c[0][-1])
        return max(line.peak_bytes - line.rest_bytes for line in timelines), curve

    return Trainer(
        step=lambda batch: session.run([loss, train], fed(batch))[0],
        gradients=lambda batch: session.run(gradients, fed(batch)),
        peak=peak,
    )


def in_a_function(mode: str, blocks: int, size: int) -> Trainer:
    """A `tf.function`, with variables of its own."""
    import tensorflow as tf

    import mem_util

    weights = Weights()
    resnet(tf.zeros([2, 32, 32, 1]), weights, blocks)  # makes the variables

    @tf.function(autograph=False)
    def train(images: Any, labels: Any) -> Any:
        loss = loss_of(weights, blocks, images, labels)
        descend(weights, gradients_of(loss, weights, mode))
        return loss

    @tf.function(autograph=False)
    def only_gradients(images: Any, labels: Any) -> Any:
        loss = loss_of(weights, blocks, images, labels)
        return gradients_of(loss, weights, mode)

    def placed(batch: Batch) -> list[Any]:
        return [tf.constant(array) for array in batch]

    def peak(batch: Batch) -> tuple[int, Any]:
        taken = mem_util.measure(train, *placed(batch))
        return taken.above_rest_bytes["/cpu:0"], None

    return Trainer(
        step=lambda batch: float(train(*placed(batch))),
        gradients=lambda batch: [g.numpy() for g in only_gradients(*placed(batch))],
        peak=peak,
    )


# ---- the comparison


def compare(
    kind: str, make: Callable[..., Trainer], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of one way of training: the three kinds of gradients, in turn."""
    batches = digits(options.batch)
    first = next(batches)
    trainers = {}
    for mode in MODES:
        print(f"... {kind}: building {mode}", flush=True)
        trainers[mode] = make(mode, options.blocks, options.batch)
    rows = {mode: {"kind": kind, "mode": mode} for mode in MODES}
    for mode, trainer in trainers.items():
        gradients = trainer.gradients(first)
        rows[mode]["gradients"] = gradients
        rows[mode]["difference"] = difference(rows["stock"]["gradients"], gradients)
    print(f"... {kind}: {options.steps} steps of each", flush=True)
    losses, seconds = train_in_turn(trainers, batches, options.steps)
    for mode, row in rows.items():
        row["losses"], row["seconds"] = losses[mode], statistics.median(seconds[mode])
        row["peak_bytes"], row["curve"] = trainers[mode].peak(first)
    return list(rows.values())


def train_in_turn(
    trainers: dict[str, Trainer], batches: Iterator[Batch], steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Losses and seconds of all steps; a first step, which traces, is not timed."""
    losses: dict[str, list[float]] = {mode: [] for mode in trainers}
    seconds: dict[str, list[float]] = {mode: [] for mode in trainers}
    for number in range(steps + 1):
        batch = next(batches)
        for mode, trainer in trainers.items():
            started = time.perf_counter()
            losses[mode].append(trainer.step(batch))
            if number:
                seconds[mode].append(time.perf_counter() - started)
    return losses, seconds


def difference(stock: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest difference of any gradient, over its largest entry."""
    return max(
        float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30))
        for a, b in zip(stock, other, strict=True)
    )


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Live bytes over a step of the rows that have a curve."""
    from matplotlib.figure import Figure

    colors = {"stock": "#b0413e", "memory": "#1f6f8b", "speed": "#e0a030"}
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        if row["curve"] is None:
            continue
        seconds, live = row["curve"][0], np.asarray(row["curve"][1]) / MIB
        color, peak = colors[row["mode"]], row["peak_bytes"] / MIB
        label = f"{row['mode']}: peak {peak:.0f} MiB"
        axes.plot(seconds, live, color=color, label=label, drawstyle="steps-post")
        axes.fill_between(seconds, live, step="post", color=color, alpha=0.1)
    axes.set_xlabel("seconds into the training step (traced)")
    axes.set_ylabel("live memory, MiB")
    axes.set_title("A training step of a pre-activation ResNet on 32 x 32 digits")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def columns(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """What the table shows; ratios are to stock of the same kind."""
    stock = {row["kind"]: row for row in rows if row["mode"] == "stock"}

    def of_stock(row: dict[str, Any], key: str) -> str:
        return f"{row[key] / stock[row['kind']][key]:.2f}"

    return [
        ("", lambda row: row["kind"]),
        ("gradients", lambda row: row["mode"]),
        ("peak MiB", lambda row: mebibytes(row["peak_bytes"])),
        ("of stock", lambda row: of_stock(row, "peak_bytes")),
        ("step s", lambda row: f"{row['seconds']:.3f}"),
        ("of stock", lambda row: of_stock(row, "seconds")),
        ("difference", lambda row: f"{row['difference']:.1e}"),
        ("loss", lambda row: f"{row['losses'][0]:.2f} -> {row['losses'][-1]:.2f}"),
    ]


def main() -> None:
    options = parse()
    started = time.monotonic()
    rows = compare("v1 graph", in_a_session, options)
    rows += compare("tf.function", in_a_function, options)
    path = options.out / "demo.png"
    draw(rows, path)
    depth = 6 * options.blocks + 2
    print(f"\nPre-activation ResNet-{depth}, {options.batch} digits a step\n")
    print(table(columns(rows), rows))
    print(f"\nLive bytes over the step: {path.resolve()}")
    print(f"{time.monotonic() - started:.0f} seconds in all")


if __name__ == "__main__":
    main()
