"""The cheapest tensors to hold, as a minimum cut.

The problem: each tensor that is held costs something, each op that is redone, too. What
is the cheapest way to have every residual in the backward pass, each op redone at most
once?

The model is a network that is cut:

* source → *needed*(t), not to be cut, for each residual t;
* needed(t) → *redone*(the op that makes t), with the price of t: cut it, and t is held;
* redone(v) → needed(u), not to be cut, for each u in question that v reads;
* redone(v) → sink, with the price of v: cut it, and v is redone.

Prices are whole numbers, lest sums of fractions leave something to flow; None stands
for what must not be.

networkx finds the cut (Boykov and Kolmogorov 2004, which here does several times better
than its other algorithms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from memory_saving_gradients.buffers import Buffers

__all__ = ["Cheapest"]

_SOURCE, _SINK = "source", "sink"


class Cheapest:
    """The network of a graph, to be cut for one set of prices of ops after another."""

    def __init__(
        self,
        buffers: Buffers,
        tensors: Iterable[int],
        price: Callable[[int], int | None],
    ) -> None:
        """
        Args:
            buffers: The buffer view of the graph.
            tensors: Ids of the forward-made tensors in question; all others are there.
            price: What it costs to hold one of them; None if it must not be held.
        """
        self._buffers = buffers
        self._tensors = list(dict.fromkeys(tensors))
        question = set(self._tensors)
        self._network = network = nx.DiGraph()
        network.add_nodes_from((_SOURCE, _SINK))
        for tensor in self._tensors:
            op = buffers.graph.tensors[tensor].op
            network.add_edge(("needed", tensor), op, **_capacity(price(tensor)))
            network.add_edge(op, _SINK, capacity=0)
            if buffers.backward_readers[tensor]:
                network.add_edge(_SOURCE, ("needed", tensor))
            for source in buffers.reads[op]:
                if source in question:
                    network.add_edge(op, ("needed", source))

    def held(self, price: Callable[[int], int | None]) -> frozenset[int]:
        """The ids of the tensors in question that are cheapest held.

        Args:
            price: What it costs to redo an op, by its id; None if it must not be.
        """
        network, maker = self._network, self._buffers.graph.tensors
        for op in list(network.predecessors(_SINK)):
            network[op][_SINK].clear()
            network[op][_SINK].update(_capacity(price(op)))
        _, (needed, _) = nx.minimum_cut(
            network, _SOURCE, _SINK, flow_func=boykov_kolmogorov
        )
        return frozenset(
            tensor
            for tensor in self._tensors
            if ("needed", tensor) in needed and maker[tensor].op not in needed
        )


def _capacity(price: int | None) -> dict[str, int]:
    return {} if price is None else {"capacity": price}
