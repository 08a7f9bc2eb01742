"""Which setting holds inside loops, branches and called functions, and how often they
run.

The gradient of a body is built when the op outside is differentiated: then the setting
of that gradient holds. But what a called function hands to its gradient is decided when
it is *called*, if a tape watches that is persistent, nested in another or eager. So a
setting holds from the tape's `__enter__` on, or from `enable()` on, and TensorFlow,
which remembers what it made for a function, is made to remember it by setting
(`remembered`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    tf_internals,
    tf_internals_bodies,
    tf_internals_loops,
)
from memory_saving_gradients.autodiff import Setting
from memory_saving_gradients.body_rules import MEMORY
from memory_saving_gradients.checkpoints import (
    Auto,
    Budget,
    Checkpoints,
    Collection,
    Keep,
    SavedPlan,
)
from memory_saving_gradients.every import marked
from memory_saving_gradients.inside import recompute_inside
from memory_saving_gradients.inside_choice import Inside
from memory_saving_gradients.inside_plan import InsidePlan
from memory_saving_gradients.planners import PLANNERS
from memory_saving_gradients.split import (
    as_differentiated,
    held_again,
    seek,
    split_loop,
)
from memory_saving_gradients.study import UNKNOWN_DIM
from memory_saving_gradients.trip_counts import (
    ASSUMED_ITERATIONS,
    iterations,
    may_end_early,
    split_of,
)
from memory_saving_gradients.volume import Volumes

__all__ = [
    "Within",
    "before_gradient_of_loop",
    "differentiate_body",
    "innermost",
    "within",
]

_log = logging.getLogger(__name__)

_ASSUMED_BODIES = 4
"""How many bodies of a kind are taken to be around if the graph is not there yet."""


@dataclass
class Within:
    """A gradient, or a tape, inside of which bodies are differentiated.

    Attributes:
        setting: How to save memory; None for stock.
        graph: The graph that is differentiated, None if it is not there yet.
        plans: What was done in bodies.
    """

    setting: Setting | None
    graph: tf.Graph | None = None
    plans: list[InsidePlan] = field(default_factory=list)
    _loops: list[tuple[Inside, tf.Graph]] = field(default_factory=list)
    _whole: dict[int, tuple[tf.Graph, str]] = field(default_factory=dict)

    @property
    def unknown_dim(self) -> int:
        """What an unknown dimension is taken to be."""
        return (self.setting and self.setting.unknown_dim) or UNKNOWN_DIM

    @cached_property
    def _volumes(self) -> Volumes:
        return Volumes(self.unknown_dim)

    def checkpoints(self, body: tf.Graph) -> Checkpoints:
        """What to keep in a body."""
        assert self.setting is not None
        wanted = self.setting.checkpoints
        if isinstance(wanted, Collection):
            source = body if self.graph is None else self.graph
            return Keep(tuple(source.get_collection(wanted.name)))
        if self.setting.rule is not None or isinstance(wanted, Budget):
            return Auto((self.setting.rule or MEMORY).mode)
        if isinstance(wanted, SavedPlan):
            return Auto(wanted.bodies) if wanted.bodies in PLANNERS else Keep(())
        if callable(wanted):
            # Looked up in the graph around; there is nothing of it in bodies.
            return Keep(())
        return wanted

    def split(self, loop: tf.Operation) -> None:
        """Makes a loop hold its state for few iterations, if that is asked for."""
        assert self.setting is not None
        body = tf_internals_bodies.graphs_of_loop(loop)[1]
        every = marked(body) or self.setting.every
        if every is None and self.setting.rule is not None:
            every = self.setting.rule.every
        if every is None or body is None:
            return
        reason = split_loop(loop, every)
        if reason:
            self._whole[id(body)] = body, reason
            _log.info("%s holds the state of each iteration: %s.", loop.name, reason)

    def noted(self, plan: InsidePlan, body: tf.Graph) -> InsidePlan:
        """The plan of a body with what became of splitting its loop."""
        _, reason = self._whole.get(id(body), (None, ""))
        loop = tf_internals_bodies.loop_of(body)
        split = split_of(loop)
        if split is None:
            replayed = loop is not None and held_again(loop) is not None
            return replace(plan, unsplit=reason, replayed=replayed)
        # Of what is held inside, its body tells: stock would hold it in each iteration.
        return replace(plan, every=split.every, stock_bytes=0)

    @contextmanager
    def entering(self, body: tf.Graph, sources: Sequence[Any]) -> Iterator[Inside]:
        """While a body is differentiated: how it shall save memory."""
        assert self.setting is not None
        around = self._loops[-1][0] if self._loops else None
        factor = around.stock_runs if around else 1
        wish = Inside(
            self.checkpoints(body),
            self.unknown_dim,
            times=factor * self._alike(body),
            runs=factor,
            stock_runs=factor,
            assumed=around is not None and around.assumed,
            at_most=around is not None and around.at_most,
            cost=self.setting.cost,
            verify=self.setting.verify,
        )
        if not tf_internals_bodies.is_loop_body(body):
            yield wish
            return
        seek(body, sources)
        loop = tf_internals_bodies.loop_of(body)
        known = iterations(loop)
        own = known or ASSUMED_ITERATIONS
        split = split_of(loop)
        is_unknown = (known if split is None else split.iterations) is None
        again = loop is not None and (
            held_again(loop) is not None
            or (loop.type == "StatelessWhile" and wish.replays)
        )
        wish = replace(
            wish,
            times=factor * own,
            runs=own if again else factor * own,
            stock_runs=factor * own,
            assumed=wish.assumed or is_unknown,
            at_most=wish.at_most or (loop is not None and may_end_early(loop)),
        )
        self._loops.append((wish, body))
        try:
            yield wish
        finally:
            self._loops.pop()

    def _alike(self, body: tf.Graph) -> int:
        around = self._loops[-1][1] if self._loops else self.graph
        if around is None:
            return _ASSUMED_BODIES
        own = self._volumes.of(body)
        alike = max(round(self._volumes.of(around) / own), 1) if own else 1
        # Calls are replayed, and what they keep with them: √n of n are there at a time.
        return alike if tf_internals_bodies.branches(body) > 1 else math.isqrt(alike)


class _Here(threading.local):
    def __init__(self) -> None:
        self.within: list[Within] = []


_here = _Here()


@contextmanager
def within(what: Within) -> Iterator[Within]:
    """Lets a setting hold for the bodies that are differentiated meanwhile."""
    _here.within.append(what)
    try:
        yield what
    finally:
        # By identity: tapes need not be left in the order in which they were entered.
        _here.within[:] = [other for other in _here.within if other is not what]


def innermost(process_wide: Setting | None) -> Within | None:
    if _here.within:
        found = _here.within[-1]
        return found if found.setting is not None else None
    return Within(process_wide) if process_wide is not None else None


def differentiate_body(
    process_wide: Setting | None,
    body: tf.Graph,
    sources: Sequence[Any],
    given: Any,
    differentiate: Callable[[Any], Sequence[Any]],
) -> Sequence[Any]:
    """Builds the gradient of a body in the default graph, as the setting demands.

    Args:
        process_wide: What holds where nothing else does.
        body: The body of a function, loop or branch.
        sources: What of it is differentiated with respect to.
        given: The gradients of its results.
        differentiate: The stock call, given these.
    """
    holding = innermost(process_wide)
    graph = tf.compat.v1.get_default_graph()
    if (
        holding is None
        or holding.setting is None
        or not tf_internals.builds_function(graph)
    ):
        return differentiate(given)
    with holding.entering(body, sources) as wish:
        gradients, plan = recompute_inside(wish, graph, body, given, differentiate)
    if plan is not None:
        holding.plans.append(holding.noted(plan, body))
        loop = tf_internals_bodies.loop_of(body)
        if plan.recomputed and loop is not None:
            tf_internals_loops.one_at_a_time(loop)
    return gradients


def before_gradient_of_loop(
    process_wide: Setting | None, op: Any, given: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Splits a loop whose gradient is about to be built, as the setting demands.

    Args:
        process_wide: What holds where nothing else does.
        op: The loop, or what a tape has remembered of it.
        given: The gradients of its results.

    Returns:
        What to give to stock for these two.
    """
    holding = innermost(process_wide)
    loop = op.outputs[0].op
    tf_internals_loops.ignore_lists(loop, given)
    if holding is not None:
        holding.split(loop)
    return as_differentiated(op, given)
