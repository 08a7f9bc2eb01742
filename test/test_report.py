"""What a plan says of itself: figures that agree, and names where nothing can help."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.wording import counted, sizes_like

v1 = tf.compat.v1


@pytest.mark.parametrize(
    ("largest", "count", "text"),
    [
        (1023, 40, "40 B"),
        (1024, 41, "0.040 KiB"),
        (16_400, 1_074_176, "1049 KiB"),
        (136 * 2**20, 136 * 2**20, "136 MiB"),
        (136 * 2**20, 30_000_000, "28.6 MiB"),
        (136 * 2**20, 2_097_152, "2.00 MiB"),
        (136 * 2**20, 131_072, "0.125 MiB"),
        (136 * 2**20, 12, "< 0.001 MiB"),
        (136 * 2**20, 0, "0 MiB"),
        (7 * 2**30, 30_000_000, "0.0279 GiB"),
        (0, 0, "0 B"),
    ],
)
def test_sizes_have_the_unit_of_the_largest(
    largest: int, count: int, text: str
) -> None:
    assert sizes_like(largest)(count) == text


def test_plurals() -> None:
    assert [counted(n, "op") for n in (0, 1, 2)] == ["0 ops", "1 op", "2 ops"]


Variables = list[tf.Variable]


def dense(
    batch: int, width: int, depth: int, mode: Any = "memory", act: Any = tf.tanh
) -> tuple[msg.Plan, Variables]:
    ws = [tf.Variable(tf.ones([width, width]), name=f"kernel{i}") for i in range(depth)]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        y = x
        for number, w in enumerate(ws):
            with tf.name_scope(f"layer{number}"):
                y = act(y @ w)
        return msg.gradients(tf.reduce_sum(y), ws, checkpoints=mode)

    step.get_concrete_function(tf.TensorSpec([batch, width]))
    return msg.last_plan(), ws


def chain(act: Any, size: int, depth: int, mode: Any = "memory") -> msg.Plan:
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [size])
        for number in range(depth):
            with tf.name_scope(f"b{number}"):
                y = act(y)
        msg.gradients(tf.reduce_sum(y), x, checkpoints=mode)
        return msg.last_plan()


PLANS = {
    "good": lambda: dense(512, 64, 30, act=tf.nn.gelu)[0],
    "gradients dominate": lambda: dense(16, 256, 6)[0],
    "pinned": lambda: chain(lambda y: tf.nn.dropout(tf.tanh(tf.sin(y)), 0.1), 9999, 9),
    "one of each": lambda: chain(tf.tanh, 1 << 20, 3, lambda t: "b0" in t.name),
}


@pytest.mark.parametrize("name", PLANS)
def test_figures_of_a_summary_agree(name: str) -> None:
    plan = PLANS[name]()
    text = plan.summary()
    kept = int(re.search(r"kept +(\d+) tensor", text)[1])
    assert kept == len(plan.kept)
    listed = re.search(r"Largest kept tensors:\n((?:  .*\n)*)", text + "\n")
    if plan.recomputed:
        lines = listed[1].splitlines()
        rest = re.fullmatch(r"  \.\.\. and (\d+) more", lines[-1])
        shown = len(lines) if rest is None else len(lines) - 1 + int(rest[1])
        assert shown == kept
        assert {line.split()[2] for line in lines[: 5 if rest else None]} <= set(
            plan.kept
        )
    assert len(set(re.findall(r"\d (B|KiB|MiB|GiB)\b", text))) == 1
    assert re.findall(r"\b1 (?:tensors|ops)\b", text) == []


@pytest.mark.parametrize("name", PLANS)
def test_columns_of_layers_stand_below_their_heads(name: str) -> None:
    text = PLANS[name]().summary()
    table = re.search(r"^By layer:.*\n(?:  .*\n?)*", text, re.M)
    if table is not None:
        head, *rows = table[0].splitlines()
        assert re.match(r"By layer: +kept  recomputed$", head)
        rows = [row for row in rows if "more" not in row]
        assert {len(row) for row in rows} == {len(head)}
        assert all(re.search(r" \w+B  +\d+ ops?$", row) for row in rows)


def test_gradients_that_fill_the_peak_are_named() -> None:
    plan, variables = dense(16, 256, 6)
    assert plan.recomputed == ()
    found = re.search(r"The largest is that of (\S+): (0\.250 MiB)", plan.summary())
    assert found is not None, plan.summary()
    assert found[1] in {variable.name for variable in variables}


def test_the_gradient_named_is_that_of_its_variable() -> None:
    """All variables but one are small; two have the same shape."""
    wide = [tf.Variable(tf.ones([8, 4096]), name=f"wide{i}") for i in range(2)]
    narrow = tf.Variable(tf.ones([4096, 8]), name="narrow")

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        y = tf.tanh(tf.sin(x) @ wide[0]) @ narrow
        return msg.gradients(
            y + tf.exp(x) @ wide[1][:, :8], wide[0], checkpoints="memory"
        )

    step.get_concrete_function(tf.TensorSpec([2, 8]))
    assert "that of wide0:0: 128 KiB" in msg.last_plan().summary()


def test_a_variable_that_is_gone_is_named_by_who_reads_it() -> None:
    plan, variables = dense(16, 256, 6)
    del variables
    assert re.search(
        r"largest is that of (kernel\d:0|what layer\d/\S+ reads):", plan.summary()
    )


def test_a_variable_of_a_v1_graph_is_named() -> None:
    with tf.Graph().as_default():
        w = v1.get_variable("weights", [512, 512], use_resource=True)
        x = v1.placeholder(tf.float32, [2, 512])
        msg.gradients(
            tf.tanh(tf.tanh(x @ w) @ tf.ones([512, 2])), w, checkpoints="memory"
        )
        assert "that of weights: 1.00 MiB" in msg.last_plan().summary()


def test_weights_that_dominate_are_told() -> None:
    w = tf.Variable(tf.ones([512, 512]))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        y = tf.tanh(tf.tanh(tf.sin(x @ w)))
        return msg.gradients(tf.reduce_sum(y), x, checkpoints="memory")

    step.get_concrete_function(tf.TensorSpec([2, 512]))
    assert (
        "Variables take 1024 KiB and inputs take 4.00 KiB" in msg.last_plan().summary()
    )


def test_inputs_that_dominate_are_told() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1000, 1000])
        y = tf.tanh(tf.tanh(tf.reduce_mean(x, 1)))
        msg.gradients(tf.reduce_sum(y), y.op.inputs[0], checkpoints="memory")
        text = msg.last_plan().summary()
    assert "Inputs take " in text
    assert "Variables" not in text


def test_one_op_that_needs_all_is_named_with_no_more_than_the_peak() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [512, 512])
        y = tf.reduce_mean(tf.sin(x) @ tf.ones([512, 512]), 1)
        msg.gradients(tf.reduce_sum(tf.tanh(tf.tanh(y))), x, checkpoints="memory")
        text = msg.last_plan().summary()
    found = re.search(
        r"reads and writes is ([\d.]+) MiB of the peak of ([\d.]+) MiB", text
    )
    assert found is not None, text
    assert float(found[1]) <= float(found[2])
    assert "test_report.py" in text


def test_a_plan_for_who_consumes_gradients_says_so() -> None:
    plan, _ = dense(256, 256, 8)
    assert plan.recomputed
    assert "If each is consumed" in plan.summary()
    assert plan.predicted_peak_if_consumed_bytes < plan.stock_peak_if_consumed_bytes


def test_the_sum_of_a_shared_weights_gradients_is_named_with_a_way_out() -> None:
    def plan(**keywords: Any) -> msg.Plan:
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [64, 64])
            w = tf.compat.v1.get_variable("w", [64, 64])
            y = x
            for _ in range(30):
                y = tf.tanh(y + w)
            msg.gradients(tf.reduce_sum(y), [x, w], checkpoints="memory", **keywords)
        return msg.last_plan()

    told = plan()
    assert "AddN) waits for 30 gradients" in told.summary()
    way_out = plan(aggregation_method=tf.AggregationMethod.EXPERIMENTAL_TREE)
    assert way_out.predicted_peak_bytes < 0.5 * told.predicted_peak_bytes


def test_two_terms_have_no_other_way_to_be_added() -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [64, 64])
        msg.gradients(tf.reduce_sum(x * x), x, checkpoints="memory")
    assert "EXPERIMENTAL_TREE" not in msg.last_plan().summary()


def test_what_may_not_run_twice_is_named_with_its_reason() -> None:
    with tf.Graph().as_default():
        x = y = tf.compat.v1.placeholder(tf.float32, [64, 64])
        for _ in range(6):
            y = y * tf.raw_ops.RandomUniform(shape=[64, 64], dtype=tf.float32)
        msg.gradients(tf.reduce_sum(y), x, checkpoints="memory")
    told = msg.last_plan().summary()
    assert "The largest is that of RandomUniform" in told
    assert "it is stateful" in told
    assert re.search(r"6 tensors, .*, such as RandomUniform \S+: it is stateful", told)


def test_a_gradient_of_nothing_says_so() -> None:
    with tf.Graph().as_default():
        x, other = (tf.compat.v1.placeholder(tf.float32, [64, 64]) for _ in range(2))
        found = msg.gradients(tf.reduce_sum(tf.tanh(x)), other, checkpoints="memory")
    assert found == [None]
    told = msg.last_plan().summary()
    assert "every gradient is None" in told
    assert "reads and writes" not in told
