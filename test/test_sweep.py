"""`Sweep` gives at every moment what `simulate` gives from scratch."""

from __future__ import annotations

import random

import pytest
from hand_graphs import ZOO, chain, questionable, view, without_results
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import random_selection, training_graphs

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import TrainingGraph
from memory_saving_gradients.schedule import Schedule, copy_slots, make_schedule
from memory_saving_gradients.simulate import simulate
from memory_saving_gradients.sweep import Sweep

RNGS = st.builds(random.Random, st.integers(0, 2**32 - 1))
TOGGLES = 12


def profile(buffers: Buffers, schedule: Schedule) -> list[int]:
    """The highest live bytes of each forward position, then of each slot."""
    live = simulate(buffers, schedule).live_bytes
    count = len(buffers.forward)
    found = [*live[:count], *([0] * len(buffers.backward))]
    slot = count
    for step, during in zip(schedule.steps, live[count:], strict=True):
        found[slot] = max(found[slot], during)
        slot += not step.copy
    return found


def alive(buffers: Buffers, schedule: Schedule, place: int) -> tuple[list[int], list]:
    """Forward-made originals and copies that are alive at a place of the profile."""
    count = len(buffers.forward)
    copied = set(schedule.recomputed)
    born: dict[tuple[int, bool], int] = {}
    dies: dict[tuple[int, bool], int] = {}
    for position, op in enumerate(buffers.forward):
        born.update(((t, False), position) for t in buffers.makes[op])
        dies.update(((t, False), position) for t in buffers.makes[op])
        dies.update(((t, False), position) for t in buffers.reads[op])
    slot = count
    for step in schedule.steps:
        for tensor in buffers.reads[step.op]:
            if buffers.position[buffers.graph.tensors[tensor].op] >= 0:
                late = tensor not in schedule.kept
                late = late and buffers.graph.tensors[tensor].op in copied
                dies[tensor, late] = slot
        if step.copy:
            born.update(((t, True), slot) for t in buffers.makes[step.op])
            dies.update(((t, True), slot) for t in buffers.makes[step.op])
        slot += not step.copy
    dies.update(((t, False), len(buffers.graph.tensors) * 99) for t in buffers.endless)
    found = sorted(i for i in born if born[i] <= place <= dies[i])
    return [t for t, copy in found if not copy], [t for t, copy in found if copy]


def assert_same(sweep: Sweep, rng: random.Random) -> None:
    """Holds everything that a sweep says against a schedule made from scratch."""
    buffers = sweep.buffers
    schedule = make_schedule(buffers, sweep.kept)
    assert sweep.slots == copy_slots(buffers, sweep.kept)
    assert sweep.profile().tolist() == profile(buffers, schedule)
    assert sweep.peak_bytes == simulate(buffers, schedule).peak_bytes
    ops = buffers.graph.ops
    assert sweep.extra_seconds == sum(ops[op].seconds for op in schedule.recomputed)
    places = len(buffers.forward) + len(buffers.backward)
    for place in rng.sample(range(places), min(places, 4)):
        assert sweep.alive(place) == alive(buffers, schedule, place)


@given(training_graphs(), RNGS)
def test_agrees_with_simulate_after_every_toggle(
    graph: TrainingGraph, rng: random.Random
):
    buffers = view(graph)
    sweep = Sweep(buffers, random_selection(buffers, rng))
    assert_same(sweep, rng)
    choices = questionable(buffers)
    for tensor in rng.choices(choices, k=TOGGLES) if choices else ():
        sweep.toggle(tensor)
        assert_same(sweep, rng)


@pytest.mark.parametrize("name", ZOO)
def test_agrees_with_simulate_on_hand_made_graphs(name: str):
    rng = random.Random(name)
    buffers = view(ZOO[name]())
    sweep = Sweep(buffers, random_selection(buffers, rng))
    for tensor in rng.choices(questionable(buffers), k=3 * TOGGLES):
        sweep.toggle(tensor)
        assert_same(sweep, rng)


@given(training_graphs(), RNGS)
def test_changes_are_taken_back(graph: TrainingGraph, rng: random.Random):
    buffers = view(graph)
    sweep = Sweep(buffers, random_selection(buffers, rng))
    choices = questionable(buffers)
    before = []
    for tensor in rng.choices(choices, k=TOGGLES) if choices else ():
        state = set(sweep.kept), sweep.profile().tolist(), sweep.extra_seconds
        before.append((state, sweep.toggle(tensor)))
    for state, change in reversed(before):
        sweep.take_back(change)
        assert state == (sweep.kept, sweep.profile().tolist(), sweep.extra_seconds)
        assert_same(sweep, rng)


def test_toggle_there_and_back_changes_nothing():
    buffers = view(chain(20))
    sweep = Sweep(buffers, frozenset({5, 10, 15}))
    before = sweep.profile().tolist(), list(sweep.slots), set(sweep.kept)
    for tensor in range(1, 20):
        sweep.toggle(tensor)
        sweep.toggle(tensor)
        assert (sweep.profile().tolist(), sweep.slots, sweep.kept) == before


def test_selection_given_is_not_changed():
    kept = {5, 10}
    Sweep(view(chain(12)), kept).toggle(7)
    assert kept == {5, 10}


# -- gradients that are consumed at once -----------------------------------------------


def takes_over_a_result(buffers: Buffers) -> bool:
    """Whether a result is forward-made, or dies where an op could write into it."""
    graph = buffers.graph
    owners = {o for result in graph.results for o in buffers.behind(result)}
    return any(buffers.position[graph.tensors[t].op] >= 0 for t in owners) or any(
        graph.ops[op].in_place and owners.intersection(buffers.reads[op])
        for op in buffers.backward
    )


@given(training_graphs(), RNGS)
def test_consumed_gradients_against_a_graph_without_results(
    graph: TrainingGraph, rng: random.Random
):
    """Equal, but that a sweep never writes into a buffer that may be held."""
    buffers = view(graph)
    sweep = Sweep(buffers, random_selection(buffers, rng))
    others = view(without_results(graph))
    expected = profile(others, make_schedule(others, sweep.kept))
    found = sweep.profile_if_consumed().tolist()
    if takes_over_a_result(buffers):
        assert all(f >= e for f, e in zip(found, expected, strict=True))
    else:
        assert found == expected
    assert sweep.peak_if_consumed == max(found, default=0)
    assert sweep.peak_if_consumed <= sweep.peak_bytes


@pytest.mark.parametrize("name", ZOO)
def test_consumed_gradients_of_hand_made_graphs(name: str):
    graph = ZOO[name]()
    others = view(without_results(graph))
    kept = random_selection(view(graph), random.Random(name))
    schedule = make_schedule(others, kept)
    sweep = Sweep(view(graph), kept)
    assert sweep.peak_if_consumed == simulate(others, schedule).peak_bytes


def test_chain_with_one_gradient_consumes_nothing_early():
    sweep = Sweep(view(chain(9)), frozenset())
    assert sweep.peak_if_consumed == sweep.peak_bytes
