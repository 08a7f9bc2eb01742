"""Choosing what is kept: one file a strategy, one signature, one table of names.

A planner looks at a `Problem` and returns the ids of the tensors that are kept. It
never raises for want of a bottleneck: where nothing can be saved it keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from memory_saving_gradients.planners.budget import plan_budget
from memory_saving_gradients.planners.memory import plan_memory
from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.speed import plan_speed

__all__ = ["PLANNERS", "Planner", "Problem", "plan_budget"]

Planner = Callable[[Problem], frozenset[int]]
"""What a strategy is: from a problem to the ids of the tensors that are kept."""

PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {"memory": plan_memory, "speed": plan_speed}
)
"""The automatic strategies by name."""
