"""Segments that are more or less kept: least extra time under a bound, by dynamic
programming.

The problem: under a budget a plan is rarely the same everywhere. Late segments, which
are differentiated while all that was kept is alive, had better keep little, early ones
may keep much; what to keep inside of a segment is a question of bytes for seconds.

The model: segments lie between consecutive chosen cuts (`cuts`). Each is in one of
several *modes*: a mode is a selection for the whole graph, one rung of `trade_off`'s
ladder, of which the segment takes its part. What crosses a chosen cut is kept, too.
While the segment (p, q] is differentiated there are alive: what was kept up to cut p,
its residuals and what its mode keeps, and the gradients.

The algorithm: for each cut, in order, the Pareto states (bytes kept, seconds redone) of
all ways to get there whose local peaks are under the bound; at most `_STATES` of them,
evenly spaced. Kept bytes, seconds and local peaks come for all pairs of cuts from
prefix sums. Repeated blocks need no search of their own: the modes are global, and the
price of a byte decides alike in all of them.

O(c² · states · modes) for c cuts, in numpy. The local peaks are estimates (not all
residuals of a segment are alive at once), so callers try several bounds, score with the
exact simulator and mend the rest (`exchange`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.planners.cuts import (
    between_pairs,
    candidate_cuts,
    crossing_pairs,
    resting_bytes,
    selection_at,
)
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.schedule import NEVER, copy_slots

__all__ = ["Segments"]

_MOST_CUTS = 160
"""Candidate cuts: fewer than `memory` tries, since each pair has many states."""

_STATES = 24
"""Pareto states that are remembered for each cut."""


@dataclass(frozen=True)
class _Ways:
    """How to get to a cut by one more segment: arrays with an entry for each way.

    Attributes:
        before: The cut at which the segment begins.
        mode: The segment's mode.
        kept: What it keeps, in bytes.
        seconds: What it redoes.
        local: What is alive while it is differentiated, besides what was kept before.
    """

    before: NDArray[np.intp]
    mode: NDArray[np.intp]
    kept: NDArray[np.float64]
    seconds: NDArray[np.float64]
    local: NDArray[np.float64]


class Segments:
    """Tables for all pairs of cuts and all modes.

    Attributes:
        problem: The planning problem.
        cuts: The candidate cuts, the first and the last place included.
    """

    def __init__(self, problem: Problem, modes: Sequence[frozenset[int]]) -> None:
        self.problem = problem
        self.cuts = candidate_cuts(problem, _MOST_CUTS)
        lives = problem.lives
        resting = resting_bytes(problem, self.cuts, 1.0)
        self._held = [
            np.array([t in mode for t in lives.tensors], np.bool_) for mode in modes
        ]
        tables = [
            self._tables(mode, held, resting)
            for mode, held in zip(modes, self._held, strict=True)
        ]
        kept, seconds, local = map(np.stack, zip(*tables, strict=True))
        self._ways = _ways(kept, seconds, local)

    def selections(self, bound: int, most: int) -> list[frozenset[int]]:
        """At most `most` selections whose local peaks are under `bound`, those that
        take least extra time first."""
        _, seconds, came_from = self._states(bound)
        last = len(self.cuts) - 1
        ways = [
            state
            for state in np.argsort(seconds[last], kind="stable")[:most]
            if np.isfinite(seconds[last, state])
        ]
        return [self._selection(int(state), came_from) for state in ways]

    def _tables(
        self,
        mode: frozenset[int],
        held: NDArray[np.bool_],
        resting: NDArray[np.int64],
    ) -> tuple[NDArray[np.float64], ...]:
        """For all pairs of cuts what a segment in this mode keeps, redoes, and has
        alive while it is differentiated, besides what was kept before."""
        lives = self.problem.lives
        kept = between_pairs(self.cuts, lives.made, lives.size * held)
        kept += crossing_pairs(self.cuts, lives, lives.size * ~held)
        alive = lives.size * (lives.residual | held)
        local = between_pairs(self.cuts, lives.made, alive) + resting
        return (
            kept.astype(np.float64),
            self._redone(mode, held),
            local.astype(np.float64),
        )

    def _redone(
        self, mode: frozenset[int], held: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """For all pairs of cuts the seconds of what a segment in this mode redoes."""
        buffers = self.problem.buffers
        lives = self.problem.lives
        ops = [buffers.graph.ops[op] for op in buffers.forward]
        slots = copy_slots(buffers, mode | buffers.endless)
        seconds = np.array(
            [
                op.seconds if slot < NEVER else 0.0
                for op, slot in zip(ops, slots, strict=True)
            ]
        )
        outputs = np.array([max(len(buffers.makes[op.id]), 1) for op in ops])
        spared = (seconds / outputs)[lives.made] * ~held
        everywhere = np.arange(len(ops))
        redone = between_pairs(self.cuts, everywhere, seconds)
        redone -= crossing_pairs(self.cuts, lives, spared)
        return redone.clip(min=0.0)

    def _states(
        self, bound: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """For each cut the Pareto states: bytes kept, seconds redone, and whence (cut,
        state there, mode of the segment between)."""
        count = len(self.cuts)
        kept = np.full((count, _STATES), np.inf)
        seconds = np.full((count, _STATES), np.inf)
        came_from = np.zeros((count, _STATES, 3), np.int64)
        kept[0, 0] = seconds[0, 0] = 0.0
        for cut in range(1, count):
            ways = self._ways[cut]
            before = kept[ways.before]
            way, state = np.nonzero(before + ways.local[:, None] <= bound)
            new_kept = before[way, state] + ways.kept[way]
            new_seconds = seconds[ways.before[way], state] + ways.seconds[way]
            chosen = _pareto(new_kept, new_seconds)
            found = len(chosen)
            kept[cut, :found] = new_kept[chosen]
            seconds[cut, :found] = new_seconds[chosen]
            way = way[chosen]
            came_from[cut, :found, 0] = ways.before[way]
            came_from[cut, :found, 1] = state[chosen]
            came_from[cut, :found, 2] = ways.mode[way]
        return kept, seconds, came_from

    def _selection(self, state: int, came_from: NDArray[np.int64]) -> frozenset[int]:
        """Walks back from a state at the last cut."""
        lives = self.problem.lives
        tensors = np.array(lives.tensors)
        places: list[int] = []
        held: set[int] = set()
        cut = len(self.cuts) - 1
        while cut > 0:
            before, earlier, mode = map(int, came_from[cut, state])
            inside = (lives.made >= self.cuts[before]) & (lives.made < self.cuts[cut])
            held.update(tensors[inside & self._held[mode]].tolist())
            if before > 0:
                places.append(int(self.cuts[before]))
            cut, state = before, earlier
        return selection_at(self.problem, places).union(held)


def _ways(
    kept: NDArray[np.float64], seconds: NDArray[np.float64], local: NDArray[np.float64]
) -> list[_Ways]:
    """For each cut the segments that may end there, by mode, cut before and cut; of
    those that differ in the mode alone none that another betters in all."""
    useful = np.ones(kept.shape, np.bool_)
    for mode, other in itertools.permutations(range(len(kept)), 2):
        useful[mode] &= ~(
            useful[other]
            & (kept[other] <= kept[mode])
            & (seconds[other] <= seconds[mode])
            & (local[other] <= local[mode])
        )
    found = []
    for cut in range(kept.shape[-1]):
        modes, before = np.nonzero(useful[:, :cut, cut])
        columns = (table[modes, before, cut] for table in (kept, seconds, local))
        found.append(_Ways(before, modes, *columns))
    return found


def _pareto(
    kept: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Indices of the states that no other betters, by bytes; thinned out evenly."""
    order = np.lexsort((seconds, kept))
    least = np.minimum.accumulate(seconds[order])
    better = np.ones(len(order), np.bool_)
    better[1:] = seconds[order][1:] < least[:-1]
    front = order[better]
    if len(front) > _STATES:
        front = front[np.unique(np.linspace(0, len(front) - 1, _STATES).astype(int))]
    return front
