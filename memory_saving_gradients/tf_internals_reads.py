"""TensorFlow's private names that it takes to read variables outside a loop.

The rest, and why names are bound at import, is in `tf_internals`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.tf_internals import _bind

__all__ = ["Reassigned", "reads_outside"]

# How a body makes its ops.
_bind("tensorflow.python.framework.func_graph", "FuncGraph", "_create_op_internal")


class Reassigned(Exception):
    """A loop changes a variable that it reads."""


_READERS = frozenset(
    """ReadVariableOp ResourceGather ResourceGatherNd VarIsInitializedOp
    VariableShape""".split()
)


def _outside(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor around a body that one of the body stands for."""
    for external, internal in graph.captures:
        if internal is tensor:
            return external
    return tensor


@contextlib.contextmanager
def reads_outside(
    graph: tf.Graph, outside: tf.Graph, reads: dict[int, tf.Operation]
) -> Iterator[None]:
    """Has a body take the values of variables from the graph around it.

    So its loop has no state, if it has no other, and may be run twice.

    Args:
        graph: The body, which is being built.
        outside: Where variables are read.
        reads: The reads so far, by the `id` of the variable's handle. One dictionary
            for all bodies of a loop.

    Raises:
        Reassigned: The body changes a variable that it reads.
    """
    stock_create, stock_capture = graph._create_op_internal, graph.capture
    changed: set[int] = set()
    taking_in = False

    def capture(tensor: tf.Tensor, *args: Any, **kw: Any) -> tf.Tensor:
        # A handle that is captured stays, though only its variable's value is wanted.
        if tensor.dtype == tf.resource and not taking_in:
            return tensor
        return stock_capture(tensor, *args, **kw)

    def create(op_type: str, inputs: Sequence[tf.Tensor], *args: Any, **kw: Any) -> Any:
        nonlocal taking_in
        handles = {id(_outside(graph, t)) for t in inputs if t.dtype == tf.resource}
        is_inner = getattr(inputs[0], "graph", None) is graph if inputs else True
        if op_type not in _READERS:
            changed.update(handles)
        elif op_type == "ReadVariableOp" and not is_inner:
            (handle,) = handles
            if handle not in reads and handle not in changed:
                with outside.as_default():
                    reads[handle] = outside._create_op_internal(
                        op_type, inputs, *args, **kw
                    )
        if not changed.isdisjoint(reads):
            raise Reassigned
        if op_type == "ReadVariableOp" and not handles.isdisjoint(reads):
            return reads[handles.pop()]
        taking_in = True
        try:
            return stock_create(op_type, inputs, *args, **kw)
        finally:
            taking_in = False

    graph._create_op_internal, graph.capture = create, capture
    try:
        yield
    finally:
        del graph.capture
        del graph._create_op_internal
