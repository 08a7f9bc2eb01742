"""The `checkpoints=` argument, parsed once at the edge into frozen values.

Beyond this module nobody compares strings or asks what kind of thing the user gave.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from memory_saving_gradients.budget import Budget, looks_like_a_budget
from memory_saving_gradients.errors import CheckpointError
from memory_saving_gradients.saved import SavedPlan

__all__ = [
    "COLLECTION",
    "Auto",
    "Budget",
    "Checkpoints",
    "Collection",
    "Keep",
    "SavedPlan",
    "Where",
    "hint_of_number",
    "is_of_who_consumes",
    "is_relative",
    "is_setting",
    "modes_of",
    "parse",
]

COLLECTION = "checkpoints"
"""The graph collection that `checkpoints="collection"` reads."""


@dataclass(frozen=True)
class Auto:
    """Let a strategy choose.

    Attributes:
        mode: Its name in `planners.PLANNERS`.
    """

    mode: str


@dataclass(frozen=True)
class Keep:
    """Keep exactly these.

    Attributes:
        tensors: Tensors, anything with a graph tensor in it, or tensor names.
        origin: What to call them in messages.
        of_layers: Whether they are all outputs of layers. The user named the layers,
            not the outputs: what of these is held anyway is held as was asked.
    """

    tensors: tuple[Any, ...]
    origin: str = "`checkpoints`"
    of_layers: bool = False


@dataclass(frozen=True)
class Collection:
    """Keep what the graph's collection holds."""

    name: str = COLLECTION


@dataclass(frozen=True)
class Where:
    """Keep the tensors for which the user's function says True.

    Attributes:
        predicate: From a `tf.Tensor` to bool.
    """

    predicate: Callable[[Any], bool]


Checkpoints = Auto | Budget | Keep | Collection | SavedPlan | Where

_CHOICES = (
    '"memory", "speed", "collection", a budget such as "4GiB" or "40%", a list of '
    "tensors or of tensor names, a function of a `tf.Tensor` that returns a bool, or a "
    "saved plan (`Plan.from_json(text)`)"
)


def modes_of(modes: Iterable[str]) -> list[str]:
    """The words that `checkpoints` may be.

    Args:
        modes: The names of the automatic strategies.
    """
    return [*modes, "collection"]


def is_setting(word: str, modes: Iterable[str]) -> bool:
    """Whether a string is a mode or a budget, or may be meant as a saved plan.

    Args:
        word: The string.
        modes: The names of the automatic strategies.
    """
    budget = looks_like_a_budget(word)
    return word in modes_of(modes) or budget or word.lstrip().startswith("{")


def is_relative(checkpoints: object) -> bool:
    """Whether plans are judged by stock's peak, and not by a number of bytes.

    Args:
        checkpoints: What was parsed.
    """
    share = isinstance(checkpoints, Budget) and checkpoints.is_share
    return share or isinstance(checkpoints, Auto)


def is_of_who_consumes(checkpoints: object) -> bool:
    """Whether peaks are those of a caller who consumes each gradient as it comes.

    Args:
        checkpoints: What was parsed.
    """
    return isinstance(checkpoints, Budget | SavedPlan) and checkpoints.consumed


def _nearest(value: str, modes: Iterable[str]) -> str:
    """What a misspelt mode may have been meant as, or ""."""
    close = difflib.get_close_matches(value.lower(), modes_of(modes), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def hint_of_number(value: Any) -> str:
    """The budget that a number may have been meant as, or ""."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return ""
    number = float(value)
    if not 0 < number < math.inf:
        return ""
    if number < 1:
        return f' For a budget of that share of stock\'s peak give "{100 * number:g}%".'
    return f" For a budget of that many bytes give `Budget({int(number)})`."


def parse(value: Any, modes: Iterable[str], where: str = "gradients") -> Checkpoints:
    """Turns what the user gave into one of the kinds above.

    Args:
        value: The `checkpoints=` argument.
        modes: The names of the automatic strategies.
        where: The public function that got it, for messages.

    Returns:
        The parsed value.

    Raises:
        CheckpointError: It is none of the things that `checkpoints` may be.
    """
    if isinstance(value, Auto | Budget | Keep | Collection | SavedPlan | Where):
        return value
    if isinstance(value, str):
        if value == "collection":
            return Collection()
        if value in modes:
            return Auto(value)
        if looks_like_a_budget(value):
            return Budget(value)
        if value.lstrip().startswith("{"):
            raise CheckpointError(
                f"`memory_saving_gradients.{where}`: `checkpoints` is a JSON text. If "
                "it is that of a plan, give `Plan.from_json(text)`."
            )
        hint = (
            " If it was meant as the name of the gradient ops, pass `name=...`: the "
            "fourth positional argument of `tf.gradients` is `name`, here it is "
            "`checkpoints`."
        )
        raise CheckpointError(
            f"`memory_saving_gradients.{where}`: `checkpoints` must be {_CHOICES}, "
            f"but got the string {value!r}{_nearest(value, modes)}. A single tensor "
            f"name goes into a list.{hint if where == 'gradients' else ''}"
        )
    if hasattr(value, "op") and hasattr(value, "dtype"):
        return Keep((value,))
    if callable(value):
        return Where(value)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return Keep(tuple(value))
    hint = hint_of_number(value)
    got = f"{value!r} of type {type(value).__name__}"
    if hasattr(value, "to_json"):
        got = "a plan itself, which holds on to the graph that it was made in"
        hint = " Give `Plan.from_json(plan.to_json())`."
    raise CheckpointError(
        f"`memory_saving_gradients.{where}`: `checkpoints` must be {_CHOICES}, but "
        f"got {got}.{hint}"
    )
