"""A plan that was saved: the same graph again without a search, and no other graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tape_helpers import chain, variables
from tf_helpers import EXACT_ROUTES, Work, check, copies_in, fixed

import memory_saving_gradients as msg
from memory_saving_gradients import budgeted, inside_choice, selection
from memory_saving_gradients.checkpoints import parse

v1 = tf.compat.v1

WIDTH, LAYERS, ROWS = 32, 12, 512


def network(weights: Any, inputs: list[tf.Tensor], keep: float = 0.9) -> tf.Tensor:
    y = inputs[0]
    for number, w in enumerate(weights):
        with tf.name_scope(f"layer{number}"):
            y = tf.nn.gelu(y @ w)
            y = tf.nn.experimental.stateless_dropout(y, 1 - keep, [number, 3])
    return tf.reduce_sum(y)


def work() -> Work:
    weights = [fixed(WIDTH, WIDTH, seed=n) / WIDTH**0.5 for n in range(LAYERS // 2)]
    return Work(network, weights, [fixed(ROWS, WIDTH)])


def built(
    checkpoints: Any,
    *,
    forward: Callable[..., Any] = network,
    shape: Any = (ROWS, WIDTH),
    dtype: Any = tf.float32,
    layers: int = LAYERS,
    wanted: slice = slice(None),
    **keywords: Any,
) -> tuple[msg.Plan, tf.Graph]:
    """The plan of a graph, and the graph."""
    with tf.Graph().as_default() as graph:
        weights = [
            v1.get_variable(f"w{n}", [WIDTH, WIDTH], dtype, use_resource=True)
            for n in range(layers)
        ]
        loss = forward(weights, [v1.placeholder(dtype, shape, name="x")])
        msg.gradients(loss, weights[wanted], checkpoints=checkpoints, **keywords)
    plan = msg.last_plan()
    assert plan is not None
    return plan, graph


@cache
def saved_text() -> str:
    """The plan of the graph that most tests here are about."""
    return built("memory")[0].to_json()


def edges(graph: tf.Graph) -> list[Any]:
    """All of a graph, control edges included."""
    return [
        (op.name, op.type, [t.name for t in op.inputs], _names(op.control_inputs))
        for op in graph.get_operations()
    ]


def _names(ops: Any) -> list[str]:
    return sorted(op.name for op in ops)


@pytest.fixture
def no_planner(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every search fail once it has been called."""

    def forbid() -> None:
        def never(*_: Any) -> Any:
            raise AssertionError("a planner was called")

        never_any = {"memory": never, "speed": never}
        monkeypatch.setattr(selection, "PLANNERS", never_any)
        monkeypatch.setattr(inside_choice, "PLANNERS", never_any)
        monkeypatch.setattr(budgeted, "plan_budget", never)

    return forbid


# -- the same graph --------------------------------------------------------------------


def every_third(tensor: tf.Tensor) -> bool:
    return "MatMul" in tensor.op.type and tensor.name[5] in "258"


@pytest.mark.parametrize(
    "checkpoints",
    ["memory", "speed", "40%", "70%", "99%", "100%", every_third],
    ids=lambda c: c if isinstance(c, str) else "predicate",
)
def test_the_same_graph_without_a_planner(
    checkpoints: Any, no_planner: Callable[[], None]
):
    plan, graph = built(checkpoints)
    text = plan.to_json()
    no_planner()
    again, same = built(msg.Plan.from_json(text))
    assert again.replayed and not plan.replayed
    assert edges(same) == edges(graph)
    for name in (
        "strategy",
        "kept",
        "recomputed",
        "reason",
        "stock_peak_bytes",
        "predicted_peak_bytes",
        "predicted_peak_if_consumed_bytes",
        "extra_fraction",
        "extra_seconds",
        "budget_bytes",
        "consumed",
        "schedule",
        "timeline",
    ):
        assert getattr(again, name) == getattr(plan, name), name
    assert again.to_json() == text
    assert f"Checkpoints: {plan.strategy}, as saved\n" in again.summary()


def test_a_plan_that_leaves_the_graph_as_it_is():
    plan, graph = built("memory", shape=(1, WIDTH))
    assert plan.reason and not plan.recomputed
    again, same = built(msg.Plan.from_json(plan.to_json()), shape=(1, WIDTH))
    assert again.reason == plan.reason
    assert edges(same) == edges(graph)
    assert not copies_in(same)


@pytest.mark.usefixtures("no_meta_optimizer")
@pytest.mark.parametrize(
    "route", [*EXACT_ROUTES, pytest.param("jitted", marks=pytest.mark.slow)]
)
def test_gradients_are_stocks(route: str):
    first = check(work(), route, "memory")
    plan = check(work(), route, msg.Plan.from_json(first.to_json()))
    assert plan.kept == first.kept and plan.replayed


def test_other_batches_than_the_one_assumed():
    plan, _ = built("memory", shape=(None, WIDTH), unknown_dim=512)
    saved = msg.Plan.from_json(plan.to_json())
    assert saved.unknown_dim == 512
    again, _ = built(saved, shape=(None, WIDTH), unknown_dim=1024)
    assert again.recomputed == plan.recomputed
    assert again.predicted_peak_bytes > plan.predicted_peak_bytes


@pytest.mark.slow
def test_bodies_plan_for_themselves():
    def looped(weights: Any, inputs: list[tf.Tensor]) -> tf.Tensor:
        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            return i + 1, tf.tanh(tf.nn.gelu(tf.sin(y @ weights[0])))

        y = tf.while_loop(
            lambda i, _: i < 4, body, [0, inputs[0]], maximum_iterations=4
        )[1]
        return network(weights, [y])

    def step(checkpoints: Any) -> tuple[msg.Plan, list[str]]:
        weights = [tf.Variable(fixed(WIDTH, WIDTH, seed=n)) for n in range(LAYERS // 2)]

        def function(x: tf.Tensor) -> Any:
            loss = looped(weights, [x])
            return msg.gradients(loss, weights, checkpoints=checkpoints)

        traced = tf.function(function, autograph=False).get_concrete_function(
            tf.TensorSpec([ROWS, WIDTH])
        )
        text = str(traced.graph.as_graph_def().library)
        plan = msg.last_plan()
        assert plan is not None
        return plan, sorted(set(text.split('"recompute/')[1:]))

    for checkpoints in ("memory", "speed", "60%"):
        plan, inner = step(checkpoints)
        again, same = step(msg.Plan.from_json(plan.to_json()))
        assert again.kept == plan.kept
        assert len(same) == len(inner)


# -- everywhere ------------------------------------------------------------------------


def taped(tape: Callable[[], Any]) -> msg.Plan:
    ws = variables(8)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with tape() as recording:
            loss = tf.reduce_sum(chain(x, ws) ** 2)
        return recording.gradient(loss, ws)

    step.get_concrete_function(tf.TensorSpec([999, 8]))
    plan = msg.last_plan()
    assert plan is not None
    return plan


def test_tapes_and_the_process():
    plan = taped(msg.GradientTape)
    saved = msg.Plan.from_json(plan.to_json())
    again = taped(lambda: msg.GradientTape(checkpoints=saved))
    assert again.replayed and again.kept == plan.kept
    with msg.enabled(saved):
        assert "a saved plan (memory)" in str(msg.status())
        again = taped(tf.GradientTape)
    assert again.replayed and again.recomputed == plan.recomputed


def test_another_graph_of_the_process_stays_stock():
    saved = msg.Plan.from_json(taped(msg.GradientTape).to_json())

    @tf.function(autograph=False)
    def other(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(tf.sin(x))
        return tape.gradient(y, x)

    with (
        msg.enabled(saved),
        pytest.warns(UserWarning, match="a gradient stays stock.*another graph"),
    ):
        other(tf.ones([8]))


def model(width: int = 32) -> Any:
    inputs = outputs = keras.Input([width])
    for _ in range(8):
        outputs = keras.layers.Dense(width, "gelu")(outputs)
    return keras.Model(inputs, outputs)


def fitted(checkpoints: Any) -> msg.Plan:
    used = msg.memory_saving(model(), checkpoints)
    used.compile("sgd", "mse", jit_compile=False)
    used.train_on_batch(np.ones([256, 32]), np.ones([256, 32]))
    plan = msg.last_plan()
    assert plan is not None
    return plan


def test_keras():
    keras.utils.clear_session()
    plan = fitted("memory")
    saved = msg.Plan.from_json(plan.to_json())
    counted_on = fitted(saved)  # layers have other names now
    assert counted_on.replayed and counted_on.recomputed != plan.recomputed
    assert counted_on.predicted_peak_bytes == plan.predicted_peak_bytes
    keras.utils.clear_session()
    again = fitted(saved)
    assert again.replayed and again.recomputed == plan.recomputed


@pytest.mark.parametrize("checkpoints", ["memory", "60%"])
def test_the_plan_of_a_dry_run_serves_training(checkpoints: str):
    used = model()
    used.compile("sgd", "mse", jit_compile=False)
    rows = np.ones([256, 32], "float32")
    plan = msg.plan(used, rows, rows, checkpoints=checkpoints)
    msg.memory_saving(used, msg.Plan.from_json(plan.to_json()))
    used.fit(rows, rows, batch_size=256, verbose=0)
    again = msg.last_plan()
    assert again is not None and again.replayed
    assert again.predicted_peak_bytes == plan.predicted_peak_bytes
    assert len(again.recomputed) == len(plan.recomputed) > 0


def test_the_plan_of_a_dry_run_serves_a_step_with_other_inputs():
    ws = variables(8)

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(chain(x, ws) ** 2)

    plan = msg.plan(loss, tf.TensorSpec([999, 8]))
    saved = msg.Plan.from_json(plan.to_json())

    @tf.function(autograph=False)
    def step(scale: tf.Tensor, images: tf.Tensor) -> Any:
        with msg.GradientTape(checkpoints=saved) as tape:
            value = loss(images)
        return [scale * g for g in tape.gradient(value, ws)]

    step.get_concrete_function(tf.TensorSpec([]), tf.TensorSpec([999, 8]))
    again = msg.last_plan()
    assert again.recomputed == plan.recomputed
    with pytest.raises(msg.PlanMismatchError, match=r"Only dtypes or shapes differ"):
        step.get_concrete_function(tf.TensorSpec([]), tf.TensorSpec([64, 8]))


PROGRAM = """
import sys
import tensorflow as tf
import memory_saving_gradients as msg

ws = [tf.Variable(tf.ones([16, 16])) for _ in range(int(sys.argv[1]))][-8:]
table = tf.constant([[0.5] * 16])

@tf.function(autograph=False)
def step(x):
    with msg.GradientTape() as tape:
        y = x
        for w in ws:
            y = tf.cond(tf.reduce_sum(y) > 0.0, lambda: y + table, lambda: y)
            y = tf.tanh(tf.nn.softplus(y @ w))
    return tape.gradient(y, ws)

step.get_concrete_function(tf.TensorSpec([None, 16]))
sys.stdout.write(msg.last_plan().to_json())
"""


@pytest.mark.slow
def test_the_same_text_in_every_process():
    texts = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, count],
            env=os.environ | {"PYTHONHASHSEED": seed, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for count, seed in (("8", "1"), ("11", "2"))
    ]
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["recomputed"]


# -- the text --------------------------------------------------------------------------


def test_printed_it_is_a_line():
    saved = msg.Plan.from_json(saved_text())
    assert str(saved) == repr(saved)
    assert str(saved).startswith("SavedPlan('memory': predicted peak ")
    assert f"{len(saved.kept)} tensors kept" in str(saved)
    assert f"{len(saved.recomputed)} ops of {len(saved.graph)}" in str(saved)
    assert len(str(saved)) < 200


def test_the_text_is_for_people():
    text = saved_text()
    plan = json.loads(text)
    lines = text.splitlines()
    assert list(json.loads(text)) == [
        "format",
        "version",
        "strategy",
        "bodies",
        "reason",
        "stock_peak_bytes",
        "predicted_peak_bytes",
        "extra_fraction",
        "budget_bytes",
        "consumed",
        "unknown_dim",
        "kept",
        "recomputed",
        "reruns",
        "fingerprint",
        "graph",
    ]
    first = lines.index(' "kept": [') + 1
    assert [
        line.strip(' ",') for line in lines[first : first + len(plan["kept"])]
    ] == plan["kept"]
    assert any(
        line.startswith('  "layer0/')
        and line.endswith(f' -> float32[{ROWS},{WIDTH}]",')
        and "MatMul(x:0, layer0/" in line
        for line in lines
    )
    assert text.endswith("]\n}\n")


def test_one_kept_tensor_more_is_one_line_of_a_comparison():
    one = msg.Plan.from_json(saved_text())
    text = one.to_json().splitlines()
    added = json.loads(one.to_json())
    added["kept"].insert(1, "a:0")
    added["version"] = 1
    more = msg.Plan.from_json(json.dumps(added)).to_json().splitlines()
    assert [line for line in more if line not in text] == ['  "a:0",']
    assert len(more) == len(text) + 1


def edited(**changes: Any) -> str:
    values = json.loads(saved_text())
    values.update(changes)
    return json.dumps({k: v for k, v in values.items() if v != "gone"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "but '' is no JSON"),
        ("x" * 999, r"but 'xxxxx.*xxx\.\.\. is no JSON"),
        ("[]", r"but it is \[\]"),
        ("{}", "its 'format' is None"),
        (lambda: edited(format="other"), "its 'format' is 'other'"),
        (lambda: edited(version=7), "its version is 7, and this library reads"),
        (lambda: edited(kept="gone", reason="gone"), "it has no reason, kept"),
        (lambda: edited(more=1), "it has more, which no plan has"),
        (lambda: edited(kept="a:0"), "'kept' is 'a:0'"),
        (lambda: edited(kept=["a:0", 5]), "'kept' holds 5"),
        (lambda: edited(unknown_dim=True), "'unknown_dim' is True"),
        (lambda: edited(budget_bytes="4GiB"), "'budget_bytes' is '4GiB'"),
        (lambda: edited(graph=["x = Placeholder() -> float32[]"]), "was edited"),
        (lambda: edited(fingerprint="gone"), "was edited, or merged from two"),
    ],
)
def test_what_is_no_saved_plan(text: Any, words: str):
    with pytest.raises(msg.CheckpointError, match=words) as caught:
        msg.Plan.from_json(text() if callable(text) else text)
    assert "Save the plan anew" in str(caught.value)


def test_a_path_is_no_text():
    with pytest.raises(msg.CheckpointError, match=r"\.read_text\(\)"):
        msg.Plan.from_json(Path("plan.json"))


def test_one_way_to_give_it_back():
    plan, _ = built("memory")
    saved = msg.Plan.from_json(plan.to_json())
    assert parse(saved, ["memory"]) is saved
    with pytest.raises(
        msg.CheckpointError, match=r"got a plan itself.*from_json\(plan"
    ):
        parse(plan, ["memory"])
    with pytest.raises(msg.CheckpointError, match=r"JSON text.*`Plan.from_json\(text"):
        parse(plan.to_json(), ["memory"])


# -- another graph ---------------------------------------------------------------------


def renamed(weights: Any, inputs: list[tf.Tensor]) -> tf.Tensor:
    return network(weights, [tf.identity(inputs[0], "input")])


def tied(weights: Any, inputs: list[tf.Tensor]) -> tf.Tensor:
    return network([weights[0], weights[0], *weights[2:]], inputs)


def other_type(weights: Any, inputs: list[tf.Tensor]) -> tf.Tensor:
    with tf.name_scope("layer0"):
        tf.multiply(inputs[0], 2.0)
    return tf.reduce_mean(network(weights, inputs, keep=0.8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"shape": (ROWS // 2, WIDTH)},
            rf"x = Placeholder\(\) -> float32\[{ROWS},{WIDTH}\]`, here is "
            rf"`x = Placeholder\(\) -> float32\[{ROWS // 2},{WIDTH}\]`",
        ),
        ({"shape": (None, WIDTH)}, rf"here is `x = .* -> float32\[\?,{WIDTH}\]`"),
        ({"dtype": tf.float64}, "the plan has `.*float32.*`, here is `.*float64"),
        ({"layers": LAYERS - 1}, rf"the plan has `.*w{LAYERS - 1}(:0\)| =)"),
        ({"forward": renamed}, r"here is `input = Identity\(x:0\)"),
        ({"forward": tied}, r"has `w1 = .*here is `.* = ReadVariableOp\(w0:0\)"),
        ({"forward": other_type}, "The first op that differs is number "),
    ],
)
def test_another_graph_is_refused(change: dict[str, Any], words: str):
    saved = msg.Plan.from_json(saved_text())
    with pytest.raises(msg.PlanMismatchError, match=words) as caught:
        built(saved, **change)
    message = str(caught.value)
    assert "made for another graph" in message
    # An unknown size and another precision bring ops of their own.
    resized = change.get("shape") == (ROWS // 2, WIDTH)
    assert ("Only dtypes or shapes differ" in message) == resized
    assert "Build the graph as it was when the plan was saved, or plan anew" in message
    assert msg.last_plan() is None


def test_a_longer_graph_is_refused():
    def longer(weights: Any, inputs: list[tf.Tensor]) -> tf.Tensor:
        return tf.tanh(network(weights, inputs), name="last")

    saved = msg.Plan.from_json(saved_text())
    with pytest.raises(
        msg.PlanMismatchError, match=r"the plan has no more ops, here is `last = Tanh"
    ):
        built(saved, forward=longer)


def test_another_width_with_a_layer_more_is_not_taken_for_another_batch():
    saved = msg.Plan.from_json(saved_text())
    with pytest.raises(msg.PlanMismatchError) as caught:
        built(saved, shape=(ROWS // 2, WIDTH), layers=LAYERS + 1)
    assert "Only dtypes or shapes differ" not in str(caught.value)


def test_other_gradients_of_the_same_forward_pass_are_refused():
    saved = msg.Plan.from_json(saved_text())
    with pytest.raises(msg.PlanMismatchError, match="made for other gradients") as told:
        built(saved, wanted=slice(-2, None))
    assert "what is recomputed is not layer" in str(told.value)


def test_what_was_edited_by_hand_is_refused():
    kept = json.loads(saved_text())["kept"]
    with pytest.raises(msg.PlanMismatchError, match="not in its own graph: nobody:0"):
        built(msg.Plan.from_json(edited(kept=[*kept, "nobody:0"])))
    with pytest.raises(msg.PlanMismatchError, match="is recomputed is also layer"):
        built(msg.Plan.from_json(edited(kept=kept[2:])))
