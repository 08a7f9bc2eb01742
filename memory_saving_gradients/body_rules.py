"""What becomes of loops, branches and called functions under a budget: the rules.

Their gradients are built before there is anything to plan with. So a budget has to
choose between a few rules, each for all bodies of a gradient, by trying them.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory_saving_gradients.every import SQRT, Every

__all__ = ["MEMORY", "RULES", "SPEED", "SPLIT", "STOCK", "BodyRule"]


@dataclass(frozen=True)
class BodyRule:
    """How bodies save memory, whatever the graph around them does.

    Attributes:
        mode: The automatic strategy inside; "" if they are left to stock.
        every: After how many iterations loops hold their state, None for each.
    """

    mode: str
    every: Every | None = None


STOCK = BodyRule("")
SPEED = BodyRule("speed")
MEMORY = BodyRule("memory")
SPLIT = BodyRule("memory", SQRT)

RULES = (STOCK, SPEED, MEMORY, SPLIT)
"""By rising work, as a rule."""
