"""What `memory_saving` may be given, None above all, and what it then says."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import dense_layers, weights_of
from tf_helpers import assert_same_bits, fixed

import memory_saving_gradients as msg
from memory_saving_gradients import counting, keras_line

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


def network(name: str = "network", **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "softplus", name=f"dense{n}") for n in range(6)]
    model = keras.Sequential([keras.Input([8]), *layers], name=name)
    model.compile("sgd", "mse", **{"jit_compile": False, **compiled})
    return model


def fitted(model: Any, **keywords: Any) -> Any:
    keywords = {"batch_size": 8, "verbose": 0, "shuffle": False, **keywords}
    model.fit(fixed(16, 8), fixed(16, 8, seed=1), **keywords)
    return model.get_weights()


def rewired() -> int:
    return sum(counting.counts().rewired.values())


# -- what may be given -----------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        lambda layers: filter(lambda layer: layer.name in ("dense2", "dense4"), layers),
        lambda layers: (layer for layer in (layers[2], layers[4])),
        lambda layers: {"a": layers[2], "b": layers[4]}.values(),
        lambda layers: dict.fromkeys(["dense2", "dense4"]).keys(),
        lambda layers: np.array(["dense2", "dense4"]),
        lambda layers: np.array([layers[2], layers[4]], object),
        lambda layers: {"dense4", "dense2"},
    ],
)
def test_layers_in_any_iterable(given: Callable[[Any], Any]) -> None:
    model = network()
    assert msg.memory_saving(model, given(model.layers)) is model
    for _ in range(2):  # what can be gone through once only has been
        fitted(model)
        model.compile("sgd", "mse", jit_compile=False)
    plan = msg.last_plan()
    assert plan is not None
    scopes = [re.sub(r"_\d+$", "", name.split("/")[1]) for name in plan.kept]
    assert scopes == ["dense2", "dense4"]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (3, msg.CheckpointError, r"must be layers .*Budget\(3\).*It has: dense0"),
        (0.5, msg.CheckpointError, r"must be layers .*\"50%\".*It has: dense0"),
        (b"dense2", msg.CheckpointError, "may list layers.*It has: dense0"),
        (np.array("dense2"), msg.CheckpointError, "must be layers.*It has: dense0"),
        (tf.constant([1.0]), msg.CheckpointError, "may list layers.*It has: dense0"),
        (keras.Input([8]), msg.CheckpointError, r"layers.*KerasTensor.*has: dense0"),
        (filter(None, []), msg.CheckpointError, "lists no layers.*It has: dense0"),
        (iter(["dens2"]), LookupError, "'dens2'.*mean 'dense2'"),
        (np.array(["dens2"]), LookupError, "mean 'dense2'"),
        ([["dense2"]], msg.CheckpointError, "may list layers.*It has: dense0"),
    ],
)
def test_what_cannot_be_is_said_at_the_call(given: Any, error: Any, match: str) -> None:
    model = network()
    with pytest.raises(error, match=match):
        msg.memory_saving(model, given)
    assert "train_step" not in vars(model)


def test_a_plan_itself_is_told_how_it_is_given() -> None:
    with pytest.raises(msg.CheckpointError, match=r"Plan\.from_json"):
        msg.memory_saving(network(), msg.plan(network(), batch_size=8))


def test_a_dry_run_says_the_same_of_a_model() -> None:
    for given in (None, 3):
        with pytest.raises(msg.CheckpointError, match=r"\.plan`:.*must be layers"):
            msg.plan(network(), checkpoints=given, batch_size=8)


def test_a_recurrent_layer_as_checkpoint(recwarn: pytest.WarningsRecorder) -> None:
    x = keras.Input([6, 8])
    y, *_ = keras.layers.LSTM(8, return_sequences=True, return_state=True, name="lstm")(
        x
    )
    y = keras.layers.Dense(8, "gelu")(keras.layers.Dense(8, "gelu")(y))
    model = keras.Model(x, y)
    model.compile("sgd", "mse", jit_compile=False)
    msg.memory_saving(model, "lstm")
    data = np.ones([16, 6, 8], "float32")
    model.fit(data, data, verbose=0)
    plan = msg.last_plan()
    assert plan is not None and plan.recomputed
    assert [str(w.message) for w in recwarn if "memory_saving" in str(w.message)] == []


class Looping(keras.layers.Layer):
    """A layer whose only output is that of a loop."""

    def call(self, x: Any) -> Any:
        return tf.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y * y), [0, x])[1]


def test_a_layer_that_is_held_anyway_says_so_where_fit_is_called() -> None:
    layers = [keras.layers.Dense(8, "gelu") for _ in range(4)]
    model = keras.Sequential([keras.Input([8]), *layers[:2], Looping(), *layers[2:]])
    model.compile("sgd", "mse", jit_compile=False)
    msg.memory_saving(model, model.layers[2])
    with pytest.warns(UserWarning, match="are held anyway") as caught:
        fitted(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    plan = msg.last_plan()
    assert plan is not None and plan.recomputed


# -- None ------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_a_model_given_none_is_stock_whatever_is_enabled(before: bool) -> None:
    stock = fitted(network())
    model, other = network(name := f"exempt{before}"), network("other")
    if before:
        msg.memory_saving(model, "speed")
        assert f"{name}: speed" in msg.status().models
    msg.memory_saving(model, None)
    assert name not in str(msg.status())
    with msg.enabled():
        assert_same_bits(stock, fitted(model))
        assert msg.status().rewired == {}
        assert f"{name}: stock" in msg.status().models
        fitted(other)
        assert sum(msg.status().rewired.values()) == 1
        # Explicit counts more, and so does what the model is given later.
        msg.memory_saving(model, "speed")
        fitted(model)
        assert sum(msg.status().rewired.values()) == 2
        msg.memory_saving(model, None)
        fitted(model)
        assert sum(msg.status().rewired.values()) == 2
    assert name not in str(msg.status())


def test_a_recurrent_model_given_none_is_stock_inside_loops_too() -> None:
    model = keras.Sequential([keras.Input([6, 8]), keras.layers.LSTM(8)])
    model.compile("sgd", "mse", jit_compile=False)
    msg.memory_saving(model, None)
    data = np.ones([16, 6, 8], "float32")
    with msg.enabled(every=2):
        model.fit(data, data[:, 0], verbose=0)
        assert msg.status().rewired == {}


def test_a_clone_of_a_model_given_none_is_stock() -> None:
    model = msg.memory_saving(network(), None)
    with msg.enabled():
        clone = keras.models.clone_model(model)
        clone.compile("sgd", "mse", jit_compile=False)
        fitted(clone)
        assert msg.status().rewired == {}


def test_what_a_train_step_asks_for_itself_counts_more_than_none() -> None:
    class Explicit(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            with msg.GradientTape(checkpoints="speed") as tape:
                loss = self.compute_loss(None, data[1], self(data[0], training=True))
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    layers = [keras.layers.Dense(8, "softplus") for _ in range(6)]
    model = Explicit([keras.Input([8]), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    msg.memory_saving(model, None)
    before = rewired()
    fitted(model)
    assert rewired() > before


def test_a_tape_and_gradients_given_none_are_stock_whatever_is_enabled() -> None:
    weights, x = weights_of(5, 8), tf.constant(fixed(16, 8))
    seed = tf.constant(fixed(16, 8, seed=2))

    @tf.function(autograph=False)
    def step() -> Any:
        with msg.GradientTape(checkpoints=None) as tape:
            y = dense_layers(x, weights)
        by_tape = tape.gradient(y, weights, seed)
        assert tape.plan is None
        given = {"checkpoints": None, "grad_ys": [seed]}
        return by_tape, msg.gradients(y, weights, **given), tf.gradients(y, weights)

    with msg.enabled():
        by_tape, ours, _ = step()
        assert msg.status().rewired == {"tf.gradients": 1}
    assert_same_bits(by_tape, ours)
    assert msg.last_plan() is not None  # that of the last line
    with pytest.raises(TypeError, match="`unknown_dim` must be"):
        msg.GradientTape(checkpoints=None, unknown_dim="8")


def test_none_is_nothing_that_a_process_could_be_enabled_with() -> None:
    for where in (msg.enable, lambda given: msg.enabled(given).__enter__()):
        with pytest.raises(msg.CheckpointError, match=r"Call `disable\(\)`"):
            where(None)
    assert not msg.status().active


# -- status and the line ---------------------------------------------------------------


def test_status_accuses_no_bystander() -> None:
    eager = network("bystander", run_eagerly=True)
    msg.memory_saving(network())
    assert "bystander" not in str(msg.status())
    with msg.enabled():
        assert "no graph to rewrite: bystander" in str(msg.status())
        msg.memory_saving(eager, None)
        assert "no graph to rewrite" not in str(msg.status())
    msg.memory_saving(eager)
    assert "no graph to rewrite: bystander" in str(msg.status())


def test_one_gradient_was_taken_eagerly() -> None:
    with msg.enabled():
        for told in ("1 gradient was taken eagerly", "2 gradients were taken eagerly"):
            with tf.GradientTape() as tape:
                x = tf.Variable(1.0)
                y = x * x
            tape.gradient(y, x)
            assert told in str(msg.status())


@pytest.mark.parametrize("verbose", [0, 2])
def test_a_callback_that_asks_for_saving_hears_as_much_as_fit_says(
    verbose: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Saving(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                msg.memory_saving(self.model)

    model = network()
    x = fixed(20, 8)
    keywords = {"batch_size": 8, "verbose": verbose, "callbacks": [Saving()]}
    model.fit(x, x, epochs=3, **keywords)
    assert capsys.readouterr().out.count("instead of stock's") == bool(verbose)
    plan = msg.last_plan()
    assert plan is not None and plan.reading.unknown_dim == 8
    msg.memory_saving(model)
    with caplog.at_level(logging.INFO, keras_line.__name__):
        for _ in range(2):
            model.train_on_batch(x[:8], x[:8])
    assert caplog.text.count("instead of stock's") == 1
