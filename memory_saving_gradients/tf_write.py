"""From a `Schedule` back into the `tf.Graph`: the second of the two edges.

Only new ops are made, and only ops that the current call created are changed: a v1
session ignores edits to ops that it has run. A copy has its original's attributes,
device, colocation and control inputs, and stands in the name scope `recompute/`.

1. For each step of the schedule that is a copy, the forward op is copied; inputs that
   were recomputed are read from their copies, all others from the originals.
2. Each input of a backward op whose buffer was recomputed is redirected to the copy.
   Shape and zeros-like ops are left alone (they hold nothing, if they wait for
   nothing).
3. Ties are made real: by control edges for the executor, which forgets none of them,
   and by data edges for XLA (`fences`), which forgets all control edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tensorflow as tf

from memory_saving_gradients import fences, tf_internals
from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.calls import Call
from memory_saving_gradients.graph import Storage
from memory_saving_gradients.schedule import Schedule
from memory_saving_gradients.tf_read import Reading

__all__ = ["Rewiring", "write"]


@dataclass
class Rewiring:
    """What `write` did.

    Attributes:
        edges: (op, input index, original tensor) of each redirected edge.
        copies: For each copy the id of the recomputed op, and its outputs, each with
            what stands for it; in order.
    """

    edges: list[tuple[tf.Operation, int, tf.Tensor]] = field(default_factory=list)
    copies: list[tuple[int, list[tuple[tf.Tensor, tf.Tensor]]]] = field(
        default_factory=list
    )

    def in_graph_order(self) -> list[tuple[int, list[tuple[tf.Tensor, tf.Tensor]]]]:
        """`copies` in the order of the originals."""
        return sorted(self.copies, key=lambda copied: copied[0])


def write(
    tf_graph: tf.Graph, reading: Reading, buffers: Buffers, schedule: Schedule
) -> Rewiring:
    """Rewires the backward ops of `tf_graph` as `schedule` says.

    Args:
        tf_graph: The graph that holds the backward ops.
        reading: What was read from it.
        buffers: The buffer view of it.
        schedule: What to recompute, and when.

    Returns:
        The record of what was done.
    """
    writer = _Writer(tf_graph, reading, buffers, schedule)
    # Asked outside: the creation scope closes XLA's context, too.
    in_xla = tf_internals.in_xla(tf_graph)
    with tf_internals.creation_scope(tf_graph):
        fence: fences.Fence
        if in_xla:
            fence = fences.DataFence(reading, buffers, schedule)
        else:
            fence = fences.ControlFence(reading, schedule)
        for index, step in enumerate(schedule.steps):
            if step.copy:
                writer.copy(step.op, index, fence)
            else:
                writer.redirect(step.op)
                fence.backward(index, reading.ops[step.op])
        # Aliases in the backward pass allocate nothing and are no steps.
        stepping = {step.op for step in schedule.steps if not step.copy}
        for op in reading.graph.backward_ops:
            if op.id not in stepping:
                writer.redirect(op.id)
    return writer.done


class _Writer:
    def __init__(
        self,
        tf_graph: tf.Graph,
        reading: Reading,
        buffers: Buffers,
        schedule: Schedule,
    ) -> None:
        self.done = Rewiring()
        self._tf_graph = tf_graph
        self._reading = reading
        self._buffers = buffers
        self._held = schedule.kept
        self._redone = set(schedule.recomputed)
        self._stale: dict[int, bool] = {}
        self._new: dict[int, tf.Tensor] = {}
        # For each buffer that was recomputed the aliases that were made of its copy.
        self._aliases: dict[int, list[int]] = {}

    def copy(self, op: int, index: int, fence: fences.Fence) -> None:
        """Makes the copy of a forward op."""
        original = self._reading.ops[op]
        inputs = [self._current(t) for t in self._reading.graph.ops[op].inputs]
        inputs = fence.inputs(index, op, inputs)
        outputs = self._reading.graph.ops[op].outputs
        if op in self._reading.calls:
            call = self._reading.calls[op]
            made_here = set(self._buffers.makes[op]) - self._held
            wanted = sorted(n for n in call.computed if outputs[n] in made_here)
            made = self._replayed(call, inputs, wanted)
            outputs = tuple(outputs[n] for n in wanted)
        else:
            made = self._copied(original, inputs).outputs
        fence.copied(index, made[0].op)
        originals = [self._reading.tensors[t] for t in outputs]
        self.done.copies.append((op, list(zip(originals, made, strict=True))))
        for tensor, output in zip(outputs, made, strict=True):
            if tensor not in self._held:
                self._new[tensor] = output
                for alias in self._aliases.pop(tensor, ()):  # of an earlier copy
                    self._new.pop(alias, None)

    def _replayed(
        self, call: Call, inputs: list[tf.Tensor], wanted: list[int]
    ) -> list[tf.Tensor]:
        # A scope that ends in a slash is the very one, wherever we are.
        with tf.name_scope("recompute/"):
            return call.replayed(self._tf_graph, inputs, wanted)

    def redirect(self, op: int) -> None:
        """Makes a backward op read copies where there are any."""
        node = self._reading.graph.ops[op]
        target = self._reading.ops[op]
        if id(target) in self._reading.foreign:
            return
        if node.metadata_only:
            tf_internals.drop_control_inputs(target)
            return
        for index, tensor in enumerate(target.inputs):
            number = self._reading.tensor_id(tensor)
            if number is None or number not in node.inputs:
                continue  # handed to a function that makes nothing of it
            if not self._is_stale(number):
                continue
            self.done.edges.append((target, index, tensor))
            tf_internals.update_input(target, index, self._current(number))

    def _copied(self, original: tf.Operation, inputs: list[tf.Tensor]) -> tf.Operation:
        name = tf_internals.unique_name(self._tf_graph, f"recompute/{original.name}")
        return tf_internals.copy_op(self._tf_graph, original, name, inputs)

    def _is_stale(self, tensor: int) -> bool:
        """Whether the tensor lives in a buffer that is recomputed, not kept."""
        known = self._stale.get(tensor)
        if known is None:
            graph = self._reading.graph
            known = self._stale[tensor] = any(
                graph.tensors[owner].op in self._redone and owner not in self._held
                for owner in self._buffers.behind(tensor)
            )
        return known

    def _current(self, tensor: int) -> tf.Tensor:
        """What a late reader of `tensor` reads; copies aliases on demand."""
        graph = self._reading.graph
        pending = [tensor]
        while pending:
            number = pending[-1]
            node = graph.tensors[number]
            if number in self._new or not self._is_stale(number):
                pending.pop()
                continue
            if node.storage is not Storage.ALIAS:
                raise AssertionError(f"{node.name} is read before it is recomputed")
            alias = graph.ops[node.op]
            if node.op in self._reading.calls:
                assert node.source is not None
                if self._is_stale(node.source) and node.source not in self._new:
                    pending.append(node.source)
                    continue
                known = self._reading.tensors[node.source]
                self._new[number] = self._new.get(node.source, known)
                pending.pop()
                continue
            missing = [
                t for t in alias.inputs if self._is_stale(t) and t not in self._new
            ]
            if missing:
                pending.extend(missing)
                continue
            inputs = [self._new.get(t, self._reading.tensors[t]) for t in alias.inputs]
            made = self._copied(self._reading.ops[node.op], inputs)
            self._new.update(zip(alias.outputs, made.outputs, strict=True))
            for output in alias.outputs:
                for owner in self._buffers.behind(output):
                    self._aliases.setdefault(owner, []).append(output)
            pending.pop()
        return self._new.get(tensor, self._reading.tensors[tensor])
