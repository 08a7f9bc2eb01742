"""Improving a selection with the exact simulator.

Both moves change one tensor at a time through a `Sweep` and take back what did not help,
so they never make a selection worse. Both are bounded by a number of questions, never by
the clock: the plan must not depend on how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Iterable

from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.sweep import Sweep

__all__ = ["lower_peak", "spend_slack"]

_QUESTIONS = 4000
"""At most so many changes are tried for each refinement."""


def lower_peak(problem: Problem, sweep: Sweep, questions: int = _QUESTIONS) -> None:
    """Changes one tensor at a time, at the peak, as long as the peak falls.

    A peak is often reached at several steps at once, so a change counts as an
    improvement, too, if fewer bytes stand above 97 % of the peak.
    """
    candidates = set(problem.candidates)
    score = _score(sweep)
    while questions > 0:
        top = int(sweep.profile().argmax())
        originals, copies = sweep.alive(top)
        size = problem.buffers.size
        alive = dict.fromkeys(
            tensor for tensor in (*originals, *copies) if tensor in candidates
        )
        moves = sorted(alive, key=lambda t: (-size[t], t))
        improved = False
        for tensor in moves:
            questions -= 1
            sweep.toggle(tensor)
            new = _score(sweep)
            if new < score:
                score = new
                improved = True
                break
            sweep.toggle(tensor)
            if questions <= 0:
                break
        if not improved:
            return


def _score(sweep: Sweep) -> tuple[int, int]:
    profile = sweep.profile()
    peak = int(profile.max(initial=0))
    floor = peak - peak // 32
    above = profile[profile > floor]
    return peak, int(above.sum()) - floor * len(above)


def spend_slack(problem: Problem, sweep: Sweep, bound: int) -> None:
    """Keeps recomputed tensors, the costliest first, while the peak is under `bound`."""
    for tensor in _by_cost(problem, sweep):
        if tensor in sweep.kept:
            continue
        before = sweep.extra_seconds
        sweep.toggle(tensor)
        if sweep.peak_bytes > bound or sweep.extra_seconds >= before:
            sweep.toggle(tensor)


def _by_cost(problem: Problem, sweep: Sweep) -> Iterable[int]:
    """Candidates by seconds of their op for each byte, dearest first."""
    graph = problem.buffers.graph
    return sorted(
        (t for t in problem.candidates if t not in sweep.kept),
        key=lambda t: (
            -graph.ops[graph.tensors[t].op].seconds / problem.buffers.size[t],
            t,
        ),
    )
