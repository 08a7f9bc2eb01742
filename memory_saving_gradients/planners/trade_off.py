"""What to keep if a byte has a price: a minimum cut.

The problem: each op that is redone costs its seconds, each tensor that is kept its
bytes. Which tensors shall be kept if one second is worth so many bytes?

The model: minimise Σ bytes of what is kept + worth · Σ seconds of what is redone, each
op at most once, such that every residual is there. It is a minimum cut of this network:

* source → *needed*(t), not to be cut, for each residual t;
* needed(t) → *redone*(the op that makes t), with the bytes of t: cut it, and t is kept;
* redone(v) → needed(u), not to be cut, for each u that v reads;
* redone(v) → sink, with worth · seconds of v: cut it, and v is redone.

What rests, is small or must be kept anyway is not in it; what may not be kept has an
edge that is not to be cut. The kept sets are nested: the more a second is worth, the
more is kept.

The sum of bytes is not the peak: what a segment holds while it is recomputed is not
counted, and a tensor that dies early counts like one that lives long. So these
selections are where planning under a budget begins (`segments`, `budget`), and nearly
where it ends as long as most is kept.

networkx finds the cut (Boykov and Kolmogorov 2004, which here does several times better
than its other algorithms).
"""

from __future__ import annotations

from functools import cached_property

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from memory_saving_gradients.planners.problem import Problem

__all__ = ["TradeOff"]

_SOURCE, _SINK = "source", "sink"


class TradeOff:
    """The minimum cuts of a planning problem.

    Attributes:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def fair_worth(self) -> float:
        """Bytes for a second: all that may be kept over all seconds it would spare."""
        problem = self.problem
        kept = sum(problem.buffers.size[t] for t in problem.candidates)
        spared = sum(problem.seconds_spared[t] for t in problem.candidates)
        return kept / spared if spared else 0.0

    def selection(self, worth: float) -> frozenset[int]:
        """What is best kept if a second is worth `worth` bytes.

        Args:
            worth: Bytes for a second of recomputation, not negative.

        Returns:
            Ids of the tensors that are kept.
        """
        problem = self.problem
        if not problem.candidates:
            return problem.everything
        network, ops = self._network, problem.buffers.graph.ops
        for redone in list(network.predecessors(_SINK)):
            # Whole bytes: the algorithm need not end with fractions.
            network[redone][_SINK]["capacity"] = round(worth * ops[redone].seconds)
        _, (wanted, _) = nx.minimum_cut(
            network, _SOURCE, _SINK, flow_func=boykov_kolmogorov
        )
        maker = problem.buffers.graph.tensors
        return problem.always_kept.union(
            tensor
            for tensor in problem.candidates
            if ("needed", tensor) in wanted and maker[tensor].op not in wanted
        )

    def ladder(self, rungs: int) -> list[frozenset[int]]:
        """Different selections from nearly nothing kept to nearly everything."""
        worths = [self.fair_worth * 2 ** ((n - 2) * 0.77) for n in range(rungs)]
        return list(dict.fromkeys(self.selection(worth) for worth in worths))

    @cached_property
    def _network(self) -> nx.DiGraph:
        """All edges, with capacities for bytes; ops are nodes by their ids."""
        problem = self.problem
        buffers = problem.buffers
        network = nx.DiGraph()
        network.add_nodes_from((_SOURCE, _SINK))
        question = {
            tensor
            for tensor in problem.useful_tensors
            if tensor not in problem.always_kept
            and tensor not in buffers.endless
            and buffers.pinned(tensor) is None
        }
        for tensor in problem.useful_tensors:
            if tensor not in question:
                continue
            op = buffers.graph.tensors[tensor].op
            free = (
                {} if tensor in problem.barred else {"capacity": buffers.size[tensor]}
            )
            network.add_edge(("needed", tensor), op, **free)
            network.add_edge(op, _SINK, capacity=0)
            if buffers.backward_readers[tensor]:
                network.add_edge(_SOURCE, ("needed", tensor))
            for source in buffers.reads[op]:
                if source in question:
                    network.add_edge(op, ("needed", source))
        return network
