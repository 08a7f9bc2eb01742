"""The drop-in `gradients()` family: from a stock gradient to a rewired one.

What `tf.gradients` would do is done by the very function behind it; `doors` and
`autodiff` see to the rest, as they do for tapes.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import tensorflow as tf

from memory_saving_gradients import doors, tf_internals
from memory_saving_gradients.autodiff import (
    as_autodiff_made_it,
    as_list,
    setting_or_stock,
)
from memory_saving_gradients.errors import EagerExecutionError
from memory_saving_gradients.plan import forget
from memory_saving_gradients.selection import plain_variable

__all__ = [
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
]


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
    unknown_dim: int | None = None,
    cost: Any = None,
    verify: bool = False,
    every: int | str | None = None,
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
            `"4GiB"`, `"40%"` (of stock's peak) or a `Budget`: whatever costs least
            extra time within that peak;
            `"collection"`: the tensors in the graph collection "checkpoints";
            a list of tensors or tensor names: exactly these;
            a function of a `tf.Tensor` that returns a bool;
            `Plan.from_json(text)`: what was kept when that plan was saved;
            None: whatever stock holds, also where `enable()` says otherwise.
        name: Name scope of the gradient ops.
        colocate_gradients_with_ops: Whether gradient ops are placed with the ops that
            they belong to. None means what stock does: yes in a `tf.function`, no in
            a v1 graph.
        gate_gradients: As in `tf.gradients`.
        aggregation_method: As in `tf.gradients`.
        stop_gradients: As in `tf.gradients`.
        unconnected_gradients: As in `tf.gradients`.
        unknown_dim: What a dimension that is not known statically (a batch size) is
            taken to be while planning, at least 1. None means 64, and 1024 for
            `"memory"`, `"speed"` and shares of stock's peak where gradients of weights
            would otherwise be much of the peak. The gradients are right for every size.
        cost: Measured seconds, so that plans are made for your hardware: a dict of op
            names to seconds of one run, or the path of a JSON file of that form, as
            `python -m mem_util TRACE --costs FILE` writes it. A name also matches with
            what inlining puts in front, `StatefulPartitionedCall/` or `while/body/_3/`.
            Ops without a time take that of a model, scaled to the measured ones.
        verify: Whether to compare, at run time, each recomputed tensor with the
            original and fail if a bit differs. Costs all the memory that was saved.
        every: After how many iterations loops hold their state, at least 1. What lies
            between is run again, `every` iterations at a time, so that each iteration
            is computed three times altogether instead of two. "sqrt" means the square
            root of the number of iterations, with which least is held. None means each
            iteration, but under a budget that loops would take most of the square root.

    Returns:
        A list with one gradient for each of `xs`: a tensor, `tf.IndexedSlices` or None.

    Raises:
        EagerExecutionError: There is no graph: called outside a `tf.function`.
        CheckpointError: From `checkpoints` no plan can be made.
        CostError: `cost` holds no measured times.
        BudgetError: No plan keeps to the budget; it names the least that would do.
        PlanMismatchError: The saved plan was made for another graph.
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
    setting = setting_or_stock(
        checkpoints, unknown_dim, cost, verify, every, where="gradients"
    )
    graph = tf.compat.v1.get_default_graph()
    if colocate_gradients_with_ops is None:
        colocate_gradients_with_ops = tf_internals.builds_function(graph)
    targets = as_list(ys)
    if stop_gradients is not None:
        stop_gradients = [plain_variable(entry) for entry in as_list(stop_gradients)]

    def stock(seeds: list[Any]) -> list[Any]:
        with as_autodiff_made_it(graph, targets):
            return tf_internals.gradients_helper(
                targets,
                [plain_variable(x) for x in as_list(xs)],
                seeds,
                name=name,
                colocate_gradients_with_ops=colocate_gradients_with_ops,
                gate_gradients=gate_gradients,
                aggregation_method=aggregation_method,
                stop_gradients=stop_gradients,
                unconnected_gradients=unconnected_gradients,
            )

    if setting is None:
        with doors.use(None):
            return stock(grad_ys)
    return doors.handle(
        setting,
        targets,
        grad_ys,
        stock,
        "gradients",
        as_list(xs),
        stop_gradients or (),
    ).gradients


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
