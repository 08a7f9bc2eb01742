"""A gradient that TensorFlow has just built, as a planning problem on plain data.

Nothing is changed in the graph. What comes after, be it a rewritten graph or no more
than a table, starts from here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from memory_saving_gradients import tf_internals, user_code
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.checkpoints import Checkpoints, is_of_who_consumes
from memory_saving_gradients.inside_plan import InsidePlan
from memory_saving_gradients.measured import Coverage, Measured
from memory_saving_gradients.order import backward_order
from memory_saving_gradients.planners import Problem
from memory_saving_gradients.planners.settled import casts_of_what_rests, masks_of_draws
from memory_saving_gradients.sweep import Sweep
from memory_saving_gradients.tf_read import Reading, read
from memory_saving_gradients.working import peak_at_rest, with_working_memory

__all__ = ["UNKNOWN_DIM", "StockFigures", "StockGradient", "Study", "examine"]

UNKNOWN_DIM = 64
"""What an unknown dimension is taken to be while planning, unless the caller says."""

_MANY = 16
"""How much more it is taken to be where gradients would dominate."""

_MUCH = 16
"""Gradients dominate from this part of the peak on."""


@dataclass(frozen=True)
class StockFigures:
    """What stock takes, with bodies that are stock's, too.

    Attributes:
        peak_bytes: Its simulated peak, in bytes above rest.
        peak_if_consumed_bytes: The same for who consumes each gradient at once.
        seconds: Estimated time of forward and backward pass.
    """

    peak_bytes: int
    peak_if_consumed_bytes: int
    seconds: float


@dataclass(frozen=True)
class StockGradient:
    """What TensorFlow's autodiff has built.

    Attributes:
        graph: Where it was built.
        targets: What was differentiated.
        seeds: The gradients that backpropagation starts from.
        gradients: What autodiff returned.
        created: The ops that it created, in order of creation.
        foreign: Ops that other threads created meanwhile in the midst of these: read,
            but never changed.
        bodies: What was done inside loops, branches and called functions.
        figures: Those of stock, if it was tried where bodies are stock's.
        rule: What the rule for bodies is called (`body_rules`), "" without one.
    """

    graph: tf.Graph
    targets: Sequence[Any]
    seeds: Sequence[Any]
    gradients: Sequence[Any]
    created: Sequence[tf.Operation]
    foreign: Sequence[tf.Operation] = ()
    bodies: Sequence[InsidePlan] = ()
    figures: StockFigures | None = None
    rule: str = ""

    @property
    def tensor_seeds(self) -> list[tf.Tensor]:
        """Those of the seeds that are plain tensors."""
        return [seed for seed in self.seeds if isinstance(seed, tf.Tensor)]


@dataclass(frozen=True)
class Study:
    """What planners, and whoever writes their plans into the graph, need to know.

    Attributes:
        graph: Where the gradient was built.
        reading: It as plain data, and the way back.
        problem: The question of what is kept.
        starts: Ids of the ops that backpropagation starts from.
        xla: Whether the graph is compiled by XLA.
        seconds: How long reading took.
        coverage: For how many ops times were measured, if any were given.
        bodies: What was done inside loops, branches and called functions.
        known: As in `StockGradient.figures`.
        rule: As in `StockGradient`.
    """

    graph: tf.Graph
    reading: Reading
    problem: Problem
    starts: set[int]
    xla: bool
    seconds: float
    coverage: Coverage | None = None
    bodies: Sequence[InsidePlan] = ()
    known: StockFigures | None = None
    rule: str = ""

    @cached_property
    def stock(self) -> StockFigures:
        """What stock takes.

        In the graph that was read bodies recompute already. If nobody has looked how it
        is without: stock holds at the end of the forward pass what they do not.
        """
        if self.known is not None:
            return self.known
        timeline, buffers = self.problem.stock, self.problem.buffers
        everything = frozenset(range(len(buffers.graph.tensors)))
        consumed = Sweep(buffers, everything).peak_if_consumed
        spared = 0
        if self.bodies:
            own = timeline.peak_bytes - peak_at_rest(self.reading, timeline)
            spared = max(sum(body.spared_bytes for body in self.bodies) - own, 0)
        inside = sum(body.seconds_in_all for body in self.bodies)
        return StockFigures(
            timeline.peak_bytes + spared,
            consumed + spared,
            buffers.graph.seconds - inside,
        )

    def as_asked(self, checkpoints: Checkpoints) -> Study:
        """What planning for these checkpoints needs: who consumes each gradient as it
        comes has a problem, and a stock, without those that wait."""
        if not is_of_who_consumes(checkpoints):
            return self
        stock = replace(self.stock, peak_bytes=self.stock.peak_if_consumed_bytes)
        return replace(self, problem=self.problem.if_consumed, known=stock)

    @property
    def is_full_of_gradients(self) -> bool:
        """Whether gradients of known sizes are much of a peak that rests on a guess."""
        graph = self.reading.graph
        if not graph.assumed:
            return False
        ends = self.problem.buffers.endless.difference(graph.assumed)
        known = sum(self.problem.buffers.size[t] for t in ends)
        return _MUCH * known > self.problem.stock_peak_bytes

    @property
    def stock_peak_bytes(self) -> int:
        """Stock's peak, of bodies that hold what stock holds."""
        return self.stock.peak_bytes


def examine(
    built: StockGradient,
    unknown_dim: int | None,
    cost: Measured | None = None,
    *,
    relative: bool = False,
) -> Study:
    """Reads a gradient and states the problem.

    Args:
        built: The stock gradient.
        unknown_dim: What an unknown dimension is taken to be; None for `UNKNOWN_DIM`.
        cost: Measured seconds of ops; None for those of the model.
        relative: Whether plans are judged by stock's peak, so that `UNKNOWN_DIM` may be
            taken for too little. Where with it gradients, whose sizes are known, are
            much of the peak, a plan would be made for them, and be a bad one for every
            batch that fills a memory.
    """
    study = _examined(built, unknown_dim or UNKNOWN_DIM, cost)
    if unknown_dim is None and relative and study.is_full_of_gradients:
        study = _examined(built, _MANY * UNKNOWN_DIM, cost)
    return study


def _examined(built: StockGradient, unknown_dim: int, cost: Measured | None) -> Study:
    started = time.perf_counter()
    seeds = built.tensor_seeds
    results = tf.nest.flatten(list(built.gradients), expand_composites=True)
    reading = read(
        built.created,
        [y for y in built.targets if tf.is_symbolic_tensor(y)],
        [part for part in results if part is not None],
        seeds,
        unknown_dim=unknown_dim,
        foreign=built.foreign,
    )
    reading = with_working_memory(reading)
    coverage = None
    if cost is not None:
        reading, coverage = _priced(reading, cost)
    seed_ops = {id(seed.op) for seed in seeds}
    starts = {n for n, op in enumerate(reading.ops) if id(op) in seed_ops}
    buffers = Buffers(reading.graph, backward_order(reading.graph, starts))
    barred = casts_of_what_rests(buffers)
    xla = bool(tf_internals.in_xla(built.graph))
    if xla:
        # XLA computes a mask where it is used, from the draw, and then holds the draw,
        # four times as large: with masks kept a transformer took 379 MiB, with draws
        # redone 291 (of 1263).
        barred |= reading.draws()
    problem = Problem(buffers, barred=barred)
    problem = problem.forcing(masks_of_draws(problem) | reading.settled())
    elapsed = time.perf_counter() - started
    return Study(
        built.graph,
        reading,
        problem,
        starts,
        xla,
        elapsed,
        coverage,
        built.bodies,
        built.figures,
        built.rule,
    )


def _priced(reading: Reading, cost: Measured) -> tuple[Reading, Coverage]:
    """The reading with measured times; a warning if there is none for it."""
    priced = cost.price(reading.graph)
    if not priced.coverage.named and priced.coverage.ops:
        warnings.warn(
            f"`memory_saving_gradients`: {cost.complaint(reading.graph.ops)}",
            stacklevel=user_code.level_of_caller(),
        )
    return replace(reading, graph=priced.graph), priced.coverage
