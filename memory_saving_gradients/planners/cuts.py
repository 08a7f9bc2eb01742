"""Cutting the forward pass into segments: the least peak by dynamic programming.

The problem: keep few tensors, and recompute everything between them, so that the peak
is as low as it can be. A *cut* is a place in the forward order; its *boundary* are the
tensors that cross it. A cut with one tensor is an articulation point, but U-Nets and
DenseNets have few of these, so a boundary here is a set of any size.

The model: segments lie between consecutive chosen cuts. While the segment (p, q] is
differentiated there are alive: what was kept at cuts up to p, every residual of the
segment, and the gradients, whose bytes are known beforehand since no selection moves
them. The first cut is the start of the forward pass, the last its end.

The algorithm:

1. Candidate cuts are the places where few bytes cross, at most `MOST_CUTS` of them,
   spread evenly over the residuals' bytes (`candidate_cuts`).
2. The bytes that a step from p to q keeps (those made in (p, q] that cross q) come for
   all pairs at once from a two-dimensional prefix sum.
3. For a bound M on the peak, `least_kept` finds for each cut the fewest bytes kept on
   the way there such that no segment's local peak exceeds M. Bisection finds the least
   M.

Segments come out uneven: the kept tensors die as backpropagation proceeds, so early
segments, differentiated last, may be longer. On a chain of n unit tensors the peak is
about √(2n), where equal segments (Chen et al. 2016, arXiv 1604.06174) give 2√n.

O(c²) in the number of cuts c for each M. Kusumoto et al. (arXiv 1905.11722) do this
over all lower sets, which is exact and exponential; order and boundary sets lose
little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.planners.problem import Lives, Problem

__all__ = [
    "CutTable",
    "between_pairs",
    "candidate_cuts",
    "crossing_pairs",
    "cut_tables",
    "least_kept",
    "resting_bytes",
    "selection_at",
]

Weight = TypeVar("Weight", np.int64, np.float64)

MOST_CUTS = 240
"""More candidate cuts than this are thinned out: a table of pairs is quadratic."""


@dataclass(frozen=True)
class CutTable:
    """What the dynamic programme asks, for all pairs of candidate cuts.

    Attributes:
        cuts: The candidate cuts, ascending. Cut c lies before position c; the first is
            the start, the last the end of the forward pass.
        kept: `kept[i, j]`: bytes made between cuts i and j that cross cut j.
        local: `local[i, j]`: bytes alive while that segment is differentiated, beyond
            what was kept up to cut i.
    """

    cuts: NDArray[np.int64]
    kept: NDArray[np.int64]
    local: NDArray[np.int64]


def _crossing_bytes(lives: Lives, count: int) -> NDArray[np.int64]:
    """For each place in the forward order the bytes that cross it."""
    change = np.zeros(count + 2, np.int64)
    np.add.at(change, lives.made + 1, lives.size)
    np.add.at(change, lives.last + 1, -lives.size)
    return np.cumsum(change)[: count + 1]


def candidate_cuts(problem: Problem, most: int = MOST_CUTS) -> NDArray[np.int64]:
    """Places to cut at: at most `most` cheap ones, spread over the residuals' bytes."""
    count = len(problem.buffers.forward)
    lives = problem.lives
    crossing = _crossing_bytes(lives, count)
    # Where nothing new is made, neighbouring places are the same cut: keep the first.
    places = np.unique(np.concatenate([[0, count], lives.made + 1]))
    inner = places[(places > 0) & (places < count)]
    if len(inner) > most:
        weight = np.zeros(count + 1, np.int64)
        np.add.at(weight, lives.made + 1, lives.size * lives.residual)
        reached = np.cumsum(weight)[inner]
        bucket = reached * most // (int(reached[-1]) + 1)
        # The cheapest cut of each bucket, the earlier one of equals.
        order = np.lexsort((inner, crossing[inner], bucket))
        first = np.unique(bucket[order], return_index=True)[1]
        inner = np.sort(inner[order][first])
    return np.concatenate([[0], inner, [count]]).astype(np.int64)


def crossing_pairs(
    cuts: NDArray[np.int64], lives: Lives, weight: NDArray[Weight]
) -> NDArray[Weight]:
    """For all pairs of cuts i < j the weight of what is made between them and crosses
    cut j: a two-dimensional prefix sum."""
    count = len(cuts)
    made_in = np.searchsorted(cuts, lives.made, side="right")  # first cut after it
    dead_by = np.searchsorted(cuts, lives.last, side="right")  # first cut it misses
    crossing = np.zeros((count + 1, count + 1), weight.dtype)
    # Tensor crosses cut j for made_in <= j < dead_by, if the segment starts before it.
    np.add.at(crossing, (made_in, made_in), weight)
    np.add.at(crossing, (made_in, dead_by), -weight)
    crossing = np.cumsum(crossing, axis=1)  # by (made_in, cut)
    suffix = np.cumsum(crossing[::-1], axis=0)[::-1]  # made_in > i
    return np.triu(suffix[1 : count + 1, :count], 1)


def between_pairs(
    cuts: NDArray[np.int64], made: NDArray[np.int64], weight: NDArray[Weight]
) -> NDArray[Weight]:
    """For all pairs of cuts i < j the weight of what is made between them."""
    count = len(cuts)
    found = np.zeros(count + 1, weight.dtype)
    np.add.at(found, np.searchsorted(cuts, made, side="right"), weight)
    upto = np.cumsum(found)[:count]
    return np.triu(upto[None, :] - upto[:, None], 1)


def cut_tables(problem: Problem) -> list[CutTable]:
    """Tables for the candidate cuts: gradients held to the end, half of them, none."""
    cuts = candidate_cuts(problem)
    lives = problem.lives
    kept = crossing_pairs(cuts, lives, lives.size)
    local = between_pairs(cuts, lives.made, lives.size * lives.residual)
    return [
        CutTable(cuts, kept, local + resting_bytes(problem, cuts, share))
        for share in (1.0, 0.5, 0.0)
    ]


def resting_bytes(
    problem: Problem, cuts: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """For all pairs of cuts what is alive while the segment between them is
    differentiated, whatever is selected: gradients, and what must be kept."""
    return np.triu(
        _forced_bytes(problem, cuts) + _gradient_bytes(problem, cuts, share), 1
    )


def _gradient_bytes(
    problem: Problem, cuts: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """For segment (i, j] the highest bytes of backward-made buffers meanwhile, if the
    caller holds this share of the finished gradients."""
    buffers = problem.buffers
    live = np.zeros(len(buffers.backward) + 2, np.int64)
    for slot, op in enumerate(buffers.backward):
        for tensor in buffers.makes[op]:
            readers = buffers.backward_readers[tensor]
            end = readers[-1] if readers else slot
            size = buffers.size[tensor]
            live[slot] += size
            live[end + 1] -= size
            if tensor in buffers.endless:
                live[end + 1] += int(share * size)
    profile = np.cumsum(live)
    # The forward place that the pass has come down to by each slot.
    place = len(buffers.forward)
    by_segment = np.zeros(len(cuts), np.int64)  # by the cut that ends the segment
    served = problem.served
    for slot in range(len(buffers.backward)):
        if 0 <= served[slot] < place:
            place = served[slot]
        index = int(np.searchsorted(cuts, place, side="right"))
        index = min(index, len(cuts) - 1)
        by_segment[index] = max(by_segment[index], profile[slot])
    count = len(cuts)
    table = np.zeros((count, count), np.int64)
    for i in range(count - 1):
        table[i, i + 1 :] = np.maximum.accumulate(by_segment[i + 1 :])
    return table


def _forced_bytes(problem: Problem, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of what must be kept and was made before each cut that ends a segment."""
    buffers = problem.buffers
    made = np.zeros(len(buffers.forward) + 2, np.int64)
    for tensor in problem.useful_tensors:
        if tensor in problem.always_kept or buffers.pinned(tensor) is not None:
            position = buffers.position[buffers.graph.tensors[tensor].op]
            made[position + 1] += buffers.size[tensor]
    return np.cumsum(made)[cuts]


def least_kept(table: CutTable, bound: int) -> list[int] | None:
    """Cuts with the fewest bytes kept such that no local peak exceeds `bound`.

    Returns:
        Indices into `table.cuts` of the chosen inner cuts, or None if none will do.
    """
    count = len(table.cuts)
    unreachable = np.iinfo(np.int64).max // 4
    best = np.full(count, unreachable, np.int64)
    best[0] = 0
    came_from = np.zeros(count, np.int64)
    for j in range(1, count):
        fits = best[:j] + table.local[:j, j] <= bound
        total = np.where(fits, best[:j] + table.kept[:j, j], unreachable)
        came_from[j] = int(np.argmin(total))
        best[j] = total[came_from[j]]
    if best[-1] >= unreachable:
        return None
    chosen = []
    index = int(came_from[-1])
    while index > 0:
        chosen.append(index)
        index = int(came_from[index])
    return chosen[::-1]


def selection_at(problem: Problem, cuts: list[int]) -> frozenset[int]:
    """The tensors that cross one of the places in `cuts`, and the small ones."""
    lives = problem.lives
    places = np.array(sorted(cuts), np.int64)
    found = np.searchsorted(places, lives.made, side="right") < np.searchsorted(
        places, lives.last, side="right"
    )
    crossing = [t for t, crosses in zip(lives.tensors, found, strict=True) if crosses]
    return problem.always_kept.union(crossing)
