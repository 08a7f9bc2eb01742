"""Several devices and several workers: stock's numbers, and less memory on each."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import python
from tf_helpers import assert_same_bits, fixed

import memory_saving_gradients as msg
from memory_saving_gradients import counting

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_two_workers.py"


# -- these run in processes of their own: logical devices are made before all else -----


def two_cpus() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def dense(count: int, width: int, synchronised: bool = True) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    parts: list[Any] = [keras.Input([width])]
    for _ in range(count):
        parts.append(keras.layers.Dense(width, "softplus"))
        parts.append(keras.layers.BatchNormalization(synchronized=synchronised))
    return keras.Sequential([*parts, keras.layers.Dense(1)])


def state_of(model: Any) -> list[Any]:
    return [np.asarray(v.numpy()) for v in model.variables]


def fitted(strategy: Any, save: bool) -> list[Any]:
    """A model after two steps of `fit` on two replicas."""
    with strategy.scope():
        model = dense(3, 8)
        # With XLA `fit` fails on logical CPUs, whatever takes the gradients.
        model.compile("adam", "mse", jit_compile=False)
    if save:
        msg.memory_saving(model)
    x, y = fixed(32, 8), fixed(32, 1)
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    return [*state_of(model), *(v.numpy() for v in model.optimizer.variables)]


def looped(strategy: Any) -> list[Any]:
    """The same by a loop of one's own, with tf.GradientTape."""
    import keras

    with strategy.scope():
        model = dense(3, 8)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def replica(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / 2.0
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function(autograph=False)
    def step(batch: Any) -> Any:
        losses = strategy.run(replica, [batch])
        return strategy.reduce("SUM", losses, axis=None)

    data = tf.data.Dataset.from_tensor_slices((fixed(32, 8), fixed(32, 1))).batch(16)
    losses = [step(b) for b in strategy.experimental_distribute_dataset(data)]
    return [*losses, *state_of(model)]


def mirrored() -> None:
    # One for all: two of them number their collective ops alike.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    stock = fitted(strategy, save=False)
    assert_same_bits(stock, fitted(strategy, save=True))
    assert counting.counts().rewired.total() >= 2, counting.counts()
    stock = looped(strategy)
    with msg.enabled():
        new = looped(strategy)
        assert counting.counts().rewired.total() == 2, counting.counts()
    assert_same_bits(stock, new)


def halves(width: int) -> tuple[list[Any], list[Any]]:
    """A model whose second half stands on the second device, batch norm in both."""
    import keras

    keras.utils.set_random_seed(1)
    found: list[list[Any]] = [[], []]
    for number, layers in enumerate(found):
        with tf.device(f"CPU:{number}"):
            for _ in range(4):
                for layer in (
                    keras.layers.Dense(width, "softplus"),
                    keras.layers.BatchNormalization(),
                ):
                    layer.build([None, width])
                    layers.append(layer)
    return found[0], found[1]


def forward(parts: Any, x: tf.Tensor) -> tf.Tensor:
    for number, layers in enumerate(parts):
        with tf.device(f"CPU:{number}"):
            for layer in layers:
                x = layer(x, training=True)
    return tf.reduce_mean(x**2)


def model_parallel() -> None:

    def trained(tape: Any) -> list[Any]:
        parts = halves(8)
        layers = [layer for half in parts for layer in half]
        weights = [v.value for layer in layers for v in layer.trainable_variables]

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with tape() as recording:
                loss = forward(parts, x)
            for w, g in zip(weights, recording.gradient(loss, weights), strict=True):
                w.assign_sub(0.1 * g)
            return loss

        losses = [step(tf.constant(fixed(16, 8, seed=n))) for n in range(3)]
        return [*losses, *(v.numpy() for layer in layers for v in layer.variables)]

    stock, new = trained(tf.GradientTape), trained(msg.GradientTape)
    plan = msg.last_plan()
    devices = {plan.reading.ops[op].device[-5:] for op in plan.schedule.recomputed}
    assert devices == {"CPU:0", "CPU:1"}, devices
    assert_same_bits(stock, new)


def peaks(kind: str) -> None:
    """The peak on each device, by allocation records of a session."""
    from mem_util.replay import replay

    x = tf.random.stateless_normal([1024, 64], [1, 2])

    def peak(tape: Any) -> list[int]:
        if kind == "model parallel":
            parts = halves(64)
            layers = [layer for half in parts for layer in half]
            weights = [v.value for one in layers for v in one.trainable_variables]

            @tf.function(autograph=False)
            def step() -> Any:
                with tape() as recording:
                    loss = forward(parts, x)
                return [tf.reduce_sum(g) for g in recording.gradient(loss, weights)]

        else:
            strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            with strategy.scope():
                model = dense(6, 64, synchronised=kind == "synchronised")

            def replica() -> Any:
                with tape() as recording:
                    loss = tf.reduce_mean(model(x, training=True) ** 2)
                found = recording.gradient(loss, model.trainable_variables)
                return [tf.reduce_sum(g) for g in found]

            @tf.function(autograph=False)
            def step() -> Any:
                found = strategy.run(replica)
                return [strategy.experimental_local_results(g) for g in found]

        found = replay(step).peak_bytes
        return [found[f"/cpu:{number}"] for number in (0, 1)]

    stock, new = peak(tf.GradientTape), peak(msg.GradientTape)
    assert all(n < 0.7 * s for n, s in zip(new, stock, strict=True)), (new, stock)


def peaks_of_fit() -> None:
    """The same of `fit`, optimizer and synchronised batch norm included."""
    import keras

    import mem_util

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x, y = fixed(2048, 64), fixed(2048, 1)

    def peak(save: bool) -> list[int]:
        with strategy.scope():
            model = dense(6, 64)
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        if save:
            msg.memory_saving(model)
        seen = mem_util.PeakMemory()
        model.fit(x, y, batch_size=2048, verbose=0, callbacks=[seen])
        (epoch,) = seen.epochs
        assert set(epoch.peak_bytes) == {"/cpu:0", "/cpu:1"}, epoch
        assert all(how.startswith("traced on one batch") for how in epoch.how.values())
        return [epoch.peak_bytes[f"/cpu:{number}"] for number in (0, 1)]

    stock, new = peak(save=False), peak(save=True)
    assert all(n < 0.7 * s for n, s in zip(new, stock, strict=True)), (new, stock)


def what_a_replica_gets() -> None:
    """`fit` is told the batch of all replicas; budgets and figures are those of one."""
    import logging

    import keras

    from memory_saving_gradients import keras_line

    said: list[str] = []
    log = logging.getLogger(keras_line.__name__)
    log.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore
    log.addHandler(handler)
    x = fixed(2000, 128)

    def network() -> Any:
        layers = [keras.layers.Dense(128, "gelu") for _ in range(10)]
        model = keras.Sequential([keras.Input([128]), *layers])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    def fitted(budget: str) -> None:
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = network()
        msg.memory_saving(model, budget)
        model.fit(x, x, batch_size=1024, verbose=0)

    least = msg.plan(network(), batch_size=512)
    fitted(f"{int(least.predicted_peak_bytes * 1.05)} B")
    assert " on each of 2 replicas (for batches of 512," in said[-1], said
    assert f"stock's {least.stock_peak_bytes / 2**20:.1f}" in said[-1], said
    try:
        fitted("100 KiB")
    except msg.BudgetError as error:
        assert "threading.py" not in str(error), error
        assert "unknown dimensions of 512, as was assumed" in str(error), error
    else:
        raise AssertionError("no error")


# -- and these start them --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls",
    [
        "t.mirrored()",
        "t.what_a_replica_gets()",
        "t.model_parallel(); t.peaks('model parallel'); t.peaks('mirrored')",
        "t.peaks('synchronised'); t.peaks_of_fit()",
    ],
)
def test_in_a_process_with_two_devices(calls: str) -> None:
    running = python(f"import test_replicas as t; t.two_cpus(); {calls}")
    try:
        _, errors = running.communicate(timeout=300)
    finally:
        running.kill()
    assert running.returncode == 0, errors


def start(*arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(out: Path) -> list[str]:
    """Processes that have this folder among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(out) in entry.read_text(errors="replace"):
                found.append(entry.parent.name)
    return found


@pytest.mark.slow
def test_two_workers(tmp_path: Path) -> None:
    small = ["--steps", 2, "--layers", 4, "--width", 64, "--batch", 4096]
    running = start("--out", tmp_path, "--ways", "fit", *small, "--timeout", 280)
    try:
        told, errors = running.communicate(timeout=300)
    finally:
        running.kill()
    assert running.returncode == 0, errors
    rows = [line.split() for line in told.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        [str(worker), "fit", mode] for mode in ("stock", "memory") for worker in (0, 1)
    ]
    assert all(float(row[4]) < 0.7 for row in rows[2:]), told
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("end", ["time-out", "SIGTERM", "SIGKILL"])
def test_no_worker_is_left_behind(tmp_path: Path, end: str) -> None:
    running = start("--out", tmp_path, "--timeout", 1 if end == "time-out" else 100)
    if end != "time-out":
        wait_until(lambda: len(left_behind(tmp_path)) == 3)
        running.send_signal(getattr(signal, end))
    _, errors = running.communicate(timeout=60)
    assert running.returncode != 0
    if end == "time-out":
        assert "not done after 1 s (see --timeout)" in errors
    wait_until(lambda: not left_behind(tmp_path))


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.usefixtures("no_meta_optimizer")
@pytest.mark.parametrize("swapped", [False, True])
def test_gradients_that_use_one_resource_keep_their_order(swapped: bool) -> None:
    """As collective ops do: TensorFlow orders them when the trace ends.

    Of two towers either may be differentiated first, and autodiff decides.
    """
    count = tf.Variable(fixed(64, 8))
    ws = [tf.Variable(fixed(8, 8, seed=number)) for number in range(10)]

    @tf.custom_gradient
    def counted(y: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            return dy * tf.cos(count.assign_add(dy))

        return tf.identity(y), gradient

    def gradients(tape: Any) -> list[Any]:
        count.assign(fixed(64, 8))

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with tape() as recording:
                towers = [x, x]
                for tower in (0, 1):
                    for w in ws[5 * tower :][:5]:
                        y = tf.tanh(tf.nn.softplus(towers[tower] @ w))
                        towers[tower] = counted(y)
                ends = towers[::-1] if swapped else towers
                loss = tf.reduce_sum(ends[0] * ends[1])
            return recording.gradient(loss, ws)

        return [*step(tf.constant(fixed(64, 8))), count.numpy()]

    stock, new = gradients(tf.GradientTape), gradients(msg.GradientTape)
    assert msg.last_plan().recomputed
    assert_same_bits(stock, new)
