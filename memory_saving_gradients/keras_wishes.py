"""What somebody asks for one Keras model, turned into what the engine understands.

The engine knows tensors of a graph, which a model has not until it trains. So a wish is
held in terms that every graph of the model understands, and those of a clone.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memory_saving_gradients import checkpoints as kinds
from memory_saving_gradients import keras_models
from memory_saving_gradients.autodiff import Setting, parse_setting
from memory_saving_gradients.errors import MemorySavingGradientsError
from memory_saving_gradients.keras_layers import (
    WHERE,
    Outputs,
    choose,
    is_layer,
    layers_of_model,
    not_a_kind,
    unknown_word,
)
from memory_saving_gradients.measured import Measured
from memory_saving_gradients.planners import PLANNERS

__all__ = ["Wish", "asked_for", "kept_by", "layers_of", "package_of", "wish_for"]


@dataclass
class Wish:
    """What the user asked for, in terms that serve a clone of the model, too.

    Attributes:
        checkpoints: What `gradients` takes, if no layers were given; None with no
            `paths` is stock.
        paths: The paths of the layers that were given.
        unknown_dim: What an unknown dimension is taken to be while planning.
        cost: Measured seconds of ops; None for those of the model.
        every: After how many steps recurrent layers hold their state.
        methods: The model's methods as they were, those set on the object alone.
    """

    checkpoints: Any
    paths: list[str]
    unknown_dim: int | None
    cost: Measured | None
    every: int | str | None = None
    methods: dict[str, Any] = field(default_factory=dict)

    @property
    def is_stock(self) -> bool:
        """Whether nothing shall be saved."""
        return self.checkpoints is None and not self.paths


def package_of(model: Any) -> str:
    """The Keras that a model is of.

    Raises:
        TypeError: It is no Keras model.
        MemorySavingGradientsError: That Keras does not compute with TensorFlow.
    """
    for package in keras_models.PACKAGES:
        computes_with = keras_models.backend(package)
        if computes_with and isinstance(model, importlib.import_module(package).Model):
            if computes_with != "tensorflow":
                raise MemorySavingGradientsError(
                    f"{WHERE}: {package} computes with {computes_with}, not with "
                    "TensorFlow. Set the environment variable KERAS_BACKEND to "
                    '"tensorflow" before Keras is imported.'
                )
            return package
    raise TypeError(
        f"{WHERE}: expected a Keras model, but got {model!r} of type "
        f"{type(model).__name__}."
    )


def layers_of(model: Any, package: str) -> dict[str, Any]:
    """The layers of a model of some Keras by path."""
    return layers_of_model(model, _layer_class(package))


def _layer_class(package: str) -> Any:
    return importlib.import_module(package).layers.Layer


def asked_for(
    model: Any, checkpoints: Any, unknown_dim: int | None, cost: Any, where: str
) -> tuple[Setting, AbstractContextManager[Any]]:
    """What `checkpoints` means for a model, and where its step has to be traced."""
    package = package_of(model)
    if checkpoints is None:
        raise not_a_kind(checkpoints, model, _layer_class(package), where)
    wish = wish_for(model, checkpoints, unknown_dim, cost, package, where)
    keep, outputs = kept_by(model, wish, package)
    setting = Setting(keep, unknown_dim, cost=wish.cost)
    return setting, outputs.noted() if outputs else nullcontext()


def kept_by(model: Any, wish: Wish, package: str) -> tuple[Any, Outputs | None]:
    """What to keep; if it is layers' outputs, who notes them, too."""
    if not wish.paths:
        return wish.checkpoints, None
    layers = layers_of(model, package)
    outputs = Outputs({path: layers[path] for path in wish.paths})
    return outputs.in_graph, outputs


def wish_for(
    model: Any,
    checkpoints: Any,
    unknown_dim: int | None,
    cost: Any,
    package: str,
    where: str = "memory_saving",
    every: Any = None,
) -> Wish:
    """Tells layers from everything else that `checkpoints` may be.

    Args:
        model: The model.
        checkpoints: What the user gave; None is stock.
        unknown_dim: As in `memory_saving`.
        cost: As in `memory_saving`.
        package: The Keras that the model is of.
        where: The public function that got it, for messages.
        every: As in `memory_saving`.

    Raises:
        CheckpointError: `checkpoints` is nothing that it may be.
    """
    layer_class = _layer_class(package)
    chosen: list[Any] | None = None
    if isinstance(checkpoints, layer_class | re.Pattern):
        chosen = [checkpoints]
    elif isinstance(checkpoints, str):
        if is_layer(checkpoints, model, layer_class):
            chosen = [checkpoints]
        elif not kinds.is_setting(checkpoints, PLANNERS):
            known = kinds.modes_of(PLANNERS)
            raise unknown_word(checkpoints, model, layer_class, known, where)
    elif checkpoints is not None and not _is_for_the_engine(checkpoints):
        try:
            chosen = list(checkpoints)
        except Exception:  # tensors say in ways of their own that they are no lists
            raise not_a_kind(checkpoints, model, layer_class, where) from None
    nothing = checkpoints is None
    if nothing or chosen is not None:
        checkpoints = "memory"  # checked with the rest, and not used
    setting = parse_setting(checkpoints, unknown_dim, cost, every=every, where=where)
    if chosen is not None:
        checkpoints, paths = None, choose(chosen, model, layer_class)
    else:
        checkpoints, paths = None if nothing else setting.checkpoints, []
    return Wish(checkpoints, paths, unknown_dim, setting.cost, setting.every)


def _is_for_the_engine(checkpoints: Any) -> bool:
    """Whether what is neither a layer nor a string is for the engine to judge.

    All else is taken to be a number of layers: whatever can be gone through.
    """
    if hasattr(checkpoints, "to_json"):
        return True  # a plan, of which the engine says how it is given
    if hasattr(checkpoints, "dtype") and not isinstance(checkpoints, np.ndarray):
        return False
    parsed = isinstance(checkpoints, kinds.Checkpoints)
    return parsed or (callable(checkpoints) and not isinstance(checkpoints, Iterable))
