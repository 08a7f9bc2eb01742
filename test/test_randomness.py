"""Random numbers and state, where people meet them: tapes in functions, and `fit`.

Masks of the gradient are those of the forward pass, generators advance as in stock, and
what counts, prints or moves does so once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tape_helpers import chain, check, variables
from tf_helpers import assert_close, assert_same_bits, fixed

import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

layers = keras.layers

SHAPE = (4, 6, 8)


class Drops:
    """One of each kind that multiplies its input by something random.

    Attributes:
        kinds: From a name to a function of the input.
        generator: The one that one of them draws from.
    """

    def __init__(self, stateful: bool) -> None:
        keras.utils.set_random_seed(3)
        self.generator = tf.random.Generator.from_seed(5)
        self.kinds: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
            "Generator": lambda x: (
                x * tf.cast(self.generator.uniform(SHAPE) < 0.5, x.dtype)
            )
        }
        for name, layer in {
            "Dropout": layers.Dropout(0.5),
            "Dropout, seeded": layers.Dropout(0.5, seed=7),
            "SpatialDropout1D": layers.SpatialDropout1D(0.5),
            "GaussianDropout": layers.GaussianDropout(0.5),
        }.items():
            self.kinds[name] = lambda x, layer=layer: layer(x, training=True)
            self.seeds = layer.seed_generator
        if stateful:
            self.kinds["tf.nn.dropout"] = lambda x: tf.nn.dropout(x, 0.5)
            self.kinds["tf.random.uniform"] = lambda x: x * tf.random.uniform(SHAPE)
            self.kinds["tf.random.normal"] = lambda x: (
                x * tf.nn.relu(tf.random.normal(tf.shape(x)))
            )


def through(
    drops: Drops, tape: Any, jit: bool
) -> Callable[[tf.Tensor], tuple[list[Any], list[Any], list[Any]]]:
    """A step that returns what went into and came out of each drop, and gradients."""
    weights = [tf.Variable(fixed(8, 8, seed=i)) for i in range(len(drops.kinds))]

    @tf.function(autograph=False, jit_compile=jit)
    def step(x: tf.Tensor) -> Any:
        before, after = [], []
        with tape() as recording:
            for w, drop in zip(weights, drops.kinds.values(), strict=True):
                before.append(tf.tanh(tf.nn.softplus(x @ w)) + 2.0)
                recording.watch(before[-1])
                after.append(drop(before[-1]))
                recording.watch(after[-1])
                # Around each a way past it, so that no gradient is 0 by chance.
                x += tf.tanh(tf.exp(tf.sin(after[-1])))
            loss = tf.reduce_sum(x)
        return before, after, recording.gradient(loss, [*before, *after, *weights])

    return step


@pytest.mark.parametrize("jit", [False, True])
def test_masks_of_the_gradient_are_those_of_the_forward_pass(jit: bool) -> None:
    drops = Drops(stateful=True)
    before, after, gradients = through(drops, msg.GradientTape, jit)(fixed(*SHAPE))
    states = drops.generator.state.numpy(), drops.seeds.state.numpy()
    plan = msg.last_plan()
    assert plan.xla == jit
    assert len(plan.recomputed) > 5 * len(drops.kinds)
    count = len(before)
    into, out_of = gradients[:count], gradients[count : 2 * count]
    for name, x, y, dx, dy in zip(
        drops.kinds, before, after, into, out_of, strict=True
    ):
        factor = (y / x).numpy()
        assert factor.std() > 0.1, name
        assert np.array_equal(factor == 0, dx.numpy() == 0), name
        np.testing.assert_allclose(dx, dy * factor, rtol=1e-5, err_msg=name)
    # XLA draws other numbers for stateful ops; the generators advance all the same.
    stock = Drops(stateful=True)
    through(stock, tf.GradientTape, jit=False)(fixed(*SHAPE))
    assert_same_bits((stock.generator.state.numpy(), stock.seeds.state.numpy()), states)


def test_numbers_and_generators_are_stocks_step_by_step() -> None:
    def drawn(tape: Any) -> list[Any]:
        drops = Drops(stateful=True)
        step = through(drops, tape, jit=False)
        found: list[Any] = []
        for number in range(3):
            found += tf.nest.flatten(step(fixed(*SHAPE, seed=number)))
            found += [
                tf.random.uniform([3]),
                drops.generator.state.numpy(),
                drops.seeds.state.numpy(),
            ]
        return found

    stock, new = drawn(tf.GradientTape), drawn(msg.GradientTape)
    assert msg.last_plan().recomputed
    assert_same_bits(stock, new)
    a_step = len(new) // 3
    assert not np.array_equal(new[a_step - 1], new[2 * a_step - 1])


# -- what is kept of a draw ------------------------------------------------------------


def dropouts(x: tf.Tensor, ws: list[Any]) -> tf.Tensor:
    for w in ws:
        x = tf.nn.dropout(tf.tanh(tf.nn.gelu(x @ w)), 0.5)
    return x


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "checkpoints", ["memory", "speed", lambda t: t.name in ("Tanh_3:0", "Tanh_7:0")]
)
def test_of_a_stateful_draw_its_mask_of_bools_is_kept(
    checkpoints: Any, jit: bool
) -> None:
    ws = [tf.Variable(fixed(16, 16, seed=i)) for i in range(12)]

    @tf.function(autograph=False, jit_compile=jit)
    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape(checkpoints=checkpoints) as tape:
            loss = tf.reduce_sum(dropouts(x, ws) ** 2)
        return tape.gradient(loss, ws)

    step.get_concrete_function(tf.TensorSpec([256, 16]))
    plan = msg.last_plan()
    assert plan.recomputed
    graph = plan.reading.graph
    kept = [graph.ops[graph.tensors[t].op].type for t in plan.schedule.kept]
    assert kept.count("GreaterEqual") == 12
    read_by_copies = {
        t for op in plan.schedule.recomputed for t in graph.ops[op].inputs
    }
    held = {graph.ops[graph.tensors[t].op].type for t in read_by_copies}
    assert "RandomUniform" not in held
    assert all(
        plan.reading.ops[op].type != "GreaterEqual" for op in plan.schedule.recomputed
    )


def test_noise_is_held_once_and_in_its_smallest_form() -> None:
    ws = [tf.Variable(fixed(16, 16, seed=i)) for i in range(12)]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape() as tape:
            for w in ws:
                x = tf.tanh(tf.nn.gelu(x @ w)) + tf.random.normal([256, 16], 0.0, 0.1)
            loss = tf.reduce_sum(x**2)
        return tape.gradient(loss, ws)

    step.get_concrete_function(tf.TensorSpec([256, 16]))
    plan = msg.last_plan()
    graph = plan.reading.graph
    one = 256 * 16 * 4
    held = [t for t in plan.schedule.kept if graph.tensors[t].bytes >= one]
    made = [graph.ops[graph.tensors[t].op] for t in held]
    forward = [op for op in made if op.id < graph.forward_count]
    # One tensor a layer, draw or sum, and a few checkpoints.
    assert sum(op.type in ("AddV2", "RandomStandardNormal") for op in forward) <= 14
    assert plan.predicted_peak_bytes < 0.5 * plan.stock_peak_bytes


# -- Keras -----------------------------------------------------------------------------


def noisy_model(kinds: int) -> Any:
    parts: list[Any] = [keras.Input([6, 8])]
    for drop in [
        layers.SpatialDropout1D(0.3),
        layers.AlphaDropout(0.2, seed=7),
        layers.Dropout(0.5),
        layers.GaussianNoise(0.3),
        layers.GaussianDropout(0.3),
    ][:kinds]:
        parts += [layers.Dense(8, "softplus"), drop]
        parts += [layers.BatchNormalization(momentum=0.5)]
    return keras.Sequential([*parts, layers.Flatten(), layers.Dense(2)])


@pytest.mark.parametrize(("jit", "kinds"), [(False, 5), (True, 2)])
def test_fit_with_noise_and_batch_norm(jit: bool, kinds: int) -> None:
    def trained(save: bool) -> list[Any]:
        keras.utils.set_random_seed(1)
        model = noisy_model(kinds)
        model.compile("sgd", "mse", jit_compile=jit)
        if save:
            msg.memory_saving(model)
        x, y = fixed(8, 6, 8), fixed(8, 2)
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        drops = [layer for layer in model.layers if hasattr(layer, "seed_generator")]
        assert len(drops) == kinds
        seeds = [drop.seed_generator.state.numpy() for drop in drops]
        return [*model.get_weights(), *seeds, tf.random.uniform([3])]

    stock, new = trained(False), trained(True)
    assert len(msg.last_plan().recomputed) > 5
    if jit:
        assert_close(stock, stock, new)
    else:
        assert_same_bits(stock, new)


class Busy(layers.Layer):
    """Does all that must happen once: counts, measures, adds a loss, and more."""

    def __init__(self, note: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.dense = layers.Dense(8, "softplus")
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )
        self.vector = self.add_weight(
            shape=(8,), initializer="ones", trainable=False, name="vector"
        )
        self.mean = keras.metrics.Mean()
        self.note = note

    def call(self, x: tf.Tensor) -> tf.Tensor:
        x = self.dense(x)
        self.count.assign_add(1)
        # As a spectral norm does: updated, then used.
        self.vector.assign(0.9 * self.vector + 0.1 * tf.reduce_mean(x, 0))
        x = tf.tanh(x * self.vector)
        self.add_loss(1e-3 * tf.reduce_mean(x**2))
        self.mean.update_state(x)
        if self.note is not None:
            tf.print("busy", self.count)
            tf.debugging.assert_less(x, 5.0, message="too large")
            noted = tf.py_function(self.note, [tf.sin(x)], tf.float32)
            x += tf.stop_gradient(tf.ensure_shape(noted, x.shape))
        return tf.exp(tf.sin(x))


@pytest.mark.parametrize("jit", [False, True])
def test_state_and_side_effects_in_fit(
    jit: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def trained(save: bool) -> tuple[list[Any], list[int], str]:
        keras.utils.set_random_seed(1)
        host: list[int] = []

        def note(value: Any) -> Any:
            host.append(1)
            return value

        busy = [Busy(None if jit else note) for _ in range(2 if jit else 3)]
        model = keras.Sequential([keras.Input([8]), *busy])
        model.compile("sgd", "mse", jit_compile=jit)
        if save:
            msg.memory_saving(model)
        history = model.fit(
            fixed(12, 8), fixed(12, 8), batch_size=4, verbose=0, shuffle=False
        )
        counts = [int(layer.count.numpy()) for layer in busy]
        assert counts == [3] * len(busy)
        metrics = [v.numpy() for layer in busy for v in layer.mean.variables]
        weights = model.get_weights()
        printed = capfd.readouterr().err.split("\n")
        lines = [line for line in printed if line.startswith("busy")]
        return [*weights, *metrics, np.array(history.history["loss"])], host, lines

    stock, new = trained(False), trained(True)
    assert len(msg.last_plan().recomputed) > 5
    if jit:
        assert_close(stock[0], stock[0], new[0])
    else:
        assert_same_bits(stock[0], new[0])
        assert stock[1:] == new[1:]
        assert len(new[1]) == len(new[2]) == 9


def test_an_assertion_in_fit_still_fires() -> None:
    model = keras.Sequential([keras.Input([8]), *(Busy(tf.identity) for _ in range(3))])
    model.compile("sgd", "mse", jit_compile=False)
    msg.memory_saving(model)
    model.train_on_batch(fixed(4, 8), fixed(4, 8))
    assert msg.last_plan().recomputed
    for layer in model.layers:
        layer.vector.assign(np.full([8], np.nan, np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        model.train_on_batch(fixed(4, 8), fixed(4, 8))


def test_recurrent_dropout() -> None:
    def trained(save: bool) -> list[Any]:
        keras.utils.set_random_seed(1)
        dense = [layers.Dense(8, "gelu") for _ in range(4)]
        rnn = layers.GRU(8, dropout=0.2, recurrent_dropout=0.2)
        model = keras.Sequential([keras.Input([5, 8]), *dense, rnn, layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False)
        if save:
            msg.memory_saving(model)
        x, y = fixed(8, 5, 8), fixed(8, 2)
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        return model.get_weights()

    stock, new = trained(False), trained(True)
    assert msg.last_plan().recomputed
    assert_same_bits(stock, new)


# -- tapes -----------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_a_variable_that_changes_between_forward_pass_and_gradient(jit: bool) -> None:
    def build(tape: Any, x: tf.Tensor) -> Any:
        for w, start in zip((*ws, late), starts, strict=True):
            w.assign(start)
        with tape() as recording:
            loss = tf.reduce_sum(chain(chain(x, ws), [late] * 3) ** 2)
        late.assign(late * 0.5)
        for w in ws:
            w.assign(w * 0.9)
        return [*recording.gradient(loss, [*ws, late]), late.read_value()]

    ws, late = variables(), tf.Variable(fixed(8, 8, seed=9))
    starts = [w.numpy() for w in (*ws, late)]
    check(build, jit=jit)


def test_loss_curves_with_dropout_are_the_same_for_a_hundred_steps() -> None:
    x, target = tf.constant(fixed(16, 8)), tf.constant(fixed(16, 8, seed=1))

    def curve(tape: Any) -> list[Any]:
        keras.utils.set_random_seed(2)
        drops = [layers.Dropout(0.1) for _ in range(6)]
        ws = [tf.Variable(0.3 * fixed(8, 8, seed=i)) for i in range(6)]

        @tf.function(autograph=False)
        def step() -> tf.Tensor:
            with tape() as recording:
                y = x
                for w, drop in zip(ws, drops, strict=True):
                    y = drop(tf.tanh(tf.nn.softplus(y @ w)), training=True)
                loss = tf.reduce_mean((y - target) ** 2)
            for w, g in zip(ws, recording.gradient(loss, ws), strict=True):
                w.assign_sub(0.1 * g)
            return loss

        return [step() for _ in range(100)]

    stock, new = curve(tf.GradientTape), curve(msg.GradientTape)
    assert msg.last_plan().recomputed
    assert_same_bits(stock, new)
    assert float(new[-1]) < float(new[0])
