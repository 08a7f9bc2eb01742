"""Plans and rewires the gradient of the body of a loop, a branch or a called function.

See `tf_capture` for what this is about. Here steps 2 and 3 of its outline are done: the
gradient body that has just been built, copies included, is read as a training graph, of
which the copies are the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    fences,
    op_types,
    tf_internals,
    tf_internals_bodies,
)
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.inside_choice import Inside, planned_inside
from memory_saving_gradients.inside_plan import InsidePlan
from memory_saving_gradients.order import backward_order
from memory_saving_gradients.schedule import Schedule, seconds_again
from memory_saving_gradients.simulate import simulate
from memory_saving_gradients.tf_capture import Captures
from memory_saving_gradients.tf_read import Reading, read
from memory_saving_gradients.verify import verified_inside
from memory_saving_gradients.working import with_working_memory

__all__ = ["recompute_inside"]


def recompute_inside(
    wish: Inside,
    graph: tf.Graph,
    body: tf.Graph,
    given: Any,
    differentiate: Callable[[Any], Sequence[Any]],
) -> tuple[list[Any], InsidePlan | None]:
    """Has stock build the gradient of a body, and makes it recompute.

    Args:
        wish: How to save memory.
        graph: The gradient body, which is being built.
        body: The body that is differentiated.
        given: The gradients of its results.
        differentiate: The stock call, given these.

    Returns:
        The gradients, and what was done; None if nothing is recomputed.
    """
    captures = Captures(graph, body, wish.keeps, wish.unknown_dim, wish.replays)
    # Asked here: a scope in which ops are made closes XLA's context.
    in_xla = bool(tf_internals.in_xla(graph)) or _is_for_xla(body)
    with (
        tf_internals.ops_of_this_thread(graph) as created,
        tf_internals_bodies.captures_through(graph, captures.capture, captures.create),
    ):
        seeds, given = _seeds(given)
        results = list(differentiate(given))
        captures.give_out_reads()
        plan = None
        if captures.originals:
            plan = _settle(wish, captures, created, seeds, results, in_xla)
            redone = _redone(captures, created) if wish.verify else []
            if redone:
                results = verified_inside(results, redone, graph)
    return results, plan


def _seeds(given: Any) -> tuple[list[tf.Tensor], Any]:
    """The gradients that come in, as ops of our own, which others can wait for."""
    if given is None:
        return [], given
    entries = list(given) if isinstance(given, list | tuple) else [given]
    seeds = []
    for place, gradient in enumerate(entries):
        if tf.is_symbolic_tensor(gradient) and gradient.dtype.is_floating:
            entries[place] = tf.identity(gradient, "recompute/seed")
            seeds.append(entries[place])
    return seeds, entries


def _is_for_xla(body: tf.Graph) -> bool:
    """Whether the body is that of a function which XLA compiles by itself."""
    return any(
        tf_internals_bodies.made_for_xla(op) for op in body.get_operations()[-1:]
    )


def _settle(
    wish: Inside,
    captures: Captures,
    created: Sequence[tf.Operation],
    seeds: Sequence[tf.Tensor],
    results: Sequence[Any],
    in_xla: bool,
) -> InsidePlan:
    """Plans the gradient body and makes the plan real."""
    backward = [op for op in created if id(op) not in captures.inside]
    flat = tf.nest.flatten([g for g in results if g is not None], True)
    flat = [t for t in flat if t is not None and t.graph is captures.graph]
    reading = read(
        backward,
        [],
        flat,
        seeds,
        unknown_dim=wish.unknown_dim,
        repeatable=captures.copies,
    )
    reading = with_working_memory(reading)
    if wish.cost is not None:
        reading = replace(reading, graph=wish.cost.price(reading.graph).graph)
    starts = {n for n, op in enumerate(reading.ops) if id(op) in _ops_of(seeds)}
    buffers = Buffers(reading.graph, backward_order(reading.graph, starts))
    originals = _originals(captures, buffers, reading)
    there = {t for t, tensor in originals.items() if captures.is_there_anyway(tensor)}
    schedule = planned_inside(wish, buffers, reading, starts)
    # Of an op that is recomputed for one of its outputs another may be kept: it is read
    # before the copy has its turn.
    kept = [
        t for t in sorted(schedule.kept) if id(reading.tensors[t]) in captures.originals
    ]
    redone = originals.keys() - there.union(kept)
    gathered = [t for t in redone if captures.is_gathered(originals[t])]
    before = dict(captures.held)
    for tensor in kept:
        _hold(captures, reading.tensors[tensor])
    _tie(captures.graph, reading, buffers, schedule, in_xla)
    ops = reading.graph.ops
    tf_internals_bodies.note_peak(
        captures.graph, _working_bytes(buffers, schedule, kept)
    )
    read_directly = {id(t) for op in backward for t in op.inputs}
    return InsidePlan(
        name=str(getattr(captures.body, "name", "")),
        runs=wish.runs,
        stock_runs=wish.stock_runs,
        branches=tf_internals_bodies.branches(captures.body),
        assumed=wish.assumed,
        at_most=wish.at_most,
        stock_bytes=sum(buffers.size[t] for t in originals.keys() - there)
        + sum(held for t, held in before.items() if t in read_directly),
        held_bytes=sum(captures.held.values()),
        gathered_bytes=sum(buffers.size[t] for t in gathered),
        peak_bytes=simulate(buffers, schedule).peak_bytes,
        seconds=seconds_again(reading.graph, schedule),
        recomputed=tuple(ops[op].name for op in schedule.recomputed),
    )


def _redone(
    captures: Captures, created: Sequence[tf.Operation]
) -> list[tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]]:
    """All that was recomputed: the original, it as it is held for that, the copy."""
    copies = [
        made
        for op in created
        if id(op) in captures.copies and op.type != "Const"
        for made in op.outputs
        if made.consumers() and made.dtype not in (tf.variant, tf.resource)
    ]
    originals = [captures.originals[id(made)] for made in copies]
    return [
        (original, (captures.as_stock(original), made))
        for original, made in zip(originals, copies, strict=True)
    ]


def _originals(
    captures: Captures, buffers: Buffers, reading: Reading
) -> dict[int, tf.Tensor]:
    """For each copy that the gradient reads the tensor of the body."""
    copied = [
        (t, captures.originals.get(id(reading.tensors[t]))) for t in buffers.residuals
    ]
    return {t: original for t, original in copied if original is not None}


def _working_bytes(buffers: Buffers, schedule: Schedule, kept: Collection[int]) -> int:
    """What a gradient body takes besides what is kept for it outside.

    That dies as it is used: TensorFlow inlines calls, and loops pop what they stored.
    """
    live = simulate(buffers, schedule).live_bytes[len(buffers.forward) :]
    return max(live, default=0) - sum(buffers.size[t] for t in kept)


def _ops_of(tensors: Sequence[tf.Tensor]) -> set[int]:
    return {id(tensor.op) for tensor in tensors}


def _hold(captures: Captures, copied: tf.Tensor) -> None:
    """Has everything read the original instead of a copy."""
    readers = list(copied.consumers())
    if not readers:
        return  # a result of the gradient body, which is there anyway
    held = captures.as_stock(captures.originals[id(copied)])
    for reader in readers:
        for place, tensor in enumerate(reader.inputs):
            if tensor is copied:
                tf_internals.update_input(reader, place, held)


def _tie(
    graph: tf.Graph,
    reading: Reading,
    buffers: Buffers,
    schedule: Schedule,
    in_xla: bool,
) -> None:
    """Makes the order of the schedule real."""
    fence: fences.Fence
    if in_xla:
        fence = _BodyFence(reading, buffers, schedule)
    else:
        fence = fences.ControlFence(reading, schedule)
    with tf_internals.creation_scope(graph):
        for index, step in enumerate(schedule.steps):
            op = reading.ops[step.op]
            if not step.copy:
                fence.backward(index, op)
                continue
            inputs = list(op.inputs)
            tied = fence.inputs(index, step.op, inputs)
            for place, (old, new) in enumerate(zip(inputs, tied, strict=True)):
                if new is not old:
                    tf_internals.update_input(op, place, new)
            fence.copied(index, op)


class _BodyFence(fences.DataFence):
    """Data ties in a body.

    What comes into a body may be a constant outside. So of integers only the seeds of
    draws are tied, which never have to be known to the compiler.
    """

    def may_tie(self, op: int, place: int, tensor: int) -> bool:
        """Whether an operand may depend on what only a run can know."""
        dtype = self._reading.tensors[tensor].dtype
        if dtype.is_floating or dtype.is_complex:
            return True
        kind = self._reading.graph.ops[op].type
        return place == op_types.SEED_PLACES.get(kind, -1)
