"""Comparing rewired gradients with stock's, the same way in every test.

A `Work` is a model as a function of weights and inputs. It is differentiated by
`tf.gradients` and by `memory_saving_gradients.gradients` along one of three *routes*: a
v1 graph in a session, a `tf.function`, and one with `jit_compile=True`. The first two
must give equal bits, with Grappler's meta-optimizer off (it fuses a little
differently once the backward pass reads other tensors). XLA always fuses: there the
tolerance is relative to a variable's largest entry, or stock's own spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import memory_saving_gradients as msg

__all__ = [
    "EXACT_ROUTES",
    "ROUTES",
    "Work",
    "assert_close",
    "assert_same_bits",
    "check",
    "copies_in",
    "fixed",
    "gradients_of_both",
    "run",
    "session",
]

v1 = tf.compat.v1

EXACT_ROUTES = ("session", "function")
ROUTES = (*EXACT_ROUTES, "jitted")

Gradients = Callable[..., list[Any]]


@dataclass(frozen=True)
class Work:
    """A model.

    Attributes:
        forward: From (weights, inputs) to `ys`; may fill the collection "checkpoints".
        weights: Initial values of the variables that are differentiated.
        inputs: What is fed.
        keywords: Passed on to both `gradients`.
    """

    forward: Callable[[list[Any], list[tf.Tensor]], Any]
    weights: Sequence[np.ndarray]
    inputs: Sequence[np.ndarray] = ()
    keywords: dict[str, Any] = field(default_factory=dict)


def fixed(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Numbers around 0 that are the same in every run."""
    draw = np.random.default_rng((seed, *shape)).standard_normal
    if np.issubdtype(dtype, np.complexfloating):
        return (draw(shape) + 1j * draw(shape)).astype(dtype)
    return draw(shape).astype(dtype)


# -- running ---------------------------------------------------------------------------


def session(graph: tf.Graph | None = None) -> v1.Session:
    """A session without the meta-optimizer."""
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return v1.Session(graph=graph, config=config)


def run(fetches: Any, feeds: dict[Any, Any] | None = None, steps: int = 1) -> Any:
    """Runs the default graph from freshly initialised variables; the last results."""
    with session(v1.get_default_graph()) as running:
        running.run(v1.global_variables_initializer())
        for _ in range(steps):
            results = running.run(fetches, feeds)
    return results


def _in_session(work: Work, differentiate: Gradients) -> list[Any]:
    with tf.Graph().as_default():
        weights = [
            v1.get_variable(f"w{i}", initializer=w, use_resource=True)
            for i, w in enumerate(work.weights)
        ]
        inputs = [v1.placeholder(x.dtype, x.shape) for x in work.inputs]
        ys = work.forward(weights, inputs)
        gradients = differentiate(ys, weights, **work.keywords)
        present = [g for g in gradients if g is not None]
        found = iter(run(present, dict(zip(inputs, work.inputs, strict=True))))
        return [None if g is None else next(found) for g in gradients]


def _in_function(
    work: Work, differentiate: Gradients, jit: bool
) -> Callable[[], list[Any]]:
    weights = [tf.Variable(w) for w in work.weights]

    @tf.function(jit_compile=jit, autograph=False)
    def step(*inputs: tf.Tensor) -> list[Any]:
        ys = work.forward(weights, list(inputs))
        return differentiate(ys, weights, **work.keywords)

    return lambda: step(*map(tf.constant, work.inputs))


def gradients_of_both(
    work: Work, route: str, checkpoints: Any = "memory"
) -> tuple[list[Any], list[Any], list[Any]]:
    """Gradients by stock, by stock run once more, and by the library."""

    def rewired(*args: Any, **keywords: Any) -> list[Any]:
        return msg.gradients(*args, checkpoints=checkpoints, **keywords)

    if route == "session":
        stock = _in_session(work, tf.gradients)
        return stock, stock, _in_session(work, rewired)
    jit = route == "jitted"
    step = _in_function(work, tf.gradients, jit)
    stock = step()
    again = step() if jit else stock  # what is compiled once more is the same program
    return stock, again, _in_function(work, rewired, jit)()


def check(
    work: Work, route: str, checkpoints: Any = "memory", recomputes: bool = True
) -> msg.Plan:
    """Asserts that the library's gradients are stock's.

    Args:
        work: The model.
        route: One of `ROUTES`.
        checkpoints: As in `gradients`.
        recomputes: Whether the test would be pointless if nothing were recomputed.

    Returns:
        The plan.
    """
    stock, again, new = gradients_of_both(work, route, checkpoints)
    plan = msg.last_plan()
    assert plan is not None
    if recomputes:
        assert plan.recomputed, plan.summary()
    if route == "jitted":
        assert_close(stock, again, new)
    else:
        assert_same_bits(stock, new)
    return plan


def copies_in(graph: tf.Graph) -> list[str]:
    """The names of the originals of all copies in a graph."""
    names = (op.name.split("recompute/", 1) for op in graph.get_operations())
    found = (parts[1] for parts in names if len(parts) == 2 and not parts[0])
    return [name for name in found if not name.startswith(("seed", "verify", "wait"))]


# -- comparing -------------------------------------------------------------------------


def assert_same_bits(stock: Sequence[Any], new: Sequence[Any]) -> None:
    """Same structure, same None, same sparseness, same dtype, same bits."""
    for index, (one, other) in enumerate(_pairs(stock, new)):
        assert one.tobytes() == other.tobytes(), (
            f"part {index}: off by up to {_distance(one, other)}, largest entry "
            f"{_largest(one)}"
        )


def assert_close(
    stock: Sequence[Any], again: Sequence[Any], new: Sequence[Any]
) -> None:
    """Same structure and |new - stock| within rounding.

    That is 1e-4 of the largest entry of a part plus 1e-7 of the largest of all, or four
    times what two runs of stock differ by.
    """
    pairs = list(_pairs(stock, new))
    largest = max((_largest(one) for one, _ in pairs), default=0.0)
    spreads = [_distance(one, other) for one, other in _pairs(stock, again)]
    for index, ((one, other), spread) in enumerate(zip(pairs, spreads, strict=True)):
        allowed = max(1e-4 * _largest(one) + 1e-7 * largest, 4 * spread)
        assert _distance(one, other) <= allowed, (
            f"part {index}: off by up to {_distance(one, other)}, allowed {allowed}"
        )


def _pairs(
    stock: Sequence[Any], new: Sequence[Any]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The dense parts of both sides, after all that is not a number was compared."""
    assert type(stock) is type(new)
    assert len(stock) == len(new)
    found = []
    for one, other in zip(stock, new, strict=True):
        ours, theirs = _parts(one), _parts(other)
        assert len(ours) == len(theirs), f"{one} is not of the kind of {other}"
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
        found.extend(zip(ours, theirs, strict=True))
    return found


def _parts(gradient: Any) -> list[np.ndarray]:
    if gradient is None:
        return []
    if hasattr(gradient, "indices"):  # sessions return a class of their own
        shape = gradient.dense_shape
        shape = [] if shape is None else [np.asarray(shape)]
        return [np.asarray(gradient.values), np.asarray(gradient.indices), *shape]
    return [np.asarray(gradient)]


def _largest(array: np.ndarray) -> float:
    return float(np.abs(_wide(array)).max(initial=0.0))


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(_wide(one) - _wide(other)).max(initial=0.0))


def _wide(array: np.ndarray) -> np.ndarray:
    kind = np.complex128 if np.iscomplexobj(array) else np.float64
    return array.astype(kind)
