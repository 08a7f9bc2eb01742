"""The strategy `speed`: nothing that is dear to compute is computed twice.

The results of heavy ops (`cost.is_heavy`: many FLOPs a byte) are held, or what has been
made of them alone and is no bigger. What they feed is not: normalisations, activations,
dropout and the scores of small attention heads cost a few passes over memory to redo,
and take up most of it. Among that cheap rest the planner of `memory` finds the lowest
peak; it then gives back every recomputation that does not lower it, and exchanges what
is kept for what is dearer to redo.
"""

from __future__ import annotations

from memory_saving_gradients.planners.exchange import save_time
from memory_saving_gradients.planners.memory import lowest_peak
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.settled import narrowed
from memory_saving_gradients.sweep import Sweep

__all__ = ["plan_speed"]


def plan_speed(problem: Problem) -> frozenset[int]:
    """Keeps the results of heavy ops, and of the rest what makes the peak lowest."""
    graph = problem.buffers.graph
    heavy = (
        narrowed(problem.buffers, tensor)
        for tensor in problem.useful_tensors
        if graph.ops[graph.tensors[tensor].op].heavy
    )
    forcing = problem.forcing(heavy)
    kept = lowest_peak(forcing)
    if kept == forcing.everything:
        return kept
    sweep = Sweep(problem.buffers, kept)
    save_time(forcing, sweep, sweep.work + problem.effort // 2)
    return frozenset(sweep.kept)
