"""`enable`, `disable`, `enabled`, `status`: every route, and the way back."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from tape_helpers import chain, variables
from tensorflow import GradientTape as EarlyTape
from tensorflow import gradients as early_gradients
from tensorflow.python.eager import imperative_grad
from tf_helpers import assert_close, assert_same_bits, copies_in, fixed, run

import memory_saving_gradients as msg
from memory_saving_gradients import counting, doors, keras_models

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


@pytest.fixture(autouse=True)
def nothing_is_enabled() -> Iterator[None]:
    before = imperative_grad.imperative_grad
    counting.reset_counts()
    yield
    msg.disable()
    assert not msg.status().active
    assert imperative_grad.imperative_grad is before


def rewired() -> int:
    return sum(counting.counts().rewired.values())


# -- routes: each returns numbers ------------------------------------------------------


def tape_route(jit: bool = False, tape: Any = EarlyTape) -> Any:
    ws = variables(8)

    @tf.function(autograph=False, jit_compile=jit)
    def step(x: tf.Tensor) -> Any:
        with tape() as recording:
            loss = tf.reduce_sum(chain(x, ws) ** 2)
        return recording.gradient(loss, ws)

    return step(tf.constant(fixed(4, 8)))


def function_route() -> Any:
    ws = variables(8)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        return early_gradients(chain(x, ws), ws)

    return step(tf.constant(fixed(4, 8)))


def graph_route(differentiate: Any = early_gradients) -> Any:
    with tf.Graph().as_default():
        ws = [
            v1.get_variable(f"w{i}", initializer=fixed(8, 8, seed=i)) for i in range(8)
        ]
        return run(differentiate(chain(tf.constant(fixed(4, 8)), ws), ws))


def optimizer_route() -> Any:
    with tf.Graph().as_default():
        ws = [
            v1.get_variable(f"w{i}", initializer=fixed(8, 8, seed=i)) for i in range(8)
        ]
        loss = tf.reduce_sum(chain(tf.constant(fixed(4, 8)), ws))
        train = v1.train.AdamOptimizer(0.1).minimize(loss)
        with tf.control_dependencies([train]):
            after = [w.read_value() for w in ws]
        return run(after)


def optimizer_in_function_route() -> Any:
    ws = variables(8)
    optimizer = v1.train.GradientDescentOptimizer(0.1)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        optimizer.minimize(lambda: tf.reduce_sum(chain(x, ws)), var_list=ws)

    step(tf.constant(fixed(4, 8)))
    return [w.numpy() for w in ws]


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def keras_model(kind: type[Any] = keras.Sequential, **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = []
    for number in range(4):
        layers += [
            keras.layers.Dense(8, "softplus", name=f"dense{number}"),
            keras.layers.BatchNormalization(name=f"norm{number}"),
            keras.layers.Dropout(0.2, name=f"dropout{number}"),
        ]
    model = kind([keras.Input([8]), *layers])
    model.compile("sgd", "mse", **compiled)
    return model


def trained(model: Any, how: str = "fit") -> Any:
    x, y = fixed(16, 8), fixed(16, 8, seed=1)
    if how == "fit":
        model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    else:
        model.train_on_batch(x, y)
    return model.get_weights()


def keras_route(
    jit: bool = False, how: str = "fit", kind: Any = keras.Sequential, **more: Any
) -> Any:
    return trained(keras_model(kind, jit_compile=jit, **more), how)


ROUTES: dict[str, Callable[[], Any]] = {
    "tape": tape_route,
    "tape, now": lambda: tape_route(tape=tf.GradientTape),
    "gradients in a function": function_route,
    "gradients in a graph": graph_route,
    "v1.gradients": lambda: graph_route(v1.gradients),
    "minimize": optimizer_route,
    "minimize in a function": optimizer_in_function_route,
    "fit": keras_route,
    "train_on_batch": lambda: keras_route(how="batch"),
    "own train_step": lambda: keras_route(kind=OwnStep),
    "steps_per_execution": lambda: keras_route(steps_per_execution=2),
}
JITTED: dict[str, Callable[[], Any]] = {
    "tape": lambda: tape_route(jit=True),
    "fit": lambda: keras_route(jit=True),
    "own train_step": lambda: keras_route(jit=True, kind=OwnStep),
    "steps_per_execution": lambda: keras_route(jit=True, steps_per_execution=2),
}


@pytest.mark.parametrize("route", ROUTES)
def test_routes(route: str) -> None:
    stock = ROUTES[route]()
    with msg.enabled():
        assert rewired() == 0
        new = ROUTES[route]()
        assert rewired() >= 1
        assert msg.last_plan().recomputed
    assert_same_bits(list(stock), list(new))
    before = rewired()
    ROUTES[route]()
    assert rewired() == before


@pytest.mark.slow
@pytest.mark.parametrize("route", JITTED)
def test_routes_under_xla(route: str) -> None:
    # As users have it: without Grappler XLA takes ten times as long to compile.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    stock = JITTED[route]()
    with msg.enabled():
        new = JITTED[route]()
        assert rewired() >= 1
        assert msg.last_plan().xla
    assert_close(list(stock), list(JITTED[route]()), list(new))


@pytest.mark.parametrize("eager", [True, False])
def test_keras_2(eager: bool) -> None:
    tf_keras = pytest.importorskip("tf_keras")
    with msg.enabled(), tf.Graph().as_default() if not eager else doors.hold_open():
        # Layers of Keras 2 belong to the mode, eager or graph, that they are made in.
        layers = [tf_keras.layers.Dense(8, "softplus") for _ in range(8)]
        model = tf_keras.Sequential([tf_keras.Input([8]), *layers])
        model.compile("sgd", "mse")
        model.fit(fixed(16, 8), fixed(16, 8), verbose=0)
        assert rewired() >= 1
        before = rewired()
        with msg.enabled("speed"):  # a setting of another kind: it is traced again
            model.fit(fixed(16, 8), fixed(16, 8), verbose=0)
            assert rewired() + sum(counting.counts().stock.values()) > before


@pytest.mark.parametrize("kind", ["jacobian", "batch_jacobian"])
def test_stock_jacobians(kind: str) -> None:
    ws = variables(4)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x, ws)
        return [getattr(tape, kind)(y, x)]

    x = tf.constant(fixed(4, 8))
    stock = tf.function(step, autograph=False)(x)
    with msg.enabled():
        assert_same_bits(stock, tf.function(step, autograph=False)(x))


def test_gradients_inside_a_vectorized_map() -> None:
    ws = variables(6)

    def step(x: tf.Tensor) -> Any:
        def one(row: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(row)
                y = tf.reduce_sum(chain(row[None], ws))
            return tape.gradient(y, row)

        return [tf.vectorized_map(one, x), tf.hessians(tf.reduce_sum(chain(x, ws)), x)]

    x = tf.constant(fixed(4, 8))
    stock = tf.nest.flatten(tf.function(step, autograph=False)(x))
    with msg.enabled():
        new = tf.nest.flatten(tf.function(step, autograph=False)(x))
    assert_close(stock, stock, new)


def test_ragged_targets() -> None:
    w = tf.Variable(fixed(8, 8))

    def step() -> Any:
        values = chain(tf.constant(fixed(5, 8)), [w] * 8)
        ragged = tf.RaggedTensor.from_row_lengths(values, [2, 3])
        with tf.GradientTape() as tape:
            loss = ragged * tf.reduce_sum(w)
        return [tf.gradients(ragged, w)[0], tape.gradient(loss, w)]

    stock = tf.function(step, autograph=False)()
    with msg.enabled():
        assert_same_bits(stock, tf.function(step, autograph=False)())
        assert rewired() >= 1


# -- on and off ------------------------------------------------------------------------


def test_enable_and_disable() -> None:
    before = imperative_grad.imperative_grad
    msg.enable()
    msg.enable("memory")
    assert msg.status().active
    tape_route()
    assert rewired() == 1
    msg.disable()
    assert imperative_grad.imperative_grad is before
    tape_route()
    assert rewired() == 1
    msg.disable()


def test_second_order_of_stock_is_right_after_disabling() -> None:
    def found(enabled: bool) -> Any:
        with tf.Graph().as_default():
            x = tf.constant(fixed(4, 8))
            # What the copies bypass: a derivative through these would miss paths.
            reads = [tf.constant(fixed(8, 8, seed=i)) * 1.0 for i in range(6)]
            if enabled:
                msg.enable()
            (first,) = tf.gradients(chain(x, reads), x)
            msg.disable()
            return run(tf.gradients(tf.reduce_sum(first**2), [x, *reads]))

    stock, new = found(False), found(True)
    assert rewired() == 1
    assert_close(stock, stock, new)


def strategy() -> str:
    tape_route()
    plan = msg.last_plan()
    return plan.strategy if plan else ""


def test_blocks_nest() -> None:
    msg.enable("speed")
    with msg.enabled("memory"):
        with msg.enabled(lambda t: "Tanh" in t.name):
            assert strategy() == "a predicate"
        assert strategy() == "memory"
        msg.disable()
        before = rewired()
        tape_route()
        assert rewired() == before
    assert not msg.status().active


def test_a_block_inside_a_traced_function() -> None:
    w = tf.Variable(fixed(8, 8))

    @tf.function
    def step(x: tf.Tensor) -> Any:
        with msg.enabled("speed"):
            with tf.GradientTape() as tape:
                y = tf.tanh(tf.nn.softplus(tf.tanh(tf.nn.softplus(x @ w) @ w) @ w))
            first = tape.gradient(y, w)
        with tf.GradientTape() as tape:
            y = tf.tanh(tf.nn.softplus(x @ w))
        return [first, tape.gradient(y, w)]

    step(tf.constant(fixed(4, 8)))
    assert rewired() + sum(counting.counts().stock.values()) == 1


def test_the_way_back_after_an_exception() -> None:
    before = imperative_grad.imperative_grad
    with pytest.raises(ZeroDivisionError), msg.enabled(), msg.enabled("speed"):
        raise ZeroDivisionError
    assert imperative_grad.imperative_grad is before
    with msg.enabled(), pytest.raises(msg.CheckpointError), msg.enabled("fast"):
        pass
    assert imperative_grad.imperative_grad is before


def test_blocks_of_two_threads_may_overlap() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with msg.enabled("speed"):
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    with msg.enabled("memory"):
        thread.start()
        entered.wait()
    assert msg.status().enabled == "speed"
    left.set()
    thread.join()
    assert not msg.status().active


def test_two_threads_trace() -> None:
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        results[number] = tape_route()

    stock = tape_route()
    with msg.enabled():
        threads = [threading.Thread(target=work, args=[n]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rewired() == 4
    for new in results.values():
        assert_same_bits(stock, new)


def test_explicit_checkpoints_come_first_and_nothing_is_rewired_twice() -> None:
    ws = variables(8)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape(checkpoints="speed") as tape:
            loss = tf.reduce_sum(chain(x, ws))
        first = tape.gradient(loss, ws)
        assert tape.plan.strategy == "speed"
        second = msg.gradients(
            loss, ws, checkpoints=lambda t: t.name.startswith("Tanh")
        )
        assert msg.last_plan().strategy == "a predicate"
        return first + second

    with msg.enabled():
        step(tf.constant(fixed(4, 8)))
        assert rewired() == 2


def test_an_empty_collection_leaves_stock_and_warns_once() -> None:
    stock = tape_route()
    with msg.enabled("collection"):
        with pytest.warns(UserWarning, match=r"stays stock.*is empty"):
            assert_same_bits(stock, tape_route())
        assert_same_bits(stock, tape_route())  # warnings are errors here
        assert "is empty" in str(msg.status())
    with msg.enabled(["none:0"]), pytest.warns(UserWarning, match=r"stays stock.*none"):
        assert_same_bits(stock, tape_route())


def test_an_empty_list_serves_nobody() -> None:
    with pytest.raises(msg.CheckpointError, match=r"enable`.*an empty list"):
        msg.enable([])
    with pytest.raises(msg.CheckpointError, match=r"enabled`.*an empty list"):
        msg.enabled([]).__enter__()
    assert not msg.status().active


# -- Keras models that were traced before ----------------------------------------------


def test_traced_models_are_traced_again(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    model, untouched = keras_model(jit_compile=False), keras_model()
    trained(model)
    with caplog.at_level(logging.INFO, "memory_saving_gradients.patching"):
        msg.enable()
    assert f"traced again: {model.name}" in caplog.text
    assert f"at their next step: {model.name}" in str(msg.status())
    assert untouched.train_function is None
    trained(model)
    assert rewired() >= 1
    assert "at their next step" not in str(msg.status())
    before = rewired()
    msg.enable("memory")
    trained(model)
    assert rewired() == before
    msg.disable()
    trained(model)
    assert rewired() == before


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_models_of_one_name_are_counted(twice: bool) -> None:
    gc.collect()
    models = [keras_model(jit_compile=False) for _ in range(2)]
    for model in models:
        model.name = "twin"
        trained(model)
    with msg.enabled():
        if twice:
            keras_models.retrace(models)
        assert "at their next step: twin (2 models)" in str(msg.status())
        trained(models[0])
        note = next(n for n in msg.status().notes if "at their next step" in n)
        assert note.endswith(": twin")
        trained(models[1])
        assert "Without effect" not in str(msg.status())
        for model in models:
            msg.memory_saving(model, "speed")
        assert "twin: speed (2 models)" in str(msg.status())
        # As where a model makes its train function by itself, and knows no `force`.
        models[0].train_function = None
        assert "at their next step: twin (2 models)" in str(msg.status())
        for model in models:
            trained(model)
        assert "at their next step" not in str(msg.status())
    for model in models:
        msg.memory_saving(model, None)


def test_enabling_while_fit_runs() -> None:
    model = keras_model(jit_compile=False)

    class Switch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                msg.enable()

    model.fit(fixed(24, 8), fixed(24, 8), batch_size=8, verbose=0, callbacks=[Switch()])
    assert rewired() >= 1


# -- status ----------------------------------------------------------------------------


def test_status_says_what_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(msg.status()) == "Not enabled."
    eager = keras_model(run_eagerly=True, jit_compile=False)
    with msg.enabled():
        assert "stays as it is: make it anew" in str(msg.status())
        trained(eager)
        keras_route()
        told = str(msg.status())
        assert "Enabled: memory" in told
        assert "keras: fit, train_on_batch, custom train_step" in told
        assert "by tf.GradientTape" in told
        assert "2 gradients were taken eagerly" in told
        assert f"run_eagerly=True have no graph to rewrite: {eager.name}" in told
        monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
        assert "keras computes with jax" in str(msg.status())
        assert "  keras: fit" not in str(msg.status())
        monkeypatch.setattr(imperative_grad, "imperative_grad", None)
        assert "another library has replaced" in str(msg.status())
        monkeypatch.undo()
    assert copies_in(tf.Graph()) == []
