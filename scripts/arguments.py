"""Types of arguments that the scripts share: numbers that make sense, or a message."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = [
    "command_line",
    "count",
    "counts",
    "figures_of_models",
    "modes_of",
    "names_of",
    "positive",
    "refuse_unknown",
]


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def figures_of_models(parser: argparse.ArgumentParser) -> None:
    """What scripts take that measure models and make a table of it."""
    parser.add_argument(
        "--scale",
        type=positive,
        default=1.0,
        metavar="N",
        help="size of the models; below 1 for a quick try (1.0)",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print a table for documents"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write all figures there as JSON"
    )


def count(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A type for argparse: a whole number from `least` to `most`."""

    def parsed(word: str) -> int:
        wanted = f"a whole number of at least {least}"
        if most is not None:
            wanted += f" and at most {most}"
        try:
            number = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not {wanted}") from None
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{word} is not {wanted}")
        return number

    return parsed


def counts(words: str) -> list[int]:
    """Whole numbers of at least 1, with commas between them."""
    numbers = [count()(word) for word in words.split(",") if word]
    if not numbers:
        raise argparse.ArgumentTypeError("no number is given")
    return numbers


def positive(word: str) -> float:
    """A number above 0."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above 0")
    return number


def names_of(known: tuple[str, ...], also: str = "") -> Callable[[str], list[str]]:
    """A type for argparse: some of the known names, with commas between them.

    Args:
        known: The names.
        also: What else the caller would take, for the message.
    """

    def parsed(words: str) -> list[str]:
        names = [word for word in words.split(",") if word]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"{words!r} is not a list of some of {', '.join(known)}{also}"
            )
        return names

    return parsed


def modes_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """The same, with budgets such as `40%` among them."""

    def parsed(words: str) -> list[str]:
        names = [word for word in words.split(",") if word]
        budgets = [name for name in names if name[0].isdigit()]
        rest = [name for name in names if name not in budgets]
        if budgets:
            # Imports TensorFlow, which those who ask for help need not wait for.
            from memory_saving_gradients import Budget, CheckpointError

            try:
                for name in budgets:
                    Budget(name)
            except CheckpointError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        if rest or not budgets:
            names_of(known, " and budgets such as 40%")(",".join(rest))
        return names

    return parsed


def refuse_unknown(
    parser: argparse.ArgumentParser,
    given: Iterable[str],
    known: Sequence[str],
    what: str,
) -> None:
    """Ends the script if one of the given names is not known."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        parser.error(f"no such {what}: {', '.join(unknown)}. Take {', '.join(known)}")


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
