"""Says clearly, at import, that TensorFlow is missing or too old."""

from __future__ import annotations

from memory_saving_gradients.errors import UnsupportedTensorFlowError

__all__ = ["OLDEST", "require_tensorflow"]

OLDEST = (2, 16)
"""The oldest TensorFlow with which the suite passes (`scripts/test_versions.sh`)."""


def require_tensorflow() -> None:
    """Imports TensorFlow.

    Raises:
        UnsupportedTensorFlowError: There is none, or it is older than `OLDEST`.
    """
    wanted = f"TensorFlow {OLDEST[0]}.{OLDEST[1]} or newer"
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


require_tensorflow()
