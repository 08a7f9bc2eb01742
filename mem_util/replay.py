"""Runs a function again as the graph of a v1 session, which records everything.

Problem. On the CPU neither the allocator's counters nor the profiler see allocations
under 256 KiB, and neither tells logical CPU devices apart. A v1 session with
`FULL_TRACE` does both, but a `tf.function` is not in a session.

Algorithm.

1. Trace the function with `tf.function` to a concrete function.
2. Import its graph into a fresh one. Arguments and captured constants become
   placeholders; each captured variable becomes a variable of the new graph with the
   same type, shape and value, so that the user's state is not changed.
3. Run the outputs, and the ops with side effects, once to warm up and once more with
   full tracing.

What cannot be carried over (datasets, lookup tables, tensor lists from outside) is an
error that names it. Memory differs from the original in one way: a function of eager
ops frees by Python's rules, its graph by the executor's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mem_util.errors import NotReplayableError, shortened
from mem_util.session import trace_session
from mem_util.trace_data import Trace

__all__ = ["replay"]

_IDLE = frozenset({"Const", "Identity", "IdentityN", "NoOp", "Placeholder"})
"""Types of ops that compute nothing."""


def replay(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
    """Traces one run of a function as a v1 session sees it, its second there.

    Args:
        fn: a `tf.function`, or a function that `tf.function` can trace.
        *args: its arguments.
        **kwargs: its arguments by name.

    Returns:
        The trace. Its rest is 0: arguments and variables are not in the records.

    Raises:
        NotReplayableError: it cannot be traced, or uses what cannot be copied.
    """
    import tensorflow as tf

    values, concrete = _concrete(fn, args, kwargs)
    sources = _sources(concrete)
    graph = tf.Graph()
    with graph.as_default(), tf.name_scope("replayed_inputs"):
        inputs = [_placeholder(value) for value in values]
        copies = [_copy(source) for source in sources]
        mapped = inputs + [copy.inside for copy in copies]
        assigns = {c.assign: {c.fed: c.value} for c in copies if c.assign is not None}
    with graph.as_default():
        fetches = _import(concrete, mapped)
    feeds = dict(zip(inputs, (value.numpy() for value in values), strict=True))
    feeds.update({copy.fed: copy.value for copy in copies if copy.assign is None})
    cpus = len(tf.config.list_logical_devices("CPU"))
    # The order of ops, and with it the peak, depends on the number of threads.
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": cpus},
        inter_op_parallelism_threads=threads,
        use_per_session_threads=True,
    )
    types = {op.type for op in graph.get_operations()}
    if not types - _IDLE:
        what = "that runs none"
        if "Const" in types:
            what = "whose results are constants once traced, as those of numpy are"
        raise NotReplayableError(
            "`mem_util.replay`: expected a function that runs ops of TensorFlow, but "
            f"got one {what}."
        )
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        for assign, fed in assigns.items():
            session.run(assign, fed)
        # The first run also makes the kernels, which changes the order of ops: its peak
        # was up to 14 % lower on a small transformer, where the others agree.
        session.run(fetches, feeds)
        return trace_session(session, fetches, feeds)


def _is_composite(leaf: Any) -> bool:
    """Whether an argument is made of tensors: ragged, sparse, or one per replica."""
    import tensorflow as tf

    kinds = (tf.RaggedTensor, tf.SparseTensor, tf.distribute.DistributedValues)
    return isinstance(leaf, kinds) and not isinstance(leaf, tf.Variable)


def _is_tensor(leaf: Any) -> bool:
    """Whether an argument becomes an input of the graph (variables are captured)."""
    import numpy as np
    import tensorflow as tf

    is_variable = isinstance(leaf, tf.Variable)
    return isinstance(leaf, np.ndarray) or (tf.is_tensor(leaf) and not is_variable)


def _tensors(leaf: Any) -> list[Any]:
    """The tensors that an argument is or is made of; none for any other argument."""
    import tensorflow as tf

    if _is_composite(leaf):
        return list(tf.nest.flatten(leaf, expand_composites=True))
    return [tf.convert_to_tensor(leaf)] if _is_tensor(leaf) else []


def _concrete(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Step 1: tensors among the arguments, and a concrete function of them alone."""
    import tensorflow as tf

    if hasattr(getattr(fn, "__self__", None), "fit"):
        raise NotReplayableError(
            "`mem_util.replay`: expected a function of tensors, but got a method of a "
            f"Keras model, {fn!r:.80}. Measure one step on tensors instead."
        )
    leaves = tf.nest.flatten((args, kwargs))
    parts = [_tensors(leaf) for leaf in leaves]

    def of_tensors(*tensors: Any) -> Any:
        rest = iter(tensors)
        filled = []
        for leaf, count in zip(leaves, map(len, parts), strict=True):
            own = [next(rest) for _ in range(count)]
            if _is_composite(leaf):
                own = [tf.nest.pack_sequence_as(leaf, own, expand_composites=True)]
            filled.append(own[0] if own else leaf)
        new_args, new_kwargs = tf.nest.pack_sequence_as((args, kwargs), filled)
        return fn(*new_args, **new_kwargs)

    tensors = [tensor for own in parts for tensor in own]
    traced = tf.function(of_tensors, autograph=False)
    try:
        return tensors, traced.get_concrete_function(*tensors)
    except Exception as error:  # whatever the user's code raises when traced
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise NotReplayableError(
            "`mem_util.replay`: expected a function that `tf.function` can trace, but "
            f"got {reason.split('. ')[0]:.150}. Measure one step on tensors instead."
        ) from error


@dataclass(frozen=True)
class _Source:
    """A captured variable or tensor, and its value, a numpy array."""

    dtype: Any
    shape: Any
    device: str
    is_variable: bool
    value: Any


@dataclass(frozen=True)
class _Copy:
    """What stands for a captured tensor in the new graph.

    Attributes:
        inside: the tensor that the imported graph reads.
        fed: the placeholder that takes the value.
        value: the value, a numpy array.
        assign: the op that puts it into a variable; None for a plain tensor.
    """

    inside: Any
    fed: Any
    value: Any
    assign: Any = None


def _sources(concrete: Any) -> list[_Source]:
    """Step 2: what each captured tensor is a tensor or variable of."""
    import tensorflow as tf

    from mem_util.tf_internals import variable_type

    found, strange = [], []
    for captured in concrete.captured_inputs:
        dtype, shape, value, is_variable = captured.dtype, captured.shape, None, False
        if dtype == tf.resource and (known := variable_type(captured)):
            (dtype, shape), is_variable = known, True
            value = tf.raw_ops.ReadVariableOp(resource=captured, dtype=dtype).numpy()
            shape = value.shape if shape.rank is None else shape
        elif dtype not in {tf.resource, tf.variant}:
            value = captured.numpy()
        if value is None:
            strange.append(_what(captured))
        else:
            found.append(_Source(dtype, shape, captured.device, is_variable, value))
    if strange:
        raise NotReplayableError(
            "`mem_util.replay`: expected a function of tensors and variables, but got "
            f"one that also uses {shortened(dict.fromkeys(strange))}. Pass a batch as "
            "an argument instead of an iterator or a table."
        )
    return found


def _what(captured: Any) -> str:
    """What a captured handle is of, without the rest of what it prints."""
    found = re.search(r'\btype="([^"]+)"', repr(captured))
    of = f" of type {found.group(1)}" if found else ""
    return f"a {captured.dtype.name}{of}"


def _copy(source: _Source) -> _Copy:
    """A placeholder or, for a variable, one of the same type, shape and device."""
    import tensorflow as tf

    fed = _placeholder(source)
    if not source.is_variable:
        return _Copy(fed, fed, source.value)
    with tf.device(source.device):
        handle = tf.raw_ops.VarHandleOp(
            dtype=source.dtype, shape=source.shape, shared_name=fed.op.name
        )
        assign = tf.raw_ops.AssignVariableOp(resource=handle, value=fed)
    return _Copy(handle, fed, source.value, assign)


def _placeholder(like: Any) -> Any:
    import tensorflow as tf

    return tf.compat.v1.placeholder(like.dtype, like.shape)


def _import(concrete: Any, mapped: Sequence[Any]) -> list[Any]:
    """Imports the function's graph over `mapped` inputs; returns what to fetch."""
    import tensorflow as tf

    names = [tensor.name for tensor in concrete.inputs]
    opaque = {tf.resource, tf.variant}
    fetched = [
        output.op.name if output.dtype in opaque else output.name
        for output in concrete.outputs
    ]
    effects = [op.name for op in concrete.graph.control_outputs]
    imported: list[Any] = tf.graph_util.import_graph_def(
        concrete.graph.as_graph_def(),
        input_map=dict(zip(names, mapped, strict=True)),
        return_elements=fetched + effects,
        name="",
    )
    return imported
