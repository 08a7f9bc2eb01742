"""TensorFlow's private names that it takes to try things out in a copy of a graph.

The rest, and why names are bound at import, is in `tf_internals`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients import tf_internals_bodies
from memory_saving_gradients.tf_internals import _bind

__all__ = ["copy_apart", "empty_graph"]

# A graph that is the body of a function.
_func_graph = _bind("tensorflow.python.framework.func_graph", "FuncGraph")

# What tells TensorFlow's shape inference what a list is a list of.
_copy_handle_data = _bind("tensorflow.python.ops.handle_data_util", "copy_handle_data")

# What is known of a loop or branch only by its functions, as in an imported graph.
_body_of = _bind("tensorflow.python.ops.control_flow_util_v2", "get_func_graph")
_unique_number = _bind("tensorflow.python.framework.ops", "uid")


def empty_graph() -> tf.Graph:
    """A graph to try things out in, inside the one that is being built.

    It is the body of a function: what is met of the graph around, such as what a custom
    gradient remembers, is captured and no error. It is compiled by XLA if that is.
    """
    return _func_graph("scratch")


def copy_apart(
    graph: tf.Graph, op: tf.Operation, inputs: Sequence[tf.Tensor]
) -> tf.Operation:
    """A copy in another graph whose bodies are its own, as far as there are any."""
    copy = tf_internals_bodies.copy_whole(graph, op, inputs)
    if op.type in tf_internals_bodies.CONTROL_FLOW:
        _own_bodies(copy, op)
    return copy


def _own_bodies(copy: tf.Operation, original: tf.Operation) -> None:
    """Gives a copied loop or branch bodies of its own, and those inside of these.

    Autodiff makes a second version of each body, under a name that it derives from that
    of the first and that is good once in a process. So the copy's are called otherwise.
    """
    pending = [(copy, original)]
    while pending:
        copy, original = pending.pop()
        loop = copy.type in ("While", "StatelessWhile")
        inputs = original.outputs if loop else list(original.inputs)[1:]
        for kept, function in _named_bodies(copy):
            body = _body_of(copy, [t.shape for t in inputs], function)
            body.name = f"{function}_scratch_{_unique_number()}"
            setattr(copy, kept, body)
            for outside, inside in zip(inputs, body.inputs, strict=False):
                _copy_handle_data(outside, inside)
            known = getattr(original, kept, None)
            twins = {} if known is None else {o.name: o for o in known.get_operations()}
            for op in body.get_operations():
                twin = twins.get(op.name, op)
                for made, shaped in zip(op.outputs, twin.outputs, strict=True):
                    made.set_shape(shaped.shape)
                    if made.dtype in (tf.variant, tf.resource):
                        _copy_handle_data(shaped, made)
                if op.type in tf_internals_bodies.CONTROL_FLOW:
                    pending.append((op, twin))


def _named_bodies(op: tf.Operation) -> list[tuple[str, str]]:
    """Where Python keeps the bodies of a loop or branch, and their functions' names."""
    if op.type in ("While", "StatelessWhile"):
        where = (("_cond_graph", "cond"), ("_body_graph", "body"))
    elif op.type in ("If", "StatelessIf"):
        where = (("_true_graph", "then_branch"), ("_false_graph", "else_branch"))
    else:
        branches = enumerate(op.get_attr("branches"))
        return [(f"_branch_graph_{n}", branch.name) for n, branch in branches]
    return [(kept, op.get_attr(attribute).name) for kept, attribute in where]
