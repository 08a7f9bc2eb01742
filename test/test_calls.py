"""How calls fail: what they say, and what they leave behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from tf_helpers import fixed

import memory_saving_gradients as msg

v1 = tf.compat.v1


@pytest.fixture
def x() -> Iterator[tf.Tensor]:
    with tf.Graph().as_default():
        yield tf.constant(fixed(8, 8))


def model(x: tf.Tensor) -> tf.Tensor:
    for _ in range(6):
        x = tf.tanh(tf.sin(x))
    return x


FAILING: dict[str, Callable[[tf.Tensor], Any]] = {
    "a misspelt strategy": lambda x: msg.gradients(x, x, checkpoints="memmory"),
    "an empty collection": lambda x: msg.gradients(model(x), x),
    "a list that cannot serve": lambda x: msg.gradients(model(x), x, checkpoints=[x]),
    "stock's own error": lambda x: msg.gradients_memory(model(x), x, [x, x]),
    "unknown_dim": lambda x: msg.gradients(x, x, checkpoints="memory", unknown_dim=0),
}


@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING)
def test_after_a_failed_call_there_is_no_plan(failing: Any, x: tf.Tensor) -> None:
    msg.gradients(model(x), x, checkpoints="memory")
    assert msg.last_plan() is not None
    with pytest.raises((ValueError, TypeError, LookupError)):
        failing(x)
    assert msg.last_plan() is None
    msg.gradients(model(x), x, checkpoints="memory")
    assert msg.last_plan().recomputed


def test_after_an_eager_call_there_is_no_plan() -> None:
    with tf.Graph().as_default():
        x = tf.constant(fixed(8, 8))
        msg.gradients(model(x), x, checkpoints="memory")
    assert msg.last_plan() is not None
    with pytest.raises(msg.EagerExecutionError):
        msg.gradients(tf.constant(1.0), tf.constant(1.0), checkpoints="memory")
    assert msg.last_plan() is None


MEMBERS = [msg.gradients_memory, msg.gradients_speed, msg.gradients_collection]


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("other", ["checkpoints", "unknown_dim", "verify", "nonsense"])
def test_other_keywords_are_told_where_they_belong(
    member: Any, other: str, x: tf.Tensor
) -> None:
    expected = (
        rf"{member.__name__}. .* takes no .{other}.\. Use .gradients\(\.\.\., {other}="
    )
    with pytest.raises(TypeError, match=expected):
        member(x, x, **{other: "memory"})


@pytest.mark.parametrize("member", MEMBERS)
def test_signature_is_that_of_version_1(member: Any) -> None:
    ours = inspect.signature(member).parameters
    stock = inspect.signature(v1.gradients).parameters
    assert list(ours) == list(stock)
    with pytest.raises(TypeError, match=rf"{member.__name__}\(\) missing 1 required"):
        member([])
