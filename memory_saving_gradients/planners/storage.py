"""The least bytes that serve a backward pass if some ops are not run twice.

In a loop what is held is held once an iteration, so that the order in which it dies
does not matter: only how much it is. This is a minimum cut. There is a node *needed(t)*
for each tensor and *redone(v)* for each op:

    source     -> needed(t)   infinite, for each residual t
    needed(t)  -> redone(v)   bytes of t, if v makes t: cut, t is held
    redone(v)  -> needed(u)   infinite, for each u that v reads
    redone(v)  -> sink        infinite if v may not be redone, else seconds of v

The seconds, which are far less than one byte each, only break ties.

Found by networkx in time polynomial in the size of the graph: for bodies of loops,
which are small.
"""

from __future__ import annotations

from collections.abc import Set

import networkx as nx

from memory_saving_gradients.buffers import Buffers

__all__ = ["least_held"]


def least_held(buffers: Buffers, unrepeatable: Set[int]) -> frozenset[int]:
    """The tensors to hold so that none of some ops is redone.

    Args:
        buffers: The buffer view of the graph.
        unrepeatable: Ids of ops not to be redone, besides those that are pinned.
    """
    network = nx.DiGraph()
    ops = buffers.graph.ops
    network.add_nodes_from(("source", "sink"))
    for tensor in buffers.residuals:
        network.add_edge("source", ("needed", tensor))
    for op in buffers.forward:
        for tensor in buffers.makes[op]:
            network.add_edge(
                ("needed", tensor), ("redone", op), capacity=buffers.size[tensor]
            )
        for tensor in buffers.reads[op]:
            network.add_edge(("redone", op), ("needed", tensor))
        if ops[op].pin is not None or op in unrepeatable:
            network.add_edge(("redone", op), "sink")
        else:
            network.add_edge(("redone", op), "sink", capacity=ops[op].seconds)
    needed, _ = nx.minimum_cut(network, "source", "sink")[1]
    return frozenset(
        tensor
        for op in buffers.forward
        for tensor in buffers.makes[op]
        if ("needed", tensor) in needed and ("redone", op) not in needed
    )
