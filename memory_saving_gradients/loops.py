"""`while_loop`: TensorFlow's loop, for loops so long that even their state is too much.

The gradient of a loop needs the state of each iteration: T of them for T iterations.
A loop of loops needs fewer. The outer one runs T / k times, the inner one k times; the
gradient holds the state at the beginning of each inner loop, runs that loop again when
its turn comes, and so has T / k + k states at the most: 2 √T for k = √T (Griewank 1992,
*Achieving logarithmic growth*; Chen et al. 2016, arXiv 1604.06174).

That the inner loop is run again, and not stored, is decided where gradients are built
(`tf_capture`): it must have no state. What keeps most loops from that are reads of
variables, so these are made once, before the loop.

The condition is evaluated as often as by TensorFlow: its answer is carried on, not
asked for again where an inner loop ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from memory_saving_gradients import tf_internals_reads

__all__ = ["while_loop"]

_EVERY = 16
"""Iterations of an inner loop if nobody knows how many there will be."""


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
    every: int | None = None,
) -> Any:
    """`tf.while_loop` whose gradient needs the state of few iterations.

    The results are those of `tf.while_loop`. Differentiated under a setting of this
    library (`GradientTape`, `gradients`, `enable`, `memory_saving`), the loop holds its
    state each `every` iterations only and runs these again, `every` at a time. Each
    iteration is then computed three times altogether instead of two. For T iterations
    the state is held T / `every` + `every` times, instead of T times.

    Gradients of what all iterations share (weights) are summed in groups of `every`,
    so that they differ from those of `tf.while_loop` by rounding.

    A body that draws random numbers with state, or assigns variables, cannot be run
    again: such a loop holds the state of each iteration, as `tf.while_loop` does. If it
    assigns a variable that it reads, too, it is handed to `tf.while_loop`. Eagerly, and
    with TensorFlow 1's control flow, this *is* `tf.while_loop`.

    Variables that the body reads directly are read once, before the loop.

    Args:
        cond: As in `tf.while_loop`.
        body: As in `tf.while_loop`.
        loop_vars: As in `tf.while_loop`.
        shape_invariants: As in `tf.while_loop`.
        parallel_iterations: As in `tf.while_loop`.
        back_prop: As in `tf.while_loop`.
        swap_memory: As in `tf.while_loop`.
        maximum_iterations: As in `tf.while_loop`.
        name: As in `tf.while_loop`.
        every: After how many iterations the state is held, at least 1. None means the
            square root of `maximum_iterations`, and 16 where that is not known.

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
    if every is not None and (isinstance(every, bool) or not isinstance(every, int)):
        raise TypeError(
            f"`memory_saving_gradients.while_loop`: `every` must be an int, but got "
            f"{every!r}."
        )
    if every is not None and every < 1:
        raise ValueError(
            "`memory_saving_gradients.while_loop`: `every` must be at least 1, but "
            f"got {every}. Leave it out to have it chosen."
        )
    keywords = {
        "shape_invariants": shape_invariants,
        "parallel_iterations": parallel_iterations,
        "swap_memory": swap_memory,
        "maximum_iterations": maximum_iterations,
        "name": name,
    }

    def stock() -> Any:
        results = tf.while_loop(cond, body, loop_vars, **keywords)
        return results if back_prop else _stopped(results)

    if tf.executing_eagerly() or not tf.compat.v1.control_flow_v2_enabled():
        return stock()
    try:
        loop = _SplitLoop(cond, body, loop_vars, every, keywords)
        results = loop.build()
    except tf_internals_reads.Reassigned:
        return stock()
    return results if back_prop else _stopped(results)


def _stopped(results: Any) -> Any:
    return tf.nest.map_structure(tf.stop_gradient, results, expand_composites=True)


class _SplitLoop:
    """A loop of loops, while it is being built."""

    def __init__(
        self,
        cond: Callable[..., Any],
        body: Callable[..., Any],
        loop_vars: Any,
        every: int | None,
        keywords: dict[str, Any],
    ) -> None:
        self._cond, self._body = cond, body
        self._start = tf.nest.map_structure(_as_tensor, loop_vars)
        self._keywords = dict(keywords)
        self._most = self._keywords.pop("maximum_iterations")
        static = None if self._most is None else tf.get_static_value(self._most)
        self._chunks = None
        if static is None:
            self._every = every or _EVERY
        else:
            self._every = every or max(math.isqrt(int(static)), 1)
            self._chunks = -(-int(static) // self._every)
        invariants = self._keywords.pop("shape_invariants")
        if invariants is None:
            # The state alone: counters never change their shapes.
            self._invariants: dict[str, Any] = {}
        else:
            scalar = tf.TensorShape([])
            self._invariants = {"shape_invariants": [scalar, scalar, invariants]}
        self._graph = tf.compat.v1.get_default_graph()
        self._reads: dict[int, tf.Operation] = {}

    def build(self) -> Any:
        """The loop variables after the loop."""
        count = tf.constant(0)
        first = [count, self._goes_on(count, self._start), self._start]
        name = self._keywords.pop("name") or "while"
        return tf.while_loop(
            lambda count, goes_on, state: goes_on,
            self._inner_loop,
            first,
            maximum_iterations=self._chunks,
            name=name,
            **self._invariants,
            **self._keywords,
        )[2]

    def _inner_loop(self, count: Any, goes_on: Any, state: Any) -> Any:
        """A few iterations: the body of the outer loop."""
        return tf.while_loop(
            lambda count, goes_on, state: goes_on,
            self._iteration,
            [count, goes_on, state],
            maximum_iterations=self._every,
            name="every",
            **self._invariants,
            **self._keywords,
        )

    def _iteration(self, count: Any, goes_on: Any, state: Any) -> Any:
        with self._reading_outside():
            results = self._body(*state)
            if not isinstance(results, list | tuple):
                results = [results]
            tf.nest.assert_same_structure(
                list(self._start), list(results), check_types=False
            )
            flat = tf.nest.flatten(results)
            results = tf.nest.pack_sequence_as(self._start, flat)
            return count + 1, self._goes_on(count + 1, results), results

    def _goes_on(self, count: Any, state: Any) -> Any:
        """Whether there is one more iteration, given the state."""
        answer = tf.convert_to_tensor(self._cond(*state))
        if answer.shape.rank != 0:
            answer = tf.squeeze(answer)
        if self._most is not None:
            most = tf.cast(tf.convert_to_tensor(self._most), count.dtype)
            answer = tf.logical_and(count < most, answer)
        return answer

    @contextmanager
    def _reading_outside(self) -> Iterator[None]:
        here = tf.compat.v1.get_default_graph()
        with tf_internals_reads.reads_outside(here, self._graph, self._reads):
            yield


def _as_tensor(value: Any) -> Any:
    if isinstance(value, tf.TensorArray) or hasattr(value, "_type_spec"):
        return value
    return tf.convert_to_tensor(value)
