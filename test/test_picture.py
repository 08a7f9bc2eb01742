"""A plan as a picture: it agrees with the plan, and nothing in it is covered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from matplotlib import image
from matplotlib.figure import Figure

import memory_saving_gradients as msg
from memory_saving_gradients.picture import figure
from memory_saving_gradients.wording import sizes_like

v1 = tf.compat.v1

MIB = 2**20


def planned(checkpoints: Any, size: int = MIB, wanted: bool = True) -> msg.Plan:
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [size])
        for number in range(20):
            with tf.name_scope(f"a_rather_long_name_of_a_block_in_a_model/b{number}"):
                y = tf.tanh(tf.nn.softplus(y))
        other = v1.placeholder(tf.float32, [size])
        xs = x if wanted else other
        msg.gradients(tf.reduce_sum(y), xs, checkpoints=checkpoints)
        plan = msg.last_plan()
        assert plan is not None
        return plan


def labels(drawing: Figure) -> list[str]:
    return [
        text.get_text() for legend in drawing.legends for text in legend.get_texts()
    ]


def lines_of(drawing: Figure) -> dict[str, Any]:
    """What is labelled, by the first words of the label."""
    return {str(line.get_label()).split(":")[0]: line for line in drawing.axes[0].lines}


def test_the_picture_says_what_the_plan_says():
    plan = planned("40%")
    drawing = figure(plan)
    found = lines_of(drawing)
    for label, timeline in (("stock", plan.stock), ("planned", plan.timeline)):
        (at,), (level,) = found[label].get_data()
        assert level == timeline.peak_bytes / MIB
        ops = plan.reading.graph.ops
        before = timeline.steps[: timeline.peak_step]
        assert at * 1e-3 == pytest.approx(sum(ops[step.op].seconds for step in before))
    assert plan.budget_bytes is not None
    assert set(found["budget"].get_ydata()) == {plan.budget_bytes / MIB}
    assert len(found["made here and kept"].get_xdata()) == len(plan.kept)
    kept = found["made here and kept"].get_label()
    assert re.search(r"those of (1|2|4|8|16|32|64|128|256|512) [KM]?i?B and", kept)
    turn = found["the planned backward pass begins"].get_xdata()[0]
    assert all(x < turn for x in found["made here and kept"].get_xdata())
    title = drawing.axes[0].get_title(loc="left")
    assert f"{100 * plan.extra_fraction:.1f} % more work" in title
    assert drawing.axes[0].get_ylabel() == "live memory above rest (MiB)"
    assert drawing.axes[0].get_xlabel() == "estimated time (ms)"
    texts = [text.get_text() for text in drawing.axes[0].texts]
    size = sizes_like(plan.stock_peak_bytes)
    assert texts == [size(plan.stock_peak_bytes), size(plan.predicted_peak_bytes)]


def test_nothing_is_covered():
    drawing = figure(planned("40%"))
    drawing.canvas.draw()
    (legend,) = drawing.legends
    box = drawing.axes[0].get_tightbbox()
    assert not legend.get_window_extent().overlaps(box)
    for text in legend.get_texts():
        assert text.get_window_extent().x1 <= drawing.bbox.x1
    for text in drawing.axes[0].texts:
        assert text.get_window_extent().y1 <= drawing.axes[0].bbox.y1


def test_long_names_are_cut_in_front():
    (stock, *_) = labels(figure(planned("memory")))
    assert len(stock) < 100
    assert "..." in stock or len(stock) < 80


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_files(tmp_path: Path, suffix: str):
    path = tmp_path / f"step.{suffix}"
    planned("memory").plot(path if suffix == "png" else str(path))
    assert path.stat().st_size > 5000
    if suffix == "png":
        assert image.imread(path).shape[:2] == (900, 1800)


def test_what_is_no_picture(tmp_path: Path):
    with pytest.raises(ValueError, match="jpegg"):
        planned("memory").plot(tmp_path / "step.jpegg")


def test_without_a_budget_there_is_no_line():
    assert not [text for text in labels(figure(planned("memory"))) if "budget" in text]


@pytest.mark.parametrize(("checkpoints", "wanted"), [("100%", True), ("memory", False)])
def test_a_graph_that_was_left_as_it_was(
    checkpoints: str, wanted: bool, tmp_path: Path
):
    plan = planned(checkpoints, wanted=wanted)
    assert not plan.recomputed
    drawing = figure(plan)
    plan.plot(tmp_path / "step.png")
    title = drawing.axes[0].get_title(loc="left").replace("\n", " ")
    assert title == f"One step, left as it was: {plan.reason}"
    budget = ["budget"] if checkpoints == "100%" else []
    assert [text.split(":")[0] for text in labels(drawing)] == ["stock", *budget]


def test_where_all_is_saved_inside_stock_is_a_level():
    @tf.function
    def step(x):
        with msg.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(20):
                y = tf.tanh(tf.nn.softplus(tf.sin(y)))
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    step.get_concrete_function(tf.TensorSpec([64, 64]))
    plan = msg.last_plan()
    assert plan.timeline is plan.stock
    (axes,) = figure(plan).axes
    labels = [line.get_label() for line in axes.lines]
    assert any(label.startswith("stock: peak") for label in labels)
    assert any(label.startswith("planned: peak") for label in labels)
    assert "instead of" in axes.get_title(loc="left")
