"""How much a graph computes, and how much of that inside of what it calls.

In bytes of all that one run makes, whether it is held or not: enough to tell which of
two bodies is the larger one, and whether bodies matter at all.
"""

from __future__ import annotations

import tensorflow as tf

from memory_saving_gradients import op_types, tf_internals_bodies
from memory_saving_gradients.stored import bytes_of
from memory_saving_gradients.trip_counts import runs_of

__all__ = ["Volumes"]


class Volumes:
    """Of graphs and of the bodies in them, each looked at once."""

    def __init__(self, unknown_dim: int) -> None:
        """
        Args:
            unknown_dim: What an unknown dimension is taken to be.
        """
        self._unknown_dim = unknown_dim
        # With the graph, so that its id stays its own.
        self._known: dict[int, tuple[tf.Graph, int, int]] = {}

    def of(self, graph: tf.Graph) -> int:
        """Bytes of all that one run of a graph computes, bodies included."""
        return sum(self.inside_and_around(graph))

    def inside_and_around(self, graph: tf.Graph) -> tuple[int, int]:
        """Bytes of what is computed inside of its bodies, and of the rest."""
        if id(graph) not in self._known:
            self._known[id(graph)] = graph, 0, 0  # against recursion
            inside = around = 0
            for op in graph.get_operations():
                if op.type in op_types.CALL_TYPES:
                    bodies = tf_internals_bodies.bodies_of(op)
                    inside += runs_of(op) * sum(map(self.of, bodies))
                elif op.type not in op_types.ALIAS_TYPES | op_types.RESTING_TYPES:
                    around += sum(bytes_of(t, self._unknown_dim) for t in op.outputs)
            self._known[id(graph)] = graph, inside, around
        return self._known[id(graph)][1:]
