"""Planners against brute force, and what they promise whatever the graph.

Brute force walks all kept subsets of the candidates in Gray code order (one toggle from
each to the next) and takes the best `score`, the measure that the planner itself uses.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hand_graphs import (
    ZOO,
    Builder,
    chain,
    normalised_chain,
    pinned_chain,
    residual_blocks,
    two_towers,
    unet,
    view,
)
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import random_graph, training_graphs

from memory_saving_gradients.graph import TrainingGraph
from memory_saving_gradients.planners import PLANNERS, Planner, Problem
from memory_saving_gradients.planners.cuts import (
    CutTable,
    candidate_cuts,
    cut_tables,
    least_kept,
    selection_at,
)
from memory_saving_gradients.planners.exchange import save_time
from memory_saving_gradients.planners.memory import lowest_peak, plan_memory
from memory_saving_gradients.planners.refine import score
from memory_saving_gradients.planners.speed import plan_speed
from memory_saving_gradients.schedule import Schedule, make_schedule
from memory_saving_gradients.simulate import simulate
from memory_saving_gradients.sweep import Sweep

planners = pytest.mark.parametrize("plan", PLANNERS.values(), ids=PLANNERS)

WORST_RATIO = 1.2
"""How far `memory` may be from the best score on a random graph of eight ops."""

MEAN_RATIO = 1.005
"""The same on the average of many."""


def problem_of(graph: TrainingGraph) -> Problem:
    return Problem(view(graph))


def scheduled(problem: Problem, kept: frozenset[int]) -> Schedule:
    buffers = problem.buffers
    return make_schedule(buffers, kept)


def peak(problem: Problem, kept: frozenset[int]) -> int:
    return simulate(problem.buffers, scheduled(problem, kept)).peak_bytes


def score_of(problem: Problem, kept: frozenset[int]) -> int:
    return score(Sweep(problem.buffers, kept))[0]


def selections(problem: Problem) -> Iterator[Sweep]:
    """Every selection in turn, as one sweep that changes."""
    sweep = Sweep(problem.buffers, problem.always_kept)
    yield sweep
    for number in range(1, 1 << len(problem.candidates)):
        lowest_bit = (number & -number).bit_length() - 1
        sweep.toggle(problem.candidates[lowest_bit])
        yield sweep


def best_score(problem: Problem) -> int:
    """The best score of all selections that beat stock, or that of stock's own."""
    everything = score_of(problem, problem.everything)
    return min(
        (
            score(sweep)[0]
            for sweep in selections(problem)
            if sweep.peak_bytes < problem.stock_peak_bytes
        ),
        default=everything,
    )


# -- promises --------------------------------------------------------------------------


def assert_promises(problem: Problem, kept: frozenset[int]) -> None:
    """What every automatic strategy promises."""
    schedule = scheduled(problem, kept)
    assert kept >= problem.always_kept
    copies = [step.op for step in schedule.steps if step.copy]
    assert len(copies) == len(set(copies))
    if copies:
        peak_bytes = simulate(problem.buffers, schedule).peak_bytes
        assert peak_bytes <= problem.stock_peak_bytes


@planners
@pytest.mark.parametrize("name", ZOO)
def test_promises_on_hand_made_graphs(plan: Planner, name: str):
    problem = problem_of(ZOO[name]())
    assert_promises(problem, plan(problem))


@planners
@given(graph=training_graphs())
def test_promises_on_random_graphs(plan: Planner, graph: TrainingGraph):
    problem = problem_of(graph)
    assert_promises(problem, plan(problem))


@planners
@given(graph=training_graphs(), seed=st.integers(0, 2**32 - 1))
def test_what_is_forced_is_kept(plan: Planner, graph: TrainingGraph, seed: int):
    problem = problem_of(graph)
    rng = random.Random(seed)
    forced = frozenset(t for t in problem.candidates if rng.random() < 0.3)
    forced_problem = replace(problem, forced=forced)
    assert forced <= plan(forced_problem)
    assert forced.isdisjoint(forced_problem.candidates)


@planners
def test_graph_with_nothing_to_keep(plan: Planner):
    """A chain of sums: no backward op reads a forward tensor."""
    b = Builder()
    x = last = b.source()
    for _ in range(5):
        last = b.join(last)
    problem = problem_of(b.differentiate(last, [x]))
    assert problem.candidates == []
    assert scheduled(problem, plan(problem)).recomputed == ()


@planners
def test_graph_without_a_backward_pass(plan: Planner):
    b = Builder()
    target = b.unary(b.source())
    assert plan(problem_of(b.finish((target,)))) == frozenset()


@planners
def test_one_huge_op_cannot_be_helped(plan: Planner):
    """Beside a tensor of ten thousand units all others are small, and stay."""
    problem = problem_of(chain([1, 1, 40_000]))
    assert problem.candidates == []
    assert problem.always_kept == {1, 2}
    assert scheduled(problem, plan(problem)).recomputed == ()


def test_plan_is_kept_when_asked_again():
    """Planning twice is planning once: no state, no clock."""
    for make in ZOO.values():
        assert plan_memory(problem_of(make())) == plan_memory(problem_of(make()))


@planners
@pytest.mark.parametrize("name", ZOO)
def test_selection_given_back_makes_the_same_schedule(plan: Planner, name: str):
    """What a schedule says it keeps is all that it needs to be told."""
    problem = problem_of(ZOO[name]())
    schedule = scheduled(problem, plan(problem))
    assert scheduled(problem, schedule.kept) == schedule


# -- memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 11))
def test_memory_is_optimal_on_short_chains(n: int):
    problem = problem_of(chain(n))
    assert score_of(problem, plan_memory(problem)) == best_score(problem)


@pytest.mark.parametrize("n", [10, 36, 100, 400])
def test_chain_of_n_needs_about_the_square_root_of_two_n(n: int):
    """Within two units: the target, and a gradient that is being made."""
    problem = problem_of(chain(n))
    lowest = peak(problem, plan_memory(problem))
    assert lowest <= math.sqrt(2 * n) + 2
    # Once recomputed, k units of room reach k(k+1)/2 ops and no more.
    assert lowest >= math.sqrt(2 * n) - 2


@pytest.mark.parametrize("length", range(2, 5))
def test_memory_is_near_brute_force_on_uneven_chains(length: int):
    ratios = []
    for sizes in itertools.product((1, 2, 3), repeat=length):
        problem = problem_of(chain(sizes))
        ratios.append(score_of(problem, plan_memory(problem)) / best_score(problem))
    assert max(ratios) <= WORST_RATIO
    assert statistics.mean(ratios) <= MEAN_RATIO


def test_memory_does_not_give_up_where_a_selection_beats_stock():
    """It did in one random graph out of forty, where no cut serves."""
    for seed in range(200):
        problem = problem_of(random_graph(random.Random(seed), 8))
        stock = problem.stock_peak_bytes
        if any(sweep.peak_bytes < stock for sweep in selections(problem)):
            kept = plan_memory(problem)
            assert Sweep(problem.buffers, kept).peak_bytes < stock


def test_memory_is_near_brute_force_on_random_graphs():
    ratios = []
    for seed in range(400):
        problem = problem_of(random_graph(random.Random(seed), 8))
        if len(problem.candidates) > 1:
            found = score_of(problem, plan_memory(problem))
            ratios.append(found / max(best_score(problem), 1))
    assert len(ratios) > 200
    assert max(ratios) <= WORST_RATIO
    assert statistics.mean(ratios) <= MEAN_RATIO


@pytest.mark.parametrize(
    ("graph", "at_most"),
    [
        (chain(100), 0.16),
        (unet(3), 0.75),
        (residual_blocks(4), 0.95),
        (residual_blocks(12, 0), 0.6),
        (two_towers(20, 30), 0.4),
        (pinned_chain(40), 0.5),
    ],
)
def test_memory_saves_on_graphs_with_and_without_bottlenecks(
    graph: TrainingGraph, at_most: float
):
    problem = problem_of(graph)
    assert peak(problem, plan_memory(problem)) <= at_most * problem.stock_peak_bytes


@planners
@pytest.mark.parametrize("name", ZOO)
def test_nothing_more_could_be_kept_for_free(plan: Planner, name: str):
    assert_no_slack(problem_of(ZOO[name]()), plan)


@planners
@given(graph=training_graphs())
def test_nothing_more_could_be_kept_for_free_at_random(
    plan: Planner, graph: TrainingGraph
):
    assert_no_slack(problem_of(graph), plan)


@given(graph=training_graphs())
def test_exchanges_win_time_and_raise_neither_peak(graph: TrainingGraph):
    problem = problem_of(graph)
    sweep = Sweep(problem.buffers, lowest_peak(problem))
    before = sweep.peak_bytes, sweep.peak_if_consumed, sweep.extra_seconds
    save_time(problem, sweep, sweep.work + problem.effort)
    assert sweep.peak_bytes <= before[0]
    assert sweep.peak_if_consumed <= before[1]
    assert sweep.extra_seconds <= before[2]
    assert sweep.kept >= problem.always_kept


def test_exchanges_win_time_on_random_graphs():
    rng = random.Random(0)
    before = after = 0.0
    for _ in range(40):
        graph = random_graph(rng, 30)
        ops = [replace(op, seconds=rng.choice([1.0, 10.0])) for op in graph.ops]
        problem = problem_of(replace(graph, ops=tuple(ops)))
        sweep = Sweep(problem.buffers, lowest_peak(problem))
        before += sweep.extra_seconds
        save_time(problem, sweep, sweep.work + problem.effort)
        after += sweep.extra_seconds
    assert after < 0.98 * before


@planners
@pytest.mark.parametrize("seed", [135, 543, 605])
def test_slack_that_opens_when_another_tensor_is_kept(plan: Planner, seed: int):
    """One round over the tensors left some that the keeping of later ones had freed."""
    assert_no_slack(problem_of(random_graph(random.Random(seed), 10)), plan)


def assert_no_slack(problem: Problem, plan: Planner) -> None:
    """Keeping one more either raises a peak or saves no time."""
    sweep = Sweep(problem.buffers, plan(problem))
    before = sweep.extra_seconds
    peaks = sweep.peak_bytes, sweep.peak_if_consumed
    for tensor in problem.candidates:
        if tensor in sweep.kept:
            continue
        sweep.toggle(tensor)
        raises = sweep.peak_bytes > peaks[0] or sweep.peak_if_consumed > peaks[1]
        assert raises or sweep.extra_seconds >= before
        sweep.toggle(tensor)


# -- speed -----------------------------------------------------------------------------


def assert_no_heavy_op_is_copied(graph: TrainingGraph) -> None:
    problem = problem_of(graph)
    schedule = scheduled(problem, plan_speed(problem))
    assert not any(graph.ops[op].heavy for op in schedule.recomputed)


@pytest.mark.parametrize("name", ZOO)
def test_speed_never_recomputes_a_heavy_op(name: str):
    assert_no_heavy_op_is_copied(ZOO[name]())


@given(training_graphs())
def test_speed_never_recomputes_a_heavy_op_at_random(graph: TrainingGraph):
    assert_no_heavy_op_is_copied(graph)


def test_speed_costs_no_more_time_than_memory():
    for graph in (unet(4), residual_blocks(4, 0), normalised_chain(6)):
        problem = problem_of(graph)
        memory, speed = (
            Sweep(problem.buffers, plan(problem)).extra_seconds
            for plan in (plan_memory, plan_speed)
        )
        assert speed <= memory


def test_speed_keeps_the_mask_and_not_the_draw():
    r"""Layers of dropout, of which y and the mask are read in the backward pass::

        seed ── draw (heavy, 4) ── mask (1) ──\
                                   x ───────── y = x · mask
    """
    b = Builder()
    y, seed = b.source(), b.source()
    masks, draws = [], []
    for _ in range(8):
        draws += b.add((seed,), (40,), heavy=True, seconds=9.0)
        masks += b.add((draws[-1],), (10,))
        y = b.dense(b.unary(y, 40), masks[-1], 40, heavy=False, seconds=1.0)
    graph = b.differentiate(y, [0])
    problem = problem_of(graph)
    schedule = scheduled(problem, plan_speed(problem))
    assert schedule.kept.issuperset(masks)
    assert schedule.kept.isdisjoint(draws)
    made_by = {graph.tensors[tensor].op for tensor in (*masks, *draws)}
    assert made_by.isdisjoint(schedule.recomputed)


# -- cuts ------------------------------------------------------------------------------


def random_table(rng: random.Random, count: int) -> CutTable:
    """Kept and local bytes at random, above the diagonal."""
    draw = np.random.default_rng(rng.randrange(2**32)).integers
    return CutTable(
        np.arange(count, dtype=np.int64),
        np.triu(draw(0, 10, (count, count)), 1),
        np.triu(draw(0, 30, (count, count)), 1),
    )


def bytes_kept(table: CutTable, chosen: tuple[int, ...], bound: int) -> int | None:
    """What these inner cuts keep, None if a segment's local peak exceeds the bound."""
    kept = 0
    for i, j in itertools.pairwise((0, *chosen, len(table.cuts) - 1)):
        if kept + table.local[i, j] > bound:
            return None
        kept += int(table.kept[i, j])
    return kept


@pytest.mark.parametrize("seed", range(40))
def test_least_kept_is_that_of_all_subsets_of_cuts(seed: int):
    rng = random.Random(seed)
    table = random_table(rng, rng.randint(2, 8))
    inner = range(1, len(table.cuts) - 1)
    for bound in range(0, 60, 4):
        found = [
            kept
            for size in range(len(inner) + 1)
            for chosen in itertools.combinations(inner, size)
            if (kept := bytes_kept(table, chosen, bound)) is not None
        ]
        chosen = least_kept(table, bound)
        if chosen is None:
            assert not found
        else:
            assert chosen == sorted(set(chosen))
            assert bytes_kept(table, tuple(chosen), bound) == min(found)


@given(training_graphs(30))
def test_candidate_cuts_go_from_start_to_end(graph: TrainingGraph):
    problem = problem_of(graph)
    if problem.candidates:
        cuts = candidate_cuts(problem)
        assert cuts[0] == 0
        assert cuts[-1] == len(problem.buffers.forward)
        assert (np.diff(cuts) > 0).all()


@given(training_graphs(30))
def test_tables_are_those_of_an_upper_triangle(graph: TrainingGraph):
    """Segments run forwards, and of two with the same end the longer keeps no less."""
    problem = problem_of(graph)
    for table in cut_tables(problem) if problem.candidates else ():
        for values in (table.kept, table.local):
            assert (values >= 0).all()
            assert (np.tril(values) == 0).all()
        starts = range(len(table.cuts) - 2)
        for i in starts:
            assert (table.kept[i, i + 2 :] >= table.kept[i + 1, i + 2 :]).all()


def test_boundary_of_a_cut_in_a_unet_is_a_set():
    """In the lowest level the cut crosses all skips."""
    problem = problem_of(unet(2))
    middle = len(problem.buffers.forward) // 2
    crossing = selection_at(problem, [middle]) - problem.always_kept
    assert len(crossing) >= 3


def test_long_graphs_are_thinned_out():
    problem = problem_of(chain(1000))
    cuts = candidate_cuts(problem)
    assert 100 < len(cuts) < 300
    assert np.diff(cuts).max() <= 10
