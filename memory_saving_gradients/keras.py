"""`memory_saving(model)`: the setting of one Keras model.

Keras takes the gradients of `fit` and `train_on_batch` in `model.train_step`, on whose
outside the setting is opened, for the thread that traces it. Nothing of that is in the
model's class or configuration: what is saved loads without this library.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import doors, keras_models, selection
from memory_saving_gradients.autodiff import (
    Setting,
    parse_setting,
)
from memory_saving_gradients.checkpoints import is_setting, modes_of
from memory_saving_gradients.errors import MemorySavingGradientsError, shortened
from memory_saving_gradients.keras_layers import (
    WHERE,
    Outputs,
    choose,
    is_layer,
    layers_of_model,
    unknown_word,
)
from memory_saving_gradients.keras_line import Line
from memory_saving_gradients.measured import Measured
from memory_saving_gradients.planners import PLANNERS
from memory_saving_gradients.tf_internals import Funnel

__all__ = ["asked_for", "memory_saving", "plain_train_step"]

_METHODS = ("train_step", "make_train_function", "fit")
"""What is replaced on the object."""


@dataclass
class _Wish:
    """What the user asked for, in terms that serve a clone of the model, too.

    Attributes:
        checkpoints: What `gradients` takes, if no layers were given.
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


_wishes: weakref.WeakKeyDictionary[Any, _Wish] = weakref.WeakKeyDictionary()
_cloning: dict[str, list[Funnel]] = {}


@tf.autograph.experimental.do_not_convert
def memory_saving(
    model: Any,
    checkpoints: Any = "memory",
    *,
    unknown_dim: int | None = None,
    cost: Any = None,
    every: int | str | None = None,
) -> Any:
    """Makes the training of one Keras model save memory.

    The model's `fit` and `train_on_batch` recompute most of what the backward pass
    reads from the forward pass instead of holding it. `evaluate`, `predict`, `export`
    and `save` are as before, and so are all other models. The setting outlives
    `compile` and `load_weights`; `keras.models.clone_model` hands it on. It is not
    saved: a model that is loaded, copied or unpickled is an ordinary one. After the
    second step one line is printed, or logged where a log of level INFO is on or with
    `fit(verbose=0)`: what stock would need at the peak, what the plan needs, and what
    that step took above what was held before it. For this the peaks of TensorFlow's
    allocators are reset once; `mem_util` goes on to know the earlier ones.

    It counts more than `enable()` and less than an argument `checkpoints=` in a
    `train_step` of your own. A model inside another one trains with that one's setting.

    Args:
        model: A Keras 3 model (with the TensorFlow backend) or a `tf_keras` model.
        checkpoints: What to keep: whatever `gradients` takes but for tensors and their
            names; or layers, whose outputs are kept: a layer, the name or path of one
            ("encoder/dense"), a pattern (`re.compile`) that is searched for in paths,
            or a list of these. None puts everything back.
        unknown_dim: What a dimension that is not known statically is taken to be while
            planning, at least 1: in `fit` that is the size of a batch. None means what
            `fit` is told, and where it is not told what `gradients` does.
        cost: Measured seconds of ops, as in `gradients`.
        every: After how many steps recurrent layers hold their state, as in
            `gradients`.

    Returns:
        The very model.

    Raises:
        TypeError: `model` is no Keras model, or `unknown_dim` or `every` no int.
        UnknownCheckpointNameError: The model has no such layer.
        CheckpointError: `checkpoints` is nothing that it may be. In `fit`: from
            `checkpoints` no plan can be made.
        CostError: `cost` holds no measured times.
        MemorySavingGradientsError: Keras does not compute with TensorFlow.

    Example:
        >>> import keras
        >>> import memory_saving_gradients as msg
        >>> model = keras.Sequential([keras.layers.Dense(8, "gelu") for _ in range(9)])
        >>> model = msg.memory_saving(model)
        >>> model.compile("adam", "mse")
    """
    package = _package(model)
    wish = None
    if checkpoints is not None:
        wish = _wish(model, checkpoints, unknown_dim, cost, package, every=every)
    _undo(model)
    if wish is not None:
        _apply(model, wish, package)
        _hand_on_to_clones(package)
    elif not _wishes:
        for funnels in _cloning.values():
            for funnel in funnels:
                funnel.unwrap()
    keras_models.retrace([model])
    return model


def _package(model: Any) -> str:
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


def _layers(model: Any, package: str) -> dict[str, Any]:
    return layers_of_model(model, _layer_class(package))


def _layer_class(package: str) -> Any:
    return importlib.import_module(package).layers.Layer


def asked_for(
    model: Any, checkpoints: Any, unknown_dim: int | None, cost: Any, where: str
) -> tuple[Setting, AbstractContextManager[Any]]:
    """What `checkpoints` means for a model, and where its step has to be traced."""
    package = _package(model)
    wish = _wish(model, checkpoints, unknown_dim, cost, package, where)
    keep, outputs = _kept_by(model, wish, package)
    setting = Setting(keep, unknown_dim, cost=wish.cost)
    return setting, outputs.noted() if outputs else nullcontext()


def plain_train_step(model: Any) -> Callable[..., Any]:
    """The model's training step without the setting that the model may have."""
    wish = _wishes.get(model)
    if wish is None:
        return model.train_step
    own = wish.methods.get("train_step")
    return own or functools.partial(type(model).train_step, model)


def _kept_by(model: Any, wish: _Wish, package: str) -> tuple[Any, Outputs | None]:
    """What to keep; if it is layers' outputs, who notes them, too."""
    if not wish.paths:
        return wish.checkpoints, None
    layers = _layers(model, package)
    outputs = Outputs({path: layers[path] for path in wish.paths})
    return outputs.in_graph, outputs


def _wish(
    model: Any,
    checkpoints: Any,
    unknown_dim: int | None,
    cost: Any,
    package: str,
    where: str = "memory_saving",
    every: Any = None,
) -> _Wish:
    """Tells layers from everything else that `checkpoints` may be."""
    layer_class = _layer_class(package)
    chosen: list[Any] | None = None
    if isinstance(checkpoints, layer_class | re.Pattern):
        chosen = [checkpoints]
    elif isinstance(checkpoints, str):
        if is_layer(checkpoints, model, layer_class):
            chosen = [checkpoints]
        elif not is_setting(checkpoints, PLANNERS):
            known = modes_of(PLANNERS)
            raise unknown_word(checkpoints, model, layer_class, known, where)
    elif isinstance(checkpoints, list | tuple | set | frozenset):
        chosen = list(checkpoints)
    if chosen is not None:
        checkpoints = "memory"  # checked with the rest, and not used
    setting = parse_setting(checkpoints, unknown_dim, cost, every=every, where=where)
    if chosen is not None:
        checkpoints, paths = None, choose(chosen, model, layer_class)
    else:
        checkpoints, paths = setting.checkpoints, []
    return _Wish(checkpoints, paths, unknown_dim, setting.cost, setting.every)


def _apply(model: Any, wish: _Wish, package: str) -> None:
    keep, outputs = _kept_by(model, wish, package)
    line = Line(model)
    setting = Setting(
        keep,
        wish.unknown_dim,
        cost=wish.cost,
        every=wish.every,
        done=line.note,
        where="memory_saving",
    )
    for name in _METHODS:
        if name in vars(model):
            wish.methods[name] = vars(model)[name]
    train_step, make = model.train_step, model.make_train_function
    told: set[str] = set()

    @functools.wraps(train_step)
    def saving_train_step(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            advice = _way_out_of_eager(model)
            if advice not in told:
                told.add(advice)
                warnings.warn(
                    f"{WHERE}: the model {model.name!r} trains eagerly, where there is "
                    f"no graph to rewrite: nothing is saved. {advice}",
                    stacklevel=2,
                )
        known = wish.unknown_dim or line.batch_size
        holding = replace(setting, unknown_dim=known)
        with doors.use(holding), outputs.noted() if outputs else nullcontext():
            return train_step(*args, **kwargs)

    @functools.wraps(make)
    def watching_make(*args: Any, **kwargs: Any) -> Any:
        before = model.train_function
        make(*args, **kwargs)
        if model.train_function is not before:
            line.watch()
        return model.train_function

    # Not `setattr`: Keras would look for something to track.
    vars(model)["train_step"] = saving_train_step
    vars(model)["make_train_function"] = watching_make
    vars(model)["fit"] = line.around_fit(model.fit)
    _wishes[model] = wish
    keras_models.settings[model] = (
        f"layers {shortened(wish.paths)}"
        if wish.paths
        else selection.describe(wish.checkpoints)
    )


def _way_out_of_eager(model: Any) -> str:
    """What to do to have a model train in a graph."""
    ways = []
    if tf.config.functions_run_eagerly():
        ways.append(
            "All functions do, as `tf.config.run_functions_eagerly(True)` was called: "
            "call it with False."
        )
    if getattr(model, "run_eagerly", False) is True or not ways:
        ways.append("Compile it with `run_eagerly=False`.")
    return " ".join(ways)


def _undo(model: Any) -> None:
    wish = _wishes.pop(model, None)
    keras_models.settings.pop(model, None)
    if wish is not None:
        for name in _METHODS:
            vars(model).pop(name, None)
        vars(model).update(wish.methods)


def _hand_on_to_clones(package: str) -> None:
    """`clone_model` builds a new model; these two of its parts know both."""
    module = f"{package}.src.models.cloning"
    if package not in _cloning:
        _cloning[package] = []
        for name in ("_clone_functional_model", "_clone_sequential_model"):
            try:
                stock = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue  # This Keras clones otherwise; a clone is then as any model.
            _cloning[package].append(Funnel(module, name, stock))
    for funnel in _cloning[package]:
        funnel.wrap(_clone)


def _clone(before: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    clone = before(model, *args, **kwargs)
    wish = _wishes.get(model)
    if wish is not None and _wishes.get(clone) is None:
        package = _package(clone)
        present = _layers(clone, package)
        if all(path in present for path in wish.paths):
            _apply(clone, replace(wish, methods={}), package)
    return clone
