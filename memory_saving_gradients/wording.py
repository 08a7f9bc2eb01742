"""Figures in sentences: one unit for a whole text, and plurals."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["counted", "sizes_like"]

# Those of TensorFlow's allocators and of its errors of memory.
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def sizes_like(largest: int) -> Callable[[int], str]:
    """How to write sizes next to one of `largest` bytes: in its unit, to three digits.

    Sizes in one text are there to be compared, so that all have the same unit.
    """
    unit, name = next((u for u in _UNITS if largest >= u[0]), _UNITS[-1])

    def text(count: int) -> str:
        value = count / unit
        if 0 < value < 0.001:
            return f"< 0.001 {name}"
        # Three digits that count, but none behind the point that bytes do not have.
        places = 2 - math.floor(math.log10(value)) if value else 0
        most = round(math.log10(unit))
        return f"{value:.{max(min(places, most), 0)}f} {name}"

    return text


def counted(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
