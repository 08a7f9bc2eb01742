"""Called functions: replayed as a whole, by twins that read no variable."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from saving_helpers import recording
from tf_helpers import assert_close, assert_same_bits, fixed

import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

WIDTH = 8
INPUT = fixed(16, WIDTH, seed=3)


def block(y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.tanh(tf.nn.gelu(y @ w) - 0.3 * y)


def functions(count: int, inside: Any = block, **keywords: Any) -> tuple[Any, Any]:
    ws = [tf.Variable(fixed(WIDTH, WIDTH, seed=n) * 0.3) for n in range(count)]

    def made(w: tf.Variable) -> Any:
        return tf.function(lambda y: inside(y, w), autograph=False, **keywords)

    return [made(w) for w in ws], ws


def stepping(
    calls: Any, ws: Any, checkpoints: Any, after: Any = None, **keywords: Any
) -> Any:
    """A training step through all calls; `after` runs between forward and backward."""

    @tf.function(autograph=False, **keywords)
    def step(x: tf.Tensor) -> Any:
        with recording(checkpoints) as tape:
            tape.watch(x)
            y = x
            for call in calls:
                y = call(y)
            loss = tf.reduce_sum(y * y)
        if after is not None:
            after()
        return tape.gradient(loss, [x, *ws])

    return step


def both(inside: Any = block, count: int = 8, **keywords: Any) -> tuple[Any, Any]:
    """Gradients by stock and by the library, of functions made anew."""
    found = []
    for checkpoints in ("stock", "memory"):
        calls, ws = functions(count, inside, **keywords)
        tf.random.set_seed(1)
        found.append(stepping(calls, ws, checkpoints)(tf.constant(INPUT)))
    return found[0], found[1]


def replayed() -> list[str]:
    plan = msg.last_plan()
    assert plan is not None
    return [name for name in plan.recomputed if "PartitionedCall" in name]


def test_calls_are_replayed() -> None:
    stock, new = both()
    assert replayed()
    assert_same_bits(stock, new)


def test_variables_that_change_after_the_forward_pass() -> None:
    found = []
    for checkpoints in ("stock", "memory"):
        calls, ws = functions(8)

        def changed(ws: Any = ws) -> None:
            for w in ws:
                w.assign(w * 0.5)

        step = stepping(calls, ws, checkpoints, changed)
        found.append(step(tf.constant(INPUT)))
    assert replayed()
    assert_same_bits(*found)


def test_twins_read_no_variables() -> None:
    calls, ws = functions(8)
    step = stepping(calls, ws, "memory")
    graph = step.get_concrete_function(tf.constant(INPUT)).graph
    twins = [
        op for op in graph.get_operations() if op.name.startswith("recompute/Part")
    ]
    assert twins
    for twin in twins:
        assert not any(tensor.dtype == tf.resource for tensor in twin.inputs)
        assert not twin._is_stateful


def test_calls_in_calls() -> None:
    def nested(y: tf.Tensor, w: Any) -> tf.Tensor:
        inner = tf.function(lambda y: block(y, w), autograph=False)
        return block(inner(y), w)

    assert_same_bits(*both(nested))


def test_what_was_drawn_is_not_drawn_again() -> None:
    def noisy(y: tf.Tensor, w: Any) -> tf.Tensor:
        return tf.nn.dropout(block(y, w), 0.5, seed=3)

    assert_same_bits(*both(noisy, count=4))


def test_counters_count_once() -> None:
    calls_made = tf.Variable(0)

    def counting(y: tf.Tensor, w: Any) -> tf.Tensor:
        calls_made.assign_add(1)
        return block(y, w)

    assert_same_bits(*both(counting))
    assert calls_made.numpy() == 16


def test_several_arguments_and_results() -> None:
    def found(checkpoints: str) -> Any:
        v = tf.Variable(fixed(WIDTH, WIDTH, seed=1) * 0.3)

        @tf.function(autograph=False)
        def cell(h: tf.Tensor, c: tf.Tensor) -> Any:
            c = tf.sigmoid(h @ v) * c + tf.tanh(h)
            return tf.tanh(c) * h, c

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            stock = tf.GradientTape()
            with stock if checkpoints == "stock" else msg.GradientTape() as tape:
                tape.watch(x)
                h, c = x, tf.sin(x)
                for _ in range(9):
                    h, c = cell(h, c)
                loss = tf.reduce_sum(h * c)
            return tape.gradient(loss, [x, v])

        return step(tf.constant(INPUT))

    stock, new = found("stock"), found("memory")
    assert replayed()
    assert_same_bits(stock, new)


@pytest.mark.slow
def test_compiled_blocks_and_steps() -> None:
    stock, new = both(count=6, jit_compile=True)
    assert_close(stock, stock, new)
    found = []
    for checkpoints in ("stock", "stock", "memory"):
        calls, ws = functions(6)
        step = stepping(calls, ws, checkpoints, jit_compile=True)
        found.append(step(tf.constant(INPUT)))
    assert_close(*found)


def test_verified() -> None:
    calls, ws = functions(6)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape(verify=True) as tape:
            y = x
            for call in calls:
                y = call(y)
        return tape.gradient(y, ws)

    step(tf.constant(INPUT))
    assert replayed()


# -- what a function remembers ---------------------------------------------------------


@pytest.mark.parametrize("order", [("stock", "memory"), ("memory", "stock")])
def test_one_function_under_two_settings(order: tuple[str, str]) -> None:
    calls, ws = functions(4)
    found, sizes = {}, {}
    for checkpoints in order:
        step = stepping(calls, ws, checkpoints)
        found[checkpoints] = step(tf.constant(INPUT))
        (concrete,) = step._list_all_concrete_functions()
        sizes[checkpoints] = str(concrete.graph.as_graph_def().library).count(
            'name: "recompute/'
        )
    assert_same_bits(found["stock"], found["memory"])
    assert sizes["memory"] > 0
    assert sizes["stock"] == 0


def test_an_eager_tape_around_a_function() -> None:
    calls, ws = functions(1, lambda y, w: block(block(block(y, w), w), w))
    x = tf.constant(INPUT)
    found = []
    for enabled in (False, True):
        if enabled:
            msg.enable("memory")
        with tf.GradientTape() as tape:
            y = calls[0](x)
        found.append(tape.gradient(y, ws))
        msg.disable()
    assert_same_bits(*found)


def test_a_list_and_a_function_reach_into_bodies() -> None:
    kept: list[tf.Tensor] = []

    def noted(y: tf.Tensor, w: Any) -> tf.Tensor:
        y = tf.sin(block(y, w))
        kept.append(y)
        return tf.tanh(block(y, w))

    calls, ws = functions(3, noted)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape(checkpoints=lambda t: t.op.type == "Sin") as tape:
            y = tf.sin(x)
            for call in calls:
                y = call(y)
        return tape.gradient(y, ws)

    step(tf.constant(INPUT))
    bodies = msg.last_plan().bodies
    assert len(bodies) == 3
    assert all(body.held_bytes == INPUT.nbytes for body in bodies)
    assert not any("Sin" in name for body in bodies for name in body.recomputed)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_list_may_name_what_stands_in_bodies_alone(by_name: bool) -> None:
    inner: list[tf.Tensor] = []

    def body(i: tf.Tensor, y: tf.Tensor) -> Any:
        y = tf.sin(y, name="kept")
        inner.append(y)
        return i + 1, tf.tanh(block(y, tf.eye(WIDTH)))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        y = tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]
        kept = [inner[0].name if by_name else inner[0]]
        return msg.gradients(y, x, checkpoints=kept)

    step(tf.constant(INPUT))
    (loop,) = msg.last_plan().bodies
    assert not any("kept" in name for name in loop.recomputed)
    assert any("Tanh" in name for name in loop.recomputed)
