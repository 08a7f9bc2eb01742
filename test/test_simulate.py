"""Timelines that were worked out by hand, in units of one activation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hand_graphs import ZOO, Builder, chain, two_towers, view
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import random_selection, training_graphs

from memory_saving_gradients.graph import TrainingGraph
from memory_saving_gradients.schedule import Step, make_schedule
from memory_saving_gradients.simulate import (
    Alive,
    Timeline,
    simulate,
    simulate_stock,
)

RNGS = st.builds(random.Random, st.integers(0, 2**32 - 1))


def forward_bytes(b: Builder, *targets: int) -> tuple[int, ...]:
    """Live bytes over a forward pass with no backward pass after it."""
    return simulate_stock(view(b.finish(targets))).live_bytes


def rewired(graph: TrainingGraph, kept: frozenset[int]) -> Timeline:
    buffers = view(graph)
    return simulate(buffers, make_schedule(buffers, kept))


# -- chains ----------------------------------------------------------------------------


def test_stock_chain_of_three_by_hand():
    """t1 to t3 pile up, then the seed. Each gradient is written into the one before it;
    t3 is differentiated and stays, t2 and t1 die as their gradients have run."""
    timeline = simulate_stock(view(chain(3)))
    assert timeline.live_bytes == (1, 2, 3, 4, 4, 4, 3)
    assert timeline.peak_bytes == 4
    assert timeline.peak_step == 3
    assert timeline.seconds == 3 + 1 + 3


def test_stock_chain_of_three_with_nothing_in_place():
    """Two gradients stand side by side whenever one is made from the other."""
    timeline = simulate_stock(view(chain(3, in_place=False)))
    assert timeline.live_bytes == (1, 2, 3, 4, 5, 5, 4)


@pytest.mark.parametrize("n", [1, 2, 10, 100, 400])
def test_stock_chain_of_n_takes_one_more_unit(n: int):
    """An allocator measures 101 and 401 units of 1 MB for n = 100 and 400."""
    assert simulate_stock(view(chain(n))).peak_bytes == n + 1


@pytest.mark.parametrize("n", [2, 10, 100])
def test_everything_kept_is_as_stock(n: int):
    graph = chain(n)
    timeline = rewired(graph, frozenset(range(len(graph.tensors))))
    assert timeline == simulate_stock(view(graph))


def test_chain_of_six_with_one_kept_by_hand():
    r"""::

        op    1  2 [3] 4  5 [6]  seed g6   4' 5' g5 g4 g3   1' 2' g2 g1
        live  1  1  1  2  2  2   3    3    4  5  5  4  3    3  4  4  3

    The peak stands where the second segment has just been made again: t3 and t6, both
    copies, and the gradient.
    """
    graph = chain(6)
    timeline = rewired(graph, frozenset({3}))
    assert timeline.live_bytes == (1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5, 4, 3, 3, 4, 4, 3)
    assert timeline.steps[timeline.peak_step] == Step(5, copy=True)
    gradient = graph.backward_ops[1].outputs[0]
    assert timeline.at_peak == (
        Alive(3, copy=False),
        Alive(4, copy=True),
        Alive(5, copy=True),
        Alive(6, copy=False),
        Alive(gradient, copy=False),
    )
    assert timeline.seconds == 6 + 1 + 6 + 4


def test_chain_of_four_with_nothing_kept_by_hand():
    """All of it is made again for the second gradient, the target apart."""
    timeline = rewired(chain(4), frozenset())
    assert timeline.live_bytes == (1, 1, 1, 1, 2, 2, 3, 4, 5, 5, 4, 3)
    assert timeline.peak_bytes == 5


def test_alive_at_the_peak_largest_first():
    timeline = simulate_stock(view(chain([2, 7, 7, 1])))
    sizes = [2, 7, 7]
    assert [(a.tensor, a.copy) for a in timeline.at_peak[:2]] == [
        (2, False),
        (3, False),
    ]
    assert timeline.peak_bytes >= sum(sizes)


# -- the rules of the model ------------------------------------------------------------


def test_in_place_takes_over_a_dying_input():
    b = Builder()
    h = b.unary(b.source(), 4)
    b.unary(h, 4, in_place=True)
    assert forward_bytes(b) == (4, 4)


def test_not_in_place_stands_beside_its_input():
    b = Builder()
    h = b.unary(b.source(), 4)
    b.unary(h, 4, in_place=False)
    assert forward_bytes(b) == (4, 8)


def test_in_place_needs_the_same_size():
    b = Builder()
    h = b.unary(b.source(), 4)
    b.unary(h, 3, in_place=True)
    assert forward_bytes(b) == (4, 7)


def test_in_place_needs_an_input_that_dies():
    """The sum at the end still reads h."""
    b = Builder()
    h = b.unary(b.source(), 4)
    b.join(b.unary(h, 4, in_place=True), h, size=4)
    assert forward_bytes(b) == (4, 8, 12)


def test_in_place_takes_one_buffer_only():
    """Both inputs of the sum die; the result takes over one of them."""
    b = Builder()
    x = b.source()
    one, two = b.unary(x, 4), b.unary(x, 4)
    b.join(one, two, size=4, in_place=True)
    assert forward_bytes(b) == (4, 8, 8)


def test_in_place_never_writes_into_what_rests():
    b = Builder()
    b.unary(b.source(4), 4, in_place=True)
    assert forward_bytes(b) == (4,)


def test_in_place_never_writes_into_a_target():
    b = Builder()
    h = b.unary(b.source(), 4)
    b.unary(h, 4, in_place=True)
    assert forward_bytes(b, h) == (4, 8)


def test_in_place_serves_the_first_output():
    """A norm writes its result over its input and allocates two statistics."""
    b = Builder()
    h = b.unary(b.source(), 4)
    b.add((h,), (4, 1, 1), in_place=True)
    assert forward_bytes(b) == (4, 6)


def test_alias_holds_the_buffer_for_its_readers():
    r"""::

        h ══ reshaped ─────────── + (3)
        └─── a ────── b ──────────┘

    h's own last reader is a, but the sum reads the same buffer through the alias.
    """
    b = Builder()
    h = b.unary(b.source(), 5)
    reshaped = b.alias(h)
    last = b.join(b.join(h, size=1), size=1)
    total = b.join(last, reshaped, size=3)
    b.add((), (1,), control_inputs=(b.tensors[total].op,))
    assert forward_bytes(b)[-2:] == (5 + 1 + 3, 1)


def test_alias_takes_no_step():
    b = Builder()
    b.alias(b.unary(b.source(), 5))
    assert forward_bytes(b) == (5,)


def test_alias_of_a_target_keeps_it_to_the_end():
    b = Builder()
    target = b.alias(b.unary(b.source(), 5))
    b.unary(b.source(), 1)
    assert max(forward_bytes(b, target)) == 6


def test_unread_output_is_there_for_its_step_only():
    b = Builder()
    b.add((b.source(),), (2, 9))
    b.add((b.tensors[1].id,), (1,))
    assert forward_bytes(b) == (11, 3)


def test_resting_tensors_are_above_no_rest():
    b = Builder()
    b.dense(b.source(1000), b.source(1000), 1)
    assert forward_bytes(b) == (1,)


def test_reading_a_shape_holds_nothing():
    b = Builder()
    h = b.unary(b.source(), 8)
    b.add((h,), (1,), metadata_only=True)
    assert max(forward_bytes(b)) == 8


def test_copy_of_an_op_of_two_outputs_makes_both_again():
    """The kept one is made again and dropped at once; readers read the original."""
    b = Builder()
    x = b.source()
    kept, dropped = b.add((x,), (3, 5))
    b.saves[b.tensors[kept].op] = (kept, dropped)
    top = b.join(kept, size=1)
    graph = b.differentiate(top, [x])
    timeline = rewired(graph, frozenset({kept}))
    copy = timeline.steps.index(Step(b.tensors[kept].op, copy=True))
    # kept, the target and its gradient, the latter's gradient; then both copies.
    before = timeline.live_bytes[copy] - 8
    assert before == 3 + 1 + 3
    # Beside the dropped one's copy and kept: one unit of result.
    assert timeline.live_bytes[copy + 1] == before + 5 + 1


def test_gradients_stay_to_the_end():
    """Two towers end with both results, and the sum that was differentiated."""
    timeline = simulate_stock(view(two_towers(3, 3)))
    assert timeline.live_bytes[-1] >= 3


def test_empty_graph_has_no_peak():
    timeline = simulate_stock(view(TrainingGraph((), (), 0)))
    assert timeline == Timeline((), (), (), 0.0)
    assert timeline.peak_bytes == 0
    assert timeline.peak_step == -1


# -- any graph -------------------------------------------------------------------------


def assert_peak_is_accounted_for(graph: TrainingGraph, timeline: Timeline) -> None:
    """The buffers alive at the peak add up to it, but for one that is taken over."""
    if not timeline.steps:
        return
    buffers = view(graph)
    total = sum(buffers.size[alive.tensor] for alive in timeline.at_peak)
    step = timeline.steps[timeline.peak_step]
    spared = buffers.size[buffers.makes[step.op][0]]
    expected = {timeline.peak_bytes}
    if graph.ops[step.op].in_place:
        expected.add(timeline.peak_bytes + spared)
    assert total in expected
    assert len(set(timeline.at_peak)) == len(timeline.at_peak)


@given(training_graphs(), RNGS)
def test_peak_is_accounted_for(graph: TrainingGraph, rng: random.Random):
    kept = random_selection(view(graph), rng)
    assert_peak_is_accounted_for(graph, rewired(graph, kept))
    assert_peak_is_accounted_for(graph, simulate_stock(view(graph)))


@given(training_graphs(), RNGS)
def test_extra_seconds_are_those_of_the_copies(
    graph: TrainingGraph, rng: random.Random
):
    buffers = view(graph)
    schedule = make_schedule(buffers, random_selection(buffers, rng))
    extra = sum(graph.ops[op].seconds for op in schedule.recomputed)
    timeline = simulate(buffers, schedule)
    assert timeline.seconds - simulate_stock(buffers).seconds == extra


@pytest.mark.parametrize("name", ZOO)
def test_bytes_scale(name: str):
    """Ten times the bytes, ten times the profile."""
    graph = ZOO[name]()
    larger = replace(
        graph, tensors=tuple(replace(t, bytes=10 * t.bytes) for t in graph.tensors)
    )
    kept = random_selection(view(graph), random.Random(1))
    assert rewired(larger, kept).live_bytes == tuple(
        10 * live for live in rewired(graph, kept).live_bytes
    )
