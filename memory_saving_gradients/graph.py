"""A training graph as plain data: what the planners see instead of a `tf.Graph`.

The graph of one call of `gradients()` holds two kinds of ops. *Forward ops* existed
before the call; *backward ops* were created by it. Both are numbered in one fixed
integer order in which every op comes after the ops that it reads (an op's id is its
position), so that no algorithm downstream ever needs names, sets or hashes to decide
an order: same graph, same plan, in every process.

Nothing here imports TensorFlow. `tf_read` makes a `TrainingGraph`; tests write theirs
by hand.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from memory_saving_gradients.errors import IllegalGraphError

__all__ = ["OpNode", "Pin", "Storage", "TensorNode", "TrainingGraph", "check"]


class Storage(enum.Enum):
    """Where the bytes of a tensor live."""

    OWN = "own"
    """In a buffer that its op allocates (or takes over from a dying input)."""
    ALIAS = "alias"
    """In the buffer of the op's first input: `Reshape`, `Identity` and their like. Of a
    call: in that of an argument or of an earlier output."""
    RESTING = "resting"
    """In memory that is there anyway: variables, constants, what the caller feeds."""


class Pin(enum.Enum):
    """Why an op may not be recomputed; the value completes "pinned because ..."."""

    STATEFUL = "it is stateful: it draws, reads or changes something"
    CONTROL_FLOW = "it stands inside a TensorFlow 1 loop or branch"
    HANDLE = "it reads or makes a resource, variant or reference"
    PLACEHOLDER = "its value comes from the caller"
    METADATA = "shapes are cheap to hold"
    CALL = "it calls a function"
    ASSIGNED = "it reads a reference variable that is assigned in between"
    FOREIGN = "another replica's backward pass reads it"


@dataclass(frozen=True, slots=True)
class TensorNode:
    """One output of one op.

    Attributes:
        id: Position in `TrainingGraph.tensors`.
        name: TensorFlow's name, such as `dense/MatMul:0`.
        op: Id of the producing op.
        bytes: Size in bytes; where a dimension is unknown, under the reader's
            stated assumption (`TrainingGraph.assumed`).
        storage: Whose buffer it lives in.
        source: The tensor whose buffer an `ALIAS` shares, else None.
    """

    id: int
    name: str
    op: int
    bytes: int
    storage: Storage = Storage.OWN
    source: int | None = None


@dataclass(frozen=True, slots=True)
class OpNode:
    """One operation.

    Attributes:
        id: Position in `TrainingGraph.ops`: every op it depends on has a smaller one.
        name: TensorFlow's name.
        type: The op type, such as `MatMul`.
        inputs: Ids of the tensors read, in the op's own order.
        outputs: Ids of the tensors produced.
        control_inputs: Ids of the ops that must have run before.
        seconds: Estimated run time.
        heavy: Whether recomputing it is dear for the bytes it yields.
        pin: Why it may not be recomputed, or None.
        in_place: Whether the kernel writes into an input of equal size that dies.
        inexpensive: Whether the executor runs it at once on the thread that made it
            ready, instead of handing it to its pool.
        metadata_only: Whether it needs only the shape of what it reads, so that it
            runs early and holds nothing (`Shape`, `ZerosLike`).
        device: The device string, as far as it is known.
        free_order: Whether ordering edges may be attached to it.
    """

    id: int
    name: str
    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    control_inputs: tuple[int, ...] = ()
    seconds: float = 0.0
    heavy: bool = False
    pin: Pin | None = None
    in_place: bool = False
    inexpensive: bool = False
    metadata_only: bool = False
    device: str = ""
    free_order: bool = True


@dataclass(frozen=True)
class TrainingGraph:
    """Forward and backward ops of one `gradients()` call.

    Attributes:
        ops: All ops in the fixed order, forward ops first.
        tensors: All tensors.
        forward_count: How many of `ops` are forward ops.
        targets: Ids of the tensors that are differentiated (`ys`).
        results: Ids of the gradient tensors handed to the caller: alive to the end.
        assumed: Ids of the tensors whose size rests on the assumption for unknown
            dimensions.
    """

    ops: tuple[OpNode, ...]
    tensors: tuple[TensorNode, ...]
    forward_count: int
    targets: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    assumed: tuple[int, ...] = ()

    @property
    def forward_ops(self) -> Sequence[OpNode]:
        """The ops that existed before the call."""
        return self.ops[: self.forward_count]

    @property
    def backward_ops(self) -> Sequence[OpNode]:
        """The ops that the call created."""
        return self.ops[self.forward_count :]

    @cached_property
    def seconds(self) -> float:
        """Estimated run time of the stock graph, forward and backward."""
        return sum(op.seconds for op in self.ops)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the ids of the ops that read it, ascending."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for tensor in dict.fromkeys(op.inputs):
                found[tensor].append(op.id)
        return tuple(map(tuple, found))

    def root(self, tensor: int) -> int:
        """The tensor that owns the buffer in which `tensor` lives."""
        node = self.tensors[tensor]
        while node.source is not None:
            node = self.tensors[node.source]
        return node.id


def check(graph: TrainingGraph) -> None:
    """Raises unless `graph` is a legal training graph.

    Args:
        graph: What is to be checked.

    Raises:
        IllegalGraphError: An id is out of range or not its position, an op and its
            outputs disagree on who makes them, an op reads something that comes
            after it (a forward op the output of a backward op, say), or an alias has
            no source among its op's inputs.
    """
    count = graph.forward_count
    _require(0 <= count <= len(graph.ops), f"it has {count} forward ops")
    for position, tensor in enumerate(graph.tensors):
        _require(tensor.id == position, f"tensor {tensor.name} has id {tensor.id}")
        _check_tensor(graph, tensor)
    for position, op in enumerate(graph.ops):
        _require(op.id == position, f"op {op.name} has id {op.id}")
        _check_op(graph, op)
    known = range(len(graph.tensors))
    for what, ends in (("target", graph.targets), ("result", graph.results)):
        for tensor_id in ends:
            _require(tensor_id in known, f"{what} {tensor_id} is no tensor")


def _check_tensor(graph: TrainingGraph, tensor: TensorNode) -> None:
    _require(tensor.bytes >= 0, f"tensor {tensor.name} has {tensor.bytes} bytes")
    _require(tensor.op in range(len(graph.ops)), f"{tensor.name} is made by no op")
    producer = graph.ops[tensor.op]
    _require(
        tensor.id in producer.outputs, f"{producer.name} does not make {tensor.name}"
    )
    aliased = tensor.storage is Storage.ALIAS
    _require(
        aliased == (tensor.source is not None),
        f"tensor {tensor.name} is {tensor.storage} with source {tensor.source}",
    )
    if tensor.source is not None:
        _require(
            tensor.source in producer.inputs
            or tensor.source in producer.outputs[: producer.outputs.index(tensor.id)],
            f"{tensor.name} aliases what {producer.name} does not read",
        )


def _check_op(graph: TrainingGraph, op: OpNode) -> None:
    known = range(len(graph.tensors))
    for number in op.outputs:
        _require(number in known, f"{op.name} makes no tensor as number {number}")
        tensor = graph.tensors[number]
        _require(tensor.op == op.id, f"{op.name} does not make {tensor.name}")
    for number in op.inputs:
        _require(number in known, f"{op.name} reads no tensor as number {number}")
        tensor = graph.tensors[number]
        _require(tensor.op < op.id, f"{op.name} reads {tensor.name}, made after it")
    for control in op.control_inputs:
        _require(
            0 <= control < op.id, f"{op.name} waits for op {control}, not before it"
        )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise IllegalGraphError(
            f"`memory_saving_gradients.graph.check`: not a training graph: {what}."
        )


def variables_read(graph: TrainingGraph) -> dict[int, list[int]]:
    """For the handle of each variable that the forward pass reads what it reads."""
    found: dict[int, list[int]] = {}
    for op in graph.forward_ops:
        if op.type == "ReadVariableOp":
            found.setdefault(op.inputs[0], []).extend(op.outputs)
        elif op.type in ("Variable", "VariableV2"):
            found.setdefault(op.outputs[0], []).extend(op.outputs)
    return found
