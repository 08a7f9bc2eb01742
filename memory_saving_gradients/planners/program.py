"""A mixed-integer programme, collected row by row and solved by HiGHS through SciPy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.errors import MissingDependencyError

__all__ = ["Program", "Status"]

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_STATUS: Mapping[int, Status] = {0: "optimal", 1: "feasible", 2: "infeasible"}
"""What SciPy's numbers mean: done, out of time, no solution."""


class Program:
    """Minimise a sum over variables between bounds, under rows between bounds."""

    def __init__(self) -> None:
        self._low: list[float] = []
        self._high: list[float] = []
        self._whole: list[bool] = []
        self._cost: dict[int, float] = {}
        self._entries: tuple[list[float], list[int], list[int]] = ([], [], [])
        self._rows: list[tuple[float, float]] = []

    def variable(self, low: float = 0.0, high: float = 1.0, whole: bool = False) -> int:
        """Adds a variable and returns its number."""
        self._low.append(low)
        self._high.append(high)
        self._whole.append(whole)
        return len(self._low) - 1

    def row(
        self,
        terms: Iterable[tuple[int, float]],
        low: float = -np.inf,
        high: float = np.inf,
    ) -> None:
        """Demands that the sum of coefficient times variable is between bounds."""
        values, rows, columns = self._entries
        for variable, coefficient in terms:
            values.append(coefficient)
            rows.append(len(self._rows))
            columns.append(variable)
        self._rows.append((low, high))

    def pay(self, variable: int, cost: float) -> None:
        """Adds to what is minimised."""
        self._cost[variable] = self._cost.get(variable, 0.0) + cost

    def solved(
        self, time_limit_seconds: float
    ) -> tuple[Status, NDArray[np.float64] | None, float]:
        """The status, the best values found if any, and what no solution is below.

        Raises:
            MissingDependencyError: SciPy is not installed.
        """
        optimize, sparse = _scipy()
        cost = np.zeros(len(self._low))
        for variable, price in self._cost.items():
            cost[variable] = price
        values, rows, columns = self._entries
        shape = (len(self._rows), len(self._low))
        # Entries of one place add up.
        matrix = sparse.csc_array((values, (rows, columns)), shape=shape)
        bounds = np.array(self._rows)
        result = optimize.milp(
            cost,
            integrality=np.array(self._whole, np.int64),
            bounds=optimize.Bounds(np.array(self._low), np.array(self._high)),
            constraints=optimize.LinearConstraint(matrix, bounds[:, 0], bounds[:, 1]),
            options={"time_limit": time_limit_seconds, "mip_rel_gap": 0.0},
        )
        status = _STATUS.get(result.status, "unknown")
        if status == "infeasible":
            return status, None, float("inf")
        proven = getattr(result, "mip_dual_bound", None)
        proven = -np.inf if proven is None or np.isnan(proven) else float(proven)
        if result.x is None:
            return "unknown", None, proven
        return status, np.asarray(result.x, np.float64), proven


def _scipy() -> tuple[Any, Any]:
    """SciPy's `optimize` and `sparse`, which nothing else needs."""
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise MissingDependencyError(
            "`plan_optimal`: expected SciPy (1.9 or newer), whose solver finds the "
            f"optimum, but it cannot be imported: {error}. Install it with "
            "`pip install 'memory_saving_gradients[optimal]'` or `pip install scipy`."
        ) from error
    return optimize, sparse
