"""A plan must be worth its extra work; what the user selects is obeyed."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tf_helpers import fixed

import memory_saving_gradients as msg
from memory_saving_gradients.gain import Gain

v1 = tf.compat.v1


@pytest.mark.parametrize(
    ("peak", "consumed", "extra", "reason"),
    [
        (8_000_000, 8_000_000, 0.45, "no plan was found"),
        (7_999_996, 8_000_000, 0.45, "by 5e-05 % for 45 % more work"),
        (7_930_000, 8_000_000, 0.01, "by 0.88 % for 1 % more work"),
        (7_700_000, 8_000_000, 0.45, "less than 4.5 % is not worth"),
        (7_600_000, 8_000_000, 0.45, ""),
        (7_900_000, 8_000_000, 0.01, ""),
        # Gradients fill the peak of who holds them all; others gain.
        (8_000_000, 4_000_000, 0.45, ""),
        (8_000_001, 4_000_000, 0.45, "no plan was found"),
    ],
)
def test_least_gain(peak: int, consumed: int, extra: float, reason: str) -> None:
    gain = Gain(8_000_000, peak, 8_000_000, consumed, extra)
    found = gain.reason_against()
    assert reason in found
    assert bool(found) == bool(reason)


def test_nothing_at_all_is_no_gain() -> None:
    assert Gain(0, 0, 0, 0, 0.0).reason_against()


def dominated_by_one_input(checkpoints: object) -> msg.Plan:
    """The peak is reached at the start, where two large tensors meet; the chain of
    small ones behind could be recomputed, for next to nothing."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [512, 512])
        y = tf.reduce_mean(tf.sin(x) @ fixed(512, 512), 1)
        marked = []
        for _ in range(30):
            y = tf.tanh(y)
            marked.append(y)
        given = marked[::6] if checkpoints == "list" else checkpoints
        msg.gradients(tf.reduce_sum(y), x, checkpoints=given)
        return msg.last_plan()


@pytest.mark.parametrize("mode", ["memory", "speed"])
def test_automatic_planning_leaves_what_gains_nothing(mode: str) -> None:
    plan = dominated_by_one_input(mode)
    assert plan.reason
    assert plan.recomputed == ()
    assert plan.extra_fraction == plan.extra_seconds == 0
    assert plan.predicted_peak_bytes == plan.stock_peak_bytes
    assert plan.predicted_peak_if_consumed_bytes == plan.stock_peak_if_consumed_bytes


@pytest.mark.parametrize(
    "given", ["list", lambda tensor: tensor.name.endswith("5:0")], ids=["list", "rule"]
)
def test_what_the_user_selects_is_obeyed(given: object) -> None:
    plan = dominated_by_one_input(given)
    assert plan.reason == ""
    assert len(plan.recomputed) > 20


def test_a_list_of_everything_leaves_nothing_to_recompute() -> None:
    plan = dominated_by_one_input(lambda tensor: True)
    assert plan.recomputed == ()
    assert "nothing left to recompute" in plan.reason
