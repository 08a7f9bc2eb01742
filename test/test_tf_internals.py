"""TensorFlow's private names: a release that drops one is red here, by name."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from memory_saving_gradients import UnsupportedTensorFlowError, tf_internals
from memory_saving_gradients.tf_required import require_tensorflow

SOURCE = Path(tf_internals.__file__).read_text()
BOUND = [
    tuple(argument.value for argument in node.args)
    for node in ast.walk(ast.parse(SOURCE))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_bind"
]


def test_private_names_are_found_in_the_source():
    assert len(BOUND) >= 9


@pytest.mark.parametrize("names", BOUND, ids=".".join)
def test_tensorflow_still_has(names: tuple[str, ...]):
    assert tf_internals._bind(*names) is not None


@pytest.mark.parametrize(
    "names",
    [
        ("tensorflow.python.framework.ops", "Operation", "_gone"),
        ("tensorflow.python.framework.ops", "_gone", "_too"),
    ],
    ids=".".join,
)
def test_a_dropped_name_is_in_the_message(names: tuple[str, ...]):
    with pytest.raises(UnsupportedTensorFlowError, match=r"no longer has .*_gone"):
        tf_internals._bind(*names)


def test_private_attributes_of_ops_and_graphs_are_bound():
    """What is called on objects is asked for at import, too."""
    bound = {name for names in BOUND for name in names}
    used = {
        node.attr
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and ast.unparse(node.value) != "self"
    }
    assert used - {"__version__"} <= bound | {
        # Every op has these three, some only as attributes of the object.
        "_input_types",
        "_gradient_function",
        "_get_control_flow_context",
    }


def test_attributes_that_only_objects_have():
    with tf.Graph().as_default():
        op = tf.identity(1.0).op
    assert op._input_types == [tf.float32]
    assert op._gradient_function is None
    assert op._get_control_flow_context() is None


def test_missing_tensorflow_is_said_clearly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UnsupportedTensorFlowError, match="pip install tensorflow"):
        require_tensorflow()


def test_old_tensorflow_is_said_clearly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tf, "__version__", "2.11.1")
    with pytest.raises(UnsupportedTensorFlowError, match=r"but found 2\.11\.1"):
        require_tensorflow()
