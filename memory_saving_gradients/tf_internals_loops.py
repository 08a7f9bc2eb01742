"""TensorFlow's private names that it takes to give a loop another body.

The rest, and why names are bound at import, is in `tf_internals`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import tensorflow as tf

from memory_saving_gradients.tf_internals import _bind
from memory_saving_gradients.tf_internals_bodies import (
    captures_through,
    graphs_of_loop,
)

__all__ = [
    "LOOP_GRADIENTS",
    "AsDifferentiated",
    "beside",
    "element_type",
    "explicit_inputs",
    "graphs_like",
    "hand_gradient_on",
    "hands_on",
    "has_been_differentiated",
    "ignore_lists",
    "may_be_differentiated_twice",
    "one_at_a_time",
    "replace_graphs",
    "skip_inputs",
]

_gradient_registry = _bind("tensorflow.python.framework.ops", "_gradient_registry")
_bind("tensorflow.python.framework.registry", "Registry", "_registry")


class _Registered:
    """The registered gradients of some types of ops, as far as others look them up.

    Tapes and `tf.gradients` alike ask the registry at the time of the gradient.
    """

    def __init__(self, *types: str) -> None:
        self._types = types
        self._before: dict[str, Callable[..., Any]] = {}

    def wrap(self, wrapper: Callable[..., Any]) -> None:
        """Puts a wrapper there, called with the function before it and its arguments.

        Does nothing if one of ours is there.
        """
        if self._before:
            return
        for op_type in self._types:
            entry = _gradient_registry._registry[op_type]
            before = self._before[op_type] = entry["type"]
            entry["type"] = functools.wraps(before)(functools.partial(wrapper, before))

    def unwrap(self) -> None:
        """Puts back what was there before."""
        for op_type, before in self._before.items():
            _gradient_registry._registry[op_type]["type"] = before
        self._before.clear()


LOOP_GRADIENTS = _Registered("While", "StatelessWhile")

# The gradient looks a loop's graphs up in these attributes of the op.
_bind("tensorflow.python.ops.while_v2", "_get_graph")
_while_body = _bind("tensorflow.python.ops.control_flow_util_v2", "WhileBodyFuncGraph")
_while_cond = _bind("tensorflow.python.ops.control_flow_util_v2", "WhileCondFuncGraph")
_graph_from = _bind("tensorflow.python.framework.func_graph", "func_graph_from_py_func")
_new_function = _bind(
    "tensorflow.python.ops.control_flow_util_v2", "create_new_tf_function"
)
_clear_control_inputs = _bind(
    "tensorflow.python.ops.control_flow_util_v2", "clear_control_inputs"
)
_handle_data_of = _bind(
    "tensorflow.python.ops.handle_data_util", "get_resource_handle_data"
)
_copy_handle_data = _bind("tensorflow.python.ops.handle_data_util", "copy_handle_data")
_is_gradient_body = _bind("tensorflow.python.ops.while_v2", "_WhileBodyGradFuncGraph")

_bind("tensorflow.python.framework.ops", "Operation", "_set_func_attr")

# Whether a tape that is persistent, or inside another one, has had a loop put into a
# function of its own.
may_be_differentiated_twice = _bind(
    "tensorflow.python.ops.control_flow_util_v2",
    "graph_wrapped_for_higher_order_tape_gradients",
)

_PARALLEL = "parallel_iterations"

# Of how many of its outputs a loop's gradient is asked for: the others got none.
_ASKED_FOR = "_num_original_outputs"
_bind("tensorflow.python.ops.while_v2", "_WhileGrad")
_attribute_value = _bind("tensorflow.core.framework.attr_value_pb2", "AttrValue")
_bind("tensorflow.python.framework.ops", "Operation", "_set_attr")

# Custom gradients are closures, registered one by one under this attribute.
_GRADIENT_TYPE = "_gradient_op_type"
_gradient_function_of = _bind(
    "tensorflow.python.framework.ops", "get_gradient_function"
)


@contextlib.contextmanager
def beside(op: tf.Operation) -> Iterator[None]:
    """A place for new ops in the graph of another op, outside of all scopes.

    Other than in `tf_internals.creation_scope` XLA's context stays open, of which the
    making of loops must know.
    """
    with (
        op.graph.as_default(),
        _clear_control_inputs(),
        op.graph.device(None),
        op.graph.colocate_with(None, ignore_existing=True),
    ):
        yield


def explicit_inputs(loop: tf.Operation) -> int:
    """How many of a loop's inputs are its variables, counters included.

    The others are what its graphs captured, which stays as it is.
    """
    _, body = graphs_of_loop(loop)
    assert body is not None
    return len(body.inputs) - len(body.internal_captures)


def hands_on(body: tf.Graph, place: int) -> bool:
    """Whether an input of a loop's body is handed on to the next iteration as it is."""
    tensor = body.outputs[place]
    while tensor.op.type == "Identity" and tensor is not body.inputs[place]:
        tensor = tensor.op.inputs[0]
    return tensor is body.inputs[place]


def element_type(list_: tf.Tensor) -> tf.DType:
    """Of what type the elements of a list are."""
    return tf.dtypes.as_dtype(_handle_data_of(list_).shape_and_type[0].dtype)


def has_been_differentiated(loop: tf.Operation) -> bool:
    """Whether a gradient of the loop is there: it reads how often the loop ran.

    So does the gradient of a gradient loop, which has no other body either.
    """
    _, body = graphs_of_loop(loop)
    count = loop.outputs[0]
    return (
        isinstance(body, _is_gradient_body)
        or any(t is count for t in getattr(loop.graph, "outputs", ()))
        or any(
            reader.type != "Identity" or reader.outputs[0].consumers()
            for reader in count.consumers()
        )
    )


def graphs_like(
    loop: tf.Operation,
    suffix: str,
    condition: Callable[[list[tf.Tensor]], tf.Tensor],
    iteration: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
) -> tuple[tf.Graph, tf.Graph]:
    """A condition and a body that fit a loop, with the same inputs and outputs.

    Args:
        loop: The loop. It is not changed.
        suffix: What their names have behind those of the loop's own.
        condition: Called in the new condition with its inputs.
        iteration: Called in the new body with its inputs; returns the loop's variables,
            counters included, after an iteration.
    """
    old = cast(tuple[tf.Graph, tf.Graph], graphs_of_loop(loop))
    count = explicit_inputs(loop)
    made: list[tf.Graph] = []
    for graph, kind, call in zip(
        old, (_while_cond, _while_body), (condition, iteration), strict=True
    ):

        def build(*variables: tf.Tensor, graph=graph, call=call) -> Any:
            here = tf.compat.v1.get_default_graph()
            for given, variable in zip(graph.inputs, variables, strict=False):
                _copy_handle_data(given, variable)
            captured = [here.capture(tensor) for tensor in loop.inputs[count:]]
            return call([*variables, *captured])

        name = f"{graph.name}{suffix}"
        made.append(
            _graph_from(
                name,
                build,
                [],
                {},
                signature=[
                    tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs[:count]
                ],
                func_graph=kind(name),
                # Not in graphs of TensorFlow 1, where ops with state do not wait for
                # each other without being told.
                add_control_dependencies=loop.graph._add_control_dependencies,
            )
        )
    condition_graph, body = made
    for place in range(count):
        # TensorFlow has put an identity there.
        if hands_on(body, place):
            body.outputs[place] = body.inputs[place]
    body.outputs.extend(body.internal_captures)
    return condition_graph, body


def one_at_a_time(loop: tf.Operation) -> None:
    """Has a loop begin an iteration when the one before it has ended.

    The executor begins 32 at a time: whatever does not depend on the state, such as
    products of inputs and weights, would be computed, and held, for iterations whose
    turn comes much later.
    """
    loop._set_attr(_PARALLEL, _attribute_value(i=1))


def ignore_lists(loop: tf.Operation, given: Sequence[Any]) -> None:
    """Keeps a gradient from going through lists that an earlier one has made.

    An earlier gradient has the loop gather what it needs in lists. Stock takes them for
    results like others. Of those without a gradient it makes zeros: lists as long, and
    elements as large.

    Args:
        loop: The loop.
        given: The gradients of its results.
    """
    _, body = graphs_of_loop(loop)
    if body is None or len(given) < len(loop.outputs):
        return  # a tape knows the results of before
    count = len(given)
    while (
        count > 1
        and _is_no_gradient(given[count - 1])
        and body.outputs[count - 1].op.type == "TensorListPushBack"
        and loop.inputs[count - 1].op.type == "EmptyTensorList"
    ):
        count -= 1
    if count < len(given):
        loop._set_attr(_ASKED_FOR, _attribute_value(i=count))


def _is_no_gradient(given: Any) -> bool:
    """`tf.gradients` gives zeros where there is none."""
    return given is None or (tf.is_tensor(given) and given.op.type == "ZerosLike")


@dataclass(frozen=True)
class AsDifferentiated:
    """What stock's gradient of a loop shall see in the place of the op.

    Attributes:
        inputs: Those of the op, but for the second, which bounds its iterations.
        outputs: Those of the op.
        skip_input_indices: Numbers of inputs whose gradients nobody wants.
    """

    inputs: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    skip_input_indices: Sequence[int] | None

    def get_attr(self, name: str) -> Any:
        """An attribute of the op."""
        return self.outputs[0].op.get_attr(name)


def skip_inputs(loop: tf.Operation, skipped: Sequence[int]) -> None:
    """Has `tf.gradients` differentiate a loop as a tape would.

    Args:
        loop: The loop.
        skipped: Numbers of inputs whose gradients nobody wants.
    """

    def gradient(op: tf.Operation, *given: Any) -> Any:
        seen = AsDifferentiated(op.inputs, op.outputs, skipped)
        return _gradient_registry.lookup(op.type)(seen, *given)

    loop._gradient_function = gradient


def replace_graphs(loop: tf.Operation, condition: tf.Graph, body: tf.Graph) -> None:
    """Gives a loop another condition and another body, of the same signature."""
    for name, graph in (("cond", condition), ("body", body)):
        loop._set_func_attr(name, _new_function(graph))
    loop._cond_graph, loop._body_graph = condition, body


def hand_gradient_on(
    op: tf.Operation, copy: tf.Operation, twin_of: Callable[[tf.Tensor], tf.Tensor]
) -> None:
    """Gives a copy the gradient that its original has of its own, if it has one.

    What that remembers of the original's graph is translated.

    Args:
        op: The original.
        copy: The copy, in another graph.
        twin_of: For a tensor of the original's graph the copy's; others as they are.
    """
    own = op._gradient_function
    if own is None:
        try:
            op.get_attr(_GRADIENT_TYPE)
        except ValueError:
            return
        own = _gradient_function_of(op)

    def translating(op: tf.Operation, *given: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()

        def capture(stock: Callable[..., Any], tensor: Any, name: str) -> Any:
            twin = twin_of(tensor)
            return twin if twin.graph is graph else stock(twin, name)

        def create(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return stock(*args, **kwargs)

        with captures_through(graph, capture, create):
            return own(op, *given)

    copy._gradient_function = translating
