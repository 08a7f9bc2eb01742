"""What a call of `fit` is given: above all the size of the batches that it will make.

Graphs are traced for batches of any size where the last one may be smaller. Plans want
to know what the others are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["batch_size_of", "given_to_fit"]

_OF_KERAS = 32
"""What `fit` makes of arrays if it is not told."""


def given_to_fit(
    fit: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of `fit` by name; none if it cannot be called so.

    Args:
        fit: The `fit` of a model.
        args: What it is called with.
        kwargs: The same, by name.
    """
    try:
        given = inspect.signature(fit).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # `fit` itself will say so
        return {}
    return {**kwargs, **given}


def batch_size_of(given: Mapping[str, Any]) -> int | None:
    """The size of a batch, None if nothing says it.

    Args:
        given: The arguments of `fit` by name.
    """
    size = given.get("batch_size")
    if isinstance(size, int) and size > 0:
        return size
    first = next(iter(tf.nest.flatten(given.get("x"))), None)
    shape = getattr(first, "shape", None)
    if shape is not None and size is None and len(shape) > 0:
        return min(_OF_KERAS, int(shape[0]))
    return None
