"""From layers of a Keras model to the tensors that are kept.

A model has no tensors until a training step is traced, and other ones at each trace. So
layers are remembered by path, and while a step is traced their outputs are noted: for
as long their `call` is overridden on the object, to note what this thread gets.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from memory_saving_gradients.checkpoints import Keep, hint_of_number
from memory_saving_gradients.errors import (
    CheckpointError,
    UnknownCheckpointNameError,
    shortened,
)
from memory_saving_gradients.user_code import level_of_caller

__all__ = [
    "WHERE",
    "Outputs",
    "choose",
    "is_layer",
    "layers_of_model",
    "not_a_kind",
    "unknown_word",
]

_NEAR = 3
"""At most so many names are suggested for one that is misspelt."""

WHERE = "`memory_saving_gradients.memory_saving`"
"""The public function that messages speak for."""


def layers_of_model(model: Any, layer_class: type[Any]) -> dict[str, Any]:
    """All layers inside a model by path: names from the outside in, joined by "/".

    Input layers are left out: nothing is computed in them.

    Args:
        model: A Keras model.
        layer_class: What a layer is an instance of.
    """
    found = _all_inside(model, layer_class)
    return {path: layer for path, layer in found.items() if not _is_input(layer)}


def _all_inside(model: Any, layer_class: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen = {id(model)}
    pending = [("", model)]
    while pending:
        prefix, outer = pending.pop(0)
        for layer in _direct(outer, layer_class):
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            path = f"{prefix}{layer.name}"
            # Two may have one name; an input layer must not hide the other.
            if path not in found or not _is_input(layer):
                found[path] = layer
            pending.append((f"{path}/", layer))
    return found


def _is_input(layer: Any) -> bool:
    return type(layer).__name__ == "InputLayer"


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


def choose(chosen: Iterable[Any], model: Any, layer_class: type[Any]) -> list[str]:
    """The paths of the layers that a user means.

    Args:
        chosen: Names, paths, layers, and patterns that are searched for in paths.
        model: The model that they are layers of.
        layer_class: What a layer is an instance of.

    Returns:
        Paths in the order of the model.

    Raises:
        UnknownCheckpointNameError: One of them means no layer of the model.
        CheckpointError: One of them is nothing that could, or none can serve.
    """
    found: set[str] = set()
    everything = _all_inside(model, layer_class)
    layers = layers_of_model(model, layer_class)
    for entry in chosen:
        hits = _meant(entry, everything)
        if not hits:
            raise UnknownCheckpointNameError(_unknown(entry, model, layers))
        found.update(hits)
    if not found:
        raise CheckpointError(
            f"{WHERE}: `checkpoints` lists no layers. Give some. {_listed(layers)}"
        )
    inputs = [path for path in everything if path in found and path not in layers]
    if len(inputs) == len(found):
        raise CheckpointError(
            f"{WHERE}: `checkpoints` has input layers only ({shortened(inputs)}). "
            "Inputs are held anyway: give layers that compute something. "
            f"{_listed(layers)}"
        )
    if inputs:
        warnings.warn(
            f"{WHERE}: input layers cannot serve as checkpoints, as inputs are held "
            f"anyway; ignored: {shortened(inputs)}.",
            stacklevel=level_of_caller(),
        )
    return [path for path in layers if path in found]


def is_layer(word: str, model: Any, layer_class: type[Any]) -> bool:
    """Whether a string is the name or the path of a layer, inputs included.

    Args:
        word: The string.
        model: The model that the layer is in.
        layer_class: What a layer is an instance of.
    """
    return bool(_meant(word, _all_inside(model, layer_class)))


def _meant(entry: Any, layers: dict[str, Any]) -> list[str]:
    """The paths of the layers that one entry means."""
    if isinstance(entry, str):
        return [path for path, layer in layers.items() if entry in (path, layer.name)]
    if isinstance(entry, re.Pattern):
        return [path for path in layers if entry.search(path)]
    if hasattr(entry, "call") and hasattr(entry, "name"):
        return [path for path, layer in layers.items() if layer is entry]
    raise CheckpointError(
        f"{WHERE}: `checkpoints` may list layers, names of layers and patterns "
        f"(`re.compile`), but got {entry!r} of type {type(entry).__name__}. "
        f"{_listed(layers)}"
    )


def _unknown(entry: Any, model: Any, layers: dict[str, Any]) -> str:
    """What to say of an entry that means no layer of the model."""
    if isinstance(entry, str):
        return (
            f"{WHERE}: {entry!r} is the name of no layer of the model."
            f"{_meant_perhaps(entry, layers)} {_listed(layers)}"
        )
    if isinstance(entry, re.Pattern):
        return (
            f"{WHERE}: the pattern {entry.pattern!r} matches none of the model's "
            f"layers.{_meant_perhaps(entry.pattern, layers)} {_listed(layers)}"
        )
    if entry is model:
        return (
            f"{WHERE}: {entry.name!r} is the model itself and none of its layers. "
            f"{_listed(layers)}"
        )
    alike = _meant(entry.name, layers)
    hint = (
        f" The model has another layer of that name; if you mean it, give {alike[0]!r}."
        if alike
        else ""
    )
    return (
        f"{WHERE}: the layer {entry.name!r} that was given is none of the model's: it "
        f"belongs to another model, or to none.{hint} {_listed(layers)}"
    )


def not_a_kind(
    value: Any, model: Any, layer_class: type[Any], where: str = "memory_saving"
) -> CheckpointError:
    """The error for what is nothing that `checkpoints` may be for a model.

    Args:
        value: What was given.
        model: The model.
        layer_class: What a layer is an instance of.
        where: The public function that got it.
    """
    return CheckpointError(
        f"`memory_saving_gradients.{where}`: `checkpoints` must be layers (a layer, "
        "the name or path of one, a pattern, `re.compile`, that is searched for in "
        'paths, or several of these), "memory", "speed", "collection", a budget such '
        'as "4GiB" or "40%", a function of a `tf.Tensor` that returns a bool, or a '
        f"saved plan (`Plan.from_json(text)`), but got {value!r} of type "
        f"{type(value).__name__}.{hint_of_number(value)} "
        f"{_listed(layers_of_model(model, layer_class))}"
    )


def unknown_word(
    word: str,
    model: Any,
    layer_class: type[Any],
    modes: Iterable[str],
    where: str = "memory_saving",
) -> UnknownCheckpointNameError:
    """The error for a string that is neither a mode nor a budget nor a layer's name.

    Args:
        word: The string.
        model: The model that has no such layer.
        layer_class: What a layer is an instance of.
        modes: What strings there are beside names of layers and budgets.
        where: The public function that got it.
    """
    layers = layers_of_model(model, layer_class)
    modes = list(modes)
    quoted = ", ".join(f'"{mode}"' for mode in modes)
    return UnknownCheckpointNameError(
        f"`memory_saving_gradients.{where}`: `checkpoints` is {word!r}, which is "
        f"neither the name or path of a layer of the model nor one of {quoted} nor a "
        'budget such as "4GiB" or "40%".'
        f"{_meant_perhaps(word, layers, modes)} {_listed(layers)}"
    )


def _meant_perhaps(word: str, layers: dict[str, Any], modes: Sequence[str] = ()) -> str:
    """A sentence with what a word may have been meant as, or ""."""
    with contextlib.suppress(re.error):
        if word and any(re.search(word, path) for path in layers):
            return f" For all layers that it matches give `re.compile({word!r})`."
    known = {name.lower(): name for name in reversed([*modes, *layers])}
    known |= {layer.name.lower(): path for path, layer in reversed(layers.items())}
    near = difflib.get_close_matches(word.lower(), known, _NEAR, 0.6)
    meant = dict.fromkeys(known[key] for key in near)
    return f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def _listed(layers: dict[str, Any]) -> str:
    if not layers:
        return "The model has no layers yet: build it first."
    return f"It has: {shortened(layers, 10)}."


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
        return Keep(here, f"the outputs of the layers {names}", of_layers=True)

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
