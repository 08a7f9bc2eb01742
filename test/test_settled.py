"""What is kept, or not, whatever a planner thinks of it."""

from __future__ import annotations

import pytest
from hand_graphs import Builder, view

from memory_saving_gradients.graph import Pin, TrainingGraph
from memory_saving_gradients.planners import PLANNERS, Problem
from memory_saving_gradients.planners.settled import (
    casts_of_what_rests,
    masks_of_draws,
)


def dropout(
    mask_bytes: int, pin: Pin | None = Pin.STATEFUL, readers: int = 1
) -> tuple[TrainingGraph, list[int]]:
    r"""Layers of dropout, of which y and the mask are read in the backward pass::

        seed ── draw (40) ── scaled (40) ── mask ──\
                                   x ───────── y = x · mask
    """
    b = Builder()
    y, seed = b.source(), b.source()
    masks = []
    for _ in range(4):
        draw = b.add((seed,), (40,), pin=pin)[0]
        scaled = b.add((draw,), (40,), in_place=True)[0]
        for _ in range(readers):
            mask = b.add((scaled,), (mask_bytes,))[0]
            y = b.dense(b.unary(y, 40), mask, 40, heavy=False, seconds=1.0)
        masks.append(mask)
    return b.differentiate(y, [0]), masks


def test_the_mask_of_a_draw_that_cannot_be_repeated_is_kept():
    graph, masks = dropout(mask_bytes=10)
    assert masks_of_draws(Problem(view(graph))) == set(masks)


@pytest.mark.parametrize(
    "other",
    [
        {"mask_bytes": 40},
        {"mask_bytes": 160},
        {"mask_bytes": 10, "pin": None},
        {"mask_bytes": 10, "readers": 2},
    ],
)
def test_no_mask_is_kept_that_saves_nothing(other: dict[str, int]):
    graph, _ = dropout(**other)
    assert masks_of_draws(Problem(view(graph))) == frozenset()


def cast_weights(source_rests: bool) -> tuple[TrainingGraph, list[int]]:
    """Dense layers whose weights are cast first, half as wide."""
    b = Builder()
    y = b.source()
    casts = []
    for _ in range(6):
        weight = b.source(20) if source_rests else b.unary(b.source(20), 20)
        casts.append(b.add((weight,), (10,), type="Cast", seconds=0.25)[0])
        y = b.unary(b.dense(y, casts[-1], 40), 40)
    return b.differentiate(y, [0]), casts


@pytest.mark.parametrize("name", PLANNERS)
def test_casts_of_variables_are_redone_under_every_strategy(name: str):
    graph, casts = cast_weights(source_rests=True)
    buffers = view(graph)
    barred = casts_of_what_rests(buffers)
    assert barred == set(casts)
    kept = PLANNERS[name](Problem(buffers, barred=barred))
    assert kept and kept.isdisjoint(casts)


def test_casts_of_what_was_computed_are_a_question_for_planners():
    graph, casts = cast_weights(source_rests=False)
    buffers = view(graph)
    assert casts_of_what_rests(buffers) == frozenset()
    assert set(casts) <= set(Problem(buffers).candidates)
