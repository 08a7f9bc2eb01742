"""Plans on paper: minimum cuts against all selections, and the layer of GPT-3."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest
from hand_graphs import ZOO, view
from random_graphs import random_graph

import plan_gpt3_layer
from memory_saving_gradients.graph import check
from memory_saving_gradients.planners import Problem
from minimum_cut import filled, hull, measured, minimum_cut
from transformer_layer import Shape, build

TINY = Shape(length=8, batch=2, width=16, heads=2)


def assert_cuts_are_minimal(problem: Problem) -> None:
    """For several trades, against all selections."""
    every = [
        measured(problem, frozenset(kept))
        for count in range(len(problem.useful_tensors) + 1)
        for kept in combinations(problem.useful_tensors, count)
    ]
    for mu in (0.05, 0.3, 1.0, 2.5, 20.0):
        least = min(cut.kept_bytes + mu * cut.work for cut in every)
        found = minimum_cut(problem, mu)
        assert found.kept_bytes + mu * found.work == pytest.approx(least)
    points = {(cut.kept_bytes, cut.work) for cut in every}
    corners = hull(problem)
    assert {(cut.kept_bytes, cut.work) for cut in corners} <= points
    assert corners[0].work == min(cut.work for cut in every)
    assert corners[-1].kept_bytes == min(cut.kept_bytes for cut in every)


@pytest.mark.parametrize("seed", range(40))
def test_minimum_cut_of_a_random_graph(seed: int):
    assert_cuts_are_minimal(Problem(view(random_graph(random.Random(seed), 5))))


def test_filling_up_stays_within_its_limit_and_spares_work():
    problem = Problem(view(ZOO["residual blocks"]()))
    least = hull(problem)[-1]
    limit = least.kept_bytes + 3
    more = filled(problem, least, limit)
    assert least.kept_bytes < more.kept_bytes <= limit
    assert more.work < least.work


@pytest.mark.parametrize("stateful", [False, True])
def test_a_layer_is_a_training_graph_with_all_products_counted(stateful: bool):
    layer = build(Shape(8, 2, 16, 2, stateful=stateful))
    check(layer.graph)
    s, b, h = 8, 2, 16
    forward = layer.products[: layer.graph.forward_count]
    assert sum(forward) == 24 * b * s * h**2 + 4 * b * s**2 * h
    # Products have two gradients each.
    assert sum(layer.products) == 3 * sum(forward)


def test_what_is_kept_and_what_is_redone_fit_together():
    rows = plan_gpt3_layer.front(build(TINY), TINY, [22])
    kept, flops = ([row[name] for row in rows] for name in ("kept", "flops"))
    assert kept == sorted(kept, reverse=True)
    assert flops == sorted(flops)
    assert rows[0]["products"] == 0
    # The input alone, from which everything but the last product is made again.
    assert set(rows[-1]["held"]) >= {"input:0"}
    assert "narrow" not in rows[-1]["redone"]


def test_layer_of_gpt3_betters_selective_recomputation():
    layer = build(Shape())
    rows = plan_gpt3_layer.front(layer, Shape(), [22])
    best = plan_gpt3_layer.best_within(rows, 22)
    assert best is not None
    # In s·b·h bytes: input 2, query, key and value 6, context 2, the residual stream
    # between the two parts 2, and what GELU reads 8.
    assert best["kept"] <= 22
    assert best["redone"] == ["scores"]
    assert best["products"] == pytest.approx(1.351, abs=1e-3)
    assert best["flops"] <= 1.55
    selective = plan_gpt3_layer.SELECTIVE
    assert best["kept"] < selective["kept"] and best["flops"] < selective["products"]


def test_draws_that_cannot_be_repeated_keep_their_masks():
    layer = build(Shape(stateful=True))
    rows = plan_gpt3_layer.front(layer, Shape(), [])
    # One byte for each weight of the attention, a·s²·b, and for both other masks.
    assert rows[-1]["kept"] >= 96 * 2048 / 12288 + 2
    assert all(row["draws"] == 0 for row in rows)


def test_the_program_prints_and_draws(tmp_path: Path, capsys):
    words = "--length 8 --width 16 --heads 2 --kept 20,30 --out"
    assert plan_gpt3_layer.main([*words.split(), str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "products redone" in text and "In 20 s·b·h bytes" in text
    assert (tmp_path / "gpt3_layer.png").read_bytes()[:4] == b"\x89PNG"
