"""What was done inside a loop, a branch or a called function: the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["InsidePlan", "spared_bytes"]


@dataclass(frozen=True)
class InsidePlan:
    """What was done in one body.

    Attributes:
        name: The name of the body.
        runs: How often it is run before its gradient is: the iterations of a loop.
        stock_runs: The same of stock, which does not run loops inside loops again.
        branches: Of how many branches it is one, of which one is taken.
        assumed: Whether that number rests on an assumption.
        at_most: Whether it may be less: the loop may end before.
        stock_bytes: What stock holds for one run.
        held_bytes: What is held for one run now.
        peak_bytes: The simulated peak of one run of its gradient.
        seconds: Estimated time of the recomputation, for one run.
        recomputed: The names of the ops that are recomputed.
        every: After how many iterations a loop holds its state, None for each.
        replayed: Whether it is the body of the inner one of a loop of loops. That is
            run again as a whole, and what is held is there for one inner loop at a
            time.
        gathered_bytes: What is recomputed, and yet gathered in each iteration: an
            earlier gradient of the same loop has it do so.
        unsplit: Why a loop that should hold its state for fewer iterations does not.
    """

    name: str
    runs: int
    stock_runs: int
    branches: int
    assumed: bool
    stock_bytes: int
    held_bytes: int
    peak_bytes: int
    seconds: float
    recomputed: tuple[str, ...]
    every: int | None = None
    unsplit: str = ""
    replayed: bool = False
    gathered_bytes: int = 0
    at_most: bool = False

    @property
    def spared_bytes(self) -> int:
        """By how much less is held than by stock, in all runs together."""
        now = 0 if self.replayed else self.runs * self.held_bytes
        before = self.stock_runs * (self.stock_bytes - self.gathered_bytes)
        return (before - now) // self.branches

    @property
    def seconds_in_all(self) -> float:
        """Estimated time of all recomputation."""
        times = 2 if self.replayed else 1
        return times * self.stock_runs * self.seconds / self.branches


def spared_bytes(bodies: Sequence[InsidePlan]) -> int:
    """By how much less is held than by stock, in all bodies together."""
    return max(sum(body.spared_bytes for body in bodies), 0)
