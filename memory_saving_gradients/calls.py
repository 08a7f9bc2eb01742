"""Called functions in the graph around them: what a call gives out, and its twin.

The call of a function that reads variables must not be made again: it would read what
they are *then*, and after an `assign` the gradients would be wrong. But what it read
the first time is there: TensorFlow made the call give out what the gradient reads of
its inside, and variables are among that. So a call is replayed by a *pure twin* of the
function, whose arguments are those of the call and what the call gave out of what may
not be done twice.

Of each output of a call it is said here what it is:

* an argument handed on, which takes no room of its own;
* a variable's value or a constant, which rest where they are;
* what a twin can compute;
* what it cannot, and what must be held therefore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from memory_saving_gradients import tf_internals, tf_internals_bodies
from memory_saving_gradients.pins import pin_of
from memory_saving_gradients.stored import leading_nowhere

__all__ = ["Call", "call_of", "handed_on", "reads_to_give_out", "unread_arguments"]

_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
"""Not the other kinds of calls, whose functions Python does not know."""

_BRANCHES = frozenset("Case If StatelessCase StatelessIf".split())


@dataclass
class Call:
    """A call of a function whose body is known.

    Attributes:
        op: The call.
        body: The function's graph.
        handed_on: For each output that is an argument the number of that argument.
        resting: Outputs that are variables' values or constants.
        computed: Outputs that a twin can compute.
    """

    op: tf.Operation
    body: tf.Graph
    handed_on: dict[int, int] = field(default_factory=dict)
    resting: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    _given: dict[int, int] = field(default_factory=dict)
    _taken: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        results = self.body.outputs[: len(self.op.outputs)]
        exported = {id(t): n for n, t in reversed(list(enumerate(results)))}
        self._given = {id(t): n for n, t in enumerate(self.body.inputs)}
        computed: set[int] = set()
        for op in self.body.get_operations():
            for tensor in op.outputs:
                if id(tensor) in self._given:
                    continue
                if _is_repeatable(tensor) and all(
                    id(t) in computed or id(t) in self._given or id(t) in self._taken
                    for t in op.inputs
                ):
                    computed.add(id(tensor))
                elif id(tensor) in exported:
                    self._taken[id(tensor)] = exported[id(tensor)]
        for number, tensor in enumerate(results):
            if id(tensor) in self._given:
                self.handed_on[number] = self._given[id(tensor)]
            elif tensor.op.type in ("Const", "ReadVariableOp"):
                self.resting.add(number)
            elif id(tensor) in computed:
                self.computed.add(number)

    def replayed(
        self, graph: tf.Graph, arguments: Sequence[tf.Tensor], wanted: Sequence[int]
    ) -> list[tf.Tensor]:
        """Calls the twin.

        Args:
            graph: Where the call stands, in a scope in which ops may be made.
            arguments: What to read instead of the call's arguments.
            wanted: Numbers of outputs that a twin can compute.
        """
        targets = [self.body.outputs[number] for number in wanted]
        ops, sources = self._needed(targets)
        given = [
            arguments[self._given[id(t)]]
            if id(t) in self._given
            else self.op.outputs[self._taken[id(t)]]
            for t in sources
        ]
        alone = not tf_internals.in_xla(graph) and any(
            map(tf_internals_bodies.made_for_xla, self.body.get_operations()[-1:])
        )
        twin = tf.function(
            partial(_copied, ops, sources, targets),
            autograph=False,
            jit_compile=True if alone else None,
        )
        with tf_internals_bodies.no_recording():
            return list(twin(*given))

    def _needed(
        self, targets: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Operation], list[tf.Tensor]]:
        """The ops that make the targets, in order, and what these read."""
        ops: dict[int, tf.Operation] = {}
        sources: dict[int, tf.Tensor] = {}
        pending = list(targets)
        while pending:
            tensor = pending.pop()
            if id(tensor) in self._given or id(tensor) in self._taken:
                sources[id(tensor)] = tensor
            elif id(tensor.op) not in ops:
                ops[id(tensor.op)] = tensor.op
                pending.extend(tensor.op.inputs)
        ordered = sorted(ops.values(), key=tf_internals.creation_index)
        return ordered, list(sources.values())


def _copied(
    ops: Sequence[tf.Operation],
    sources: Sequence[tf.Tensor],
    targets: Sequence[tf.Tensor],
    *arguments: tf.Tensor,
) -> list[tf.Tensor]:
    """The body of a twin: copies of ops, in the graph that is being built."""
    graph = tf.compat.v1.get_default_graph()
    here = {id(t): a for t, a in zip(sources, arguments, strict=True)}
    for op in ops:
        inputs = [here[id(t)] for t in op.inputs]
        name = tf_internals.unique_name(graph, f"recompute/{op.name}")
        with graph.device(None):
            copy = tf_internals.copy_op(graph, op, name, inputs, same_graph=False)
        for original, made in zip(op.outputs, copy.outputs, strict=True):
            here.setdefault(id(original), made)
    return [here[id(t)] for t in targets]


def _is_repeatable(tensor: tf.Tensor) -> bool:
    return bool(tensor.op.type == "Const" or pin_of(tensor.op) is None)


def call_of(op: tf.Operation) -> Call | None:
    """The call that an op is, if its function is known."""
    if op.type not in _CALLS:
        return None
    bodies = tf_internals_bodies.bodies_of(op)
    if not bodies or len(bodies[0].outputs) < len(op.outputs):
        return None
    return Call(op, bodies[0])


def handed_on(tensor: tf.Tensor) -> tf.Tensor:
    """What a call was given, for an output of it that is just that; else the tensor."""
    while tensor.op.type in _CALLS:
        bodies = tf_internals_bodies.bodies_of(tensor.op)
        if not bodies or tensor.value_index >= len(bodies[0].outputs):
            break
        inner = bodies[0].outputs[tensor.value_index]
        places = [n for n, t in enumerate(bodies[0].inputs) if t is inner]
        if not places:
            break
        tensor = tensor.op.inputs[places[0]]
    return tensor


def unread_arguments(op: tf.Operation) -> frozenset[int]:
    """The numbers of arguments of which a call or branch makes nothing that it returns.

    TensorFlow builds the gradients of all that an op reads, constants included, and a
    backward function is given what these take. It is inlined, and what leads nowhere is
    dropped. (What XLA compiles by itself is given all.)
    """
    first = 0 if op.type in _CALLS else 1  # which branch is taken
    if op.type not in _CALLS | _BRANCHES:
        return frozenset()
    unread = frozenset(range(first, len(op.inputs)))
    bodies = tf_internals_bodies.bodies_of(op)
    for body in bodies:
        ops = body.get_operations()
        if len(body.inputs) != len(op.inputs) - first or any(
            map(tf_internals_bodies.made_for_xla, ops[-1:])
        ):
            return frozenset()
        unread &= {first + place for place in leading_nowhere(body)}
    return unread if bodies else frozenset()


def reads_to_give_out(body: tf.Graph, results: Sequence[Any]) -> list[tf.Tensor]:
    """The variables' values that a twin of a function needs to compute its results."""
    found: dict[int, tf.Tensor] = {}
    seen: set[int] = set()
    pending = [t for t in results if tf.is_symbolic_tensor(t) and t.graph is body]
    while pending:
        tensor = pending.pop()
        if tensor.op.type == "ReadVariableOp":
            found[id(tensor)] = tensor
        elif id(tensor.op) not in seen and _is_repeatable(tensor):
            seen.add(id(tensor.op))
            pending.extend(tensor.op.inputs)
    return sorted(found.values(), key=lambda t: tf_internals.creation_index(t.op))
