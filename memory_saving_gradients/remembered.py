"""What TensorFlow remembers of called functions, told apart by the setting.

It makes the forward and the backward pass of a function once. What was made under one
setting must not be served under another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memory_saving_gradients.autodiff import Setting
from memory_saving_gradients.bodies import Within, innermost
from memory_saving_gradients.checkpoints import Auto, Collection

__all__ = [
    "is_anything_remembered",
    "pair_of_this_setting",
    "tape_pairs_of_this_setting",
]

# The attribute of a called function that holds its pairs for each setting.
_PAIRS = "_memory_saving_gradients_pairs"
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def _token(holding: Within | None) -> Any:
    """What tells settings apart. It keeps alive what it tells apart by identity."""
    wanted: Any
    if holding is None or holding.setting is None:
        return None
    setting = holding.setting
    wanted = setting.checkpoints
    if not isinstance(wanted, Auto | Collection):
        wanted = _Same(wanted)
    return (
        wanted,
        setting.unknown_dim,
        _Same(setting.cost),
        setting.every,
        setting.verify,
        setting.rule,
    )


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to what holds the very same object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def is_anything_remembered() -> bool:
    """Whether a function is alive that remembers what was made under a setting."""
    return len(_holders) > 0


def pair_of_this_setting(
    process_wide: Setting | None,
    before: Callable[..., Any],
    functions: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The wrapper of the method that looks up, or makes, forward and backward."""
    _swap(functions, ("_cached_function_pairs",), _token(innermost(process_wide)))
    return before(functions, *args, **kwargs)


def tape_pairs_of_this_setting(
    process_wide: Setting | None,
    before: Callable[..., Any],
    function: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The same for functions that are called while a tape watches."""
    names = ("_first_order_tape_functions", "_higher_order_tape_functions")
    _swap(function, names, _token(innermost(process_wide)))
    return before(function, *args, **kwargs)


def _swap(holder: Any, names: Sequence[str], token: Any) -> None:
    """Puts in place what the holder remembers of this setting."""
    remembered = vars(holder).get(_PAIRS)
    if remembered is None:
        if token is None:
            return
        remembered = {None: [getattr(holder, name) for name in names]}
        setattr(holder, _PAIRS, remembered)
        _holders.add(holder)
    for name, value in zip(
        names, remembered.setdefault(token, [{} for _ in names]), strict=True
    ):
        setattr(holder, name, value)
