"""`memory_saving(model)`: the setting of one Keras model.

Keras takes the gradients of `fit` and `train_on_batch` in `model.train_step`, on whose
outside the setting is opened, for the thread that traces it. Nothing of that is in the
model's class or configuration: what is saved loads without this library.
"""

from __future__ import annotations

import functools
import importlib
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import doors, keras_models, selection
from memory_saving_gradients.autodiff import Setting
from memory_saving_gradients.errors import shortened
from memory_saving_gradients.keras_layers import WHERE
from memory_saving_gradients.keras_line import Line
from memory_saving_gradients.keras_wishes import (
    Wish,
    kept_by,
    layers_of,
    package_of,
    wish_for,
)
from memory_saving_gradients.tf_internals import Funnel

__all__ = ["memory_saving", "plain_train_step"]

_METHODS = ("train_step", "make_train_function", "fit")
"""What is replaced on the object."""


_wishes: weakref.WeakKeyDictionary[Any, Wish] = weakref.WeakKeyDictionary()
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
    `compile` and `load_weights`; `keras.models.clone_model` hands it on, but not for
    classes whose `get_config` is their own: these it makes from that alone. It is not
    saved: a model that is loaded, copied or unpickled is an ordinary one.

    After the second step one line is printed, or logged where a log of level INFO is on
    or with `fit(verbose=0)`: what stock would need at the peak, what the plan needs
    (both in one replica, if there are several), and what that step took above what was
    held before it. For this the peaks of TensorFlow's allocators are reset once;
    `mem_util` goes on to know the earlier ones. A step that took more than its budget,
    by a tenth or more, is warned of.

    It counts more than `enable()` and less than an argument `checkpoints=` in a
    `train_step` of your own. A model inside another one trains with that one's setting.

    Args:
        model: A Keras 3 model (with the TensorFlow backend) or a `tf_keras` model.
        checkpoints: What to keep: whatever `gradients` takes but for tensors and their
            names; or layers, whose outputs are kept: a layer, the name or path of one
            ("encoder/dense"), a pattern (`re.compile`) that is searched for in paths,
            or several of these (any iterable). None is stock, under `enable()`, too.
        unknown_dim: What a dimension that is not known statically is taken to be while
            planning, at least 1: in `fit` that is the size of a batch, or of what one
            replica gets of it. None means what `fit` is told, be it by `batch_size` or
            by the `batch` of a `tf.data` pipeline, and where that is not known what
            `gradients` does.
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
    package = package_of(model)
    wish = wish_for(model, checkpoints, unknown_dim, cost, package, every=every)
    _undo(model)
    _apply(model, wish, package)
    _hand_on_to_clones(package)
    keras_models.retrace([model])
    return model


def plain_train_step(model: Any) -> Callable[..., Any]:
    """The model's training step without the setting that the model may have."""
    wish = _wishes.get(model)
    if wish is None:
        return model.train_step
    own = wish.methods.get("train_step")
    return own or functools.partial(type(model).train_step, model)


def _apply(model: Any, wish: Wish, package: str) -> None:
    for name in _METHODS:
        if name in vars(model):
            wish.methods[name] = vars(model)[name]
    if wish.is_stock:
        _exempt(model)
    else:
        _save(model, wish, package)
    _wishes[model] = wish


def _exempt(model: Any) -> None:
    """Has a model train as stock, whatever the process does."""
    train_step = model.train_step

    @functools.wraps(train_step)
    def stock_train_step(*args: Any, **kwargs: Any) -> Any:
        with doors.use(None):
            return train_step(*args, **kwargs)

    vars(model)["train_step"] = stock_train_step
    keras_models.exempt.add(model)


def _save(model: Any, wish: Wish, package: str) -> None:
    keep, outputs = kept_by(model, wish, package)
    line = Line(model)
    setting = Setting(
        keep,
        wish.unknown_dim,
        cost=wish.cost,
        every=wish.every,
        done=line.note,
        where="memory_saving",
    )
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
        known = wish.unknown_dim or line.batch_size()
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
    keras_models.exempt.discard(model)
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
        package = package_of(clone)
        present = layers_of(clone, package)
        if all(path in present for path in wish.paths):
            _apply(clone, replace(wish, methods={}), package)
    return clone
