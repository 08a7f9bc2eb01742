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

from collections.abc import Callable, Iterable, Sequence, Set

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from memory_saving_gradients.buffers import Buffers

__all__ = ["Cheapest"]

_SOURCE, _SINK = "source", "sink"

Node = str | int | tuple[str, int]
"""An end, an op's id, or a tensor that may be needed."""


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
        return self._in(self._cut(self._network, price))

    def held_at_each(
        self, prices: Sequence[Callable[[int], int | None]]
    ) -> list[frozenset[int]]:
        """The same for rising prices, none of which falls for any op.

        What is needed and redone only falls as prices rise. So the middle price is
        asked first. What it redoes is redone at the lower ones, too, and what it does
        not is not at the higher ones: each half is asked on its own part of the
        network, and the parts of all get no larger together.
        """
        sides: list[Set[Node]] = [set()] * len(prices)
        pending: list[tuple[int, int, nx.DiGraph, Set[Node]]] = [
            (0, len(prices), self._network, frozenset())
        ]
        while pending:
            first, stop, network, settled = pending.pop()
            if first == stop:
                continue
            middle = (first + stop) // 2
            side = self._cut(network, prices[middle])
            sides[middle] = settled | side
            lower = _merged(network, side - {_SOURCE}, _SOURCE)
            higher = _merged(network, set(network) - side - {_SINK}, _SINK)
            pending.append((first, middle, lower, sides[middle]))
            pending.append((middle + 1, stop, higher, settled))
        return [self._in(side) for side in sides]

    def _cut(
        self, network: nx.DiGraph, price: Callable[[int], int | None]
    ) -> Set[Node]:
        """What is on the side of the source of a minimum cut."""
        for op in list(network.predecessors(_SINK)):
            if isinstance(op, int):
                network[op][_SINK].clear()
                network[op][_SINK].update(_capacity(price(op)))
        _, (side, _) = nx.minimum_cut(
            network, _SOURCE, _SINK, flow_func=boykov_kolmogorov
        )
        found: Set[Node] = side
        return found

    def _in(self, side: Set[Node]) -> frozenset[int]:
        """The tensors that are needed and not made again."""
        maker = self._buffers.graph.tensors
        return frozenset(
            tensor
            for tensor in self._tensors
            if ("needed", tensor) in side and maker[tensor].op not in side
        )


def _merged(network: nx.DiGraph, nodes: Set[Node], into: str) -> nx.DiGraph:
    """The network with some nodes merged into its source or its sink."""
    found = nx.DiGraph()
    found.add_nodes_from((_SOURCE, _SINK))
    for tail, head, capacity in network.edges(data="capacity"):
        tail = into if tail in nodes else tail
        head = into if head in nodes else head
        if tail in (head, _SINK) or head == _SOURCE:
            continue
        others = found.get_edge_data(tail, head)
        if others is not None:  # No end of both is without a capacity.
            capacity += others["capacity"]
        found.add_edge(tail, head, **_capacity(capacity))
    return found


def _capacity(price: int | None) -> dict[str, int]:
    return {} if price is None else {"capacity": price}
