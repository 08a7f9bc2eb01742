#!/usr/bin/env python3
"""Trains on two workers, with stock gradients and with `enable()`, and compares.

Two processes on this machine, a `MultiWorkerMirroredStrategy` over the loopback. The
model is dense layers with synchronised batch norm, so that the workers meet in the
middle of each gradient. Each worker trains it by `fit` and by a loop of its own, first
with stock gradients, then with memory_saving_gradients.enable().

  peak        most live bytes over rest in a training step, in this worker's process
              (by the allocator's statistics), MiB
  of stock    that over stock's
  weights     largest difference from stock's weights after the last step
  statistics  the same of the moving means and variances of batch norm
  workers     largest difference of anything between the two workers

Graph optimisation is switched off, so all differences should be 0. Ends with an error
if a peak does not fall or a number differs, and stops both processes after --timeout
seconds at the latest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Last, so that an installed package wins over the checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np

from arguments import command_line, count, names_of
from tables import mebibytes, table
from worker_training import train

WORKERS = 2
WAYS = ("fit", "loop")
MODES = ("stock", "memory")


class WorkerError(Exception):
    """A worker ended badly, or not at all."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="folder for weights and figures (a temporary one)")
    add(
        "--ways", type=names_of(WAYS), default=list(WAYS), help="of training (fit,loop)"
    )
    add("--steps", type=count(2), default=3, help="training steps of each row (3)")
    add("--batch", type=count(), default=1024, help="rows for each worker (1024)")
    add("--layers", type=count(4), default=10, help="dense layers (10)")
    add("--width", type=count(), default=256, help="their width (256)")
    add("--timeout", type=count(), default=300, help="seconds for all (300)")
    add("--task", type=int, choices=range(WORKERS), help=argparse.SUPPRESS)
    add("--parent", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ---- one worker


def end_with(parent: int) -> None:
    """Ends this process when its parent has gone, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(arguments: argparse.Namespace) -> None:
    """Trains in all ways and writes what came of it for the parent to read."""
    end_with(arguments.parent)
    import tensorflow as tf

    import memory_saving_gradients as msg

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    peaks: dict[str, int] = {}
    arrays: dict[str, np.ndarray] = {}
    recomputed: dict[str, int] = {}
    for way in arguments.ways:
        for mode in MODES:
            here = msg.enabled(mode) if mode != "stock" else contextlib.nullcontext()
            with here:
                model, peaks[f"{way} {mode}"] = train(strategy, way, arguments, WORKERS)
                recomputed[f"{way} {mode}"] = sum(msg.status().rewired.values())
            moving = {id(v) for v in model.non_trainable_variables}
            for number, variable in enumerate(model.variables):
                kind = "statistics" if id(variable) in moving else "weights"
                name = f"{way} {mode} {kind} {number}"
                arrays[name] = np.asarray(variable.numpy())
    np.savez(arguments.out / f"worker{arguments.task}.npz", **arrays)
    told = json.dumps({"peaks": peaks, "rewired": recomputed})
    (arguments.out / f"worker{arguments.task}.json").write_text(told)


# ---- both


def free_ports(number: int) -> list[int]:
    """Ports of the loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def workers(arguments: argparse.Namespace) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Both processes, which have gone when the block is left, in whatever way."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for task in range(WORKERS):
            config = {
                "cluster": {"worker": addresses},
                "task": {"type": "worker", "index": task},
            }
            own = ["--task", task, "--parent", os.getpid(), "--out", arguments.out]
            own += ["--ways", ",".join(arguments.ways)]
            for name in ("steps", "batch", "layers", "width"):
                own += [f"--{name}", getattr(arguments, name)]
            with open(arguments.out / f"worker{task}.log", "wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, __file__, *map(str, own)],
                        env={
                            **os.environ,
                            "TF_CONFIG": json.dumps(config),
                            "CUDA_VISIBLE_DEVICES": "-1",
                        },
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for(arguments: argparse.Namespace) -> None:
    """Runs both workers to their end.

    Raises:
        WorkerError: One failed, or the time is up.
    """
    end = time.monotonic() + arguments.timeout
    with workers(arguments) as running:
        while True:
            codes = [process.poll() for process in running]
            if all(code == 0 for code in codes):
                return
            failed = [task for task, code in enumerate(codes) if code]
            late = time.monotonic() > end
            if failed or late:
                what = (
                    f"worker {failed[0]} failed with code {codes[failed[0]]}"
                    if failed
                    else f"not done after {arguments.timeout} s (see --timeout)"
                )
                task = failed[0] if failed else codes.index(None)
                log = (arguments.out / f"worker{task}.log").read_text(errors="replace")
                raise WorkerError(f"{what}. The end of its log:\n{log[-3000:]}")
            time.sleep(0.1)


def largest(one: Any, other: Any, left: str, right: str) -> float:
    """The largest difference between the arrays of two groups, by their prefixes."""
    names = [name for name in one.files if name.startswith(left)]
    assert names, left
    return max(
        float(np.abs(one[n].astype(float) - other[right + n[len(left) :]]).max())
        for n in names
    )


def rows_of(out: Path, ways: Sequence[str]) -> list[dict[str, Any]]:
    """The figures of all workers, ways and modes."""
    arrays = [np.load(out / f"worker{task}.npz") for task in range(WORKERS)]
    told = [
        json.loads((out / f"worker{task}.json").read_text()) for task in range(WORKERS)
    ]
    return [
        {
            "worker": task,
            "way": way,
            "mode": mode,
            "peak": told[task]["peaks"][f"{way} {mode}"],
            "stock": told[task]["peaks"][f"{way} stock"],
            "rewired": told[task]["rewired"][f"{way} {mode}"],
            **{
                kind: largest(
                    *[arrays[task]] * 2, f"{way} {mode} {kind}", f"{way} stock {kind}"
                )
                for kind in ("weights", "statistics")
            },
            "workers": largest(*arrays, f"{way} {mode} ", f"{way} {mode} "),
        }
        for way in ways
        for mode in MODES
        for task in range(WORKERS)
    ]


def faults(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What is not as it should be."""
    for row in rows:
        where = f"worker {row['worker']}, {row['way']}, {row['mode']}"
        for kind in ("weights", "statistics", "workers"):
            if row[kind] != 0:
                yield f"{where}: {kind} differ by {row[kind]:.1e}"
        if row["mode"] != "stock" and not row["rewired"]:
            yield f"{where}: no gradient was rewired"
        if row["mode"] != "stock" and row["peak"] >= row["stock"]:
            yield f"{where}: the peak does not fall"


def main() -> int:
    """Starts both workers, prints the table, says what is wrong with it."""
    arguments = parse()
    if arguments.task is not None:
        work(arguments)
        return 0
    # So that the processes are stopped, too, when this one is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as stack:
        if arguments.out is None:
            temporary = tempfile.TemporaryDirectory()
            arguments.out = Path(stack.enter_context(temporary))
        arguments.out.mkdir(parents=True, exist_ok=True)
        try:
            wait_for(arguments)
        except WorkerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        rows = rows_of(arguments.out, arguments.ways)
    print(
        table(
            [
                ("worker", lambda row: row["worker"]),
                ("trained by", lambda row: row["way"]),
                ("gradients", lambda row: row["mode"]),
                ("peak MiB", lambda row: mebibytes(row["peak"])),
                ("of stock", lambda row: f"{row['peak'] / row['stock']:.2f}"),
                ("weights", lambda row: f"{row['weights']:.1e}"),
                ("statistics", lambda row: f"{row['statistics']:.1e}"),
                ("workers", lambda row: f"{row['workers']:.1e}"),
            ],
            rows,
        )
    )
    wrong = list(faults(rows))
    for fault in wrong:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
