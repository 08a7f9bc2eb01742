"""Says clearly, at import, that Python or TensorFlow is missing, too old or untried.

Nothing here needs more than Python 3.7, so that an older one gets as far as being told.
"""

from __future__ import annotations

import sys
import warnings

from memory_saving_gradients.errors import UnsupportedTensorFlowError

__all__ = ["NEWEST", "OLDEST", "OLDEST_PYTHON", "require_python", "require_tensorflow"]

OLDEST = (2, 16)
"""The oldest TensorFlow with which the suite passes (`scripts/test_versions.sh`)."""

NEWEST = (2, 21)
"""The newest TensorFlow with which it was tried."""

OLDEST_PYTHON = (3, 10)
"""The oldest Python that the code is written for."""

# The line to blame is three imports up: this function, this module, the package.
_IMPORTING_LINE = 4


def require_python() -> None:
    """Checks the interpreter.

    Raises:
        ImportError: It is older than `OLDEST_PYTHON`.
    """
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise ImportError(
            "`memory_saving_gradients` needs Python {}.{} or newer, but this is Python "
            "{}.{} ({}). Install it into an environment of a newer Python.".format(
                *OLDEST_PYTHON, *sys.version_info[:2], sys.executable
            )
        )


def require_tensorflow() -> None:
    """Imports TensorFlow; warns of one newer than `NEWEST`.

    Raises:
        UnsupportedTensorFlowError: There is none, or it is older than `OLDEST`.
    """
    wanted = f"TensorFlow {_text(OLDEST)} or newer"
    try:
        import tensorflow as tf
    except ImportError as error:
        raise UnsupportedTensorFlowError(
            f"`memory_saving_gradients` needs {wanted}, but `import tensorflow` failed "
            f"({error}). The library does not install one, lest it puts a second one "
            "over yours: run `pip install tensorflow` (or `tensorflow-cpu`, or the "
            "build that you need)."
        ) from error
    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if version < OLDEST:
        raise UnsupportedTensorFlowError(
            f"`memory_saving_gradients` needs {wanted}, but found {tf.__version__}. "
            "Run `pip install --upgrade` for the TensorFlow package that you have."
        )
    if version > NEWEST:
        warnings.warn(
            f"`memory_saving_gradients` was tried with TensorFlow {_text(OLDEST)} to "
            f"{_text(NEWEST)}, but this is {tf.__version__}. It may well work: "
            "`gradients(..., verify=True)` checks what it recomputes.",
            stacklevel=_IMPORTING_LINE,
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


require_python()
require_tensorflow()
