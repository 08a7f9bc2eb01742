"""The `every=` argument: after how many iterations loops hold their state."""

from __future__ import annotations

import math
import operator
from typing import Any

import tensorflow as tf

from memory_saving_gradients.trip_counts import iterations

__all__ = ["SQRT", "Every", "mark", "marked", "parse_every", "steps_of"]

SQRT = "sqrt"
"""The `every=` by which a loop of T iterations holds its state each √T iterations."""

Every = int | str

_UNKNOWN = 16
"""Iterations of an inner loop if nobody knows how many there will be."""

# The attribute by which the body of a loop says that it is to be split.
_MARK = "_memory_saving_gradients_every"


def parse_every(value: Any, where: str) -> Every | None:
    """Checks an `every=` argument.

    Args:
        value: What the user gave.
        where: The public function that got it, for messages.

    Raises:
        TypeError, ValueError: It is nothing that it may be.
    """
    if value is None or (isinstance(value, str) and value == SQRT):
        return value
    start = f"`memory_saving_gradients.{where}`: `every` must be"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f'{start} a number of iterations or "{SQRT}", but got {value!r}.'
        )
    if operator.index(value) < 1:
        raise ValueError(
            f'{start} at least 1, but got {value}. Give "{SQRT}" for the square root '
            "of the number of iterations."
        )
    return operator.index(value)


def steps_of(every: Every, loop: tf.Operation) -> int:
    """How many iterations of a loop an inner loop shall have; 1 for none."""
    known = iterations(loop)
    if every != SQRT:
        return min(int(every), known or int(every))
    return _UNKNOWN if known is None else math.isqrt(known)


def mark(body: tf.Graph, every: Every) -> None:
    """Has a loop be split whatever the setting is, if there is one."""
    setattr(body, _MARK, every)


def marked(body: tf.Graph | None) -> Every | None:
    """How a loop shall be split by its own account."""
    return getattr(body, _MARK, None)
