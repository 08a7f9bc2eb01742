"""A gradient taken in a copy of the graph, to find out what serves it best.

Called before the gradient is built that somebody asked for. Only where loops, branches
or called functions hold much there is anything to find out: which of the rules for them
(`body_rules`) serves a budget best, and what stock's peak is, which nobody sees once
they recompute. What is found out is written into the setting.

A custom gradient is any Python function, and may not work in a copy. Then the setting
stays as it is: bodies save what they can, and stock's peak is estimated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import bodies, op_types, tf_internals, tf_internals_bodies
from memory_saving_gradients.autodiff import (
    Setting,
    as_autodiff_made_it,
    save_memory,
)
from memory_saving_gradients.body_rules import (
    MEMORY,
    RULES,
    SPEED,
    STOCK,
    BodyRule,
    named,
)
from memory_saving_gradients.checkpoints import Budget, SavedPlan
from memory_saving_gradients.every import marked
from memory_saving_gradients.scratch import copied
from memory_saving_gradients.study import UNKNOWN_DIM, Study
from memory_saving_gradients.trials import Trials
from memory_saving_gradients.volume import Volumes

__all__ = ["rehearsed", "studied"]

_LITTLE = 64
"""Bodies that compute less than this part of what the graph does are not tried out."""

_log = logging.getLogger(__name__)


def rehearsed(
    setting: Setting,
    targets: Sequence[Any],
    sources: Sequence[Any],
    stops: Sequence[Any] = (),
    *,
    tape: bool = False,
) -> Setting:
    """The setting for a gradient with what can be found out before it is built.

    Args:
        setting: How to save memory.
        targets: What is differentiated.
        sources: Tensors, variables or their handles: with respect to what.
        stops: Through what nothing is differentiated.
        tape: Whether a tape will take the gradient.
    """
    graph = tf.compat.v1.get_default_graph()
    here = [y for y in targets if getattr(y, "graph", None) is graph]
    if setting.rule is not None or not here or not sources or not _matters(graph):
        return setting

    def study_under(rule: BodyRule) -> Study:
        return studied(replace(setting, rule=rule), here, sources, stops, tape=tape)

    wanted = setting.checkpoints
    rule = named(wanted.bodies) if isinstance(wanted, SavedPlan) else None
    bodies_here = tf_internals_bodies.graphs_inside(graph)
    # Who says how loops are to be split has to have them split.
    said = setting.every is not None or any(map(marked, bodies_here))
    try:
        trials = Trials(study_under, (SPEED, MEMORY) if said else RULES)
        figures = trials.stock.stock
        if isinstance(wanted, Budget):
            rule = trials.rule_for(wanted)
    except Exception as error:  # whatever custom gradients raise
        _log.info("What is inside of bodies could not be tried out: %s", error)
        return replace(setting, rule=rule)
    return replace(setting, rule=rule, figures=figures)


def studied(
    setting: Setting,
    targets: Sequence[Any],
    sources: Sequence[Any],
    stops: Sequence[Any] = (),
    *,
    tape: bool = False,
) -> Study:
    """Takes the gradient in a copy of the default graph, which is dropped.

    Args:
        setting: How to save memory; with the rule for bodies.
        targets: Tensors of the default graph.
        sources: As in `rehearsed`.
        stops: As in `rehearsed`.
        tape: As in `rehearsed`.

    Raises:
        MemorySavingGradientsError: Loops or branches of TensorFlow 1 are in the way.
    """
    with as_autodiff_made_it(tf.compat.v1.get_default_graph(), targets):
        scratch = copied(tf.compat.v1.get_default_graph(), targets)
    ys = scratch.found(targets)
    xs, ends = scratch.found(sources), scratch.found(stops)
    if tape:
        scratch.differentiate_as_tapes(xs)

    def stock(seeds: Any) -> Any:
        return tf_internals.gradients_helper(
            ys, xs, seeds, colocate_gradients_with_ops=True, stop_gradients=ends or None
        )

    seen: list[Study] = []
    looking = replace(setting, studied=seen.append)
    with scratch.graph.as_default():
        saving = looking if setting.rule != STOCK else None
        with bodies.within(bodies.Within(saving, scratch.graph)) as inside:
            save_memory(looking, ys, None, stock, bodies=inside.plans)
    return seen[0]


def _matters(graph: tf.Graph) -> bool:
    """Whether bodies compute much of what the graph does."""
    if all(op.type not in op_types.CALL_TYPES for op in graph.get_operations()):
        return False
    inside, around = Volumes(UNKNOWN_DIM).inside_and_around(graph)
    return _LITTLE * inside > around
