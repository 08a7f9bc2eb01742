"""Copies of what a loop's body computes, made of other inputs, in another graph.

A loop that shall be run again must have no state. What keeps most bodies from that is
that they read variables. So a body is copied, with the values of the variables as
inputs: op by op, but for loops, branches and calls inside it, which are built anew by
the functions of TensorFlow that built the originals. Each of them thus has graphs of
its own, as autodiff, which changes them, expects.

Custom gradients are closures that remember tensors of the original. What they ask for
is translated (`tf_internals_loops.hand_gradient_on`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    op_types,
    tf_internals,
    tf_internals_bodies,
    tf_internals_loops,
)

__all__ = [
    "Unrepeatable",
    "copied",
    "loop_of_copies",
    "original_of",
    "variables_read",
]

HARMLESS = frozenset("Assert CheckNumerics CheckNumericsV2".split())
"""They are said to have state, and may be run again: what held once holds again."""

_BRANCHES = frozenset("Case If StatelessCase StatelessIf".split())
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))

# The attribute of a copy that holds its original.
_ORIGINAL = "_memory_saving_gradients_original"


def original_of(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor is a copy of; the tensor itself if it is none."""
    while (op := getattr(tensor.op, _ORIGINAL, None)) is not None:
        tensor = op.outputs[tensor.value_index]
    return tensor


class Unrepeatable(Exception):
    """Something in a body may not be run again; the message says what."""


def variables_read(
    graph: tf.Graph, handles: Mapping[int, int]
) -> dict[int, tf.Operation]:
    """Which variables a body reads; nothing else in it may have state.

    Args:
        graph: The body, or the condition, of a loop.
        handles: For the `id`s of its inputs that are handles what to call them.

    Returns:
        For each variable that is read one of the ops that read it.

    Raises:
        Unrepeatable: Something may not be run again.
    """
    found: dict[int, tf.Operation] = {}
    for op in graph.get_operations():
        if op.type in op_types.PLACEHOLDER_TYPES:
            continue
        inputs = list(op.inputs)
        if any(t.dtype == tf.resource and id(t) not in handles for t in inputs):
            raise _unrepeatable(op)
        if op.type == "ReadVariableOp":
            found.setdefault(handles[id(op.inputs[0])], op)
        elif op.type in op_types.CALL_TYPES:
            for body, given in _inside(op):
                passed = {
                    id(inner): handles[id(outer)]
                    for inner, outer in zip(body.inputs, given, strict=False)
                    if id(outer) in handles
                }
                for name, read in variables_read(body, passed).items():
                    found.setdefault(name, read)
        elif (
            tf_internals.in_control_flow_v1(op)
            or any(t.dtype == tf.resource for t in (*inputs, *op.outputs))
            or (tf_internals.is_stateful(op) and op.type not in HARMLESS)
        ):
            raise _unrepeatable(op)
    return found


def _unrepeatable(op: tf.Operation) -> Unrepeatable:
    return Unrepeatable(f"{op.type} {op.name} may not be run again")


def _inside(op: tf.Operation) -> Iterator[tuple[tf.Graph, list[tf.Tensor]]]:
    """The graphs inside a loop, branch or call, and what each is given."""
    inputs = list(op.inputs)
    if op.type in op_types.LOOP_TYPES:
        graphs = tf_internals_bodies.graphs_of_loop(op)
    elif op.type in _BRANCHES:
        graphs = tuple(tf_internals_bodies.bodies_of(op))
        inputs = inputs[1:]
        if op.type.endswith("If") and op.inputs[0].dtype != tf.bool:
            raise _unrepeatable(op)
    elif op.type in _CALLS:
        graphs = tuple(tf_internals_bodies.bodies_of(op))
    else:
        raise _unrepeatable(op)
    for graph in graphs or (None,):
        if graph is None or len(graph.inputs) < len(inputs):
            raise Unrepeatable(f"what {op.type} {op.name} runs is not known to Python")
        yield graph, inputs


def copied(
    graph: tf.Graph,
    outputs: Sequence[tf.Tensor],
    given: Mapping[int, tf.Tensor],
    values: Mapping[int, tf.Tensor],
    around: _Copies | None = None,
) -> list[tf.Tensor]:
    """Copies what it takes to compute some tensors into the graph that is being built.

    Args:
        graph: Where the originals are.
        outputs: Tensors of it.
        given: For the `id`s of its inputs what to read instead.
        values: For the `id`s of those that are handles the values of the variables.
        around: The copies of the graph around, if that is copied, too.
    """
    here = tf.compat.v1.get_default_graph()
    copies = _Copies(graph, here, dict(given), dict(values), around)
    checks = [op for op in graph.get_operations() if _checks(op)]
    for op in _in_order([*(t.op for t in outputs), *checks]):
        copies.add(op)
    return [copies.here(t) for t in outputs]


def _checks(op: tf.Operation) -> bool:
    """Whether an op, or what it runs, is there for what it does, such as assert."""
    if op.type in op_types.CALL_TYPES:
        bodies = tf_internals_bodies.bodies_of(op)
        return any(_checks(inner) for body in bodies for inner in body.get_operations())
    return op.type in HARMLESS


def _in_order(targets: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The ops that some need, and these, each behind what it waits for."""
    ordered: dict[int, tf.Operation] = {}
    pending = list(reversed(targets))
    entered: set[int] = set()
    while pending:
        op = pending[-1]
        if id(op) in ordered:
            pending.pop()
        elif id(op) in entered:
            ordered[id(op)] = pending.pop()
        else:
            entered.add(id(op))
            waits = sorted(op.control_inputs, key=tf_internals.creation_index)
            before = [*(t.op for t in op.inputs), *waits]  # they come from a set
            pending.extend(reversed([o for o in before if id(o) not in entered]))
    return list(ordered.values())


@dataclass
class _Copies:
    """Copies of one graph's ops, while they are being made.

    Attributes:
        graph: Where the originals are.
        target: Where the copies are.
        given: For the `id` of each tensor of the original its copy. (The graph keeps
            the tensors, so that no other has that `id`.)
        values: For the `id`s of handles the values of the variables.
        around: The copies of the graph around, if that is copied, too.
        ops: For the `id` of each op the copy that others wait for.
    """

    graph: tf.Graph
    target: tf.Graph
    given: dict[int, tf.Tensor]
    values: dict[int, tf.Tensor]
    around: _Copies | None
    ops: dict[int, tf.Operation] = field(default_factory=dict)

    def here(self, tensor: tf.Tensor) -> tf.Tensor:
        """The copy of a tensor, in the graph that is being built."""
        return self._inside(self.given, tensor)

    def twin_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The copy of a tensor of this graph or one around; others as they are."""
        copies: _Copies | None = self
        while copies is not None:
            if id(tensor) in copies.given:
                return copies.given[id(tensor)]
            copies = copies.around
        return tensor

    def add(self, op: tf.Operation) -> None:
        """Copies an op, of which everything before it has been copied."""
        if op.type in op_types.PLACEHOLDER_TYPES:
            return
        if op.type == "ReadVariableOp":
            value = self._inside(self.values, op.inputs[0])
            self.given[id(op.outputs[0])] = value
            return
        waits = [self.ops[id(o)] for o in op.control_inputs if id(o) in self.ops]
        if op.type in op_types.CALL_TYPES:
            with (
                tf.control_dependencies(waits),
                self.target.device(op.device or None),
                tf_internals_bodies.no_recording(),
            ):
                made = self._built_anew(op)
        else:
            copy = self._plain(op)
            for waited_for in waits:
                tf_internals.add_control_input(copy, waited_for)
            self.ops[id(op)] = copy
            made = list(copy.outputs)
        for original, tensor in zip(op.outputs, made, strict=True):
            if tensor is not None:
                self.given[id(original)] = tensor
                self.ops.setdefault(id(op), tensor.op)

    def _inside(self, known: dict[int, tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
        found = known[id(tensor)]
        if found.graph is not self.target:
            found = known[id(tensor)] = self.target.capture(found)
        return found

    def _plain(self, op: tf.Operation) -> tf.Operation:
        inputs = [self.here(t) for t in op.inputs]
        copy = tf_internals_bodies.copy_whole(self.target, op, inputs)
        tf_internals_loops.hand_gradient_on(op, copy, self.twin_of)
        setattr(copy, _ORIGINAL, op)
        return copy

    def _built_anew(self, op: tf.Operation) -> list[tf.Tensor | None]:
        if op.type in op_types.LOOP_TYPES:
            start = [
                None if t.dtype == tf.resource else self.here(t) for t in op.inputs
            ]
            most = tf.get_static_value(start[1])
            limit = start[1] if most is None else None if most < 0 else int(most)
            values = {
                place: self.values[id(t)]
                for place, t in enumerate(op.inputs)
                if id(t) in self.values
            }
            return loop_of_copies(op, start, values, limit, "while", self)
        runs = [self._run(op, graph, given) for graph, given in _inside(op)]
        if op.type in _CALLS:
            function = tf.function(
                runs[0], autograph=False, jit_compile=self._alone(op) or None
            )
            made = function()
        elif op.type in ("If", "StatelessIf"):
            made = tf.cond(self.here(op.inputs[0]), *runs)
        else:
            made = tf.switch_case(self.here(op.inputs[0]), runs)
        return list(made) if isinstance(made, list | tuple) else [made]

    def _alone(self, op: tf.Operation) -> bool:
        """Whether a call is compiled by XLA, and what is around it not."""
        (body,) = tf_internals_bodies.bodies_of(op)
        return not tf_internals.in_xla(self.target) and any(
            map(tf_internals_bodies.made_for_xla, body.get_operations()[-1:])
        )

    def _run(
        self, op: tf.Operation, graph: tf.Graph, given: Sequence[tf.Tensor]
    ) -> Callable[[], list[tf.Tensor]]:
        """What runs a branch or a function, given what the original is given."""
        pairs = list(zip(graph.inputs, given, strict=False))
        tensors = {id(i): self.here(t) for i, t in pairs if t.dtype != tf.resource}
        values = {id(i): self.values[id(t)] for i, t in pairs if id(t) in self.values}
        results = graph.outputs[: len(op.outputs)]
        return lambda: copied(graph, results, tensors, values, self)


def loop_of_copies(
    loop: tf.Operation,
    start: Sequence[tf.Tensor | None],
    values: Mapping[int, tf.Tensor],
    limit: Any,
    name: str,
    around: _Copies | None = None,
) -> list[tf.Tensor | None]:
    """A loop, in the graph that is being built, over copies of another loop's graphs.

    Args:
        loop: The other loop.
        start: What it starts from: a tensor for each of its inputs that is no handle.
            The first counts iterations, the second is how many there may be (the
            condition of the loop reads them).
        values: For the numbers of handles the values of the variables.
        limit: After how many iterations it ends in any case, or None.
        name: What it is called.
        around: The copies of the graph around, if that is copied, too.

    Returns:
        What each output of the loop is then, None for handles.
    """
    condition, body = tf_internals_bodies.graphs_of_loop(loop)
    assert condition is not None and body is not None
    count = len(start)
    moving = [p for p in range(count) if not tf_internals_loops.hands_on(body, p)]
    moving = [p for p in moving if start[p] is not None]

    def in_graph(graph: tf.Graph, outputs: list[Any], state: Any) -> list[tf.Tensor]:
        tensors = [*start]
        for place, tensor in zip(moving, state, strict=True):
            tensors[place] = tensor
        given = {
            id(i): t
            for i, t in zip(graph.inputs, tensors, strict=False)
            if t is not None
        }
        read = {id(graph.inputs[place]): value for place, value in values.items()}
        return copied(graph, outputs, given, read, around)

    def goes_on(*state: tf.Tensor) -> tf.Tensor:
        return in_graph(condition, [condition.outputs[0]], state)[0]

    def iteration(*state: tf.Tensor) -> list[tf.Tensor]:
        return in_graph(body, [body.outputs[p] for p in moving], state)

    found = tf.while_loop(
        goes_on,
        iteration,
        [start[p] for p in moving],
        shape_invariants=[body.inputs[p].shape for p in moving],
        parallel_iterations=loop.get_attr("parallel_iterations"),
        maximum_iterations=limit,
        name=name,
    )
    results = list(start)
    for place, tensor in zip(moving, found, strict=True):
        results[place] = tensor
    return results
