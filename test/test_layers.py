"""The architecture, held by the parser: who imports whom, and how long things are."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "memory_saving_gradients"


def folder_of(package: str) -> Path:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


HOME = folder_of(PACKAGE)

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "wording", "counting"),
    ("op_types", "tf_required"),
    ("graph", "budget", "saved"),
    ("cost", "executor", "checkpoints", "measured"),
    ("buffers", "op_shapes"),
    ("shape_rules", "shape_values"),
    ("shapes",),
    ("order",),
    ("schedule",),
    ("simulate", "sweep", "sweep_slots", "sweep_tables"),
    ("planners", "gain"),
    ("tf_internals", "user_code", "keras_models"),
    (
        "tf_internals_bodies",
        "tf_internals_data",
        "tf_internals_loops",
        "tf_internals_scratch",
    ),
    ("trip_counts", "twins"),
    ("stored",),
    ("volume",),
    ("every",),
    ("split", "body_rules"),
    ("control_flow_v1", "tf_shapes", "replicas", "resources", "pins"),
    ("ancestry", "calls"),
    ("tf_read",),
    ("working",),
    ("selection", "budgeted", "replay"),
    ("fences",),
    ("tf_write", "tf_capture"),
    ("inside_plan", "verify"),
    ("inside_choice",),
    ("inside",),
    ("study",),
    ("plan",),
    ("rewire",),
    ("autodiff", "trials", "scratch"),
    ("bodies",),
    ("rehearsal",),
    ("remembered",),
    ("doors",),
    ("differentiate", "tape", "loops"),
    ("patching", "keras_layers", "keras_batch"),
    ("status",),
    ("keras_line", "keras_wishes"),
    ("keras", "input_specs"),
    ("dry_run", "pareto_front"),
    ("comparison", "largest_batch"),
    ("culprit",),
    ("report", "picture"),
    ("__init__",),
)
"""Lowest first: a module imports from rows above its own only, or from its own row."""

PURE = frozenset(name for row in LAYERS[:11] for name in row) - {"tf_required"}
"""The rows that know no TensorFlow."""

LATE = frozenset({("plan", "report"), ("plan", "picture")})
"""Arrows that may point up, inside a function: `Plan.summary()` and `Plan.plot()`
delegate."""

MOST_LINES_OF_A_FILE = 350
MOST_LINES_OF_A_FUNCTION = 60

FILES = sorted(HOME.rglob("*.py"))
ALL_FILES = pytest.mark.parametrize(
    "path", FILES, ids=[str(path.relative_to(HOME)) for path in FILES]
)


def module_of(path: Path) -> str:
    """The module's name in `LAYERS`: a subpackage counts as one."""
    parts = path.relative_to(HOME).with_suffix("").parts
    return parts[0]


def rank(module: str) -> int:
    found = [number for number, row in enumerate(LAYERS) if module in row]
    assert found, f"{module} has no layer: give it one in LAYERS"
    return found[0]


def nodes(path: Path) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes of a file, each with whether it stands inside a function."""
    stack: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    while stack:
        node, inside = stack.pop()
        yield node, inside
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        stack.extend((child, inside) for child in ast.iter_child_nodes(node))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The dotted names that a file imports, each with whether it does so late."""
    for node, late in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            assert node.module is not None
            yield node.module, late
            # `from package import module` names the module second.
            yield from ((f"{node.module}.{alias.name}", late) for alias in node.names)


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The length of a function without its docstring."""
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        length -= docstring.end_lineno - docstring.lineno + 1
    return length


def imported_layers(path: Path) -> set[tuple[str, bool]]:
    """The modules of this package that a file imports."""
    known = {name for row in LAYERS for name in row}
    found = set()
    for name, late in imports(path):
        parts = name.split(".")
        if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in known:
            found.add((parts[1], late))
    return found


@ALL_FILES
def test_imports_point_down(path: Path):
    module = module_of(path)
    for other, late in sorted(imported_layers(path)):
        if late and (module, other) in LATE:
            continue
        assert rank(other) <= rank(module), f"{module} imports {other}"


def test_modules_of_one_row_do_not_import_each_other_in_circles():
    arrows = {
        (module_of(path), other)
        for path in FILES
        for other, late in imported_layers(path)
        if not late and other != module_of(path)
    }
    assert not {(b, a) for a, b in arrows} & arrows


def test_every_layer_but_those_to_come_has_a_file():
    modules = {module_of(path) for path in FILES}
    missing = {name for row in LAYERS for name in row} - modules
    assert missing == set()


PURE_FILES = [path for path in FILES if module_of(path) in PURE]


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: path.stem)
def test_pure_layers_know_no_tensorflow(path: Path):
    roots = {name.split(".")[0] for name, _ in imports(path)}
    assert roots.isdisjoint({"tensorflow", "keras", "tf_keras"})


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if not path.stem.startswith("tf_internals")],
    ids=lambda p: p.stem,
)
def test_tensorflows_private_names_stand_in_files_of_their_own(path: Path):
    assert "tensorflow.python" not in path.read_text()
    private = [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node, _ in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls", "sys")
    ]
    assert private == []


@ALL_FILES
def test_files_and_functions_are_short(path: Path):
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_A_FILE
    for node, _ in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = lines_of_code(node)
            assert length <= MOST_LINES_OF_A_FUNCTION, node.name


def test_measuring_knows_nothing_of_the_library():
    for path in folder_of("mem_util").rglob("*.py"):
        roots = {name.split(".")[0] for name, _ in imports(path)}
        assert PACKAGE not in roots, path.name


# -- the checks themselves -------------------------------------------------------------


def test_late_and_early_imports_are_told_apart(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(
        "import numpy as np\n"
        f"from {PACKAGE} import report\n"
        "def f():\n"
        f"    from {PACKAGE}.plan import Plan\n"
    )
    assert imported_layers(path) == {("report", False), ("plan", True)}
    assert ("numpy", False) in set(imports(path))


def test_a_docstring_is_no_code():
    module = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n')
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert lines_of_code(function) == 2
