"""Published training graphs as plain data, so that planners can be compared on them.

The graphs are those of Kusumoto et al. 2019 (arXiv 1905.11722): VGG19, ResNet50,
ResNet152, DenseNet161, GoogLeNet, U-Net and PSPNet as Chainer ran them, one text file
each, from the public repository https://github.com/pfnet-research/recompute. Say where
you put them.

A file is:

    <tensors> <functions>
    <tensor id> <bytes> <name>                 one line a tensor
    forward                                    then a block for each function:
    <inputs> <outputs>
    <tensor id> <tag>                          one line an input
    <tensor id>                                one line an output
    <type>
    <options as JSON>

A name with a slash is a parameter's; `_` names what a function makes, any other word an
input of the network. Half of the blocks begin with `backward` instead and repeat what
the forward blocks' options say: `_input_indexes_to_retain` and
`_output_indexes_to_retain` are the inputs and outputs that the function's backward pass
reads. They are read over.

What becomes of it (`training_graph`): each function is a forward op and has a backward
op, which reads what is retained and the gradients of its outputs, and makes the
gradients of its inputs. Where several functions read a tensor, its gradients are added
up in place. Functions run one after the other by rank and backwards, as in Chainer.

Parameters and inputs rest; everything else counts, gradients of activations included,
and nothing but those sums is computed in place. Gradients of parameters are left out,
as in the paper, and nobody holds the loss: its four bytes would decide wherever a
budget and the peak of a plan are equal but for them. So VGG19, untouched, peaks at
2132.3 MB (of 10^6 bytes; 2515 with the gradients of its parameters held to the end).

Costs are the paper's: a convolution 10, everything else 1, the transposed convolutions
of U-Net included, as seconds of the op. A backward op costs twice that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memory_saving_gradients.buffers import Buffers
from memory_saving_gradients.graph import (
    OpNode,
    Pin,
    Storage,
    TensorNode,
    TrainingGraph,
)
from memory_saving_gradients.graph import check as check_graph
from memory_saving_gradients.order import backward_order
from memory_saving_gradients.planners import Problem

__all__ = [
    "CONVOLUTION_SECONDS",
    "OTHER_SECONDS",
    "Function",
    "Published",
    "parse",
    "paths_in",
    "problem_of",
    "training_graph",
]

CONVOLUTION_SECONDS = 10.0
OTHER_SECONDS = 1.0
BACKWARD_FACTOR = 2.0


@dataclass(frozen=True)
class Function:
    """One function of a published graph.

    Attributes:
        type: Chainer's name of it.
        inputs: Ids of the tensors it reads.
        outputs: Ids of the tensors it makes.
        retained: Those of both that its backward pass reads.
        rank: Its depth.
    """

    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    retained: tuple[int, ...]
    rank: int

    @property
    def seconds(self) -> float:
        """The paper's cost."""
        heavy = self.type.startswith("Convolution")
        return CONVOLUTION_SECONDS if heavy else OTHER_SECONDS


@dataclass(frozen=True)
class Published:
    """A published graph.

    Attributes:
        name: The file's name without its ending.
        sizes: Bytes of each tensor.
        names: Name of each tensor.
        functions: The functions, each after those whose outputs it reads.
    """

    name: str
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    functions: tuple[Function, ...]

    @property
    def forward_seconds(self) -> float:
        """The cost of the forward pass: what extra work is a part of."""
        return sum(function.seconds for function in self.functions)


def parse(path: Path) -> Published:
    """Reads a file of the format in the module's docstring.

    Raises:
        ValueError: The file is of another format; which line says otherwise is told.
    """
    lines = path.read_text("utf-8").splitlines()
    number = 0

    def line() -> str:
        nonlocal number
        number += 1
        if number > len(lines):
            raise ValueError("the file ends here")
        return lines[number - 1]

    try:
        tensor_count, function_count = map(int, line().split())
        entries = [line().split() for _ in range(tensor_count)]
        sizes = {int(entry[0]): int(entry[1]) for entry in entries}
        names = {int(entry[0]): entry[2] for entry in entries}
        if sorted(sizes) != list(range(tensor_count)):
            raise ValueError("tensor ids are not 0, 1, 2 ...")
        functions = []
        for _ in range(function_count):
            direction = line()
            if direction not in ("forward", "backward"):
                raise ValueError(f"a function is {direction!r}")
            function = _function(line)
            if direction == "forward":
                functions.append(function)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"{path}, line {number}: expected a published graph (see --help), but "
            f"{error}"
        ) from error
    order = range(tensor_count)
    return Published(
        path.stem,
        tuple(sizes[tensor] for tensor in order),
        tuple(names[tensor] for tensor in order),
        tuple(_sorted(functions)),
    )


def _function(line: Callable[[], str]) -> Function:
    """The block of a function, from its second line on."""
    input_count, output_count = map(int, line().split())
    inputs = tuple(int(line().split()[0]) for _ in range(input_count))
    outputs = tuple(int(line()) for _ in range(output_count))
    kind = line()
    options = json.loads(line())
    retained = [inputs[i] for i in options["_input_indexes_to_retain"] or ()]
    retained += [outputs[i] for i in options["_output_indexes_to_retain"] or ()]
    return Function(
        kind, inputs, outputs, tuple(dict.fromkeys(retained)), options["rank"]
    )


def _sorted(functions: Iterable[Function]) -> list[Function]:
    """By rank, then by the ids of what they make: each after what it reads."""
    return sorted(functions, key=lambda function: (function.rank, function.outputs))


def training_graph(published: Published) -> TrainingGraph:
    """The library's plain data (see the module's docstring)."""
    return _Translation(published).graph


def problem_of(graph: TrainingGraph) -> Problem:
    """What planners are given, the backward pass in the order to be enforced."""
    return Problem(Buffers(graph, backward_order(graph)))


def paths_in(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The files of the graphs in a folder, or of those that are named.

    Raises:
        ValueError: There are none, or not those.
    """
    paths = {path.stem: path for path in sorted(folder.glob("*.txt"))}
    if not paths:
        raise ValueError(
            f"{folder} holds no file *.txt: pass the folder into which you copied the "
            "graphs of https://github.com/pfnet-research/recompute"
        )
    unknown = [name for name in names if name not in paths]
    if unknown:
        raise ValueError(
            f"{folder} has no graph {', '.join(unknown)}. Take {', '.join(paths)}"
        )
    return [paths[name] for name in names or paths]


class _Translation:
    """A published graph on its way: ops and tensors are numbered as they come."""

    def __init__(self, published: Published) -> None:
        self._ops: list[OpNode] = []
        self._tensors: list[TensorNode] = []
        self._published = published
        self._number: dict[int, int] = {}
        made = {t for function in published.functions for t in function.outputs}
        for tensor, name in enumerate(published.names):
            if tensor not in made:
                self._rest(tensor, name)
        for index, function in enumerate(published.functions):
            self._forward(index, function)
        count = len(self._ops)
        read = {t for function in published.functions for t in function.inputs}
        targets = [t for t in sorted(made) if t not in read]
        self._arriving: dict[int, list[int]] = {}
        for target in targets:
            size = published.sizes[target]
            seed = self._add("Seed", (), (size,), f"seed{target}", 0.0)
            self._arriving[target] = list(seed)
        for index in reversed(range(len(published.functions))):
            self._backward(index, published.functions[index], made)
        self.graph = TrainingGraph(tuple(self._ops), tuple(self._tensors), count)
        check_graph(self.graph)

    def _add(
        self,
        kind: str,
        inputs: Sequence[int],
        sizes: Sequence[int],
        name: str,
        seconds: float,
        storage: Storage = Storage.OWN,
        in_place: bool = False,
        heavy: bool = False,
    ) -> tuple[int, ...]:
        first, op = len(self._tensors), len(self._ops)
        outputs = tuple(range(first, first + len(sizes)))
        self._tensors.extend(
            TensorNode(t, f"{name}:{index}", op, size, storage)
            for index, (t, size) in enumerate(zip(outputs, sizes, strict=True))
        )
        resting = storage is Storage.RESTING
        self._ops.append(
            OpNode(
                op,
                name,
                kind,
                tuple(inputs),
                outputs,
                # One after the other, once there is something to run.
                (op - 1,) if op and not resting else (),
                seconds,
                heavy=heavy,
                pin=Pin.PLACEHOLDER if resting else None,
                in_place=in_place,
            )
        )
        return outputs

    def _rest(self, tensor: int, name: str) -> None:
        size = self._published.sizes[tensor]
        (self._number[tensor],) = self._add(
            "Rest", (), (size,), name.strip("/"), 0.0, storage=Storage.RESTING
        )

    def _forward(self, index: int, function: Function) -> None:
        sizes = [self._published.sizes[t] for t in function.outputs]
        inputs = [self._number[t] for t in function.inputs]
        made = self._add(
            function.type,
            inputs,
            sizes,
            f"{function.type}{index}",
            function.seconds,
            heavy=function.seconds > OTHER_SECONDS,
        )
        self._number.update(zip(function.outputs, made, strict=True))

    def _backward(self, index: int, function: Function, made: set[int]) -> None:
        gradients = [
            self._summed(self._arriving[t])
            for t in function.outputs
            if t in self._arriving
        ]
        wanted = [t for t in dict.fromkeys(function.inputs) if t in made]
        if not gradients:
            return
        new = self._add(
            f"{function.type}Grad",
            (*gradients, *(self._number[t] for t in function.retained)),
            # Where only what rests has a gradient, that is nothing, but is made.
            [self._published.sizes[t] for t in wanted] or (0,),
            f"gradient/{function.type}{index}",
            BACKWARD_FACTOR * function.seconds,
        )
        for tensor, gradient in zip(wanted, new, strict=False):
            self._arriving.setdefault(tensor, []).append(gradient)

    def _summed(self, gradients: list[int]) -> int:
        """The sum of a tensor's gradients, added one to the other."""
        total = gradients[0]
        for other in gradients[1:]:
            size = self._tensors[total].bytes
            name = f"gradient/Sum{len(self._ops)}"
            (total,) = self._add(
                "Sum", (total, other), (size,), name, OTHER_SECONDS, in_place=True
            )
        return total


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
