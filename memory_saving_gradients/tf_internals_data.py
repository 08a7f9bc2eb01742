"""TensorFlow's private names that say what a `tf.data` pipeline is made of.

They help a guess, so that a TensorFlow without them is no error here: nothing is known
then. The rest, and why names are bound at import, is in `tf_internals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.errors import UnsupportedTensorFlowError
from memory_saving_gradients.tf_internals import _bind

__all__ = ["inputs_of_dataset", "own_batch_size"]

_CLASSES: list[type[Any]] = []
try:
    # What a dataset reads. Public API tells nothing of how one is made.
    _bind("tensorflow.python.data.ops.dataset_ops", "DatasetV2", "_inputs")
    # Those that make batches; each holds its size as a tensor, `_batch_size`.
    _CLASSES += [
        _bind("tensorflow.python.data.ops.batch_op", "_BatchDataset"),
        _bind("tensorflow.python.data.ops.batch_op", "_ParallelBatchDataset"),
        _bind("tensorflow.python.data.ops.padded_batch_op", "_PaddedBatchDataset"),
    ]
except UnsupportedTensorFlowError:
    _CLASSES.clear()


def inputs_of_dataset(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """The datasets that this one reads; none if that is not known."""
    return list(dataset._inputs()) if _CLASSES else []


def own_batch_size(dataset: tf.data.Dataset) -> int | None:
    """The size of the batches that this very dataset makes; None if it makes none."""
    if not isinstance(dataset, tuple(_CLASSES)):
        return None
    size = tf.get_static_value(getattr(dataset, "_batch_size", None))
    return None if size is None else int(size)
