"""A Keras callback that records the peak memory of each epoch."""

from __future__ import annotations

import logging
import time
from typing import Any

import tensorflow as tf

from mem_util.allocator import Counters, read_counters, wait_for_devices
from mem_util.batch_noting import noting_one_batch, types_of
from mem_util.errors import NotReplayableError
from mem_util.measure import (
    Measurement,
    add_reason,
    combine,
    merge,
    needs_replay,
)
from mem_util.replay import replay
from mem_util.trace_data import Trace

__all__ = ["PeakMemory"]

_logger = logging.getLogger(__name__)


class PeakMemory(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Records the peak of each epoch of `fit`.

    The allocators' counters are read, which costs nothing. On the CPU they see no
    tensor under 256 KiB and put all logical CPUs into one pool. Where an epoch has no
    peak because of that, its first batch is traced instead: `train_step` is run twice
    more on it as the graph of a v1 session, on copies of all variables, and every
    allocation is recorded. The epoch's `how` says so. Batches of the same shapes are
    traced once.

    The peaks also go into the history, in bytes, as "peak_bytes/cpu:0" and the like. If
    there is no peak in either way, `missing` says why, and the history has no entry: it
    is never 0.

    Args:
        replayable: whether a batch may be traced. Python side effects in `train_step`
            then happen again.

    Attributes:
        epochs: a `Measurement` for each epoch so far.

    Example:
        >>> import keras, mem_util, numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1000)])
        >>> model.compile("sgd", "mse")
        >>> peaks = mem_util.PeakMemory()
        >>> x = np.zeros([512, 1000], "float32")
        >>> _ = model.fit(x, x, batch_size=512, verbose=0, callbacks=[peaks])
        >>> peaks.epochs[0].peak_bytes["/cpu:0"] > 4_000_000
        True
    """

    def __init__(self, replayable: bool = True) -> None:
        super().__init__()
        self.epochs: list[Measurement] = []
        self._replayable = replayable
        self._before = Counters({}, {})
        self._start = 0.0
        # The batch of this epoch that may have to be traced, and what earlier ones gave
        # by the types of their tensors: a trace, or the reason why there is none.
        self._batch: list[Any] = []
        self._traced: dict[Any, Trace | str] = {}
        self._believed = False

    # `tf_keras` asks its callbacks these; those of Keras 3 have no such methods, and
    # `tf.keras` may be either.
    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets what was traced: the model may have been compiled anew."""
        self._traced.clear()
        self._believed = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resets the peaks; what is alive now is the rest of this epoch."""
        self._batch.clear()
        self._judged = False
        read_counters(reset=True)
        self._before = read_counters()
        self._start = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Has the first batch of the epoch noted, if it may have to be traced."""
        if batch == 0 and self._replayable and not self._believed:
            noting_one_batch(self.model, self._batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Drops the batch if the counters are to be believed without it."""
        if self._batch and not self._judged:
            self._judged = True
            after = read_counters()
            if not needs_replay(combine(self._before, after, seconds=0.0), after):
                self._batch.clear()
                # In the very first step there was also what compiling it took.
                self._believed = bool(self.epochs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the peaks."""
        wait_for_devices()
        seconds = time.perf_counter() - self._start
        after = read_counters()
        taken = combine(self._before, after, seconds)
        if self._replayable and needs_replay(taken, after):
            taken = self._with_trace(taken)
        self._batch.clear()
        if not self.epochs:
            self._say(taken)
        self.epochs.append(taken)
        if logs is not None:
            logs.update({f"peak_bytes{k}": v for k, v in taken.peak_bytes.items()})

    def _say(self, taken: Measurement) -> None:
        """Logs once what has no peak, or not the peak that was asked for."""
        for name, reason in taken.missing.items():
            _logger.warning("`mem_util.PeakMemory`: no peak of %s: %s", name, reason)
        for name, how in taken.how.items():
            if how.startswith("traced"):
                _logger.warning(
                    "`mem_util.PeakMemory`: the allocator's statistics have no peak of "
                    "%s. It was %s.",
                    name,
                    how,
                )

    def _with_trace(self, taken: Measurement) -> Measurement:
        """Fills the gaps of a measurement from a trace of the noted batch."""
        if not self._batch:
            return add_reason(
                taken, "no batch of this epoch could be noted, to be traced"
            )
        (batch,) = self._batch
        types = types_of(batch)
        if types not in self._traced:
            self._traced[types] = self._trace(batch)
        traced = self._traced[types]
        if isinstance(traced, str):
            return add_reason(taken, traced)
        said = "traced on one batch"
        if getattr(self.model, "jit_compile", False):
            said += ", without XLA, which `fit` uses"
        return merge(taken, traced, said)

    def _trace(self, batch: Any) -> Trace | str:
        """A step of training on copies of all variables, or why there is no trace."""
        model = self.model
        strategy = model.distribute_strategy

        def step(data: Any) -> Any:
            return strategy.run(model.train_step, args=(data,))

        try:
            return replay(step, batch)
        except NotReplayableError as error:
            return f"a batch cannot be traced in a v1 session: {error}"
        except tf.errors.OpError as error:
            reason = (str(error.message).splitlines() or [""])[0]
            return f"a batch could not be traced: {type(error).__name__}: {reason:.150}"
