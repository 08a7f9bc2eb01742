"""Inside loops, branches and called functions: recomputed, and equal in every bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tensorflow as tf
from tf_helpers import assert_close, assert_same_bits, fixed

import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")

ROWS, WIDTH = 4, 6
INPUT = fixed(ROWS, WIDTH, seed=3)
SEQUENCE = fixed(5, ROWS, WIDTH, seed=4)

Model = Callable[[tf.Tensor, list[tf.Variable]], tf.Tensor]


def variables() -> list[tf.Variable]:
    return [tf.Variable(fixed(WIDTH, WIDTH, seed=n) * 0.3) for n in range(3)]


def block(y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.tanh(tf.nn.gelu(y @ w) - 0.3 * y)


# -- models ----------------------------------------------------------------------------


def lstm(x: tf.Tensor, ws: Any) -> tf.Tensor:
    kernel = tf.concat([ws[0], ws[1], ws[2], ws[0]], 1)

    def cell(i: tf.Tensor, h: tf.Tensor, c: tf.Tensor) -> Any:
        a, b, g, o = tf.split(x @ kernel + h @ kernel, 4, 1)
        c = tf.sigmoid(a) * c + tf.sigmoid(b) * tf.tanh(g)
        return i + 1, tf.sigmoid(o) * tf.tanh(c), c

    return tf.while_loop(lambda i, *_: i < 5, cell, [0, x, x], maximum_iterations=5)[1]


def repeated(
    once: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor, times: int = 3
) -> tf.Tensor:
    """A loop that applies a function so many times."""
    return tf.while_loop(
        lambda i, _: i < times,
        lambda i, y: (i + 1, once(y)),
        [0, x],
        maximum_iterations=times,
    )[1]


def loop(x: tf.Tensor, ws: Any) -> tf.Tensor:
    return repeated(lambda y: block(block(y, ws[0]), ws[1]), x, 4)


def until(x: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda y: tf.reduce_sum(y * y) > 0.5, lambda y: (block(y, ws[0]) * 0.5,), [x]
    )[0]


def scanned(x: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.scan(lambda h, e: block(h, ws[0]) + block(e, ws[1]), SEQUENCE, x)


def folded(x: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.foldl(lambda h, e: block(h, ws[0]) + block(e, ws[1]), SEQUENCE, x)


def mapped(x: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.map_fn(lambda e: block(block(e + x, ws[0]), ws[1]), SEQUENCE)


def branches(x: tf.Tensor, ws: Any) -> tf.Tensor:
    for w in ws:
        x = tf.cond(
            tf.reduce_sum(x) > 0.0,
            lambda x=x, w=w: block(block(x, w), ws[0]),
            lambda x=x, w=w: block(tf.sin(block(x, w)), ws[1]),
        )
    return x


def cases(x: tf.Tensor, ws: Any) -> tf.Tensor:
    which = tf.cast(tf.abs(tf.reduce_sum(x)), tf.int32) % 3
    return tf.switch_case(which, [lambda w=w: block(block(x, w), w) for w in ws])


def called(x: tf.Tensor, ws: Any) -> tf.Tensor:
    for w in ws:
        function = tf.function(lambda y, w=w: block(block(y, w), w), autograph=False)
        x = function(x)
    return x


def called_twice(x: tf.Tensor, ws: Any) -> tf.Tensor:
    function = tf.function(lambda y, w: block(block(y, w), w), autograph=False)
    return function(function(x, ws[0].read_value()), ws[1].read_value())


def loop_in_loop(x: tf.Tensor, ws: Any) -> tf.Tensor:
    return repeated(lambda y: block(loop(y, ws), ws[2]), x)


def branch_in_loop(x: tf.Tensor, ws: Any) -> tf.Tensor:
    return repeated(lambda y: block(branches(y, ws), ws[2]), x)


def call_in_loop(x: tf.Tensor, ws: Any) -> tf.Tensor:
    function = tf.function(lambda y: block(block(y, ws[0]), ws[1]), autograph=False)
    return repeated(lambda y: block(function(y), ws[2]), x)


def loop_in_call(x: tf.Tensor, ws: Any) -> tf.Tensor:
    function = tf.function(lambda y: block(loop(y, ws), ws[1]), autograph=False)
    return function(function(x))


def loop_in_branch(x: tf.Tensor, ws: Any) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) < 1e9, lambda: loop(x, ws), lambda: x)


def redone(x: tf.Tensor, ws: Any) -> tf.Tensor:
    # Stock's own fails in a loop that reads variables.
    w = ws[0].read_value()
    function = tf.recompute_grad(lambda y: block(block(y, w), w))
    return repeated(lambda y: block(function(y), ws[2]), x)


@tf.custom_gradient
def straight_through(x: tf.Tensor) -> Any:
    y = tf.tanh(x)
    return tf.round(4.0 * x) / 4.0, lambda dy: dy * (1.0 - y * y)


def custom(x: tf.Tensor, ws: Any) -> tf.Tensor:
    def step(i: tf.Tensor, y: tf.Tensor) -> Any:
        return i + 1, block(straight_through(block(y, ws[0])), ws[1])

    return tf.while_loop(lambda i, _: i < 3, step, [0, x])[1]


def dropped(x: tf.Tensor, ws: Any) -> tf.Tensor:
    def step(i: tf.Tensor, y: tf.Tensor) -> Any:
        y = tf.nn.dropout(block(y, ws[0]), 0.5, seed=7)
        seeds = tf.stack([i, 5])
        y = tf.nn.experimental.stateless_dropout(block(y, ws[1]), 0.5, seeds)
        return i + 1, y + x

    # Iterations that run at once draw in whatever order they come to it.
    return tf.while_loop(lambda i, _: i < 4, step, [0, x], parallel_iterations=1)[1]


MODELS: list[Model] = [
    lstm,
    loop,
    until,
    scanned,
    folded,
    mapped,
    branches,
    cases,
    called,
    called_twice,
    loop_in_loop,
    branch_in_loop,
    call_in_loop,
    loop_in_call,
    loop_in_branch,
    redone,
    custom,
]


# -- what becomes of them --------------------------------------------------------------


def stepping(
    model: Model, checkpoints: Any, persistent: bool = False, jit: bool = False
) -> tuple[list[Any], Any]:
    """Gradients of a training step, and its graph."""
    ws = variables()

    @tf.function(jit_compile=jit, autograph=False)
    def step(x: tf.Tensor) -> Any:
        if checkpoints == "stock":
            tape = tf.GradientTape(persistent)
        else:
            tape = msg.GradientTape(persistent, checkpoints=checkpoints)
        with tape:
            tape.watch(x)
            y = model(x, ws)
            loss = tf.reduce_sum(y * y)
        return [g for g in tape.gradient(loss, [x, *ws]) if g is not None]

    tf.random.set_seed(1)
    results = step(tf.constant(INPUT))
    (concrete,) = step._list_all_concrete_functions()
    return results, concrete.graph


def copies_inside(graph: Any) -> list[str]:
    """The ops that are recomputed in the bodies of functions."""
    found = []
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            name = node.name.split("recompute/", 1)
            if len(name) == 2 and not name[0] and not name[1].startswith("seed"):
                found.append(name[1])
    return found


@cache
def of_stock(model: Model) -> list[Any]:
    """What both strategies have to give."""
    return stepping(model, "stock")[0]


@pytest.mark.parametrize("checkpoints", ["memory", "speed"])
@pytest.mark.parametrize("model", MODELS)
def test_same_bits(model: Model, checkpoints: str) -> None:
    stock = of_stock(model)
    new, graph = stepping(model, checkpoints)
    assert_same_bits(stock, new)
    if checkpoints == "memory":
        assert any("Tanh" in name for name in copies_inside(graph))


@pytest.mark.slow
@pytest.mark.parametrize("model", [loop, branches, cases, called, loop_in_call])
def test_same_bits_under_a_persistent_tape(model: Model) -> None:
    stock, _ = stepping(model, "stock", persistent=True)
    new, graph = stepping(model, "memory", persistent=True)
    assert_same_bits(stock, new)
    assert any("Tanh" in name for name in copies_inside(graph))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [lstm, scanned, branches, cases, called, loop_in_call, branch_in_loop]
)
def test_close_under_xla(model: Model) -> None:
    stock, _ = stepping(model, "stock", jit=True)
    again, _ = stepping(model, "stock", jit=True)
    new, graph = stepping(model, "memory", jit=True)
    assert_close(stock, again, new)
    assert any("Tanh" in name for name in copies_inside(graph))


def test_masks_are_the_same_in_the_replay() -> None:
    stock, _ = stepping(dropped, "stock")
    new, graph = stepping(dropped, "memory")
    assert_same_bits(stock, new)
    copies = copies_inside(graph)
    assert any("StatelessRandom" in name for name in copies)
    assert not any("RandomUniform" in n and "tateless" not in n for n in copies)


# -- second order ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", [loop, branches, called])
def test_second_order_by_tapes(model: Model) -> None:
    def found(tape: Any) -> list[Any]:
        ws = variables()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with tape() as outside:
                with tape() as inside:
                    inside.watch(x)
                    energy = tf.reduce_sum(model(x, ws))
                loss = tf.reduce_sum(inside.gradient(energy, x) ** 2)
            gradients = outside.gradient(loss, ws)
            return [g for g in gradients if g is not None]

        return step(tf.constant(INPUT))

    stock = found(tf.GradientTape)
    # Sums of several terms come in another order.
    assert_close(stock, stock, found(msg.GradientTape))


@pytest.mark.slow
def test_symbolic_gradients_twice_through_a_loop() -> None:
    def found(first: Any, second: Any) -> list[Any]:
        ws = variables()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            energy = tf.reduce_sum(called(loop(x, ws), ws))
            (of_x,) = first(energy, [x])
            return second(tf.reduce_sum(of_x**2), ws)

        return step(tf.constant(INPUT))

    stock = found(tf.gradients, tf.gradients)
    new = found(msg.gradients_memory, msg.gradients_memory)
    assert_close(stock, stock, new)
    assert_close(stock, stock, found(msg.gradients_memory, tf.gradients))


@pytest.mark.slow
def test_jacobians() -> None:
    def found(tape: Any) -> Any:
        ws = variables()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with tape(persistent=True) as recording:
                recording.watch(x)
                y = called(loop(x, ws), ws)
            return [recording.jacobian(y, x), recording.batch_jacobian(y, x)]

        return step(tf.constant(INPUT))

    assert_close(*[found(tf.GradientTape)] * 2, found(msg.GradientTape))


def test_gradients_taken_inside_bodies() -> None:
    """An inner tape of the loop's body, and an outer one around the loop."""

    def found(tape: Any) -> Any:
        ws = variables()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            def descended(i: tf.Tensor, y: tf.Tensor) -> Any:
                with tape() as inside:
                    inside.watch(y)
                    energy = tf.reduce_sum(block(block(y, ws[0]), ws[1]) ** 2)
                return i + 1, y - 0.1 * inside.gradient(energy, y)

            with tape() as outside:
                y = tf.while_loop(lambda i, _: i < 3, descended, [0, x])[1]
                loss = tf.reduce_sum(y * y)
            return outside.gradient(loss, ws[:2])

        return step(tf.constant(INPUT))

    stock = found(tf.GradientTape)
    assert_close(stock, stock, found(msg.GradientTape))


# -- what is said ----------------------------------------------------------------------


def test_the_summary_says_what_is_held() -> None:
    stepping(loop, "memory")
    told = msg.last_plan().summary()
    assert "Inside loops, branches and called functions:" in told
    assert ": 4 runs hold " in told
    (body,) = msg.last_plan().bodies
    assert body.stock_runs == 4 and not body.assumed
    assert body.held_bytes == INPUT.nbytes
    assert body.spared_bytes > 0


def test_an_assumed_number_of_iterations_is_said() -> None:
    stepping(until, "memory")
    told = msg.last_plan().summary()
    assert "64 runs (assumed)" in told
    assert "64 is assumed (give it `maximum_iterations`)" in told


def breaking(x: tf.Tensor, ws: Any) -> tf.Tensor:
    @tf.function
    def until_large(y: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(20):
            y = block(y, ws[0]) * 1.5
            if tf.reduce_sum(y * y) > 3.0:
                break
        return y

    return until_large(x)


@pytest.mark.parametrize("every", [None, 4])
def test_a_loop_that_may_end_early_is_said_to(every: int | None) -> None:
    def found(tape: Any, **keywords: Any) -> list[Any]:
        ws = variables()

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with tape(**keywords) as recording:
                recording.watch(x)
                loss = tf.reduce_sum(breaking(x, ws) ** 2)
            return recording.gradient(loss, [x, ws[0]])

        return step(tf.constant(INPUT))

    stock = found(tf.GradientTape)
    assert_same_bits(stock, found(msg.GradientTape, every=every))
    told = msg.last_plan().summary()
    assert "in all at the most" in told if every else "20 runs at the most hold" in told
    assert "A loop that may end early is taken to run to its end." in told


def test_a_loop_that_counts_is_not_said_to_end_early() -> None:
    for model in (lstm, scanned, mapped, loop_in_call):
        stepping(model, "memory")
        assert not any(body.at_most for body in msg.last_plan().bodies)
        assert not any(body.assumed for body in msg.last_plan().bodies)


def test_a_reason_does_not_deny_what_bodies_recompute() -> None:
    stepping(loop, "memory")
    plan = msg.last_plan()
    assert "but for what is recomputed inside loops, branches and called" in plan.reason
    (body,) = plan.bodies
    assert f"and {len(body.recomputed)} inside loops and the like" in plan.summary()
    assert not plan.is_stock


def test_bodies_of_unknown_shape() -> None:
    """Shapes are asked of the first run, where nothing is held for the answer."""

    def found(tape: Any) -> Any:
        ws = variables()

        @tf.function(
            autograph=False, input_signature=[tf.TensorSpec([None, WIDTH], tf.float32)]
        )
        def step(x: tf.Tensor) -> Any:
            with tape() as recording:
                y = branches(called(loop(x, ws), ws), ws)
                y = y - tf.reduce_mean(y, 1, keepdims=True)
            return recording.gradient(y * y, ws)

        return step(tf.constant(INPUT))

    assert_same_bits(found(tf.GradientTape), found(msg.GradientTape))


def test_a_branch_may_ask_for_a_shape() -> None:
    """Its graph is a weak proxy, of which `vars` raised."""
    row = tf.constant(fixed(1, WIDTH, seed=7))

    def found(tape: Any) -> list[Any]:
        @tf.function(
            autograph=False, input_signature=[tf.TensorSpec([None, WIDTH], tf.float32)]
        )
        def step(x: tf.Tensor) -> Any:
            with tape() as recording:
                recording.watch(x)
                y = tf.cond(
                    tf.reduce_sum(x * x) > 0.0,
                    lambda: tf.tanh(tf.exp(x + row)),
                    lambda: x,
                )
            return recording.gradient(y, x)

        return [step(tf.constant(INPUT))]

    assert_same_bits(found(tf.GradientTape), found(msg.GradientTape))
