"""A Keras callback that records the peak memory of each epoch."""

from __future__ import annotations

import logging
import time
from typing import Any

import tensorflow as tf

from mem_util.allocator import Counters, read_counters, wait_for_devices
from mem_util.measure import Measurement, combine

__all__ = ["PeakMemory"]

_logger = logging.getLogger(__name__)


class PeakMemory(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Records the peak of each epoch of `fit`, as the allocators count it.

    Costs nothing. The peaks also go into the history, in bytes, as "peak_bytes/cpu:0"
    and the like. On the CPU, a model of tensors under 256 KiB has no peak: the epoch's
    `missing` then says why, a warning is logged once, and the history has no entry.

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

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[Measurement] = []
        self._before = Counters({}, {})
        self._start = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resets the peaks; what is alive now is the rest of this epoch."""
        read_counters(reset=True)
        self._before = read_counters()
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the peaks."""
        wait_for_devices()
        seconds = time.perf_counter() - self._start
        taken = combine(self._before, read_counters(), seconds)
        if taken.missing and not self.epochs:
            for name, reason in taken.missing.items():
                _logger.warning(
                    "`mem_util.PeakMemory`: no peak of %s: %s", name, reason
                )
        self.epochs.append(taken)
        if logs is not None:
            logs.update({f"peak_bytes{k}": v for k, v in taken.peak_bytes.items()})
