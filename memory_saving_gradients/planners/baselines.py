"""Segments as the literature makes them, to compare plans with.

* `uniform`: the forward pass cut into k equal runs of ops; what crosses a cut is kept.
* `chen`: Algorithm 3 of Chen et al. 2016 (arXiv 1604.06174). Walk in order, add up the
  bytes, and cut wherever more than a budget b has been gathered; b is swept. Cuts may
  be anywhere, with all that crosses them kept, or, in a second round, only where a
  single tensor crosses, as the paper has it.

The last segment need not be recomputed, since its gradients come first: each plan comes
with its last segment kept, too.

They yield sets of kept tensors, no more. How these are recomputed and what that takes
is for the library's own schedule and simulator to say, so that all are judged on equal
terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from memory_saving_gradients.planners.problem import Problem

__all__ = ["chen", "uniform"]

BOUNDS = 200
"""How many budgets are tried in a sweep of Chen's algorithm."""


class _Crossings:
    """What crosses each place of the forward order, as whoever cuts there sees it.

    Only forward reads count: a residual is recomputed with its segment.
    """

    def __init__(self, problem: Problem) -> None:
        buffers = problem.buffers
        useful = set(problem.useful)
        self.places = list(problem.useful[1:])
        tensors, made, last = [], [], []
        for tensor in problem.useful_tensors:
            position = buffers.position[buffers.graph.tensors[tensor].op]
            readers = [r for r in buffers.forward_readers[tensor] if r in useful]
            tensors.append(tensor)
            made.append(position)
            last.append(max((position, *readers)))
        self._tensors = tensors
        self._made = np.array(made, np.int64)
        self._last = np.array(last, np.int64)
        self.size = {t: buffers.size[t] for t in tensors}
        self.made_at: dict[int, int] = {}
        for tensor, position in zip(tensors, made, strict=True):
            gathered = self.made_at.get(position, 0)
            self.made_at[position] = gathered + buffers.size[tensor]

    def at(self, place: int) -> list[int]:
        """The tensors made before `place` and read there or later."""
        crossing = (self._made < place) & (self._last >= place)
        return [self._tensors[index] for index in np.flatnonzero(crossing)]

    def selections(self, places: Sequence[int]) -> Iterator[frozenset[int]]:
        """All that crosses any of the places, then also all that comes after them."""
        crossing = frozenset(tensor for place in places for tensor in self.at(place))
        yield crossing
        if places:
            tail = np.flatnonzero(self._made >= max(places))
            yield crossing.union(self._tensors[index] for index in tail)


def uniform(
    problem: Problem, counts: Iterable[int] | None = None
) -> Iterator[frozenset[int]]:
    """Equal segments.

    Args:
        problem: The planning problem.
        counts: How many segments there shall be: a selection or two for each number.
            All numbers by default.
    """
    crossings = _Crossings(problem)
    places = crossings.places
    for segments in range(1, len(places) + 2) if counts is None else counts:
        chosen = {(len(places) + 1) * i // segments - 1 for i in range(1, segments)}
        chosen.discard(-1)  # more segments than ops
        yield from crossings.selections([places[index] for index in sorted(chosen)])


def chen(problem: Problem, bounds: int = BOUNDS) -> Iterator[frozenset[int]]:
    """Greedy segments under a swept budget, with any boundary and with narrow ones.

    Args:
        problem: The planning problem.
        bounds: How many budgets are tried.
    """
    crossings = _Crossings(problem)
    total = sum(crossings.made_at.values())
    narrow = [place for place in crossings.places if len(crossings.at(place)) == 1]
    least = max(min(crossings.made_at.values(), default=1), total // 10_000, 1)
    for places in (crossings.places, narrow):
        for bound in np.geomspace(least, max(total, least + 1), bounds):
            yield from crossings.selections(_greedy(crossings, places, float(bound)))


def _greedy(crossings: _Crossings, places: Sequence[int], bound: float) -> list[int]:
    """Chen's Algorithm 3: the places at which a segment ends."""
    allowed = set(places)
    found, gathered = [], 0
    for position, size in sorted(crossings.made_at.items()):
        if gathered > bound and position in allowed:
            found.append(position)
            gathered = 0
        gathered += size
    return found
