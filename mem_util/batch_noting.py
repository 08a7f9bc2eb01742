"""Gets hold of one batch of a Keras model's `fit`, which callbacks are not shown.

`fit` hands an iterator to `model.train_function`. For one call, a function that pulls
the batches out of that iterator, notes the first and passes all of them on takes its
place. Training goes on with the same batches in the same order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import tensorflow as tf

__all__ = ["noting_one_batch", "types_of"]


def noting_one_batch(model: Any, noted: list[Any]) -> None:
    """Has the next call of a model's train function note its first batch.

    Args:
        model: a model of Keras 3 or `tf_keras`, in `fit`.
        noted: where the batch is put. It stays empty if there is no way to it.
    """
    function = model.train_function
    keras = sys.modules.get("keras")
    takes_any_iterator = keras is not None and isinstance(model, keras.Model)

    @functools.wraps(function)
    def noting(iterator: Any) -> Any:
        # Before the call: what else stands in this place may step aside during it.
        if model.train_function is noting:
            model.train_function = function
        if isinstance(iterator, tf.data.Iterator):
            iterator = _noting_dataset(iterator, noted)
        elif takes_any_iterator and isinstance(
            iterator, tf.distribute.DistributedIterator
        ):
            noted.extend(islice(iterator, 1))
            iterator = chain(noted, iterator) if noted else iterator
        return function(iterator)

    model.train_function = noting


def _noting_dataset(iterator: Any, noted: list[Any]) -> Any:
    """An iterator of the same type over the same batches, which notes the first."""

    def batches() -> Iterator[Any]:
        for batch in iterator:
            if not noted:
                noted.append(batch)
            yield batch

    dataset = tf.data.Dataset.from_generator(
        batches, output_signature=iterator.element_spec
    )
    # What is fetched in advance would be lost: the train function goes on with the
    # iterator that it had.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.autotune.enabled = False
    return iter(dataset.with_options(options))


def types_of(batch: Any) -> tuple[Any, ...]:
    """What the memory of a step depends on: structure, types and shapes of a batch."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    kinds = (
        (leaf.dtype, tuple(leaf.shape)) if tf.is_tensor(leaf) else type(leaf)
        for leaf in leaves
    )
    return (str(tf.nest.map_structure(type, batch)), *kinds)
