"""Around one call of TensorFlow's autodiff: seeds before it, rewiring after it.

The stock autodiff builds the backward graph, from seeds of ours that wait for the last
forward ops that the backward pass needs; then `rewire` takes over. Numbers are those of
the stock call: nothing is differentiated here.

Who calls, and through which of TensorFlow's functions, is the business of `doors`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from memory_saving_gradients import fences, replicas, selection, tf_internals
from memory_saving_gradients.body_rules import BodyRule
from memory_saving_gradients.checkpoints import (
    Checkpoints,
    Collection,
    is_relative,
    parse,
)
from memory_saving_gradients.errors import speaking_for
from memory_saving_gradients.every import Every, parse_every
from memory_saving_gradients.inside_plan import InsidePlan
from memory_saving_gradients.measured import Measured, parse_cost
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.planners import PLANNERS
from memory_saving_gradients.rewire import rewire
from memory_saving_gradients.study import (
    StockFigures,
    StockGradient,
    Study,
    examine,
)
from memory_saving_gradients.tf_write import Rewiring
from memory_saving_gradients.verify import require_assertions

__all__ = [
    "Outcome",
    "Setting",
    "as_autodiff_made_it",
    "as_list",
    "parse_setting",
    "save_memory",
    "setting_or_stock",
]

# The attribute of a graph that lists what earlier calls redirected in it: a later call
# that differentiates through a gradient must find the edges as autodiff made them. (Not
# a `WeakKeyDictionary`: its values would keep the graph alive.)
_REWIRED = "_memory_saving_gradients_rewired"


@dataclass(frozen=True)
class Outcome:
    """What became of one gradient.

    Attributes:
        gradients: What the caller gets.
        rewiring: What was redirected, None if the graph is as stock made it.
        plan: What was planned; its `reason` says why the graph stayed stock. None if
            the gradient was only studied.
    """

    gradients: list[Any]
    rewiring: Rewiring | None
    plan: Plan | None


@dataclass(frozen=True)
class Setting:
    """How a gradient shall save memory.

    Attributes:
        checkpoints: What to keep, or how to find out once the graph is there.
        unknown_dim: What an unknown dimension is taken to be while planning; None if
            the user did not say.
        verify: Whether recomputed tensors are compared at run time.
        cost: Measured seconds of ops; None for those of the model.
        every: After how many iterations loops hold their state; None if it is not said.
        done: Told what became of each gradient.
        studied: If given, each gradient is only studied, and this is told what was
            seen; the graph is left as TensorFlow made it.
        rule: How loops, branches and called functions save memory inside; None if that
            follows from `checkpoints`, or is still to be found out.
        figures: Those of stock, if they are known already.
        where: The public function that got it, for messages.
    """

    checkpoints: Checkpoints | Callable[[tf.Graph], Checkpoints]
    unknown_dim: int | None = None
    verify: bool = False
    cost: Measured | None = None
    every: Every | None = None
    done: Callable[[Outcome], None] | None = None
    studied: Callable[[Study], None] | None = None
    rule: BodyRule | None = None
    figures: StockFigures | None = None
    where: str = field(default="gradients", compare=False)

    def resolved(self, graph: tf.Graph) -> Checkpoints:
        """What to keep in this very graph.

        Raises:
            CheckpointError: It depends on the graph, and the graph has nothing.
        """
        if isinstance(self.checkpoints, Collection):
            return selection.collected(graph, self.checkpoints)
        if callable(self.checkpoints):
            return self.checkpoints(graph)
        return self.checkpoints


def parse_setting(
    checkpoints: Any,
    unknown_dim: Any,
    cost: Any = None,
    verify: bool = False,
    every: Any = None,
    *,
    where: str,
) -> Setting:
    """Checks the user's arguments.

    Args:
        checkpoints: As in `gradients`.
        unknown_dim: As in `gradients`.
        cost: As in `gradients`.
        verify: As in `gradients`.
        every: As in `gradients`.
        where: The public function that got them, for messages.

    Raises:
        CheckpointError: `checkpoints` is nothing that it may be.
        CostError: `cost` holds no measured times.
        TypeError, ValueError: `unknown_dim` or `every` is no positive int.
    """
    start = f"`memory_saving_gradients.{where}`: `unknown_dim` must be"
    try:
        if isinstance(unknown_dim, bool | np.bool_):
            raise TypeError
        if unknown_dim is not None:
            unknown_dim = operator.index(unknown_dim)
    except TypeError:
        raise TypeError(f"{start} an int, but got {unknown_dim!r}.") from None
    if unknown_dim is not None and unknown_dim < 1:
        raise ValueError(
            f"{start} at least 1, but got {unknown_dim}. Give the batch size that will "
            "come."
        )
    if not isinstance(verify, bool):
        raise TypeError(
            f"`memory_saving_gradients.{where}`: `verify` must be a bool, but got "
            f"{verify!r}."
        )
    return Setting(
        parse(checkpoints, PLANNERS, where),
        unknown_dim,
        verify,
        parse_cost(cost, where),
        parse_every(every, where),
        where=where,
    )


def setting_or_stock(checkpoints: Any, *others: Any, where: str) -> Setting | None:
    """As `parse_setting`, but that `checkpoints` may be None: stock.

    Args:
        checkpoints: As in `gradients`.
        others: The other arguments of `parse_setting`, checked in any case.
        where: The public function that got them, for messages.
    """
    if checkpoints is None:
        parse_setting("memory", *others, where=where)
        return None
    return parse_setting(checkpoints, *others, where=where)


def save_memory(
    setting: Setting,
    targets: Sequence[Any],
    given: Any,
    differentiate: Callable[[Any], Sequence[Any]],
    *,
    all_or_none: bool = False,
    bodies: Sequence[InsidePlan] = (),
) -> Outcome:
    """Has the default graph's autodiff run and makes the result recompute.

    Args:
        setting: How to save memory.
        targets: What is differentiated.
        given: The gradients that the targets receive, None for ones; anything between.
        differentiate: The stock call, given the seeds. It returns a flat list.
        all_or_none: Whether the stock call takes a seed for each target, of whatever
            type it is, or none at all: a tape dies of a None in the list.
        bodies: What is done inside loops, branches and calls meanwhile; it grows.

    Returns:
        What became of it. Changed are only ops that this thread made in the call.
    """
    graph = tf.compat.v1.get_default_graph()
    with speaking_for(setting.where):
        if setting.verify:
            require_assertions(graph)
        checkpoints = None if setting.studied else setting.resolved(graph)
    with speaking_for(setting.where), tf_internals.mutation_lock(graph):
        built = replace(
            _differentiated(graph, targets, given, differentiate, all_or_none),
            bodies=list(bodies),
            figures=setting.figures,
            rule=setting.rule.name if setting.rule else "",
        )
        if checkpoints is None:
            assert setting.studied is not None
            relative = is_relative(setting.checkpoints)
            setting.studied(
                examine(built, setting.unknown_dim, setting.cost, relative=relative)
            )
            return Outcome(list(built.gradients), None, None)
        gradients, rewiring, plan = rewire(
            built,
            checkpoints,
            unknown_dim=setting.unknown_dim,
            cost=setting.cost,
            verify=setting.verify,
        )
        if rewiring is not None:
            setattr(graph, _REWIRED, [*getattr(graph, _REWIRED, ()), rewiring])
    return Outcome(gradients, rewiring, plan)


def _differentiated(
    graph: tf.Graph,
    targets: Sequence[Any],
    given: Any,
    differentiate: Callable[[Any], Sequence[Any]],
    all_or_none: bool,
) -> StockGradient:
    """Has the graph's autodiff run and notes what it makes; see `save_memory`."""
    before = len(graph.get_operations())
    with tf_internals.ops_of_this_thread(graph) as created:
        seeds = _seeds(targets, given, graph, all_or_none)
        stock = list(differentiate(seeds))
    foreign = replicas.in_the_midst(graph.get_operations()[before:], created)
    own = set(map(id, created))
    starts = [
        seed
        for seed in as_list(seeds)
        if tf.is_symbolic_tensor(seed) and id(seed.op) in own
    ]
    return StockGradient(graph, targets, starts, stock, created, foreign)


def as_list(value: Any) -> list[Any]:
    """A list of what may be a list, a tuple or one thing."""
    return list(value) if isinstance(value, list | tuple) else [value]


@contextmanager
def as_autodiff_made_it(graph: tf.Graph, ys: Any) -> Iterator[None]:
    """Undoes, for the moment, what earlier calls redirected upstream of `ys`.

    Autodiff through a rewired edge would follow the copy and miss the paths that the
    original has: silently wrong gradients of gradients.
    """
    edges = [edge for done in getattr(graph, _REWIRED, ()) for edge in done.edges]
    if edges:
        upstream = _upstream(as_list(ys))
        edges = [edge for edge in edges if id(edge[0]) in upstream]
    redirected = [op.inputs[index] for op, index, _ in edges]
    for op, index, original in edges:
        tf_internals.update_input(op, index, original)
    try:
        yield
    finally:
        for (op, index, _), copy in zip(edges, redirected, strict=True):
            tf_internals.update_input(op, index, copy)


def _upstream(targets: list[Any]) -> set[int]:
    """The identities of all ops that the targets depend on."""
    stack = [y.op for y in targets if tf.is_symbolic_tensor(y)]
    found: set[int] = set()
    while stack:
        op = stack.pop()
        if id(op) not in found:
            found.add(id(op))
            stack.extend(tensor.op for tensor in op.inputs)
    return found


def _seeds(
    targets: Sequence[Any], given: Any, graph: tf.Graph, all_or_none: bool
) -> Any:
    """The gradients that backpropagation starts from, as ops of our own.

    So the backward ops that depend on a gradient are the seeds' descendants, and
    holding back the seeds holds back them all. What is not a plain tensor, or has no
    default gradient, is left to stock (and to its errors).
    """
    seeds = [None] * len(targets) if given is None else as_list(given)
    if len(seeds) != len(targets):
        return given
    here = [y for y in targets if getattr(y, "graph", None) is graph]
    with tf.name_scope("recompute/seed"):
        for index, (y, gradient) in enumerate(zip(targets, list(seeds), strict=True)):
            if not tf.is_symbolic_tensor(y):
                continue
            has_default = y.dtype.is_floating or (all_or_none and _is_numeric(y.dtype))
            if gradient is None and has_default:
                seed = tf.ones(tf.shape(y), y.dtype)
            elif isinstance(gradient, tf.Tensor) or (
                y.dtype.is_floating
                and not (gradient is None or isinstance(gradient, tf.IndexedSlices))
            ):
                seed = tf.identity(gradient)
            else:
                continue
            if tf_internals.in_xla(graph) and seed.dtype == y.dtype:
                seed = fences.tied_seed(here, seed)
            seeds[index] = seed
    if all_or_none and any(seed is None for seed in seeds):
        return given
    return seeds


def _is_numeric(dtype: tf.DType) -> bool:
    return dtype not in (tf.resource, tf.variant, tf.string)
