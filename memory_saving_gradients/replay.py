"""A saved plan made real again, in the graph that it was made for and in no other.

1. The forward graph is described, one line an op (`graph_lines`): name, type, what it
   reads, dtypes and shapes. Control inputs are left out: a `tf.function` adds some when
   its trace ends. So are attributes and the insides of functions; a plan is right for
   whatever these are.
2. If the lines are those of the plan, its kept tensors are looked up by name.
3. What is recomputed with these kept must be what the plan recomputes. It is not if
   other gradients are taken of the same forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.errors import PlanMismatchError, place, shortened
from memory_saving_gradients.saved import SavedPlan, fingerprint
from memory_saving_gradients.schedule import Schedule
from memory_saving_gradients.tf_read import Reading

__all__ = [
    "graph_lines",
    "kept_as_saved",
    "require_same_work",
    "rerun_lines",
    "reruns_as_saved",
]


_WHAT_TO_DO = (
    "Build the graph as it was when the plan was saved, or plan anew "
    '(`checkpoints="memory"`, say) and save that plan.'
)


def graph_lines(reading: Reading) -> tuple[str, ...]:
    """The forward ops, a line each, in graph order; the same in every process."""
    lines = []
    captured: dict[str, str] = {}
    for op in reading.ops[: reading.graph.forward_count]:
        if op.type == "Placeholder" and re.fullmatch(r"\d+(_\d+)?", op.name):
            # A tensor from outside the function, called by a number that counts all
            # objects of the process.
            captured[op.name] = f"captured {len(captured)}"
        reads = ", ".join(_name(tensor, captured) for tensor in op.inputs)
        makes = ", ".join(f"{t.dtype.name}{_shape(t)}" for t in op.outputs)
        name = captured.get(op.name, op.name)
        lines.append(f"{name} = {op.type}({reads}) -> {makes}")
    return tuple(lines)


def _name(tensor: tf.Tensor, captured: dict[str, str]) -> str:
    if tensor.op.name in captured:
        return captured[tensor.op.name]
    return str(tensor.name)


def _shape(tensor: tf.Tensor) -> str:
    if tensor.shape.rank is None:
        return "[*]"
    sizes = ("?" if size is None else str(size) for size in tensor.shape.as_list())
    return f"[{','.join(sizes)}]"


def kept_as_saved(saved: SavedPlan, reading: Reading) -> frozenset[int]:
    """The ids of the tensors that the plan keeps.

    Raises:
        PlanMismatchError: The plan was made for another graph, or somebody has edited
            it.
    """
    lines = graph_lines(reading)
    if fingerprint(lines) != saved.fingerprint:
        raise PlanMismatchError(
            f"{place()}: the saved plan was made for another graph. "
            f"{_first_difference(saved, lines)} {_WHAT_TO_DO}"
        )
    ids = {tensor.name: tensor.id for tensor in reading.graph.tensors}
    unknown = [name for name in saved.kept if name not in ids]
    if unknown:
        raise PlanMismatchError(
            f"{place()}: the saved plan keeps what is not in its own graph: "
            f"{shortened(unknown)}. It was edited by hand: save it anew, or give "
            "the names as a list."
        )
    return frozenset(ids[name] for name in saved.kept)


def _first_difference(saved: SavedPlan, lines: Sequence[str]) -> str:
    """What differs first, and what may have made it differ."""
    here, there = len(lines), len(saved.graph)
    pairs = enumerate(zip(saved.graph, lines, strict=False))
    at = next((n for n, (old, new) in pairs if old != new), min(here, there))
    old, new = (
        f"`{text[at]}`" if at < len(text) else "no more ops"
        for text in (saved.graph, lines)
    )
    said = f"The first op that differs is number {at + 1}: "
    said += f"the plan has {old}, here is {new}."
    if _without_counters(old) == _without_counters(new):
        said += (
            " The names differ by a number only. Keras counts layers from the start "
            "of the process: call `keras.utils.clear_session()` before the model is "
            "built, or name the layers."
        )
    return said


def _without_counters(line: str) -> str:
    """A line without the numbers at the end of the parts of names."""
    names, arrow, types = line.rpartition(" -> ")
    return re.sub(r"(_\d+)+(?=[/: ,)]|$)", "", names) + arrow + types


def rerun_lines(schedule: Schedule, reading: Reading) -> tuple[str, ...]:
    """What is copied before which backward op, if some op is copied several times."""
    if max(schedule.runs.values(), default=1) == 1:
        return ()
    runs: dict[int, list[str]] = {}
    slot = 0
    for step in schedule.steps:
        if step.copy:
            runs.setdefault(slot, []).append(reading.graph.ops[step.op].name)
        else:
            slot += 1
    return tuple(f"{slot}: {' '.join(names)}" for slot, names in runs.items())


def reruns_as_saved(
    saved: SavedPlan, reading: Reading, buffers: Buffers
) -> dict[int, tuple[int, ...]] | None:
    """`rerun_lines` as `make_schedule` wants it; None if there are none.

    Raises:
        PlanMismatchError: Somebody has edited them.
    """
    if not saved.reruns:
        return None
    positions = {
        reading.graph.ops[op].name: position
        for position, op in enumerate(buffers.forward)
    }
    found: dict[int, tuple[int, ...]] = {}
    for line in saved.reruns:
        slot, _, names = line.partition(": ")
        try:
            found[int(slot)] = tuple(positions[name] for name in names.split(" "))
        except (KeyError, ValueError):
            raise PlanMismatchError(
                f"{place()}: the saved plan runs again what is not in its own graph: "
                f"{line[:60]!r}. It was edited by hand: save it anew."
            ) from None
    return found


def require_same_work(saved: SavedPlan, schedule: Schedule, reading: Reading) -> None:
    """Raises unless the schedule recomputes what the plan does.

    Raises:
        PlanMismatchError: It does not.
    """
    ops = reading.graph.ops
    found = [ops[op].name for op in schedule.recomputed]
    if tuple(found) == saved.recomputed:
        return
    wanted = set(saved.recomputed)
    more = [name for name in found if name not in wanted]
    less = [name for name in saved.recomputed if name not in set(found)]
    differences = [
        f"{what} {shortened(names)}"
        for what, names in (("also", more), ("not", less))
        if names
    ]
    raise PlanMismatchError(
        f"{place()}: the saved plan was made for other gradients of this forward "
        f"pass: with its tensors kept, what is recomputed is "
        f"{' and '.join(differences) or 'in other order'}. "
        "Differentiate the same `ys` with respect to the same `xs`, and do not edit "
        f"what is kept by hand. {_WHAT_TO_DO}"
    )
