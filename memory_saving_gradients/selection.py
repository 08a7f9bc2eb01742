"""From a parsed `checkpoints=` to the ids of the tensors that are kept.

The automatic strategies are asked; what a user names is looked up. A named tensor
*serves* if keeping it can change anything: a forward op that may be recomputed made it,
and some residual depends on it. An alias (`Reshape`, `Identity`) stands for the tensor
whose buffer it shares.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from memory_saving_gradients import op_types
from memory_saving_gradients.checkpoints import Auto, Checkpoints, Collection, Keep
from memory_saving_gradients.errors import (
    CheckpointError,
    UnknownCheckpointNameError,
    shortened,
)
from memory_saving_gradients.graph import Storage
from memory_saving_gradients.planners import PLANNERS, Problem
from memory_saving_gradients.tf_read import Reading

__all__ = ["collected", "describe", "select"]

_NOT_THE_CALLER = (
    os.path.dirname(os.path.abspath(__file__)),
    os.path.dirname(os.path.abspath(tf.__file__)),
    contextlib.__file__,
)

_WHERE = "`memory_saving_gradients.gradients`"


def describe(checkpoints: Checkpoints) -> str:
    """The `checkpoints=` argument in a few words, for reports."""
    if isinstance(checkpoints, Auto):
        return checkpoints.mode
    if isinstance(checkpoints, Keep):
        return f"{len(checkpoints.tensors)} tensors from {checkpoints.origin}"
    return "collection" if isinstance(checkpoints, Collection) else "a predicate"


def collected(graph: tf.Graph, collection: Collection) -> Keep:
    """What the graph's collection holds at this moment.

    Raises:
        CheckpointError: The collection is empty.
    """
    tensors = tuple(graph.get_collection(collection.name))
    if not tensors:
        raise CheckpointError(
            f'{_WHERE}: `checkpoints="collection"` expects tensors in the graph '
            f"collection {collection.name!r}, but it is empty. Add some with "
            f"`tf.compat.v1.add_to_collection({collection.name!r}, tensor)` while you "
            'build the model, or pass `checkpoints="memory"` to have them chosen.'
        )
    return Keep(tensors, f"the collection {collection.name!r}")


def select(
    checkpoints: Checkpoints, problem: Problem, reading: Reading, graph: tf.Graph
) -> frozenset[int]:
    """The ids of the tensors that are kept.

    Args:
        checkpoints: What the user asked for; a collection has been looked up already.
        problem: The planning problem.
        reading: The way from TensorFlow's objects to ids.
        graph: Where tensor names are looked up.

    Raises:
        CheckpointError: The user named tensors of which none can serve.
        UnknownCheckpointNameError: A name belongs to no tensor of the graph.
    """
    if isinstance(checkpoints, Auto):
        return PLANNERS[checkpoints.mode](problem)
    serving = _serving(problem)
    if isinstance(checkpoints, Keep):
        return _named(checkpoints, reading, graph, serving)
    predicate = getattr(checkpoints, "predicate", None)
    if predicate is None:
        raise AssertionError(f"{checkpoints} has not been resolved")
    chosen = frozenset(
        reading.graph.root(tensor)
        for tensor in range(len(reading.tensors))
        if reading.graph.root(tensor) in serving and predicate(reading.tensors[tensor])
    )
    if not chosen and serving:
        raise CheckpointError(
            f"{_WHERE}: the function given as `checkpoints` returned False for all "
            f"{len(serving)} tensors that could be kept (such as "
            f"{shortened((reading.tensors[t].name for t in sorted(serving)), 3)}). "
            'Make it accept some, or pass `checkpoints="memory"`.'
        )
    return chosen


def _serving(problem: Problem) -> frozenset[int]:
    """Tensors whose keeping changes something."""
    buffers = problem.buffers
    return frozenset(
        tensor
        for position in problem.useful
        for tensor in buffers.makes[buffers.forward[position]]
        if buffers.pinned(tensor) is None and tensor not in buffers.endless
    )


def _named(
    keep: Keep, reading: Reading, graph: tf.Graph, serving: frozenset[int]
) -> frozenset[int]:
    kept: set[int] = set()
    idle: dict[str, str] = {}
    for entry in keep.tensors:
        variable = entry if isinstance(entry, tf.Variable) else _inner_variable(entry)
        if variable is not None:
            idle[variable.name] = "it is a variable"
            continue
        tensor = _tensor(entry, graph)
        number = _number(tensor, reading)
        root = None if number is None else reading.graph.root(number)
        if root is not None and root in serving:
            kept.add(root)
        else:
            idle[tensor.name] = _why_idle(root, reading)
    listed = shortened(f"{name} ({why})" for name, why in idle.items())
    if not kept and serving:
        raise CheckpointError(
            f"{_WHERE}: {keep.origin} must hold tensors between `xs` and `ys`, "
            f"but none of the {len(idle)} given can serve: {listed or 'it is empty'}. "
            'Give the outputs of layers, or pass `checkpoints="memory"` to have them '
            "chosen."
        )
    if idle:
        warnings.warn(
            f"{_WHERE}: {len(idle)} of {len(keep.tensors)} tensors in {keep.origin} "
            f"cannot serve as checkpoints and are ignored: {listed}.",
            stacklevel=_level_of_caller(),
        )
    return frozenset(kept)


def _level_of_caller() -> int:
    """The `stacklevel` at which a warning shows the line that called this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        frame, level = frame.f_back, level + 1
    return level


def _number(tensor: tf.Tensor, reading: Reading) -> int | None:
    """The tensor's id; an alias beside the path (`identity(h)`) means its source."""
    number = reading.tensor_id(tensor)
    while number is None and tensor.op.type in op_types.ALIAS_TYPES:
        tensor = tensor.op.inputs[0]
        number = reading.tensor_id(tensor)
    return number


def _why_idle(root: int | None, reading: Reading) -> str:
    if root is None:
        return "the gradient does not depend on it"
    node = reading.graph.tensors[root]
    op = reading.graph.ops[node.op]
    if root in reading.graph.targets:
        return "it is differentiated itself"
    if node.storage is Storage.RESTING:
        return "it is an input, a variable or a constant"
    if op.pin is not None:
        return f"it is kept anyway: {op.pin.value}"
    if reading.tensors[root].dtype.is_integer:
        return "it is an integer that no gradient reads"
    return "no gradient reads it, nor anything computed from it"


def _inner_variable(entry: Any) -> tf.Variable | None:
    """The `tf.Variable` inside a Keras 3 variable."""
    inner = getattr(entry, "value", None)
    return inner if isinstance(inner, tf.Variable) else None


def _tensor(entry: Any, graph: tf.Graph) -> tf.Tensor:
    """The graph tensor that a list entry means."""
    if isinstance(entry, str):
        return _tensor_by_name(entry, graph)
    if isinstance(entry, tf.Tensor) and hasattr(entry, "graph"):
        return entry
    if isinstance(entry, tf.Operation) and entry.outputs:
        return entry.outputs[0]
    raise CheckpointError(
        f"{_WHERE}: `checkpoints` may list graph tensors and tensor names, but got "
        f"{entry!r} of type {type(entry).__name__}. Inside a `tf.function`, use the "
        "tensors that the model computes there."
    )


def _tensor_by_name(name: str, graph: tf.Graph) -> tf.Tensor:
    full = name if ":" in name else f"{name}:0"
    try:
        return graph.get_tensor_by_name(full)
    except (KeyError, ValueError) as error:
        near = difflib.get_close_matches(full, _all_names(graph), n=5, cutoff=0.6)
        hint = f"Did you mean {shortened(near)}?" if near else "No name is close to it."
        raise UnknownCheckpointNameError(
            f"{_WHERE}: `checkpoints` names the tensor {name!r}, but the graph has "
            f"none of that name. {hint}"
        ) from error


def _all_names(graph: tf.Graph) -> Iterable[str]:
    return (tensor.name for op in graph.get_operations() for tensor in op.outputs)
