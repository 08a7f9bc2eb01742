"""Measured seconds of ops, in the place of the roofline model's.

The problem: `cost` knows what an op does and not what it is run on. Who has traced a
step has times, but not for all ops: some were fused or folded away, some stand in a
part of the program that was not traced, and what has a name in a trace may have it with
a prefix.

1. A name in the trace matches the op of that name. TensorFlow inlines functions, loops
   and branches when it runs a graph, and puts what was around in front:
   `StatefulPartitionedCall/dense/MatMul`, `while/body/_12/while/Tanh`. So it also
   matches without what stands in front of, and with, the first such part, the second,
   and so on. Less cut off counts more; names that are as good (one function that was
   called three times) count with their mean.
2. An op that has a match takes that time. One that computes nothing (`Reshape`, a
   variable read) takes none, whatever was measured: that is the executor's, and a copy
   of it does not change how much is computed.
3. All others take what the model says times one factor: the median of measured over
   modelled time, each op weighted by its modelled time. The weights keep a
   graph's many tiny ops, which take as long as it takes to start them, from speaking
   for those that matter; the median keeps those out that were fused with others or ran
   while the machine did something else.

Linear in the number of ops and names.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from memory_saving_gradients.errors import CostError, shortened
from memory_saving_gradients.graph import OpNode, TrainingGraph

__all__ = ["Coverage", "Measured", "Priced", "parse_cost"]

_INLINED = re.compile(r"(?:^|/)(?:State(?:ful|less))?PartitionedCall(?:_\d+)?/|/_\d+/")
"""The end of what inlining puts in front: the name of a call, or `then/_54`."""

_OURS = "recompute/"
"""What stands in front of copies: they cost what their originals do."""

_LISTED = 3
"""Names that are told if none matches."""

_COMPARED = 50
"""Names that are compared letter by letter: each with each takes its time."""

_HOW = (
    'a dict of op names to seconds, {"dense/MatMul": 0.0012}, or the path of a JSON '
    "file of that form, as `python -m mem_util TRACE --costs FILE` writes it"
)


@dataclass(frozen=True)
class Coverage:
    """For how many ops of a graph there were measured times.

    Attributes:
        named: Ops with a measured time.
        ops: Ops that compute something.
        factor: What the modelled seconds of the others were multiplied by.
    """

    named: int
    ops: int
    factor: float


@dataclass(frozen=True)
class Priced:
    """A graph with measured times in it.

    Attributes:
        graph: The same graph, other seconds.
        coverage: How much of it was measured.
    """

    graph: TrainingGraph
    coverage: Coverage


@dataclass(frozen=True, eq=False)
class Measured:
    """Measured times, as the user gave them.

    Attributes:
        seconds: For op names the seconds of one run.
        origin: What to call them in messages.
    """

    seconds: Mapping[str, float]
    origin: str = field(default="`cost`")

    @cached_property
    def _index(self) -> dict[str, float]:
        """The time of each name that an op of a graph may have."""
        found: dict[str, tuple[int, list[float]]] = {}
        for given, value in self.seconds.items():
            for depth, name in enumerate(_readings_of(given)):
                best, values = found.setdefault(name, (depth, []))
                if depth < best:
                    found[name] = depth, [value]
                elif depth == best:
                    values.append(value)
        return {name: sum(v) / len(v) for name, (_, v) in found.items()}

    def of(self, name: str) -> float | None:
        """The measured seconds of an op, None if there are none."""
        value = self._index.get(name)
        if value is None and name.startswith(_OURS):
            return self._index.get(name[len(_OURS) :])
        return value

    def price(self, graph: TrainingGraph) -> Priced:
        """Puts measured times into a graph, and scales the model for the rest."""
        working = [op for op in graph.ops if op.seconds > 0]
        times = {op.id: time for op in working if (time := self.of(op.name))}
        factor = _factor(
            [(op.seconds, times[op.id]) for op in working if op.id in times]
        )
        ops = tuple(
            replace(op, seconds=times.get(op.id, factor * op.seconds))
            if op.seconds > 0
            else op
            for op in graph.ops
        )
        coverage = Coverage(len(times), len(working), factor)
        return Priced(replace(graph, ops=ops), coverage)

    def complaint(self, ops: Iterable[OpNode]) -> str:
        """What to say if no name matches: names of both sides that are alike."""
        names = [op.name for op in ops if op.seconds > 0]
        leaves: dict[str, str] = {}
        for name in names:
            leaves.setdefault(_leaf(name), name)
        near = {n: leaves[_leaf(n)] for n in self.seconds if _leaf(n) in leaves}
        if not near:
            for name in list(self.seconds)[:_COMPARED]:
                close = difflib.get_close_matches(name, names[:_COMPARED], 1)
                near |= dict.fromkeys([name], close[0]) if close else {}
        told = [f"{one!r} is like {other!r}" for one, other in near.items()][:_LISTED]
        alike = "; ".join(told) or (
            f"it has {shortened(map(repr, self.seconds), _LISTED)}, the graph "
            f"{shortened(map(repr, names), _LISTED)}"
        )
        return (
            f"none of the {len(self.seconds)} op names in {self.origin} is that of an "
            f"op of this graph: {alike}. The times come from the roofline model alone. "
            "Trace the very program that you plan for; XLA leaves no names of ops."
        )


def parse_cost(cost: object, where: str = "gradients") -> Measured | None:
    """Turns the `cost=` argument into measured times.

    Args:
        cost: None, a mapping of op names to seconds, or the path of a JSON file.
        where: The public function that got it, for messages.

    Returns:
        The times, None if the model shall be asked alone.

    Raises:
        CostError: The file is missing or no JSON, or what is in it, or in the mapping,
            are not names with positive numbers.
    """
    start = f"`memory_saving_gradients.{where}`: `cost`"
    if cost is None or isinstance(cost, Measured):
        return cost
    origin = "`cost`"
    if isinstance(cost, str | os.PathLike):
        path = os.fspath(cost)
        origin = f"the file {path!r}"
        cost = _loaded(path, start)
    if not isinstance(cost, Mapping):
        raise CostError(
            f"{start} must be {_HOW}, but got {_cut(cost)} of type "
            f"{type(cost).__name__}{'' if origin == '`cost`' else f' in {origin}'}."
        )
    if not cost:
        raise CostError(f"{start} must be {_HOW}, but {origin} is empty.")
    wrong = [
        f"{name!r}: {value!r}"
        for name, value in cost.items()
        if not (isinstance(name, str) and _is_time(value))
    ]
    if wrong:
        raise CostError(
            f"{start}: {origin} must hold op names with seconds above 0, but has "
            f"{shortened(wrong)}. Leave out what was too short to be measured."
        )
    return Measured({str(n): float(v) for n, v in cost.items()}, origin)


def _loaded(path: str | bytes, start: str) -> object:
    try:
        text = Path(os.fsdecode(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(
            f"{start} is the path {path!r}, which cannot be read: {error}. Expected is "
            f"{_HOW}."
        ) from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise CostError(
            f"{start} is the path {path!r} of a file that is no JSON ({error}). "
            f"Expected is {_HOW}."
        ) from error


def _is_time(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return 0 < float(value) < math.inf


def _leaf(name: str) -> str:
    return name.rpartition("/")[2]


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _readings_of(given: str) -> Iterator[str]:
    """What ops a name in a trace may stand for, the most likely first."""
    name = given.partition(":")[0]
    yield name
    if name.startswith("Func/") or "/Func/" in name:
        return  # what comes into a function and goes out of it
    for part in _INLINED.finditer(name):
        yield name[part.end() :]


def _factor(pairs: list[tuple[float, float]]) -> float:
    """Step 3 of the module's outline, for pairs of modelled and measured seconds."""
    ratios = sorted((measured / modelled, modelled) for modelled, measured in pairs)
    half = sum(weight for _, weight in ratios) / 2
    below = 0.0
    for ratio, weight in ratios:
        below += weight
        if below >= half:
            return ratio
    return 1.0
