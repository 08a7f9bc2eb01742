"""What was planned is what runs: after Grappler, after XLA, and in what order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import (
    ancestors,
    dense_layers,
    differentiate,
    gather_copies,
    matmuls_in,
    planned,
    weights_of,
)

import memory_saving_gradients as msg
from memory_saving_gradients import fences
from memory_saving_gradients.op_types import CALL_TYPES

v1 = tf.compat.v1

LAYERS, WIDTH, BATCH = 12, 32, 256

LOSSES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "sum": tf.reduce_sum,
    "mean of squares": lambda y: tf.reduce_mean(tf.square(y)),
}
either_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@pytest.fixture(params=[False, True], ids=["grappler", "no grappler"])
def grappler_off(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both settings of the meta-optimizer."""
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": request.param}
    )
    yield request.param
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


# -- counted after the optimisers ------------------------------------------------------


def matmuls_in_session(
    mode: str, loss: Callable[[tf.Tensor], tf.Tensor], grappler_off: bool
) -> int:
    """Matrix products in the graph that a session really ran."""
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = grappler_off
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        x = v1.placeholder(tf.float32, [BATCH, WIDTH])
        weights = [
            v1.get_variable(f"w{index}", [WIDTH, WIDTH]) for index in range(LAYERS)
        ]
        gradients = differentiate(mode, loss(dense_layers(x, weights)), weights)
        session.run(v1.global_variables_initializer())
        metadata = v1.RunMetadata()
        options = v1.RunOptions(output_partition_graphs=True)
        session.run(gradients, {x: np.ones([BATCH, WIDTH])}, options, metadata)
    return matmuls_in(metadata.partition_graphs)


@either_loss
def test_recomputed_matmuls_run_in_a_session(
    loss: Callable[[tf.Tensor], tf.Tensor], grappler_off: bool
):
    stock = matmuls_in_session("stock", loss, grappler_off)
    new = matmuls_in_session("memory", loss, grappler_off)
    assert planned("MatMul") > LAYERS // 3
    assert new == stock + planned("MatMul")


def dense_function(
    mode: str, loss: Callable[[tf.Tensor], tf.Tensor], jit: bool
) -> tuple[Any, tf.Tensor]:
    """The gradients of `LAYERS` dense layers as a function, and its argument."""
    weights = weights_of(LAYERS, WIDTH)

    @tf.function(jit_compile=jit, autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return differentiate(mode, loss(dense_layers(x, weights)), weights)

    return step, tf.random.stateless_normal([BATCH, WIDTH], [3, 4])


def matmuls_in_function(mode: str, loss: Callable[[tf.Tensor], tf.Tensor]) -> int:
    """Matrix products in the graphs that the runtime made of a function."""
    from tensorflow.python.eager import context

    step, x = dense_function(mode, loss, jit=False)
    step.get_concrete_function(x)
    running = context.context()
    running.enable_run_metadata()
    step(x)
    metadata = running.export_run_metadata()
    running.disable_run_metadata()
    return matmuls_in([g for f in metadata.function_graphs for g in f.partition_graphs])


@either_loss
def test_recomputed_matmuls_run_in_a_function(
    loss: Callable[[tf.Tensor], tf.Tensor], grappler_off: bool
):
    stock = matmuls_in_function("stock", loss)
    new = matmuls_in_function("memory", loss)
    assert planned("MatMul") > LAYERS // 3
    assert new == stock + planned("MatMul")


def optimized_hlo(function: Any, *arguments: tf.Tensor) -> str:
    return function.experimental_get_compiler_ir(*arguments)(stage="optimized_hlo")


def count(hlo: str, instruction: str) -> int:
    return len(re.findall(rf" {instruction}\(", hlo))


@either_loss
def test_recomputed_ops_are_left_by_xla(
    loss: Callable[[tf.Tensor], tf.Tensor], grappler_off: bool
):
    stock = optimized_hlo(*dense_function("stock", loss, jit=True))
    new = optimized_hlo(*dense_function("memory", loss, jit=True))
    assert planned("MatMul") > LAYERS // 3
    assert count(new, "dot") == count(stock, "dot") + planned("MatMul")
    assert count(new, "tanh") == count(stock, "tanh") + planned("Tanh")


def heads_function(mode: str) -> tuple[Any, tf.Tensor]:
    """Eight parallel stacks of layers; every gradient starts as the constant 1."""
    heads = [weights_of(5, WIDTH) for _ in range(8)]
    flat = [weight for head in heads for weight in head]

    @tf.function(jit_compile=True, autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        losses = [tf.reduce_sum(dense_layers(x, head)) for head in heads]
        return differentiate(mode, tf.add_n(losses), flat)

    return step, tf.random.stateless_normal([BATCH, WIDTH], [3, 4])


def test_constant_gradients_of_parallel_heads_do_not_fold_under_xla():
    stock = optimized_hlo(*heads_function("stock"))
    new = optimized_hlo(*heads_function("memory"))
    assert planned("MatMul") > 8
    assert count(new, "dot") == count(stock, "dot") + planned("MatMul")


def test_convolutions_whose_gradients_onednn_merges_run():
    kernels = [tf.Variable(tf.random.normal([3, 3, 8, 8])) for _ in range(6)]
    biases = [tf.Variable(tf.zeros([8])) for _ in range(6)]

    @tf.function(autograph=False)
    def step(y: tf.Tensor) -> list[tf.Tensor]:
        kept = []
        for kernel, bias in zip(kernels, biases, strict=True):
            y = tf.nn.bias_add(tf.nn.conv2d(y, kernel, 1, "SAME"), bias)
            kept.append(y)
            y = tf.nn.relu(y)
        return differentiate(kept, tf.reduce_sum(y), kernels + biases)

    gradients = step(tf.random.normal([4, 32, 32, 8]))
    assert planned("Relu") == 6
    assert all(bool(tf.reduce_all(tf.math.is_finite(g))) for g in gradients)


# -- dropout under XLA -----------------------------------------------------------------


def test_integer_seeds_of_dropout_are_tied_under_xla():
    weights = weights_of(6, WIDTH)
    state = tf.Variable([1, 2])

    def dropping(mode: str) -> Any:
        @tf.function(jit_compile=True, autograph=False)
        def step(y: tf.Tensor) -> list[tf.Tensor]:
            seed, kept = state.read_value(), []
            for index, weight in enumerate(weights):
                y = tf.tanh(y @ weight)
                kept.append(y)
                y = tf.nn.experimental.stateless_dropout(y, 0.1, seed + index)
            checkpoints = mode if mode == "stock" else kept
            return differentiate(checkpoints, tf.reduce_sum(y), weights)

        return step

    x = tf.random.stateless_normal([BATCH, WIDTH], [3, 4])
    step = dropping("list")
    graph = step.get_concrete_function(x).graph
    copies = gather_copies(msg.last_plan(), graph).values()
    draws = [op for op in copies if op.type == "StatelessRandomUniformV2"]
    assert len(draws) == len(weights)
    selects = [op for op in graph.get_operations() if op.type == "SelectV2"]
    ties = [op for op in selects if op.outputs[0].dtype.is_integer]
    runs_before = ancestors(graph)
    for draw in draws:
        assert any(runs_before(tie, draw) for tie in ties), draw.name
    # Each mask is compared with the rate once more.
    stock = count(optimized_hlo(dropping("stock"), x), "compare")
    assert count(optimized_hlo(step, x), "compare") >= stock + len(weights)


# -- the selection keeps every bit -----------------------------------------------------

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def awkward(dtype: Any) -> np.ndarray:
    """Values that arithmetic would not bring through: every kind that a dtype has."""
    if dtype is np.bool_:
        return np.array([True, False, True])
    if np.issubdtype(dtype, np.integer):
        bounds = np.iinfo(dtype)
        return np.array([bounds.min, 0, 1, bounds.max], dtype)
    if np.issubdtype(dtype, np.complexfloating):
        part = awkward(np.float32 if dtype is np.complex64 else np.float64)
        made = np.empty(part.shape, dtype)
        made.real, made.imag = part, part[::-1]
        return made
    bounds = ml_dtypes.finfo(dtype)
    values = [0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, -np.nan, bounds.max, bounds.min]
    denormal = np.array([1], f"u{np.dtype(dtype).itemsize}").view(dtype)
    negative_denormal = -denormal
    return np.concatenate([np.array(values, dtype), denormal, negative_denormal])


@pytest.mark.parametrize("jit", [False, True], ids=["executor", "xla"])
@pytest.mark.parametrize(
    "dtype",
    [
        *FLOATS,
        np.complex64,
        np.complex128,
        np.bool_,
        np.int8,
        np.uint8,
        np.int16,
        np.int32,
        np.uint32,
        np.int64,
        np.uint64,
    ],
)
def test_selection_keeps_every_bit(dtype: Any, jit: bool):
    values = awkward(dtype)

    @tf.function(jit_compile=jit, autograph=False)
    def tied(gradient: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        return fences._select(fences._not_odd(gradient), x)

    for gradient in (1.0, -0.0, np.nan, np.inf, 1e-45):
        result = tied(tf.constant([gradient, 2.0]), tf.constant(values))
        assert result.numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("jit", [False, True], ids=["executor", "xla"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_only_the_odd_pattern_is_odd(dtype: Any, jit: bool):
    @tf.function(jit_compile=jit, autograph=False)
    def predicate(gradient: tf.Tensor) -> tf.Tensor:
        return fences._not_odd(gradient)

    for value in awkward(dtype):
        assert predicate(tf.constant(np.array([value], dtype)))
    integer, pattern = fences._ODD[tf.as_dtype(dtype)]
    odd = tf.bitcast(tf.constant([pattern], integer), tf.as_dtype(dtype))
    assert not predicate(odd)


@pytest.mark.parametrize("dtype", fences._ODD, ids=lambda dtype: dtype.name)
def test_odd_patterns_are_signalling_nans(dtype: tf.DType):
    integer, pattern = fences._ODD[dtype]
    assert integer.size == dtype.size
    fraction_bits = ml_dtypes.finfo(dtype.as_numpy_dtype).nmant
    exponent_bits = 8 * dtype.size - 1 - fraction_bits
    fraction = pattern & ((1 << fraction_bits) - 1)
    exponent = pattern >> fraction_bits & ((1 << exponent_bits) - 1)
    quiet = pattern >> (fraction_bits - 1) & 1
    assert exponent == (1 << exponent_bits) - 1
    assert fraction != 0
    assert quiet == 0
    # Not the payload of a NaN that hardware or software makes: a lone bit, or none.
    assert fraction.bit_count() > 2


# -- ties ------------------------------------------------------------------------------


def called_blocks(y: tf.Tensor, weights: list[Any]) -> tf.Tensor:
    """Every third layer a function call, every third a branch."""

    @tf.function(autograph=False)
    def block(y: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        return tf.tanh(y @ weight)

    for index, weight in enumerate(weights):
        kind = index % 3
        if kind == 0:
            y = tf.tanh(y @ weight)
        elif kind == 1:
            y = block(y, weight)
        else:
            y = tf.cond(
                tf.reduce_sum(y) > 0,
                lambda y=y, w=weight: tf.tanh(y @ w),
                lambda y=y, w=weight: tf.sin(y @ w),
            )
        y = tf.sin(tf.nn.relu(y))
    return y


def control_edges_with_calls(mode: str) -> set[tuple[str, str]]:
    """The control edges of gradients through calls: (waiting op, awaited op)."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [BATCH, WIDTH])
        weights = [v1.get_variable(f"w{i}", [WIDTH, WIDTH]) for i in range(LAYERS)]
        y = called_blocks(x, weights)
        differentiate(mode, tf.reduce_sum(y), weights)
    types = {op.name: op.type for op in graph.get_operations()}
    return {
        (op.name, f"{types[waited.name]} {waited.name}")
        for op in graph.get_operations()
        for waited in op.control_inputs
    }


def test_no_tie_starts_at_a_call_or_a_branch():
    # Once the body is inlined, such an edge no longer waits for the results.
    ties = control_edges_with_calls("memory") - control_edges_with_calls("stock")
    assert [tie for tie in ties if tie[1].split()[0] in CALL_TYPES] == []
    assert any(awaited.startswith("Identity recompute/wait") for _, awaited in ties)


def tanh_chain(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
    y = x
    for _ in range(30):
        y = tf.tanh(y)
    return tf.reduce_sum(y), x


def dense_chain(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
    weights = [v1.get_variable(f"w{i}", [WIDTH, WIDTH]) for i in range(LAYERS)]
    return tf.reduce_mean(tf.square(dense_layers(x, weights))), weights


def skipping(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """A U without a bottleneck: each tensor on the way down is read on the way up."""
    y, skips = x, []
    for _ in range(8):
        y = tf.tanh(y)
        skips.append(y)
    for skip in reversed(skips):
        y = tf.sin(y) * skip
    return tf.reduce_sum(y), x


@pytest.mark.parametrize("model", [tanh_chain, dense_chain, skipping])
def test_no_copy_starts_before_what_was_simulated_before_it(
    model: Callable[[tf.Tensor], tuple[tf.Tensor, Any]],
):
    with tf.Graph().as_default() as graph:
        loss, xs = model(v1.placeholder(tf.float32, [BATCH, WIDTH]))
        msg.gradients(loss, xs, checkpoints="memory")
    plan = msg.last_plan()
    copies = gather_copies(plan, graph)
    runs_before = ancestors(graph)
    sizes = plan.reading.graph.tensors
    earlier: list[tf.Operation] = []
    checked = 0
    for step in plan.schedule.steps:
        if step.copy:
            for op in earlier:
                assert runs_before(op, copies[step.op]), (op.name, step)
                checked += 1
            earlier.append(copies[step.op])
            continue
        node = plan.reading.graph.ops[step.op]
        # Only what touches whole activations sets a peak.
        if any(sizes[t].bytes >= BATCH * WIDTH * 4 for t in node.outputs):
            earlier.append(plan.reading.ops[step.op])
    assert checked > len(copies)


def test_nothing_is_fenced_where_nothing_is_recomputed():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [BATCH, WIDTH])
        msg.gradients(tf.reduce_sum(x * x), x, checkpoints="memory")
        assert msg.last_plan().recomputed == ()
        seeds = [op for op in graph.get_operations() if "recompute/" in op.name]
    assert all(op.name.startswith("recompute/seed/") for op in seeds)
