"""`enable()`, `disable()`, `enabled()`: a setting for the whole process.

From then on every gradient that is taken while a graph is built saves memory, whatever
takes it and whenever it was imported: see `doors`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    counting,
    doors,
    keras_models,
)
from memory_saving_gradients.autodiff import Setting, parse_setting
from memory_saving_gradients.checkpoints import Auto, Budget, Keep, SavedPlan
from memory_saving_gradients.errors import CheckpointError, shortened
from memory_saving_gradients.wording import counted

__all__ = ["changing_lock", "disable", "enable", "enabled", "in_force"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Entry:
    """What one call asked for; None is stock."""

    setting: Setting | None


changing_lock = threading.RLock()
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
    None is a setting, too: `memory_saving(model, None)` exempts a model from this one.

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
    if checkpoints is None:
        raise CheckpointError(
            f"`memory_saving_gradients.{where}`: `checkpoints` is None. Call "
            "`disable()` for stock gradients in the whole process; one Keras model is "
            "exempted by `memory_saving(model, None)`, one gradient by "
            "`checkpoints=None`."
        )
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


def in_force() -> Setting | None:
    """The setting of the process, None if there is none."""
    return _entries[-1].setting if _entries else None


@contextmanager
def _changing() -> Iterator[None]:
    """Puts into effect what changes inside."""
    with changing_lock:
        before = in_force()
        yield
        now = in_force()
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
