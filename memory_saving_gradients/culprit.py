"""What fills the stock peak where recomputation cannot help: one thing, by name.

A plan that saves nothing is no fault of the plan if the peak consists of gradients that
the caller wants, of what may not be recomputed, or of what a single op needs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import tensorflow as tf

from memory_saving_gradients.graph import Storage, variables_read
from memory_saving_gradients.plan import Plan
from memory_saving_gradients.user_code import user_line

__all__ = ["filler", "resting"]

_MANY = 3
"""From so many terms on, another way to add them up can hold less."""

_DOMINANT = 0.5
"""From this share of the peak on, something dominates it."""

Sizes = Callable[[int], str]


def filler(plan: Plan, size: Sizes) -> str:
    """What more than half of the stock peak consists of, if one thing, or ""."""
    graph = plan.reading.graph
    least = _DOMINANT * plan.stock_peak_bytes
    peak = size(plan.stock_peak_bytes)
    results = {graph.root(tensor) for tensor in graph.results}
    gradients = _at_peak(plan, results)
    if gradients > least:
        return (
            f"Gradients that the caller gets are {size(gradients)} of the peak of "
            f"{peak}: recomputation cannot shrink them.{_largest_gradient(plan, size)}"
        )
    fixed = {
        tensor.id
        for tensor in graph.tensors
        if tensor.op < graph.forward_count and graph.ops[tensor.op].pin is not None
    }
    held = _at_peak(plan, fixed)
    if held > least:
        return (
            f"Results of ops that may not be run twice are {size(held)} of the peak of "
            f"{peak}.{_largest_pinned(plan, fixed, size)}"
        )
    if partial := _partial_gradients(plan, size):
        return partial
    step = plan.stock.peak_step
    if step >= 0:
        op = graph.ops[plan.stock.steps[step].op]
        around = {graph.root(tensor) for tensor in (*op.inputs, *op.outputs)}
        # A kernel that writes into a dying input needs that one only once.
        spared = _at_peak(plan, None) - plan.stock_peak_bytes
        working = _at_peak(plan, around) - spared
        if working > least:
            where = user_line(plan.reading.ops[op.id])
            return (
                f"What the op {op.name} ({op.type}, {where}) reads and writes is "
                f"{size(working)} of the peak of {peak}: all of it must be there while "
                "it runs."
            )
    return ""


def resting(plan: Plan, size: Sizes, least_share: float) -> str:
    """That weights or inputs take more than `least_share` times the peak, or ""."""
    variables, inputs = variables_read(plan.reading.graph), 0
    for op in plan.reading.graph.forward_ops:
        if op.type.startswith("Placeholder") and op.outputs:
            tensor = plan.reading.graph.tensors[op.outputs[0]]
            if tensor.storage is Storage.RESTING and not _is_handle(plan, tensor.id):
                inputs += tensor.bytes
    weights = sum(
        plan.reading.graph.tensors[reads[0]].bytes for reads in variables.values()
    )
    if weights + inputs <= least_share * plan.stock_peak_bytes:
        return ""
    parts = [
        f"{what} take {size(count)}"
        for what, count in (("Variables", weights), ("inputs", inputs))
        if count
    ]
    text = " and ".join(parts)
    return (
        f"{text[0].upper()}{text[1:]}, all the time. Activations and gradients, of "
        f"which recomputation can save, are {size(plan.stock_peak_bytes)} at the peak."
    )


def _at_peak(plan: Plan, chosen: Set[int] | None) -> int:
    """Bytes at the stock peak, of all tensors or of the chosen ones."""
    tensors = plan.reading.graph.tensors
    return sum(
        tensors[alive.tensor].bytes
        for alive in plan.stock.at_peak
        if chosen is None or alive.tensor in chosen
    )


def _largest_gradient(plan: Plan, size: Sizes) -> str:
    """A sentence that names what the largest gradient is the gradient of."""
    graph = plan.reading.graph
    largest = max(graph.results, key=lambda t: (graph.tensors[graph.root(t)].bytes, -t))
    node = graph.tensors[graph.root(largest)]
    variable = _variable_of(plan, largest)
    what = f"that of {variable}" if variable else node.name
    return f" The largest is {what}: {size(node.bytes)}."


def _largest_pinned(plan: Plan, fixed: Set[int], size: Sizes) -> str:
    """A sentence that names the largest of them and says why it is one."""
    graph = plan.reading.graph
    node = next(
        graph.tensors[alive.tensor]
        for alive in plan.stock.at_peak  # largest first
        if alive.tensor in fixed
    )
    op = graph.ops[node.op]
    reason = op.pin.value if op.pin else ""
    where = user_line(plan.reading.ops[op.id])
    return (
        f" The largest is that of {op.type} {op.name} ({where}), {size(node.bytes)}: "
        f"{reason}."
    )


def _partial_gradients(plan: Plan, size: Sizes) -> str:
    """That one sum holds the gradients of all uses of something shared, or ""."""
    graph = plan.reading.graph
    for op in graph.backward_ops:
        parts = {graph.root(t) for t in op.inputs}
        held = sum(graph.tensors[t].bytes for t in parts)
        # Two terms are added as they come, whatever the method.
        if len(parts) < _MANY or op.type != "AddN":
            continue
        if held > _DOMINANT * plan.stock_peak_bytes:
            return (
                f"The sum {op.name} (AddN) waits for {len(parts)} gradients of one "
                "thing that is used in many places (a shared weight?), and holds "
                f"{size(held)} until the last is there. `aggregation_method="
                "tf.AggregationMethod.EXPERIMENTAL_TREE` adds them as they come."
            )
    return ""


def _is_handle(plan: Plan, tensor: int) -> bool:
    return bool(plan.reading.tensors[tensor].dtype == tf.resource)


def _variable_of(plan: Plan, result: int) -> str:
    """The name of the variable that a gradient belongs to, or "" if that is unclear.

    A variable of the same shape, read by an op that shares another input with the op
    that makes the gradient: the product `x @ w` reads x, and so does w's gradient.
    """
    graph, reading = plan.reading.graph, plan.reading
    maker = graph.ops[graph.tensors[graph.root(result)].op]
    read = {graph.root(tensor) for tensor in maker.inputs}
    shape = (
        reading.tensors[result].shape.as_list()
        if reading.tensors[result].shape.rank is not None
        else None
    )
    alike: list[int] = []
    for handle, reads in variables_read(graph).items():
        static = reading.tensors[reads[0]].shape
        if static.rank is None or static.as_list() != shape:
            continue
        alike.append(handle)
        for value in reads:
            for reader in graph.consumers[value]:
                others = {graph.root(t) for t in graph.ops[reader].inputs} - {value}
                if reader < graph.forward_count and others & read:
                    return _variable_name(plan, handle)
    return _variable_name(plan, alike[0]) if len(alike) == 1 else ""


def _variable_name(plan: Plan, handle: int) -> str:
    """The variable's name; in a `tf.function` its handle is a nameless capture."""
    tensor = plan.reading.tensors[handle]
    outer = {id(inner): given for given, inner in getattr(tensor.graph, "captures", ())}
    try:
        variables = tuple(getattr(tensor.graph, "variables", ()))
    except AssertionError:  # the function outlived one of them
        variables = ()
    for variable in variables:
        if getattr(variable, "handle", None) is outer.get(id(tensor), tensor):
            return str(variable.name)
    if id(tensor) not in outer:
        return str(tensor.op.name)
    (reader, *_) = plan.reading.graph.consumers[handle]
    return f"what {plan.reading.ops[reader].name} reads"
