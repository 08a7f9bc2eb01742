"""How many gradients came through the doors, by route, and why some stayed stock."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counts", "counts", "left_alone", "reset_counts", "rewired"]


@dataclass
class Counts:
    """What came to the doors while a setting held.

    Attributes:
        rewired: Gradients that recompute, by route.
        stock: Gradients left as they were, by reason.
    """

    rewired: Counter[str] = field(default_factory=Counter)
    stock: Counter[str] = field(default_factory=Counter)


_lock = threading.Lock()
_counts = Counts()


def counts() -> Counts:
    """What happened since `reset_counts`."""
    with _lock:
        return Counts(Counter(_counts.rewired), Counter(_counts.stock))


def reset_counts() -> None:
    """Starts counting anew."""
    with _lock:
        _counts.rewired.clear()
        _counts.stock.clear()


def rewired(route: str) -> None:
    """Counts a gradient that recomputes."""
    with _lock:
        _counts.rewired[route] += 1


def left_alone(reason: str) -> bool:
    """Counts a gradient that stays stock; whether it is the first for this reason."""
    with _lock:
        _counts.stock[reason] += 1
        return _counts.stock[reason] == 1
