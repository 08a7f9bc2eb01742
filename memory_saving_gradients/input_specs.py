"""What a function or a model is called with: shapes and dtypes instead of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.errors import MemorySavingGradientsError

__all__ = ["filled", "has_open_batch", "specs_of_model"]


def filled(specs: Sequence[Any], batch_size: int | None, where: str) -> list[Any]:
    """Specs for `tf.function`, with the size of a batch where it was open.

    Args:
        specs: Structures of `tf.TensorSpec`s or of whatever has a shape and a dtype.
        batch_size: For the first dimension of each, where that is unknown.
        where: The public function that got them, for messages.

    Raises:
        TypeError: Something has no shape or no dtype, or the size is no int.
        ValueError: The size is below 1.
    """
    if batch_size is not None:
        start = f"`memory_saving_gradients.{where}`: `batch_size` must be"
        if isinstance(batch_size, bool) or not isinstance(batch_size, int):
            raise TypeError(f"{start} an int, but got {batch_size!r}.")
        if batch_size < 1:
            raise ValueError(f"{start} at least 1, but got {batch_size}.")

    def spec(given: Any) -> tf.TensorSpec | None:
        if given is None:
            return None
        if not (hasattr(given, "shape") and hasattr(given, "dtype")):
            raise TypeError(
                f"`memory_saving_gradients.{where}`: an input must be given as a "
                "`tf.TensorSpec`, or as something else with a shape and a dtype, but "
                f"got {given!r} of type {type(given).__name__}."
            )
        shape = tf.TensorShape(given.shape)
        if batch_size is not None and shape.rank and shape[0] is None:
            shape = tf.TensorShape([batch_size, *shape[1:]])
        return tf.TensorSpec(shape, tf.as_dtype(given.dtype))

    return [tf.nest.map_structure(spec, given) for given in specs]


def has_open_batch(specs: Sequence[Any]) -> bool:
    """Whether some input has a first dimension that is not known."""
    return any(
        spec is not None and spec.shape.rank and spec.shape[0] is None
        for spec in tf.nest.flatten(filled(specs, None, ""))
    )


def specs_of_model(model: Any, where: str) -> list[Any]:
    """x and y as a model's inputs, outputs and losses have them.

    Raises:
        MemorySavingGradientsError: They do not say.
    """
    if not getattr(model, "inputs", None) or not getattr(model, "outputs", None):
        raise MemorySavingGradientsError(
            f"`memory_saving_gradients.{where}`: the model {model.name!r} does not say "
            "what its inputs are. Give a `tf.TensorSpec` for x and one for y."
        )
    x = _structure(model, "input")
    if model.loss is None:
        return [x]
    outputs = _structure(model, "output")
    if isinstance(outputs, list | tuple) and len(outputs) == 1:
        outputs = outputs[0]
    loss = model.loss
    if isinstance(loss, Mapping) and isinstance(outputs, list | tuple):
        loss = [loss.get(name) for name in model.output_names]
    return [x, _targets(outputs, loss)]


def _structure(model: Any, name: str) -> Any:
    """The tensors of a model as they are nested."""
    flat = getattr(model, f"{name}s")
    if len(flat) == 1:
        return flat[0]
    return getattr(model, name, flat)


def _targets(outputs: Any, loss: Any) -> Any:
    """What losses compare outputs with."""
    if isinstance(outputs, Mapping):
        of = loss if isinstance(loss, Mapping) else dict.fromkeys(outputs, loss)
        return {name: _targets(outputs[name], of.get(name)) for name in outputs}
    if isinstance(outputs, list | tuple):
        losses = loss if isinstance(loss, list | tuple) else [loss] * len(outputs)
        return [_targets(o, one) for o, one in zip(outputs, losses, strict=False)]
    if isinstance(loss, list | tuple) and len(loss) == 1:
        loss = loss[0]
    shape = tf.TensorShape(outputs.shape)
    called = loss if isinstance(loss, str) else getattr(loss, "name", None)
    if "sparse" in str(called or getattr(loss, "__name__", "")).lower():
        return tf.TensorSpec(shape[:-1], tf.int32)
    return tf.TensorSpec(shape, tf.float32)
