"""What becomes of loops, branches and called functions under a budget: the rules.

Their gradients are built before there is anything to plan with. So a budget has to
choose between a few rules, each for all bodies of a gradient, by trying them.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory_saving_gradients.every import SQRT, Every

__all__ = ["MEMORY", "RULES", "SPEED", "SPLIT", "STOCK", "BodyRule", "named"]


@dataclass(frozen=True)
class BodyRule:
    """How bodies save memory, whatever the graph around them does.

    Attributes:
        name: What saved plans call it.
        mode: The automatic strategy inside; "" if they are left to stock.
        every: After how many iterations loops hold their state, None for each.
    """

    name: str
    mode: str
    every: Every | None = None


STOCK = BodyRule("stock", "")
SPEED = BodyRule("speed", "speed")
MEMORY = BodyRule("memory", "memory")
SPLIT = BodyRule("split", "memory", SQRT)

RULES = (STOCK, SPEED, MEMORY, SPLIT)
"""By rising work, as a rule."""


def named(name: str) -> BodyRule | None:
    """The rule that a saved plan names, None if it names none."""
    return next((rule for rule in RULES if rule.name == name), None)
