"""The strategy `speed`: nothing that is dear to compute is computed twice.

The results of heavy ops (`cost.is_heavy`: many FLOPs a byte) are held, and what they
feed is not: normalisations, activations, dropout and the scores of small attention
heads cost a few passes over memory to redo, and take up most of it. Among that cheap
rest the planner of `memory` finds the lowest peak; it then gives back every
recomputation that does not lower it.
"""

from __future__ import annotations

from dataclasses import replace

from memory_saving_gradients.planners.memory import plan_memory
from memory_saving_gradients.planners.problem import Problem

__all__ = ["plan_speed"]


def plan_speed(problem: Problem) -> frozenset[int]:
    """Keeps the results of heavy ops, and of the rest what makes the peak lowest."""
    ops = problem.buffers.graph.ops
    heavy = frozenset(
        tensor
        for position in problem.useful
        for tensor in problem.buffers.makes[problem.buffers.forward[position]]
        if ops[problem.buffers.forward[position]].heavy
    )
    return plan_memory(replace(problem, forced=problem.forced | heavy))
