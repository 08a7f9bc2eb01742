"""From a `tf.Graph` to a `TrainingGraph`: the first of the two edges of the library.

Reading decides by op *type* and by TensorFlow's registry what may be recomputed, what
shares a buffer and what takes none. Names are never asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import tensorflow as tf

from memory_saving_gradients import (
    control_flow_v1,
    cost,
    op_types,
    replicas,
    resources,
    stored,
)
from memory_saving_gradients.ancestry import ancestors, in_order, used
from memory_saving_gradients.calls import Call, call_of, unread_arguments
from memory_saving_gradients.graph import (
    OpNode,
    Pin,
    Storage,
    TensorNode,
    TrainingGraph,
)
from memory_saving_gradients.pins import pin_of
from memory_saving_gradients.tf_shapes import full_shapes
from memory_saving_gradients.trip_counts import source_of

__all__ = ["Reading", "read"]

# Nothing is computed and nothing moved: not even read, by those that ask for a shape.
_FREE_TYPES = op_types.ALIAS_TYPES | op_types.RESTING_TYPES | op_types.SHAPE_TYPES


@dataclass
class Reading:
    """A training graph and the way back from its numbers to TensorFlow's objects.

    Attributes:
        graph: The plain data.
        ops: For each op id the `tf.Operation`.
        tensors: For each tensor id the `tf.Tensor`.
        unknown_dim: The assumption for unknown dimensions that sizes rest on.
        foreign: The `id`s of backward ops that are not this thread's to change.
        calls: For the id of each op that calls a known function what it gives out.
    """

    graph: TrainingGraph
    ops: list[tf.Operation]
    tensors: list[tf.Tensor]
    unknown_dim: int
    foreign: frozenset[int] = frozenset()
    calls: dict[int, Call] = field(default_factory=dict)
    _ids: dict[int, int] = field(default_factory=dict, repr=False)

    def settled(self) -> frozenset[int]:
        """Ids of outputs of calls that no twin of the function can compute."""
        return frozenset(
            self.graph.ops[op].outputs[place]
            for op, call in self.calls.items()
            for place in range(len(call.op.outputs))
            if place not in call.computed
            and place not in call.resting
            and place not in call.handed_on
        )

    def draws(self) -> frozenset[int]:
        """Ids of stateless random draws and of masks made of nothing else.

        Not those of what is as small as a seed.
        """
        graph = self.graph
        found: set[int] = set()
        for op in graph.forward_ops:
            if op.pin is not None:
                continue
            if op.type.startswith(("StatelessRandom", "StatelessTruncated")) or (
                op.type in op_types.MASK_TYPES
                and any(t in found for t in op.inputs)
                and all(
                    t in found or graph.tensors[t].bytes <= op_types.SCALAR_BYTES
                    for t in op.inputs
                )
            ):
                found.update(op.outputs)
        return frozenset(
            t for t in found if graph.tensors[t].bytes > op_types.SCALAR_BYTES
        )

    def tensor_id(self, tensor: tf.Tensor) -> int | None:
        """The id of a tensor, None if it is not part of the training graph."""
        return self._ids.get(id(tensor))


def read(
    created: Sequence[tf.Operation],
    targets: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    seeds: Sequence[tf.Tensor] = (),
    *,
    unknown_dim: int,
    foreign: Sequence[tf.Operation] = (),
    repeatable: Set[int] = frozenset(),
) -> Reading:
    """Reads what one call of `gradients()` differentiated and what it made.

    Args:
        created: The ops that the call created, in order of creation.
        targets: The tensors that were differentiated.
        results: The gradient tensors that the caller will get.
        seeds: Gradients that backpropagation starts from. Their ops are steps that
            others can wait for, even those that only hand a gradient of the user's on.
        unknown_dim: What an unknown dimension is taken to be.
        foreign: Ops of other threads in the midst of the created ones. They count as
            backward ops to which no order may be given, and what they read is pinned.
        repeatable: The `id`s of forward ops of which it is known that they may be
            recomputed, whatever their type.

    Returns:
        The training graph: the created ops that will run, and every op that a target
        or one of these depends on.
    """
    backward = used([*created, *foreign], results)
    forward = in_order(ancestors(backward, targets))
    reader = _Reader(forward, in_order(backward), unknown_dim, created, foreign)
    reader.repeatable = repeatable
    return reader.reading(targets, results, seeds)


class _Reader:
    """From ops in their order to plain data."""

    def __init__(
        self,
        forward: Sequence[tf.Operation],
        backward: Sequence[tf.Operation],
        unknown_dim: int,
        created: Sequence[tf.Operation],
        foreign: Sequence[tf.Operation],
    ) -> None:
        self.repeatable: Set[int] = frozenset()
        self._ops = [*forward, *backward]
        self._forward_count = len(forward)
        self._unknown_dim = unknown_dim
        self._tensors = [tensor for op in self._ops for tensor in op.outputs]
        self._op_ids = {id(op): number for number, op in enumerate(self._ops)}
        self._ids = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        self._shapes, self._assumed = full_shapes(self._ops, self._ids, unknown_dim)
        self._sizes = [
            math.prod(shape) * _item_bytes(tensor.dtype)
            for tensor, shape in zip(self._tensors, self._shapes, strict=True)
        ]
        for number, op in enumerate(self._ops):
            held = {}
            if stored.copies_list(op):
                held[0] = self._bytes(op.inputs[0])
            elif number < len(forward):
                held = stored.side_outputs(op, unknown_dim)
                for place in stored.lists_handed_through(op):
                    held[place] = self._bytes(op.inputs[place])
            for output, size in held.items():
                self._sizes[self._ids[id(op.outputs[output])]] = size
        self._calls = {
            number: call
            for number, call in enumerate(map(call_of, forward))
            if call is not None
        }
        self._shared: dict[int, dict[int, int]] = {}
        self._foreign = frozenset(map(id, foreign))
        if foreign:
            self._sizes = replicas.sizes_here(self._sizes, self._tensors, created)
        self._pinned = replicas.makers_of_what_is_read(foreign)
        self._frames = control_flow_v1.frames(self._ops)
        self._users_before = resources.users_before(backward)
        self._assigned = resources.assigned_references(forward)
        self._unorderable = self._foreign.union(
            control_flow_v1.unorderable(self._ops, self._frames)
        )

    def _bytes(self, tensor: tf.Tensor) -> int:
        return self._sizes[self._ids[id(tensor)]] if id(tensor) in self._ids else 0

    def reading(
        self,
        targets: Sequence[tf.Tensor],
        results: Sequence[tf.Tensor],
        seeds: Sequence[tf.Tensor],
    ) -> Reading:
        """The whole training graph."""
        starts = set(map(id, seeds))
        nodes: list[OpNode] = []
        tensor_nodes: list[TensorNode] = []
        for number, op in enumerate(self._ops):
            node = self._op_node(op, number)
            nodes.append(node)
            for index, output in enumerate(node.outputs):
                tensor = self._tensors[output]
                storage, source = Storage.OWN, None
                if id(tensor) not in starts:
                    storage, source = self._storage(node, index)
                size = self._sizes[output]
                tensor_nodes.append(
                    TensorNode(output, tensor.name, number, size, storage, source)
                )
        graph = TrainingGraph(
            tuple(nodes),
            tuple(tensor_nodes),
            self._forward_count,
            tuple(self._ids[id(t)] for t in targets if id(t) in self._ids),
            tuple(self._ids[id(t)] for t in results if id(t) in self._ids),
            tuple(self._assumed),
        )
        return Reading(
            graph,
            self._ops,
            self._tensors,
            self._unknown_dim,
            self._foreign,
            self._calls,
            self._ids,
        )

    def _op_node(self, op: tf.Operation, number: int) -> OpNode:
        created = number >= self._forward_count
        # An edge to what waits for others (copies, backward ops) is an edge, even so.
        unread = {
            place
            for place in (unread_arguments(op) if created else ())
            if id(op.inputs[place].op) not in self.repeatable
            and self._op_ids.get(id(op.inputs[place].op), number) < self._forward_count
        }
        inputs = tuple(
            self._ids[id(tensor)]
            # Without the back edges of v1 loops.
            for place, tensor in enumerate(op.inputs)
            if self._op_ids.get(id(tensor.op), number) < number and place not in unread
        )
        outputs = tuple(self._ids[id(tensor)] for tensor in op.outputs)
        signature = cost.Signature(
            op.type,
            [self._shapes[i] for i in inputs],
            [self._shapes[i] for i in outputs],
            sum(self._sizes[i] for i in inputs),
            sum(self._sizes[i] for i in outputs),
            {name: op.get_attr(name) for name in op_types.ATTRIBUTES.get(op.type, ())},
        )
        waits_for = [*op.control_inputs, *self._frames.get(id(op), ())]
        waits_for += self._users_before.get(id(op), ())
        free = op.type in _FREE_TYPES
        is_idle = free or self._does_nothing(op.type, inputs, outputs)
        return OpNode(
            id=number,
            name=op.name,
            type=op.type,
            inputs=inputs,
            outputs=outputs,
            control_inputs=tuple(
                sorted(
                    self._op_ids[id(other)]
                    for other in waits_for
                    if self._op_ids.get(id(other), number) < number
                )
            ),
            seconds=0.0 if is_idle else cost.seconds(signature),
            heavy=cost.is_heavy(signature),
            pin=self._pin(op, number),
            in_place=op.type in op_types.IN_PLACE_TYPES,
            inexpensive=_is_inexpensive(op),
            metadata_only=self._asks_for_shapes(op, created),
            device=op.device,
            free_order=id(op) not in self._unorderable,
        )

    def _asks_for_shapes(self, op: tf.Operation, created: bool) -> bool:
        """Whether an op runs early, on originals; of a copy it has to wait for that."""
        return (
            op.type in op_types.SHAPE_TYPES
            or (created and op.type in op_types.ZEROS_TYPES)
        ) and not any(id(t.op) in self.repeatable for t in op.inputs)

    def _pin(self, op: tf.Operation, number: int) -> Pin | None:
        is_twin = number in self._calls and self._calls[number].computed
        if id(op) in self.repeatable or is_twin:
            return None
        pin = pin_of(op)
        if (
            pin is None
            and self._assigned
            and any(id(source_of(t)) in self._assigned for t in op.inputs)
        ):
            return Pin.ASSIGNED
        return pin or (Pin.FOREIGN if id(op) in self._pinned else None)

    def _does_nothing(
        self, kind: str, inputs: Sequence[int], outputs: Sequence[int]
    ) -> bool:
        """Whether an op finds no axis to sum over, nothing to repeat."""
        return (
            kind in op_types.IDLE_ALIAS_TYPES
            and bool(inputs and outputs)
            and self._sizes[inputs[0]] == self._sizes[outputs[0]]
        )

    def _aliases_of_call(self, op: tf.Operation) -> dict[int, int]:
        """For outputs that have no buffer of their own the tensors that have it."""
        found = {n: op.outputs[first] for n, first in stored.shared_outputs(op).items()}
        found |= {n: op.inputs[n] for n in stored.lists_handed_through(op)}
        return {n: self._ids[id(tensor)] for n, tensor in found.items()}

    def _storage(self, node: OpNode, index: int) -> tuple[Storage, int | None]:
        """Where output number `index` of an op lives."""
        if node.type in op_types.RESTING_TYPES:
            return Storage.RESTING, None
        if node.id in self._calls:
            call = self._calls[node.id]
            if index in call.handed_on:
                return Storage.ALIAS, node.inputs[call.handed_on[index]]
            if index in call.resting:
                return Storage.RESTING, None
        if node.type in op_types.CALL_TYPES and node.id < self._forward_count:
            if node.id not in self._shared:
                self._shared[node.id] = self._aliases_of_call(self._ops[node.id])
            source = self._shared[node.id].get(index)
            return (Storage.OWN if source is None else Storage.ALIAS), source
        if node.pin is None and node.inputs:
            if node.type in op_types.ALIAS_TYPES:
                place = index if node.type == "IdentityN" else 0
                return Storage.ALIAS, node.inputs[place]
            if self._does_nothing(node.type, node.inputs, node.outputs):
                return Storage.ALIAS, node.inputs[0]
        return Storage.OWN, None


def _item_bytes(dtype: tf.DType) -> int:
    """Bytes of one element; handles and variants are pointers to memory elsewhere."""
    if dtype.base_dtype in (tf.resource, tf.variant, tf.string):
        return 8
    return int(dtype.base_dtype.size)


def _is_inexpensive(op: tf.Operation) -> bool:
    """Whether the executor runs `op` at once (kernels on a GPU only enqueue)."""
    return op.type in op_types.INEXPENSIVE_TYPES or "GPU" in op.device.upper()
