"""A budget as a user gives it: what it may look like, and that gradients keep to it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf
from saving_helpers import dense_layers, weights_of
from tf_helpers import EXACT_ROUTES, Work, check, fixed

import memory_saving_gradients as msg
from mem_util import measure
from memory_saving_gradients.budget import FORMS
from memory_saving_gradients.checkpoints import parse

MIB = 2**20
WIDTH, LAYERS = 64, 24


# -- what it may look like -------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("500 MB", 500 * 10**6),
        ("0.5TB", 5 * 10**11),
        ("4096", 4096),
        ("12 B", 12),
        (12, 12),
        (np.int64(12), 12),
        ("40%", 400),
        ("12.5 %", 125),
    ],
)
def test_budget_in_bytes(given: object, size: int):
    assert msg.Budget(given).allowed(1000) == size


@pytest.mark.parametrize(
    "given", ["4 bananas", "%", "4%GiB", "GiB", 4.0, True, b"4GiB", [4], "1e9"]
)
def test_what_is_no_budget(given: object):
    with pytest.raises(msg.CheckpointError, match="must look like") as caught:
        msg.Budget(given)
    assert FORMS in str(caught.value)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("given", ["0GiB", 0, "0%", -5, "-5%", "-.5GiB"])
def test_budget_is_above_nothing(given: object):
    with pytest.raises(msg.CheckpointError, match="must be above 0"):
        msg.Budget(given)
    if isinstance(given, str):
        with pytest.raises(msg.CheckpointError, match="must be above 0"):
            msg.enable(given)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bytes": 5, "total": 5}, {"bytes": "5%", "device": "CPU:0"}],
)
def test_budget_is_given_one_way(arguments: dict[str, object]):
    with pytest.raises(msg.CheckpointError, match="either `bytes`"):
        msg.Budget(**arguments)


def test_a_total_is_no_share_and_a_device_is_a_name():
    with pytest.raises(msg.CheckpointError, match="`total` must be a size"):
        msg.Budget(total="40%")
    with pytest.raises(msg.CheckpointError, match="`device` must be a name"):
        msg.Budget(device=0)


@pytest.mark.parametrize("consumed", ["yes", 1, None])
def test_consumed_is_a_bool(consumed: object):
    with pytest.raises(msg.CheckpointError, match="`consumed` must be True or False"):
        msg.Budget("4GiB", consumed=consumed)


def test_parsed_once_at_the_edge():
    assert parse("40%", ["memory"]) == msg.Budget("40%")
    assert parse(msg.Budget(5), ["memory"]) == msg.Budget(5)
    with pytest.raises(msg.CheckpointError, match=r"give `Budget\(5\)`"):
        parse(5, ["memory"])
    with pytest.raises(msg.CheckpointError, match='a budget such as "4GiB"'):
        parse("memry", ["memory"])


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (msg.Budget("40%"), "a budget of 40 % of stock's peak"),
        (msg.Budget("4GiB"), "a budget of 4.00 GiB"),
        (msg.Budget(total="8GiB"), "a budget of 8.00 GiB in all"),
        (
            msg.Budget(total="8GiB", device="GPU:0"),
            "a budget of 8.00 GiB in all on GPU:0",
        ),
        (msg.Budget(device="GPU:0"), "a budget of all memory on GPU:0"),
    ],
)
def test_in_words(budget: msg.Budget, text: str):
    assert str(budget) == text


# -- gradients -------------------------------------------------------------------------


def network(weights: list[tf.Variable], inputs: list[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_sum(dense_layers(inputs[0], weights) ** 2)


def work() -> Work:
    weights = [fixed(WIDTH, WIDTH, seed=n) / WIDTH**0.5 for n in range(LAYERS)]
    return Work(network, weights, [fixed(2048, WIDTH)])


@pytest.mark.parametrize("route", EXACT_ROUTES)
@pytest.mark.parametrize("budget", ["40%", "70%"])
def test_gradients_are_stocks(route: str, budget: str):
    check(work(), route, budget)
    plan = msg.last_plan()
    assert plan.recomputed
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.budget_bytes == int(float(budget[:-1]) / 100 * plan.stock_peak_bytes)


def planned(checkpoints: object) -> msg.Plan:
    """The plan for a network of layers in a `tf.function`, traced but not run."""
    weights = weights_of(LAYERS, WIDTH)

    @tf.function
    def step(x):
        loss = tf.reduce_sum(dense_layers(x, weights) ** 2)
        return msg.gradients(loss, weights, checkpoints=checkpoints)

    step.get_concrete_function(tf.TensorSpec([2048, WIDTH]))
    return msg.last_plan()


def test_less_memory_never_costs_less():
    plans = [planned(f"{share}%") for share in (95, 80, 60, 45, 35)]
    times = [plan.extra_seconds for plan in plans]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_with_all_of_stocks_memory_the_graph_is_stocks():
    plan = planned("100%")
    assert plan.recomputed == ()
    assert plan.reason == "stock's own peak is within the budget"
    assert planned("1TiB").recomputed == ()


def test_what_cannot_be_done_names_the_least_and_what_sets_it():
    with pytest.raises(msg.BudgetError, match="The lowest peak") as e:
        planned("1%")
    least = e.value.least_bytes
    assert f"({least} bytes" in str(e.value)
    assert "saving_helpers.py" in str(e.value)
    assert msg.last_plan() is None
    assert planned(msg.Budget(least)).predicted_peak_bytes <= least


def test_a_budget_just_below_the_least_is_told_in_bytes():
    weights = [tf.Variable(fixed(WIDTH, WIDTH)) for _ in range(3 * LAYERS)]
    x = tf.TensorSpec([2048, WIDTH])

    def refused(budget: object) -> msg.BudgetError:
        with pytest.raises(msg.BudgetError) as e:
            msg.plan(lambda x: network(weights, [x]), x, checkpoints=budget)
        return e.value

    needed = refused("1%").least_bytes
    told = str(refused(msg.Budget(needed - 1)))
    assert f"({needed - 1} bytes). The lowest peak that was found" in told
    assert f"is {needed} bytes (stock's is" in told


def test_below_what_single_recomputation_needs_ops_run_several_times():
    floor = planned("memory").predicted_peak_bytes
    plan = planned(msg.Budget(floor * 9 // 10))
    assert plan.predicted_peak_bytes <= floor * 9 // 10
    assert max(plan.schedule.runs.values()) > 1
    assert plan.extra_seconds == pytest.approx(
        sum(
            plan.reading.graph.ops[op].seconds * times
            for op, times in plan.schedule.runs.items()
        )
    )


def test_summary_tells_the_budget():
    plan = planned("40%")
    assert "Checkpoints: a budget of 40 % of stock's peak" in plan.summary()
    assert "MiB above rest" in plan.summary()


def test_measured_peak_keeps_to_it():
    weights = weights_of(LAYERS, 256)
    x = tf.random.normal([1024, 256])  # a tensor of 1 MiB for each layer

    def step_of(checkpoints):
        @tf.function
        def step(x):
            loss = tf.reduce_sum(dense_layers(x, weights) ** 2)
            return msg.gradients(loss, weights, checkpoints=checkpoints)

        return step

    stock = measure(step_of("100%"), x).above_rest_bytes["/cpu:0"]
    for share in (70, 50):
        peak = measure(step_of(f"{share}%"), x).above_rest_bytes["/cpu:0"]
        # Chunks of the allocator are up to twice the request.
        assert peak <= 1.05 * share / 100 * stock + MIB


# -- what rests ------------------------------------------------------------------------


def test_what_rests_is_subtracted_from_a_total():
    # What other tests left behind rests, too.
    total = tf.config.experimental.get_memory_info("CPU:0")["current"] + 24 * MIB
    plan = planned(msg.Budget(total=total))
    weights = LAYERS * WIDTH * WIDTH * 4
    assert plan.resting_bytes >= weights
    assert plan.budget_bytes == total - plan.resting_bytes
    assert "of the total rest" in plan.summary()


def test_nothing_is_left_of_the_total():
    with pytest.raises(msg.BudgetError, match="all of the"):
        planned(msg.Budget(total="100KB"))


def test_device_must_be_there_and_have_a_limit():
    with pytest.raises(msg.CheckpointError, match="there is no device 'GPU:7'"):
        planned(msg.Budget(device="GPU:7"))
    with pytest.raises(msg.CheckpointError, match="sets itself no limit on CPU:0"):
        planned(msg.Budget(device="cpu"))


# -- other doors -----------------------------------------------------------------------


def test_tape_keeps_to_a_budget():
    weights = weights_of(LAYERS, WIDTH)

    @tf.function
    def step(x):
        with msg.GradientTape(checkpoints="40%") as tape:
            loss = tf.reduce_sum(dense_layers(x, weights) ** 2)
        tape.gradient(loss, weights)
        return tape.plan.predicted_peak_bytes / tape.plan.stock_peak_bytes

    assert step(tf.zeros([2048, WIDTH])) <= 0.4


def test_fit_keeps_to_a_budget():
    model = tf.keras.Sequential([tf.keras.layers.Dense(WIDTH, "tanh")] * 1)
    for _ in range(LAYERS):
        model.add(tf.keras.layers.Dense(WIDTH, "tanh"))
    msg.memory_saving(model, checkpoints=msg.Budget("50%"))
    model.compile("sgd", "mse", jit_compile=False)
    x = np.zeros([2048, WIDTH], np.float32)
    model.fit(x, x, batch_size=2048, verbose=0)
    plan = msg.last_plan()
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.stock_peak_bytes


def test_enabled_keeps_to_a_budget():
    weights = weights_of(LAYERS, WIDTH)
    with msg.enabled("50%"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "50 %" in msg.status().enabled

        @tf.function
        def step(x):
            return tf.gradients(tf.reduce_sum(dense_layers(x, weights)), weights)

        step(tf.zeros([2048, WIDTH]))
    plan = msg.last_plan()
    assert plan.recomputed
    assert plan.predicted_peak_bytes <= plan.budget_bytes
