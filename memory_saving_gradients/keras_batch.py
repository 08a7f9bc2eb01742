"""The size of the batches that a call of `fit` will make, as far as its arguments say.

Graphs are traced for batches of any size where the last one may be smaller. Plans want
to know what the others are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["batch_size_of"]

_OF_KERAS = 32
"""What `fit` makes of arrays if it is not told."""


def batch_size_of(
    fit: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int | None:
    """The size of a batch, None if nothing says it.

    Args:
        fit: The `fit` of a model.
        args: What it is called with.
        kwargs: The same, by name.
    """
    try:
        given = inspect.signature(fit).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # `fit` itself will say so
        return None
    given = {**given.get("kwargs", {}), **given}
    size = given.get("batch_size")
    if isinstance(size, int) and size > 0:
        return size
    first = next(iter(tf.nest.flatten(given.get("x"))), None)
    shape = getattr(first, "shape", None)
    if shape is not None and size is None and len(shape) > 0:
        return min(_OF_KERAS, int(shape[0]))
    return None
