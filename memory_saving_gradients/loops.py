"""`while_loop` and `scan`: TensorFlow's own, which hold their state for few iterations.

They only leave a note for whoever differentiates the loop; see `split`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from memory_saving_gradients.every import SQRT, mark, parse_every

__all__ = ["scan", "while_loop"]


@tf.autograph.experimental.do_not_convert
def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    shape_invariants: Any = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    maximum_iterations: Any = None,
    name: str | None = None,
    *,
    every: int | str = SQRT,
) -> Any:
    """`tf.while_loop` whose gradient needs the state of few iterations.

    It *is* `tf.while_loop`. Differentiated under a setting of this library
    (`GradientTape`, `gradients`, `enable`, `memory_saving`), it holds its state each
    `every` iterations only and runs these again, `every` at a time, as any loop does
    under a setting with `every=`; here it is said for one loop, and counts more. Each
    iteration is then computed three times altogether instead of two. For T iterations
    the state is held T / `every` + `every` times, instead of T times.

    Gradients of what all iterations share (weights) are summed in groups of `every`,
    so that they differ from those of `tf.while_loop` by rounding.

    A body that draws random numbers with state, or assigns variables, cannot be run
    again: such a loop holds the state of each iteration, and the plan says so.

    Args:
        cond: As in `tf.while_loop`.
        body: As in `tf.while_loop`.
        loop_vars: As in `tf.while_loop`.
        shape_invariants: As in `tf.while_loop`.
        parallel_iterations: As in `tf.while_loop`.
        back_prop: As in `tf.while_loop` of TensorFlow 1.
        swap_memory: As in `tf.while_loop`.
        maximum_iterations: As in `tf.while_loop`.
        name: As in `tf.while_loop`.
        every: After how many iterations the state is held, at least 1; "sqrt" for the
            square root of their number, and 16 where that is not known.

    Returns:
        What `tf.while_loop` returns: the loop variables after the loop.

    Raises:
        TypeError, ValueError: `every` is no positive int, or whatever `tf.while_loop`
            raises.

    Example:
        >>> import tensorflow as tf
        >>> import memory_saving_gradients as msg
        >>> @tf.function
        ... def step(x):
        ...     with msg.GradientTape() as tape:
        ...         tape.watch(x)
        ...         _, y = msg.while_loop(
        ...             lambda i, _: i < 100,
        ...             lambda i, y: (i + 1, tf.sin(y)),
        ...             (0, x),
        ...             maximum_iterations=100,
        ...         )
        ...     return tape.gradient(y, x)
    """
    results = tf.while_loop(
        cond,
        _marking(body, parse_every(every, "while_loop")),
        loop_vars,
        shape_invariants=shape_invariants,
        parallel_iterations=parallel_iterations,
        swap_memory=swap_memory,
        maximum_iterations=maximum_iterations,
        name=name,
    )
    if back_prop:
        return results
    return tf.nest.map_structure(tf.stop_gradient, results, expand_composites=True)


@tf.autograph.experimental.do_not_convert
def scan(
    fn: Callable[..., Any],
    elems: Any,
    initializer: Any = None,
    *args: Any,
    every: int | str = SQRT,
    **kwargs: Any,
) -> Any:
    """`tf.scan` whose gradient needs the accumulator of few elements.

    What `while_loop` of this library is to `tf.while_loop`.

    Args:
        fn: As in `tf.scan`.
        elems: As in `tf.scan`.
        initializer: As in `tf.scan`.
        *args: As in `tf.scan`.
        every: After how many elements the accumulator is held, as in `while_loop`.
        **kwargs: As in `tf.scan`.

    Returns:
        What `tf.scan` returns: the accumulators, stacked.

    Raises:
        TypeError, ValueError: `every` is no positive int, or whatever `tf.scan` raises.

    Example:
        >>> import tensorflow as tf
        >>> import memory_saving_gradients as msg
        >>> msg.scan(lambda a, x: a + x, tf.range(4)).numpy()
        array([0, 1, 3, 6], dtype=int32)
    """
    fn = _marking(fn, parse_every(every, "scan"))
    return tf.scan(fn, elems, initializer, *args, **kwargs)


def _marking(call: Callable[..., Any], every: int | str | None) -> Callable[..., Any]:
    """What is called while a loop's body is built, and marks that body."""

    @functools.wraps(call)
    def marking(*args: Any, **kwargs: Any) -> Any:
        if every is not None and not tf.executing_eagerly():
            mark(tf.compat.v1.get_default_graph(), every)
        return call(*args, **kwargs)

    return marking
