"""From layers of a Keras model to the tensors that are kept.

A model has no tensors until a training step is traced, and other ones at each trace. So
layers are remembered by path, and while a step is traced their outputs are noted: for
as long their `call` is overridden on the object, to note what this thread gets.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from memory_saving_gradients.checkpoints import Keep
from memory_saving_gradients.errors import (
    CheckpointError,
    UnknownCheckpointNameError,
    shortened,
)

__all__ = ["WHERE", "Outputs", "choose", "layers_of_model"]

WHERE = "`memory_saving_gradients.memory_saving`"
"""The public function that messages speak for."""


def layers_of_model(model: Any, layer_class: type[Any]) -> dict[str, Any]:
    """All layers inside a model by path: names from the outside in, joined by "/".

    Args:
        model: A Keras model.
        layer_class: What a layer is an instance of.
    """
    found: dict[str, Any] = {}
    seen = {id(model)}
    pending = [("", model)]
    while pending:
        prefix, outer = pending.pop(0)
        for layer in _direct(outer, layer_class):
            if id(layer) in seen or type(layer).__name__ == "InputLayer":
                continue
            seen.add(id(layer))
            path = f"{prefix}{layer.name}"
            found[path] = layer
            pending.append((f"{path}/", layer))
    return found


def _direct(outer: Any, layer_class: type[Any]) -> list[Any]:
    """The layers that a model lists or that a layer holds in its attributes."""
    listed = getattr(outer, "layers", None)
    if isinstance(listed, list | tuple):
        return [layer for layer in listed if isinstance(layer, layer_class)]
    found: list[Any] = []
    pending = list(vars(outer).values())
    while pending:
        value = pending.pop(0)
        if isinstance(value, layer_class):
            found.append(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple | set):
            pending.extend(value)
    return found


def choose(chosen: Iterable[Any], layers: dict[str, Any]) -> list[str]:
    """The paths of the layers that a user means.

    Args:
        chosen: Names, paths, layers, and patterns that are searched for in paths.
        layers: The model's layers by path.

    Returns:
        Paths in the order of the model.

    Raises:
        UnknownCheckpointNameError: One of them means no layer of the model.
        CheckpointError: One of them is nothing that could, or there are none.
    """
    found: set[str] = set()
    for entry in chosen:
        if isinstance(entry, str):
            hits = [p for p, layer in layers.items() if entry in (p, layer.name)]
            told = f"the layer {entry!r}"
        elif isinstance(entry, re.Pattern):
            hits = [path for path in layers if entry.search(path)]
            told = f"the pattern {entry.pattern!r}"
        elif hasattr(entry, "call") and hasattr(entry, "name"):
            hits = [path for path, layer in layers.items() if layer is entry]
            told = f"the layer {entry.name!r}"
        else:
            raise CheckpointError(
                f"{WHERE}: `checkpoints` may list layers, names of layers and patterns "
                f"(`re.compile`), but got {entry!r} of type {type(entry).__name__}."
            )
        if not hits:
            near = difflib.get_close_matches(told.split("'")[1], layers, 5, 0.4)
            raise UnknownCheckpointNameError(
                f"{WHERE}: {told} is none of the model's. "
                + (f"Did you mean {shortened(near)}? " if near else "")
                + f"It has: {shortened(layers, 10) or 'none yet; build it first'}."
            )
        found.update(hits)
    if not found:
        raise CheckpointError(f"{WHERE}: `checkpoints` lists no layers. Give some.")
    return [path for path in layers if path in found]


class Outputs:
    """The outputs of chosen layers, noted while a training step is traced."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self._layers = layers
        self._notes = threading.local()
        self._lock = threading.Lock()
        self._users = 0
        self._before: list[tuple[Any, Any]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which the layers' outputs are noted, in this thread."""
        outer = getattr(self._notes, "tensors", None)
        self._notes.tensors = []
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._override()
        try:
            yield
        finally:
            self._notes.tensors = outer
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._restore()

    def in_graph(self, graph: tf.Graph) -> Keep:
        """What has been noted and stands in `graph`.

        Raises:
            CheckpointError: There is nothing.
        """
        noted: Sequence[Any] = getattr(self._notes, "tensors", None) or ()
        here = tuple(t for t in noted if getattr(t, "graph", None) is graph)
        names = shortened(self._layers)
        if not here:
            raise CheckpointError(
                f"{WHERE}: of the layers given as `checkpoints` ({names}) none was "
                "called in the training step, or only inside a `tf.function` of its "
                'own. Give layers that the model calls, or pass "memory".'
            )
        return Keep(here, f"the outputs of the layers {names}")

    def _override(self) -> None:
        for layer in self._layers.values():
            # Not `setattr`: Keras would track what it is given.
            self._before.append((layer, vars(layer).get("call")))
            vars(layer)["call"] = self._noting(layer.call)

    def _restore(self) -> None:
        for layer, before in self._before:
            if before is None:
                vars(layer).pop("call", None)
            else:
                vars(layer)["call"] = before
        self._before.clear()

    def _noting(self, call: Any) -> Any:
        def noting_call(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            tensors = getattr(self._notes, "tensors", None)
            if tensors is not None:
                tensors.extend(
                    tensor
                    for tensor in tf.nest.flatten(result, expand_composites=True)
                    if tf.is_symbolic_tensor(tensor)
                )
            return result

        return noting_call
