"""From a parsed `checkpoints=` to the ids of the tensors that are kept.

The automatic strategies are asked; what a user names is looked up. A named tensor
*serves* if keeping it can change anything: a forward op that may be recomputed made it,
and some residual depends on it. An alias (`Reshape`, `Identity`) stands for the tensor
whose buffer it shares.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from memory_saving_gradients import op_types, tf_internals, tf_internals_bodies
from memory_saving_gradients.checkpoints import (
    Auto,
    Budget,
    Checkpoints,
    Collection,
    Keep,
    SavedPlan,
)
from memory_saving_gradients.errors import (
    CheckpointError,
    UnknownCheckpointNameError,
    place,
    shortened,
)
from memory_saving_gradients.graph import Storage
from memory_saving_gradients.planners import PLANNERS, Problem
from memory_saving_gradients.tf_read import Reading
from memory_saving_gradients.user_code import level_of_caller
from memory_saving_gradients.wording import counted

__all__ = ["accepts", "collected", "describe", "plain_variable", "select"]

_NEAR = 3
"""At most so many names are suggested for one that is misspelt."""

_AS_GOOD = 0.02
"""Suggestions are as good as the best one, up to this difference in likeness: of
`layer8/ouput` all other layers' outputs are no misspelling."""


def describe(checkpoints: Checkpoints, chosen: int | None = None) -> str:
    """The `checkpoints=` argument in a few words, for reports.

    Args:
        checkpoints: The argument; a collection has been looked up already.
        chosen: How many tensors of those that the user gave can serve, if known.
    """
    if isinstance(checkpoints, Auto):
        return checkpoints.mode
    if isinstance(checkpoints, Budget):
        return str(checkpoints)
    if isinstance(checkpoints, SavedPlan):
        return f"a saved plan ({checkpoints.strategy})"
    if isinstance(checkpoints, Keep):
        count = len(checkpoints.tensors) if chosen is None else chosen
        return f"{counted(count, 'tensor')} from {checkpoints.origin}"
    return "collection" if isinstance(checkpoints, Collection) else "a predicate"


def collected(graph: tf.Graph, collection: Collection) -> Keep:
    """What the graph's collection holds at this moment.

    Raises:
        CheckpointError: The collection is empty.
    """
    tensors = tuple(graph.get_collection(collection.name))
    if tensors:
        return Keep(tensors, f"the collection {collection.name!r}")
    here = place()
    default = ", the default," if here.endswith(".gradients`") else ""
    of_model = here.endswith(".memory_saving`")
    listed = "layers, `[layer1, layer2]`" if of_model else "tensors, `[h1, h2]`"
    ways = [
        'pass `checkpoints="memory"` to have them chosen',
        f"pass a list of {listed}",
        f"add some with `tf.compat.v1.add_to_collection({collection.name!r}, tensor)` "
        "while you build the model",
    ]
    if tf_internals.builds_function(graph):
        ways[2] += ", in the same `tf.function`"
    else:
        ways.reverse()
    raise CheckpointError(
        f'{here}: `checkpoints="collection"`{default} expects tensors in the '
        f"graph collection {collection.name!r}, but it is empty. You can "
        f"{ways[0]}, or {ways[1]}, or {ways[2]}."
    )


def select(
    checkpoints: Checkpoints, problem: Problem, reading: Reading, graph: tf.Graph
) -> frozenset[int]:
    """The ids of the tensors that are kept, those that must be included.

    Args:
        checkpoints: What the user asked for; a collection has been looked up already.
        problem: The planning problem.
        reading: The way from TensorFlow's objects to ids.
        graph: Where tensor names are looked up.

    Raises:
        CheckpointError: The user named tensors of which none can serve, or gave a
            function that raises, says no bool or says False to all.
        UnknownCheckpointNameError: Names belong to no tensor of the graph.
    """
    if isinstance(checkpoints, Auto):
        return PLANNERS[checkpoints.mode](problem)
    serving = _serving(problem)
    if isinstance(checkpoints, Keep):
        return problem.forced | _named(checkpoints, reading, graph, serving)
    predicate = getattr(checkpoints, "predicate", None)
    if predicate is None:
        raise AssertionError(checkpoints)  # a collection that was not looked up
    roots = [reading.graph.root(tensor) for tensor in range(len(reading.tensors))]
    chosen = frozenset(
        root
        for tensor, root in zip(reading.tensors, roots, strict=True)
        if root in serving and accepts(predicate, tensor)
    )
    if not chosen and serving:
        raise CheckpointError(
            f"{place()}: the function given as `checkpoints` returned False for all "
            f"{len(serving)} tensors that could be kept (such as "
            f"{shortened((reading.tensors[t].name for t in sorted(serving)), 3)}). "
            'Make it accept some, or pass `checkpoints="memory"`.'
        )
    return problem.forced | chosen


def accepts(predicate: Any, tensor: tf.Tensor) -> bool:
    """What the user's function says of one tensor."""
    where = (
        f"{place()}: the function {getattr(predicate, '__name__', repr(predicate))} "
        "given as `checkpoints`"
    )
    try:
        answer = predicate(tensor)
    except Exception as error:
        raise CheckpointError(
            f"{where} raised {type(error).__name__} ({error}) for the tensor "
            f"{tensor.name} of shape {tensor.shape} (op type {tensor.op.type}). It is "
            "asked for every tensor that could be kept."
        ) from error
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    raise CheckpointError(
        f"{where} must return True or False, but returned {answer!r} of type "
        f"{type(answer).__name__} for the tensor {tensor.name}. Values are not known "
        "while a graph is built: decide by name, shape, dtype or op type."
    )


def _serving(problem: Problem) -> frozenset[int]:
    """Tensors whose keeping changes something."""
    buffers = problem.buffers
    return frozenset(
        tensor
        for tensor in problem.useful_tensors
        if buffers.pinned(tensor) is None and tensor not in buffers.endless
    )


def _named(
    keep: Keep, reading: Reading, graph: tf.Graph, serving: frozenset[int]
) -> frozenset[int]:
    kept: set[int] = set()
    idle: dict[str, str] = {}
    held = False
    found = [_tensor_or_variable(entry, graph) for entry in keep.tensors]
    # What stands in a loop, a branch or a called function is looked after there.
    inside = set(tf_internals_bodies.graphs_inside(graph))
    elsewhere = any(getattr(entry, "graph", None) in inside for entry in found)
    unknown = []
    for entry, tensor in zip(keep.tensors, found, strict=True):
        if tensor is None and any(_has(body, entry) for body in inside):
            elsewhere = True
        elif tensor is None:
            unknown.append(entry)
    if unknown:
        raise _unknown_names(unknown, reading, serving)
    for entry in found:
        if entry is None or getattr(entry, "graph", None) in inside:
            continue
        if isinstance(entry, tf.Variable):
            idle[entry.name] = "it is a variable"
            continue
        number = _number(entry, reading)
        root = None if number is None else reading.graph.root(number)
        if root is not None and root in serving:
            kept.add(root)
        elif keep.of_layers and root is not None and _is_held(root, reading):
            held = True
        elif entry.graph is not graph:
            idle[entry.name] = "it belongs to another graph"
        else:
            idle[entry.name] = _why_idle(root, reading)
    listed = shortened(f"{name} ({why})" for name, why in idle.items())
    # Where every gradient is None, as in stock, there is no backward pass to serve.
    if not (kept or held or elsewhere) and reading.graph.results:
        given = (
            f"none of the {len(idle)} given can serve: {listed}"
            if len(idle) > 1
            else f"what was given cannot serve: {listed}"
        )
        advice = (
            'Give the outputs of layers, or pass `checkpoints="memory"` to have them '
            "chosen."
            if serving
            else "Nothing in this graph can: this backward pass reads nothing that "
            'could be recomputed. Pass `checkpoints="memory"`, which leaves such a '
            "graph as it is, or call `tf.gradients`."
        )
        raise CheckpointError(
            f"{place()}: {keep.origin} must hold tensors between `xs` and `ys`, but "
            f"{given if idle else 'it is empty'}. {advice}"
        )
    _warn(keep, listed, len(idle), only_held=held and not kept)
    return frozenset(kept)


def _warn(keep: Keep, idle: str, count: int, only_held: bool) -> None:
    """Says what of the user's list changes nothing."""
    if count:
        warnings.warn(
            f"{place()}: {count} of {counted(len(keep.tensors), 'tensor')} in "
            f"{keep.origin} cannot serve as checkpoints and are ignored: {idle}.",
            stacklevel=level_of_caller(),
        )
    if only_held:
        warnings.warn(
            f"{place()}: {keep.origin} are held anyway, as are those of all ops that "
            "are not run again. Give layers between them to hold more.",
            stacklevel=level_of_caller(),
        )


def _number(tensor: tf.Tensor, reading: Reading) -> int | None:
    """The tensor's id; an alias beside the path (`identity(h)`) means its source."""
    number = reading.tensor_id(tensor)
    while number is None and tensor.op.type in op_types.ALIAS_TYPES:
        tensor = tensor.op.inputs[0]
        number = reading.tensor_id(tensor)
    return number


def _is_held(root: int, reading: Reading) -> bool:
    """Whether a tensor is held whatever is selected, as its op is not run again."""
    node = reading.graph.tensors[root]
    return bool(reading.graph.ops[node.op].pin) and node.storage is not Storage.RESTING


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


def plain_variable(x: Any) -> Any:
    """The `tf.Variable` inside a Keras 3 variable; anything else as it is."""
    if isinstance(x, tf.Variable | tf.Tensor):
        return x
    inner = getattr(x, "value", None)
    return inner if isinstance(inner, tf.Variable | tf.Tensor) else x


def _tensor_or_variable(entry: Any, graph: tf.Graph) -> Any:
    """What a list entry means; None for a name that the graph has not."""
    if isinstance(entry, str):
        try:
            return graph.get_tensor_by_name(entry if ":" in entry else f"{entry}:0")
        except (KeyError, ValueError):
            return None
    if isinstance(entry, tf.Operation) and entry.outputs:
        return entry.outputs[0]
    meant = plain_variable(entry)
    if isinstance(meant, tf.Variable) or tf.is_symbolic_tensor(meant):
        return meant
    raise CheckpointError(
        f"{place()}: `checkpoints` may list graph tensors and tensor names, but got "
        f"{entry!r} of type {type(entry).__name__}. Inside a `tf.function`, use the "
        "tensors that the model computes there."
    )


def _has(graph: tf.Graph, name: str) -> bool:
    """Whether a graph has a tensor of this name."""
    try:
        graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    except (KeyError, ValueError):
        return False
    return True


def _unknown_names(
    names: Sequence[str], reading: Reading, serving: frozenset[int]
) -> UnknownCheckpointNameError:
    """One error for all names that the graph has not, with names that would do."""
    graph = reading.graph
    usable = {
        tensor.name.lower(): tensor.name
        for tensor in graph.tensors
        if tensor.op < graph.forward_count and graph.root(tensor.id) in serving
    }
    told = []
    for name in dict.fromkeys(names):
        near = [usable[key] for key in _near(name, usable)]
        hint = (
            f"did you mean {' or '.join(near)}?" if near else "no name is close to it"
        )
        told.append(f"{name!r} ({hint})")
    what = "a tensor" if len(told) == 1 else f"{len(told)} tensors"
    return UnknownCheckpointNameError(
        f"{place()}: `checkpoints` names {what} that the graph has not: "
        f"{shortened(told)}. `last_plan().kept` of an automatic plan lists names that "
        "serve."
    )


def _near(name: str, usable: Iterable[str]) -> list[str]:
    """Names like this one, best first: none that another name is much more like."""
    wanted = (name if ":" in name else f"{name}:0").lower()
    leaf = [key for key in usable if key.endswith(f"/{wanted}")]
    if leaf:
        return leaf[:_NEAR]
    close = difflib.get_close_matches(wanted, list(usable), n=_NEAR, cutoff=0.7)
    likeness = [difflib.SequenceMatcher(None, key, wanted).ratio() for key in close]
    return [
        key
        for key, ratio in zip(close, likeness, strict=True)
        if ratio >= likeness[0] - _AS_GOOD
    ]
