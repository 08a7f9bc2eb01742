"""A copy of the graph that is being built, to try things out in.

What autodiff makes can never be taken out of a graph again, and calls and loops it
changes, too. So whoever only wants to know builds in a copy, which is dropped. Copied
is what the `ys` depend on, op by op. Variables are the same ones: nothing is ever run.

Loops, branches and called functions get bodies of their own. Those of TensorFlow 1,
which are made of many ops and of contexts that only Python knows, stand in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    op_types,
    tf_internals,
    tf_internals_bodies,
    tf_internals_loops,
    tf_internals_scratch,
)
from memory_saving_gradients.errors import MemorySavingGradientsError
from memory_saving_gradients.every import mark, marked
from memory_saving_gradients.selection import plain_variable

__all__ = ["Scratch", "copied"]

_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))


@dataclass
class Scratch:
    """A copy of a graph, as far as it was copied.

    Attributes:
        graph: The copy.
        original: What it is a copy of.
        made: For the `id` of each tensor of the original its copy. What is copied is
            copied in its order: it is the one in which things are run.
        given: For the `id`s of a function's arguments what it is called with.
        waits: Whether ops shall wait for what their originals wait for, which says
            something of the order in which a body is run. (A function is told anew when
            it is called, and what else is being built has not been told yet.)
    """

    graph: tf.Graph
    original: tf.Graph
    made: dict[int, tf.Tensor] = field(default_factory=dict)
    given: dict[int, tf.Tensor] = field(default_factory=dict)
    waits: bool = False
    _ops: dict[int, tf.Operation] = field(default_factory=dict)

    def found(self, wanted: Sequence[Any]) -> list[tf.Tensor]:
        """The copies of tensors or variables (their handles), where there are any."""
        standing = (_standing_for(plain_variable(x), self.original) for x in wanted)
        here = (self.made.get(id(tensor)) for tensor in standing)
        return [tensor for tensor in here if tensor is not None]

    def twin_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The copy of a tensor, or the tensor itself if it has none."""
        return self.made.get(id(tensor), tensor)

    def add(self, ys: Sequence[tf.Tensor]) -> None:
        """Copies what it takes to compute some tensors of the original."""
        missing = self._missing(ys)
        read = {id(t) for op in missing for t in op.inputs}.union(map(id, ys))
        for op in missing:
            if tf_internals.in_control_flow_v1(op):
                raise MemorySavingGradientsError(
                    "`memory_saving_gradients.pareto` looks at a copy of the graph, "
                    "but loops and branches of TensorFlow 1 cannot be copied "
                    f"({op.type} {op.name}). Call `plan` or `compare` with the "
                    "function that computes the loss: they trace it anew."
                )
            inputs = [self.made[id(tensor)] for tensor in op.inputs]
            wanted = [id(t) in read for t in op.outputs]
            self._add(op, inputs, wanted)
        for op in missing if self.waits else ():
            # What is waited for may have been made later.
            for before in sorted(op.control_inputs, key=tf_internals.creation_index):
                tf_internals.add_control_input(self._ops[id(op)], self._ops[id(before)])

    def differentiate_as_tapes(self, xs: Sequence[tf.Tensor]) -> None:
        """Has loops leave out gradients that lead to none of the `xs`, as tapes do."""
        reached = set(map(id, xs))
        for op in self.graph.get_operations():
            inputs = [id(tensor) in reached for tensor in op.inputs]
            if any(inputs):
                reached.update(map(id, op.outputs))
            if op.type in op_types.LOOP_TYPES:
                skipped = [place for place, wanted in enumerate(inputs) if not wanted]
                tf_internals_loops.skip_inputs(op, skipped)

    def _missing(self, ys: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """The ops that the `ys` depend on and that are not here, in their order."""
        found: dict[int, tf.Operation] = {}
        stack = [y.op for y in ys if id(y) not in self.made]
        while stack:
            op = stack.pop()
            if id(op) not in found:
                found[id(op)] = op
                stack.extend(t.op for t in op.inputs if id(t) not in self.made)
                stack.extend(op.control_inputs if self.waits else ())
        return sorted(found.values(), key=tf_internals.creation_index)

    def _add(
        self, op: tf.Operation, inputs: Sequence[tf.Tensor], wanted: Sequence[bool]
    ) -> None:
        """Copies one op."""
        with tf_internals.ops_of_this_thread(self.graph) as made:
            copies = self._copies(op, inputs, wanted)
        for tensor, copy in zip(op.outputs, copies, strict=True):
            if copy is not None:
                self.made[id(tensor)] = copy
        if made:
            self._ops[id(op)] = made[-1]

    def _copies(
        self, op: tf.Operation, inputs: Sequence[tf.Tensor], wanted: Sequence[bool]
    ) -> Sequence[tf.Tensor | None]:
        """The outputs of the copy of an op; None, maybe, where one is not wanted."""
        if op.outputs and id(op.outputs[0]) in self.given:
            return [self.graph.capture(self.given[id(op.outputs[0])])]
        bodies = tf_internals_bodies.bodies_of(op) if op.type in _CALLS else []
        if bodies and len(bodies[0].inputs) == len(inputs):
            return self._called_anew(bodies[0], inputs, wanted)
        copy = tf_internals_bodies.copy_whole(self.graph, op, inputs)
        if op.type in tf_internals_bodies.CONTROL_FLOW:
            self._give_bodies(copy, op)
        elif not bodies:
            tf_internals_loops.hand_gradient_on(op, copy, self.twin_of)
        return list(copy.outputs)

    def _give_bodies(self, copy: tf.Operation, op: tf.Operation) -> None:
        """Gives a copied loop or branch copies of its bodies."""
        kept = tf_internals_scratch.kept_bodies(op)
        if any(original is None for _, original in kept):
            tf_internals_scratch.import_bodies(copy, op)
            return
        for place, original in kept:
            assert original is not None
            body = tf_internals_scratch.empty_body(original, self.graph)
            every = marked(original)
            if every is not None:
                mark(body, every)
            inside = Scratch(body, original, dict(self.made), waits=True)
            with tf_internals.creation_scope(body):
                inside.add([*original.inputs, *original.outputs])
            tf_internals_scratch.made_body(body, original, inside.twin_of)
            setattr(copy, place, body)

    def _called_anew(
        self, body: tf.Graph, inputs: Sequence[tf.Tensor], wanted: Sequence[bool]
    ) -> list[tf.Tensor | None]:
        """Calls a copy of a function.

        A gradient has functions give out more than what the graph around wants of them,
        and so may gradients have done that were taken before.
        """
        pairs = zip(body.outputs, wanted, strict=False)
        results = [tensor for tensor, is_wanted in pairs if is_wanted]

        def run() -> list[tf.Tensor]:
            here = tf.compat.v1.get_default_graph()
            given = dict(zip(map(id, body.inputs), inputs, strict=True))
            inside = Scratch(here, body, dict(self.made), given)
            inside.add([*body.inputs, *results])
            return [inside.made[id(t)] for t in results]

        alone = not tf_internals.in_xla(self.graph) and any(
            map(tf_internals_bodies.made_for_xla, body.get_operations()[-1:])
        )
        with tf_internals_bodies.no_recording():
            made = iter(tf.function(run, autograph=False, jit_compile=alone or None)())
        return [next(made) if is_wanted else None for is_wanted in wanted]


def copied(graph: tf.Graph, ys: Sequence[tf.Tensor]) -> Scratch:
    """A copy of what some tensors are computed from.

    Args:
        graph: The graph that holds the `ys`.
        ys: What is to be differentiated.

    Returns:
        The copy.

    Raises:
        MemorySavingGradientsError: Loops or branches of TensorFlow 1 are in the way.
    """
    scratch = Scratch(tf_internals_scratch.empty_graph(), graph)
    with tf_internals.creation_scope(scratch.graph):
        scratch.add(ys)
    return scratch


def _standing_for(x: Any, graph: tf.Graph) -> Any:
    """The tensor of the graph that a variable, or a tensor from outside, is there."""
    if not isinstance(x, tf.Tensor):
        # Variables of TensorFlow 1 that are no resources have no handle.
        x = x.handle if hasattr(x, "handle") else x.op.outputs[0]
    if getattr(x, "graph", None) is graph or not hasattr(graph, "captures"):
        return x
    outside = _standing_for(x, graph.outer_graph)
    inside = [inner for outer, inner in graph.captures if outer is outside]
    return inside[0] if inside else x
