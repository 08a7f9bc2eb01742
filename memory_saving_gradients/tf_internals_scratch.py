"""TensorFlow's private names that it takes to try things out in a copy of a graph.

The rest, and why names are bound at import, is in `tf_internals`.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from memory_saving_gradients import tf_internals_bodies
from memory_saving_gradients.tf_internals import _bind

__all__ = ["empty_body", "empty_graph", "import_bodies", "kept_bodies", "made_body"]

# A graph that is the body of a function, and what is more than that.
_func_graph = _bind("tensorflow.python.framework.func_graph", "FuncGraph")
_KINDS = (
    _bind("tensorflow.python.ops.control_flow_util_v2", "WhileBodyFuncGraph"),
    _bind("tensorflow.python.ops.control_flow_util_v2", "WhileCondFuncGraph"),
    _bind("tensorflow.python.ops.control_flow_util_v2", "CondBranchFuncGraph"),
)

# What tells TensorFlow's shape inference what a list is a list of.
_copy_handle_data = _bind("tensorflow.python.ops.handle_data_util", "copy_handle_data")

# What is known of a loop or branch only by its functions, as in an imported graph.
_body_of = _bind("tensorflow.python.ops.control_flow_util_v2", "get_func_graph")
_unique_number = _bind("tensorflow.python.framework.ops", "uid")

# What a graph takes from outside, which stands behind its other inputs.
_bind("tensorflow.python.framework.func_graph", "FuncGraph", "replace_capture")


def empty_graph() -> tf.Graph:
    """A graph to try things out in, inside the one that is being built.

    It is the body of a function: what is met of the graph around, such as what a custom
    gradient remembers, is captured and no error. It is compiled by XLA if that is.
    """
    return _func_graph("scratch")


def empty_body(original: tf.Graph, around: tf.Graph) -> tf.Graph:
    """A body of the same kind as another, inside of a graph.

    Autodiff makes a second version of each body, under a name that it derives from that
    of the first and that is good once in a process. So this is called otherwise.
    """
    kind = next((kind for kind in _KINDS if isinstance(original, kind)), _func_graph)
    with around.as_default():
        return kind(f"{original.name}_scratch_{_unique_number()}")


def made_body(
    body: tf.Graph,
    original: tf.Graph,
    here: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    """Says of a body that has been filled what is given to it and what it returns.

    Args:
        body: The body.
        original: What it is a copy of.
        here: For a tensor of the original, or of the graph around it, its copy.
    """
    body.inputs = [here(tensor) for tensor in original.inputs]
    body.outputs = [here(tensor) for tensor in original.outputs]
    body.structured_outputs = tf.nest.map_structure(
        lambda part: here(part) if tf.is_symbolic_tensor(part) else part,
        original.structured_outputs,
        expand_composites=True,
    )
    for outside, inside in original.captures:
        body.replace_capture(here(outside), here(inside))


def kept_bodies(op: tf.Operation) -> list[tuple[str, tf.Graph | None]]:
    """Where Python keeps the bodies of a loop or branch, and they, if it knows them."""
    return [(kept, getattr(op, kept, None)) for kept, _ in _named_bodies(op)]


def import_bodies(copy: tf.Operation, original: tf.Operation) -> None:
    """Gives a copied loop or branch bodies of its own, made of functions' definitions.

    So it must be where these are all that is known, as in an imported graph.
    """
    loop = copy.type in ("While", "StatelessWhile")
    inputs = original.outputs if loop else list(original.inputs)[1:]
    for kept, function in _named_bodies(copy):
        body = _body_of(copy, [t.shape for t in inputs], function)
        body.name = f"{function}_scratch_{_unique_number()}"
        setattr(copy, kept, body)
        for outside, inside in zip(inputs, body.inputs, strict=False):
            _copy_handle_data(outside, inside)
        for op in body.get_operations():
            if op.type in tf_internals_bodies.CONTROL_FLOW:
                import_bodies(op, op)


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
