"""Published graphs arrive as what they are: a small file made up here says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memory_saving_gradients.graph import Storage
from memory_saving_gradients.schedule import make_schedule
from memory_saving_gradients.simulate import simulate
from published_graphs import parse, paths_in, problem_of, training_graph

SIZES = {
    # A residual block: x, W, h = conv(x, W), r = relu(h), s = r + h, loss = loss(s, t)
    0: (100, "/block/W"),
    1: (50, "0"),
    2: (40, "_"),
    3: (40, "_"),
    4: (40, "_"),
    5: (4, "_"),
    6: (8, "1"),
}

FORWARD = ["Convolution2DFunction", "ReLU", "Add", "Loss"]


def block(
    kind: str,
    inputs: list[int],
    outputs: list[int],
    rank: int,
    retained: tuple[list[int] | None, list[int] | None] = (None, None),
) -> list[str]:
    options = {
        "_input_indexes_to_retain": retained[0],
        "_output_indexes_to_retain": retained[1],
        "rank": rank,
    }
    return [
        "forward",
        f"{len(inputs)} {len(outputs)}",
        *(f"{tensor} _" for tensor in inputs),
        *(str(tensor) for tensor in outputs),
        kind,
        json.dumps(options),
    ]


def residual_block() -> list[str]:
    """The lines of a file, its functions out of order."""
    functions = [
        *block("Add", [3, 2], [4], 2),
        *block("Convolution2DFunction", [1, 0], [2], 0, ([0, 1], None)),
        *block("Loss", [4, 6], [5], 3, ([0, 1], None)),
        *block("ReLU", [2], [3], 1, (None, [0])),
        # The gradient of the rectifier, which says nothing new.
        *["backward", "2 1", "3 gradient", "3 output", "2", "ReLU"],
        '{"_input_indexes_to_retain": null, "_output_indexes_to_retain": [0],'
        ' "rank": 1}',
    ]
    tensors = [f"{number} {size} {name}" for number, (size, name) in SIZES.items()]
    return ["7 5", *tensors, *functions]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "residual.txt"
    found.write_text("\n".join(residual_block()), "utf-8")
    return found


def test_functions_come_in_order_with_what_they_retain(path: Path):
    published = parse(path)
    assert published.name == "residual"
    assert [f.type for f in published.functions] == FORWARD
    assert [f.retained for f in published.functions] == [(1, 0), (3,), (), (4, 6)]
    assert published.forward_seconds == 10 + 1 + 1 + 1


def test_parameters_and_inputs_rest_and_have_no_gradients(path: Path):
    graph = training_graph(parse(path))
    resting = [t.name for t in graph.tensors if t.storage is Storage.RESTING]
    assert resting == ["block/W:0", "0:0", "1:0"]
    sizes = {graph.ops[t.op].type: t.bytes for t in graph.tensors}
    assert sizes["LossGrad"] == sizes["AddGrad"] == sizes["ReLUGrad"] == 40
    # The convolution's backward op makes the gradients of what rests: no bytes here.
    assert sizes["Convolution2DFunctionGrad"] == 0


def test_gradients_meet_where_a_tensor_has_two_readers(path: Path):
    graph = training_graph(parse(path))
    types = [op.type for op in graph.backward_ops]
    assert types == [
        "Seed",
        "LossGrad",
        "AddGrad",
        "ReLUGrad",
        "Sum",
        "Convolution2DFunctionGrad",
    ]
    (total,) = [op for op in graph.ops if op.type == "Sum"]
    makers = {graph.ops[graph.tensors[t].op].type for t in total.inputs}
    assert makers == {"AddGrad", "ReLUGrad"}


def test_backward_ops_read_what_is_retained(path: Path):
    graph = training_graph(parse(path))
    read = {
        op.type: [
            graph.ops[graph.tensors[t].op].type
            for t in op.inputs
            if graph.tensors[t].op < graph.forward_count
        ]
        for op in graph.backward_ops
    }
    assert read["LossGrad"] == ["Add", "Rest"]
    assert read["AddGrad"] == []
    assert read["ReLUGrad"] == ["ReLU"]
    assert read["Convolution2DFunctionGrad"] == ["Rest", "Rest"]


def test_functions_run_one_after_the_other(path: Path):
    buffers = problem_of(training_graph(parse(path))).buffers
    ops = buffers.graph.ops
    assert buffers.forward == [op.id for op in ops if op.type in FORWARD]
    assert buffers.backward == [op.id for op in buffers.graph.backward_ops]


def test_planners_see_the_bytes_counted_by_hand(path: Path):
    problem = problem_of(training_graph(parse(path)))
    # When r's gradient is used: r, both gradients of h, and that of r.
    assert problem.stock_peak_bytes == 4 * 40
    everything = simulate(
        problem.buffers, make_schedule(problem.buffers, problem.everything)
    )
    assert everything.peak_bytes == problem.stock_peak_bytes


def test_a_folder_is_listed_by_name(path: Path):
    assert paths_in(path.parent) == paths_in(path.parent, ["residual"]) == [path]


def test_graphs_that_are_not_there_are_named(path: Path):
    with pytest.raises(ValueError, match=r"no graph nonsense.* Take residual"):
        paths_in(path.parent, ["nonsense"])


def test_an_empty_folder_says_where_graphs_come_from(tmp_path: Path):
    with pytest.raises(ValueError, match="pfnet-research/recompute"):
        paths_in(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: lines[:-3], "line 40.*the file ends here"),
        (lambda lines: ["7 9", *lines[1:]], "the file ends here"),
        (lambda lines: [*lines[:8], "sideways", *lines[9:]], "line 9.*'sideways'"),
        (lambda lines: [*lines[:2], "1 many _", *lines[3:]], "line 8.*many"),
        (lambda lines: [*lines[:2], "9 50 _", *lines[3:]], "line 8.*tensor ids"),
    ],
)
def test_another_format_is_named_with_its_line(path: Path, change, complaint):
    path.write_text("\n".join(change(residual_block())), "utf-8")
    with pytest.raises(ValueError, match=complaint):
        parse(path)
