"""Real runs: v1 sessions, `tf.function`, eager code, `fit`."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from matplotlib import image
from mem_util_fixtures import counter_values
from saving_helpers import python

import mem_util
import memory_saving_gradients as msg
from mem_util import NotReplayableError, ProfilerError, measure, replay, trace
from mem_util.allocator import Counter, Counters
from mem_util.measure import combine

tf1 = tf.compat.v1
MEGABYTE = 250_000  # float32 elements


def tanh_chain(x, length=20):
    """The gradient of a chain of tanh, all of whose outputs are residuals."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(length):
            y = tf.tanh(y)
        y = tf.reduce_sum(y)
    return tape.gradient(y, x)


@pytest.fixture
def v1_chain():
    """A session, the gradient of a chain of 20 tanh of 1 MB, and what to feed."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [MEGABYTE])
        y = x
        for _ in range(20):
            y = tf.tanh(y)
        grad = tf1.gradients(tf.reduce_sum(y), x)[0]
        yield session, grad, {x: np.zeros(MEGABYTE, np.float32)}


def run_traced(session, fetches, feed=None):
    metadata = tf1.RunMetadata()
    options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    session.run(fetches, feed, options=options, run_metadata=metadata)
    return metadata


def test_peak_of_a_v1_chain(v1_chain):
    peak = mem_util.peak_memory(run_traced(*v1_chain))["/cpu:0"]
    assert 18.5e6 <= peak <= 22e6


def test_plot_memory_timeline(v1_chain, tmp_path):
    traced = mem_util.plot_memory_timeline(str(tmp_path / "chain.json"), *v1_chain)
    assert image.imread(tmp_path / "chain.png").shape[1] == 1800
    events = json.loads((tmp_path / "chain.json").read_text())["traceEvents"]
    values = counter_values(events)["live bytes /cpu:0"]
    assert max(values) == traced.peak_bytes["/cpu:0"]
    names = [e["args"]["op"] for e in events if e["ph"] == "X"]
    assert sum(name.startswith("Tanh") for name in names) == 20


def test_graph_folded_to_a_constant_is_a_reason():
    with tf.Graph().as_default(), tf1.Session() as session:
        y = tf.tanh(tf.zeros([MEGABYTE]))
        metadata = run_traced(session, tf.reduce_sum(y))
    with pytest.raises(mem_util.NoMemoryDataError, match="feed a placeholder"):
        mem_util.peak_memory(metadata)


def test_session_without_tracing():
    with tf.Graph().as_default(), tf1.Session() as session:
        metadata = tf1.RunMetadata()
        session.run(tf.zeros([1]), run_metadata=metadata)
    with pytest.raises(mem_util.NoMemoryDataError, match="FULL_TRACE"):
        mem_util.peak_memory(metadata)


# Deep enough for one tensor to be less than 3 % of the peak, and with a backward pass
# in one order: two threads may else order independent ops in more than one way, which
# shifts the peak by a tensor or two.
def dense_model():
    layers = [keras.layers.Dense(128, activation="tanh") for _ in range(40)]
    return keras.Sequential([keras.Input([128]), *layers]), [2048, 128]


def conv_model():
    layers = [
        keras.layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(24)
    ]
    return keras.Sequential([keras.Input([32, 32, 16]), *layers]), [16, 32, 32, 16]


def transformer_model():
    x = inputs = keras.Input([64, 64])
    for _ in range(4):
        x = x + keras.layers.MultiHeadAttention(2, 32)(x, x)
        x = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(64)(keras.layers.Dense(256, "gelu")(x))
    return keras.Model(inputs, x), [64, 64, 64]


def train_step(model):
    @tf.function
    def step(x):
        with msg.GradientTape(checkpoints="speed") as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    return step


def agreement(make: str) -> None:
    """Prints the least of a few runs by each way to measure."""
    model, shape = globals()[make]()
    step, x = train_step(model), tf.random.normal(shape)
    least = dict.fromkeys((measure, trace, replay), float("inf"))
    for _ in range(10):  # the least of as few runs as agree
        for how in least:
            least[how] = min(least[how], how(step, x).above_rest_bytes["/cpu:0"])
        measured, traced, recorded = least.values()
        if all(abs(b - measured) <= 0.03 * measured for b in (traced, recorded)):
            print("they agree")
            return
    print(f"measure {measured}, trace {traced}, records {recorded}")


@pytest.mark.parametrize(
    "make",
    [
        "dense_model",
        pytest.param("conv_model", marks=pytest.mark.slow),
        pytest.param("transformer_model", marks=pytest.mark.slow),
    ],
)
def test_measure_trace_and_records_agree(make):
    # In a process of its own: the chunks of an allocator that others have used before
    # are larger than what is asked for.
    running = python(f"import test_mem_util_live as t; t.agreement({make!r})")
    told, errors = running.communicate(timeout=300)
    assert "they agree" in told, told + errors


def test_measure_says_how_and_what_is_not_counted():
    taken = measure(tf.function(tanh_chain), tf.random.normal([MEGABYTE]))
    assert taken.peak_bytes["/cpu:0"] > taken.resting_bytes["/cpu:0"]
    assert taken.how["/cpu:0"] == "statistics of the allocator"
    assert taken.not_counted == ("allocations under 256 KiB on the CPU",)
    assert 0 < taken.seconds < 60
    assert "MiB above the rest" in str(taken)


def test_measure_calls_as_often_as_it_says():
    calls = []
    x = tf.zeros([MEGABYTE])
    measure(lambda: calls.append(tf.tanh(x).shape), warm_ups=0)
    assert len(calls) == 1


def test_small_tensors_are_replayed_instead_of_0():
    """The chain again, 100 kB each: the counters see nothing of it."""
    x = tf.random.normal([MEGABYTE // 10])
    taken = measure(tf.function(tanh_chain), x)
    assert 1.85e6 <= taken.above_rest_bytes["/cpu:0"] <= 2.2e6
    assert taken.how["/cpu:0"].startswith("replayed")
    assert taken.not_counted == ()
    traced = trace(tf.function(tanh_chain), x)
    assert traced.peak_bytes["/cpu:0"] == taken.above_rest_bytes["/cpu:0"]
    assert "replayed" in traced.source


def test_small_tensors_that_cannot_be_replayed_have_a_reason():
    x = np.ones([8, 4], np.float32)
    model = keras.Sequential([keras.layers.Dense(4)])
    model.compile("sgd", "mse", jit_compile=False)
    taken = measure(model.fit, x, x, verbose=0)
    assert "/cpu:0" not in taken.peak_bytes
    with pytest.raises(KeyError, match=r"256 KiB.*cannot be replayed"):
        taken.peak_bytes["/cpu:0"]
    assert "unknown" in taken.summary()


def test_replay_leaves_variables_alone():
    variable = tf.Variable(tf.ones([3, 1000]))

    @tf.function
    def step(x, scale=1.0, extra=None):
        variable.assign_add(x * scale)
        return {"sum": tf.reduce_sum(variable), "extra": extra["k"] + 1.0}

    x, extra = tf.ones([3, 1000]), {"k": np.ones(5, np.float32)}
    traced = replay(step, x, scale=2.0, extra=extra)
    assert traced.peak_bytes["/cpu:0"] > 0
    assert any("AssignAdd" in span.kind for span in traced.spans)
    assert np.all(variable.numpy() == 1.0)


def test_replay_of_what_cannot_be_copied():
    iterator = iter(tf.data.Dataset.range(3))
    with pytest.raises(NotReplayableError, match="Pass a batch as an argument"):
        replay(tf.function(lambda: next(iterator)))
    with pytest.raises(NotReplayableError, match=r"`tf.function` can trace, but"):
        replay(lambda x: float(x), tf.ones([]))


def test_trace_of_eager_code():
    x = tf.random.normal([MEGABYTE])
    traced = trace(lambda: tf.tanh(tf.exp(x)))
    assert {"Tanh", "Exp"} <= {span.kind for span in traced.spans}
    assert traced.above_rest_bytes["/cpu:0"] >= 2e6
    assert traced.timelines["/cpu:0"].peak_op == "Tanh"


def test_trace_of_a_compiled_function():
    x = tf.random.normal([MEGABYTE])
    traced = trace(tf.function(tanh_chain, jit_compile=True), x)
    measured = measure(tf.function(tanh_chain, jit_compile=True), x)
    assert traced.above_rest_bytes == dict(measured.above_rest_bytes)
    assert traced.spans


def test_measure_and_trace_of_fit():
    layers = [keras.layers.Dense(512, activation="tanh") for _ in range(6)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=False)
    x = np.zeros([1024, 512], np.float32)
    for how in (measure, trace):
        taken = how(model.fit, x, x, batch_size=512, verbose=0)
        assert 6e6 < taken.above_rest_bytes["/cpu:0"] < 40e6
        # Six weight matrices of 512 x 512 floats were there before.
        assert taken.resting_bytes["/cpu:0"] >= 6e6


def test_trace_while_another_profiler_runs(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(ProfilerError, match="already running"):
            trace(lambda: None, warm_ups=0)
    finally:
        tf.profiler.experimental.stop(save=False)


def test_trace_ends_the_profiler_after_an_error():
    def fail():
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trace(fail, warm_ups=0)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_callback_records_each_epoch(jit_compile):
    layers = [keras.layers.Dense(512, activation="tanh") for _ in range(6)]
    model, batch = keras.Sequential(layers), 512
    model.compile("sgd", "mse", jit_compile=jit_compile)
    x = np.zeros([2 * batch, 512], np.float32)
    peaks = mem_util.PeakMemory()
    history = model.fit(x, x, batch, epochs=2, verbose=0, callbacks=[peaks]).history
    assert len(peaks.epochs) == 2
    recorded = [epoch.peak_bytes["/cpu:0"] for epoch in peaks.epochs]
    assert history["peak_bytes/cpu:0"] == recorded
    # Six residuals of 512 x 512 floats, at least.
    assert all(e.above_rest_bytes["/cpu:0"] > 6e6 for e in peaks.epochs)
    assert all(epoch.seconds > 0 for epoch in peaks.epochs)


def in_a_process_of_its_own(code):
    """Runs code where TensorFlow can be configured anew; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_logical_cpus_are_told_apart():
    out = in_a_process_of_its_own(
        """
        import tensorflow as tf, mem_util
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)

        @tf.function
        def step(x):
            with tf.device("CPU:0"):
                a = tf.tanh(x)
            with tf.device("CPU:1"):
                b = tf.exp(a) * tf.tanh(x) + tf.sin(x)
            return tf.reduce_sum(b), a

        x = tf.random.normal([250_000])
        taken = mem_util.measure(step, x)
        traced = mem_util.trace(step, x)
        assert set(traced.peak_bytes) == set(taken.peak_bytes) == {"/cpu:0", "/cpu:1"}
        assert "cannot tell 2 logical CPUs apart" in traced.notes[-1]
        a, b = taken.peak_bytes["/cpu:0"], taken.peak_bytes["/cpu:1"]
        print(a / 1e6 >= 1, b / 1e6 >= 2, taken.how["/cpu:1"][:8])
        """
    )
    assert out.split() == ["True", "True", "replayed"]


def test_without_counters_there_is_still_an_answer(monkeypatch):
    """As with TF_ENABLE_ONEDNN_OPTS=0, and on processors without oneDNN."""

    def fail(device):
        raise ValueError(f"Allocator stats not available for device '{device}'")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", fail)
    step = tf.function(lambda x: tf.reduce_sum(tf.exp(x) * tf.tanh(x)))
    taken = measure(step, tf.random.normal([MEGABYTE]))
    assert 1e6 <= taken.peak_bytes["/cpu:0"] <= 4e6
    assert taken.how["/cpu:0"].startswith("replayed")
    taken = measure(step, tf.random.normal([MEGABYTE]), replayable=False)
    assert "keeps no statistics" in taken.missing["/cpu:0"]


def test_one_pool_of_several_cpus_is_called_that():
    cpus = ("/cpu:0", "/cpu:1")
    before = Counters({"/cpu:0": Counter(5, 5)}, {"/cpu:1": "one pool"}, cpus)
    after = Counters({"/cpu:0": Counter(6, 9)}, {"/cpu:1": "one pool"}, cpus)
    taken = combine(before, after, seconds=1.0)
    assert dict(taken.above_rest_bytes) == {"/cpu:0": 4}
    assert taken.how["/cpu:0"].endswith("all of /cpu:0, /cpu:1 in one pool")
    assert taken.missing == {"/cpu:1": "one pool"}


@pytest.mark.parametrize("name", ["session", "measure", "plot", "callback"])
def test_examples_of_docstrings(name):
    module = importlib.import_module(f"mem_util.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_function_that_runs_no_op_has_no_peak():
    assert "runs none" in measure(lambda: None).missing["/cpu:0"]
    assert "/cpu:0" not in trace(lambda: None).peak_bytes
