"""Verify mode: is every recomputed tensor, bit for bit, what it was the first time?

It can differ where an op is not the function that its registration claims, or where a
v1 session is fed an intermediate tensor: the feed replaces the original and not the
copy.

All comparisons are made in one step, in each run of a loop's body, of a branch, of a
called function in one more, and end in one assertion, whose message names the
first op, in graph order, that differs, what about it differs, and the line of user code
that made it. Floating-point numbers are compared by their bits: a NaN equals itself.

A tensor of another shape would make the backward pass fail by itself, in words that
nobody understands. So what reads a copy of unknown shape waits until its shape has been
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients import tf_internals
from memory_saving_gradients.errors import VerificationUnavailableError, place
from memory_saving_gradients.tf_read import Reading
from memory_saving_gradients.tf_write import Rewiring
from memory_saving_gradients.user_code import user_line

__all__ = ["require_assertions", "verified", "verified_inside"]

# A tensor and what was computed for it again.
_Pair = tuple[tf.Tensor, tf.Tensor]


def require_assertions(graph: tf.Graph) -> None:
    """Checks that assertions in `graph` will be made.

    Raises:
        VerificationUnavailableError: The graph is compiled by XLA.
    """
    if tf_internals.in_xla(graph):
        raise VerificationUnavailableError(
            f"{place()}: `verify=True` needs assertions at run time, but XLA drops "
            "them. Verify with `jit_compile=False`."
        )


def verified(
    gradients: Sequence[Any], reading: Reading, rewiring: Rewiring, graph: tf.Graph
) -> list[Any]:
    """Makes the gradients depend on an assertion that nothing was recomputed wrongly.

    Args:
        gradients: What `gradients()` would return.
        reading: The training graph.
        rewiring: What was copied.
        graph: Where all this lives.

    Returns:
        The same gradients; reading them fails with an
        `InvalidArgumentError` if a recomputed tensor differs.
    """
    with tf_internals.creation_scope(graph), tf.name_scope("recompute/verify"):
        _guard_readers(reading, rewiring)
        assertion = _assertion(_all_of(reading, rewiring))
        with tf.control_dependencies([assertion]):
            return [_after(gradient) for gradient in gradients]


def _guard_readers(reading: Reading, rewiring: Rewiring) -> None:
    """Makes the readers of a copy whose shape may differ wait until it does not."""
    for number, outputs in rewiring.in_graph_order():
        original = reading.ops[number]
        for first, second in outputs:
            readers = second.consumers()
            if first.shape.is_fully_defined() or not readers:
                continue
            message = _told("shape", _described(original, first))
            assertion = tf.debugging.Assert(
                _same_shape(first, second), [message], summarize=1
            )
            for reader in readers:
                if not tf_internals.in_control_flow_v1(reader):
                    tf_internals.add_control_input(reader, assertion)


def _told(what: Any, where: Any) -> Any:
    return tf.strings.join(
        ["memory_saving_gradients: recomputation gave other ", what, " for ", where]
    )


def _described(op: tf.Operation, output: tf.Tensor) -> str:
    return f"{output.name}, made at {user_line(op)}"


def verified_inside(
    gradients: Sequence[Any],
    redone: Sequence[tuple[tf.Tensor, _Pair]],
    graph: tf.Graph,
) -> list[Any]:
    """The same in the gradient of a body.

    Args:
        gradients: What the gradient body returns.
        redone: Tensors of the body; of each what is held of it for the gradient body,
            and what was computed again there.
        graph: The gradient body.
    """
    with tf_internals.creation_scope(graph), tf.name_scope("recompute/verify"):
        assertion = _assertion([(_described(t.op, t), pair) for t, pair in redone])
        with tf.control_dependencies([assertion]):
            return [_after(gradient) for gradient in gradients]


def _all_of(reading: Reading, rewiring: Rewiring) -> list[tuple[str, _Pair]]:
    return [
        (_described(reading.ops[number], first), (first, second))
        for number, outputs in rewiring.in_graph_order()
        for first, second in outputs
    ]


def _assertion(pairs: Sequence[tuple[str, _Pair]]) -> tf.Operation:
    """Fails at the first pair that differs, which it names as told."""
    values = [_same_values(first, second) for _, (first, second) in pairs]
    shapes = [_same_shape(first, second) for _, (first, second) in pairs]
    same = tf.logical_and(tf.stack(values), tf.stack(shapes))
    worst = tf.argmin(tf.cast(same, tf.int32))
    what = tf.where(tf.gather(tf.stack(shapes), worst), "values", "shape")
    message = _told(what, tf.gather(tf.constant([told for told, _ in pairs]), worst))
    return tf.debugging.Assert(tf.reduce_all(same), [message], summarize=1)


def _same_shape(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    return _equal(tf.shape(first), tf.shape(second))


def _same_values(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    if first.dtype.is_floating or first.dtype.is_complex:
        first, second = tf.bitcast(first, tf.uint8), tf.bitcast(second, tf.uint8)
    return _equal(first, second)


def _equal(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Whether all elements are equal; False, not an error, if shapes do not match."""
    equal = tf.raw_ops.Equal(x=first, y=second, incompatible_shape_error=False)
    return tf.reduce_all(equal)


def _after(gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.identity(gradient.values), gradient.indices, gradient.dense_shape
        )
    return tf.identity(gradient)
