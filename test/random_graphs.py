"""Random training graphs: what no autodiff would make but is legal all the same."""

from __future__ import annotations

import random
from typing import Any

from hand_graphs import Builder, questionable
from hypothesis import strategies as st

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import Pin, Storage, TrainingGraph

_SIZES = (0, 1, 1, 1, 2, 2, 3, 5, 8)
_DEVICES = ("/gpu:0", "/gpu:1", "")


def random_graph(rng: random.Random, most_ops: int = 12) -> TrainingGraph:
    """A legal training graph with a bit of everything.

    Args:
        rng: Where choices come from.
        most_ops: The most forward ops beside the first source, and about half the
            most backward ops.
    """
    b = Builder()
    b.source(rng.choice(_SIZES))
    several_devices = rng.random() < 0.3
    # One huge tensor makes the rest "small": always kept.
    huge = rng.random() < 0.1
    for _ in range(rng.randint(1, most_ops)):
        _random_forward_op(b, rng, several_devices, huge)
    b.forward_count = len(b.ops)
    target = _own_or_last(b)
    size = b.tensors[target].bytes
    b.add((), (size,), control_inputs=(b.tensors[target].op,), name="seed")
    count = rng.randint(1, most_ops * 2)
    for index in range(count):
        _random_backward_op(b, rng, several_devices, 1 - (index + 1) / count)
    late = [t.id for t in b.tensors if t.op >= b.forward_count]
    results = sorted(rng.sample(late, rng.randint(1, min(3, len(late)))))
    return b.finish((target,), results)


def _own_or_last(b: Builder) -> int:
    own = [t.id for t in b.tensors if t.storage is Storage.OWN]
    return own[-1] if own else len(b.tensors) - 1


def _attributes(
    b: Builder, rng: random.Random, several_devices: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {"seconds": rng.choice((0.25, 1.0, 2.0, 4.0))}
    if several_devices:
        found["device"] = rng.choice(_DEVICES)
    if rng.random() < 0.4:
        found["in_place"] = True
    if rng.random() < 0.1:
        found["control_inputs"] = (rng.randrange(len(b.ops)),)
    return found


def _recent(rng: random.Random, count: int) -> int:
    """A number below `count`, mostly one of the last four."""
    return rng.randrange(max(count - 4, 0) if rng.random() < 0.7 else 0, count)


def _random_forward_op(
    b: Builder, rng: random.Random, several_devices: bool, huge: bool
) -> None:
    count = len(b.tensors)
    inputs = [_recent(rng, count) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    attributes = _attributes(b, rng, several_devices)
    kind = rng.random()
    if kind < 0.08:
        b.source(rng.choice(_SIZES))
    elif kind < 0.16:
        b.alias(*inputs, **attributes)
    elif kind < 0.2:
        sizes = [b.tensors[t].bytes for t in inputs]
        b.add(inputs, sizes, Storage.ALIAS, inputs, type="IdentityN", **attributes)
    elif kind < 0.24:
        b.add(inputs, (0,), metadata_only=True, pin=Pin.METADATA, **attributes)
    elif kind < 0.26:
        b.add(inputs, (), pin=Pin.STATEFUL, type="NoOp", **attributes)
    else:
        sizes = [rng.choice(_SIZES) for _ in range(rng.choice((1, 1, 1, 1, 2, 3)))]
        if huge and rng.random() < 0.3:
            sizes[0] = 40_000
        attributes["heavy"] = rng.random() < 0.2
        if rng.random() < 0.12:
            attributes["pin"] = rng.choice((Pin.STATEFUL, Pin.CONTROL_FLOW, Pin.CALL))
            attributes["free_order"] = attributes["pin"] is not Pin.CONTROL_FLOW
        b.add(inputs, sizes, **attributes)


def _random_backward_op(
    b: Builder, rng: random.Random, several_devices: bool, depth: float
) -> None:
    """`depth` falls from 1 to 0: which part of the forward pass is read."""
    assert b.forward_count is not None
    forward = [t.id for t in b.tensors if t.op < b.forward_count]
    late = len(b.tensors) - len(forward)
    inputs = [len(forward) + _recent(rng, late)] if rng.random() < 0.9 else []
    for _ in range(rng.choice((0, 1, 1, 2))):
        place = int(depth * (len(forward) - 1)) + rng.choice((-2, -1, 0, 0, 1))
        inputs.append(forward[min(max(place, 0), len(forward) - 1)])
    if rng.random() < 0.2:
        inputs.append(len(forward) + _recent(rng, late))
    rng.shuffle(inputs)
    attributes = _attributes(b, rng, several_devices)
    kind = rng.random()
    if inputs and kind < 0.1:
        b.alias(*inputs, **attributes)
    elif kind < 0.18:
        b.add(inputs, (rng.choice(_SIZES),), metadata_only=True, **attributes)
    else:
        sizes = [rng.choice(_SIZES) for _ in range(rng.choice((1, 1, 1, 2)))]
        attributes["free_order"] = rng.random() > 0.05
        b.add(inputs, sizes, **attributes)


def training_graphs(most_ops: int = 12) -> st.SearchStrategy[TrainingGraph]:
    """Random legal training graphs; failures shrink to few forward ops."""
    return st.builds(
        lambda seed, ops: random_graph(random.Random(seed), ops),
        st.integers(0, 2**32 - 1),
        st.integers(1, most_ops),
    )


def random_selection(buffers: Buffers, rng: random.Random) -> frozenset[int]:
    """Any kept set, by a coin of its own bias."""
    bias = rng.random()
    return frozenset(t for t in questionable(buffers) if rng.random() < bias)
