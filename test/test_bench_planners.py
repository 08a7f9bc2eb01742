"""The benchmark of planners says what is so, on graphs whose answers are known."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench_planners
import optimum_tables
from memory_saving_gradients.graph import check
from planning import rows_of
from published_graphs import training_graph
from small_graphs import chain, random_dag


def test_a_chain_in_three_segments():
    (row,) = rows_of(chain(9), ["uniform"], [100, 70, 10])
    assert row["extra_percent"][100] == 0
    # Nine activations and two gradients. With the third and the sixth kept and the last
    # three too, four are run again. Seven are alive when the last gradient is made.
    assert row["extra_percent"][70] == pytest.approx(100 * 4 / 10)
    assert row["peak_percent"][70] == pytest.approx(100 * 7 / 11, abs=1)
    assert row["extra_percent"][10] is None


def test_below_the_floor_some_ops_run_several_times():
    (row,) = rows_of(chain(24), ["budget"], [100, 60, 24, 4])
    # Up to the whole pass once more; then ops that run oftener; then nothing.
    assert row["extra_percent"][100] == 0 < row["extra_percent"][60] <= 100
    assert row["extra_percent"][24] > 100
    assert row["peak_percent"][24] <= 24
    assert row["extra_percent"][4] is None


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_are_training_graphs_and_no_two_alike(seed: int):
    published = random_dag(seed, 12)
    assert published == random_dag(seed, 12)
    assert published != random_dag(seed + 1, 12)
    check(training_graph(published))
    types = [op.type for op in training_graph(published).ops]
    assert types.count("Loss") == types.count("Seed") == 1


def test_misses_name_graph_budget_and_rival():
    def row(planner: str, *extra: float | None) -> dict:
        budgets = dict(zip((80, 60, 40), extra, strict=True))
        return {"graph": "g", "planner": planner, "extra_percent": budgets}

    rows = [
        row("(floor)", 5.0, 10.0, None),
        row("chen", 9.0, 9.9, 30.0),
        row("budget", 5.04, 10.0, None),
    ]
    assert bench_planners.misses(rows) == [
        "g at 60 %: 10.0, chen 9.9",
        "g at 40 %: none, chen 30.0",
    ]


def test_a_table_without_the_exact_planner(tmp_path: Path, capsys):
    graph = tmp_path / "tiny.txt"
    options = (
        '{"_input_indexes_to_retain":null,"_output_indexes_to_retain":[0],"rank":%d}'
    )
    blocks = [
        ["forward", "1 1", f"{t} _", str(t + 1), "ReLU", options % t] for t in range(4)
    ]
    tensors = ["0 8 0", *(f"{t} 8 _" for t in range(1, 5))]
    lines = ["5 4", *tensors, *(line for block in blocks for line in block)]
    graph.write_text("\n".join(lines), "utf-8")
    floors = tmp_path / "floors.json"
    floors.write_text('{"tiny": {"90": 12.5, "50": null}}', "utf-8")
    out = tmp_path / "figures.json"
    words = f"{tmp_path} --planners uniform --budgets 90,50 --floors {floors}"
    assert bench_planners.main([*words.split(), "--json", str(out)]) == 0
    table = capsys.readouterr().out
    assert "(floor)" in table and "12.5" in table and "uniform" in table
    assert '"planner": "uniform"' in out.read_text("utf-8")


def test_distance_to_the_optimum(capsys):
    words = "--optimal --planners uniform,kusumoto --chains 6 --random 2 --ops 6"
    assert bench_planners.main([*words.split(), "--budgets", "90,60"]) == 0
    table = capsys.readouterr().out
    assert "chain of 6" in table and "exact, often" in table
    assert "within 5 %" in table


def test_shares_count_what_is_as_good_as_the_optimum():
    def row(ours: float | None, best: float, roomy: bool = False) -> dict:
        exact = {"status": "optimal", "extra_percent": best}
        return {"planners": {"ours": ours}, "exact": {"once": exact}, "roomy": roomy}

    rows = [row(10.4, 10.0), row(12.0, 10.0), row(0.0, 0.0), row(None, 5.0, True)]
    (share,) = optimum_tables.shares(rows, ["ours"])
    assert share == {
        "planner": "ours",
        "proven": 4,
        "within": "50 %",
        "worst": 2.0,
        "none": 1,
        "none_roomy": 1,
    }
