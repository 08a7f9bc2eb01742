"""Recomputation inside loops, branches and called functions.

In the graph around it each of these is one op. What costs memory is what its gradient
takes from *inside*: TensorFlow differentiates the body in a graph of its own, the
*gradient body*, and whatever this asks for of the body's intermediates is exported, by
a loop once an iteration. So the gradient body is answered in another way:

1. `Captures`: while autodiff builds the gradient body, an intermediate that may be
   recomputed is copied into it, with all that it is made of, down to the body's own
   inputs, to what may not be recomputed and to what shall be kept. Only these are
   captured as stock would. Constants are copied, too: compilers may need to know them.
2. The gradient body now is a training graph like any other: copies, then backward ops.
   It is read and planned as such. The copies stand for the forward pass, of which the
   plan may keep some: these are captured after all.
3. Copies wait for the gradient that comes in, and segments for each other, as in any
   plan (`fences`). So no iteration is recomputed before its turn.

Captures are decided on before they are made: one that is taken away later leaves a
placeholder behind, of which XLA dies.

What a body keeps is wanted as many times as there are bodies of its kind around
(`Inside.times`), while what it recomputes is there once. So a plan is judged by its
peak plus that many times what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from memory_saving_gradients import op_types, stored, tf_internals, tf_internals_bodies
from memory_saving_gradients.calls import handed_on, reads_to_give_out
from memory_saving_gradients.pins import pin_of
from memory_saving_gradients.split import held_again, of_outer, stand_in
from memory_saving_gradients.trip_counts import source_of

__all__ = ["Captures"]

_MUCH_SMALLER = 16
"""What reduces its input to this part of it is kept: it costs next to nothing."""

_READING_LISTS = frozenset(("TensorListGetItem", "TensorListLength"))
"""Lists are values: to read an element once more gives the same tensor."""

# The attribute of a body that lists the ops which tell its gradients shapes.
_SHAPES = "_memory_saving_gradients_shapes"


@dataclass
class Captures:
    """What a gradient body reads of the body that it is the gradient of.

    Attributes:
        graph: The gradient body.
        body: The body.
        keeps: Whether a tensor of the body shall be captured as stock would.
        unknown_dim: What an unknown dimension is taken to be.
        replays_loops: Whether a loop inside this one is run again as a whole. What it
            stores for its gradient is then there for one of its runs at a time.
        originals: For the `id` of each tensor of a copy the tensor of the body.
        copies: The `id`s of all copies.
        held: For the `id` of each tensor that was captured as stock would the bytes
            that are held for it, once an iteration: 0 if it is there anyway.
        inside: The `id`s of all ops of the gradient body that were made in order to
            answer it: copies and what captures consist of.
    """

    graph: tf.Graph
    body: tf.Graph
    keeps: Callable[[tf.Tensor], bool]
    unknown_dim: int
    replays_loops: bool
    originals: dict[int, tf.Tensor] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    _here: dict[int, tf.Tensor] = field(default_factory=dict)
    _invariant: set[int] = field(default_factory=set)
    _ends: set[int] = field(default_factory=set)
    _given_out: set[int] = field(default_factory=set)
    _stock: Callable[..., tf.Tensor] | None = None

    def __post_init__(self) -> None:
        inputs = {id(t) for t in self.body.inputs}
        if tf_internals_bodies.is_loop_body(self.body):
            # Its results are the next iteration's inputs, which are held anyway.
            self._invariant = inputs & {id(t) for t in self.body.outputs}
        else:
            self._invariant = inputs
            results = tf.nest.flatten(
                self.body.structured_outputs, expand_composites=True
            )
            ends = [t for t in results if tf.is_tensor(t)]
            self._ends = set(map(id, ends))
            self._given_out = self._ends.union(id(source_of(t)) for t in ends)

    def capture(
        self, stock: Callable[..., tf.Tensor], tensor: tf.Tensor, name: str
    ) -> tf.Tensor:
        """What stands in the gradient body for a tensor from outside."""
        self._stock = stock
        if tensor.graph is not self.body:
            return stock(tensor, name)
        tensor = of_outer(handed_on(tensor))
        pending = [tensor]
        while pending:
            current = pending[-1]
            if id(current) in self._here:
                pending.pop()
            elif not self._redone(current):
                self._here[id(current)] = self.as_stock(current)
                pending.pop()
            else:
                inputs = self._sources(current.op)
                missing = [t for t in inputs if id(t) not in self._here]
                if missing:
                    pending.extend(reversed(missing))
                else:
                    self._copy(current.op)
                    pending.pop()
        return self._here[id(tensor)]

    def as_stock(self, tensor: tf.Tensor) -> tf.Tensor:
        """Captures a tensor of the body, so that it is held until it is read."""
        assert self._stock is not None
        with (
            tf_internals.ops_of_this_thread(self.graph) as made,
            tf_internals_bodies.at_any_time(self.graph),
        ):
            if self._is_same_always(tensor):
                found = tf_internals_bodies.capture_result(
                    self.graph, self.body, tensor
                )
            else:
                found = self._stock(tensor, tensor.op.name)
        self.inside.update(map(id, made))
        self.inside.add(id(found.op))
        self.held[id(found)] = self._held_bytes(tensor)
        return found

    def give_out_reads(self) -> None:
        """Has a called function give out all that its twin needs (see `calls`)."""
        if not self._ends:
            return
        results = self.body.outputs[: len(self._ends)]
        for tensor in reads_to_give_out(self.body, results):
            if id(tensor) not in self._here:
                self._here[id(tensor)] = self.as_stock(tensor)

    def create(
        self,
        stock: Callable[..., Any],
        op_type: str,
        inputs: Sequence[tf.Tensor],
        dtypes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Makes an op; one that asks for a shape is made in the body, and run there.

        Otherwise what it asks the shape of would be recomputed for that, or held. (Not
        under XLA, which knows all shapes, and needs to.)
        """
        if (
            op_type not in op_types.SHAPE_TYPES
            or not all(t.graph is self.body for t in inputs)
            or tf_internals_bodies.is_loop_body(self.body)  # stock does so by itself
            or tf_internals.in_xla(self.graph)
        ):
            return stock(op_type, inputs, dtypes, *args, **kwargs)
        # Not `vars`: of a branch the graph is a weak proxy, which has none.
        if not hasattr(self.body, _SHAPES):
            setattr(self.body, _SHAPES, {})
        known = getattr(self.body, _SHAPES)
        key = (op_type, *map(id, inputs), *map(repr, dtypes or ()))
        if key not in known:
            known[key] = tf_internals_bodies.create_op_in(
                self.body, op_type, inputs, dtypes, *args, **kwargs
            )
        return known[key]

    def _copy(self, op: tf.Operation) -> None:
        name = tf_internals.unique_name(self.graph, f"recompute/{op.name}")
        inputs = [self._here[id(t)] for t in self._sources(op)]
        with tf_internals.creation_scope(self.graph):
            copy = tf_internals.copy_op(self.graph, op, name, inputs, same_graph=False)
        self.inside.add(id(copy))
        self.copies.add(id(copy))
        for original, made in zip(op.outputs, copy.outputs, strict=True):
            # Another output of the op may be one that shall be kept.
            if self._redone(original):
                self._here.setdefault(id(original), made)
            self.originals[id(made)] = original

    def _sources(self, op: tf.Operation) -> list[tf.Tensor]:
        """The tensors, of the body or from outside, that a copy of an op is made of."""
        inputs = [handed_on(t) for t in op.inputs]
        # Lists that are only written to: those that the loop began with will do.
        for place in sorted(held_again(op) or ()):
            loop = tf_internals_bodies.loop_of(self.body)
            assert loop is not None
            number = [id(t) for t in self.body.inputs].index(id(inputs[place]))
            inputs[place] = stand_in(loop, number)
            if id(inputs[place]) not in self._here:
                assert self._stock is not None
                found = self._stock(inputs[place], inputs[place].op.name)
                self._here[id(inputs[place])] = found
                self.inside.add(id(found.op))
        return inputs

    def _redone(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the body is recomputed."""
        op = tensor.op
        if op.type in ("Const", "EmptyTensorList"):
            return True
        if held_again(op) is not None:
            return True
        if op.type == "StatelessWhile":
            return self.replays_loops and tf_internals_bodies.is_loop_body(self.body)
        if op.type in _READING_LISTS:
            return id(op.inputs[0]) in self._invariant
        if id(tensor) in self._ends or pin_of(op) is not None:
            return False
        return not (self._is_small(tensor) or self.keeps(tensor))

    def is_there_anyway(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the body takes no room that is not taken outside."""
        is_given = id(tensor) in self._invariant or id(tensor) in self._given_out
        return is_given or tensor.op.type in ("ReadVariableOp", "Const")

    def is_gathered(self, tensor: tf.Tensor) -> bool:
        """Whether the body's loop gathers the tensor already, for another gradient."""
        return tf_internals_bodies.is_loop_body(
            self.body
        ) and tf_internals_bodies.is_gathered(tensor)

    def _held_bytes(self, tensor: tf.Tensor) -> int:
        return 0 if self.is_there_anyway(tensor) else self._bytes(tensor)

    def _is_same_always(self, tensor: tf.Tensor) -> bool:
        """Whether a loop reads a variable that stays as it is.

        Under XLA, which shares no buffers, each iteration would add a copy of it.
        """
        return bool(
            tensor.op.type == "ReadVariableOp"
            and tensor.shape.is_fully_defined()
            and id(tensor.op.inputs[0]) in self._invariant
            and tf_internals_bodies.is_loop_body(self.body)
            and tf_internals.in_xla(self.graph)
            and tf_internals_bodies.is_read_only(self.body, tensor.op.inputs[0])
        )

    def _is_small(self, tensor: tf.Tensor) -> bool:
        """Whether holding the tensor is better than asking for what it is made of.

        So it is for sums over much, and for what is made of draws that cannot be
        repeated (a mask of bools).
        """
        size = self._bytes(tensor)
        for source in tensor.op.inputs:
            held = self._bytes(source)
            if tensor.op.type in op_types.REDUCTION_TYPES:
                if _MUCH_SMALLER * size <= held:
                    return True
            elif size < held and tf_internals.is_stateful(source.op):
                return bool(source.op.type != "ReadVariableOp")
        return False

    def _bytes(self, tensor: tf.Tensor) -> int:
        return stored.bytes_of(tensor, self.unknown_dim)
