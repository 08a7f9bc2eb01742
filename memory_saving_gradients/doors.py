"""The two doors of TensorFlow that everything which differentiates a graph passes.

Tapes pass one, `tf.gradients` and TensorFlow 1's optimizers the other. While somebody
needs it, each has one wrapper of ours, which decides for each call:

* Of the settings that hold in this thread the innermost counts: an argument
  `checkpoints=` stands inside the setting of a model. Where there is none, that of the
  process counts (`patching`).
* Without a setting, eagerly, for targets outside the default graph and for the bodies
  of functions, loops and branches the call goes on to stock.
* A call inside a call (autodiff re-enters itself for composite tensors, and custom
  gradients may hold tapes) goes on to stock: nothing is rewired twice.

The wrapper of `tf.gradients` has one more duty, and stays for it as long as a rewired
graph lives: stock's second order, too, must find the edges as autodiff made them.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from memory_saving_gradients import (
    bodies,
    counting,
    remembered,
    tf_internals,
    tf_internals_bodies,
    tf_internals_loops,
)
from memory_saving_gradients.autodiff import (
    Outcome,
    Setting,
    as_autodiff_made_it,
    as_list,
    save_memory,
)
from memory_saving_gradients.body_rules import STOCK
from memory_saving_gradients.errors import CheckpointError
from memory_saving_gradients.rehearsal import rehearsed
from memory_saving_gradients.selection import plain_variable

__all__ = [
    "Door",
    "busy",
    "handle",
    "hold_open",
    "set_process_wide",
    "use",
]


TAPE = "tf.GradientTape"
GRAPH = "tf.gradients"
"""The routes, as counts call them."""

EAGER = "taken eagerly, where there is no graph to rewrite"
ELSEWHERE = "the targets stand outside the graph that is being built"
BODY = "the body of a function, loop or branch is differentiated by the op outside"

_lock = threading.RLock()
_holders = 0
_rewired: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
_process_wide: Setting | None = None


class _Here(threading.local):
    """What holds in this thread.

    Attributes:
        settings: Those in force, the innermost last; None means stock.
        busy: How many handled calls are under way.
    """

    def __init__(self) -> None:
        self.settings: list[Setting | None] = []
        self.busy = 0


_here = _Here()


# -- settings --------------------------------------------------------------------------


@contextmanager
def use(setting: Setting | None) -> Iterator[None]:
    """Lets a setting hold in this thread, and for this thread alone; None is stock."""
    with hold_open(), bodies.within(_inside(setting)):
        _here.settings.append(setting)
        try:
            yield
        finally:
            _here.settings.pop()


@contextmanager
def use_inside(setting: Setting | None) -> Iterator[None]:
    """Lets a setting hold in this thread, but for the bodies of called functions only.

    Under some tapes it is decided when a function is called what its gradient reads.
    """
    with hold_open(), bodies.within(_inside(setting)):
        yield


def set_process_wide(setting: Setting | None) -> None:
    """Sets what holds wherever no setting of a thread does.

    The caller holds the doors open.
    """
    global _process_wide
    _process_wide = setting


@contextmanager
def hold_open() -> Iterator[None]:
    """Keeps the wrappers where they are."""
    (door := Door()).open()
    try:
        yield
    finally:
        door.close()


@contextmanager
def busy() -> Iterator[None]:
    """While a gradient is taken: calls inside it go on to stock, bodies come to us."""
    _here.busy += 1
    try:
        with hold_open():
            yield
    finally:
        _here.busy -= 1


class Door:
    """One reason to keep the wrappers in place."""

    def __init__(self) -> None:
        self._is_open = False

    def open(self) -> None:
        """Puts the wrappers in place, if they are not."""
        global _holders
        with _lock:
            if not self._is_open:
                self._is_open = True
                _holders += 1
            tf_internals.TAPES.wrap(_through_tapes)
            tf_internals.GRAPHS.wrap(_through_graphs)
            tf_internals_bodies.DELAYED_PAIRS.wrap(_delayed_pairs)
            tf_internals_bodies.TAPE_PAIRS.wrap(_tape_pairs)
            tf_internals_loops.LOOP_GRADIENTS.wrap(_through_loops)

    def close(self) -> None:
        """Takes them away, if nobody else needs them."""
        global _holders
        with _lock:
            if self._is_open:
                self._is_open = False
                _holders -= 1
            if _holders == 0:
                tf_internals.TAPES.unwrap()
                tf_internals_loops.LOOP_GRADIENTS.unwrap()
                if not _rewired:
                    tf_internals.GRAPHS.unwrap()
                if not remembered.is_anything_remembered():
                    tf_internals_bodies.DELAYED_PAIRS.unwrap()
                    tf_internals_bodies.TAPE_PAIRS.unwrap()


def _inside(setting: Setting | None, graph: tf.Graph | None = None) -> bodies.Within:
    """What holds for the bodies in a graph."""
    saves = setting is not None and setting.rule != STOCK
    return bodies.Within(setting if saves else None, graph)


# -- behind the doors ------------------------------------------------------------------


def handle(
    setting: Setting,
    targets: Sequence[Any],
    given: Any,
    differentiate: Callable[[Any], Sequence[Any]],
    route: str,
    sources: Sequence[Any] = (),
    stops: Sequence[Any] = (),
) -> Outcome:
    """Has stock differentiate in less memory; see `autodiff.save_memory`.

    Args:
        setting: How.
        targets: What is differentiated.
        given: The gradients that the targets receive, None for ones.
        differentiate: The stock call, given the seeds.
        route: What the caller is called in counts.
        sources: With respect to what is differentiated.
        stops: Through what nothing is differentiated.
    """
    graph = tf.compat.v1.get_default_graph()
    with busy():
        setting = rehearsed(setting, targets, sources, stops, tape=route == TAPE)
        with bodies.within(_inside(setting, graph)) as inside:
            outcome = save_memory(
                setting,
                targets,
                given,
                differentiate,
                all_or_none=route == TAPE,
                bodies=inside.plans,
            )
    if outcome.plan is None:
        return outcome
    with _lock:
        if outcome.rewiring is not None:
            _rewired.add(tf.compat.v1.get_default_graph())
            tf_internals.GRAPHS.wrap(_through_graphs)
    if outcome.rewiring is not None or outcome.plan.bodies:
        counting.rewired(route)
    else:
        counting.left_alone(outcome.plan.reason)
    if setting.done is not None:
        setting.done(outcome)
    return outcome


def _through_tapes(
    before: Callable[..., Any],
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    sources_raw: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The wrapper of `imperative_grad`."""
    if sources_raw is not None:
        # Zeros for what is unconnected have the dtype of the source: stock fails on
        # the names of dtypes that Keras 3 variables have.
        sources_raw = [plain_variable(source) for source in sources_raw]

    def stock(seeds: Any) -> Any:
        return before(tape, target, sources, seeds, sources_raw, *args, **kwargs)

    targets = as_list(target)
    setting = _setting_for(targets)
    if setting is None:
        return stock(output_gradients)
    given = output_gradients
    return _handle_or_stock(setting, targets, given, stock, TAPE, sources)


def _through_graphs(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The wrapper of `_GradientsHelper`."""
    arguments = tf_internals.gradients_arguments(*args, **kwargs)
    ys, body = arguments["ys"], arguments.get("src_graph")
    graph = tf.compat.v1.get_default_graph() if body is None else body

    def stock(seeds: Any) -> Any:
        with as_autodiff_made_it(graph, ys):
            return before(**{**arguments, "grad_ys": seeds})

    targets = as_list(ys)
    if body is not None and body is not tf.compat.v1.get_default_graph():
        given = arguments.get("grad_ys")
        xs = as_list(arguments["xs"])
        return bodies.differentiate_body(_process_wide, body, xs, given, stock)
    setting = _setting_for(targets)
    if setting is None:
        return stock(arguments.get("grad_ys"))
    given, xs = arguments.get("grad_ys"), as_list(arguments["xs"])
    stops = as_list(arguments.get("stop_gradients") or [])
    return _handle_or_stock(setting, targets, given, stock, GRAPH, xs, stops)


def _through_loops(before: Callable[..., Any], op: Any, *given: Any) -> Any:
    """The wrapper of the registered gradient of a loop."""
    op, results = bodies.before_gradient_of_loop(_process_wide, op, given)
    return before(op, *results)


def _delayed_pairs(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The wrapper of what looks up a called function's forward and backward pass."""
    return remembered.pair_of_this_setting(_process_wide, before, *args, **kwargs)


def _tape_pairs(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same for what is called while a tape watches."""
    return remembered.tape_pairs_of_this_setting(_process_wide, before, *args, **kwargs)


def _setting_for(targets: Sequence[Any]) -> Setting | None:
    """What holds for a call with these targets; None for stock."""
    setting = _here.settings[-1] if _here.settings else _process_wide
    if setting is None or _here.busy:
        return None
    if tf.executing_eagerly():
        counting.left_alone(EAGER)
        return None
    graph = tf.compat.v1.get_default_graph()
    if not any(getattr(target, "graph", None) is graph for target in targets):
        counting.left_alone(ELSEWHERE)
        return None
    return setting


def _handle_or_stock(
    setting: Setting,
    targets: Sequence[Any],
    given: Any,
    stock: Callable[[Any], Any],
    route: str,
    sources: Sequence[Any],
    stops: Sequence[Any] = (),
) -> Any:
    """Handles a call; what the process-wide setting cannot serve stays stock.

    Libraries take gradients that their user does not see, in graphs that a collection
    or a list of names has nothing to do with. So there this is no error.
    """
    asked = targets, given
    if _here.settings:
        outcome = handle(setting, *asked, stock, route, sources, stops)
        return outcome.gradients
    done: list[Any] = []

    def differentiate(seeds: Any) -> Any:
        done[:] = [stock(seeds)]
        return done[0]

    try:
        outcome = handle(setting, *asked, differentiate, route, sources, stops)
        return outcome.gradients
    except CheckpointError as error:
        reason = str(error)
        if counting.left_alone(reason):
            warnings.warn(
                f"`memory_saving_gradients.enable`: a gradient stays stock. {reason}",
                stacklevel=2,
            )
        return done[0] if done else stock(given)
