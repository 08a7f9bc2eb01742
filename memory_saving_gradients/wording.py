"""Figures in sentences and tables: one unit for a whole text, and plurals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["columns", "counted", "percent", "sizes_like"]

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


def percent(fraction: float | None) -> str:
    """A fraction in percent for a column, `-` if there is none."""
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text: the first column to the left, all others to the right."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
        ).rstrip()
        for cells in lines
    ]
    return "\n".join([aligned[0], "  ".join("-" * w for w in widths), *aligned[1:]])
