"""TensorFlow's private names: a release that drops one is red here, by name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tensorflow as tf

from memory_saving_gradients import (
    UnsupportedTensorFlowError,
    tf_internals,
    tf_internals_bodies,
    tf_internals_data,
    tf_internals_loops,
    tf_internals_scratch,
)
from memory_saving_gradients.tf_required import (
    NEWEST,
    OLDEST,
    require_python,
    require_tensorflow,
)

FILES = (
    tf_internals,
    tf_internals_bodies,
    tf_internals_data,
    tf_internals_loops,
    tf_internals_scratch,
)
SOURCE = "\n".join(Path(module.__file__).read_text() for module in FILES)
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
        # Every op has these, some only as attributes of the object; graphs the first.
        "_add_control_dependencies",
        "_body_graph",
        "_cond_graph",
        "_input_types",
        "_gradient_function",
        "_get_control_flow_context",
    }


def test_attributes_that_only_objects_have():
    with tf.Graph().as_default():
        op = tf.identity(1.0).op
    assert op.graph._add_control_dependencies is False
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


@pytest.mark.parametrize("version", ["2.22.0", "2.22.0-rc1", "3.0.0.dev20300101"])
def test_new_tensorflow_is_warned_of(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf, "__version__", version)
    with pytest.warns(
        UserWarning, match=r"tried with .* 2\.16 to 2\.21, but"
    ) as caught:
        require_tensorflow()
    assert len(caught) == 1
    assert version in str(caught[0].message)


def test_the_warning_shows_the_line_that_imports(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import tensorflow as tf\n"
        "tf.__version__ = '2.99.0'\n"
        "import memory_saving_gradients\n"
        "import memory_saving_gradients.plan\n"
    )
    run = [sys.executable, str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"train\.py:(\d+): UserWarning", done.stderr) == ["3"]


def test_tried_versions_are_accepted_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for major, minor in (OLDEST, NEWEST):
        monkeypatch.setattr(tf, "__version__", f"{major}.{minor}.3")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            require_tensorflow()


def test_tried_versions_are_those_of_the_documents() -> None:
    """One range, in the code, the README and the script that tries it."""
    root = Path(__file__).resolve().parents[1]
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    script = (root / "scripts" / "test_versions.sh").read_text("utf-8")
    assert f"\nOLDEST={oldest}\nNEWEST={newest}\n" in script
    assert f"TensorFlow {oldest} to {newest}" in (root / "README.md").read_text("utf-8")


def test_old_python_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(ImportError, match=r"needs Python 3\.10 .* is Python 3\.9"):
        require_python()
