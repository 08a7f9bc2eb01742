"""A plan as text: what a person needs to decide whether to believe and to use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from memory_saving_gradients.culprit import filler, resting
from memory_saving_gradients.graph import Pin, Storage
from memory_saving_gradients.inside_plan import InsidePlan
from memory_saving_gradients.measured import Coverage
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.trip_counts import ASSUMED_ITERATIONS
from memory_saving_gradients.user_code import layers_of, user_line
from memory_saving_gradients.wording import counted, sizes_like

__all__ = ["explain", "summary"]

_LISTED = 5
"""How many of a kind are listed before the rest is counted."""

_MUCH = 0.1
"""A plan that lowers the peak by less than this fraction saves little."""


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
        _bodies(plan),
        _peak(plan),
        _pinned(plan),
        _assumptions(plan),
    ]
    return "\n".join(block for block in blocks if block)


def explain(plan: Plan) -> str:
    """Why recomputation does not help (much) here, or ""."""
    size = _size(plan)
    if (plan.recomputed or plan.bodies) and _saves_much(
        plan.predicted_peak_bytes, plan.stock_peak_bytes
    ):
        return resting(plan, size, 4.0)
    lines = []
    if plan.reason:
        lines.append(f"The graph was left as TensorFlow made it: {plan.reason}.")
        if not plan.reading.graph.results:
            return lines[0]
    elif plan.recomputed:
        lines.append(_little(plan))
    culprits = (filler(plan, size), resting(plan, size, 1.0))
    return "\n".join([*lines, *filter(None, culprits)])


def _little(plan: Plan) -> str:
    new, old = plan.predicted_peak_if_consumed_bytes, plan.stock_peak_if_consumed_bytes
    if not _saves_much(new, old):
        return "This plan saves little."
    return (
        "This plan saves little while all gradients are held. If each is consumed as "
        f"soon as it is there, the peak is {_size(plan)(new)} instead of "
        f"{_size(plan)(old)}."
    )


def _saves_much(new: int, old: int) -> bool:
    return new <= (1 - _MUCH) * old


def _headline(plan: Plan) -> str:
    new, old = plan.predicted_peak_bytes, plan.stock_peak_bytes
    size = _size(plan)
    share = f" ({100 * new / old:.0f} %)" if old else ""
    lines = [
        f"Checkpoints: {plan.strategy}{', as saved' if plan.replayed else ''}",
        f"  predicted peak   {size(new)} instead of {size(old)}{share}, "
        "activations and gradients",
        f"  extra work       {100 * plan.extra_fraction:.1f} % of forward + backward",
        f"  kept             {counted(len(plan.kept), 'tensor')}, recomputed "
        f"{counted(len(plan.recomputed), 'op')}{_how_often(plan)}{_inside(plan)}",
        f"  planning took    {plan.planning_seconds:.2f} s",
    ]
    if plan.budget_bytes is not None:
        rest = ""
        if plan.resting_bytes is not None:
            rest = f", {size(plan.resting_bytes)} of the total rest"
        lines.insert(
            1, f"  budget           {size(plan.budget_bytes)} above rest{rest}"
        )
    if plan.measured is not None:
        lines.insert(-1, f"  costs            {_measured(plan.measured)}")
    if plan.xla:
        lines.append(
            "  XLA schedules for itself: the figures are those of the executor, and a "
            "guide only."
        )
    return "\n".join(lines)


def _how_often(plan: Plan) -> str:
    runs = plan.schedule.runs
    most = max(runs.values(), default=1)
    if most == 1:
        return ""
    return f" up to {most} times, {runs.total() / len(runs):.1f} times on average"


def _inside(plan: Plan) -> str:
    """How many ops more are recomputed in bodies."""
    count = plan.recomputed_count - len(plan.recomputed)
    return f", and {count} inside loops and the like" if count else ""


def _measured(coverage: Coverage) -> str:
    text = f"measured times for {coverage.named} of {counted(coverage.ops, 'op')}"
    if 0 < coverage.named < coverage.ops:
        text += f", {coverage.factor:.3g} of the model's for the rest"
    return text


def _kept(plan: Plan) -> str:
    graph, reading = plan.reading.graph, plan.reading
    size = _size(plan)
    held = sorted(_kept_ids(plan), key=lambda t: (-graph.tensors[t].bytes, t))
    if not held or not plan.recomputed:
        return ""
    lines = ["Largest kept tensors:"]
    for tensor in held[:_LISTED]:
        node = graph.tensors[tensor]
        where = user_line(reading.ops[node.op])
        lines.append(f"  {size(node.bytes):>10}  {node.name}  {where}")
    return "\n".join(lines + _rest(len(held)))


def _layers(plan: Plan) -> str:
    """Bytes kept and ops recomputed by layer, for those that keep most."""
    graph = plan.reading.graph
    size = _size(plan)
    forward = graph.forward_ops
    scopes = layers_of([op.name for op in forward])
    layer = dict(zip((op.id for op in forward), scopes, strict=True))
    kept: Counter[str] = Counter()
    redone: Counter[str] = Counter()
    for tensor in _kept_ids(plan):
        node = graph.tensors[tensor]
        kept[layer[node.op]] += node.bytes
    for op in plan.schedule.recomputed:
        redone[layer[op]] += 1
    first = {scope: place for place, scope in reversed(list(enumerate(scopes)))}
    names = sorted(
        {*kept, *redone} - {""}, key=lambda n: (-kept[n], -redone[n], first[n])
    )
    if len(names) < 2 or not plan.recomputed:
        return ""
    head = "By layer:"
    width = max(len(head), 2 + min(max(map(len, names[:_LISTED])), 40))
    lines = [f"{head:{width}}  {'kept':>10}  recomputed"]
    lines.extend(
        f"{'  ' + name[:40]:{width}}  {size(kept[name]):>10}  "
        f"{counted(redone[name], 'op'):>10}"
        for name in names[:_LISTED]
    )
    return "\n".join(lines + _rest(len(names)))


def _bodies(plan: Plan) -> str:
    """What loops, branches and called functions hold, and would hold in stock."""
    size = _size(plan)
    bodies = sorted(
        (b for b in plan.bodies if b.recomputed or b.unsplit or b.every is not None),
        key=lambda body: (-body.stock_runs * body.stock_bytes, body.name),
    )
    if not bodies:
        return ""
    lines = ["Inside loops, branches and called functions:"]
    found = Counter((body.name[:40], _body(body, size)) for body in bodies)
    for (name, what), count in list(found.items())[:_LISTED]:
        lines.append(f"  {name}{f' ({count} of them)' if count > 1 else ''}: {what}")
    lines += _rest(len(found))
    if any(body.assumed for body in bodies):
        lines.append(
            "  Where nothing in the graph says how often a loop runs, "
            f"{ASSUMED_ITERATIONS} is assumed (give it `maximum_iterations`)."
        )
    if any(body.at_most and not body.assumed for body in bodies):
        lines.append("  A loop that may end early is taken to run to its end.")
    return "\n".join(lines)


def _body(body: InsidePlan, size: Callable[[int], str]) -> str:
    told = " (assumed)" if body.assumed else " at the most" if body.at_most else ""
    if body.every is not None:
        return (
            f"state held each {body.every} iterations, "
            f"{size(body.runs * body.held_bytes)} in all{told}"
        )
    held, before = body.runs * body.held_bytes, body.stock_runs * body.stock_bytes
    verb = "holds" if body.stock_runs == 1 else "hold"
    return (
        f"{counted(body.stock_runs, 'run')}{told} {verb} {size(held)} instead of "
        f"{size(before)}, {counted(len(body.recomputed), 'op')} recomputed in each"
        + _gathered(body, size)
        + (f"; state is held each iteration: {body.unsplit}" if body.unsplit else "")
    )


def _gathered(body: InsidePlan, size: Callable[[int], str]) -> str:
    if not body.gathered_bytes:
        return ""
    gathered = size(body.stock_runs * body.gathered_bytes)
    return f"; for an earlier gradient it gathers {gathered} of that all the same"


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
    held = sum(graph.tensors[t].bytes for t in copies)
    if step.copy:  # written into a dying input, it takes no room of its own
        alive = sum(graph.tensors[a.tensor].bytes for a in plan.timeline.at_peak)
        held -= alive - plan.timeline.peak_bytes
    if copies:
        first = graph.ops[graph.tensors[copies[0]].op].name
        last = graph.ops[graph.tensors[copies[-1]].op].name
        segment = (
            f"segment from {first} to {last}" if first != last else f"copy of {first}"
        )
        lines.append(f"  The {segment} holds {_size(plan)(held)} then.")
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
            f"  {counted(len(tensors), 'tensor')}, {_size(plan)(total)}, "
            f"{'such as ' if len(tensors) > 1 else ''}{example.type} {example.name}: "
            f"{pin.value}"
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
    verb = "has" if len(assumed) == 1 else "have"
    return (
        f"{counted(len(assumed), 'tensor')} {verb} unknown dimensions, taken to be "
        f"{plan.reading.unknown_dim} (set `unknown_dim=`): the figures hold for that."
    )


def _kept_ids(plan: Plan) -> list[int]:
    """The tensors of `plan.kept`: without those that may not be recomputed anyway."""
    ids = {tensor.name: tensor.id for tensor in plan.reading.graph.tensors}
    return [ids[name] for name in plan.kept]


def _size(plan: Plan) -> Callable[[int], str]:
    """One unit for the whole summary: that of the largest figure that matters."""
    return sizes_like(plan.stock_peak_bytes)


def _rest(count: int) -> list[str]:
    return [f"  ... and {count - _LISTED} more"] if count > _LISTED else []
