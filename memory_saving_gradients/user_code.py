"""Which line of the user's code made an op, and which layer it belongs to."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence

import tensorflow as tf

__all__ = ["layers_of", "level_of_caller", "user_line"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_PYTHON = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep
# What measures a step calls it, and stands in its traceback.
_OWN = (_PACKAGE, os.path.join(os.path.dirname(_PACKAGE), "mem_util"))
# Replicas are threads, at whose bottom stands Python's own library, and no line of the
# user's.
_NOT_THE_USERS = (*_OWN, _PYTHON)
_LIBRARIES = tuple(
    os.sep + name + os.sep
    for name in ("tensorflow", "keras", "tf_keras", "site-packages")
)

_NOT_THE_CALLER = (
    *_OWN,
    os.path.dirname(os.path.abspath(tf.__file__)),
    contextlib.__file__,
)
_OF_KERAS = tuple(
    os.sep + os.path.join(name, "src", "") for name in ("keras", "tf_keras")
)


def level_of_caller() -> int:
    """The `stacklevel` at which a warning shows the line that called this library."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and _is_between(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _is_between(filename: str) -> bool:
    """Whether a file stands between the caller and this library."""
    of_keras = any(part in filename for part in _OF_KERAS)
    return of_keras or filename.startswith(_NOT_THE_CALLER)


def user_line(op: tf.Operation) -> str:
    """`file:line` of the innermost frame outside TensorFlow, Keras and this library.

    Python's own library is left out, too.

    Returns:
        The line, or "an unknown line" for an op that was imported from a file or made
        in a thread of TensorFlow's.
    """
    innermost = ""
    for frame in op.traceback or ():
        filename = frame.filename
        if filename.startswith(_NOT_THE_USERS):
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

    A scope that holds more than half of all ops (Keras wraps a model in one) tells
    little: its ops are told apart by the scopes inside it. An op outside all scopes has
    no layer ("").
    """
    scopes = [tuple(name.split("/")[:-1]) for name in names]
    wrapper: tuple[str, ...] = ()
    while True:
        depth = len(wrapper)
        inner = Counter(
            s[depth] for s in scopes if s[:depth] == wrapper and len(s) > depth + 1
        )
        name, count = inner.most_common(1)[0] if inner else ("", 0)
        if 2 * count <= len(names):
            break
        wrapper = (*wrapper, name)
    return [
        scope[depth if scope[:depth] == wrapper and len(scope) > depth else 0]
        if scope
        else ""
        for scope in scopes
    ]
