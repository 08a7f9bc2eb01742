"""Randomness, state and side effects happen once, and in stock's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import EXACT_ROUTES, Work, assert_same_bits, check, fixed, run, session

import memory_saving_gradients as msg

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

Differentiate = Callable[[Any, Any], list[Any]]


def rewired(ys: Any, xs: Any) -> list[Any]:
    found = msg.gradients(ys, xs, checkpoints="memory")
    assert msg.last_plan().recomputed
    return found


def copied_types() -> set[str]:
    graph = v1.get_default_graph()
    return {graph.get_operation_by_name(n).type for n in msg.last_plan().recomputed}


# -- random numbers --------------------------------------------------------------------


def by_nn_dropout(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.dropout(x, 0.5)


def by_seeded_dropout(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.dropout(x, 0.5, seed=7)


def by_stateless_dropout(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2])


def by_stateless_uniform(x: tf.Tensor) -> tf.Tensor:
    seed = tf.random.uniform([2], maxval=2**30, dtype=tf.int32)
    return x * tf.cast(tf.random.stateless_uniform(x.shape, seed) < 0.5, x.dtype)


def by_noise(x: tf.Tensor) -> tf.Tensor:
    return x * tf.nn.relu(tf.random.normal(x.shape))


DRAWS = [
    by_nn_dropout,
    by_seeded_dropout,
    by_stateless_dropout,
    by_stateless_uniform,
    by_noise,
]


def blocks(
    x: tf.Tensor, w: Any, drop: Callable[[tf.Tensor], tf.Tensor], count: int = 4
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """The last activation, and what went into and came out of each dropout."""
    y, before, after = x, [], []
    for _ in range(count):
        before.append(tf.tanh(y @ w) + 2.0)
        after.append(drop(before[-1]))
        y = tf.tanh(tf.exp(tf.sin(after[-1] @ w)))
    return y, before, after


@pytest.mark.parametrize("draw", DRAWS)
def test_masks_of_the_gradient_are_those_of_the_forward_pass(draw: Any) -> None:
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        w = tf.constant(fixed(16, 16))
        y, before, after = blocks(tf.constant(fixed(8, 16)), w, draw)
        stock = tf.gradients(y, [*before, w])
        new = rewired(y, [*before, w])
        stock, new, after = run([stock, new, after])
    assert_same_bits(stock, new)
    for mask, gradient in zip(after, new, strict=False):
        assert ((mask == 0) == (gradient == 0)).all()
        assert 0 < (mask == 0).mean() < 1


@pytest.mark.parametrize("route", EXACT_ROUTES)
@pytest.mark.parametrize("draw", DRAWS)
def test_the_same_seed_gives_the_same_gradients(draw: Any, route: str) -> None:
    def forward(ws: Any, xs: Any) -> Any:
        tf.random.set_seed(5)
        return blocks(xs[0], ws[0], draw)[0]

    tf.random.set_seed(5)
    check(Work(forward, [fixed(16, 16)], [fixed(8, 16)]), route)


def test_later_draws_are_stocks() -> None:
    def drawn(differentiate: Differentiate) -> list[Any]:
        tf.random.set_seed(1)
        generator = tf.random.Generator.from_seed(5)
        seeds = keras.random.SeedGenerator(3)
        w = tf.Variable(fixed(16, 16))

        def drop(x: tf.Tensor) -> tf.Tensor:
            kept = tf.cast(generator.uniform(x.shape) < 0.5, x.dtype)
            return keras.random.dropout(tf.nn.dropout(x, 0.2), 0.5, seed=seeds) * kept

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            return differentiate(blocks(x, w, drop)[0], [w])

        found = []
        for _ in range(3):
            found += step(tf.constant(fixed(8, 16)))
            found += [
                tf.random.uniform([3]),
                generator.state.numpy(),
                seeds.state.numpy(),
            ]
        return found

    stock, new = drawn(tf.gradients), drawn(rewired)
    assert_same_bits(stock, new)
    assert not np.array_equal(new[0], new[4])


def test_keras_dropouts_and_noise() -> None:
    def trained(differentiate: Differentiate) -> list[Any]:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input([6, 6, 4]),
                layers.Conv2D(8, 3, activation="tanh"),
                layers.SpatialDropout2D(0.3),
                layers.GaussianNoise(0.3),
                layers.Conv2D(8, 3, activation="gelu"),
                layers.Flatten(),
                layers.Dropout(0.5),
                layers.Dense(16, activation="gelu"),
                layers.AlphaDropout(0.2, seed=7),
                layers.Dense(4),
            ]
        )
        variables = [w.value for w in model.trainable_variables]

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            return differentiate(model(x, training=True), variables)

        found = []
        for _ in range(2):
            found += step(tf.constant(fixed(2, 6, 6, 4)))
        state = [w.numpy() for w in model.non_trainable_variables]
        assert state
        return found + state

    assert_same_bits(trained(tf.gradients), trained(rewired))


def test_stateful_draws_are_kept_and_stateless_ones_redone() -> None:
    with tf.Graph().as_default():
        w = tf.constant(fixed(16, 16))

        def scaled(x: tf.Tensor) -> tf.Tensor:
            return x * tf.raw_ops.RandomStandardNormal(shape=x.shape, dtype=x.dtype)

        y, _, _ = blocks(tf.constant(fixed(8, 16)), w, scaled)
        rewired(y, w)
        assert "RandomStandardNormal" not in copied_types()
        assert "stateful" in msg.last_plan().summary()
    with tf.Graph().as_default():
        x, w = tf.constant(fixed(8, 16)), tf.constant(fixed(16, 16))
        y, _, _ = blocks(x, w, by_stateless_dropout)
        msg.gradients(y, w, checkpoints=lambda t: t.op.type == "Tanh")
        assert any(name.startswith("Stateless") for name in copied_types())


# -- variables -------------------------------------------------------------------------


def test_batch_norm_statistics_move_once() -> None:
    def trained(differentiate: Differentiate) -> list[Any]:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential([keras.Input([8, 8, 3])])
        for _ in range(2):
            model.add(layers.Conv2D(8, 3, padding="same"))
            model.add(layers.BatchNormalization(momentum=0.5))
            model.add(layers.Activation("relu"))
        variables = [w.value for w in model.trainable_variables]

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            return differentiate(model(x, training=True), variables)

        found = []
        for number in range(3):
            found += step(tf.constant(fixed(2, 8, 8, 3, seed=number)))
            found += [w.numpy() for w in model.non_trainable_variables]
        return found

    assert_same_bits(trained(tf.gradients), trained(rewired))


@pytest.mark.parametrize("flag", [False, True])
def test_batch_norm_with_a_tensor_for_training(flag: bool) -> None:
    def trained(differentiate: Differentiate) -> list[Any]:
        with tf.Graph().as_default():
            training = v1.placeholder(tf.bool, [])
            y = tf.constant(fixed(2, 4, 4, 3))
            w = v1.get_variable("w", initializer=fixed(1, 1, 3, 3), use_resource=True)
            moving = v1.get_variable("m", initializer=fixed(3), use_resource=True)
            start = moving.read_value()
            updates = [start.op]
            for _ in range(3):
                y = tf.nn.conv2d(y, w, 1, "SAME")
                batch_mean, variance = tf.nn.moments(y, [0, 1, 2])
                mean = tf.cond(training, lambda b=batch_mean: b, lambda: start)
                with tf.control_dependencies([updates[-1]]):
                    step = 0.1 * (start - batch_mean)
                    updates.append(moving.assign_sub(step, read_value=False))
                y = tf.tanh(
                    tf.nn.batch_normalization(y, mean, variance, None, None, 0.1)
                )
                v1.add_to_collection("checkpoints", y)
            gradients = differentiate(y, [w])
            with tf.control_dependencies([*updates, *gradients]):
                after = moving.read_value()
            return run([*gradients, after], {training: flag})

    assert_same_bits(trained(tf.gradients), trained(rewired))


def test_counters_and_metrics_count_once() -> None:
    def counted(differentiate: Differentiate) -> list[Any]:
        counter = tf.Variable(0)
        metric = keras.metrics.Mean()
        w = tf.Variable(fixed(8, 8))

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            y, losses = x, []
            for _ in range(4):
                y = tf.tanh(tf.nn.gelu(y @ w))
                counter.assign_add(1)
                losses.append(1e-3 * tf.reduce_sum(y**2))
                metric.update_state(losses[-1])
                y = tf.sin(y)
            loss = tf.reduce_sum(y) + tf.add_n(losses)
            return [loss, *differentiate(loss, [w])]

        for _ in range(3):
            found = step(tf.constant(fixed(8, 8)))
        count = next(v for v in metric.variables if v.shape == [] and "count" in v.path)
        return [*found, counter.numpy(), metric.result(), count.numpy()]

    stock, new = counted(tf.gradients), counted(rewired)
    assert_same_bits(stock, new)
    assert new[2] == 12
    assert new[4] == 12


def test_a_variable_that_changes_between_forward_and_backward_pass() -> None:
    def found(differentiate: Differentiate) -> list[Any]:
        v = tf.Variable(fixed(8, 8))
        u = tf.Variable(fixed(8, 8))

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            y = x
            for _ in range(5):
                y = tf.tanh(tf.nn.gelu(y @ v))
                # A spectral norm or a moving average: updated, then used.
                u.assign(0.9 * u + 0.1 * tf.transpose(y) @ y)
                y = tf.sin(y @ u)
            v.assign(v * 0.9)
            gradients = differentiate(y, [v, u])
            v.assign(v * 0.5)
            return gradients

        for _ in range(2):
            gradients = step(tf.constant(fixed(8, 8)))
        return [*gradients, v.numpy(), u.numpy()]

    assert_same_bits(found(tf.gradients), found(rewired))


def test_an_update_in_a_version_1_graph_between_the_passes() -> None:
    def found(differentiate: Differentiate) -> list[Any]:
        with tf.Graph().as_default():
            v = v1.get_variable("v", initializer=fixed(8, 8), use_resource=True)
            y = tf.constant(fixed(8, 8))
            read = v.read_value()
            for _ in range(5):
                y = tf.tanh(tf.nn.gelu(y @ read))
            with tf.control_dependencies([y]):
                update = v.assign(v * 0.5, read_value=False)
            with tf.control_dependencies([update]):
                late = tf.identity(y)
            return run([late, *differentiate(late, [v, read])], steps=2)

    assert_same_bits(found(tf.gradients), found(rewired))


def test_updating_each_weight_as_soon_as_its_gradient_is_there() -> None:
    def trained(differentiate: Differentiate) -> list[Any]:
        weights = [tf.Variable(fixed(8, 8, seed=i)) for i in range(6)]

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            y = x
            for w in weights:
                y = tf.tanh(tf.nn.gelu(y @ w))
            loss = tf.reduce_sum(y * y)
            for w, g in zip(weights, differentiate(loss, weights), strict=True):
                w.assign_sub(0.1 * g)
            return loss

        for _ in range(3):
            loss = step(tf.constant(fixed(8, 8)))
        return [loss, *(w.numpy() for w in weights)]

    assert_same_bits(trained(tf.gradients), trained(rewired))


# -- the outside world -----------------------------------------------------------------


def test_host_callbacks_and_prints_fire_once_in_order(
    capfd: pytest.CaptureFixture[str],
) -> None:
    events: list[int] = []
    w = tf.Variable(fixed(8, 8))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        y = x
        for number in range(4):

            def note(a: Any, number: int = number) -> Any:
                events.append(number)
                return a

            y = tf.tanh(tf.nn.gelu(y @ w))
            y = tf.sin(y) + tf.numpy_function(note, [y], tf.float32)
            y = tf.exp(y) + tf.stop_gradient(tf.py_function(note, [y], tf.float32))
            tf.print("layer", number)
            y = tf.tanh(tf.exp(tf.ensure_shape(y, [8, 8])))
        return rewired(y, [w])

    for _ in range(2):
        step(tf.constant(fixed(8, 8)))
    assert events == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    printed = capfd.readouterr().err.split("\n")
    layers = [line for line in printed if line.startswith("layer")]
    assert layers == [f"layer {number}" for number in range(4)] * 2


def test_assertions_fire_once_and_still_fire() -> None:
    def forward(ws: Any, xs: Any) -> Any:
        y = xs[0]
        for _ in range(4):
            y = tf.tanh(tf.nn.gelu(y @ ws[0]))
            y = tf.debugging.check_numerics(y, "not finite")
            check_ = tf.debugging.assert_less(y, 2.0, message="too large")
            with tf.control_dependencies([] if check_ is None else [check_]):
                y = tf.sin(tf.exp(y))
        return y

    for route in EXACT_ROUTES:
        check(Work(forward, [fixed(8, 8)], [fixed(8, 8)]), route)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [8, 8])
        (gradient,) = rewired(forward([tf.constant(fixed(8, 8))], [x]), x)
        assert not copied_types() & {"Assert", "CheckNumerics", "If", "StatelessIf"}
        with (
            session(graph) as running,
            pytest.raises(tf.errors.InvalidArgumentError, match="not finite"),
        ):
            running.run(gradient, {x: np.full([8, 8], np.inf, np.float32)})


def test_ops_with_state_are_never_copied() -> None:
    def drop(x: tf.Tensor) -> tf.Tensor:
        x = tf.nn.dropout(x, 0.1) + tf.random.normal(x.shape) * 0.1
        x = x * tf.ensure_shape(tf.numpy_function(np.abs, [x], x.dtype), x.shape)
        return tf.debugging.check_numerics(x, "not finite")

    with tf.Graph().as_default() as graph:
        w = v1.get_variable("w", initializer=fixed(16, 16), use_resource=True)
        y, _, _ = blocks(tf.constant(fixed(8, 16)), w, drop)
        rewired(y, w)
        for name in msg.last_plan().recomputed:
            operation = graph.get_operation_by_name(name)
            assert not operation.op_def.is_stateful
            assert all(t.dtype != tf.resource for t in operation.inputs)


def test_fetching_gradients_runs_nothing_that_only_the_loss_waits_for() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [256, 256])
        y = x
        for _ in range(12):
            y = tf.tanh(y)
        count = v1.get_variable("count", initializer=0.0, use_resource=True)
        with tf.control_dependencies([count.assign_add(1.0)]):
            loss = tf.identity(tf.reduce_sum(y))
        (gradient,) = msg.gradients(loss, x, checkpoints="memory")
        assert msg.last_plan().recomputed
        session.run(v1.global_variables_initializer())
        session.run(gradient, {x: np.ones([256, 256])})
        assert session.run(count) == 0
        session.run([loss, gradient], {x: np.ones([256, 256])})
        assert session.run(count) == 1
