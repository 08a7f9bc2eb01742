"""Making ties real: control edges for the executor, data edges for XLA.

The executor keeps every control edge, so a tie is one: the waiting op gets a control
input, even if it reads what the other op makes, for Grappler moves data edges: of
`c1 * (c2 * x)` with constants c it makes `(c1 * c2) * x`, and the product no longer
waits for anything but x. (Every gelu holds such pairs.) So their constants are hidden
from it, too, behind a `PlaceholderWithDefault`. Only a call, a branch or a loop is
different: once its body has been inlined, an edge from it stands for the body's side
effects and not for its results. There the edge hangs on an `Identity` of the first
result.

XLA drops control edges, and then merges each copy with its original (common
subexpression elimination), so that nothing is saved; `XlaOptimizationBarrier` is
expanded before that pass runs on CPUs. What XLA cannot see through is data. A copy that
reads only kept tensors reads the smallest of them through

    where(bits(g) != odd, x, 0)    with g one element of the incoming gradient,

where *odd* is one particular NaN pattern that no arithmetic produces. The copy now
depends on the gradient, every bit of x survives (-0.0, NaN and denormals included), and
the selection fuses into the copy. If the incoming gradient is a compile-time constant
(a loss that is a plain sum), XLA folds the predicate; so the predicate also takes an
element of the last result of the segment before, and the seed depends on the loss
(`tied_seed`).

Integer seeds of stateless random ops must be tied as well, or dropout masks are merged
and held. An integer is tied only if its value comes from a variable, the caller or a
stateful op: others may have to stay compile-time constants (a shape, an axis).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients import op_types, tf_internals
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.schedule import Schedule, next_backward
from memory_saving_gradients.tf_read import Reading

__all__ = ["ControlFence", "DataFence", "Fence", "hold_back", "tied_seed"]

# A quiet bit left out and a payload that no hardware writes: a NaN that never occurs.
_ODD = {
    tf.float32: (tf.int32, 0x7FA54B1D),
    tf.float64: (tf.int64, 0x7FF4B1D54B1D54B1),
    tf.float16: (tf.int16, 0x7D37),
    tf.bfloat16: (tf.int16, 0x7FA5),
}


class Fence(abc.ABC):
    """How the ties of a schedule are made real while its steps are written in order."""

    @abc.abstractmethod
    def inputs(self, index: int, op: int, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """What the copy of `op` at step `index` shall read instead of `inputs`."""

    @abc.abstractmethod
    def copied(self, index: int, copy: tf.Operation) -> None:
        """Told of each copy when it has been made."""

    @abc.abstractmethod
    def backward(self, index: int, op: tf.Operation) -> None:
        """Told of each backward op when its inputs have been redirected."""


class ControlFence(Fence):
    """Ties as control edges."""

    def __init__(self, reading: Reading, schedule: Schedule) -> None:
        self._waits: dict[int, list[int]] = {}
        for waiter, waited in schedule.ties:
            self._waits.setdefault(waiter, []).append(waited)
        self._written: dict[int, tf.Operation] = {}
        self._handles: dict[int, tf.Operation] = {}
        self._hidden: dict[int, tf.Tensor] = {}

    def inputs(self, index: int, op: int, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Unchanged: control edges leave data alone."""
        return inputs

    def copied(self, index: int, copy: tf.Operation) -> None:
        """Adds the copy's control edges."""
        self.backward(index, copy)

    def backward(self, index: int, op: tf.Operation) -> None:
        """Adds the op's control edges."""
        self._written[index] = op
        self._hide_constants(op)
        for waited in self._waits.get(index, ()):
            tf_internals.add_control_input(op, self._handle(waited))

    def _handle(self, index: int) -> tf.Operation:
        """The op that an edge from step `index` starts at."""
        if index not in self._handles:
            self._handles[index] = _waitable(self._written[index])
        return self._handles[index]

    def _hide_constants(self, op: tf.Operation) -> None:
        """Keeps Grappler from merging a constant of `op` into the op before or after.

        Gradients do not flow through constants: nothing needs to be restored before
        the graph is differentiated again.
        """
        if op.type not in op_types.REASSOCIATED_TYPES:
            return
        for place, tensor in enumerate(op.inputs):
            other = op.inputs[1 - place].op
            if tensor.op.type != "Const":
                continue
            if other.type not in op_types.REASSOCIATED_TYPES:
                continue
            if id(tensor) not in self._hidden:
                self._hidden[id(tensor)] = tf.raw_ops.PlaceholderWithDefault(
                    input=tensor, shape=tensor.shape, name="recompute/constant"
                )
            tf_internals.update_input(op, place, self._hidden[id(tensor)])


class DataFence(Fence):
    """Ties as data edges that XLA cannot fold away."""

    def __init__(self, reading: Reading, buffers: Buffers, schedule: Schedule) -> None:
        self._reading = reading
        self._buffers = buffers
        self._schedule = schedule
        self._runs = schedule.runs
        self._newest_run: dict[int, int] = {}
        self._predicate: tf.Tensor | None = None
        self._newest: tf.Tensor | None = None
        self._serving: list[int] = next_backward(schedule.steps)
        self._runtime = _RuntimeValues(reading)

    def inputs(self, index: int, op: int, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Ties an entry copy: one that reads nothing recomputed.

        Of copies of one op all but the first are also told apart from it, if the run
        that they belong to begins with them.
        """
        if self._follows_copies(index, op):
            return inputs
        predicate = self._predicate_at(index)
        tied = list(inputs)
        for place in () if predicate is None else self._places_to_tie(op):
            tied[place] = _select(predicate, inputs[place])
        return tied

    def _follows_copies(self, index: int, op: int) -> bool:
        """Whether data from copies that are tied themselves orders this one."""
        tensors, held = self._reading.graph.tensors, self._schedule.kept
        made_by = {tensors[t].op for t in self._buffers.reads[op] if t not in held}
        if self._runs[op] == 1:
            return not made_by.isdisjoint(self._runs)
        run = self._serving[index]
        return any(self._newest_run.get(maker) == run for maker in made_by)

    def _places_to_tie(self, op: int) -> list[int]:
        """One operand, but for a call all that it computes with."""
        graph = self._reading.graph
        if op not in self._reading.calls:
            place = self._place_to_tie(op)
            return [] if place is None else [place]
        return [
            place
            for place, tensor in enumerate(graph.ops[op].inputs)
            if self._reading.tensors[tensor].dtype.is_floating
        ]

    def copied(self, index: int, copy: tf.Operation) -> None:
        """Remembers for which backward op it was copied."""
        self._newest_run[self._schedule.steps[index].op] = self._serving[index]

    def backward(self, index: int, op: tf.Operation) -> None:
        """Remembers the newest result, which the next segment is tied to."""
        self._predicate = None
        node = self._reading.graph.ops[self._schedule.steps[index].op]
        if node.metadata_only:
            return
        for output in op.outputs:
            if output.dtype in _ODD:
                self._newest = output
                break

    def _predicate_at(self, index: int) -> tf.Tensor | None:
        """One predicate for all copies that serve the same backward op."""
        if self._predicate is None:
            gradient = self._incoming(self._schedule.steps[self._serving[index]].op)
            tensors = [t for t in (gradient, self._newest) if t is not None]
            unique = list({id(t): t for t in tensors}.values())
            if not unique:
                return None
            predicate = _not_odd(unique[0])
            for tensor in unique[1:]:
                predicate = tf.logical_and(predicate, _not_odd(tensor))
            self._predicate = predicate
        return self._predicate

    def _incoming(self, op: int) -> tf.Tensor | None:
        """A gradient that the backward op reads."""
        graph = self._reading.graph
        for tensor in graph.ops[op].inputs:
            made = self._reading.tensors[tensor]
            if graph.tensors[tensor].op >= graph.forward_count and made.dtype in _ODD:
                return made
        return None

    def may_tie(self, op: int, place: int, tensor: int) -> bool:
        """Whether an operand may depend on what only a run can know."""
        dtype = self._reading.tensors[tensor].dtype
        if dtype.is_floating or dtype.is_complex:
            return True
        return (dtype.is_integer or dtype == tf.bool) and self._runtime.has(tensor)

    def _place_to_tie(self, op: int) -> int | None:
        """The smallest operand that may be tied."""
        graph = self._reading.graph
        best: int | None = None
        inputs = graph.ops[op].inputs
        for place, tensor in enumerate(inputs):
            if self.may_tie(op, place, tensor) and (
                best is None
                or graph.tensors[tensor].bytes < graph.tensors[inputs[best]].bytes
            ):
                best = place
        return best


class _RuntimeValues:
    """Which tensors have a value that only a run can give."""

    _SOURCES = frozenset(("Placeholder", "ReadVariableOp", "_Arg", "Arg"))
    _SHAPES = frozenset(("Rank", "Shape", "ShapeN", "Size"))

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._known: list[bool] | None = None

    def has(self, tensor: int) -> bool:
        graph = self._reading.graph
        if self._known is None:
            known = [False] * len(graph.ops)
            for op in graph.ops:
                known[op.id] = (
                    op.type in self._SOURCES
                    or tf_internals.is_stateful(self._reading.ops[op.id])
                    or (
                        op.type not in self._SHAPES
                        and any(known[graph.tensors[t].op] for t in op.inputs)
                    )
                )
            self._known = known
        return self._known[graph.tensors[tensor].op]


def _not_odd(tensor: tf.Tensor) -> tf.Tensor:
    """True, but only a run can know it."""
    integer, pattern = _ODD[tensor.dtype]
    element = tf.reshape(tensor, [-1])[0]
    return tf.not_equal(tf.bitcast(element, integer), tf.constant(pattern, integer))


def _select(predicate: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """`tensor`, bit for bit, but dependent on the predicate."""
    if tensor.dtype == tf.bool:
        return tf.logical_and(tensor, predicate)
    return tf.where(predicate, tensor, tf.zeros([], tensor.dtype))


def _waitable(op: tf.Operation) -> tf.Operation:
    """The op that a control edge from `op` starts at."""
    if op.type in op_types.CALL_TYPES and op.outputs:
        return tf.identity(op.outputs[0], "recompute/wait").op
    return op


def hold_back(seeds: Sequence[tf.Tensor], reading: Reading) -> None:
    """Makes the seeds wait until the forward pass has come to its end.

    They wait for the last ops that the backward pass needs anyway, not for `ys`:
    whoever fetches the gradients alone must not run what only a loss hangs on.
    """
    graph = reading.graph
    needed = [False] * graph.forward_count
    read_on = [False] * graph.forward_count
    for op in reversed(graph.ops):
        if op.id >= graph.forward_count or needed[op.id]:
            before = {graph.tensors[t].op for t in op.inputs} | {*op.control_inputs}
            for other in before:
                if other < graph.forward_count:
                    needed[other] = True
                    read_on[other] |= op.id < graph.forward_count
    ends = [
        _waitable(reading.ops[op.id])
        for op in graph.forward_ops
        if needed[op.id] and not read_on[op.id] and op.free_order
    ]
    for seed in seeds:
        for end in ends:
            tf_internals.add_control_input(seed.op, end)


def tied_seed(ys: Sequence[tf.Tensor], seed: tf.Tensor) -> tf.Tensor:
    """The seed, but known only once the loss is, under XLA."""
    for y in ys:
        if y.dtype in _ODD:
            return _select(_not_odd(y), seed)
    return seed
