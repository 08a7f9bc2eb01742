"""The exact planner: least extra time under a budget, with a proof, for small graphs.

The problem: how far from the best is a plan that a heuristic made? On small graphs a
mixed-integer programme answers that, as Checkmate showed (Jain et al. 2020, arXiv
1910.02653): one stage for each backward op, and variables for what is computed in a
stage and what is carried into it.

The model is that of `simulate`, not Checkmate's own, so that figures compare:

* The forward pass runs once, in the executor's order; backward ops run once, in the
  order that will be enforced. Only forward ops may be run again, in the backward pass,
  within a stage in forward order and before the stage's backward op.
* A step allocates while what it reads is alive; what no later step reads is freed; a
  kernel that works in place takes over an input of its size that dies; gradients live
  from their op to their last reader, results and targets to the end.

There are two versions of it:

* `once`: what a set of kept tensors can say. An op is run again at most once, in the
  first stage that needs it, and either its original or its copy serves the whole
  backward pass. The optimum over all 2^n selections.
* `often`: any op may be run again in any stage and dropped between stages. Its optimum
  is a lower bound for planners that recompute recursively.

Variables, for stage s, useful forward ops u and v (M: bytes):

1. `again[s, v]`: v is run again in stage s. `held[s, v]`: what v makes is carried into
   stage s; in stage 0, from the forward pass. Both binary.
2. A backward op or a copy in stage s reads v only if again[s, v] + held[s, v] ≥ 1, and
   held[s + 1, v] ≤ again[s, v] + held[s, v].
3. `dies[s, v, k]` in [0, 1]: step k of stage s is the last that reads v. At most
   again[s, k], 1 - held[s + 1, v], and 1 - again[s, j] for every later reader j.
4. Live bytes follow from these step by step and stay under the budget.
5. `once` only: held[0, v] + Σ again[·, v] ≤ 1, and again[s, v] ≤ the number of what
   reads v in stage s.

The least Σ seconds(v) · again[s, v] is found by HiGHS, through SciPy, which is needed
for this module only. The number of variables is stages times ops: seconds for 20 ops,
minutes for 60. A time limit gives the best plan so far and the bound proven by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from memory_saving_gradients.planners.problem import Problem
from memory_saving_gradients.planners.program import Status
from memory_saving_gradients.planners.stages import Runs, Stages
from memory_saving_gradients.schedule import Step, make_schedule
from memory_saving_gradients.simulate import simulate

__all__ = ["Optimum", "plan_optimal"]

_ATTEMPTS = 3
"""How often a budget is tightened by what rounding has overstepped."""


@dataclass(frozen=True)
class Optimum:
    """What the exact planner found and proved.

    Attributes:
        status: `optimal`: proven. `feasible`: a plan, and a bound below it, when time
            ran out. `infeasible`: proven that no plan fits. `unknown`: nothing yet.
        kept: Ids of the tensors that are kept, under the version `once`, else None.
        steps: The backward pass, copies included; empty without a plan.
        peak_bytes: Its simulated peak; 0 without a plan.
        extra_seconds: The work of its copies; infinite without a plan.
        lower_bound_seconds: No plan that fits has less extra work than this.
    """

    status: Status
    kept: frozenset[int] | None
    steps: tuple[Step, ...]
    peak_bytes: int
    extra_seconds: float
    lower_bound_seconds: float

    @property
    def gap_seconds(self) -> float:
        """How much better than this plan another could be."""
        return self.extra_seconds - self.lower_bound_seconds


def plan_optimal(
    problem: Problem,
    budget_bytes: int,
    *,
    runs: Runs = "once",
    time_limit_seconds: float = 60.0,
) -> Optimum:
    """Finds the plan of least extra work whose simulated peak fits.

    Args:
        problem: The planning problem; what it forces is kept, what it bars is not.
        budget_bytes: The most that may be alive at any step, above rest.
        runs: Which version of the model, see the module's docstring.
        time_limit_seconds: How long the solver may take. What it returns then depends
            on the machine.

    Returns:
        The plan, its cost and what is proven.

    Raises:
        MissingDependencyError: SciPy is not installed.
        ValueError: The budget or the time limit is not above 0.
    """
    if budget_bytes <= 0 or time_limit_seconds <= 0:
        raise ValueError(
            "`plan_optimal`: expected a budget and a time limit above 0, but got "
            f"{budget_bytes} bytes and {time_limit_seconds} seconds."
        )
    bound = 0.0
    limit = budget_bytes
    for _ in range(_ATTEMPTS):
        model = Stages(problem, limit, runs)
        status, values, proven = model.program.solved(time_limit_seconds)
        if limit == budget_bytes:
            bound = max(proven, 0.0)
        if values is None:
            return Optimum(status, None, (), 0, float("inf"), bound)
        steps = model.steps(values)
        kept = model.kept(values) if runs == "once" else None
        peak = _peak_bytes(problem, steps, kept)
        if peak <= budget_bytes:
            extra = sum(
                problem.buffers.graph.ops[s.op].seconds for s in steps if s.copy
            )
            sure = status == "optimal" and limit == budget_bytes
            return Optimum(
                "optimal" if sure else "feasible", kept, steps, peak, extra, bound
            )
        # Within the solver's tolerance but not within the budget.
        limit -= peak - budget_bytes
    return Optimum("unknown", None, (), 0, float("inf"), bound)


def _peak_bytes(
    problem: Problem, steps: tuple[Step, ...], kept: frozenset[int] | None
) -> int:
    """The simulated peak of a backward pass in which an op may run many times."""
    buffers = problem.buffers
    if kept is not None:
        return simulate(buffers, make_schedule(buffers, kept)).peak_bytes
    size = buffers.size
    newest: dict[int, int] = {}
    owner: list[int] = []
    reads: list[list[int]] = []
    makes: list[list[int]] = []
    everything = (*(Step(op) for op in buffers.forward), *steps)
    for step in everything:
        reads.append([newest[t] for t in buffers.reads[step.op]])
        made = buffers.makes[step.op]
        makes.append(list(range(len(owner), len(owner) + len(made))))
        owner.extend(made)
        for tensor, instance in zip(made, makes[-1], strict=True):
            if not step.copy or tensor not in problem.always_kept:
                newest[tensor] = instance
    last = {instance: index for index, made in enumerate(makes) for instance in made}
    for index, read in enumerate(reads):
        last.update(dict.fromkeys(read, index))
    for tensor in buffers.endless:
        if tensor in newest:
            last[newest[tensor]] = len(everything)
    live = peak = 0
    for index, step in enumerate(everything):
        allocated = sum(size[owner[i]] for i in makes[index])
        ending = [size[owner[i]] for i in reads[index] if last[i] == index]
        unread = sum(size[owner[i]] for i in makes[index] if last[i] == index)
        wanted = size[owner[makes[index][0]]] if makes[index] else 0
        taken = wanted in ending and buffers.graph.ops[step.op].in_place
        peak = max(peak, live + allocated - (wanted if taken else 0))
        live += allocated - sum(ending) - unread
    return peak
