"""`checkpoints=` becomes one of four frozen kinds, or an error that helps."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

import memory_saving_gradients as msg
from memory_saving_gradients.checkpoints import (
    Auto,
    Collection,
    Keep,
    Where,
    parse,
)
from memory_saving_gradients.errors import CheckpointError

MODES = ("memory", "speed")


class FakeTensor:
    """A symbolic tensor, as far as parsing may look: iterating it is an error."""

    op = "op"
    dtype = "float32"

    def __iter__(self) -> None:
        raise TypeError("Iterating over a symbolic tensor is not allowed")

    def __call__(self) -> None:
        raise AssertionError("a tensor is not a predicate")


@pytest.mark.parametrize("mode", MODES)
def test_names_of_strategies(mode: str):
    assert parse(mode, MODES) == Auto(mode)


def test_collection():
    assert parse("collection", MODES) == Collection("checkpoints")


@pytest.mark.parametrize("made", [list, tuple, iter])
def test_list_of_tensors_and_names_keeps_its_order(made: Any):
    tensor = FakeTensor()
    given = ["b:0", tensor, "a:0", "b:0"]
    assert parse(made(given), MODES) == Keep(("b:0", tensor, "a:0", "b:0"))


def test_list_is_copied():
    given = ["a:0"]
    parsed = parse(given, MODES)
    given.append("b:0")
    assert parsed == Keep(("a:0",))


def test_empty_list_is_no_matter_of_syntax():
    assert parse([], MODES) == Keep(())


def test_single_tensor_is_a_list_of_one():
    tensor = FakeTensor()
    assert parse(tensor, MODES) == Keep((tensor,))


def test_function_is_a_predicate():
    assert parse(callable, MODES) == Where(callable)


@pytest.mark.parametrize(
    "parsed", [Auto("memory"), Keep(("a:0",)), Collection("mine"), Where(callable)]
)
def test_parsed_values_pass_and_are_frozen(parsed: Any):
    assert parse(parsed, MODES) is parsed
    with pytest.raises(FrozenInstanceError):
        parsed.anything = 1


@pytest.mark.parametrize("word", ["memroy", "Memory", "", "gradients", "dense/x:0"])
def test_unknown_string_lists_the_choices_and_the_positional_trap(word: str):
    with pytest.raises(CheckpointError) as caught:
        parse(word, MODES)
    message = str(caught.value)
    assert repr(word) in message
    for choice in (*MODES, "collection"):
        assert f'"{choice}"' in message
    assert "pass `name=...`" in message
    assert "goes into a list" in message


@pytest.mark.parametrize("value", [None, 3, 0.5, True, b"memory", object()])
def test_anything_else_is_an_error_with_its_type(value: Any):
    with pytest.raises(CheckpointError, match=f"of type {type(value).__name__}"):
        parse(value, MODES)


def test_a_misspelt_mode_is_met_with_what_was_meant_and_by_whom():
    with pytest.raises(msg.CheckpointError, match="did you mean 'memory'") as caught:
        msg.enable("memroy")
    assert "memory_saving_gradients.enable" in str(caught.value)
    assert "fourth positional" not in str(caught.value)


@pytest.mark.parametrize("word", ["MEMORY", "Memory", "Colection"])
def test_capitals_are_no_hindrance_to_a_guess(word: str):
    with pytest.raises(CheckpointError, match=r"did you mean '(memory|collection)'"):
        parse(word, MODES)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (10**9, r"`Budget\(1000000000\)`"),
        (1e9, r"`Budget\(1000000000\)`"),
        (np.int64(5), r"`Budget\(5\)`"),
        (np.float32(0.5), r'share .* "50%"'),
    ],
)
def test_a_number_may_have_been_meant_as_a_budget(value: Any, hint: str):
    with pytest.raises(CheckpointError, match=hint):
        parse(value, MODES)


@pytest.mark.parametrize("value", [True, -1, 0.0, float("inf"), float("nan"), 1j])
def test_a_number_that_no_budget_is(value: Any):
    with pytest.raises(CheckpointError, match="of type") as caught:
        parse(value, MODES)
    assert "Budget(" not in str(caught.value)


def test_verify_is_a_bool():
    with pytest.raises(TypeError, match="`verify` must be a bool"):
        msg.GradientTape(verify="yes")
