"""The comparison with other ways sees wrong gradients, wrong state, and errors."""

from __future__ import annotations

import numpy as np

import bench_peers
from tables import table


def test_ours_trains_as_stock_does():
    words = "transformer --peers memory,recompute_grad --scale 0.1 --pairs 1 --runs 1"
    rows = bench_peers.bench("transformer", bench_peers.parse(words.split()))
    stock, memory, _ = sorted(rows, key=lambda row: row["peer"] != "stock")
    assert stock["peer"] == "stock"
    assert memory["peer"] == "memory"
    assert memory["difference"] == 0
    assert not memory["wrong"]
    assert memory["seeds"] == "as stock"
    assert not any(map(bench_peers.is_fault, rows))
    assert "recompute_grad" in table(bench_peers.COLUMNS, rows)


def test_a_second_update_of_statistics_is_seen():
    before, stock = [np.zeros(3), np.array([1, 2])], [np.full(3, 0.1), np.array([1, 3])]
    assert bench_peers._state(before, stock, stock) == {
        "statistics": "once",
        "seeds": "as stock",
    }
    again = [np.full(3, 0.199), np.array([1, 4])]
    assert bench_peers._state(before, stock, again) == {
        "statistics": "twice",
        "seeds": "drawn again",
    }
    # What no step moves says nothing.
    assert bench_peers._state(before, before, before) == {
        "statistics": None,
        "seeds": None,
    }


def test_faults_are_those_of_ours():
    row = {"peer": "memory", "wrong": False, "statistics": "once", "seeds": None}
    assert not bench_peers.is_fault(row)
    assert bench_peers.is_fault(row | {"wrong": True})
    assert bench_peers.is_fault(row | {"statistics": "twice"})
    assert bench_peers.is_fault({"peer": "speed", "error": "ValueError"})
    assert not bench_peers.is_fault({"peer": "recompute_grad", "error": "ValueError"})


def test_an_error_becomes_one_phrase():
    text = (
        "Exception encountered when calling Dense.call().\n\n\x1b[1mIt is so.\x1b[0m\nx"
    )
    assert bench_peers.phrase(ValueError(text)) == "ValueError: It is so."
    assert bench_peers.phrase(ValueError()) == "ValueError"
    long = bench_peers.phrase(ValueError("word " * 99))
    assert len(long) < 110
    assert long.endswith(" ...")
