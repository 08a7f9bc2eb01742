"""A plan as a text that outlives its process, to be kept beside the program.

The text is JSON, made to be read and compared by people: keys in a fixed order, a
tensor, an op a line, in graph order. First stands what the plan does and promises,
last the forward graph that it was made for, one line an op, and the SHA-256 of these
lines: the fingerprint by which another graph is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from memory_saving_gradients.errors import CheckpointError, shortened
from memory_saving_gradients.wording import counted, sizes_like

__all__ = ["SavedPlan", "fingerprint"]

_FORMAT = "plan of memory_saving_gradients"
_VERSION = 1


@dataclass(frozen=True, repr=False)
class SavedPlan:
    """A plan without the graph it was made for: what `Plan.from_json` returns.

    Give it as `checkpoints=`, and the plan is made real without a search.

    Attributes:
        strategy: The `checkpoints=` argument, in words, of the search that found it.
        bodies: How bodies of loops, branches and called functions save memory, which
            plan for themselves: an automatic strategy, or `Plan.rule`; "" if nothing is
            kept in them.
        reason: Why the graph was left as it was, or "".
        stock_peak_bytes: As in `Plan`; so are the next three.
        predicted_peak_bytes: In bytes above rest.
        extra_fraction: Of forward and backward work.
        budget_bytes: In bytes above rest; None without a budget.
        consumed: As in `Plan`.
        unknown_dim: What an unknown dimension was taken to be.
        kept: Names of the kept tensors, in graph order.
        recomputed: Names of the recomputed ops, in graph order.
        reruns: If ops run more than twice, a line for each stretch of copies: the
            number of the backward op before which they run, and their names.
        graph: The forward ops, one line each, in graph order.
    """

    strategy: str
    bodies: str
    reason: str
    stock_peak_bytes: int
    predicted_peak_bytes: int
    extra_fraction: float
    budget_bytes: int | None
    consumed: bool
    unknown_dim: int
    kept: tuple[str, ...]
    recomputed: tuple[str, ...]
    reruns: tuple[str, ...]
    graph: tuple[str, ...]

    def __repr__(self) -> str:
        size = sizes_like(self.stock_peak_bytes)
        return (
            f"SavedPlan({self.strategy!r}: predicted peak "
            f"{size(self.predicted_peak_bytes)} instead of stock's "
            f"{size(self.stock_peak_bytes)}, {counted(len(self.kept), 'tensor')} kept, "
            f"{counted(len(self.recomputed), 'op')} of {len(self.graph)} recomputed)"
        )

    @cached_property
    def fingerprint(self) -> str:
        """What tells the graph from others, in every process."""
        return fingerprint(self.graph)

    def to_json(self) -> str:
        """The text, with a newline at the end."""
        values = asdict(self)
        graph = values.pop("graph")
        head = {"format": _FORMAT, "version": _VERSION}
        tail = {"fingerprint": self.fingerprint, "graph": graph}
        return json.dumps(head | values | tail, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SavedPlan:
        """The plan in a text.

        Args:
            text: What `to_json` returned.

        Raises:
            CheckpointError: It is something else, or somebody has changed the graph in
                it.
        """
        values = _loaded(text)
        found = values.pop("fingerprint", None)
        names = [field.name for field in fields(cls)]
        _require(sorted(values) == sorted(names), _misfit(values, names))
        for name, kind in _KINDS.items():
            value = values[name]
            is_other = isinstance(value, bool) and kind is not bool
            _require(
                isinstance(value, kind) and not is_other, f"{name!r} is {_short(value)}"
            )
        for name in ("kept", "recomputed", "reruns", "graph"):
            wrong = [_short(v) for v in values[name] if not isinstance(v, str)]
            _require(not wrong, f"{name!r} holds {shortened(wrong)}")
            values[name] = tuple(values[name])
        plan = cls(**values)
        _require(
            plan.fingerprint == found,
            "its graph has not the fingerprint that stands above it: it was edited, or "
            "merged from two",
        )
        return plan


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("strategy", "bodies", "reason"), str),
    **dict.fromkeys(("stock_peak_bytes", "predicted_peak_bytes", "unknown_dim"), int),
    "extra_fraction": int | float,
    "budget_bytes": int | None,
    "consumed": bool,
    **dict.fromkeys(("kept", "recomputed", "reruns", "graph"), list),
}


def fingerprint(graph: Sequence[str]) -> str:
    """SHA-256 of the lines that describe a forward graph."""
    return hashlib.sha256("\n".join(graph).encode()).hexdigest()


def _loaded(text: str) -> dict[str, Any]:
    """The values, without what says that it is a plan."""
    if not isinstance(text, str | bytes):
        raise CheckpointError(
            "`memory_saving_gradients.Plan.from_json` takes the text of a saved plan, "
            f"but got {text!r} of type {type(text).__name__}. Give "
            "`pathlib.Path(file).read_text()`."
        )
    try:
        values = json.loads(text)
    except ValueError as error:
        values = None
        _require(False, f"{_short(text)} is no JSON ({error})")
    _require(isinstance(values, dict), f"it is {_short(values)}")
    found = values.pop("format", None)
    _require(found == _FORMAT, f"its 'format' is {_short(found)}")
    version = values.pop("version", None)
    _require(
        version == _VERSION,
        f"its version is {_short(version)}, and this library reads version {_VERSION}",
    )
    return dict(values)


def _misfit(values: dict[str, Any], names: Sequence[str]) -> str:
    missing = [name for name in names if name not in values]
    other = [name for name in values if name not in names]
    parts = [f"it has no {shortened(missing)}"] if missing else []
    parts += [f"it has {shortened(other)}, which no plan has"] if other else []
    return " and ".join(parts)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise CheckpointError(
            "`memory_saving_gradients.Plan.from_json`: expected the text that "
            f"`Plan.to_json()` returned, but {what}. Save the plan anew."
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
