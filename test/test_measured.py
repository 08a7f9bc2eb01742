"""Measured seconds of ops: what is taken for them, which ops they are for, what plans
make of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hand_graphs
import keras
import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import dense_layers
from tf_helpers import assert_same_bits, fixed, session

import mem_util
import memory_saving_gradients as msg
from mem_util.__main__ import main
from memory_saving_gradients import inside
from memory_saving_gradients.graph import TrainingGraph
from memory_saving_gradients.measured import Coverage, Measured, parse_cost

v1 = tf.compat.v1


# -- what it may be --------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.5, 2, np.float32(0.5), np.int64(2)])
def test_a_dict(value: Any):
    measured = parse_cost({"a/b": value})
    assert measured is not None
    assert measured.of("a/b") == value
    assert measured.of("b") is None


def test_a_file_by_string_or_path(tmp_path: Path):
    path = tmp_path / "costs.json"
    path.write_text('{"a/b": 0.5}')
    for given in (path, str(path)):
        measured = parse_cost(given)
        assert measured is not None and measured.of("a/b") == 0.5


def test_nothing():
    assert parse_cost(None) is None


@pytest.mark.parametrize(
    "value", [0, -1.0, float("nan"), float("inf"), True, "1", None]
)
def test_what_is_no_time(value: Any):
    with pytest.raises(msg.CostError, match="seconds above 0, but has 'b'") as caught:
        parse_cost({"a": 1.0, "b": value}, "enable")
    assert str(caught.value).startswith("`memory_saving_gradients.enable`: `cost`")


@pytest.mark.parametrize("given", [5, [("a", 1.0)], {}, b"costs.json"])
def test_what_is_no_mapping(given: Any):
    with pytest.raises(msg.CostError, match="must be a dict of op names to seconds"):
        parse_cost(given)


def test_names_are_strings():
    with pytest.raises(msg.CostError, match=r"has 7: 0\.5"):
        parse_cost({7: 0.5})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: .*No such file"),
        (b"\xff\xfe\x00", "cannot be read: .*decode"),
        (b"a = 0.5", "is no JSON"),
        (b"", "is no JSON"),
        (b"[1, 2]", r"but got \[1, 2\] of type list in the file '.*costs.json'"),
        (b"{}", "the file '.*costs.json' is empty"),
        (b'{"a": "fast"}', "the file '.*costs.json' must hold .* 'a': 'fast'"),
        (b'{"traceEvents": []}', r"has 'traceEvents': \[\]"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, words: str):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(msg.CostError, match=words):
        parse_cost(path)


# -- which ops -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "traced",
    [
        "dense/MatMul",
        "dense/MatMul:MatMul",
        "StatefulPartitionedCall/dense/MatMul",
        "PartitionedCall_3/dense/MatMul",
        "StatefulPartitionedCall/step/StatefulPartitionedCall_1/dense/MatMul",
        "while/body/_12/dense/MatMul",
        "StatefulPartitionedCall/cond/then/_54/dense/MatMul",
    ],
)
def test_names_match_behind_what_inlining_puts_in_front(traced: str):
    measured = Measured({traced: 0.5})
    assert measured.of("dense/MatMul") == 0.5
    assert measured.of("recompute/dense/MatMul") == 0.5
    assert measured.of("MatMul") is None
    assert measured.of("gradients/dense/MatMul") is None


@pytest.mark.parametrize(
    "traced",
    [
        "gradients/dense/MatMul",
        "MyPartitionedCall/dense/MatMul",
        "Func/StatefulPartitionedCall/dense/MatMul",
        "dense/MatMul_1",
    ],
)
def test_other_names_do_not(traced: str):
    assert Measured({traced: 0.5}).of("dense/MatMul") is None


def test_the_name_with_least_in_front_counts():
    names = {"PartitionedCall/while/body/_3/a": 4.0, "PartitionedCall/a": 3.0}
    assert Measured(names).of("a") == 3.0
    assert Measured(dict(reversed(names.items()))).of("a") == 3.0
    assert Measured({**names, "a": 2.0}).of("a") == 2.0


def test_several_calls_of_a_function_count_with_their_mean():
    names = {f"StatefulPartitionedCall_{n}/a": float(n) for n in (1, 2, 6)}
    assert Measured(names).of("a") == 3.0


# -- what they make of a graph ---------------------------------------------------------


def with_seconds(*seconds: float) -> TrainingGraph:
    """The ops `op0`, `op1`, ... that take so long in the model."""
    graph = hand_graphs.chain(len(seconds))
    ops = [
        replace(op, seconds=seconds[op.id] if op.id < len(seconds) else 0.0)
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops))


def names_of(graph: TrainingGraph) -> list[str]:
    return [op.name for op in graph.ops]


def test_times_are_taken_and_the_rest_is_scaled():
    graph = with_seconds(1.0, 2.0, 4.0, 0.0)
    a, b, _, idle = names_of(graph)[:4]
    priced = Measured({a: 3.0, b: 6.0, idle: 9.0, "other": 1.0}).price(graph)
    assert [op.seconds for op in priced.graph.ops[:4]] == [3.0, 6.0, 12.0, 0.0]
    assert priced.coverage == Coverage(named=2, ops=3, factor=3.0)
    assert [replace(op, seconds=0.0) for op in priced.graph.ops] == [
        replace(op, seconds=0.0) for op in graph.ops
    ]


def test_the_factor_minds_neither_tiny_ops_nor_outliers():
    graph = with_seconds(1.0, 1.0, 1.0, 5.0, *[1e-6] * 9)
    names = names_of(graph)
    cost = {names[0]: 2.0, names[1]: 2.0, names[2]: 500.0}
    cost |= dict.fromkeys(names[4:13], 1e-3)  # as long as it takes to start them
    priced = Measured(cost).price(graph)
    assert priced.coverage.factor == 2.0
    assert priced.graph.ops[3].seconds == 10.0


def test_without_a_match_the_model_stays():
    graph = with_seconds(1.0, 2.0)
    priced = Measured({"other": 7.0}).price(graph)
    assert priced.graph == graph
    assert priced.coverage == Coverage(0, 2, 1.0)


# -- plans -----------------------------------------------------------------------------


def two_kinds(x: tf.Tensor, depth: int = 8) -> tf.Tensor:
    for number in range(depth):
        x = tf.sin(x, name=f"sin{number}")
        x = tf.cos(x, name=f"cos{number}")
    return tf.reduce_sum(x)


def planned(cost: Any, checkpoints: Any = "70%") -> msg.Plan:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1 << 16])
        msg.gradients(two_kinds(x), x, checkpoints=checkpoints, cost=cost)
        plan = msg.last_plan()
        assert plan is not None
        return plan


@pytest.mark.parametrize("dear", ["sin", "cos"])
def test_what_was_measured_to_be_dear_is_kept(dear: str):
    cost = {f"{kind}{n}": 1e-3 for kind in ("sin", "cos") for n in range(8)}
    cost |= {f"{dear}{n}": 1.0 for n in range(8)}
    plan = planned(cost)
    assert plan.recomputed
    assert not [name for name in plan.recomputed if name.startswith(dear)]
    assert plan.extra_seconds == pytest.approx(1e-3 * len(plan.recomputed))
    assert plan.predicted_peak_bytes <= 0.7 * plan.stock_peak_bytes
    redone = planned(None).recomputed
    assert sum(cost[name] for name in redone) >= plan.extra_seconds


def test_the_summary_counts():
    plan = planned({f"sin{n}": 1e-3 for n in range(8)})
    assert plan.measured is not None and plan.measured.named == 8
    found = plan.measured
    line = f"measured times for 8 of {found.ops} ops, {found.factor:.3g} of the model's"
    assert line in plan.summary()
    assert "measured times" not in planned(None).summary()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model/sin3", "'model/sin3' is like 'sin3'"),
        ("sim3", "'sim3' is like 'sin"),
        ("qqq", "it has 'qqq', the graph 'sin0', 'cos0', 'sin1' and"),
    ],
)
def test_a_warning_if_no_name_matches(name: str, words: str):
    with pytest.warns(UserWarning, match=words) as caught:
        plan = planned({name: 1.0})
    assert "none of the 1 op names in `cost`" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert plan.recomputed == planned(None).recomputed
    assert "measured times for 0 of" in plan.summary()


@pytest.mark.usefixtures("no_meta_optimizer")
def test_gradients_are_stocks():
    weights = [fixed(16, 16, seed=n) for n in range(6)]

    def found(differentiate: Callable[..., Any]) -> Any:
        with tf.Graph().as_default() as graph:
            variables = [
                v1.get_variable(f"w{i}", initializer=w) for i, w in enumerate(weights)
            ]
            loss = tf.reduce_sum(dense_layers(tf.constant(fixed(512, 16)), variables))
            gradients = differentiate(loss, variables)
            with session(graph) as running:
                running.run(v1.global_variables_initializer())
                return running.run(gradients)

    def rewired(ys: Any, xs: Any) -> Any:
        names = [op.name for op in ys.graph.get_operations()]
        cost = {name: 1e-6 * (n + 1) for n, name in enumerate(names)}
        return msg.gradients(ys, xs, checkpoints="60%", cost=cost)

    new = found(rewired)
    assert msg.last_plan().recomputed and msg.last_plan().measured.named > 6
    assert_same_bits(found(tf.gradients), new)


# -- everywhere ------------------------------------------------------------------------


COST = {f"cos{n}": 1e-3 for n in range(8)}


def by_tape() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with msg.GradientTape(cost=COST) as tape:
            tape.watch(x)
            y = two_kinds(x)
        return tape.gradient(y, x)

    step(tf.ones([1 << 12]))


def stock_tape() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = two_kinds(x)
        return tape.gradient(y, x)

    step(tf.ones([1 << 12]))


def by_enable() -> None:
    msg.enable(cost=COST)
    try:
        stock_tape()
    finally:
        msg.disable()


def by_enabled() -> None:
    with msg.enabled("memory", cost=COST):
        stock_tape()


def model_of_two_kinds() -> Any:
    inputs = keras.Input([64])
    outputs = inputs
    for _ in range(6):
        outputs = keras.layers.Dense(64, "gelu")(outputs)
    return keras.Model(inputs, outputs)


def by_keras(checkpoints: Any = "memory", clone: bool = False) -> None:
    """Trains a model without costs, then with those of all its products."""
    model = model_of_two_kinds()
    x = np.ones([8, 64], "float32")
    cost = None
    for _ in range(2):
        msg.memory_saving(model, checkpoints, cost=cost)
        used = keras.models.clone_model(model) if clone and cost else model
        used.compile("sgd", "mse", jit_compile=False)
        used.train_on_batch(x, x)
        plan = msg.last_plan()
        assert plan is not None and (plan.measured is None) == (cost is None)
        ops = plan.reading.graph.ops
        cost = {op.name: 1.0 for op in ops if op.type == "MatMul"}


@pytest.mark.parametrize(
    "route", [by_tape, by_enable, by_enabled, by_keras], ids=lambda f: f.__name__
)
def test_every_way_in_takes_it(route: Callable[[], None]):
    route()
    plan = msg.last_plan()
    assert plan is not None and plan.measured is not None
    assert plan.measured.named >= 6


@pytest.mark.parametrize("checkpoints", ["memory", re.compile("dense")])
def test_clones_take_it(checkpoints: Any):
    by_keras(checkpoints, clone=True)
    assert msg.last_plan().measured.named >= 6


def variables_of_two_kinds() -> Callable[[tf.Tensor], tf.Tensor]:
    weight = tf.Variable(tf.ones([1 << 12]))
    return lambda x: two_kinds(x * weight)


def test_a_dry_run_takes_it():
    loss, x = variables_of_two_kinds(), tf.TensorSpec([1 << 12])
    cost = {f"cos{n}": 1e-3 for n in range(8)} | {f"sin{n}": 1.0 for n in range(8)}
    plan = msg.plan(loss, x, checkpoints="70%", cost=cost)
    assert plan.measured is not None and plan.measured.named == 16
    assert plan.recomputed
    assert not [name for name in plan.recomputed if name.startswith("sin")]
    modelled = msg.compare(loss, x, budgets=["70%"])
    measured = msg.compare(loss, x, budgets=["70%"], cost=cost)
    assert measured["70%"].extra_fraction == pytest.approx(plan.extra_fraction)
    assert measured["70%"].extra_fraction < modelled["70%"].extra_fraction / 2


def test_the_dry_run_of_a_model_takes_it():
    model = model_of_two_kinds()
    model.compile("sgd", "mse", jit_compile=False)
    ops = msg.plan(model, batch_size=8).reading.graph.ops
    cost = {op.name: 1.0 for op in ops if op.type == "MatMul"}
    plan = msg.plan(model, batch_size=8, cost=cost)
    assert plan.measured is not None and plan.measured.named == len(cost)


def test_the_front_over_all_budgets_takes_it():
    extra = []

    @tf.function(autograph=False)
    def look(x: tf.Tensor) -> tf.Tensor:
        loss = two_kinds(x)
        for cost in (None, COST | {f"sin{n}": 1.0 for n in range(8)}):
            front = msg.pareto(loss, x, cost=cost)
            point = front.within(0.7 * front.stock.peak_bytes)
            assert point is not None
            extra.append(point.extra_fraction)
        return loss

    look.get_concrete_function(tf.TensorSpec([1 << 12]))
    assert 0 < extra[1] < extra[0] / 2


def test_the_largest_batch_takes_it():
    weight = tf.Variable(tf.ones([1, 1 << 10]))

    def loss(x: tf.Tensor) -> tf.Tensor:
        return two_kinds(x * weight)

    x = tf.TensorSpec([None, 1 << 10])
    modelled = msg.max_batch_size(loss, "1MiB", x)
    cost = COST | {f"sin{n}": 1e-9 for n in range(8)}
    measured = msg.max_batch_size(loss, "1MiB", x, cost=cost)
    assert measured.stock.batch_size == modelled.stock.batch_size
    assert measured.budget.extra_fraction != modelled.budget.extra_fraction


@pytest.mark.parametrize(
    "call",
    [
        lambda: msg.enable(cost=5),
        lambda: msg.enabled(cost=5).__enter__(),
        lambda: msg.GradientTape(cost=5),
        lambda: msg.memory_saving(model_of_two_kinds(), cost=5),
        lambda: planned(5),
        lambda: msg.plan(model_of_two_kinds(), cost=5),
        lambda: msg.compare(model_of_two_kinds(), cost=5),
        lambda: msg.max_batch_size(model_of_two_kinds(), "1MiB", cost=5),
        lambda: tf.function(lambda x: msg.pareto(x, x, cost=5))(tf.ones([2])),
    ],
)
def test_every_way_in_checks_it_at_once(call: Callable[[], Any]):
    with pytest.raises(msg.CostError, match=r"`memory_saving_gradients\.\w+`: `cost`"):
        call()
    assert not msg.status().active


def test_bodies_take_it(monkeypatch: pytest.MonkeyPatch):
    plans: list[Any] = []
    settle = inside._settle

    def noting(*args: Any, **kwargs: Any) -> Any:
        plans.append(settle(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(inside, "_settle", noting)

    def step(x: tf.Tensor) -> Any:
        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            return i + 1, tf.tanh(tf.sin(tf.exp(y, name="slow")))

        y = tf.while_loop(lambda i, _: i < 4, body, [0, x], maximum_iterations=4)[1]
        cost = {"StatefulPartitionedCall/while/body/_3/while/slow": 7.0}
        return msg.gradients(tf.reduce_sum(y), x, checkpoints="memory", cost=cost)

    with pytest.warns(UserWarning, match="none of the 1 op names"):
        # The loop is one op of the graph around it, and has no time.
        tf.function(step, autograph=False).get_concrete_function(tf.ones([64]))
    assert any("slow" in name for plan in plans for name in plan.recomputed)
    assert sum(plan.seconds for plan in plans) >= 7.0


# -- with a trace ----------------------------------------------------------------------


@pytest.mark.usefixtures("no_meta_optimizer")
def test_from_a_trace_to_a_plan(tmp_path: Path):
    """Traces a step, writes its costs, plans with them."""

    @tf.function(autograph=False)
    def stock(x: tf.Tensor) -> Any:
        return tf.gradients(two_kinds(x), x)

    path = tmp_path / "costs.json"
    traced = mem_util.trace(stock, tf.ones([1 << 16]))
    mem_util.write_costs(path, traced)
    written = json.loads(path.read_text())
    assert written and all(seconds > 0 for seconds in written.values())

    @tf.function(autograph=False)
    def saving(x: tf.Tensor) -> Any:
        return msg.gradients(two_kinds(x), x, checkpoints="70%", cost=path)

    saving.get_concrete_function(tf.TensorSpec([1 << 16]))
    plan = msg.last_plan()
    assert plan is not None and plan.measured is not None and plan.recomputed
    # All of the forward pass, and of the backward pass what goes by the same name.
    assert plan.measured.named >= 32
    measured = parse_cost(path)
    assert measured is not None
    redone = [measured.of(name) for name in plan.recomputed]
    assert sum(s for s in redone if s is not None) == pytest.approx(plan.extra_seconds)


def test_from_a_session_through_the_command_line(tmp_path: Path):
    """The times of a step of TensorFlow 1, for a plan of the next run."""
    trace, costs = tmp_path / "run_metadata.pb", tmp_path / "costs.json"
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [1 << 16])
        gradients = tf.gradients(two_kinds(x), x)
        metadata = v1.RunMetadata()
        with session(graph) as running:
            running.run(
                gradients,
                {x: np.ones(1 << 16)},
                options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE),
                run_metadata=metadata,
            )
    trace.write_bytes(metadata.SerializeToString())
    assert main([str(trace), "--costs", str(costs)]) == 0
    plan = planned(costs)
    assert plan.measured is not None and plan.measured.named >= 30
