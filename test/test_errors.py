"""The exceptions are what code that knows nothing of the library expects."""

from __future__ import annotations

import pytest

from memory_saving_gradients import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.CheckpointError, ValueError),
        (errors.CostError, ValueError),
        (errors.PlanMismatchError, ValueError),
        (errors.UnknownCheckpointNameError, LookupError),
        (errors.EagerExecutionError, RuntimeError),
        (errors.VerificationUnavailableError, NotImplementedError),
        (errors.UnsupportedTensorFlowError, ImportError),
        (errors.IllegalGraphError, ValueError),
    ],
)
def test_every_error_is_ours_and_a_builtin(
    error: type[Exception], builtin: type[Exception]
):
    with pytest.raises(builtin, match="what happened") as caught:
        raise error("what happened")
    assert isinstance(caught.value, errors.MemorySavingGradientsError)


def test_all_errors_are_listed():
    listed = {getattr(errors, name) for name in errors.__all__}
    defined = {value for value in vars(errors).values() if isinstance(value, type)}
    assert listed == {c for c in defined if issubclass(c, Exception)}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (list("abcde"), "a, b, c, d, e"),
        (list("abcdef"), "a, b, c, d, e and 1 more"),
        ((str(n) for n in range(100)), "0, 1, 2, 3, 4 and 95 more"),
    ],
)
def test_long_lists_are_cut(names: list[str], text: str):
    assert errors.shortened(names) == text
