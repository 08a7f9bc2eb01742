"""A saved plan made real again, in a graph like the one that it was made for.

1. The forward graph is described, one line an op (`graph_lines`): name, type, what it
   reads, dtypes and shapes. Control inputs are left out: a `tf.function` adds some when
   its trace ends. So are attributes and the insides of functions; a plan is right for
   whatever these are.
2. Names count for nothing: Keras counts layers from the start of the process, and what
   a dry run calls its inputs is not what `fit` calls them. The lines of both graphs are
   put into one order, in which what reads nothing stands before its first reader, and
   compared by types, shapes and by which line reads which (`_Lines`).
3. If they agree, the ops that the plan names are those in the same places here.
4. What is recomputed with these kept must be what the plan recomputes. It is not if
   other gradients are taken of the same forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.errors import PlanMismatchError, place, shortened
from memory_saving_gradients.saved import SavedPlan
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


_LINE = re.compile(r"(?P<name>.*?) = (?P<type>\w+)\((?P<reads>.*)\) -> (?P<makes>.*)")


@dataclass(frozen=True)
class _Lines:
    """The lines of a graph in an order that does not depend on names.

    Attributes:
        text: The lines.
        meaning: For each its type, what it makes, and which outputs of which lines it
            reads.
        names: For each the name of its op.
        numbers: For each the number of its op in graph order.
    """

    text: tuple[str, ...]
    meaning: tuple[tuple[object, ...], ...]
    names: tuple[str, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, lines: Sequence[str]) -> _Lines:
        """Reads the lines of `graph_lines`."""
        parts = []
        for line in lines:
            found = _LINE.fullmatch(line)
            fields = found.groups() if found else (line, "", "", "")
            reads = [_split(name) for name in fields[2].split(", ") if name]
            parts.append((fields[0], fields[1], reads, fields[3]))
        known = {part[0]: number for number, part in enumerate(parts)}
        order: dict[int, int] = {}
        for number, (_, _, reads, _) in enumerate(parts):
            if not reads:
                continue
            for name, _ in reads:
                source = known.get(name)
                if source is not None and not parts[source][2]:
                    order.setdefault(source, len(order))
            order.setdefault(number, len(order))
        for number in range(len(parts)):
            order.setdefault(number, len(order))
        return cls(
            tuple(lines[number] for number in order),
            tuple(
                (
                    kind,
                    makes,
                    *((order.get(known.get(name, -1)), index) for name, index in reads),
                )
                for _, kind, reads, makes in (parts[number] for number in order)
            ),
            tuple(parts[number][0] for number in order),
            tuple(order),
        )


def _split(name: str) -> tuple[str, str]:
    """The op and the number of a tensor."""
    op, colon, index = name.rpartition(":")
    return (op, index) if colon else (name, "0")


def _places(saved: SavedPlan, reading: Reading) -> dict[str, int]:
    """For the name of each op of the plan's graph the number of the op that it is here.

    Raises:
        PlanMismatchError: The plan was made for another graph.
    """
    there, here = _Lines.of(saved.graph), _Lines.of(graph_lines(reading))
    if there.meaning != here.meaning:
        raise PlanMismatchError(
            f"{place()}: the saved plan was made for another graph. "
            f"{_first_difference(there, here)} {_WHAT_TO_DO}"
        )
    return dict(zip(there.names, here.numbers, strict=True))


def kept_as_saved(saved: SavedPlan, reading: Reading) -> frozenset[int]:
    """The ids of the tensors that the plan keeps.

    Raises:
        PlanMismatchError: The plan was made for another graph, or somebody has edited
            it.
    """
    places = _places(saved, reading)
    kept, unknown = set(), []
    for name in saved.kept:
        op, index = _split(name)
        outputs = reading.graph.ops[places[op]].outputs if op in places else ()
        if index.isdecimal() and int(index) < len(outputs):
            kept.add(outputs[int(index)])
        else:
            unknown.append(name)
    if unknown:
        raise PlanMismatchError(
            f"{place()}: the saved plan keeps what is not in its own graph: "
            f"{shortened(unknown)}. It was edited by hand: save it anew, or give "
            "the names as a list."
        )
    return frozenset(kept)


def _first_difference(there: _Lines, here: _Lines) -> str:
    """What differs first, and in what."""
    pairs = list(enumerate(zip(there.meaning, here.meaning, strict=False)))
    shorter = len(pairs)
    differing = [n for n, (old, new) in pairs if old != new]
    # Two sources of different kinds stand there for what reads them, which tells more.
    telling = [
        n
        for n in differing
        if there.meaning[n][0] == here.meaning[n][0]
        or max(len(there.meaning[n]), len(here.meaning[n])) > 2
    ]
    at = (telling or differing or [shorter])[0]
    old, new = (
        f"`{lines.text[at]}`" if at < len(lines.text) else "no more ops"
        for lines in (there, here)
    )
    said = f"The first op that differs is number {at + 1}: "
    said += f"the plan has {old}, here is {new}."
    if at < shorter:
        one, other = there.meaning[at], here.meaning[at]
        if _same_but_sizes(there, here):
            said += (
                " Only dtypes or shapes differ: plan for the batch that will come "
                "(`batch_size=` of `plan`, or its specs)."
            )
        elif one[:2] == other[:2]:
            said += " They read different things."
    return said


def _same_but_sizes(there: _Lines, here: _Lines) -> bool:
    """Whether dtypes and shapes are all that differs."""
    return len(there.meaning) == len(here.meaning) and all(
        one[0] == other[0] and one[2:] == other[2:]
        for one, other in zip(there.meaning, here.meaning, strict=True)
    )


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
        PlanMismatchError: The plan was made for another graph, or somebody has edited
            these lines.
    """
    if not saved.reruns:
        return None
    positions = {op: position for position, op in enumerate(buffers.forward)}
    places = _places(saved, reading)
    found: dict[int, tuple[int, ...]] = {}
    for line in saved.reruns:
        slot, _, names = line.partition(": ")
        try:
            found[int(slot)] = tuple(
                positions[places[name]] for name in names.split(" ")
            )
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
    places = _places(saved, reading)
    wanted = [
        ops[places[name]].name if name in places else name for name in saved.recomputed
    ]
    found = [ops[op].name for op in schedule.recomputed]
    more = [name for name in found if name not in set(wanted)]
    less = [name for name in wanted if name not in set(found)]
    if not more and not less:
        return
    differences = [
        f"{what} {shortened(names)}"
        for what, names in (("also", more), ("not", less))
        if names
    ]
    raise PlanMismatchError(
        f"{place()}: the saved plan was made for other gradients of this forward "
        f"pass: with its tensors kept, what is recomputed is "
        f"{' and '.join(differences)}. "
        "Differentiate the same `ys` with respect to the same `xs`, and do not edit "
        f"what is kept by hand. {_WHAT_TO_DO}"
    )
