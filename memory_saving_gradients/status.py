"""`status()`: which routes save memory now, and why something has no effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    counting,
    doors,
    keras_models,
    patching,
    selection,
    tf_internals,
)
from memory_saving_gradients.autodiff import Setting
from memory_saving_gradients.errors import shortened
from memory_saving_gradients.wording import counted

__all__ = ["Status", "status"]


@dataclass(frozen=True)
class Status:
    """What `enable()` does at this moment. Print it.

    Attributes:
        enabled: The setting of the process in words, "" if there is none.
        routes: What passes the library now.
        models: Keras models with a setting of their own, each with the setting.
        rewired: Gradients rewired since `enable()`, by route, explicit calls included.
        stock: Gradients left as they were since then, by reason.
        notes: Why something has no effect, and what to do.
    """

    enabled: str
    routes: tuple[str, ...]
    models: tuple[str, ...]
    rewired: Mapping[str, int]
    stock: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def active(self) -> bool:
        """Whether a setting of the process is in force."""
        return bool(self.enabled)

    def __str__(self) -> str:
        """The status as text."""
        lines = [f"Enabled: {self.enabled}" if self.enabled else "Not enabled."]
        parts: list[tuple[str, list[str]]] = [
            ("Routes that save memory", list(self.routes)),
            ("Models with a setting of their own", list(self.models)),
            ("Gradients rewired", [f"{n} by {r}" for r, n in self.rewired.items()]),
            ("Gradients left stock", [f"{n}: {r}" for r, n in self.stock.items()]),
            ("Without effect", list(self.notes)),
        ]
        for title, entries in parts:
            if entries:
                lines += [f"{title}:", *(f"  {entry}" for entry in entries)]
        return "\n".join(lines)


@tf.autograph.experimental.do_not_convert
def status() -> Status:
    """Says which routes save memory now, and why something has no effect.

    Returns:
        A record that prints well.

    Example:
        >>> import memory_saving_gradients as msg
        >>> print(msg.status())
        Not enabled.
    """
    with patching.changing_lock:
        setting = patching.in_force()
        counts = counting.counts()
        models = tuple(_models(setting is not None))
        return Status(
            enabled="" if setting is None else _described(setting),
            routes=() if setting is None else tuple(_routes()),
            models=models,
            rewired=dict(counts.rewired),
            stock=dict(counts.stock),
            notes=tuple(_notes(setting, counts, bool(models))),
        )


def _models(enabled: bool) -> Iterator[str]:
    """The models with a setting of their own; those that are alike are counted.

    That some are exempted says something only where the process has a setting.
    """
    told = Counter(f"{m.name}: {text}" for m, text in keras_models.settings.items())
    if enabled:
        told.update(f"{model.name}: stock" for model in keras_models.exempt)
    for line, count in sorted(told.items()):
        yield line if count == 1 else f"{line} ({count} models)"


def _described(setting: Setting) -> str:
    if callable(setting.checkpoints):
        return "found out for each graph"
    return selection.describe(setting.checkpoints)


def _routes() -> Iterator[str]:
    if tf_internals.TAPES.is_open:
        yield "tf.GradientTape in a tf.function or a graph of TensorFlow 1"
    if tf_internals.GRAPHS.is_open:
        yield "tf.gradients and the optimizers of TensorFlow 1"
    for package in keras_models.PACKAGES:
        if keras_models.backend(package) == "tensorflow":
            yield f"{package}: fit, train_on_batch, custom train_step"


def _notes(
    setting: Setting | None, counts: counting.Counts, models: bool
) -> Iterator[str]:
    if setting is None and not models:
        return
    for package in keras_models.PACKAGES:
        computes_with = keras_models.backend(package)
        if computes_with not in ("", "tensorflow"):
            yield (
                f"{package} computes with {computes_with}: set the environment "
                'variable KERAS_BACKEND to "tensorflow" before Keras is imported'
            )
    if tf.config.functions_run_eagerly():
        yield "tf.functions run eagerly: call tf.config.run_functions_eagerly(False)"
    asked = keras_models.settings if setting is None else keras_models.live_models()
    eager = keras_models.names(
        m for m in list(asked) if m not in keras_models.exempt and _eager(m)
    )
    if eager:
        yield (
            "models compiled with run_eagerly=True have no graph to rewrite: "
            f"{shortened(eager)}"
        )
    if taken := counts.stock[doors.EAGER]:
        yield (
            f"{counted(taken, 'gradient')} {'was' if taken == 1 else 'were'} taken "
            "eagerly: put the forward pass and the gradient into a tf.function"
        )
    if setting is None:
        return
    if not (tf_internals.TAPES.is_open and tf_internals.GRAPHS.is_open):
        yield (
            "another library has replaced TensorFlow's autodiff functions: call "
            "enable() after importing it"
        )
    if waiting := keras_models.waiting():
        yield (
            "models that had been traced before, traced again at their next step: "
            f"{shortened(keras_models.names(waiting))}"
        )
    if not counts.rewired:
        yield (
            "no gradient has been rewired yet; a tf.function that was traced before "
            "enable() stays as it is: make it anew"
        )


def _eager(model: Any) -> bool:
    # Before `compile` the attribute may be missing, or a property that fails.
    try:
        return bool(model.run_eagerly)
    except Exception:
        return False
