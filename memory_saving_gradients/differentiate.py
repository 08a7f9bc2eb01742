"""The drop-in `gradients()` family: from a stock gradient to a rewired one.

The stock autodiff builds the backward graph, from a seed of ours that waits for the
last forward ops that the backward pass needs; then `rewire` takes over. Numbers are
those of the stock call: nothing is differentiated here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from memory_saving_gradients import fences, selection, tf_internals
from memory_saving_gradients.checkpoints import Collection, parse
from memory_saving_gradients.errors import EagerExecutionError
from memory_saving_gradients.plan import forget
from memory_saving_gradients.planners import PLANNERS
from memory_saving_gradients.rewire import StockGradient, rewire
from memory_saving_gradients.verify import require_assertions

__all__ = [
    "UNKNOWN_DIM",
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
]

UNKNOWN_DIM = 64
"""What an unknown dimension is taken to be while planning, unless the caller says."""

# The attribute of a graph that lists what earlier calls redirected in it: a later call
# that differentiates through a gradient must find the edges as autodiff made them. (Not
# a `WeakKeyDictionary`: its values would keep the graph alive.)
_REWIRED = "_memory_saving_gradients_rewired"


@tf.autograph.experimental.do_not_convert
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    checkpoints: Any = "collection",
    name: str = "gradients",
    colocate_gradients_with_ops: bool | None = None,
    gate_gradients: bool = False,
    aggregation_method: int | None = None,
    stop_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    *,
    unknown_dim: int = UNKNOWN_DIM,
    verify: bool = False,
) -> list[Any]:
    """Symbolic derivatives of the sum of `ys` with respect to `xs`, in less memory.

    The result is that of `tf.gradients`: the same autodiff builds it. Then the backward
    pass is rewired to recompute most of what it reads from the forward pass (gradient
    checkpointing) instead of holding it. `last_plan()` says what that saves and costs.

    Works while a graph is built: in a `tf.compat.v1.Graph`, or in a `tf.function`, with
    or without `jit_compile=True`.

    Args:
        ys: A tensor or a list of tensors to differentiate.
        xs: A tensor, variable (TensorFlow 1, 2 or Keras 3) or a list of such.
        grad_ys: Gradients that the `ys` receive, or None for ones, as in stock.
        checkpoints: What to keep:
            `"memory"`: whatever makes the peak smallest;
            `"speed"`: in any case what is dear to recompute;
            `"collection"`: the tensors in the graph collection "checkpoints";
            a list of tensors or tensor names: exactly these;
            a function of a `tf.Tensor` that returns a bool.
        name: Name scope of the gradient ops.
        colocate_gradients_with_ops: Whether gradient ops are placed with the ops that
            they belong to. None means what stock does: yes in a `tf.function`, no in
            a v1 graph.
        gate_gradients: As in `tf.gradients`.
        aggregation_method: As in `tf.gradients`.
        stop_gradients: As in `tf.gradients`.
        unconnected_gradients: As in `tf.gradients`.
        unknown_dim: What a dimension that is not known statically (a batch size) is
            taken to be while planning, at least 1. The gradients are right for every
            size.
        verify: Whether to compare, at run time, each recomputed tensor with the
            original and fail if a bit differs. Costs all the memory that was saved.

    Returns:
        A list with one gradient for each of `xs`: a tensor, `tf.IndexedSlices` or None.

    Raises:
        EagerExecutionError: There is no graph: called outside a `tf.function`.
        CheckpointError: From `checkpoints` no plan can be made.
        UnknownCheckpointNameError: `checkpoints` has a name that the graph has not.
        VerificationUnavailableError: `verify=True` under XLA.
        LookupError, TypeError, ValueError: Whatever `tf.gradients` would raise.

    Example:
        >>> @tf.function
        ... def step(x):
        ...     y = x
        ...     for _ in range(20):
        ...         y = tf.tanh(y)
        ...     return gradients(tf.reduce_sum(y), x, checkpoints="memory")

    References:
        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv
        1604.06174.
    """
    forget()
    if tf.executing_eagerly():
        raise EagerExecutionError(
            "`memory_saving_gradients.gradients` rewrites a graph, but was called "
            "eagerly, where there is none. Call it inside a `tf.function` (the loss "
            "must be computed in it, too) or in a `tf.compat.v1.Graph`."
        )
    parsed = parse(checkpoints, PLANNERS)
    graph = tf.compat.v1.get_default_graph()
    _check_unknown_dim(unknown_dim)
    if verify:
        require_assertions(graph)
    if isinstance(parsed, Collection):
        parsed = selection.collected(graph, parsed)
    if colocate_gradients_with_ops is None:
        colocate_gradients_with_ops = tf_internals.builds_function(graph)
    targets = _as_list(ys)
    with tf_internals.mutation_lock(graph):
        before = len(graph.get_operations())
        seeds = _seeds(targets, grad_ys, graph)
        with _as_autodiff_made_it(targets):
            stock = tf_internals.gradients_helper(
                targets,
                [selection.plain_variable(x) for x in _as_list(xs)],
                seeds,
                name=name,
                colocate_gradients_with_ops=colocate_gradients_with_ops,
                gate_gradients=gate_gradients,
                aggregation_method=aggregation_method,
                stop_gradients=stop_gradients,
                unconnected_gradients=unconnected_gradients,
            )
        built = StockGradient(
            graph, targets, seeds, stock, graph.get_operations()[before:]
        )
        gradients, rewiring = rewire(
            built, parsed, unknown_dim=unknown_dim, verify=verify
        )
        if rewiring is not None:
            tf_internals.guard_gradients_helper(_as_autodiff_made_it)
            setattr(graph, _REWIRED, [*getattr(graph, _REWIRED, ()), rewiring])
        return gradients


def _member(mode: str) -> Any:
    """One of the three functions with exactly the signature of v1's `tf.gradients`."""

    def member(
        ys: Any,
        xs: Any,
        grad_ys: Any = None,
        name: str = "gradients",
        colocate_gradients_with_ops: bool | None = None,
        gate_gradients: bool = False,
        aggregation_method: int | None = None,
        stop_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> list[Any]:
        return gradients(
            ys,
            xs,
            grad_ys,
            mode,
            name,
            colocate_gradients_with_ops,
            gate_gradients,
            aggregation_method,
            stop_gradients,
            unconnected_gradients,
        )

    member.__name__ = member.__qualname__ = f"gradients_{mode}"
    member.__doc__ = (
        f'`gradients(..., checkpoints="{mode}")` with the signature of TensorFlow 1\'s '
        "`tf.gradients`.\n\n    Assign it over `tf.gradients` to save memory in code "
        "that you do not want to change.\n    "
    )
    known = inspect.signature(member).parameters

    @functools.wraps(member)
    def checked(*arguments: Any, **keywords: Any) -> list[Any]:
        for other in keywords:
            if other not in known:
                raise TypeError(
                    f"`memory_saving_gradients.gradients_{mode}` has the arguments of "
                    f"TensorFlow 1's `tf.gradients` and takes no `{other}`. Use "
                    f"`gradients(..., {other}=...)`."
                )
        return member(*arguments, **keywords)

    return tf.autograph.experimental.do_not_convert(checked)


gradients_memory = _member("memory")
gradients_speed = _member("speed")
gradients_collection = _member("collection")


# -- before and around the stock call ------------------------------------------------


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_unknown_dim(value: Any) -> None:
    where = "`memory_saving_gradients.gradients`: `unknown_dim` must be"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{where} an int, but got {value!r}.")
    if value < 1:
        raise ValueError(
            f"{where} at least 1, but got {value}. Give the batch size that will come."
        )


def _seeds(targets: list[Any], grad_ys: Any, graph: tf.Graph) -> list[Any]:
    """The gradients that backpropagation starts from, as ops of our own.

    So the backward ops that depend on a gradient are the seeds' descendants, and
    holding back the seeds holds back them all. What is not a plain tensor, or has no
    default gradient, is left to stock (and to its errors).
    """
    given = [None] * len(targets) if grad_ys is None else _as_list(grad_ys)
    here = [y for y in targets if getattr(y, "graph", None) is graph]
    seeds: list[Any] = list(given)
    if len(given) != len(targets):
        return seeds
    with tf.name_scope("recompute/seed"):
        for index, (y, gradient) in enumerate(zip(targets, given, strict=True)):
            if not hasattr(y, "op") or not isinstance(y, tf.Tensor):
                continue
            if not y.dtype.is_floating:
                continue
            if gradient is None:
                seed = tf.ones(tf.shape(y), y.dtype)
            elif isinstance(gradient, tf.IndexedSlices):
                continue
            else:
                seed = tf.identity(gradient)
            if tf_internals.in_xla(graph) and seed.dtype == y.dtype:
                seed = fences.tied_seed(here, seed)
            seeds[index] = seed
    return seeds


@contextmanager
def _as_autodiff_made_it(ys: Any) -> Iterator[None]:
    """Undoes, for the moment, what earlier calls redirected upstream of `ys`.

    Autodiff through a rewired edge would follow the copy and miss the paths that the
    original has: silently wrong gradients of gradients.
    """
    graph = tf.compat.v1.get_default_graph()
    edges = [edge for done in getattr(graph, _REWIRED, ()) for edge in done.edges]
    if edges:
        upstream = _upstream(_as_list(ys))
        edges = [edge for edge in edges if id(edge[0]) in upstream]
    redirected = [op.inputs[index] for op, index, _ in edges]
    for op, index, original in edges:
        tf_internals.update_input(op, index, original)
    try:
        yield
    finally:
        for (op, index, _), copy in zip(edges, redirected, strict=True):
            tf_internals.update_input(op, index, copy)


def _upstream(targets: list[Any]) -> set[int]:
    """The identities of all ops that the targets depend on."""
    stack = [y.op for y in targets if isinstance(y, tf.Tensor) and hasattr(y, "op")]
    found: set[int] = set()
    while stack:
        op = stack.pop()
        if id(op) not in found:
            found.add(id(op))
            stack.extend(tensor.op for tensor in op.inputs)
    return found
