"""`memory_saving(model)`: one model trains in less memory, and nothing else changes."""

from __future__ import annotations

import logging
import pickle
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import assert_close, assert_same_bits, fixed

import memory_saving_gradients as msg
from mem_util.allocator import read_counters
from memory_saving_gradients import counting, keras_line

pytestmark = [
    pytest.mark.usefixtures("no_meta_optimizer"),
    # Keras saves variables in a way that NumPy 2 does not like.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

DENSE = [f"dense{number}" for number in range(6)]


@keras.saving.register_keras_serializable("test_keras")
class Block(keras.layers.Layer):
    def __init__(self, width: int = 8, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.inner = [keras.layers.Dense(width, "tanh", name=f"in{i}") for i in (0, 1)]

    def build(self, shape: Any) -> None:
        for layer in self.inner:
            layer.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.inner[1](self.inner[0](x))


@keras.saving.register_keras_serializable("test_keras")
class Subclass(keras.Model):
    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.blocks = [Block(name=f"block{i}") for i in range(4)]
        self.steps = 0

    def call(self, x: Any, training: bool = False) -> Any:
        for block in self.blocks:
            x = block(x, training=training)
        return x

    def train_step(self, data: Any) -> Any:
        self.steps += 1
        return super().train_step(data)


def sequential(name: str = "model") -> Any:
    layers: list[Any] = [keras.Input([8])]
    for dense in DENSE:
        layers.append(keras.layers.Dense(8, "softplus", name=dense))
    layers[3:3] = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=3)]
    return keras.Sequential(layers, name=name)


def functional() -> Any:
    inner = keras.Sequential([keras.Input([8]), Block(name="block")], name="inner")
    x = keras.Input([8])
    y = keras.layers.Dense(8, "softplus", name="first")(x)
    for number in range(5):
        y = y + keras.layers.Dense(8, "gelu", name=f"dense{number}")(y)
    return keras.Model(x, inner(y))


def made(build: Any, jit: bool = False, **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = build()
    compiled = {"optimizer": "sgd", "loss": "mse"} | compiled
    model.compile(jit_compile=jit, **compiled)
    return model


def fitted(model: Any, rows: int = 16, width: int = 8) -> Any:
    x, y = fixed(rows, width), fixed(rows, width, seed=1)
    model.fit(x, y, batch_size=rows // 2, verbose=0, shuffle=False)
    return model.get_weights()


@cache
def stock_weights(build: Any) -> Any:
    """What the weights are after training with stock's gradients."""
    return fitted(made(build))


def rewired() -> int:
    return sum(counting.counts().rewired.values())


# -- training --------------------------------------------------------------------------


@pytest.mark.parametrize("build", [sequential, functional, Subclass])
def test_fit_gives_the_same_weights(build: Any) -> None:
    stock = stock_weights(build)
    model = made(build)
    before = rewired()
    assert msg.memory_saving(model) is model
    new = fitted(model)
    assert rewired() > before
    assert msg.last_plan().recomputed
    assert_same_bits(stock, new)


@pytest.mark.parametrize("steps", [{}, {"steps_per_execution": 2}])
def test_fit_under_xla(steps: Any) -> None:
    keywords = {"jit": True, **steps}
    stock = fitted(made(functional, **keywords))
    new = fitted(msg.memory_saving(made(functional, **keywords)))
    assert msg.last_plan().xla
    assert msg.last_plan().recomputed
    assert_close(stock, stock, new)


@pytest.mark.parametrize("unrolled", [1, 2])
def test_several_steps_per_execution(unrolled: int) -> None:
    def model() -> Any:
        model = made(sequential, steps_per_execution=2)
        model.unrolled_steps_per_execution = unrolled
        return model

    stock, before = fitted(model()), rewired()
    assert_same_bits(stock, fitted(msg.memory_saving(model())))
    assert rewired() > before


def test_a_last_partial_batch() -> None:
    def weights(model: Any) -> Any:
        model.fit(fixed(20, 8), fixed(20, 8), batch_size=8, verbose=0, shuffle=False)
        return model.get_weights()

    stock = weights(made(sequential))
    assert_same_bits(stock, weights(msg.memory_saving(made(sequential))))


def test_only_this_model_and_only_training() -> None:
    model, other = msg.memory_saving(made(sequential)), made(sequential)
    before = rewired()
    fitted(other)
    model.evaluate(fixed(8, 8), fixed(8, 8), verbose=0)
    model.predict(fixed(8, 8), verbose=0)
    assert rewired() == before
    model.train_on_batch(fixed(8, 8), fixed(8, 8))
    assert rewired() > before


def test_a_model_that_was_traced_before_and_the_way_back() -> None:
    model = made(lambda: sequential("before"))
    methods = model.fit, model.make_train_function
    fitted(model)
    before = rewired()
    msg.memory_saving(model)
    fitted(model)
    assert rewired() > before
    msg.memory_saving(model, "speed")
    fitted(model)
    assert msg.last_plan().strategy == "speed"
    assert "before: speed" in msg.status().models
    before = rewired()
    msg.memory_saving(model, None)
    fitted(model)
    assert rewired() == before
    assert (model.fit, model.make_train_function) == methods
    assert not {"fit", "make_train_function"} & set(vars(model))
    assert "before: speed" not in msg.status().models


def test_it_outlives_compile_and_load_weights(tmp_path: Path) -> None:
    model = msg.memory_saving(made(sequential))
    fitted(model)
    model.save_weights(tmp_path / "w.weights.h5")
    model.load_weights(tmp_path / "w.weights.h5")
    model.compile("adam", "mae", jit_compile=False)
    before = rewired()
    fitted(model)
    assert rewired() > before


def test_which_setting_counts() -> None:
    class Explicit(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            with msg.GradientTape(checkpoints=lambda t: "Tanh" in t.name) as tape:
                loss = self.compute_loss(None, data[1], self(data[0], training=True))
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            assert tape.plan.strategy == "a predicate"
            return {"loss": loss}

    layers = [keras.layers.Dense(8, "tanh") for _ in range(8)]
    with msg.enabled("memory"):
        model = msg.memory_saving(made(sequential), "speed")
        fitted(model)
        assert msg.last_plan().strategy == "speed"
        fitted(msg.memory_saving(made(lambda: Explicit(layers)), "speed"))
        assert msg.last_plan().strategy == "a predicate"
        fitted(made(sequential))
        assert msg.last_plan().strategy == "memory"


def test_an_eager_model_is_told_once() -> None:
    model = msg.memory_saving(made(sequential, run_eagerly=True))
    with pytest.warns(UserWarning, match=r"trains eagerly.*run_eagerly=False"):
        fitted(model)
    fitted(model)
    assert "run_eagerly=True" in str(msg.status())


# -- saving, copies, clones ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("build", [sequential, functional])
def test_a_saved_model_loads_without_the_library(tmp_path: Path, build: Any) -> None:
    model = made(build)
    config = model.get_config(), model.get_compile_config()
    msg.memory_saving(model, ["dense2", "dense4"])
    fitted(model)
    assert (model.get_config(), model.get_compile_config()) == config
    model.save(tmp_path / "model.keras")
    code = """
import os, sys
beside = os.path.join("memory_saving_gradients", "__init__.py")
keras_too = os.path.join("keras", "__init__.py")
has = lambda folder, file: os.path.exists(os.path.join(folder, file))
sys.path[:] = [p for p in sys.path if has(p, keras_too) or not has(p, beside)]
import numpy as np, keras
if "functional" in sys.argv[2]:
    exec(sys.argv[3])
# Installed, it stands where Keras does.
sys.modules["memory_saving_gradients"] = sys.modules["mem_util"] = None
model = keras.models.load_model(sys.argv[1])
model.fit(np.ones([4, 8]), np.ones([4, 8]), verbose=0)
"""
    block = (
        "@keras.saving.register_keras_serializable('test_keras')\n"
        "class Block(keras.layers.Layer):\n"
        "    def __init__(self, width=8, **keywords):\n"
        "        super().__init__(**keywords)\n"
        "        self.inner = [keras.layers.Dense(width, 'tanh', name=f'in{i}') "
        "for i in (0, 1)]\n"
        "    def build(self, shape):\n"
        "        [layer.build(shape) for layer in self.inner]\n"
        "    def call(self, x, training=False):\n"
        "        return x + self.inner[1](self.inner[0](x))\n"
    )
    # -I: neither this folder nor PYTHONPATH is looked into.
    running = subprocess.run(
        [sys.executable, "-I", "-c", code, "model.keras", build.__name__, block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert running.returncode == 0, running.stderr
    before = rewired()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same_bits(model.get_weights(), loaded.get_weights())
    fitted(loaded)
    assert rewired() == before
    fitted(msg.memory_saving(loaded))
    assert rewired() > before


def test_export_and_pickle(tmp_path: Path) -> None:
    model = msg.memory_saving(made(sequential), re.compile("dense[24]"))
    fitted(model)
    x = fixed(4, 8)
    expected = model.predict(x, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(served.serve(x), expected, rtol=1e-6, atol=1e-6)
    before = rewired()
    fitted(pickle.loads(pickle.dumps(model)))
    assert rewired() == before
    fitted(model)
    assert msg.last_plan().strategy.startswith("2 tensors")


@pytest.mark.parametrize("build", [sequential, functional])
@pytest.mark.parametrize("checkpoints", ["memory", ["dense2", "dense4"]])
def test_clones_inherit_it(build: Any, checkpoints: Any) -> None:
    clone_of = keras.models.clone_model
    model = msg.memory_saving(made(build), checkpoints)
    clone = clone_of(model)
    clone.compile("sgd", "mse", jit_compile=False)
    before = rewired()
    fitted(clone)
    assert rewired() > before
    msg.memory_saving(model, None)
    fitted(clone)
    msg.memory_saving(clone, None)
    plain = clone_of(model)
    plain.compile("sgd", "mse", jit_compile=False)
    before = rewired()
    fitted(plain)
    assert rewired() == before


def test_a_clone_made_from_a_configuration_alone_is_an_ordinary_model() -> None:
    """As the docstring says: Keras makes it as if it were loaded."""
    model = msg.memory_saving(made(Subclass))
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "mse", jit_compile=False)
    before = rewired()
    fitted(clone)
    assert rewired() == before
    fitted(msg.memory_saving(clone))
    assert rewired() > before


# -- layers as checkpoints -------------------------------------------------------------


def kept(build: Any, checkpoints: Any) -> list[str]:
    """The scopes in which the kept tensors stand, without TensorFlow's numbers."""
    stock = stock_weights(build)
    model = made(build)
    if callable(checkpoints):
        checkpoints = checkpoints(model)
    assert_same_bits(stock, fitted(msg.memory_saving(model, checkpoints)))
    plan = msg.last_plan()
    assert plan.recomputed
    return [re.sub(r"_\d+(?=/)", "", name) for name in plan.kept]


@pytest.mark.parametrize(
    "checkpoints",
    [
        ["dense2", "dense4"],
        lambda model: [model.get_layer("dense4"), model.get_layer("dense2")],
        re.compile(r"^dense[24]$"),
        lambda model: [model.get_layer("dense2"), re.compile("dense4")],
    ],
)
def test_layers(checkpoints: Any) -> None:
    first, second = kept(sequential, checkpoints)
    assert first.startswith("model/dense2/")
    assert second.startswith("model/dense4/")


def test_one_layer_and_layers_inside_layers() -> None:
    (found,) = kept(functional, "dense2")
    assert "/dense2/" in found
    found, within = kept(functional, ["dense2", "inner/block/in0"])
    assert "/dense2/" in found
    assert "/in0/" in within
    first, second = kept(Subclass, re.compile("block[12]/in1"))
    assert "/block1/in1/" in first
    assert "/block2/in1/" in second


def test_no_layer_keeps_an_override() -> None:
    model = msg.memory_saving(made(sequential), ["dense2"])
    layer = model.get_layer("dense2")
    fitted(model)
    assert "call" not in vars(layer)
    msg.memory_saving(model, [layer])
    with pytest.raises(ValueError):
        model.train_on_batch(fixed(8, 5), fixed(8, 5))
    assert "call" not in vars(layer)


@pytest.mark.parametrize(
    ("checkpoints", "error", "match"),
    [
        (["dens2"], msg.UnknownCheckpointNameError, r"'dens2'.*mean 'dense2'"),
        (["dense1", "dens2"], LookupError, "'dens2'"),
        (
            re.compile("^conv"),
            LookupError,
            r"pattern '\^conv' matches none of the model's layers.*It has: dense0",
        ),
        (re.compile("^dens2$"), LookupError, "matches none.*mean 'dense2'"),
        ([keras.layers.Dense(3, name="dense9")], LookupError, "the layer 'dense9'"),
        (
            [keras.layers.Dense(3, name="dense2")],
            LookupError,
            "belongs to another model, or to none.*if you mean it, give 'dense2'",
        ),
        ([3], msg.CheckpointError, "may list layers"),
        ([], msg.CheckpointError, "lists no layers"),
        ("fast", msg.CheckpointError, '"memory", "speed".*It has: dense0, dense1'),
        ("dens2", LookupError, "layer of the model.*mean 'dense2'.*It has: dense0"),
        ("DENSE2", LookupError, "mean 'dense2'"),
        ("", LookupError, "name or path of a layer.*It has: dense0"),
        ("memroy", LookupError, "mean 'memory'"),
        ("dense[24]", LookupError, r"re.compile\('dense\[24\]'\)"),
        ("^dense[", LookupError, "It has: dense0"),
    ],
)
def test_what_matches_nothing(checkpoints: Any, error: Any, match: str) -> None:
    model = made(sequential)
    with pytest.raises(error, match=match):
        msg.memory_saving(model, checkpoints)
    assert "train_step" not in vars(model)


def test_a_foreign_layer_is_not_called_a_misspelling() -> None:
    model = made(sequential)
    with pytest.raises(LookupError, match="belongs to another model") as raised:
        msg.memory_saving(model, keras.layers.Dense(3, name="dens2"))
    assert "Did you mean" not in str(raised.value)
    with pytest.raises(LookupError, match="is the model itself"):
        msg.memory_saving(model, model)


def test_input_layers_are_the_models_and_serve_nothing() -> None:
    model = made(functional)
    inputs = [layer for layer in model.layers if "Input" in type(layer).__name__]
    assert inputs
    with pytest.warns(UserWarning, match=f"ignored: {inputs[0].name}") as caught:
        msg.memory_saving(model, model.layers)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for given in (inputs[0], inputs[0].name, [inputs[0].name]):
        with pytest.raises(msg.CheckpointError, match="input layers only"):
            msg.memory_saving(model, given)


def test_an_empty_collection_speaks_of_layers() -> None:
    model = msg.memory_saving(made(sequential), "collection")
    with pytest.raises(msg.CheckpointError, match="but it is empty") as raised:
        fitted(model)
    told = str(raised.value)
    assert "`memory_saving_gradients.memory_saving`:" in told
    assert "the default" not in told
    assert "a list of layers, `[layer1, layer2]`" in told


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="expected a Keras model"):
        msg.memory_saving(keras.layers.Dense(3))
    with pytest.raises(TypeError, match="an int"):
        msg.memory_saving(made(sequential), unknown_dim="8")


def test_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(sequential)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(msg.MemorySavingGradientsError, match="computes with jax"):
        msg.memory_saving(model)


# -- the line --------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [True, False])
def test_fit_says_once_what_is_saved(
    caplog: pytest.LogCaptureFixture, jit: bool
) -> None:
    def wide() -> Any:
        layers = [keras.layers.Dense(256, "gelu") for _ in range(16)]
        return keras.Sequential([keras.Input([256]), *layers])

    model = msg.memory_saving(made(wide, jit=jit))
    rows = 2048 if jit else 4096  # else the first one's peak would hide the second's
    with caplog.at_level(logging.INFO, keras_line.__name__):
        for _ in range(2):
            fitted(model, rows=rows, width=256)
    lines = [r.getMessage() for r in caplog.records if r.name == keras_line.__name__]
    assert len(lines) == 1
    figures = re.search(
        r"peak ([\d.]+) MiB instead of stock's ([\d.]+) MiB, measured ([\d.]+) MiB",
        lines[0],
    )
    assert figures is not None, lines
    predicted, stock, measured = map(float, figures.groups())
    assert predicted < 0.5 * stock
    assert predicted / 2 < measured < stock


def test_the_line_begins_behind_the_progress_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keras.config.enable_interactive_logging()
    for verbose, steps in ((1, 4), (2, 4), (1, 1)):
        model = msg.memory_saving(made(sequential))
        data = fixed(8 * steps, 8)
        model.fit(data, data, batch_size=8, verbose=verbose)
        printed = capsys.readouterr().out
        lines = [text for text in printed.splitlines() if "predicted peak" in text]
        assert len(lines) == 1
        assert lines[0].startswith(f"{model.name}: predicted peak")
        assert "\n\n" not in printed


@pytest.mark.parametrize("unknown_dim", (8, None))
def test_the_line_says_which_batch_was_assumed(
    caplog: pytest.LogCaptureFixture, unknown_dim: int | None
) -> None:
    model = msg.memory_saving(made(sequential), unknown_dim=unknown_dim)
    with caplog.at_level(logging.INFO, keras_line.__name__):
        model.fit(fixed(20, 8), fixed(20, 8), batch_size=8, verbose=0)
    assert "(for batches of 8, see `unknown_dim`), not measured (the" in caplog.text


def test_the_second_step_is_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = [keras.layers.Dense(512, "gelu") for _ in range(8)]
    model = made(
        lambda: keras.Sequential([keras.Input([512]), *layers]), optimizer="adam"
    )
    msg.memory_saving(model)
    x = fixed(1536, 512)
    seen: list[float] = []

    class Peaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                read_counters(reset=True)
            self.before = read_counters().devices["/cpu:0"]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            after = read_counters().devices["/cpu:0"]
            assert after.peak_bytes >= self.before.peak_bytes  # nothing is forgotten
            seen.append((after.peak_bytes - self.before.current_bytes) / 2**20)

    with caplog.at_level(logging.INFO, keras_line.__name__):
        model.fit(x, x, batch_size=512, verbose=0, callbacks=[Peaks()])
    (said,) = re.findall(
        r"measured ([\d.]+) MiB on /cpu:0 above weights and optimizer slots",
        caplog.text,
    )
    slots = 8 * 2 * 512 * 512 * 4 / 2**20
    assert float(said) < seen[0] - slots / 2
    assert abs(float(said) - seen[2]) < 4.5


def test_a_single_step_says_so(caplog: pytest.LogCaptureFixture) -> None:
    layers = [keras.layers.Dense(512, "gelu") for _ in range(4)]
    model = made(lambda: keras.Sequential([keras.Input([512]), *layers]))
    msg.memory_saving(model)
    read_counters(reset=True)
    with caplog.at_level(logging.INFO, keras_line.__name__):
        for _ in range(2):
            model.fit(fixed(512, 512), fixed(512, 512), batch_size=512, verbose=0)
    assert caplog.text.count("instead of stock's") == 1
    assert "MiB on /cpu:0 in the first step, in which slots" in caplog.text


def test_peaks_if_consumed_where_only_they_fall() -> None:
    peaks = {"predicted_peak_bytes": 4 << 20, "stock_peak_bytes": 4 << 20}
    peaks |= {"predicted_peak_if_consumed_bytes": 1 << 20}
    plan: Any = SimpleNamespace(**peaks, stock_peak_if_consumed_bytes=2 << 20)
    text = "1.00 MiB instead of stock's 2.00 MiB, each gradient consumed as it comes"
    assert keras_line._peaks(plan) == text
    plan.stock_peak_bytes = 8 << 20
    assert keras_line._peaks(plan) == "4.00 MiB instead of stock's 8.00 MiB"


@pytest.mark.filterwarnings("ignore:Even though the:UserWarning")
def test_all_functions_run_eagerly(capsys: pytest.CaptureFixture[str]) -> None:
    model = msg.memory_saving(made(sequential))
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.warns(UserWarning, match="trains eagerly") as caught:
            fitted(model)
    finally:
        tf.config.run_functions_eagerly(False)
    told = [str(w.message) for w in caught if "trains eagerly" in str(w.message)]
    assert len(told) == 1
    assert "run_functions_eagerly(True)` was called" in told[0]
    assert "Compile" not in told[0]
    model.fit(fixed(16, 8), fixed(16, 8), batch_size=8, verbose=2)
    assert capsys.readouterr().out.count("instead of stock's") == 1


@pytest.mark.parametrize("interactive", [True, False])
@pytest.mark.parametrize("verbose", [2, 0])
def test_the_line_is_printed_where_nobody_asked_for_a_log(
    capsys: pytest.CaptureFixture[str], interactive: bool, verbose: int
) -> None:
    model = msg.memory_saving(made(sequential))
    if not interactive:
        keras.config.disable_interactive_logging()
    try:
        for _ in range(2):
            model.fit(fixed(16, 8), fixed(16, 8), verbose=verbose)
    finally:
        keras.config.enable_interactive_logging()
    assert capsys.readouterr().out.count("instead of stock's") == int(
        interactive and verbose > 0
    )
