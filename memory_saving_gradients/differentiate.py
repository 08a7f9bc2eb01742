"""The drop-in `gradients()` family: one journey from a stock gradient to a rewired one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients import fences, tf_internals
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.checkpoints import Auto, Checkpoints, parse
from memory_saving_gradients.errors import EagerExecutionError
from memory_saving_gradients.plan import Plan, remember
from memory_saving_gradients.planners import PLANNERS, Problem
from memory_saving_gradients.schedule import backward_order, make_schedule
from memory_saving_gradients.simulate import simulate, simulate_stock
from memory_saving_gradients.tf_read import read
from memory_saving_gradients.tf_write import write

@tf.autograph.experimental.do_not_convert
def gradients(ys, xs, grad_ys=None, checkpoints="collection", *, unknown_dim=64, **kwargs):
    parsed = parse(checkpoints, PLANNERS)
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    ys = ys if isinstance(ys, (list, tuple)) else [ys]
    ys = list(ys)
    seeds = []
    with graph.control_dependencies([y.op for y in ys]):
        for y in ys:
            seeds.append(tf.ones_like(y))
    if tf_internals.in_xla(graph):
        seeds = [fences.tied_seed(ys, s) for s in seeds]
    grads = tf_internals.gradients_helper(ys, xs, seeds, **kwargs)
    t = time.perf_counter()
    created = graph.get_operations()[before:]
    reading = read(created, ys, [g for g in grads if g is not None], unknown_dim=unknown_dim)
    seed_ids = {i for i, op in enumerate(reading.ops) if any(op is s.op for s in seeds)}
    buffers = Buffers(reading.graph, backward_order(reading.graph, seed_ids))
    problem = Problem(buffers)
    kept = PLANNERS[parsed.mode](problem)
    schedule = make_schedule(buffers, kept, seeds=seed_ids, significant_bytes=problem.stock_peak_bytes // 2000)
    timeline = simulate(buffers, schedule)
    stock = simulate_stock(buffers)
    t1 = time.perf_counter()
    write(graph, reading, buffers, schedule)
    t2 = time.perf_counter()
    extra = sum(reading.graph.ops[o].seconds for o in schedule.recomputed)
    plan = Plan(parsed.mode, tuple(reading.tensors[k].name for k in sorted(schedule.kept)),
        tuple(reading.ops[o].name for o in schedule.recomputed), stock.peak_bytes, timeline.peak_bytes,
        extra, extra/max(reading.graph.seconds,1e-9), t2-t, "", False, stock, timeline, schedule, reading)
    remember(plan)
    return grads
