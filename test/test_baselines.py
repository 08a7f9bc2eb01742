"""The baselines of the benchmark are what their papers say, seen on small graphs."""

from __future__ import annotations

import math

import pytest
from hand_graphs import ZOO, chain, unet, view

from baselines import BASELINES, best, chen, kusumoto, scored, uniform
from memory_saving_gradients.graph import TrainingGraph
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.schedule import make_schedule
from memory_saving_gradients.simulate import simulate


def problem(graph: TrainingGraph) -> Problem:
    return Problem(view(graph))


def test_uniform_segments_of_a_chain_are_equal():
    of_nine = problem(chain(9))
    plans = list(uniform(of_nine))
    positions = {
        t: of_nine.buffers.position[of_nine.buffers.graph.tensors[t].op] + 1
        for t in of_nine.useful_tensors
    }
    # What ends each of three segments; then also the whole last one.
    thirds = [sorted(positions[t] for t in kept) for kept in plans]
    assert [3, 6] in thirds
    assert [3, 6, 7, 8, 9] in thirds


def test_only_some_numbers_of_segments_may_be_asked_for():
    of_nine = problem(chain(9))
    assert set(uniform(of_nine, [3])) < set(uniform(of_nine))
    assert len(list(uniform(of_nine, [1, 3, 50]))) == 5  # one, and two each


def test_chens_greedy_cuts_when_more_than_its_budget_is_gathered():
    uneven = problem(chain([4, 1, 1, 4, 1, 1, 4, 1]))
    plans = {
        tuple(sorted(uneven.buffers.size[t] for t in kept)) for kept in chen(uneven)
    }
    # 5.x units: cut after 4 + 1 + 1, twice.
    assert (1, 1) in plans


def test_kusumotos_plans_stay_under_their_bound_on_a_chain():
    of_sixteen = problem(chain(16, in_place=False))
    plans = scored(of_sixteen, kusumoto(of_sixteen))
    # The square root, and what a step itself takes.
    assert min(plan.peak_bytes for plan in plans) <= 2 * math.isqrt(16) + 4


def test_lower_sets_serve_where_no_single_tensor_is_a_cut():
    u = problem(unet(4))
    plans = scored(u, kusumoto(u))
    assert min(plan.peak_bytes for plan in plans) < u.stock_peak_bytes


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("baseline", sorted(BASELINES))
def test_scores_are_the_simulators(name: str, baseline: str):
    asked = problem(ZOO[name]())
    for plan in scored(asked, BASELINES[baseline](asked)):
        schedule = make_schedule(asked.buffers, plan.kept)
        redone = sum(asked.buffers.graph.ops[op].seconds for op in schedule.recomputed)
        assert plan.extra_seconds == pytest.approx(redone)
        if redone:
            assert simulate(asked.buffers, schedule).peak_bytes == plan.peak_bytes


def test_best_is_the_least_work_that_fits():
    of_nine = problem(chain(9))
    plans = scored(of_nine, uniform(of_nine))
    assert best(plans, of_nine.stock_peak_bytes).extra_seconds == 0
    tight = best(plans, of_nine.stock_peak_bytes - 1)
    assert tight is not None and tight.extra_seconds > 0
    assert best(plans, 0) is None
