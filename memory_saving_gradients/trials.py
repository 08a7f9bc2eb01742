"""Which rule for bodies serves a budget best: the same gradient under each of them.

What loops, branches and called functions hold is settled when their gradients are
built, and only then there is anything to plan with. So the gradient is looked at once
for each rule (`body_rules`), as if it had been built so:

1. Under the rule of stock, which also tells stock's peak, of which percentages are.
2. Under the others, by rising work inside. A rule whose bodies alone take as long as
   the best plan so far, all in all, is not looked at.

The best is the plan of least extra work within the budget. Since the rules of `memory`
and `speed` are among them, a budget that one of these keeps to is never refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memory_saving_gradients import op_types
from memory_saving_gradients.body_rules import MEMORY, RULES, SPEED, STOCK, BodyRule
from memory_saving_gradients.checkpoints import Auto, Budget, Checkpoints
from memory_saving_gradients.errors import BudgetError
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.rewire import plan_of
from memory_saving_gradients.study import Study

__all__ = ["Trials"]


class Trials:
    """One gradient, studied under several rules for what it has inside."""

    def __init__(
        self,
        study_under: Callable[[BodyRule], Study],
        rules: Sequence[BodyRule] = RULES,
    ) -> None:
        """
        Args:
            study_under: Looks at the gradient as it is under a rule.
            rules: Those that a budget may choose from, by rising work.
        """
        self._study_under = study_under
        self._rules = rules
        self._known: dict[BodyRule, Study] = {}

    @property
    def stock(self) -> Study:
        """The gradient as TensorFlow takes it."""
        return self.under(STOCK)

    def under(self, rule: BodyRule) -> Study:
        """The gradient under a rule; its stock is that of TensorFlow all the same."""
        if rule != STOCK and self._is_flat:
            return self.stock
        if rule not in self._known:
            study = self._study_under(rule)
            if rule != STOCK:
                study = replace(study, known=self.stock.stock)
            self._known[rule] = study
        return self._known[rule]

    def studies(self) -> list[Study]:
        """Those under all rules that a budget may choose from."""
        if self._is_flat:
            return [self.stock]
        return [self.under(rule) for rule in self._rules]

    @property
    def _is_flat(self) -> bool:
        """Whether there is nothing inside anything."""
        ops = self.stock.reading.ops
        return all(op.type not in op_types.CALL_TYPES for op in ops)

    def plan(self, checkpoints: Checkpoints, *, quietly: bool = False) -> Plan:
        """The plan that somebody would get.

        Args:
            checkpoints: What to keep.
            quietly: Whether nothing is logged.

        Raises:
            BudgetError: Nothing keeps to the budget.
        """
        if isinstance(checkpoints, Budget):
            study = self.under(self.rule_for(checkpoints))
            return plan_of(study, checkpoints, quietly=quietly)
        speed = isinstance(checkpoints, Auto) and checkpoints.mode == "speed"
        study = self.under(SPEED if speed else MEMORY)
        return plan_of(study, checkpoints, quietly=quietly)

    def rule_for(self, budget: Budget) -> BodyRule:
        """The rule under which a budget costs least; if none does, that of the lowest
        peak."""
        best: tuple[float, BodyRule] | None = None
        lowest: list[tuple[int, int, BodyRule]] = []
        for order, rule in enumerate(self._rules):
            study = self.under(rule)
            inside = sum(body.seconds_in_all for body in study.bodies)
            if best is not None and best[0] <= inside:
                break
            try:
                extra = plan_of(study, budget, quietly=True).extra_seconds
            except BudgetError as error:
                lowest.append((error.least_bytes, order, rule))
            else:
                if best is None or extra < best[0]:
                    best = extra, rule
        return best[1] if best is not None else min(lowest)[-1]
