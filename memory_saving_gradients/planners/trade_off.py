"""What to keep if a byte has a price: a minimum cut.

The problem: each op that is redone costs its seconds, each tensor that is kept its
bytes. Which tensors shall be kept if one second is worth so many bytes?

The model: minimise Σ bytes of what is kept + worth · Σ seconds of what is redone, each
op at most once, such that every residual is there: a minimum cut (`cheapest`). What
rests, is small or must be kept anyway is no question. The kept sets are nested: the
more a second is worth, the more is kept.

The sum of bytes is not the peak: what a segment holds while it is recomputed is not
counted, and a tensor that dies early counts like one that lives long. So these
selections are where planning under a budget begins (`segments`, `budget`), and nearly
where it ends as long as most is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property

from memory_saving_gradients.planners.cheapest import Cheapest
from memory_saving_gradients.planners.problem import Problem

__all__ = ["TradeOff"]


_WINDOW = 400
"""Tensors in question at once. To cut takes longer than in proportion to the network;
what is made in one window is taken to be there in those behind it, which moves only
what stands next to their ends."""

_SPAN = 6.93
"""Binary orders of magnitude from the lowest to the highest worth on the ladder."""


class TradeOff:
    """The minimum cuts of a planning problem.

    Attributes:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def fair_worth(self) -> float:
        """Bytes for a second: all that may be kept over all seconds it would spare."""
        problem = self.problem
        kept = sum(problem.buffers.size[t] for t in problem.candidates)
        spared = sum(problem.seconds_spared[t] for t in problem.candidates)
        return kept / spared if spared else 0.0

    def selection(self, worth: float) -> frozenset[int]:
        """What is best kept if a second is worth `worth` bytes.

        Args:
            worth: Bytes for a second of recomputation, not negative.

        Returns:
            Ids of the tensors that are kept.
        """
        problem = self.problem
        if not problem.candidates:
            return problem.everything
        price = self._price(worth)
        return problem.always_kept.union(*(one.held(price) for one in self._cheapest))

    def ladder(self, rungs: int) -> list[frozenset[int]]:
        """Different selections from nearly nothing kept to nearly everything; on large
        graphs by a rule of thumb, since cuts take longer than all else."""
        problem = self.problem
        if not problem.candidates:
            return [problem.everything]
        if problem.is_large:
            return list(dict.fromkeys(map(self._one_by_one, self.worths(rungs))))
        prices = [self._price(worth) for worth in self.worths(rungs)]
        held = [one.held_at_each(prices) for one in self._cheapest]
        return list(
            dict.fromkeys(
                problem.always_kept.union(*parts) for parts in zip(*held, strict=True)
            )
        )

    def _one_by_one(self, worth: float) -> frozenset[int]:
        """What is best kept if each tensor is thought of alone: no cut, and linear."""
        problem = self.problem
        spared, size = problem.seconds_spared, problem.buffers.size
        return problem.always_kept.union(
            t for t in problem.candidates if worth * spared[t] >= size[t]
        )

    def worths(self, rungs: int) -> list[float]:
        """Bytes for a second, from little to much."""
        step = _SPAN / max(rungs - 1, 1)
        return [self.fair_worth * 2 ** (n * step - 1.54) for n in range(rungs)]

    def _price(self, worth: float) -> Callable[[int], int]:
        """What an op costs that is redone, in bytes."""
        ops = self.problem.buffers.graph.ops
        return lambda op: round(worth * ops[op].seconds)

    @cached_property
    def _cheapest(self) -> list[Cheapest]:
        """The networks of all windows."""
        problem = self.problem
        buffers = problem.buffers
        question = [
            tensor
            for tensor in problem.useful_tensors
            if tensor not in problem.always_kept
            and tensor not in buffers.endless
            and buffers.pinned(tensor) is None
        ]
        count = max(round(len(question) / _WINDOW), 1)
        ends = [len(question) * n // count for n in range(count + 1)]
        return [
            Cheapest(
                buffers,
                question[first:stop],
                lambda tensor: (
                    None if tensor in problem.barred else buffers.size[tensor]
                ),
            )
            for first, stop in itertools.pairwise(ends)
        ]
