"""Says clearly that Python is too old, or that there is no TensorFlow.

Nothing here needs more than Python 3.7, so that an older one gets as far as being told.
"""

from __future__ import annotations

import sys

from mem_util.errors import MissingTensorFlowError

__all__ = ["OLDEST_PYTHON", "require_python", "require_tensorflow"]

OLDEST_PYTHON = (3, 10)
"""The oldest Python that the code is written for."""


def require_python() -> None:
    """Checks the interpreter.

    Raises:
        ImportError: it is older than `OLDEST_PYTHON`.
    """
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise ImportError(
            "`mem_util` needs Python {}.{} or newer, but this is Python {}.{} ({}). "
            "Install it into an environment of a newer Python.".format(
                *OLDEST_PYTHON, *sys.version_info[:2], sys.executable
            )
        )


def require_tensorflow(where: str) -> None:
    """Imports TensorFlow: for those who call what needs it.

    Args:
        where: the public function, for the message.

    Raises:
        MissingTensorFlowError: there is none.
    """
    try:
        import tensorflow  # noqa: F401
    except ImportError as error:
        raise MissingTensorFlowError(
            f"`mem_util.{where}` needs TensorFlow, but `import tensorflow` failed "
            f"({error}). It is not installed along with `mem_util`, lest a second one "
            "is put over yours: run `pip install tensorflow` (or `tensorflow-cpu`, or "
            "the build that you need)."
        ) from error


require_python()
