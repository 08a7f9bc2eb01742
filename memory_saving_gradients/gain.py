"""What a selection gains over stock, and whether that is worth the extra work.

Two peaks count, as in `planners.refine`: that of a caller who holds all gradients to
the end, and that of one who consumes each as soon as it is there, as most optimizers
do. Nobody can tell which it will be when the graph is rewired, so a plan that is good
for either is good.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.simulate import Timeline
from memory_saving_gradients.sweep import Sweep

__all__ = ["LEAST_SAVING", "WORK_FOR_SAVING", "Gain", "gain_of"]

LEAST_SAVING = 0.01
"""A plan that lowers the peak by less than this fraction is within the error of the
prediction, and the graph of everyone who debugs it is larger for nothing."""

WORK_FOR_SAVING = 10.0
"""Nobody pays more than this many percent of extra work for one percent of the peak:
ten is what the last steps of a good plan cost, which nobody would make alone."""


@dataclass(frozen=True)
class Gain:
    """Peaks of a selection and of stock, in bytes above rest.

    Attributes:
        stock_bytes: Stock's, if all gradients are held to the end.
        peak_bytes: The selection's, likewise.
        stock_if_consumed_bytes: Stock's, if each gradient is consumed at once.
        peak_if_consumed_bytes: The selection's, likewise.
        extra_fraction: Work of the recomputation over that of the stock graph.
    """

    stock_bytes: int
    peak_bytes: int
    stock_if_consumed_bytes: int
    peak_if_consumed_bytes: int
    extra_fraction: float

    @property
    def saving(self) -> float:
        """By what fraction the peak falls, for whom it falls more."""
        return max(
            _fall(self.stock_bytes, self.peak_bytes),
            _fall(self.stock_if_consumed_bytes, self.peak_if_consumed_bytes),
        )

    def reason_against(self) -> str:
        """Why nobody would want this, or ""."""
        if self.peak_bytes > self.stock_bytes or self.saving <= 0:
            return "no plan was found whose peak is below stock's"
        least = max(LEAST_SAVING, self.extra_fraction / WORK_FOR_SAVING)
        if self.saving < least:
            return (
                f"the best plan found lowers the peak by {100 * self.saving:.2g} % "
                f"for {100 * self.extra_fraction:.2g} % more work, and less than "
                f"{100 * least:.2g} % is not worth that"
            )
        return ""


def gain_of(
    buffers: Buffers,
    kept: Set[int],
    stock: Timeline,
    timeline: Timeline,
    extra_seconds: float,
) -> Gain:
    """The gain of a selection.

    Args:
        buffers: The buffer view of the graph.
        kept: The selection.
        stock: The simulated run of the untouched graph.
        timeline: That of the selection.
        extra_seconds: What the selection computes again.
    """
    everything = frozenset(range(len(buffers.graph.tensors)))
    seconds = buffers.graph.seconds
    return Gain(
        stock.peak_bytes,
        timeline.peak_bytes,
        Sweep(buffers, everything).peak_if_consumed,
        Sweep(buffers, kept).peak_if_consumed,
        extra_seconds / seconds if seconds else 0.0,
    )


def _fall(before: int, after: int) -> float:
    return 1 - after / before if before else 0.0
