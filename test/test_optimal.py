"""The exact planner against all 2^n selections, and what it proves beyond them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest
from hand_graphs import ZOO, chain, unet, view, without_results
from random_graphs import random_graph

from memory_saving_gradients.errors import MissingDependencyError
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.optimal import plan_optimal
from memory_saving_gradients.schedule import make_schedule
from memory_saving_gradients.simulate import simulate
from memory_saving_gradients.sweep import Sweep


def every_selection(problem: Problem) -> Iterator[tuple[int, float]]:
    """Peak and extra work of all selections, each one tensor from the one before."""
    candidates = problem.candidates
    sweep = Sweep(problem.buffers, problem.always_kept)
    yield sweep.peak_bytes, sweep.extra_seconds
    for number in range(1, 2 ** len(candidates)):
        sweep.toggle(candidates[(number & -number).bit_length() - 1])
        yield sweep.peak_bytes, sweep.extra_seconds


def assert_optimal(problem: Problem) -> None:
    """At the tightest budgets, at a middle one and at those that no plan meets."""
    found = list(every_selection(problem))
    peaks = sorted({peak for peak, _ in found})
    for budget in sorted({peaks[0], peaks[len(peaks) // 2], peaks[-1]} - {0}):
        least = min(extra for peak, extra in found if peak <= budget)
        once = plan_optimal(problem, budget)
        assert once.status == "optimal"
        assert once.extra_seconds == pytest.approx(least)
        assert once.gap_seconds == pytest.approx(0, abs=1e-6)
        assert once.kept is not None
        schedule = make_schedule(problem.buffers, once.kept)
        assert once.peak_bytes == simulate(problem.buffers, schedule).peak_bytes
        assert once.peak_bytes <= budget
        often = plan_optimal(problem, budget, runs="often")
        assert often.status == "optimal"
        assert often.peak_bytes <= budget
        assert often.lower_bound_seconds <= least + 1e-6
    if peaks[0] > 1:
        assert plan_optimal(problem, peaks[0] - 1).status == "infeasible"


@pytest.mark.parametrize("seed", range(60))
def test_optimum_over_all_selections_of_a_random_graph(seed: int):
    problem = Problem(view(random_graph(random.Random(seed), most_ops=7)))
    if len(problem.candidates) > 9:
        problem = problem.forcing(problem.candidates[9:])
    assert_optimal(problem)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_optimum_over_selections_of_a_named_graph(name: str):
    problem = Problem(view(ZOO[name]()))
    # What is forced and what is barred is no question for a planner.
    over = problem.candidates[8:]
    problem = Problem(view(ZOO[name]()), frozenset(over[::2]), frozenset(over[1::2]))
    assert_optimal(problem)


def test_chain_in_little_memory_needs_more_than_one_run():
    ten = Problem(view(without_results(chain(10))))
    assert plan_optimal(ten, 5).extra_seconds == 6
    assert plan_optimal(ten, 4).status == "infeasible"
    often = plan_optimal(ten, 4, runs="often")
    assert often.status == "optimal"
    assert often.kept is None
    assert often.peak_bytes == 4
    assert often.extra_seconds == 11
    copies = [step.op for step in often.steps if step.copy]
    assert len(copies) == 11
    assert len(set(copies)) < len(copies)


@pytest.mark.parametrize("length", range(2, 9))
def test_chain_in_least_memory_is_run_again_for_every_gradient(length: int):
    # The chain's result, a gradient and two buffers to step along: with no room for a
    # checkpoint the chain is run from its start for each gradient.
    problem = Problem(view(without_results(chain(length, in_place=False))))
    often = plan_optimal(problem, 4, runs="often")
    assert often.status == "optimal"
    assert often.extra_seconds == (length - 2) * (length - 1) / 2
    assert plan_optimal(problem, 3, runs="often").status == "infeasible"


def test_bound_holds_when_time_runs_out():
    problem = Problem(view(unet(6)))
    budget = problem.stock_peak_bytes * 6 // 10
    hasty = plan_optimal(problem, budget, time_limit_seconds=0.05)
    patient = plan_optimal(problem, budget)
    assert hasty.lower_bound_seconds <= patient.extra_seconds + 1e-6
    assert patient.lower_bound_seconds <= hasty.extra_seconds


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[optimal\]"):
        plan_optimal(Problem(view(chain(3))), 3)


@pytest.mark.parametrize("arguments", [(0, 1.0), (-3, 1.0), (3, 0.0)])
def test_budget_and_time_must_be_above_zero(arguments: tuple[int, float]):
    budget, seconds = arguments
    with pytest.raises(ValueError, match="above 0"):
        plan_optimal(Problem(view(chain(3))), budget, time_limit_seconds=seconds)
