"""The cheapest sets of tensors to keep, by minimum cuts: bytes against work.

With every op run again at most once, `minimum_cut` minimises

    bytes of what is kept  +  mu * work of what is run again

over all selections, as the library's planner does (`planners.cheapest`), but with no
tensor too small to be in question.

`hull` finds all selections that are best for some mu. Two neighbours on the hull are
either the only ones between their own slopes, or the cut at that slope finds one
between them. Bytes are those that wait between the passes, not the peak: they are what
one of many layers adds to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.cheapest import Cheapest
from memory_saving_gradients.schedule import make_schedule, seconds_again

__all__ = ["Cut", "filled", "hull", "measured", "minimum_cut"]

_PRECISION = 10**6
"""Capacities are whole numbers, so that flows add up: this many to a byte of work."""


@dataclass(frozen=True)
class Cut:
    """A selection with its bytes and its work.

    Attributes:
        kept_bytes: Bytes of the forward-made tensors that are held for the backward
            pass, those that cannot be made again included.
        work: The work of what is run again, in the unit of `OpNode.seconds`.
        kept: Ids of these tensors.
    """

    kept_bytes: int
    work: float
    kept: frozenset[int]


def minimum_cut(problem: Problem, mu: float) -> Cut:
    """The selection of least bytes plus `mu` times work."""
    buffers = problem.buffers
    ops = buffers.graph.ops

    def price_of_tensor(tensor: int) -> int:
        # What stays to the end is there anyway.
        held = 0 if tensor in buffers.endless else buffers.size[tensor]
        return held * _PRECISION

    def price_of_op(op: int) -> int | None:
        if ops[op].pin is not None:
            return None
        return round(mu * ops[op].seconds * _PRECISION)

    cheapest = Cheapest(buffers, problem.useful_tensors, price_of_tensor)
    return measured(problem, cheapest.held(price_of_op))


def hull(problem: Problem) -> list[Cut]:
    """All selections that are best for some trade, most bytes and least work first."""
    size = sum(problem.buffers.size)
    work = sum(op.seconds for op in problem.buffers.graph.forward_ops)
    dear = minimum_cut(problem, 2.0 * size / min(_least_work(problem), work))
    cheap = minimum_cut(problem, 1.0 / (2.0 * max(work, 1.0)))
    found = {(cut.kept_bytes, cut.work): cut for cut in (dear, cheap)}
    spans = [(dear, cheap)]
    while spans:
        upper, lower = spans.pop()
        if upper.kept_bytes <= lower.kept_bytes or lower.work <= upper.work:
            continue
        mu = (upper.kept_bytes - lower.kept_bytes) / (lower.work - upper.work)
        between = minimum_cut(problem, mu)
        if (between.kept_bytes, between.work) in found:
            continue
        found[between.kept_bytes, between.work] = between
        spans += [(upper, between), (between, lower)]
    return sorted(found.values(), key=lambda cut: (-cut.kept_bytes, cut.work))


def filled(problem: Problem, cut: Cut, limit_bytes: int) -> Cut:
    """A selection of at most so many bytes: `cut`, and what spares most work for its
    bytes as long as there is room."""
    best = measured(problem, cut.kept)
    while True:
        tried = [
            measured(problem, best.kept | {tensor})
            for tensor in problem.useful_tensors
            if tensor not in best.kept
        ]
        gains = [
            ((best.work - new.work) / max(new.kept_bytes - best.kept_bytes, 1), new)
            for new in tried
            if new.kept_bytes <= limit_bytes and new.work < best.work
        ]
        if not gains:
            return best
        best = max(gains, key=lambda gain: gain[0])[1]


def measured(problem: Problem, kept: frozenset[int]) -> Cut:
    """What a selection holds and redoes, by the library's own schedule."""
    buffers = problem.buffers
    schedule = make_schedule(buffers, kept)
    held = schedule.kept - buffers.endless
    return Cut(
        sum(buffers.size[tensor] for tensor in held),
        seconds_again(buffers.graph, schedule),
        frozenset(held),
    )


def _least_work(problem: Problem) -> float:
    """The least work of an op that costs any."""
    ops = problem.buffers.graph.forward_ops
    return min((op.seconds for op in ops if op.seconds > 0), default=1.0)


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
