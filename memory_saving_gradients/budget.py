"""`Budget`: how many bytes the forward and backward pass may take.

A budget is given in one of three ways: bytes above rest, a share of stock's peak, or a
total from which is subtracted what rests on the device.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import NoReturn

from memory_saving_gradients.errors import CheckpointError
from memory_saving_gradients.wording import sizes_like

__all__ = ["FORMS", "Budget", "looks_like_a_budget"]

FORMS = '"4GiB", "500 MB", "40%" (of stock\'s peak) or a whole number of bytes'
"""What a budget may look like, for messages."""

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 2 ** (10 * n) for n, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}b": 10 ** (3 * n) for n, prefix in enumerate("kmgt", 1)},
}

_PATTERN = re.compile(
    r"\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+))\s*([a-z]*|%)\s*", re.IGNORECASE
)


@dataclass(frozen=True)
class Budget:
    """A limit on the peak of one forward and backward pass.

    Counted are activations, all gradients (held to the end) and what recomputation
    needs, above what rests: without variables and optimizer slots. Give either `bytes`
    or one or both of `total` and `device`.

    Args:
        bytes: The limit itself: a number of bytes, a size such as `"4GiB"` (2^30 bytes
            each) or `"4GB"` (10^9), or a share of what stock would take, `"40%"`.
        total: The memory that the whole program may use, as `bytes` without the share:
            what rests is subtracted first, that is, the variables that the graph reads
            or, if that is more, what the device's allocator has given out by the time
            when the gradient is built.
        device: The device whose memory is meant, such as `"GPU:0"`. Alone, it stands
            for all the memory that TensorFlow may use there; beside `total` it says
            where to look for what rests (the first GPU, if there is one, by default).
        consumed: Whether each gradient is consumed as soon as it is there, so that
            those that wait for the caller count nothing, neither here nor in stock's
            peak. Optimizers do that, but for those that need all gradients at once:
            for clipping by their global norm, accumulation, loss scaling.

    Raises:
        CheckpointError: None or too many are given, or one is nothing of the kind.

    Example:
        >>> Budget("40%"), Budget(bytes=500_000_000), Budget(total="8GiB")
        >>> Budget("4GiB", consumed=True)
    """

    bytes: int | str | None = None
    total: int | str | None = None
    device: str | None = None
    consumed: bool = False

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.total is None and self.device is None):
            raise CheckpointError(
                "`memory_saving_gradients.Budget` takes either `bytes` (what the pass "
                "may take above rest) or `total` and `device` (from which what rests "
                f"is subtracted), but got {self!r}."
            )
        for value in (self.bytes, self.total):
            if value is not None:
                _parsed(value)
        if self.total is not None and _parsed(self.total)[1] is not None:
            raise CheckpointError(
                "`memory_saving_gradients.Budget`: `total` must be a size such as "
                f'"8GiB", but got the share {self.total!r}.'
            )
        if self.device is not None and not isinstance(self.device, str):
            raise CheckpointError(
                '`memory_saving_gradients.Budget`: `device` must be a name like "GPU:0"'
                f", but got {self.device!r}."
            )
        if not isinstance(self.consumed, bool):
            raise CheckpointError(
                "`memory_saving_gradients.Budget`: `consumed` must be True or False, "
                f"but got {self.consumed!r}."
            )

    @property
    def above_rest(self) -> bool:
        """Whether what rests has no part in it."""
        return self.bytes is not None

    @property
    def is_share(self) -> bool:
        """Whether it is a share of stock's peak."""
        return self.bytes is not None and _parsed(self.bytes)[1] is not None

    def allowed(self, stock_peak_bytes: int) -> int:
        """The limit above rest, if given so; shares are of `stock_peak_bytes`."""
        assert self.bytes is not None
        size, share = _parsed(self.bytes)
        return size if share is None else int(share * stock_peak_bytes)

    @property
    def total_bytes(self) -> int | None:
        """`total` in bytes, None if it was not given."""
        return None if self.total is None else _parsed(self.total)[0]

    def __str__(self) -> str:
        left_out = " for gradients consumed as they come" if self.consumed else ""
        return f"{self._limit}{left_out}"

    @property
    def _limit(self) -> str:
        if self.bytes is not None:
            size, share = _parsed(self.bytes)
            if share is not None:
                return f"a budget of {100 * share:g} % of stock's peak"
            return f"a budget of {sizes_like(size)(size)}"
        where = f" on {self.device}" if self.device else ""
        if self.total_bytes is None:
            return f"a budget of all memory{where}"
        return (
            f"a budget of {sizes_like(self.total_bytes)(self.total_bytes)} in all"
            + (where)
        )


def looks_like_a_budget(text: str) -> bool:
    """Whether a string begins as sizes and shares do, be it below 0."""
    return re.match(r"\s*[-+]?\s*[\d.]", text) is not None


def _parsed(value: int | str) -> tuple[int, float | None]:
    """Bytes, or a share of stock's peak."""
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        unit = match[2].lower() if match else ""
        if match is None or (unit != "%" and unit not in _UNITS):
            _refuse(value)
        if unit == "%":
            return 0, _positive(float(match[1]) / 100, value)
        return int(_positive(float(match[1]) * _UNITS[unit], value)), None
    if isinstance(value, bool):
        _refuse(value)
    if not hasattr(value, "__index__"):
        _refuse(value)
    return int(_positive(operator.index(value), value)), None


def _positive(number: float, value: object) -> float:
    if number <= 0:
        raise CheckpointError(
            f"`memory_saving_gradients.Budget`: a budget must be above 0, but got "
            f"{value!r}."
        )
    return number


def _refuse(value: object) -> NoReturn:
    raise CheckpointError(
        f"`memory_saving_gradients.Budget`: a budget must look like {FORMS}, but got "
        f"{value!r}."
    )
