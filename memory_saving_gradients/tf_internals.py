"""What touches TensorFlow's private names, each with its reason.

This file and those whose names begin with its name (for loops, branches and called
functions) are the only ones that do.

Everything is bound once, at import. So no order of patching can make this library call
itself, and a TensorFlow that drops one of these names fails here, at import, with the
name in the message (`test/test_tf_internals.py`) rather than in the middle of a graph.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.errors import UnsupportedTensorFlowError

__all__ = [
    "GRAPHS",
    "TAPES",
    "Funnel",
    "StockTape",
    "add_control_input",
    "builds_function",
    "control_flow_context",
    "copy_op",
    "creation_index",
    "creation_scope",
    "drop_control_inputs",
    "gradients_arguments",
    "gradients_helper",
    "in_control_flow_v1",
    "in_xla",
    "is_stateful",
    "mutation_lock",
    "ops_of_this_thread",
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

_gradients_signature = inspect.signature(gradients_helper)


def gradients_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `_GradientsHelper` by their names."""
    return dict(_gradients_signature.bind(*args, **kwargs).arguments)


# The tape as TensorFlow made it: programs assign other classes to `tf.GradientTape`.
StockTape = _bind("tensorflow.python.eager.backprop", "GradientTape")


class Funnel:
    """A private function that all its callers look up in its module at every call.

    So a wrapper set there reaches everyone, also those who imported their symbol
    (`from tensorflow import GradientTape`) long before.
    """

    def __init__(
        self, module: str, name: str, stock: Callable[..., Any], owner: str = ""
    ) -> None:
        self._module: Any = importlib.import_module(module)
        if owner:  # a method: callers look it up in its class
            self._module = getattr(self._module, owner)
        self._name = name
        self._stock = stock
        self._door: Callable[..., Any] | None = None
        self._before: Callable[..., Any] | None = None

    def wrap(self, wrapper: Callable[..., Any]) -> None:
        """Puts a wrapper there, called with the function before it and its arguments.

        Does nothing if one of ours is there, be it under the wrapper of somebody else.
        """
        if self._door is not None and self._reaches():
            return
        before = getattr(self._module, self._name)

        @functools.wraps(before)
        def door(*args: Any, **kwargs: Any) -> Any:
            return wrapper(before, *args, **kwargs)

        self._before, self._door = before, door
        setattr(self._module, self._name, door)

    def unwrap(self) -> None:
        """Puts back the very object that was there before.

        If somebody has wrapped our wrapper, it stays under theirs and passes on.
        """
        if self._door is not None and self.is_open:
            setattr(self._module, self._name, self._before)
            self._door = self._before = None

    @property
    def is_open(self) -> bool:
        """Whether our wrapper is what callers find."""
        return getattr(self._module, self._name) is self._door

    def _reaches(self) -> bool:
        """Whether our wrapper is called: not if somebody put the stock function back.

        What wraps ours may hide it; such a wrapper is taken to pass on.
        """
        found = getattr(self._module, self._name)
        return found is not self._stock and found is not self._before


# All that differentiates passes one of these two: tapes the first; `tf.gradients`,
# TensorFlow 1's optimizers and the bodies of functions, loops and branches the second.
TAPES = Funnel(
    "tensorflow.python.eager.imperative_grad",
    "imperative_grad",
    _bind("tensorflow.python.eager.imperative_grad", "imperative_grad"),
)
GRAPHS = Funnel(
    "tensorflow.python.ops.gradients_util", "_GradientsHelper", gradients_helper
)

# Every op of a graph passes this method when it is made.
_CREATORS = "_memory_saving_gradients_creators"
_creators_lock = threading.Lock()


@contextlib.contextmanager
def ops_of_this_thread(graph: tf.Graph) -> Iterator[list[tf.Operation]]:
    """Collects the ops that this thread creates in `graph`, in order.

    The replicas of `MirroredStrategy` build one graph, a thread each, and take turns in
    the middle of a gradient: what is new in the graph need not be of this thread.
    """
    made: list[tf.Operation] = []
    mine = threading.get_ident()
    with _creators_lock:
        lists = getattr(graph, _CREATORS, None)
        if lists is None:
            lists = {}
            setattr(graph, _CREATORS, lists)
            _watch_creations(graph, lists)
        lists.setdefault(mine, []).append(made)
    try:
        yield made
    finally:
        with _creators_lock:
            lists[mine] = [other for other in lists[mine] if other is not made]
            if not lists[mine]:
                del lists[mine]
            if not lists:
                delattr(graph, _CREATORS)
                del graph._create_op_helper


def _watch_creations(
    graph: tf.Graph, lists: dict[int, list[list[tf.Operation]]]
) -> None:
    create = graph._create_op_helper

    def create_and_note(op: tf.Operation, *args: Any, **kwargs: Any) -> None:
        create(op, *args, **kwargs)
        for made in lists.get(threading.get_ident(), ()):
            made.append(op)

    graph._create_op_helper = create_and_note


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
    graph: tf.Graph,
    op: tf.Operation,
    name: str,
    inputs: Sequence[tf.Tensor],
    *,
    same_graph: bool = True,
) -> tf.Operation:
    """A copy of `op` that reads `inputs`: same attributes, device, control inputs.

    A copy in another graph than its original's has no control inputs. Call it inside
    `creation_scope`.
    """
    definition = op.node_def
    definition.name = name
    if not same_graph:  # the op that it is colocated with is not there
        definition.attr.pop("_class", None)
    with graph._mutation_lock():
        copy = _from_node_def(
            definition,
            graph,
            inputs=list(inputs),
            control_inputs=list(op.control_inputs) if same_graph else [],
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


# How much memory TensorFlow may use on a device: public API tells a limit that the user
# has set, but not the one that TensorFlow sets itself (nearly all of a GPU).
_list_local_devices = _bind("tensorflow.python.client.device_lib", "list_local_devices")


def memory_limit(device: str) -> int:
    """Bytes that the allocator of a device such as `"GPU:0"` may hand out, 0 if that is
    not known."""
    with tf.init_scope():
        for attributes in _list_local_devices():
            if attributes.name.endswith(device):
                return int(attributes.memory_limit)
    return 0
