"""`PeakMemory` in `fit`, above all where the allocator's statistics see nothing."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import python

import mem_util
import memory_saving_gradients as msg
from mem_util.allocator import read_counters

WIDTH, DEPTH = 64, 12
# One activation; all of a step's tensors are far below the 256 KiB of the statistics.
UNIT = 4 * 100 * WIDTH
try:
    import tf_keras
except ImportError:  # not everybody has Keras 2
    tf_keras = None
KERAS_2 = pytest.mark.skipif(tf_keras is None, reason="tf_keras is not there")
PACKAGES = pytest.mark.parametrize(
    "package", [keras, pytest.param(tf_keras, marks=KERAS_2, id="tf_keras")]
)


def small(package, depth=DEPTH, **compiled):
    package.utils.set_random_seed(0)
    inner = [package.layers.Dense(WIDTH, "tanh") for _ in range(depth)]
    model = package.Sequential([*inner, package.layers.Dense(4)])
    model.compile("sgd", "mse", **{"jit_compile": False, **compiled})
    model.build([None, WIDTH])
    return model


def data(count=300):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, WIDTH)).astype("float32"), np.ones([count, 4], "f")


def fitted(model, callbacks, epochs=2, **settings):
    return model.fit(
        *data(), 100, epochs=epochs, verbose=0, callbacks=callbacks, **settings
    ).history


def resting():
    """What earlier tests of this process have left, which peaks include."""
    return read_counters().devices["/cpu:0"].current_bytes


@PACKAGES
@pytest.mark.parametrize(
    "compiled",
    [{}, {"steps_per_execution": 2}, {"run_eagerly": True}],
    ids=["one step", "two steps", "eager"],
)
def test_what_the_statistics_do_not_see_is_traced(package, compiled, caplog):
    peaks, rest = mem_util.PeakMemory(), resting()
    with caplog.at_level(logging.WARNING, "mem_util"):
        history = fitted(small(package, **compiled), [peaks])
    recorded = [epoch.peak_bytes["/cpu:0"] for epoch in peaks.epochs]
    assert history["peak_bytes/cpu:0"] == recorded
    # An activation for each layer; beside them gradients, of which it depends on the
    # order of two threads how many there are at once.
    assert all(DEPTH * UNIT <= peak - rest <= 4 * DEPTH * UNIT for peak in recorded)
    how = "traced on one batch: allocation records of a v1 session"
    assert [epoch.how["/cpu:0"] for epoch in peaks.epochs] == [how, how]
    assert peaks.epochs[0].missing == {}
    assert caplog.text.count("the allocator's statistics have no peak of /cpu:0") == 1


@pytest.mark.slow
@PACKAGES
@pytest.mark.parametrize("steps", [1, 2])
def test_training_is_what_it_is_without(package, steps):
    """No batch is lost, none is seen twice; nor is a variable changed by the trace."""
    weights = []
    for callbacks in ([], [mem_util.PeakMemory()]):
        model = small(package, steps_per_execution=steps)
        fitted(model, callbacks, epochs=3, shuffle=False)
        weights.append(model.get_weights())
        assert int(model.optimizer.iterations.numpy()) == 9
    for without, watched in zip(*weights, strict=True):
        np.testing.assert_allclose(without, watched, rtol=1e-5, atol=1e-7)


def test_batches_of_the_same_shapes_are_traced_once(monkeypatch):
    calls = []

    def counted(step, batch):
        calls.append(batch[0].shape)
        return mem_util.replay(step, batch)

    monkeypatch.setattr("mem_util.callback.replay", counted)
    fitted(small(keras), [mem_util.PeakMemory()], epochs=4)
    assert calls == [(100, WIDTH)]


def test_what_a_model_saves_is_seen():
    taken = {}
    for saving in (False, True):
        model, peaks, rest = small(keras, 20), mem_util.PeakMemory(), resting()
        if saving:
            msg.memory_saving(model)
        fitted(model, [peaks], epochs=1)
        taken[saving] = peaks.epochs[0].peak_bytes["/cpu:0"] - rest
    assert taken[True] < 0.75 * taken[False]


def test_under_xla_the_trace_says_that_it_is_without():
    x, y = data(8)
    model, peaks = small(keras, jit_compile=True), mem_util.PeakMemory()
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[peaks])
    assert "without XLA, which `fit` uses" in peaks.epochs[0].how["/cpu:0"]


@pytest.mark.parametrize("kind", ["ragged", "dict", "generator"])
def test_other_kinds_of_input(kind):
    if kind == "ragged":
        pytest.importorskip("tf_keras")
        words = tf_keras.Input([None], ragged=True, dtype="int64")
        x = tf_keras.layers.Embedding(10, 8)(words)
        x = tf_keras.layers.Lambda(lambda x: tf.reduce_sum(x, axis=1))(x)
        model = tf_keras.Model(words, tf_keras.layers.Dense(1)(x))
        rows = tf.ragged.constant([[1, 2], [3], [4, 5, 6]], dtype="int64")
        inputs = (rows, np.ones([3, 1]))
    elif kind == "dict":
        a, b = keras.Input([4], name="a"), keras.Input([4], name="b")
        model = keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(a * b))
        ones = np.ones([3, 4], "float32")
        inputs = ({"a": ones, "b": ones}, np.ones([3, 1]))
    else:
        model = keras.Sequential([keras.layers.Dense(1)])
        inputs = (((np.ones([3, 4]), np.ones([3, 1])) for _ in range(6)),)
    model.compile("sgd", "mse", jit_compile=False)
    peaks = mem_util.PeakMemory()
    settings = {"steps_per_epoch": 3, "shuffle": False}
    settings = settings if kind == "generator" else {}
    model.fit(*inputs, epochs=2, verbose=0, callbacks=[peaks], **settings)
    assert [e.peak_bytes["/cpu:0"] > 0 for e in peaks.epochs] == [True, True]


def test_what_cannot_be_traced_is_missing_with_a_reason(caplog):
    class Strange(keras.Sequential):
        def train_step(self, data):
            if tf.inside_function():
                raise ZeroDivisionError("only eagerly")
            return super().train_step(data)

    model, peaks = Strange([keras.layers.Dense(4)]), mem_util.PeakMemory()
    model.compile("sgd", "mse", run_eagerly=True)
    with caplog.at_level(logging.WARNING, "mem_util"):
        history = fitted(model, [peaks])
    assert list(history) == ["loss"]
    assert "only eagerly" in peaks.epochs[1].missing["/cpu:0"]
    assert caplog.text.count("no peak of /cpu:0") == 1


def test_without_a_trace_there_is_a_reason():
    peaks = mem_util.PeakMemory(replayable=False)
    assert list(fitted(small(keras), [peaks])) == ["loss"]
    assert "256 KiB" in peaks.epochs[1].missing["/cpu:0"]


# -- logical devices: in a process of its own ------------------------------------------


def on_two_cpus():
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    peaks = mem_util.PeakMemory()
    fitted(small(keras), [peaks])
    assert set(peaks.epochs[0].peak_bytes) == {"/cpu:0"}
    assert peaks.epochs[0].missing == {"/cpu:1": "nothing was allocated on it"}
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = small(keras)
    peaks = mem_util.PeakMemory()
    history = fitted(model, [peaks])
    for name in ("/cpu:0", "/cpu:1"):
        # Each replica has half of the batch.
        assert DEPTH * UNIT / 2 <= history[f"peak_bytes{name}"][0] <= 4 * DEPTH * UNIT


@pytest.mark.slow
def test_logical_cpus_are_told_apart():
    running = python("import test_mem_util_callback as t; t.on_two_cpus()")
    _, said = running.communicate(timeout=240)
    assert running.returncode == 0, said[-2000:]
