"""The checker of gradients is itself shown to fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import ROUTES, Work, assert_close, assert_same_bits, check, fixed

import memory_saving_gradients as msg

pytestmark = pytest.mark.usefixtures("no_meta_optimizer")


def chain(weights: list[Any], inputs: list[tf.Tensor]) -> tf.Tensor:
    y = inputs[0]
    for _ in range(6):
        y = tf.tanh(y @ weights[0])
    return tf.reduce_sum(y * y)


WORK = Work(chain, [fixed(8, 8)], [fixed(16, 8)])


@pytest.mark.parametrize("route", ROUTES)
def test_check_passes_on_right_gradients(route: str) -> None:
    check(WORK, route)


@pytest.mark.parametrize("route", ROUTES)
def test_check_fails_on_a_gradient_wrong_by_half_a_thousandth(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = msg.gradients

    def wrong(*args: Any, **keywords: Any) -> list[Any]:
        return [gradient * 1.0005 for gradient in right(*args, **keywords)]

    monkeypatch.setattr(msg, "gradients", wrong)
    with pytest.raises(AssertionError, match="off by up to"):
        check(WORK, route)


def test_same_bits_tells_apart_what_numbers_do_not() -> None:
    zero = np.zeros(3, np.float32)
    slices = tf.IndexedSlices(tf.zeros([1, 3]), tf.constant([0]), tf.constant([1, 3]))
    assert_same_bits([zero, None, slices], [zero, None, slices])
    for other in (-zero, zero.astype(np.float64), zero[None], None, slices):
        with pytest.raises(AssertionError):
            assert_same_bits([zero], [other])
    nan = np.full(3, np.nan, np.float32)
    assert_same_bits([nan], [nan])
    with pytest.raises(AssertionError):
        assert_same_bits([zero], (zero,))


def test_close_allows_rounding_and_the_spread_of_stock() -> None:
    one = np.array([1.0, 1e-3])
    assert_close([one], [one], [one + 9e-5])
    assert_close([one], [one + 1e-3], [one - 3e-3])
    with pytest.raises(AssertionError, match="allowed"):
        assert_close([one], [one], [one + 2e-4])
    with pytest.raises(AssertionError, match="allowed"):
        assert_close([one], [one], [one * np.nan])
    big = np.array([1e6])
    assert_close([one, big], [one, big], [one + 0.09, big])
