"""TensorFlow's private names that have to do with loops, branches, called functions.

The rest, and why names are bound at import, is in `tf_internals`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.tf_internals import (
    Funnel,
    _bind,
    control_flow_context,
    copy_op,
    creation_scope,
    unique_name,
)

__all__ = [
    "CONTROL_FLOW",
    "DELAYED_PAIRS",
    "TAPE_PAIRS",
    "at_any_time",
    "bodies_of",
    "branches",
    "capture_result",
    "captures_through",
    "copy_whole",
    "create_op_in",
    "differentiated_by",
    "exported",
    "graphs_inside",
    "graphs_of_loop",
    "is_gathered",
    "is_loop_body",
    "is_read_only",
    "loop_of",
    "made_for_xla",
    "no_recording",
    "note_peak",
    "noted_peak",
]

# A called function remembers the pair of functions for its forward and backward pass.
# What was made under one setting must not be served under another.
DELAYED_PAIRS = Funnel(
    "tensorflow.python.eager.polymorphic_function.concrete_function",
    "forward_backward",
    _bind(
        "tensorflow.python.eager.polymorphic_function.concrete_function",
        "_DelayedRewriteGradientFunctions",
        "forward_backward",
    ),
    owner="_DelayedRewriteGradientFunctions",
)
TAPE_PAIRS = Funnel(
    "tensorflow.python.eager.polymorphic_function.concrete_function",
    "_select_forward_and_backward_functions",
    _bind(
        "tensorflow.python.eager.polymorphic_function.concrete_function",
        "ConcreteFunction",
        "_select_forward_and_backward_functions",
    ),
    owner="ConcreteFunction",
)

# A graph that is the body of a function, be it that of a loop.
_func_graph = _bind("tensorflow.python.framework.func_graph", "FuncGraph")

# That of a loop; those of branches and of functions are treated alike.
_while_body = _bind("tensorflow.python.ops.control_flow_util_v2", "WhileBodyFuncGraph")

# The gradient of a loop's body: what it reads of the loop is an output of the loop.
_CONDITION = "_forward_cond_graph"
_bind("tensorflow.python.ops.while_v2", "_WhileBodyGradFuncGraph", "_capture_helper")
_accumulator_of = _bind("tensorflow.python.ops.while_v2", "_get_accumulator")
_tensor_id = _bind("tensorflow.python.framework.ops", "tensor_id")

# Calls of ours are nothing that tapes should differentiate.
no_recording = _bind("tensorflow.python.eager.record", "stop_recording")

# Ends what new ops wait for; other than `Graph.control_dependencies(None)` it leaves
# XLA's context open.
_clear_control_inputs = _bind(
    "tensorflow.python.ops.control_flow_util_v2", "clear_control_inputs"
)

# What tells TensorFlow's shape inference what a list is a list of.
_copy_handle_data = _bind("tensorflow.python.ops.handle_data_util", "copy_handle_data")

CONTROL_FLOW = frozenset(
    "Case If StatelessCase StatelessIf StatelessWhile While".split()
)

# The attribute of a body that says what its peak is.
_PEAK = "_memory_saving_gradients_peak"

# Called functions are kept by the graphs that call them.
_bind("tensorflow.python.framework.ops", "Graph", "_add_function_recursive")
_bind("tensorflow.python.framework.ops", "Graph", "_get_function")

# How a body gets hold of tensors from outside, and how it makes its ops.
_bind("tensorflow.python.framework.func_graph", "FuncGraph", "_capture_helper")
_bind("tensorflow.python.framework.func_graph", "FuncGraph", "_create_op_internal")


def made_for_xla(op: tf.Operation) -> bool:
    """Whether the op was made while a function was traced that XLA will compile."""
    context = control_flow_context(op)
    while context is not None:
        if context.IsXLAContext():
            return True
        context = context.outer_context
    return False


@contextlib.contextmanager
def captures_through(
    graph: tf.Graph,
    capture: Callable[[Callable[..., tf.Tensor], tf.Tensor, str], tf.Tensor],
    create: Callable[..., Any],
) -> Iterator[None]:
    """Has a body ask us for tensors and ops that it would take from outside.

    Args:
        graph: The body of a function, loop or branch. Only this one is changed.
        capture: Called with stock's way of capturing, a tensor of another graph and a
            name; returns the tensor of `graph` that stands for it.
        create: Called with stock's way of making an op, and its arguments.
    """
    # Instances are asked first. What subclasses made of the methods stays underneath.
    stock_capture, stock_create = graph._capture_helper, graph._create_op_internal
    graph._capture_helper = functools.partial(capture, stock_capture)
    graph._create_op_internal = functools.partial(create, stock_create)
    try:
        yield
    finally:
        # Nested: the one outside is an attribute of the instance, too.
        for name, stock in (
            ("_capture_helper", stock_capture),
            ("_create_op_internal", stock_create),
        ):
            delattr(graph, name)
            if getattr(graph, name) != stock:
                setattr(graph, name, stock)


@contextlib.contextmanager
def at_any_time(graph: tf.Graph) -> Iterator[None]:
    """A place for new ops that wait for nothing but their inputs.

    Autodiff makes some gradients (that of `tanh` is one) where new ops wait for the
    gradient that comes in. What a body is asked for there may be read much earlier by
    others.
    """
    with graph.as_default(), _clear_control_inputs():
        yield


def loop_of(body: tf.Graph) -> tf.Operation | None:
    """The `While` whose gradient is being built, by its body."""
    return getattr(body, "_while", None)


def differentiated_by(loop: tf.Operation) -> tf.Operation | None:
    """The `While` of which `loop` is the gradient, if it is one."""
    body = getattr(loop, "_body_graph", None)
    forward = getattr(body, "_forward_graph", None)
    return None if forward is None else loop_of(forward)


def branches(body: tf.Graph) -> int:
    """Of how many branches the body is one; 1 if it is that of a loop or call."""
    op = getattr(body, "_forward_cond", None)
    return 1 if op is None else max(len(bodies_of(op)), 1)


def graphs_of_loop(loop: tf.Operation) -> tuple[tf.Graph | None, tf.Graph | None]:
    """The condition and the body of a loop, as far as Python knows them."""
    return getattr(loop, "_cond_graph", None), getattr(loop, "_body_graph", None)


def exported(op: tf.Operation) -> list[tuple[int, tf.Tensor]]:
    """What lists and optionals among the outputs of a loop or branch hold.

    Returns:
        Numbers of outputs, each with a tensor of a body: what one iteration appends.
    """
    found = []
    for body in bodies_of(op) if op.type in CONTROL_FLOW else ():
        for number, output in enumerate(body.outputs[: len(op.outputs)]):
            if output.op.type == "TensorListPushBack":
                found.append((number, output.op.inputs[1]))
            elif output.op.type == "TensorListSetItem":
                found.append((number, output.op.inputs[2]))
            elif output.op.type == "OptionalFromValue":
                found.append((number, output.op.inputs[0]))
    return found


def is_gathered(tensor: tf.Tensor) -> bool:
    """Whether a loop gathers what a tensor of its body is in each iteration.

    Then a gradient of the loop is there, and this one would be served from its list.
    """
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return _accumulator_of(tensor) is not None


def is_read_only(body: tf.Graph, handle: tf.Tensor) -> bool:
    """Whether a loop only reads the variable of a handle among its body's inputs."""
    loop = loop_of(body)
    places = [n for n, tensor in enumerate(body.inputs) if tensor is handle]
    if loop is None or not places:
        return False
    return places[0] in loop.get_attr("_read_only_resource_inputs")


def capture_result(graph: tf.Graph, body: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """Captures what a tensor of a loop's body is in the last iteration.

    It becomes one more variable of the loop, which nobody reads before the end.

    Args:
        graph: The gradient body, which is being built.
        body: The loop's body.
        tensor: Of the body, of known shape.
    """
    with creation_scope(body.outer_graph):
        initial = tf.zeros(tensor.shape, tensor.dtype)
    with body.as_default(), body.control_dependencies(None):
        body.capture(initial)
        result = tf.identity(tensor)
    body.outputs.append(result)
    condition = getattr(graph, _CONDITION)
    with condition.as_default():
        condition.capture(initial)
    graph.extra_inputs.append(initial)
    captured: tf.Tensor = _func_graph._capture_helper(graph, result, tensor.op.name)
    graph.internal_capture_to_output[_tensor_id(captured)] = captured
    return captured


def copy_whole(
    graph: tf.Graph, op: tf.Operation, inputs: Sequence[tf.Tensor]
) -> tf.Operation:
    """A copy in another graph, under the same name if it is free there.

    Of its bodies it has those that the op names. What Python knows of them stays with
    the original: autodiff would change it.
    """
    for attribute in op.node_def.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name:
                found = op.graph._get_function(function.name)
                graph._add_function_recursive(found)
    name = unique_name(graph, op.name)
    copy = copy_op(graph, op, name, inputs, same_graph=False)
    for original, made in zip(op.outputs, copy.outputs, strict=True):
        if original.dtype in (tf.variant, tf.resource):
            _copy_handle_data(original, made)
    return copy


def bodies_of(op: tf.Operation) -> list[tf.Graph]:
    """What runs inside a loop, a branch or a call, as far as Python knows it.

    The condition of a loop is none of it: it is not differentiated.
    """
    if op.type in ("While", "StatelessWhile"):
        found = [getattr(op, "_body_graph", None)]
    elif op.type in ("If", "StatelessIf"):
        found = [getattr(op, "_true_graph", None), getattr(op, "_false_graph", None)]
    elif op.type in ("Case", "StatelessCase"):
        count = len(op.get_attr("branches"))
        found = [getattr(op, f"_branch_graph_{n}", None) for n in range(count)]
    elif op.type in ("PartitionedCall", "StatefulPartitionedCall"):
        function = op.graph._get_function(op.get_attr("f").name)
        found = [getattr(function, "graph", None)]
    else:
        found = []
    return [graph for graph in found if graph is not None]


def graphs_inside(graph: tf.Graph) -> list[tf.Graph]:
    """The bodies of all loops, branches and calls in a graph, and those in these."""
    found: dict[int, tf.Graph] = {}
    pending = [graph]
    while pending:
        for op in pending.pop().get_operations():
            for body in bodies_of(op):
                if id(body) not in found:
                    found[id(body)] = body
                    pending.append(body)
    return list(found.values())


def create_op_in(
    graph: tf.Graph,
    op_type: str,
    inputs: Sequence[tf.Tensor],
    dtypes: Any,
    input_types: Any = None,
    name: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> tf.Operation:
    """Makes an op in another graph than the one that is being built."""
    # The name was made unique where it was to stand, and may end in a scope's slash.
    name = graph.unique_name((name or op_type).rstrip("/"))
    with graph.as_default(), graph.control_dependencies(None):
        made: tf.Operation = graph._create_op_internal(
            op_type, inputs, dtypes, input_types, f"{name}/", *args, **kwargs
        )
    return made


def is_loop_body(graph: tf.Graph) -> bool:
    """Whether `graph` is the body of a `While`."""
    return isinstance(graph, _while_body)


def note_peak(graph: tf.Graph, peak_bytes: int) -> None:
    """Notes what a body takes at its peak in the order that it was given."""
    setattr(graph, _PEAK, peak_bytes)


def noted_peak(graph: tf.Graph) -> int | None:
    """What was noted of a body, if anything was."""
    return getattr(graph, _PEAK, None)
