"""What an op's shapes are inferred from, and what all rules for them need.

The rules are in `shape_rules` and `shape_values`; `shapes` says what they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory_saving_gradients.cost import Shape

__all__ = ["FullShape", "OpShapes", "broadcast", "strided"]

FullShape = tuple[int, ...]
"""Dimensions of which none is unknown."""


@dataclass(frozen=True)
class OpShapes:
    """What the shapes of an op's outputs depend on.

    Attributes:
        type: The op type.
        inputs: Shapes of the inputs, under the assumption for unknown dimensions.
        values: For each input its elements, under the same assumption, if it is a small
            tensor of integers that follows from shapes and constants, else None.
        outputs: Static shapes of the outputs.
        attribute: From the name of an attribute of the op to its value.
    """

    type: str
    inputs: Sequence[FullShape]
    values: Sequence[NDArray[np.int64] | None]
    outputs: Sequence[Shape]
    attribute: Callable[[str], Any]

    def array(self, index: int) -> NDArray[np.int64]:
        """The value of input number `index`.

        Raises:
            LookupError: It is not known.
        """
        value = self.values[index]
        if value is None:
            raise LookupError(f"the value of input {index} is not known")
        return value

    def numbers(self, index: int) -> list[int]:
        """The same as a list of integers."""
        return [int(number) for number in self.array(index).ravel()]


def broadcast(shapes: Sequence[FullShape]) -> FullShape:
    """The shape of an element-wise op on these shapes."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(
        next((size for size in sizes if size != 1), 1)
        for sizes in zip(*padded, strict=True)
    )


def strided(op: OpShapes) -> tuple[Any, ...]:
    """The numpy index that a `StridedSlice` stands for."""
    begins, ends, strides = op.numbers(1), op.numbers(2), op.numbers(3)
    masks = {
        name: int(op.attribute(f"{name}_mask"))
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    index: list[Any] = []
    for place, (begin, end, stride) in enumerate(
        zip(begins, ends, strides, strict=True)
    ):
        marked = {name for name, mask in masks.items() if mask >> place & 1}
        if "ellipsis" in marked:
            index.append(...)
        elif "new_axis" in marked:
            index.append(np.newaxis)
        elif "shrink_axis" in marked:
            index.append(begin)
        else:
            first = None if "begin" in marked else begin
            index.append(slice(first, None if "end" in marked else end, stride))
    return tuple(index)
