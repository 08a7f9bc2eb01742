"""`GradientTape` is a drop-in for `tf.GradientTape`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import dense_layers, weights_of
from tape_helpers import chain, check, found, variables
from tf_helpers import assert_same_bits, copies_in, fixed, run

import mem_util
import memory_saving_gradients as msg
from memory_saving_gradients import tape as tape_module

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


@pytest.mark.parametrize("jit", [False, True])
def test_a_chain(jit: bool) -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape() as recording:
            loss = tf.reduce_sum(chain(x, ws) ** 2)
        return recording.gradient(loss, ws)

    check(build, jit=jit)


def test_in_a_version_1_graph() -> None:
    def build(tape: Any) -> Any:
        with tf.Graph().as_default() as graph:
            x, w = tf.constant(fixed(4, 8)), tf.constant(fixed(8, 8, seed=1))
            with tape() as recording:
                recording.watch([x, w])
                loss = tf.reduce_sum(chain(x, [w] * 8))
            return run(recording.gradient(loss, [x, w])), copies_in(graph)

    stock, none = build(tf.GradientTape)
    new, copies = build(msg.GradientTape)
    assert_same_bits(stock, new)
    assert copies and not none


def test_a_persistent_tape_differentiates_twice() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape(persistent=True) as recording:
            middle = chain(x, ws[:3])
            first = tf.reduce_sum(middle**2)
            second = tf.reduce_sum(tf.exp(chain(middle, ws[3:])))
        return [recording.gradient(loss, ws) for loss in (first, second)]

    check(build)


def test_a_persistent_tape_differentiates_in_its_own_context() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape(persistent=True) as recording:
            recording.watch(x)
            loss = tf.reduce_sum(chain(x, ws))
            length = tf.reduce_sum(recording.gradient(loss, x) ** 2)
        return [recording.gradient(length, ws), recording.gradient(loss, x)]

    check(build)


def test_structures_and_nones() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape() as recording:
            recording.watch(x)
            loss = {"a": [tf.reduce_sum(chain(x, ws[:5]))], "b": tf.constant(3)}
        sources = {"ws": ws, "pair": (x, tf.constant(1.0))}
        result = recording.gradient(loss, sources)
        assert result["ws"][5] is None
        assert result["pair"][1] is None
        return result

    check(build)


def test_several_targets_with_gradients_of_their_own() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape() as recording:
            middle = chain(x, ws[:3])
            last = chain(middle, ws[3:])
        given = {"m": tf.cos(x), "l": tf.sin(x)}
        return recording.gradient({"m": middle, "l": last}, ws, given)

    check(build)


def test_targets_that_are_complex_whole_or_variables() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape(persistent=True) as recording:
            recording.watch(x)
            y = chain(x, ws)
            complex_y = tf.complex(y, y * 2.0)
            whole = tf.cast(y, tf.int32)
        assert recording.gradient(whole, ws) == [None] * 6
        return [
            recording.gradient(complex_y, ws),
            recording.gradient([y, ws[0]], ws),
            recording.gradient(x, x),
        ]

    check(build)


def test_slices_stay_slices() -> None:
    table = tf.Variable(fixed(50, 8))
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape() as recording:
            rows = tf.gather(table, [3, 1, 3])
            loss = tf.reduce_sum(chain(rows, ws) * tf.gather(table, [1, 2, 4]))
        result = recording.gradient(loss, [table, *ws])
        assert isinstance(result[0], tf.IndexedSlices)
        return [result[0].values, result[0].indices, *result[1:]]

    check(build)


@pytest.mark.parametrize("eager", [False, True])
def test_zeros_for_keras_variables(eager: bool) -> None:
    import keras

    idle, used = keras.Variable(np.ones([2, 3], "float32")), keras.Variable(fixed(8, 8))

    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape() as tape:
            loss = tf.reduce_sum(chain(x, [used] * 6))
        return tape.gradient(loss, {"a": idle, "b": [used]}, None, "zero")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = (step if eager else tf.function(step))(tf.constant(fixed(4, 8)))
    assert result["a"].shape == (2, 3)
    assert result["a"].dtype == tf.float32
    assert not np.any(result["a"])
    assert np.any(result["b"][0])


def test_watching_and_pausing() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape(watch_accessed_variables=False) as recording:
            recording.watch(ws[1])
            recording.watch(x)
            y = chain(x, ws[:3])
            with recording.stop_recording():
                factor = tf.reduce_sum(y)
            loss = tf.reduce_sum(chain(y, ws[3:]) * factor)
        return recording.gradient(loss, [x, *ws])

    check(build)


def test_a_tape_of_the_users_own() -> None:
    ws = variables()

    class Halving(msg.GradientTape):
        def gradient(self, *args: Any, **kwargs: Any) -> Any:
            return [g / 2.0 for g in super().gradient(*args, **kwargs)]

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape(persistent=False, watch_accessed_variables=True) as recording:
            loss = chain(x, ws)
        return recording.gradient(
            target=loss,
            sources=ws,
            output_gradients=tf.ones_like(loss),
            unconnected_gradients=tf.UnconnectedGradients.NONE,
        )

    stock, new = found(build, tf.GradientTape), found(build, Halving)
    assert_same_bits(stock, [g * 2.0 for g in new])


def test_in_the_place_of_tensorflows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    def trained() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, "softplus") for _ in range(8)]
        model = keras.Sequential([keras.Input([8]), *layers])
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(fixed(8, 8), fixed(8, 8, seed=1), verbose=0)
        return model.get_weights()

    stock, before = trained(), msg.last_plan()
    monkeypatch.setattr(tf, "GradientTape", msg.GradientTape)
    assert_same_bits(stock, trained())
    assert msg.last_plan() is not before
    assert msg.last_plan().recomputed


# -- where gradients are taken ---------------------------------------------------------


def test_in_loops_and_branches() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        def step(y: tf.Tensor) -> tf.Tensor:
            with tape() as recording:
                recording.watch(y)
                loss = tf.reduce_sum(chain(y, ws))
            return y - 0.1 * recording.gradient(loss, y)

        (y,) = tf.while_loop(
            lambda _: True, lambda y: [step(y)], [x], maximum_iterations=3
        )
        return tf.cond(tf.reduce_sum(y) > 0.0, lambda: step(y), lambda: step(-y))

    check(build)


def test_targets_outside_the_graph_are_left_alone() -> None:
    ws = variables()

    def build(tape: Any, x: tf.Tensor) -> Any:
        with tape(persistent=True) as recording:
            loss = tf.reduce_sum(chain(x, ws))
        return tf.cond(
            loss > 0.0,
            lambda: recording.gradient(loss, ws),
            lambda: recording.gradient(loss, ws),
        )

    check(build, recomputes=False)


@pytest.mark.parametrize("jit", [False, True])
def test_the_peak_falls(jit: bool) -> None:
    ws = weights_of(24, 128)
    x = tf.random.stateless_normal([4096, 128], [1, 2])

    def peak(tape: Any) -> int:
        @tf.function(jit_compile=jit)
        def step() -> Any:
            with tape() as recording:
                loss = tf.reduce_mean(dense_layers(x, ws) ** 2)
            return recording.gradient(loss, ws)

        # XLA asks for one block, and may be handed out one that is twice as large.
        return mem_util.trace(step).requested_bytes["/cpu:0"]

    assert peak(msg.GradientTape) < 0.6 * peak(tf.GradientTape)


def test_eagerly_it_is_the_stock_tape_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tape_module, "_warned", type(tape_module._warned)())
    ws, x = variables(), tf.constant(fixed(4, 8))

    def taken(tape: Any) -> Any:
        with tape() as recording:
            loss = tf.reduce_sum(chain(x, ws))
        return recording, recording.gradient(loss, ws)

    with pytest.warns(UserWarning, match=r"into a `tf\.function`") as told:
        tape, first = taken(msg.GradientTape)
    assert told[0].filename == __file__
    _, second = taken(msg.GradientTape)
    _, stock = taken(tf.GradientTape)
    assert_same_bits(stock, first)
    assert_same_bits(stock, second)
    assert tape.plan is None


# -- arguments -------------------------------------------------------------------------


def test_checkpoints_of_every_kind() -> None:
    x = tf.constant(fixed(4, 8))

    def planned(checkpoints: Any, add: bool = True) -> msg.Plan:
        with tf.Graph().as_default() as graph:
            marked = []
            with msg.GradientTape(checkpoints=checkpoints) as tape:
                y = z = tf.constant(x.numpy())
                tape.watch(z)
                for number in range(12):
                    y = tf.tanh(y, name=f"tanh{number}")
                    if number in (3, 7):
                        marked.append(y)
                        if add:
                            graph.add_to_collection("checkpoints", y)
            tape.gradient(y, z)
            return tape.plan

    assert "collection" in planned("collection").strategy
    assert planned(["tanh3", "tanh7"]).kept == ("tanh3:0", "tanh7:0")
    assert planned(lambda t: t.name.startswith("tanh5")).kept == ("tanh5:0",)
    assert planned("speed").strategy == "speed"
    with pytest.raises(msg.CheckpointError, match="but it is empty"):
        planned("collection", add=False)


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"checkpoints": "fast"}, msg.CheckpointError, '"memory", "speed"'),
        ({"unknown_dim": 0}, ValueError, r"GradientTape.*at least 1"),
        ({"unknown_dim": 1.5}, TypeError, "an int"),
    ],
)
def test_wrong_arguments(keywords: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        msg.GradientTape(**keywords)


def test_stocks_errors_are_stocks() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        with msg.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x)
        with pytest.raises(TypeError, match="target"):
            tape.gradient(None, x)
        with pytest.raises(ValueError, match="unconnected_gradients"):
            tape.gradient(y, x, unconnected_gradients="nothing")
        tape.gradient(y, x)
        with pytest.raises(RuntimeError, match="non-persistent"):
            tape.gradient(y, x)

    step(tf.constant(1.0))


def test_verification() -> None:
    ws = variables()

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape(verify=True) as tape:
            loss = tf.reduce_sum(chain(x, ws))
        return tape.gradient(loss, ws)

    step(tf.constant(fixed(4, 8)))
    graph = step.get_concrete_function(tf.constant(fixed(4, 8))).graph
    assert any("recompute/verify" in op.name for op in graph.get_operations())


@pytest.mark.parametrize("checkpoints", [[], ["none:0"], "collection", lambda t: 3])
def test_errors_name_the_tape(checkpoints: Any) -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape(checkpoints=checkpoints) as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.tanh(tf.tanh(tf.tanh(x))))
        return tape.gradient(y, x)

    with pytest.raises(msg.CheckpointError) as raised:
        step(tf.ones([64]))
    told = str(raised.value)
    assert "`memory_saving_gradients.GradientTape`:" in told
    assert "gradients`" not in told and "the default" not in told


def test_the_initializer_is_documented() -> None:
    assert "checkpoints: What to keep" in str(msg.GradientTape.__init__.__doc__)


def test_ints_of_numpy_serve_as_unknown_dim() -> None:
    msg.GradientTape(unknown_dim=np.int64(3))
    for wrong in (True, np.bool_(True), 3.0, "3"):
        with pytest.raises(TypeError, match="`unknown_dim` must be an int"):
            msg.GradientTape(unknown_dim=wrong)
