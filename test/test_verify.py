"""`verify=True` passes on right recomputations and names the first wrong one."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import (
    EXACT_ROUTES,
    Work,
    assert_same_bits,
    check,
    fixed,
    session,
)

import memory_saving_gradients as msg

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


def mixed(ws: Any, xs: Any) -> Any:
    """Floats of several kinds, integers, booleans, strings and complex numbers."""
    y = xs[0]
    for w in (*ws, *ws):
        words = tf.strings.to_number(tf.as_string(tf.round(y * 8)))
        count = tf.cast(tf.math.top_k(tf.cast(y * 4, tf.int32), 8)[1], tf.float32)
        half = tf.cast(tf.tanh(tf.cast(y, tf.bfloat16)), tf.float32)
        turned = tf.abs(tf.signal.fft(tf.cast(half, tf.complex64)))
        undefined = tf.where(y > 0, tf.sqrt(-1 - tf.abs(y)), 0 * y)
        y = tf.where(tf.math.is_nan(undefined), tf.tanh(y), y * words) @ w
        y = tf.tanh(y + turned * 0.1 + count * 0.01)
    return tf.reduce_sum(y)


@pytest.mark.parametrize("route", EXACT_ROUTES)
def test_it_passes_and_changes_no_bit(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msg, "gradients", partial(msg.gradients, verify=True))
    check(Work(mixed, [fixed(8, 8), fixed(8, 8, seed=1)], [fixed(8, 8)]), route)


def chain(x: tf.Tensor, length: int = 9) -> tuple[tf.Tensor, list[tf.Tensor], int]:
    """A chain, its activations, and the line of this file that makes them."""
    y, ys = x, []
    for number in range(length):
        line = inspect.currentframe().f_lineno + 1
        y = tf.tanh(tf.sin(y) + y * 0.5, name=f"layer{number}")
        ys.append(y)
    return tf.reduce_sum(tf.exp(y)), ys, line


def test_a_fed_intermediate_is_named_with_its_line() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 4], name="x")
        loss, ys, line = chain(x)
        (gradient,) = msg.gradients(loss, x, checkpoints=[ys[5]], verify=True)
        assert "layer3" in msg.last_plan().recomputed
        with session(graph) as running:
            running.run(gradient, {x: fixed(4, 4)})
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                running.run(gradient, {x: fixed(4, 4), ys[3]: fixed(4, 4, seed=1)})
    text = str(caught.value)
    assert "recomputation gave other values for layer3:0" in text
    assert f"test_verify.py:{line}" in text


def test_another_shape_is_told_from_other_values() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        loss, ys, _ = chain(x)
        (gradient,) = msg.gradients(
            loss, x, checkpoints=[ys[5]], verify=True, unknown_dim=4
        )
        with session(graph) as running:
            running.run(gradient, {x: fixed(4, 4)})
            running.run(gradient, {x: fixed(3, 4)})
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="gave other shape for layer3:0"
            ):
                running.run(gradient, {x: fixed(4, 4), ys[3]: fixed(2, 4)})


def test_the_first_of_several_is_named() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 4], name="x")
        loss, ys, _ = chain(x)
        (gradient,) = msg.gradients(loss, x, checkpoints=[ys[7]], verify=True)
        feeds = {x: fixed(4, 4), ys[2]: fixed(4, 4), ys[5]: fixed(4, 4)}
        with (
            session(graph) as running,
            pytest.raises(tf.errors.InvalidArgumentError, match="for layer2:0"),
        ):
            running.run(gradient, feeds)


def test_the_gradient_itself_cannot_be_had_without_the_check() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 4])
        table = v1.get_variable("table", initializer=fixed(6, 4), use_resource=True)
        loss, ys, _ = chain(tf.gather(table, [0, 2, 4, 4]) + x)
        away = tf.constant(1.0)
        found = msg.gradients(loss, [x, table, away], checkpoints=[ys[5]], verify=True)
        assert isinstance(found[1], tf.IndexedSlices)
        assert found[2] is None
        with session(graph) as running:
            running.run(v1.global_variables_initializer())
            for fetch in (found[0], found[1].values, found[1]):
                with pytest.raises(tf.errors.InvalidArgumentError, match="layer3:0"):
                    running.run(fetch, {x: fixed(4, 4), ys[3]: fixed(4, 4)})


def test_nan_and_minus_zero_equal_themselves() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 4])
        loss, ys, _ = chain(x)
        (gradient,) = msg.gradients(loss, x, checkpoints=[ys[5]], verify=True)
        with session(graph) as running:
            for number in (np.nan, -0.0, np.inf):
                running.run(gradient, {x: np.full([4, 4], number, np.float32)})


def test_it_is_refused_under_xla() -> None:
    x = tf.constant(fixed(4, 4))

    @tf.function(jit_compile=True)
    def step() -> Any:
        return msg.gradients(chain(x * 1.0)[0], x, checkpoints="memory", verify=True)

    with pytest.raises(msg.VerificationUnavailableError, match="jit_compile=False"):
        step()


def test_off_it_adds_nothing() -> None:
    def types(**keywords: Any) -> list[str]:
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [4, 4])
            loss, _, _ = chain(x)
            msg.gradients(loss, x, checkpoints="memory", **keywords)
            return [op.type for op in graph.get_operations()]

    assert types() == types(verify=False)
    assert "Assert" not in types()
    assert types(verify=True).count("Assert") == 1


def test_with_nothing_recomputed_there_is_nothing_to_check() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 4])
        msg.gradients(tf.exp(x), x, checkpoints="memory", verify=True)
        assert not msg.last_plan().recomputed
        assert "Assert" not in [op.type for op in graph.get_operations()]


# -- inside loops, branches and called functions ---------------------------------------


def counting_calls(y: tf.Tensor, fault: bool) -> tuple[tf.Tensor, int]:
    """An op that claims to be a function and, if faulty, is none; and its line."""
    calls: list[None] = []

    def call(value: Any) -> Any:
        calls.append(None)
        return value * np.float32(len(calls) if fault else 2)

    line = inspect.currentframe().f_lineno + 1
    result = tf.numpy_function(call, [y], tf.float32, stateful=False, name="claims")
    return tf.ensure_shape(result, y.shape), line


def body_of(kind: str, once: Any, x: tf.Tensor) -> tf.Tensor:
    if kind == "loop":
        return tf.while_loop(
            lambda i, _: i < 6,
            lambda i, y: (i + 1, once(y)),
            [0, x],
            maximum_iterations=6,
            parallel_iterations=1,
        )[1]
    if kind == "branch":
        return tf.cond(tf.reduce_sum(x * x) > 0.0, lambda: once(x), lambda: x)
    return tf.function(once, autograph=False)(x)


def kept(tensor: tf.Tensor) -> bool:
    return tensor.op.type in ("Tanh", "Sum") or tensor.op.type.endswith("Call")


def verifying(kind: str, fault: bool, every: int | None, persistent: bool) -> Any:
    lines = []

    def once(y: tf.Tensor) -> tf.Tensor:
        claimed, line = counting_calls(tf.tanh(y), fault)
        lines.append(line)
        return tf.tanh(tf.exp(-y * y) * claimed)

    @tf.function(autograph=False)
    def step(x: tf.Tensor, stock: bool) -> Any:
        tape: Any
        if stock:
            tape = tf.GradientTape(persistent)
        else:
            tape = msg.GradientTape(
                persistent, checkpoints=kept, verify=True, every=every
            )
        with tape:
            tape.watch(x)
            loss = tf.reduce_sum(body_of(kind, once, x))
        return [tape.gradient(loss, x)]

    return step, lines


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("kind", "every"), [("loop", None), ("loop", 3), ("branch", None), ("call", None)]
)
def test_it_looks_inside(kind: str, every: int | None, persistent: bool) -> None:
    x = tf.constant(fixed(4, 4))
    step, _ = verifying(kind, False, every, persistent)
    assert_same_bits(step(x, True), step(x, False))
    step, lines = verifying(kind, True, every, persistent)
    step(x, True)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(x, False)
    text = str(caught.value)
    assert "recomputation gave other values for " in text
    if every is None:
        assert "claims" in text
        assert f"test_verify.py:{lines[0]}" in text
