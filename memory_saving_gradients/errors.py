"""Everything that `memory_saving_gradients` raises on purpose.

Each class is also a builtin type, so that code which knows nothing of this library
(`except ValueError:`) still catches what it expects to catch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CostError",
    "EagerExecutionError",
    "IllegalGraphError",
    "MemorySavingGradientsError",
    "MissingDependencyError",
    "PlanMismatchError",
    "UnknownCheckpointNameError",
    "UnsupportedTensorFlowError",
    "VerificationUnavailableError",
]


class MemorySavingGradientsError(Exception):
    """The root of the hierarchy: catch it to catch all of them."""

    # While AutoGraph traces a function it raises what it knows how to make anew, which
    # it tells by this very initializer, and `StagingError` for the rest.
    __init__ = Exception.__init__


class CheckpointError(MemorySavingGradientsError, ValueError):
    """A `checkpoints=` argument from which no plan can be made."""


class BudgetError(CheckpointError):
    """A budget that no plan keeps to."""

    @property
    def least_bytes(self) -> int:
        """The least that would do, in bytes, as the message says: AutoGraph makes
        errors anew from their messages, so that they carry nothing else."""
        found = re.search(r"\((\d+) bytes", str(self))
        return int(found[1]) if found else 0


class PlanMismatchError(CheckpointError):
    """A saved plan was given for another graph than the one that it was made for."""


class CostError(MemorySavingGradientsError, ValueError):
    """A `cost=` argument that holds no measured times."""


class UnknownCheckpointNameError(CheckpointError, LookupError):
    """A checkpoint was given by a name that no tensor of the graph has."""


class EagerExecutionError(MemorySavingGradientsError, RuntimeError):
    """A graph rewrite was asked for where there is no graph to rewrite."""


class VerificationUnavailableError(MemorySavingGradientsError, NotImplementedError):
    """`verify=True` was asked for where run-time assertions do not exist."""


class UnsupportedTensorFlowError(MemorySavingGradientsError, ImportError):
    """TensorFlow is missing, too old, or no longer has what the library relies on."""


class MissingDependencyError(MemorySavingGradientsError, ImportError):
    """An optional package is needed for what was asked, and is not installed."""


class IllegalGraphError(MemorySavingGradientsError, ValueError):
    """Plain data that is not a training graph (see `graph.check`)."""


class _Here(threading.local):
    function = "gradients"


_here = _Here()


@contextmanager
def speaking_for(function: str) -> Iterator[None]:
    """Has messages of this thread name a public function as their place.

    Args:
        function: The one that the user called.
    """
    outer, _here.function = _here.function, function
    try:
        yield
    finally:
        _here.function = outer


def place() -> str:
    """The public function that messages speak for, as they begin with it."""
    return f"`memory_saving_gradients.{_here.function}`"


def shortened(names: Iterable[str], limit: int = 5) -> str:
    """Joins names for a message, cut after `limit` of them with a count of the rest."""
    listed = list(names)
    text = ", ".join(listed[:limit])
    rest = len(listed) - limit
    return f"{text} and {rest} more" if rest > 0 else text
