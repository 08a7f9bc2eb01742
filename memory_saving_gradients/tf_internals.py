"""The only file that touches TensorFlow's private names, each with its reason.

Everything is bound once, at import. So no order of patching can make this library call
itself, and a TensorFlow that drops one of these names fails here, at import, with the
name in the message (`test/test_tf_internals.py`) rather than in the middle of a graph.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.errors import UnsupportedTensorFlowError

__all__ = [
    "add_control_input",
    "builds_function",
    "control_flow_context",
    "copy_op",
    "creation_index",
    "creation_scope",
    "drop_control_inputs",
    "gradients_helper",
    "guard_gradients_helper",
    "in_control_flow_v1",
    "in_xla",
    "is_stateful",
    "mutation_lock",
    "unique_name",
    "update_input",
]


def _bind(module: str, *attributes: str) -> Any:
    """Looks a private name up; a TensorFlow without it is named in the error."""
    found: Any = importlib.import_module(module)
    for attribute in attributes:
        found = getattr(found, attribute, None)
        if found is None:
            raise UnsupportedTensorFlowError(
                f"`memory_saving_gradients`: TensorFlow {tf.__version__} no longer has "
                f"`{module}.{'.'.join(attributes)}`, which rewriting a graph needs. "
                "Install a TensorFlow version that the README lists."
            )
    return found


# The function behind `tf.gradients` in TensorFlow 1 and 2. The public ones are often
# the very names that a script assigns `gradients_memory` to: going through them would
# call ourselves.
gradients_helper = _bind("tensorflow.python.ops.gradients_util", "_GradientsHelper")

_gradients_util: Any = importlib.import_module("tensorflow.python.ops.gradients_util")


def guard_gradients_helper(
    prepared: Callable[[Any], contextlib.AbstractContextManager[None]],
) -> None:
    """Makes stock gradients, too, find a graph as autodiff made it.

    Differentiating through a rewired gradient follows the copies: a second derivative
    by stock's `tf.gradients` would be silently wrong. The guard is set when the first
    graph is rewired, and changes nothing for any other graph.

    Args:
        prepared: Given the `ys`, a context in which their graph may be differentiated.
    """
    current = _gradients_util._GradientsHelper
    if getattr(current, "guards_rewired_graphs", False):
        return

    @functools.wraps(current)
    def guarded(ys: Any, *args: Any, **kwargs: Any) -> Any:
        with prepared(ys):
            return current(ys, *args, **kwargs)

    vars(guarded)["guards_rewired_graphs"] = True
    _gradients_util._GradientsHelper = guarded


# Says at trace time whether a graph is being built for XLA: `jit_compile=True` leaves
# no other mark until compilation.
in_xla = _bind("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext")

# A graph that is the body of a `tf.function`; there is no public test for it.
_func_graph = _bind("tensorflow.python.framework.func_graph", "FuncGraph")

# While it is held no session may run the graph: stock takes it, too.
_bind("tensorflow.python.framework.ops", "Graph", "_mutation_lock")

# Operations are copied with the attributes of their NodeDef; the public
# `Graph.create_op` is deprecated and re-derives what is known, at five times the time.
_from_node_def = _bind("tensorflow.python.framework.ops", "Operation", "from_node_def")
_bind("tensorflow.python.framework.ops", "Graph", "_create_op_helper")

# The rewiring itself. There is no public way to change an edge of a graph.
_bind("tensorflow.python.framework.ops", "Operation", "_update_input")
_bind("tensorflow.python.framework.ops", "Operation", "_add_control_input")
_bind("tensorflow.python.framework.ops", "Operation", "_remove_all_control_inputs")
# Whether the registry says that an op has state or side effects.
_bind("tensorflow.python.framework.ops", "Operation", "_is_stateful")


def is_stateful(op: tf.Operation) -> bool:
    """Whether the registry says that ops of this type have state or side effects."""
    return bool(op._is_stateful)


def control_flow_context(op: tf.Operation) -> Any:
    """The innermost TensorFlow 1 context that the op stands in, or None."""
    return op._get_control_flow_context()


def in_control_flow_v1(op: tf.Operation) -> bool:
    """Whether the op stands inside a TensorFlow 1 loop or branch."""
    context = control_flow_context(op)
    while context is not None:
        if context.IsCondContext() or context.IsWhileContext():
            return True
        # A function that XLA will compile is traced inside a context of its own kind.
        context = context.outer_context
    return False


def unique_name(graph: tf.Graph, name: str) -> str:
    """A name of its own in `graph`, independent of the scope that is open."""
    # `Graph.unique_name` prefixes the open scope: close all scopes for the moment.
    with graph.name_scope(None):
        return graph.unique_name(name)


# Ops are numbered as they are created, the only order that a graph records.
_bind("tensorflow.python.framework.ops", "Operation", "_id")


def creation_index(op: tf.Operation) -> int:
    """The op's number within its graph: it grows with each op that is created."""
    return int(op._id)


def builds_function(graph: tf.Graph) -> bool:
    """Whether `graph` is the body of a `tf.function`."""
    return isinstance(graph, _func_graph)


def mutation_lock(graph: tf.Graph) -> contextlib.AbstractContextManager[None]:
    """Keeps sessions from running `graph` while it is changed."""
    lock: contextlib.AbstractContextManager[None] = graph._mutation_lock()
    return lock


@contextlib.contextmanager
def creation_scope(graph: tf.Graph) -> Iterator[None]:
    """A place for new ops where nothing that the caller has open rubs off on them.

    Devices, colocation, control dependencies and v1 control-flow contexts of the code
    around the call of `gradients()` have nothing to do with copies of forward ops.
    """
    with (
        graph.as_default(),
        graph.control_dependencies(None),
        graph.device(None),
        graph.colocate_with(None, ignore_existing=True),
    ):
        yield


def copy_op(
    graph: tf.Graph, op: tf.Operation, name: str, inputs: Sequence[tf.Tensor]
) -> tf.Operation:
    """A copy of `op` that reads `inputs`: same attributes, device, control inputs.

    Call it inside `creation_scope`.
    """
    definition = op.node_def
    definition.name = name
    with graph._mutation_lock():
        copy = _from_node_def(
            definition,
            graph,
            inputs=list(inputs),
            control_inputs=list(op.control_inputs),
            input_types=op._input_types,
            op_def=op.op_def,
        )
        graph._create_op_helper(copy, compute_device=False)
    # A gradient override or the gradient of a called function is a Python attribute of
    # the op, not part of its NodeDef: second-order gradients look it up on the copy.
    copy._gradient_function = op._gradient_function
    for original, made in zip(op.outputs, copy.outputs, strict=True):
        made.set_shape(original.shape)
    return copy


def update_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Makes `op` read `tensor` as its input number `index`."""
    op._update_input(index, tensor)


def add_control_input(op: tf.Operation, waits_for: tf.Operation) -> None:
    """Makes `op` wait until `waits_for` has run."""
    op._add_control_input(waits_for)


def drop_control_inputs(op: tf.Operation) -> None:
    """Removes all control inputs of `op`."""
    op._remove_all_control_inputs()
