"""What a call of `fit` is given: above all the size of the batches that it will make.

Graphs are traced for batches of any size where the last one may be smaller. Plans want
to know what the others are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients import tf_internals_data

__all__ = ["batch_size_of", "given_to_fit", "given_to_running_fit"]

_OF_KERAS = 32
"""What `fit` makes of arrays if it is not told."""

_FUNCTIONS = ("Map", "Scan")
"""In the names of datasets that give each element to a function of the user."""


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


def given_to_running_fit(model: Any) -> dict[str, Any]:
    """The arguments of the `fit` of this model that runs in this thread; {} if none.

    Nobody was asked when it began: a callback may change how its model trains.

    Args:
        model: The model.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def batch_size_of(given: Mapping[str, Any]) -> int | None:
    """The size of a batch, None if nothing says it.

    Args:
        given: The arguments of `fit` by name.
    """
    size = given.get("batch_size")
    if isinstance(size, int) and size > 0:
        return size
    x = given.get("x")
    if isinstance(x, tf.data.Dataset):
        return _batch_size_of_dataset(x)
    first = next(iter(tf.nest.flatten(x)), None)
    shape = getattr(first, "shape", None)
    if shape is not None and size is None and len(shape) > 0:
        return min(_OF_KERAS, int(shape[0]))
    return None


def _batch_size_of_dataset(dataset: tf.data.Dataset) -> int | None:
    """What a pipeline's `batch` was told, if its elements are what that made.

    Nothing is drawn from the dataset: that would move its seeds. None where the batch
    is known: what is not known then is something else, such as a length.
    """
    first = next(iter(tf.nest.flatten(dataset.element_spec)), None)
    shape = getattr(first, "shape", None)
    if shape is not None and shape.rank and shape[0] is not None and None in shape[1:]:
        return None
    seen: set[int] = set()
    pending = [dataset]
    while pending:
        found = pending.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        size = tf_internals_data.own_batch_size(found)
        if size is not None:
            return size
        pending += [
            read
            for read in tf_internals_data.inputs_of_dataset(found)
            if _passes_batches_on(found, read)
        ]
    return None


def _passes_batches_on(dataset: tf.data.Dataset, read: tf.data.Dataset) -> bool:
    """Whether a batch of the one that is read is about a batch of the other.

    Most transformations pass elements on as they are. What makes other elements
    (`unbatch`, `flat_map`, `window`) does not, but for a function of each element and
    for `zip`.
    """
    kind = type(dataset).__name__
    if "Zip" in kind:
        return True
    if "FlatMap" not in kind and any(name in kind for name in _FUNCTIONS):
        return True
    return bool(dataset.element_spec == read.element_spec)
