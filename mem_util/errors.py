"""Everything that `mem_util` raises on purpose, each class also a builtin type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "MemUtilError",
    "MissingDeviceError",
    "MissingTensorFlowError",
    "NoMemoryDataError",
    "NotReplayableError",
    "ProfilerError",
    "TraceFileError",
]


class MemUtilError(Exception):
    """The root of the hierarchy: catch it to catch all of them."""


class NoMemoryDataError(MemUtilError, LookupError):
    """No allocation was recorded, where 0 bytes would be a wrong answer."""

    def __str__(self) -> str:
        """The message alone: `KeyError`-like quoting would make it unreadable."""
        return str(self.args[0]) if self.args else ""


class MissingDeviceError(NoMemoryDataError, KeyError):
    """A device that was asked for is not there, or allocated nothing."""


class MissingTensorFlowError(MemUtilError, ImportError):
    """There is no TensorFlow to import."""


class TraceFileError(MemUtilError, ValueError):
    """A file that is missing, cut short, or of another kind than it should be."""


class ProfilerError(MemUtilError, RuntimeError):
    """The profiler did not start or left nothing behind."""


class NotReplayableError(MemUtilError, TypeError):
    """A function that cannot be run once more as the graph of a v1 session."""


def counted(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def got(value: Any, limit: int = 60) -> str:
    """`None of type NoneType`: a value for a message, in one line and cut if long."""
    text = " ".join(repr(value).split())
    if len(text) > limit:
        text = f"{text[:limit]}..."
    return f"{text} of type {type(value).__name__}"


def shortened(names: Iterable[str], limit: int = 5) -> str:
    """Joins names for a message, cut after `limit` of them with a count of the rest."""
    listed = list(names)
    rest = len(listed) - limit
    text = ", ".join(listed[:limit])
    return f"{text} and {rest} more" if rest > 0 else text
