"""Improving a selection with the exact simulator.

Both moves change one tensor at a time through a `Sweep` and take back what did not
help, so they never make a selection worse. Both are bounded by a number of questions,
never by the clock: the plan must not depend on how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.sweep import Sweep

__all__ = [
    "CONSUMED",
    "dearest_first",
    "fill_up",
    "lower_peak",
    "peak_and_near",
    "score",
    "spend_slack",
]


CONSUMED = 4
"""How much more the peak of a caller counts who consumes gradients at once."""

_NEAR = 32
"""What stands within this part of a peak counts as near it."""


def lower_peak(
    problem: Problem, sweep: Sweep, most_work: int, weight: int = CONSUMED
) -> None:
    """Changes one tensor at a time, at the peak, as long as the peak falls.

    Two peaks count (`score`): that of a caller who holds all gradients to the end, to
    clip them by their global norm, say, and that of one who consumes each at once, as
    most optimizers do. Nobody can tell which it will be when the graph is rewired. A
    peak is often reached at several steps at once, so a change counts as an
    improvement, too, if fewer bytes stand above 97 % of it.
    """
    candidates = set(problem.candidates)
    best = score(sweep, weight)
    while sweep.work < most_work:
        moves = _moves(problem, sweep, candidates)
        improved = False
        for tensor in moves:
            change = sweep.toggle(tensor)
            new = score(sweep, weight)
            if new < best:
                best = new
                improved = True
                break
            sweep.take_back(change)
            if sweep.work >= most_work:
                break
        if not improved:
            return


def _moves(problem: Problem, sweep: Sweep, candidates: set[int]) -> list[int]:
    """The tensors that are alive at one of the two peaks, largest first."""
    size = problem.buffers.size
    tops = dict.fromkeys(
        (int(sweep.profile().argmax()), int(sweep.profile_if_consumed().argmax()))
    )
    alive: set[int] = set()
    for top in tops:
        originals, copies = sweep.alive(top)
        alive.update(originals, copies)
    return sorted(alive & candidates, key=lambda t: (-size[t], t))


def score(sweep: Sweep, weight: int = CONSUMED) -> tuple[int, int]:
    """How good a selection is: both peaks, then how much stands near them.

    `weight` is how much the peak counts of a caller who consumes gradients at once.
    """
    held, near_held = peak_and_near(sweep.profile(), _NEAR)
    consumed, near_consumed = peak_and_near(sweep.profile_if_consumed(), _NEAR)
    return held + weight * consumed, near_held + weight * near_consumed


def peak_and_near(profile: NDArray[np.int64], near: int) -> tuple[int, int]:
    """The peak, and how much stands within one part in `near` below it: a peak is often
    reached at several steps at once."""
    peak = int(profile.max(initial=0))
    floor = peak - peak // near
    above = profile[profile > floor]
    return peak, int(above.sum()) - floor * len(above)


def spend_slack(problem: Problem, sweep: Sweep, most_work: int) -> None:
    """Keeps recomputed tensors, the costliest first, where that raises neither peak."""
    held, consumed = sweep.peak_bytes, sweep.peak_if_consumed
    fill_up(
        problem,
        sweep,
        lambda: sweep.peak_bytes <= held and sweep.peak_if_consumed <= consumed,
        most_work,
    )


def fill_up(
    problem: Problem,
    sweep: Sweep,
    fits: Callable[[], bool],
    most_work: int,
    *,
    rounds: int | None = None,
    gained: Callable[[Sweep], None] | None = None,
) -> None:
    """Keeps whatever fits, the dearest for its bytes first, until nothing does.

    Once a tensor is kept, others may be that were not before: no copy needs them any
    more. So it goes on until a whole round has kept nothing.

    Args:
        problem: The planning problem.
        sweep: The selection, changed in place.
        fits: Whether the selection of this moment may stand.
        most_work: Ends when the sweep has done so much.
        rounds: Ends after so many rounds.
        gained: Told of the sweep each time something was kept.
    """
    improved = True
    while improved and rounds != 0:
        rounds = None if rounds is None else rounds - 1
        improved = False
        for tensor in dearest_first(problem, sweep):
            if sweep.work >= most_work:
                return
            before = sweep.extra_seconds
            change = sweep.toggle(tensor)
            if sweep.extra_seconds < before and fits():
                improved = True
                if gained is not None:
                    gained(sweep)
            else:
                sweep.take_back(change)


def dearest_first(problem: Problem, sweep: Sweep) -> Iterable[int]:
    """Candidates by the seconds that keeping them spares for each byte, dearest
    first."""
    spared, size = problem.seconds_spared, problem.buffers.size
    return sorted(
        (t for t in problem.candidates if t not in sweep.kept),
        key=lambda t: (-spared[t] / size[t], t),
    )
