"""What loops, branches and calls take while they run, in predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from tf_helpers import fixed

import mem_util
import memory_saving_gradients as msg
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import check
from memory_saving_gradients.schedule import make_schedule
from memory_saving_gradients.simulate import simulate, simulate_stock
from memory_saving_gradients.sweep import Sweep
from memory_saving_gradients.tf_read import read
from memory_saving_gradients.working import with_working_memory

MIB = 2**20
Model = Callable[[tf.Tensor, Any], tf.Tensor]


def block(y: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.tanh(tf.nn.gelu(tf.matmul(y, w)))


def called(y: tf.Tensor, weights: Any) -> tf.Tensor:
    for w in weights:
        y = tf.function(lambda y, w=w: block(y, w), autograph=False)(y)
    return y


def branches(y: tf.Tensor, weights: Any) -> tf.Tensor:
    for w in weights:
        y = tf.cond(
            tf.reduce_sum(y) > -1e9,
            lambda y=y, w=w: block(block(y, w), w),
            lambda y=y, w=w: block(block(y, w), 2.0 * w),
        )
    return y


def loop(y: tf.Tensor, weights: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda i, _: i < 8,
        lambda i, y: (i + 1, block(block(y, weights[0]), weights[1])),
        [0, y],
    )[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", (called, branches, loop))
def test_prediction_holds_for_bodies(model: Model) -> None:
    weights = [tf.Variable(0.05 * fixed(256, 256, seed=n)) for n in range(8)]
    x = tf.constant(fixed(1024, 256))

    def peak(tape: Any) -> float:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with tape() as recording:
                loss = tf.reduce_mean(model(x, weights) ** 2)
            zeros = tf.UnconnectedGradients.ZERO
            return recording.gradient(loss, weights, unconnected_gradients=zeros)

        step(x)
        return float(mem_util.measure(step, x).above_rest_bytes["/cpu:0"])

    stock = peak(tf.GradientTape)
    least = peak(lambda: msg.GradientTape(checkpoints="memory"))
    plan = msg.last_plan()
    # A loop's iterations overlap, as far as the executor finds the time: gradients of
    # weights lag behind, and hold what they read.
    assert plan.stock_peak_bytes == pytest.approx(stock, rel=0.2)
    assert plan.predicted_peak_bytes == pytest.approx(least, rel=0.25)
    assert 0.2 < plan.extra_fraction < 0.9


def test_gradients_recompute_in_bodies_with_nothing_else_under_way() -> None:
    weights = tf.constant(fixed(64, 64) / 8)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        return msg.gradients_memory(tf.reduce_sum(loop(x, [weights, weights])), x)

    step.get_concrete_function(tf.constant(fixed(256, 64)))
    (body,) = msg.last_plan().bodies
    assert body.recomputed


def test_what_runs_inside_is_an_output_that_nobody_reads() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [512, 512])
        y = called(x, [tf.constant(fixed(512, 512))])
        plain = read((), [y], (), unknown_dim=1)
        found = with_working_memory(plain).graph
    check(found)
    (extra,) = found.tensors[len(plain.tensors) :]
    op = found.ops[extra.op]
    assert op.type.endswith("PartitionedCall")
    # At its worst a block has three tensors at once, one of which it gives out.
    assert extra.bytes in (MIB, 2 * MIB)
    assert found.consumers[extra.id] == ()
    assert op.seconds > 0 and graph is plain.ops[0].graph


def planned(checkpoints: str, blocks: int, rows: int) -> msg.Plan:
    """The plan of a chain of called blocks, 64 wide."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        weights = [tf.constant(fixed(64, 64, seed=n)) for n in range(blocks)]
        with msg.GradientTape(checkpoints=checkpoints) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(called(x, weights))
        return tape.gradient(loss, x)

    step.get_concrete_function(tf.constant(fixed(rows, 64)))
    return msg.last_plan()


def test_simulators_agree_on_what_runs_inside() -> None:
    plan = planned("memory", 4, 64)
    buffers = Buffers(
        plan.reading.graph, [s.op for s in plan.schedule.steps if not s.copy]
    )
    assert len(plan.reading.graph.tensors) > len(plan.reading.tensors)
    for kept in (frozenset(plan.schedule.kept), frozenset(buffers.residuals)):
        schedule = make_schedule(buffers, kept)
        assert simulate(buffers, schedule).peak_bytes == Sweep(buffers, kept).peak_bytes
    assert simulate_stock(buffers).peak_bytes > 0


def test_percentages_are_of_what_stock_holds_in_bodies() -> None:
    plan = planned("50%", 12, 1024)
    assert plan.budget_bytes == plan.stock_peak_bytes // 2
    assert plan.predicted_peak_bytes <= plan.budget_bytes


def test_bodies_that_are_alike_share_a_line() -> None:
    assert "(12 of them): 1 run holds 0 " in planned("memory", 12, 1024).summary()


@pytest.mark.parametrize("checkpoints", ("memory", "speed"))
def test_a_function_that_holds_the_whole_model_saves_like_its_inlined_twin(
    checkpoints: str,
) -> None:
    weights = [tf.Variable(fixed(128, 128, seed=n) / 12) for n in range(12)]

    def whole(x: tf.Tensor) -> tf.Tensor:
        for w in weights:
            x = tf.nn.gelu(x @ w) + x
        return tf.reduce_sum(x)

    def peaks(model: Callable[[tf.Tensor], tf.Tensor]) -> tuple[int, int]:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            with msg.GradientTape(checkpoints=checkpoints) as tape:
                loss = model(x)
            return tape.gradient(loss, weights)

        found = mem_util.measure(step, tf.constant(fixed(2048, 128)))
        return found.above_rest_bytes["/cpu:0"], msg.last_plan().predicted_peak_bytes

    inlined, _ = peaks(whole)
    called, predicted = peaks(tf.function(whole, autograph=False))
    assert called <= 1.1 * inlined
    assert predicted == pytest.approx(called, rel=0.2)


@pytest.mark.parametrize("checkpoints", ["memory", "100%"])
def test_a_function_with_a_loop_holds_its_lists_for_each_call(checkpoints: str):
    w = tf.Variable(tf.random.stateless_normal([256, 256], [1, 1]) / 16)

    @tf.function
    def looping(x):
        for _ in tf.range(30):
            x = tf.tanh(tf.nn.softplus(tf.sin(x) @ w) - x)
        return x

    @tf.function
    def step(x):
        with msg.GradientTape(checkpoints=checkpoints) as tape:
            loss = tf.reduce_sum(looping(looping(looping(x))))
        return tape.gradient(loss, w)

    x = tf.random.stateless_normal([512, 256], [0, 1])
    measured = mem_util.measure(step, x).above_rest_bytes["/cpu:0"]
    assert 0.85 * measured <= msg.last_plan().predicted_peak_bytes <= 1.15 * measured
