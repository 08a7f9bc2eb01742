"""A plan as text: what a person needs to decide whether to believe and to use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from memory_saving_gradients.graph import Pin, Storage
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.simulate import Timeline
from memory_saving_gradients.user_code import layers_of, user_line

__all__ = ["explain", "summary"]

_LISTED = 5
"""How many of a kind are listed before the rest is counted."""

_DOMINANT = 0.5
"""From this share of the peak on, something dominates it."""


def summary(plan: Plan) -> str:
    """The plan in a screenful.

    Peaks, extra work, the largest kept tensors with the lines that made them, what each
    layer keeps and recomputes, what sets the peak, what was pinned and why.
    """
    blocks = [
        _headline(plan),
        explain(plan),
        _kept(plan),
        _layers(plan),
        _peak(plan),
        _pinned(plan),
        _assumptions(plan),
    ]
    return "\n".join(block for block in blocks if block)


def explain(plan: Plan) -> str:
    """Why recomputation does not help (much) here, or ""."""
    if plan.recomputed and plan.predicted_peak_bytes <= 0.9 * plan.stock_peak_bytes:
        return ""
    lines = []
    if plan.reason:
        lines.append(f"The graph was left as TensorFlow made it: {plan.reason}.")
    elif plan.recomputed:
        lines.append("This plan saves little.")
    culprit = _culprit(plan)
    if culprit:
        lines.append(culprit)
    return "\n".join(lines)


def _headline(plan: Plan) -> str:
    new, old = plan.predicted_peak_bytes, plan.stock_peak_bytes
    share = f" ({100 * new / old:.0f} %)" if old else ""
    lines = [
        f"Checkpoints: {plan.strategy}",
        f"  predicted peak   {_mb(new)} instead of {_mb(old)}{share}, "
        "activations and gradients",
        f"  extra work       {100 * plan.extra_fraction:.1f} % of forward + backward",
        f"  kept             {len(plan.kept)} tensors, recomputed "
        f"{len(plan.recomputed)} ops",
        f"  planning took    {plan.planning_seconds:.2f} s",
    ]
    if plan.xla:
        lines.append(
            "  XLA schedules for itself: the figures are those of the executor, and a "
            "guide only."
        )
    return "\n".join(lines)


def _kept(plan: Plan) -> str:
    graph, reading = plan.reading.graph, plan.reading
    held = sorted(plan.schedule.kept, key=lambda t: (-graph.tensors[t].bytes, t))
    if not held or not plan.recomputed:
        return ""
    lines = ["Largest kept tensors:"]
    for tensor in held[:_LISTED]:
        node = graph.tensors[tensor]
        where = user_line(reading.ops[node.op])
        lines.append(f"  {_mb(node.bytes):>10}  {node.name}  {where}")
    return "\n".join(lines + _rest(len(held)))


def _layers(plan: Plan) -> str:
    """Bytes kept and ops recomputed by layer, for those that keep most."""
    graph = plan.reading.graph
    forward = graph.forward_ops
    layer = dict(
        zip(
            (op.id for op in forward),
            layers_of([op.name for op in forward]),
            strict=True,
        )
    )
    kept: Counter[str] = Counter()
    redone: Counter[str] = Counter()
    for tensor in plan.schedule.kept:
        node = graph.tensors[tensor]
        kept[layer[node.op]] += node.bytes
    for op in plan.schedule.recomputed:
        redone[layer[op]] += 1
    names = sorted({*kept, *redone} - {""}, key=lambda n: (-kept[n], -redone[n], n))
    if len(names) < 2 or not plan.recomputed:
        return ""
    width = min(max(map(len, names[:_LISTED])), 40)
    lines = [f"By layer:{'':{max(width - 5, 0)}}kept  recomputed"]
    lines.extend(
        f"  {name[:40]:{width}}{_mb(kept[name]):>10}  {redone[name]:>6} ops"
        for name in names[:_LISTED]
    )
    return "\n".join(lines + _rest(len(names)))


def _peak(plan: Plan) -> str:
    if plan.timeline.peak_step < 0:
        return ""
    graph = plan.reading.graph
    step = plan.timeline.steps[plan.timeline.peak_step]
    op = graph.ops[step.op]
    turn = len(plan.timeline.steps) - len(plan.schedule.steps)
    if plan.recomputed and plan.timeline.peak_step == turn and not step.copy:
        what = "at the start of the backward pass"
    elif step.copy:
        what = f"while {op.name} is recomputed"
    elif step.op < graph.forward_count:
        what = f"in the forward pass, at {op.name}"
    else:
        what = f"in the backward pass, at {op.name}"
    lines = [f"The peak is reached {what}."]
    copies = sorted(a.tensor for a in plan.timeline.at_peak if a.copy)
    if copies:
        first = graph.ops[graph.tensors[copies[0]].op]
        last = graph.ops[graph.tensors[copies[-1]].op]
        held = sum(graph.tensors[t].bytes for t in copies)
        lines.append(
            f"  The segment from {first.name} to {last.name} holds {_mb(held)} then."
        )
    return "\n".join(lines)


def _pinned(plan: Plan) -> str:
    """Tensors that the backward pass reads and that may not be redone, by reason."""
    graph = plan.reading.graph
    found: dict[Pin, list[int]] = {}
    for tensor in sorted(plan.schedule.kept):
        pin = graph.ops[graph.tensors[tensor].op].pin
        if pin is not None:
            found.setdefault(pin, []).append(tensor)
    lines = []
    for pin, tensors in found.items():
        total = sum(graph.tensors[t].bytes for t in tensors)
        example = graph.ops[graph.tensors[tensors[0]].op]
        lines.append(
            f"  {len(tensors)} tensors, {_mb(total)}, because {pin.value} "
            f"(such as {example.type} {example.name})"
        )
    return "\n".join(["Never recomputed:", *lines]) if lines else ""


def _assumptions(plan: Plan) -> str:
    graph = plan.reading.graph
    # Shapes and indices are tiny whatever their length is.
    assumed = [
        t
        for t in graph.assumed
        if graph.tensors[t].storage is Storage.OWN
        and plan.reading.tensors[t].dtype.is_floating
    ]
    if not assumed:
        return ""
    return (
        f"{len(assumed)} tensors have unknown dimensions, taken to be "
        f"{plan.reading.unknown_dim} (set `unknown_dim=`): the figures hold for that."
    )


def _culprit(plan: Plan) -> str:
    """What the stock peak consists of, if one thing dominates it."""
    graph = plan.reading.graph
    peak = max(plan.stock_peak_bytes, 1)
    results = {graph.root(tensor) for tensor in graph.results}
    gradients = _bytes_at_peak(plan.stock, graph.tensors, results)
    if gradients > _DOMINANT * peak:
        return (
            f"Gradients of the variables are {_mb(gradients)} of the peak of "
            f"{_mb(peak)}: recomputation cannot shrink them."
        )
    resting = sum(
        t.bytes for t in graph.tensors if t.storage is Storage.RESTING and t.bytes > 8
    )
    if resting > 4 * peak:
        return (
            f"Variables and inputs take {_mb(resting)}, activations and gradients "
            f"only {_mb(peak)}: there is little to save by recomputation."
        )
    largest = max(
        (op for op in graph.ops if op.outputs),
        key=lambda op: _working_set(op.inputs, op.outputs, graph.tensors),
        default=None,
    )
    if largest is None:
        return ""
    working = _working_set(largest.inputs, largest.outputs, graph.tensors)
    if working > _DOMINANT * peak:
        return (
            f"The op {largest.name} ({largest.type}) alone reads and writes "
            f"{_mb(working)} of the peak of {_mb(peak)}."
        )
    return ""


def _bytes_at_peak(timeline: Timeline, tensors: tuple, chosen: set[int]) -> int:
    return sum(tensors[a.tensor].bytes for a in timeline.at_peak if a.tensor in chosen)


def _working_set(inputs: Iterable[int], outputs: Iterable[int], tensors: tuple) -> int:
    return sum(
        tensors[t].bytes
        for t in {*inputs, *outputs}
        if tensors[t].storage is Storage.OWN
    )


def _rest(count: int) -> list[str]:
    return [f"  ... and {count - _LISTED} more"] if count > _LISTED else []


def _mb(count: int) -> str:
    if count < 1e5:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
