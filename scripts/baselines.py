"""What planners are compared with: selections as the literature would make them.

* `uniform` and `chen`, equal segments and the greedy ones of Chen et al. 2016 (arXiv
  1604.06174), are the library's own: see `memory_saving_gradients.planners.baselines`.
* `kusumoto`: the approximate dynamic programme of Kusumoto et al. 2019 (arXiv
  1905.11722) over lower sets of the form "v and all that it is made of". Their bound on
  the peak is swept; for each the plan of least overhead and, the paper's "memory
  centric" one, of most overhead is taken.

Each yields sets of kept tensors, no more. How they are recomputed and what they take is
for the library's own schedule and simulator to say (`scored`), so that all planners are
judged on equal terms; a baseline may only gain by that, because the library recomputes
nothing that no backward op reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.baselines import chen, uniform
from memory_saving_gradients.schedule import make_schedule
from memory_saving_gradients.simulate import simulate

__all__ = ["BASELINES", "Scored", "best", "chen", "kusumoto", "scored", "uniform"]

BOUNDS = 24
"""How many bounds are tried in a sweep of Kusumoto's programme."""


@dataclass(frozen=True)
class Scored:
    """A selection and what the library's simulator says of it.

    Attributes:
        peak_bytes: The simulated peak.
        extra_seconds: The work of what is recomputed.
        kept: Ids of the kept tensors.
    """

    peak_bytes: int
    extra_seconds: float
    kept: frozenset[int]


def scored(problem: Problem, selections: Iterable[frozenset[int]]) -> list[Scored]:
    """Simulates different selections; the untouched graph is always one of them."""
    buffers = problem.buffers
    stock = Scored(problem.stock_peak_bytes, 0.0, problem.everything)
    found = [stock]
    for kept in dict.fromkeys(problem.always_kept | kept for kept in selections):
        timeline = simulate(buffers, make_schedule(buffers, kept))
        # Not the graph's seconds: ops that make nothing are in no timeline.
        extra = timeline.seconds - problem.stock.seconds
        found.append(Scored(timeline.peak_bytes, extra, kept))
    return found


def best(found: Iterable[Scored], budget_bytes: int) -> Scored | None:
    """The one of least extra work within the budget, None if there is none."""
    fitting = [entry for entry in found if entry.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda e: (e.extra_seconds, e.peak_bytes), default=None)


# ---- lower sets


class _LowerSets:
    """The lower sets {v and all that it is made of}, with what a step between two of
    them costs. Rows of the tables are the earlier set, columns the later one.

    Attributes:
        inside: For each set which ops it holds.
        contained: Whether the earlier set is a proper part of the later one.
        kept: Bytes that the step adds to what is kept.
        overhead: Work that it adds to what is recomputed.
        local: Bytes alive while the step's ops are differentiated, without what was
            kept before.
    """

    def __init__(self, problem: Problem) -> None:
        buffers = problem.buffers
        self.tensors = [buffers.makes[buffers.forward[p]] for p in problem.useful]
        count = len(self.tensors)
        size = np.array([sum(buffers.size[t] for t in made) for made in self.tensors])
        work = np.array(
            [buffers.graph.ops[buffers.forward[p]].seconds for p in problem.useful]
        )
        edges = _edges(problem)
        inside = np.zeros((count + 2, count), np.bool_)
        for v in range(count):
            inside[v + 1] |= inside[1 + np.flatnonzero(edges[:, v])].any(axis=0)
            inside[v + 1, v] = True
        inside[-1] = True
        order = np.argsort(inside.sum(axis=1), kind="stable")
        inside = inside[order]
        different = np.ones(len(inside), np.bool_)
        different[1:] = (inside[1:] != inside[:-1]).any(axis=1)
        self.inside = inside = inside[different]
        members = inside.astype(np.int64)
        # Edges that leave a set: their heads, and their tails, which are its boundary.
        heads = (members @ edges > 0) & ~inside
        self.boundary = ((heads.astype(np.int64) @ edges.T) > 0) & inside
        tails = ((heads.astype(np.int64) @ edges.T) > 0) & ~inside
        held = members.sum(axis=1)
        self.contained = (members @ members.T == held[:, None]) & (
            held[:, None] < held[None, :]
        )
        outside = 1 - members
        new = self.boundary.astype(np.int64)
        self.kept = outside @ (new * size).T
        done = members @ work
        self.overhead = done[None, :] - done[:, None] - outside @ (new * work).T
        bytes_of = members @ size
        beyond = (heads * size).sum(axis=1) + (tails * size).sum(axis=1)
        self.local = 2 * (bytes_of[None, :] - bytes_of[:, None]) + beyond[None, :]

    def selections(self, chain: Sequence[int]) -> Iterator[frozenset[int]]:
        """The boundaries of the sets in `chain`, then also all but the last but one."""
        kept = self.boundary[list(chain)].any(axis=0)
        for chosen in (kept, kept | ~self.inside[chain[-2]]):
            ops = np.flatnonzero(chosen)
            yield frozenset(t for op in ops for t in self.tensors[op])


def _edges(problem: Problem) -> NDArray[np.int64]:
    """Which useful forward op reads which other: 1 at [maker, reader]."""
    buffers = problem.buffers
    number = {position: index for index, position in enumerate(problem.useful)}
    edges = np.zeros((len(number), len(number)), np.int64)
    for position, reader in number.items():
        for tensor in buffers.reads[buffers.forward[position]]:
            maker = buffers.position[buffers.graph.tensors[tensor].op]
            if maker in number:
                edges[number[maker], reader] = 1
    return edges


def kusumoto(problem: Problem) -> Iterator[frozenset[int]]:
    """Chains of lower sets, of least and of most overhead under a swept bound."""
    sets = _LowerSets(problem)
    scale = _whole_scale(sets.overhead)
    overhead = np.rint(sets.overhead * scale).astype(np.int64)
    least = _least_bound(sets)
    most = int(sets.local.max()) + int(sets.kept.max())
    for bound in np.geomspace(least, max(most, least + 1), BOUNDS):
        for chain in _chains(sets, overhead, int(np.ceil(bound))):
            yield from sets.selections(chain)


def _whole_scale(overhead: NDArray[np.float64]) -> float:
    """What work is multiplied with to become whole numbers, not too many of them."""
    if np.allclose(overhead, np.rint(overhead)):
        return 1.0
    return 2000.0 / float(overhead.max())


def _least_bound(sets: _LowerSets) -> int:
    """The least bound on the peak under which there is a chain, to a thousandth."""
    low, high = 0, int(sets.local.max()) + int(sets.kept.sum(axis=0).max()) + 1
    while high - low > max(high // 1000, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if _reachable(sets, middle) else (middle, high)
    return high


def _reachable(sets: _LowerSets, bound: int) -> bool:
    """Whether a chain of lower sets stays under `bound`."""
    far = np.iinfo(np.int64).max // 4
    held = np.full(len(sets.inside), far)
    held[0] = 0
    for later in range(1, len(held)):
        earlier = np.flatnonzero(sets.contained[:, later])
        fits = held[earlier] + sets.local[earlier, later] <= bound
        earlier = earlier[fits]
        if len(earlier):
            held[later] = (held[earlier] + sets.kept[earlier, later]).min()
    return bool(held[-1] < far)


def _chains(
    sets: _LowerSets, overhead: NDArray[np.int64], bound: int
) -> Iterator[list[int]]:
    """The chains of least and of most overhead whose peak is at most `bound`.

    `held[set, t]`: the fewest bytes kept on a way to the set with overhead t.
    """
    far = np.iinfo(np.int64).max // 4
    count, most = len(sets.inside), int(overhead[0, -1]) + 1
    held = np.full((count, most), far)
    came_from = np.full((count, most), -1, np.int64)
    held[0, 0] = 0
    least = held.min(axis=1)
    for later in range(1, count):
        earlier = np.flatnonzero(sets.contained[:, later])
        fits = least[earlier] + sets.local[earlier, later] <= bound
        for other in earlier[fits]:
            before = held[other]
            ways = np.flatnonzero(before + sets.local[other, later] <= bound)
            reached = ways + overhead[other, later]
            new = before[ways] + sets.kept[other, later]
            better = new < held[later, reached]
            held[later, reached[better]] = new[better]
            came_from[later, reached[better]] = other
        least[later] = held[later].min()
    ends = np.flatnonzero(held[-1] < far)
    for end in dict.fromkeys((*ends[:1].tolist(), *ends[-1:].tolist())):
        chain, place = [count - 1], int(end)
        while chain[-1] > 0:
            other = int(came_from[chain[-1], place])
            place -= int(overhead[other, chain[-1]])
            chain.append(other)
        yield chain[::-1]


BASELINES = {"uniform": uniform, "chen": chen, "kusumoto": kusumoto}
"""All baselines by name: from a problem to selections."""


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
