"""Models and readings for the tests that ask whether the saving is real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import memory_saving_gradients as msg

__all__ = [
    "ancestors",
    "dense_layers",
    "differentiate",
    "gather_copies",
    "matmuls_in",
    "planned",
    "python",
    "recording",
    "weights_of",
]

v1 = tf.compat.v1

MATMULS = ("MatMul", "_FusedMatMul", "_MklMatMul", "_MklFusedMatMul")


def weights_of(count: int, width: int) -> list[tf.Variable]:
    """Square matrices that neither let a signal die nor blow it up."""
    return [
        tf.Variable(tf.random.stateless_normal([width, width], [index, 7]) / width**0.5)
        for index in range(count)
    ]


def dense_layers(y: tf.Tensor, weights: Sequence[Any]) -> tf.Tensor:
    """A layer for each weight: tanh(y w)."""
    for weight in weights:
        y = tf.tanh(y @ weight)
    return y


def differentiate(mode: Any, ys: Any, xs: Any) -> list[Any]:
    """Stock's gradients for "stock", the library's for anything else."""
    if mode == "stock":
        return tf.gradients(ys, xs)
    return msg.gradients(ys, xs, checkpoints=mode)


def recording(mode: Any) -> tf.GradientTape:
    """Stock's tape for "stock", the library's for anything else."""
    return tf.GradientTape() if mode == "stock" else msg.GradientTape(checkpoints=mode)


def planned(op_type: str) -> int:
    """How many ops of a type the newest plan recomputes."""
    plan = msg.last_plan()
    assert plan is not None
    ops = plan.reading.graph.ops
    return Counter(ops[op].type for op in plan.schedule.recomputed)[op_type]


def matmuls_in(graph_defs: Sequence[Any]) -> int:
    """Matrix products, fused or not, in graphs after optimisation."""
    return sum(node.op in MATMULS for graph in graph_defs for node in graph.node)


def gather_copies(plan: msg.Plan, graph: tf.Graph) -> dict[int, tf.Operation]:
    """The copy of each recomputed op, by its id in the plan."""
    return {
        op: graph.get_operation_by_name(f"recompute/{plan.reading.ops[op].name}")
        for op in plan.schedule.recomputed
    }


def ancestors(graph: tf.Graph) -> Callable[[tf.Operation, tf.Operation], bool]:
    """A test whether one op must run before another, through data or control edges."""
    ops = graph.get_operations()
    place = {op.name: number for number, op in enumerate(ops)}
    before = [
        [place[t.op.name] for t in op.inputs]
        + [place[other.name] for other in op.control_inputs]
        for op in ops
    ]
    known: list[int | None] = [None] * len(ops)
    for start in range(len(ops)):
        stack = [start]
        while stack:
            top = stack[-1]
            missing = [other for other in before[top] if known[other] is None]
            if known[top] is not None or not missing:
                stack.pop()
                reach = 0
                for other in before[top]:
                    reach |= (known[other] or 0) | (1 << other)
                known[top] = reach
            else:
                stack.extend(missing)

    def runs_before(first: tf.Operation, second: tf.Operation) -> bool:
        reach = known[place[second.name]]
        assert reach is not None
        return bool(reach >> place[first.name] & 1)

    return runs_before


def python(code: str, *arguments: Any) -> subprocess.Popen[str]:
    """Starts a fresh interpreter that finds the same modules as this one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
