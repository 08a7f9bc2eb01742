"""Which line of the user's code made an op, and which layer it belongs to."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

__all__ = ["layers_of", "user_line"]

_OWN = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = tuple(
    os.sep + name + os.sep
    for name in ("tensorflow", "keras", "tf_keras", "site-packages")
)


def user_line(op: tf.Operation) -> str:
    """`file:line` of the innermost frame outside TensorFlow, Keras and this library.

    Returns:
        The line, or "an unknown line" for an op that was imported from a file.
    """
    innermost = ""
    for frame in op.traceback or ():
        filename = frame.filename
        if filename.startswith(_OWN):
            continue
        if any(library in filename for library in _LIBRARIES):
            continue
        if filename.startswith("<") and not filename.startswith("<ipython"):
            continue
        innermost = f"{_short(filename)}:{frame.lineno}"
    return innermost or "an unknown line"


def _short(filename: str) -> str:
    """The path as seen from the working directory, if that is shorter."""
    try:
        relative = os.path.relpath(filename)
    except ValueError:  # another drive
        return filename
    return relative if len(relative) < len(filename) else filename


def layers_of(names: Sequence[str]) -> list[str]:
    """For each op name its layer: the outermost scope that tells the ops apart.

    A Keras functional model wraps all its layers in one scope, which tells nothing and
    is left out. An op outside all scopes belongs to no layer ("").
    """
    scopes = [name.split("/")[:-1] for name in names]
    scoped = [scope for scope in scopes if scope]
    depth = 0
    while scoped and all(len(scope) > depth + 1 for scope in scoped):
        if len({scope[depth] for scope in scoped}) > 1:
            break
        depth += 1
    return [scope[depth] if len(scope) > depth else "" for scope in scopes]
