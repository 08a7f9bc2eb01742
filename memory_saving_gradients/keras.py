"""`memory_saving(model)`: the setting of one Keras model.

Keras takes the gradients of `fit` and `train_on_batch` in `model.train_step`, on whose
outside the setting is opened, for the thread that traces it. Nothing of that is in the
model's class or configuration: what is saved loads without this library.
"""

from __future__ import annotations

import functools
import importlib
import logging
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
    UNKNOWN_DIM,
    Outcome,
    Setting,
    parse_setting,
)
from memory_saving_gradients.errors import MemorySavingGradientsError, shortened
from memory_saving_gradients.keras_layers import WHERE, Outputs, choose, layers_of_model
from memory_saving_gradients.measured import Measured
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.tf_internals import Funnel
from memory_saving_gradients.wording import sizes_like

__all__ = ["asked_for", "memory_saving", "plain_train_step"]

_log = logging.getLogger(__name__)


@dataclass
class _Wish:
    """What the user asked for, in terms that serve a clone of the model, too.

    Attributes:
        checkpoints: What `gradients` takes, if no layers were given.
        paths: The paths of the layers that were given.
        unknown_dim: What an unknown dimension is taken to be while planning.
        cost: Measured seconds of ops; None for those of the model.
        methods: The model's methods as they were, those set on the object alone.
    """

    checkpoints: Any
    paths: list[str]
    unknown_dim: int
    cost: Measured | None
    methods: dict[str, Any] = field(default_factory=dict)


_wishes: weakref.WeakKeyDictionary[Any, _Wish] = weakref.WeakKeyDictionary()
_cloning: dict[str, list[Funnel]] = {}


@tf.autograph.experimental.do_not_convert
def memory_saving(
    model: Any,
    checkpoints: Any = "memory",
    *,
    unknown_dim: int = UNKNOWN_DIM,
    cost: Any = None,
) -> Any:
    """Makes the training of one Keras model save memory.

    The model's `fit` and `train_on_batch` recompute most of what the backward pass
    reads from the forward pass instead of holding it. `evaluate`, `predict`, `export`
    and `save` are as before, and so are all other models. The setting outlives
    `compile` and `load_weights`; `keras.models.clone_model` hands it on. It is not
    saved: a model that is loaded, copied or unpickled is an ordinary one. After the
    first step one line is printed, or logged where a log of level INFO is on: what
    stock would need at the peak, what the plan needs, and what was measured.

    It counts more than `enable()` and less than an argument `checkpoints=` in a
    `train_step` of your own. A model inside another one trains with that one's setting.

    Args:
        model: A Keras 3 model (with the TensorFlow backend) or a `tf_keras` model.
        checkpoints: What to keep: whatever `gradients` takes but for tensors and their
            names; or layers, whose outputs are kept: a layer, the name or path of one
            ("encoder/dense"), a pattern (`re.compile`) that is searched for in paths,
            or a list of these. None puts everything back.
        unknown_dim: What a dimension that is not known statically is taken to be while
            planning, at least 1: in `fit` that is the size of a batch.
        cost: Measured seconds of ops, as in `gradients`.

    Returns:
        The very model.

    Raises:
        TypeError: `model` is no Keras model, or `unknown_dim` no int.
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
        wish = _wish(model, checkpoints, unknown_dim, cost, package)
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
    model: Any, checkpoints: Any, unknown_dim: int, where: str
) -> tuple[Setting, AbstractContextManager[Any]]:
    """What `checkpoints` means for a model, and where its step has to be traced."""
    package = _package(model)
    wish = _wish(model, checkpoints, unknown_dim, None, package, where)
    keep, outputs = _kept_by(model, wish, package)
    return Setting(keep, unknown_dim), outputs.noted() if outputs else nullcontext()


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
    unknown_dim: int,
    cost: Any,
    package: str,
    where: str = "memory_saving",
) -> _Wish:
    """Tells layers from everything else that `checkpoints` may be."""
    layers = _layers(model, package)
    chosen: list[Any] | None = None
    if isinstance(checkpoints, _layer_class(package) | re.Pattern):
        chosen = [checkpoints]
    elif isinstance(checkpoints, str):
        names = {name for path, layer in layers.items() for name in (path, layer.name)}
        if checkpoints in names:
            chosen = [checkpoints]
    elif isinstance(checkpoints, list | tuple | set | frozenset):
        chosen = list(checkpoints)
    if chosen is not None:
        checkpoints = "memory"  # checked with the rest, and not used
    setting = parse_setting(checkpoints, unknown_dim, cost, where=where)
    if chosen is not None:
        return _Wish(None, choose(chosen, layers), unknown_dim, setting.cost)
    return _Wish(setting.checkpoints, [], unknown_dim, setting.cost)


def _apply(model: Any, wish: _Wish, package: str) -> None:
    keep, outputs = _kept_by(model, wish, package)
    plans: list[Plan] = []
    setting = Setting(keep, wish.unknown_dim, cost=wish.cost, done=_note_plan(plans))
    for name in ("train_step", "make_train_function"):
        if name in vars(model):
            wish.methods[name] = vars(model)[name]
    train_step, make = model.train_step, model.make_train_function
    told: list[str] = []

    @functools.wraps(train_step)
    def saving_train_step(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and not told:
            told.append("eager")
            warnings.warn(
                f"{WHERE}: the model {model.name!r} trains eagerly, where there is no "
                "graph to rewrite: nothing is saved. Compile it with "
                "`run_eagerly=False`.",
                stacklevel=2,
            )
        with doors.use(setting), outputs.noted() if outputs else nullcontext():
            return train_step(*args, **kwargs)

    @functools.wraps(make)
    def measuring_make(*args: Any, **kwargs: Any) -> Any:
        before = model.train_function
        make(*args, **kwargs)
        made = model.train_function
        if made is not before:
            plans.clear()
            model.train_function = _measured_once(model, made, plans)
        return model.train_function

    # Not `setattr`: Keras would look for something to track.
    vars(model)["train_step"] = saving_train_step
    vars(model)["make_train_function"] = measuring_make
    _wishes[model] = wish
    keras_models.settings[model] = (
        f"layers {shortened(wish.paths)}"
        if wish.paths
        else selection.describe(wish.checkpoints)
    )


def _undo(model: Any) -> None:
    wish = _wishes.pop(model, None)
    keras_models.settings.pop(model, None)
    if wish is not None:
        for name in ("train_step", "make_train_function"):
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


# -- the line that the user sees -------------------------------------------------------


def _note_plan(plans: list[Plan]) -> Callable[[Outcome], None]:
    def note(outcome: Outcome) -> None:
        if outcome.plan is not None:
            plans.append(outcome.plan)

    return note


def _measured_once(model: Any, function: Any, plans: list[Plan]) -> Any:
    """The train function, which reports its first step and steps aside."""

    @functools.wraps(function)
    def first_step(*args: Any, **kwargs: Any) -> Any:
        # Only if it is still in its place: `enable()` may have made another.
        if model.train_function is first_step:
            model.train_function = function
        from mem_util.allocator import read_counters, wait_for_devices

        before = read_counters()
        result = function(*args, **kwargs)
        wait_for_devices()
        _report(str(model.name), plans, before.devices, read_counters().devices)
        return result

    return first_step


def _report(name: str, plans: list[Plan], before: Any, after: Any) -> None:
    if not plans:
        return
    plan = max(plans, key=lambda plan: plan.stock_peak_bytes)
    size = sizes_like(plan.stock_peak_bytes)
    # The counters are left as they are, lest somebody else measures: a step that stays
    # under an earlier peak cannot be seen.
    measured = [
        f"{size(now.peak_bytes - before[device].current_bytes)} on {device}"
        for device, now in after.items()
        if now.peak_bytes > before[device].peak_bytes
    ]
    assumed = plan.reading.graph.assumed
    _tell(
        f"{name}: predicted peak {size(plan.predicted_peak_bytes)} instead of stock's "
        f"{size(plan.stock_peak_bytes)}"
        + (f" (for batches of {plan.reading.unknown_dim})" if assumed else "")
        + ", measured "
        + (", ".join(measured) or "no peak above that of an earlier run")
        + (f"; left as it was: {plan.reason}" if plan.reason else "")
    )


def _tell(line: str) -> None:
    """Logs a line; where nobody asked for a log, prints it as `fit` prints its own."""
    import keras

    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", line)
    elif keras.config.is_interactive_logging_enabled():
        print(line)
