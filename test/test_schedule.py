"""Certificates for schedules: on any graph, whatever is kept, the result can run."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import networkx as nx
import pytest
from hand_graphs import ZOO, chain, questionable, seeds_of, two_towers, view
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import random_selection, training_graphs

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import Storage, TrainingGraph
from memory_saving_gradients.order import backward_order
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.memory import plan_memory
from memory_saving_gradients.schedule import (
    NEVER,
    Schedule,
    Step,
    copy_slots,
    least_significant,
    make_schedule,
    tied,
)
from memory_saving_gradients.simulate import simulate, simulate_stock

RNGS = st.builds(random.Random, st.integers(0, 2**32 - 1))


def scheduled(
    graph: TrainingGraph, rng: random.Random, significant_bytes: int = 0
) -> tuple[Buffers, Schedule, frozenset[int]]:
    """A graph's schedule under a random selection, and that selection."""
    buffers = view(graph)
    kept = random_selection(buffers, rng)
    schedule = make_schedule(buffers, kept)
    schedule = tied(buffers, schedule, seeds_of(graph), significant_bytes)
    return buffers, schedule, kept


# -- certificates ----------------------------------------------------------------------


def assert_every_op_once(buffers: Buffers, schedule: Schedule) -> None:
    """Each backward op that allocates once, each copy once, pinned ops never."""
    graph = buffers.graph
    runs = Counter(schedule.steps)
    assert set(runs.values()) <= {1}
    assert sorted(step.op for step in schedule.steps if not step.copy) == [
        op.id for op in graph.backward_ops if buffers.makes[op.id]
    ]
    for op in schedule.recomputed:
        assert op < graph.forward_count
        assert buffers.makes[op]
        assert graph.ops[op].pin is None


def sources(buffers: Buffers, schedule: Schedule, step: Step) -> dict[int, Step | None]:
    """For each buffer that a step reads who makes it, None for an original."""
    graph = buffers.graph
    copied = set(schedule.recomputed)
    found: dict[int, Step | None] = {}
    for tensor in buffers.reads[step.op]:
        maker = graph.tensors[tensor].op
        if maker >= graph.forward_count:
            found[tensor] = Step(maker)
        elif maker in copied and tensor not in schedule.kept:
            found[tensor] = Step(maker, copy=True)
        else:
            found[tensor] = None
    return found


def assert_all_there_when_read(
    buffers: Buffers, schedule: Schedule, kept: frozenset[int]
) -> None:
    """A step reads what an earlier step made, or an original that is declared held."""
    place = {step: index for index, step in enumerate(schedule.steps)}
    for index, step in enumerate(schedule.steps):
        for tensor, source in sources(buffers, schedule, step).items():
            if source is not None:
                assert place[source] < index
            else:
                assert tensor in schedule.kept
    for tensor in schedule.kept:
        op = buffers.graph.ops[buffers.graph.tensors[tensor].op]
        assert op.pin is not None or tensor in kept | buffers.endless


def assert_no_cycle(buffers: Buffers, schedule: Schedule) -> None:
    """Data, control and order edges and ties together, aliases included."""
    graph = buffers.graph
    rewired = nx.DiGraph()
    for op in graph.ops:
        rewired.add_edges_from(
            (Step(graph.tensors[t].op), Step(op.id)) for t in op.inputs
        )
        rewired.add_edges_from(
            (Step(other), Step(op.id)) for other in op.control_inputs
        )
    for step in schedule.steps:
        for source in sources(buffers, schedule, step).values():
            if source is not None:
                rewired.add_edge(source, step)
        if step.copy:
            # A copy keeps the control inputs of its original.
            for other in graph.ops[step.op].control_inputs:
                rewired.add_edge(Step(other), step)
    rewired.add_edges_from(pairwise(schedule.steps))
    for waiting, awaited in schedule.ties:
        assert awaited < waiting
        rewired.add_edge(schedule.steps[awaited], schedule.steps[waiting])
    assert nx.is_directed_acyclic_graph(rewired)


def assert_tied_down(
    buffers: Buffers, schedule: Schedule, significant_bytes: int
) -> None:
    """On each device the significant steps can run in no other order."""
    graph, steps = buffers.graph, schedule.steps
    seeds = seeds_of(graph)
    ties = set(schedule.ties)
    assert len(ties) == len(schedule.ties)
    by_device: dict[str, list[int]] = {}
    in_ties = {end for tie in ties for end in tie}
    for index, step in enumerate(steps):
        op = graph.ops[step.op]
        touched = (*buffers.reads[op.id], *buffers.makes[op.id])
        biggest = max((buffers.size[t] for t in touched), default=0)
        if not op.free_order:
            assert index not in in_ties
        elif op.type == "BiasAddGrad":
            assert_waits_like_its_filter(buffers, schedule, index)
        elif step.op not in seeds and (step.copy or biggest >= significant_bytes):
            by_device.setdefault(op.device, []).append(index)
    start = max((i for i, step in enumerate(steps) if step.op in seeds), default=None)
    for places in by_device.values():
        begun = [start] if start is not None and start < places[0] else []
        for before, after in pairwise([*begun, *places]):
            read = sources(buffers, schedule, steps[after]).values()
            assert (after, before) in ties or steps[before] in read


def assert_waits_like_its_filter(
    buffers: Buffers, schedule: Schedule, index: int
) -> None:
    """A bias's gradient, which a kernel may merge with the filter's: nobody waits for
    it, and it waits for what the filter's gradient waits for."""
    ops = buffers.graph.ops
    (gradient,) = ops[schedule.steps[index].op].inputs
    partner = next(
        place
        for place, step in enumerate(schedule.steps)
        if ops[step.op].type == "Conv2DBackpropFilter"
        and ops[step.op].inputs[2] == gradient
    )
    waits = {
        a: {b for other, b in schedule.ties if other == a} for a in (partner, index)
    }
    assert waits[index] == waits[partner]
    assert index not in {b for _, b in schedule.ties}


def assert_legal(
    buffers: Buffers,
    schedule: Schedule,
    kept: frozenset[int],
    significant_bytes: int = 0,
) -> None:
    assert_every_op_once(buffers, schedule)
    assert_all_there_when_read(buffers, schedule, kept)
    assert_no_cycle(buffers, schedule)
    assert_tied_down(buffers, schedule, significant_bytes)


@given(training_graphs(), RNGS, st.sampled_from([0, 2, 5]))
def test_schedules_of_random_graphs_are_legal(
    graph: TrainingGraph, rng: random.Random, significant_bytes: int
):
    buffers, schedule, kept = scheduled(graph, rng, significant_bytes)
    assert_legal(buffers, schedule, kept, significant_bytes)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("seed", range(5))
def test_schedules_of_hand_made_graphs_are_legal(name: str, seed: int):
    buffers, schedule, kept = scheduled(ZOO[name](), random.Random(seed))
    assert_legal(buffers, schedule, kept)


@given(training_graphs())
def test_kept_everything_recomputes_nothing(graph: TrainingGraph):
    buffers = view(graph)
    schedule = make_schedule(buffers, frozenset(questionable(buffers)))
    assert schedule.recomputed == ()
    assert [step.op for step in schedule.steps] == buffers.backward


@given(training_graphs())
def test_kept_nothing_recomputes_all_that_is_wanted_and_may_be(graph: TrainingGraph):
    """Walking back from the residuals over what is neither pinned nor held."""
    buffers = view(graph)
    wanted = set(buffers.residuals)
    expected = []
    for op in reversed(buffers.forward):
        makes = wanted.intersection(buffers.makes[op]) - buffers.endless
        if makes and graph.ops[op].pin is None:
            expected.append(op)
            wanted.update(buffers.reads[op])
    assert make_schedule(buffers, frozenset()).recomputed == tuple(sorted(expected))


@given(training_graphs(), RNGS)
def test_copies_run_as_late_as_they_can(graph: TrainingGraph, rng: random.Random):
    """Between a copy and its first reader stand only copies for the same gradient."""
    buffers, schedule, _ = scheduled(graph, rng)
    steps = schedule.steps
    for index, step in enumerate(steps):
        if not step.copy:
            continue
        following = next(s for s in steps[index:] if not s.copy)
        first = min(
            i
            for i, reader in enumerate(steps)
            if step in sources(buffers, schedule, reader).values()
        )
        assert first <= steps.index(following)


# -- order of the backward ops ---------------------------------------------------------


@given(training_graphs())
def test_backward_order_is_topological_and_complete(graph: TrainingGraph):
    order = backward_order(graph, seeds_of(graph))
    assert sorted(order) == [op.id for op in graph.backward_ops]
    place = {op: index for index, op in enumerate(order)}
    for op in graph.backward_ops:
        for before in (*(graph.tensors[t].op for t in op.inputs), *op.control_inputs):
            assert place.get(before, -1) < place[op.id]


def test_latest_layer_first():
    """Of two towers, the one whose ops come later is finished before the other."""
    graph = two_towers(3, 3)
    names = [graph.ops[op].name for op in backward_order(graph, seeds_of(graph))]
    grads = [name for name in names if name.startswith("op")]
    numbers = [int(name.removeprefix("op").removesuffix("_grad")) for name in grads]
    assert numbers == sorted(numbers, reverse=True)


# -- a chain, by hand ------------------------------------------------------------------


def test_chain_is_recomputed_by_segments():
    r"""::

        t1  t2 [t3] t4  t5 [t6]  (t6: target)     [kept]

    t4 and t5 are made again for t5's gradient, from t3; t1 and t2 for t2's.
    """
    graph = chain(6)
    buffers = view(graph)
    schedule = make_schedule(buffers, frozenset({3}))
    schedule = tied(buffers, schedule, seeds_of(graph))
    spelled = [
        ("copy " if step.copy else "") + graph.ops[step.op].name
        for step in schedule.steps
    ]
    assert spelled == [
        "seed",
        "op6_grad",
        "copy op4",
        "copy op5",
        "op5_grad",
        "op4_grad",
        "op3_grad",
        "copy op1",
        "copy op2",
        "op2_grad",
        "op1_grad",
    ]
    assert schedule.kept == {3, 6}
    assert schedule.recomputed == (1, 2, 4, 5)
    # Each waits for the one before, even if it reads from it.
    assert schedule.ties == tuple((n, n - 1) for n in range(1, len(spelled)))


def test_chain_of_copies_has_slots_of_their_first_reader():
    """Slot 0 is the seed, slot 1 + i the gradient of op 6 - i."""
    slots = copy_slots(view(chain(6)), frozenset({3, 6}))
    assert slots == [5, 5, NEVER, 2, 2, NEVER]


def test_towers_on_two_devices_are_tied_each_for_itself():
    graph = two_towers(4, 4)
    buffers = view(graph)
    schedule = make_schedule(buffers, frozenset())
    schedule = tied(buffers, schedule, seeds_of(graph))
    device = [graph.ops[step.op].device for step in schedule.steps]
    start = next(i for i, s in enumerate(schedule.steps) if s.op in seeds_of(graph))
    crossing = [
        (waiting, awaited)
        for waiting, awaited in schedule.ties
        if device[waiting] != device[awaited] and awaited != start
    ]
    # Only a copy waits for another device, and only for a gradient.
    assert all(schedule.steps[waiting].copy for waiting, _ in crossing)
    assert not any(schedule.steps[awaited].copy for _, awaited in crossing)
    assert {device[waiting] for waiting, _ in crossing} == {"/gpu:1"}


def test_small_steps_run_when_they_like():
    graph = chain([10_000, 1, 1, 10_000, 1])
    buffers = view(graph)
    kept = frozenset(questionable(buffers))
    schedule = make_schedule(buffers, kept)
    schedule = tied(buffers, schedule, seeds_of(graph), 5000)
    names = {graph.ops[schedule.steps[i].op].name for tie in schedule.ties for i in tie}
    assert names <= {"seed", "op4_grad", "op1_grad", "op5_grad", "op2_grad"}
    assert "op3_grad" not in names


def test_many_small_buffers_are_as_significant_as_a_large_one():
    few, many = (view(chain([100_000, *([40] * n)])) for n in (20, 2000))
    assert least_significant(few, 200_000) == 41
    assert least_significant(many, 200_000) == 0


def test_nothing_that_fills_the_peak_of_a_deep_chain_is_small():
    # Each tensor is one of four thousand, but the plan's peak is not the sum.
    buffers = view(chain([40] * 4000))
    schedule = make_schedule(buffers, plan_memory(Problem(buffers)))
    peak = simulate(buffers, schedule).peak_bytes
    assert peak < simulate_stock(buffers).peak_bytes / 20
    assert least_significant(buffers, peak) == 0


# -- what must make no difference ------------------------------------------------------


def renamed(graph: TrainingGraph) -> TrainingGraph:
    """Other names, and devices under other names."""
    count = len(graph.ops)
    return replace(
        graph,
        ops=tuple(
            replace(op, name=f"z{count - op.id}", device=op.device[::-1])
            if op.name != "seed"
            else replace(op, device=op.device[::-1])
            for op in graph.ops
        ),
        tensors=tuple(replace(t, name=f"y{count - t.id}") for t in graph.tensors),
    )


def renumbered(
    graph: TrainingGraph, rng: random.Random
) -> tuple[TrainingGraph, list[int]]:
    """The same ops in order, other ids for the tensors; and old id → new id."""
    new = list(range(len(graph.tensors)))
    rng.shuffle(new)

    def moved(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[t] for t in ids)

    tensors = [
        replace(t, id=new[t.id], source=None if t.source is None else new[t.source])
        for t in graph.tensors
    ]
    return (
        replace(
            graph,
            ops=tuple(
                replace(op, inputs=moved(op.inputs), outputs=moved(op.outputs))
                for op in graph.ops
            ),
            tensors=tuple(sorted(tensors, key=lambda t: t.id)),
            targets=moved(graph.targets),
            results=moved(graph.results),
        ),
        new,
    )


@given(training_graphs(), RNGS)
def test_names_make_no_difference(graph: TrainingGraph, rng: random.Random):
    state = rng.getstate()
    _, schedule, _ = scheduled(graph, rng)
    rng.setstate(state)
    assert scheduled(renamed(graph), rng)[1] == schedule


@given(training_graphs(), RNGS)
def test_tensor_ids_make_no_difference(graph: TrainingGraph, rng: random.Random):
    _, schedule, kept = scheduled(graph, rng)
    other, new = renumbered(graph, rng)
    buffers = view(other)
    moved = make_schedule(buffers, frozenset(new[t] for t in kept))
    moved = tied(buffers, moved, seeds_of(other))
    assert moved.steps == schedule.steps
    assert set(moved.ties) == set(schedule.ties)
    assert moved.kept == {new[t] for t in schedule.kept}


def test_pinned_and_resting_need_not_be_listed():
    graph = ZOO["pinned chain"]()
    buffers = view(graph)
    pinned = frozenset(
        t.id
        for t in graph.tensors
        if t.storage is Storage.OWN and graph.ops[t.op].pin is not None
    )
    assert pinned
    assert make_schedule(buffers, pinned) == make_schedule(buffers, frozenset())


_PLANNING = """
import random, sys, types
home, here = sys.argv[1:]
# The pure layers without the package's __init__, which needs TensorFlow.
package = types.ModuleType("memory_saving_gradients")
package.__path__ = [home]
sys.modules["memory_saving_gradients"] = package
sys.path.insert(0, here)
from hand_graphs import ZOO, seeds_of, view
from random_graphs import random_graph
from memory_saving_gradients.planners import PLANNERS, Problem
from memory_saving_gradients.schedule import make_schedule, tied
graphs = [make() for make in ZOO.values()]
graphs += [random_graph(random.Random(seed)) for seed in range(30)]
for graph in graphs:
    buffers = view(graph)
    for name, plan in PLANNERS.items():
        kept = plan(Problem(buffers))
        schedule = tied(buffers, make_schedule(buffers, kept), seeds_of(graph))
        print(name, sorted(kept), schedule.steps, schedule.ties)
assert "tensorflow" not in sys.modules
"""


def test_same_plan_in_every_process():
    """Hashes of strings differ from process to process; plans must not."""
    spec = importlib.util.find_spec("memory_saving_gradients")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    here = Path(__file__).resolve().parent
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _PLANNING, str(package), str(here)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    (first, errors), (second, _) = (run.communicate() for run in runs)
    assert first, errors
    assert first == second
