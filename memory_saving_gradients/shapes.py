"""Shapes where TensorFlow knows none: what they are if a batch has the size assumed.

The problem: a graph made for any batch size says `[None, 128]` behind a
`tf.reshape(x, [-1, 128])`, where the None is batch times length. To take each None to
be the assumed size would make that tensor, and all that is computed from it, smaller
than its neighbours by the length.

So only where a shape begins (a placeholder) is an unknown dimension replaced by the
assumption; from there shapes are carried forward op by op, by one table of rules
(`shape_rules`). A shape that the graph computes (`tf.shape(x)[0] * 128`) is a small
tensor of integers, and the values of these are carried forward as well
(`shape_values`). What the static shape says is never contradicted, and where no rule
is known an unknown dimension is the assumption again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.cost import Shape
from memory_saving_gradients.op_shapes import FullShape, OpShapes
from memory_saving_gradients.shape_rules import SHAPE_RULES
from memory_saving_gradients.shape_values import VALUE_RULES

__all__ = ["MOST_ELEMENTS", "FullShape", "OpShapes", "infer", "values"]

MOST_ELEMENTS = 256
"""Tensors of integers up to this size are taken for shapes, axes and the like."""

# A rule meets an input that is missing or unknown, or sizes that could not be run.
_NOT_TOLD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def infer(op: OpShapes, unknown_dim: int) -> list[FullShape]:
    """The shapes of an op's outputs under the assumption.

    Args:
        op: The op.
        unknown_dim: What an unknown dimension is taken to be where no rule tells more.

    Returns:
        A shape for each output. It agrees with the static one.
    """
    guesses: list[Shape] = []
    rule = SHAPE_RULES.get(op.type)
    if rule is not None and any(s is None or None in s for s in op.outputs):
        try:
            guesses = list(rule(op))
        except _NOT_TOLD:
            guesses = []
    guesses.extend([None] * (len(op.outputs) - len(guesses)))
    return [
        _merged(static, guess, unknown_dim)
        for static, guess in zip(op.outputs, guesses, strict=False)
    ]


def values(op: OpShapes) -> Sequence[NDArray[np.int64] | None]:
    """For each output of an op of integers its elements, as far as they can be told."""
    unknown = [None] * len(op.outputs)
    rule = VALUE_RULES.get(op.type)
    if rule is None:
        return unknown
    try:
        told = [np.asarray(value).astype(np.int64) for value in rule(op)]
    except _NOT_TOLD:
        return unknown
    fitting = [value if value.size <= MOST_ELEMENTS else None for value in told]
    return fitting if len(fitting) == len(unknown) else unknown


def _merged(static: Shape, guess: Shape, unknown_dim: int) -> FullShape:
    """The static shape, its gaps filled by the guess and the rest by the assumption."""
    if static is None:
        static = (None, None) if guess is None else guess
    if guess is None or len(guess) != len(static):
        guess = [None] * len(static)
    pairs = zip(static, guess, strict=True)
    sizes = (told if known is None else known for known, told in pairs)
    return tuple(unknown_dim if size is None else max(int(size), 0) for size in sizes)
