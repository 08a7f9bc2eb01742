"""What scripts print: progress, and tables from rows that are dictionaries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["MIB", "Column", "counted", "markdown", "mebibytes", "say", "table"]

MIB = 2**20

Column = tuple[str, Callable[[Mapping[str, Any]], Any]]


def say(text: str) -> None:
    """Progress, apart from the tables."""
    print(f"... {text}", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def mebibytes(count: float | None) -> str | None:
    """Bytes for a column of MiB, the unit of all that scripts print; None is a gap."""
    return None if count is None else f"{count / MIB:.1f}"


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _cells(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]
) -> tuple[list[list[str]], list[bool]]:
    """All rows as words, and whether each column goes to the right."""
    body = [[_text(value(row)) for _, value in columns] for row in rows]
    to_right = [
        all(row[i][0].isdigit() or row[i] == "-" for row in body)
        for i in range(len(columns))
    ]
    return body, to_right


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text: words to the left, whatever starts with a digit to the right.

    Args:
        columns: Pairs of a head and a function of the row; None is shown as "-".
        rows: One dictionary a line.
    """
    heads = [head for head, _ in columns]
    body, to_right = _cells(columns, rows)
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, to_right, strict=True)
        )
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(heads), rule, *(line(row) for row in body)])


def markdown(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """The same table for Markdown."""
    body, to_right = _cells(columns, rows)
    lines = [[head for head, _ in columns]]
    lines.append(["--:" if right else "---" for right in to_right])
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *body])


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
