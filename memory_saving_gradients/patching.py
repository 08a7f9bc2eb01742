"""`enable()`, `disable()`, `enabled()`: a setting for the whole process.

From then on every gradient that is taken while a graph is built saves memory, whatever
takes it and whenever it was imported: see `doors`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    counting,
    doors,
    keras_models,
    selection,
    tf_internals,
)
from memory_saving_gradients.autodiff import Setting, parse_setting
from memory_saving_gradients.checkpoints import Auto, Budget, Keep, SavedPlan
from memory_saving_gradients.errors import CheckpointError, shortened
from memory_saving_gradients.wording import counted

__all__ = ["Status", "disable", "enable", "enabled", "status"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Entry:
    """What one call asked for; None is stock."""

    setting: Setting | None


_lock = threading.RLock()
_entries: list[_Entry] = []
_permanent: list[_Entry] = []  # the one of `enable` or `disable`, if there is one
_door = doors.Door()


@tf.autograph.experimental.do_not_convert
def enable(
    checkpoints: Any = "memory",
    *,
    unknown_dim: int | None = None,
    cost: Any = None,
    every: int | str | None = None,
) -> None:
    """Makes every gradient of the process save memory, until `disable()`.

    This reaches `tf.GradientTape` in a `tf.function`, `tf.gradients`, the optimizers of
    TensorFlow 1, `fit`, `train_on_batch` and custom `train_step`s of Keras 3 and
    `tf_keras`, also where the names were imported before. Of several settings an
    argument `checkpoints=` counts first, then `memory_saving(model)`, then this one.

    Keras models that were traced before are traced again at their next training step. A
    `tf.function` of your own that was traced before stays as it is: make it anew. What
    is traced while this is on stays so after `disable()`, but for Keras models.

    Eagerly nothing changes; `status()` says where that happened.

    Args:
        checkpoints: What to keep, as in `gradients`. Where a graph has none of it (an
            empty collection, a name that it has not), its gradients stay stock, and a
            warning says so once: libraries take gradients that you do not see.
        unknown_dim: What a dimension that is not known statically (a batch size) is
            taken to be while planning, as in `gradients`.
        cost: Measured seconds of ops, as in `gradients`.
        every: After how many iterations loops hold their state, as in `gradients`.

    Raises:
        CheckpointError: `checkpoints` is nothing that it may be.
        CostError: `cost` holds no measured times.
        TypeError, ValueError: `unknown_dim` or `every` is no positive int.

    Example:
        >>> import memory_saving_gradients as msg
        >>> msg.enable()
        >>> # model.fit(...)
        >>> print(msg.status())  # doctest: +SKIP
    """
    _set_permanent(_parsed("enable", checkpoints, unknown_dim, cost, every))


@tf.autograph.experimental.do_not_convert
def disable() -> None:
    """Ends what `enable()` began; TensorFlow's own functions are back in their place.

    Inside `with enabled():` the rest of the block is stock.
    """
    _set_permanent(None)


@tf.autograph.experimental.do_not_convert
@contextmanager
def enabled(
    checkpoints: Any = "memory",
    *,
    unknown_dim: int | None = None,
    cost: Any = None,
    every: int | str | None = None,
) -> Iterator[None]:
    """A block in which every gradient of the process saves memory.

    Blocks nest, the innermost counts; what was before is back after the block, also
    after an exception. All threads are affected.

    Args:
        checkpoints: As in `enable`.
        unknown_dim: As in `enable`.
        cost: As in `enable`.
        every: As in `enable`.

    Raises:
        CheckpointError, CostError, TypeError, ValueError: As `enable`.

    Example:
        >>> import memory_saving_gradients as msg
        >>> with msg.enabled("speed"):
        ...     pass  # model.fit(...)
    """
    entry = _Entry(_parsed("enabled", checkpoints, unknown_dim, cost, every))
    with _changing():
        _entries.append(entry)
    try:
        yield
    finally:
        with _changing():
            # By identity: another thread's block may have begun in between.
            _entries[:] = [other for other in _entries if other is not entry]


def _parsed(
    where: str, checkpoints: Any, unknown_dim: int | None, cost: Any, every: Any
) -> Setting:
    setting = parse_setting(checkpoints, unknown_dim, cost, every=every, where=where)
    if isinstance(setting.checkpoints, Keep) and not setting.checkpoints.tensors:
        # Later it would be a warning: not all graphs of a process have what is kept.
        raise CheckpointError(
            f"`memory_saving_gradients.{where}`: `checkpoints` is an empty list, by "
            'which no gradient could save memory. Pass "memory" to have tensors '
            "chosen, or call `disable()` for stock gradients."
        )
    return setting


def _set_permanent(setting: Setting | None) -> None:
    with _changing():
        _entries[:] = [other for other in _entries if other not in _permanent]
        _permanent.clear()
        if setting is not None or _entries:
            entry = _Entry(setting)
            _entries.append(entry)
            _permanent.append(entry)


def _in_force() -> Setting | None:
    return _entries[-1].setting if _entries else None


@contextmanager
def _changing() -> Iterator[None]:
    """Puts into effect what changes inside."""
    with _lock:
        before = _in_force()
        yield
        now = _in_force()
        if now is not None and before is None:
            counting.reset_counts()
        if now is not None:
            _door.open()
        doors.set_process_wide(now)
        if now is None:
            _door.close()
        if not _same(before, now):
            retraced = keras_models.retrace(keras_models.live_models())
            if retraced:
                _log.info(
                    "%s: %s had been traced and will be traced again: %s",
                    "disabled" if now is None else "enabled",
                    counted(len(retraced), "Keras model"),
                    shortened(keras_models.names(retraced)),
                )


def _same(one: Setting | None, other: Setting | None) -> bool:
    """Whether models traced under the one serve under the other, too."""
    if one is None or other is None:
        return one is other
    # Other kinds hold tensors, of which TensorFlow redefines the comparison.
    return one is other or (
        isinstance(one.checkpoints, Auto | Budget | SavedPlan)
        and isinstance(other.checkpoints, Auto | Budget | SavedPlan)
        and one == other
    )


# -- status ----------------------------------------------------------------------------


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
    with _lock:
        setting = _in_force()
        counted = counting.counts()
        models = tuple(_models())
        return Status(
            enabled="" if setting is None else _described(setting),
            routes=() if setting is None else tuple(_routes()),
            models=models,
            rewired=dict(counted.rewired),
            stock=dict(counted.stock),
            notes=tuple(_notes(setting, counted, bool(models))),
        )


def _models() -> Iterator[str]:
    """The models with a setting of their own; those that are alike are counted."""
    told = Counter(f"{m.name}: {text}" for m, text in keras_models.settings.items())
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
    setting: Setting | None, counted: counting.Counts, models: bool
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
    eager = keras_models.names(m for m in keras_models.live_models() if _eager(m))
    if eager:
        yield (
            "models compiled with run_eagerly=True have no graph to rewrite: "
            f"{shortened(eager)}"
        )
    if counted.stock[doors.EAGER]:
        yield (
            f"{counted.stock[doors.EAGER]} gradients were taken eagerly: put the "
            "forward pass and the gradient into a tf.function"
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
    if not counted.rewired:
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
