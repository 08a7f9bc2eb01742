"""What the library must know of Keras models, without importing Keras.

Keras traces a model's train function once and keeps it. Whoever changes how gradients
are taken has to make the models that were traced before trace again.

Keras 3 and `tf_keras` (Keras 2) are the same here. A program that has imported neither
has no models.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

__all__ = [
    "PACKAGES",
    "backend",
    "exempt",
    "is_model",
    "live_models",
    "names",
    "retrace",
    "settings",
    "waiting",
]

PACKAGES = ("keras", "tf_keras")

settings: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Models with a setting of their own, and the setting in words."""

exempt: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that train as stock whatever the setting of the process is."""


def backend(package: str) -> str:
    """What a Keras package computes with: "tensorflow", "jax" ...; "" if not there."""
    module = sys.modules.get(package)
    name = getattr(getattr(module, "backend", None), "backend", None)
    return str(name()) if callable(name) else ""


def is_model(thing: Any) -> bool:
    """Whether something is a Keras model, of whatever backend."""
    classes = (getattr(sys.modules.get(name), "Model", ()) for name in PACKAGES)
    return any(isinstance(thing, found) for found in classes)


def live_models() -> list[Any]:
    """All Keras models of the process that compute with TensorFlow."""
    classes = tuple(
        sys.modules[package].Model
        for package in PACKAGES
        if backend(package) == "tensorflow" and hasattr(sys.modules[package], "Model")
    )
    if not classes:
        return []
    # `isinstance` would ask proxies for their class; what they stand for may be dead.
    return [found for found in gc.get_objects() if issubclass(type(found), classes)]


def retrace(models: Iterable[Any]) -> list[Any]:
    """Makes models that have been traced trace again, at their next training step.

    Returns:
        These models.
    """
    found = []
    for model in models:
        if vars(model).get("train_function") is None:
            continue
        found.append(model)
        _waiting.add(model)
        if hasattr(model, "_make_train_function"):
            # Keras 2 in a graph of TensorFlow 1: made anew where it is not there.
            model.train_function = None
            continue
        try:
            # Not None: `fit` may be running, in this thread or another. Keras 2 reads
            # the value of a variable there, whatever graph is being built just now.
            with tf.init_scope():
                model.make_train_function(force=True)
        except TypeError:  # overridden without `force`
            model.train_function = None
        else:
            _note_next_step(model)
    return found


def waiting() -> list[Any]:
    """Models that are to be traced again and have not had a training step since."""
    for model in list(_waiting):
        function = vars(model).get("train_function")
        if function is not None and not hasattr(function, _NOTES):
            _waiting.discard(model)
    return list(_waiting)


def names(models: Iterable[Any]) -> list[str]:
    """The models' names, sorted; one that several have, once and with their number."""
    counts = Counter(str(model.name) for model in models)
    return [
        name if count == 1 else f"{name} ({count} models)"
        for name, count in sorted(counts.items())
    ]


_waiting: weakref.WeakSet[Any] = weakref.WeakSet()
_NOTES = "_memory_saving_gradients_notes_a_step"


def _note_next_step(model: Any) -> None:
    """Wraps the train function in one that steps aside once it has run."""
    function = model.train_function
    if function is None:
        return

    def next_step(*args: Any, **kwargs: Any) -> Any:
        # Only if it is still in its place: another may have been made meanwhile.
        if model.train_function is next_step:
            model.train_function = function
            _waiting.discard(model)
        return function(*args, **kwargs)

    setattr(next_step, _NOTES, True)
    model.train_function = next_step
