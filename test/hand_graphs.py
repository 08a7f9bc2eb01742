"""Training graphs made by hand and at random, without TensorFlow.

A `Builder` collects forward ops, each with the tensors that its backward op will want
(`saves`), and `differentiate` adds the backward pass as autodiff would: one backward op
for each forward op, in reverse, and a sum where gradients meet. Sizes are in *units* (a
tensor of one byte), seconds are multiples of a quarter, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import (
    OpNode,
    Pin,
    Storage,
    TensorNode,
    TrainingGraph,
    check,
)
from memory_saving_gradients.order import backward_order


class Builder:
    """A training graph under construction; tensors are their ids."""

    def __init__(self) -> None:
        self.ops: list[OpNode] = []
        self.tensors: list[TensorNode] = []
        self.saves: dict[int, tuple[int, ...]] = {}
        self.forward_count: int | None = None

    def add(
        self,
        inputs: Sequence[int] = (),
        sizes: Sequence[int] = (1,),
        storage: Storage = Storage.OWN,
        sources: Sequence[int] = (),
        **attributes: Any,
    ) -> list[int]:
        """Adds an op with one output for each of `sizes`; returns the outputs."""
        number = len(self.ops)
        first = len(self.tensors)
        outputs = list(range(first, first + len(sizes)))
        name = attributes.pop("name", f"op{number}")
        for index, (output, size) in enumerate(zip(outputs, sizes, strict=True)):
            source = sources[index] if storage is Storage.ALIAS else None
            self.tensors.append(
                TensorNode(output, f"{name}:{index}", number, size, storage, source)
            )
        attributes.setdefault("type", "Op")
        attributes.setdefault("seconds", 1.0)
        self.ops.append(
            OpNode(
                number, name, inputs=tuple(inputs), outputs=tuple(outputs), **attributes
            )
        )
        return outputs

    def source(self, size: int = 1) -> int:
        """A placeholder or variable: at rest, pinned."""
        return self.add((), (size,), Storage.RESTING, pin=Pin.PLACEHOLDER, seconds=0.0)[
            0
        ]

    def unary(self, tensor: int, size: int = 1, **attributes: Any) -> int:
        """`y = f(x)` whose gradient reads y: `Tanh`, `Relu`."""
        attributes.setdefault("in_place", True)
        result = self.add((tensor,), (size,), **attributes)[0]
        self.saves[self.tensors[result].op] = (result,)
        return result

    def dense(self, tensor: int, weights: int, size: int = 1, **attributes: Any) -> int:
        """`y = x · w` whose gradients read x and w: `MatMul`, `Conv2D`."""
        attributes.setdefault("heavy", True)
        attributes.setdefault("seconds", 4.0)
        result = self.add((tensor, weights), (size,), **attributes)[0]
        self.saves[self.tensors[result].op] = (tensor, weights)
        return result

    def join(self, *tensors: int, size: int = 1, **attributes: Any) -> int:
        """A sum or a concatenation: its gradient reads no forward tensor."""
        return self.add(tensors, (size,), **attributes)[0]

    def alias(self, tensor: int, *others: int, **attributes: Any) -> int:
        """`Reshape`, `Identity`: the buffer of the input."""
        size = self.tensors[tensor].bytes
        attributes.setdefault("seconds", 0.0)
        return self.add(
            (tensor, *others), (size,), Storage.ALIAS, (tensor,), **attributes
        )[0]

    def batch_norm(self, tensor: int, size: int = 1, **attributes: Any) -> int:
        """Three outputs, of which the gradient reads the two small ones."""
        outputs = self.add((tensor,), (size, 0, 0), **attributes)
        self.saves[self.tensors[outputs[0]].op] = (tensor, *outputs[1:])
        return outputs[0]

    def differentiate(self, target: int, xs: Sequence[int]) -> TrainingGraph:
        """Adds the backward pass of `target` and returns the finished graph.

        The backward op of a forward op reads the gradient of its first output and
        what the op saves, and makes the gradients of all inputs that lead to `xs`.
        """
        self.forward_count = len(self.ops)
        size = self.tensors[target].bytes
        last = (self.tensors[target].op,)
        seed = self.add((), (size,), control_inputs=last, name="seed")[0]
        reached = self._reached(xs)
        arriving: dict[int, list[int]] = {target: [seed]}
        for op in reversed(self.ops[: self.forward_count]):
            wanted = [t for t in dict.fromkeys(op.inputs) if t in reached]
            if not op.outputs or op.outputs[0] not in arriving or not wanted:
                continue
            gradient = self._summed(arriving[op.outputs[0]])
            if self.tensors[op.outputs[0]].storage is Storage.ALIAS:
                arriving.setdefault(wanted[0], []).append(self.alias(gradient))
                continue
            made = self._gradients(op, gradient, wanted)
            for tensor, part in zip(wanted, made, strict=True):
                arriving.setdefault(tensor, []).append(part)
        results = [self._summed(arriving[x]) for x in xs if x in arriving]
        return self.finish((target,), results)

    def _gradients(self, op: OpNode, gradient: int, wanted: list[int]) -> list[int]:
        sizes = [self.tensors[t].bytes for t in wanted]
        if op.type == "BiasAdd":
            # The input's gradient is the output's; the bias sums it up.
            bias = self.add((gradient,), sizes[-1:], type="BiasAddGrad")
            return [gradient, *bias][-len(wanted) :]
        if op.type == "Conv2D":
            reads = ((*op.inputs, gradient), (*op.inputs[::-1], gradient))
            kinds = ("Conv2DBackpropInput", "Conv2DBackpropFilter")
            return [
                self.add(reads[which], (size,), type=kinds[which])[0]
                for tensor, size in zip(wanted, sizes, strict=True)
                for which in (op.inputs.index(tensor),)
            ]
        return self.add(
            (gradient, *self.saves.get(op.id, ())),
            sizes,
            in_place=op.in_place,
            seconds=op.seconds,
            device=op.device,
            name=f"{op.name}_grad",
        )

    def _reached(self, xs: Sequence[int]) -> set[int]:
        found = set(xs)
        for op in self.ops[: self.forward_count]:
            if found.intersection(op.inputs):
                found.update(op.outputs)
        return found

    def _summed(self, parts: list[int]) -> int:
        if len(parts) > 1:
            size = self.tensors[parts[0]].bytes
            parts[:] = self.add(tuple(parts), (size,), in_place=True, type="AddN")
        return parts[0]

    def finish(
        self, targets: Sequence[int] = (), results: Sequence[int] = ()
    ) -> TrainingGraph:
        """The graph so far, checked."""
        count = len(self.ops) if self.forward_count is None else self.forward_count
        graph = TrainingGraph(
            tuple(self.ops), tuple(self.tensors), count, tuple(targets), tuple(results)
        )
        check(graph)
        return graph


# -- by hand ---------------------------------------------------------------------------


def chain(sizes: int | Sequence[int], *, in_place: bool = True) -> TrainingGraph:
    """n element-wise ops in a row; the gradient of each reads its output.

    ::

        x ── t1 ── t2 ── … ── tn            x: at rest
             │     │          │
        g0 ─ g1 ── g2 ── … ── gn ── seed    g0: the result
    """
    units = [1] * sizes if isinstance(sizes, int) else list(sizes)
    b = Builder()
    x = last = b.source(units[0])
    for size in units:
        last = b.unary(last, size, in_place=in_place)
    return b.differentiate(last, [x])


def chain_with_aliases(n: int) -> TrainingGraph:
    """A chain in which a `Reshape` stands after every op; every second reads a shape.

    ::

        x ── t1 ══ r1 ── t2 ══ r2 ── …      ══: the same buffer
                   /
               shape
    """
    b = Builder()
    x = last = b.source()
    shape = b.add((x,), (0,), metadata_only=True, pin=Pin.METADATA)[0]
    for index in range(n):
        last = b.unary(last)
        last = b.alias(last, *([shape] if index % 2 else []))
    return b.differentiate(last, [x])


def residual_blocks(n: int, weights_size: int = 2) -> TrainingGraph:
    """Blocks of norm, relu, dense, with a skip around each; gradients of the weights
    take n times `weights_size` in the end.

    ::

        ──┬── norm ── relu ── dense ── + ──┬── …
          └────────────────────────────┘   └──
    """
    b = Builder()
    last = b.source()
    xs = []
    for _ in range(n):
        weights = b.source(weights_size)
        xs.append(weights)
        inner = b.unary(b.batch_norm(last))
        last = b.join(last, b.dense(inner, weights), in_place=True)
    return b.differentiate(b.unary(last), xs)


def unet(depth: int) -> TrainingGraph:
    r"""Down and up again, with a skip connection on every level: no bottlenecks.

    ::

        d0 ───────────────── u0      2^depth units
          \                 /
           d1 ─────────── u1
             \           /
              d2 ───── u2            1 unit
    """
    b = Builder()
    last = b.source(2**depth)
    xs, skips = [], []
    for level in range(depth, -1, -1):
        xs.append(b.source(1))
        last = b.unary(b.dense(last, xs[-1], 2**level), 2**level)
        skips.append(last)
    for level, skip in enumerate(reversed(skips)):
        xs.append(b.source(1))
        joined = b.join(last, skip, size=2 ** (level + 1))
        last = b.unary(b.dense(joined, xs[-1], 2**level), 2**level)
    return b.differentiate(last, xs)


def two_towers(first: int, second: int) -> TrainingGraph:
    r"""Two chains on two devices that meet in one sum.

    ::

        x ── a1 ── … ── an ──\
                              + ── loss
        y ── b1 ── … ── bm ──/
    """
    b = Builder()
    xs, ends = [], []
    for device, length in (("/gpu:0", first), ("/gpu:1", second)):
        xs.append(b.source())
        last = xs[-1]
        for _ in range(length):
            last = b.unary(last, device=device)
        ends.append(last)
    return b.differentiate(b.join(*ends, device="/gpu:0"), xs)


def normalised_chain(n: int) -> TrainingGraph:
    """Dense layers, each with a norm of three outputs, two of them small.

    ::

        ── dense ── norm ── dense ── norm ── …
                    ├ mean
                    └ variance
    """
    b = Builder()
    last = b.source(2)
    xs = []
    for _ in range(n):
        xs.append(b.source(3))
        last = b.unary(b.batch_norm(b.dense(last, xs[-1], 2), 2), 2)
    return b.differentiate(last, xs)


def shared_weights(n: int) -> TrainingGraph:
    """A recurrent cell unrolled: every dense layer reads the same weights.

    ::

              ┌────── w ──────┐
        x ── dense ── tanh ── dense ── tanh ── …
    """
    b = Builder()
    last = b.source()
    weights = b.source(2)
    for _ in range(n):
        last = b.unary(b.dense(last, weights))
    return b.differentiate(last, [weights])


def pinned_chain(n: int) -> TrainingGraph:
    """A chain in which every third op (dropout's mask, say) may not be run again.

    ::

        x ── t1 ── t2 ── [t3] ── t4 ── t5 ── [t6] ── …
    """
    b = Builder()
    x = last = b.source()
    for index in range(n):
        last = b.unary(last, pin=Pin.STATEFUL if index % 3 == 2 else None)
    return b.differentiate(last, [x])


def convolutions(n: int) -> TrainingGraph:
    """Convolution, bias and relu; a bias's gradient may be merged with its filter's.

    ::

        ── Conv2D ── BiasAdd ── relu ── …
            filter    bias
    """
    b = Builder()
    last = b.source(3)
    xs = []
    for _ in range(n):
        filters, bias = b.source(2), b.source(1)
        xs += [filters, bias]
        product = b.dense(last, filters, 3, type="Conv2D")
        last = b.unary(b.join(product, bias, size=3, type="BiasAdd"), 3)
    return b.differentiate(last, xs)


ZOO: dict[str, Callable[[], TrainingGraph]] = {
    "chain": lambda: chain(12),
    "uneven chain": lambda: chain([5, 1, 4, 2, 7, 1, 3, 6]),
    "chain, nothing in place": lambda: chain(9, in_place=False),
    "chain with aliases": lambda: chain_with_aliases(8),
    "residual blocks": lambda: residual_blocks(4),
    "convolutions": lambda: convolutions(4),
    "U-Net": lambda: unet(3),
    "two towers": lambda: two_towers(5, 7),
    "normalised chain": lambda: normalised_chain(4),
    "shared weights": lambda: shared_weights(5),
    "pinned chain": lambda: pinned_chain(11),
}
"""Named graphs, for tests that hold on any."""


# -- views -----------------------------------------------------------------------------


def seeds_of(graph: TrainingGraph) -> frozenset[int]:
    """The ops from which backpropagation starts."""
    return frozenset(op.id for op in graph.backward_ops if op.name == "seed")


def view(graph: TrainingGraph) -> Buffers:
    """The buffer view, with the backward ops in the order that will be enforced."""
    return Buffers(graph, backward_order(graph, seeds_of(graph)))


def questionable(buffers: Buffers) -> list[int]:
    """Tensors that a planner may keep or not."""
    return [
        t
        for op in buffers.forward
        for t in buffers.makes[op]
        if t not in buffers.endless
    ]


def without_results(graph: TrainingGraph) -> TrainingGraph:
    """The same graph for a caller who consumes each gradient at once."""
    return replace(graph, results=())
