"""Small made-up graphs in the form of published ones, for the exact planner."""

from __future__ import annotations

import random

from published_graphs import Function, Published

__all__ = ["chain", "random_dag"]

MB = 10**6

_SIZES = (1, 1, 1, 2, 2, 3, 4, 6, 8)
_TYPES = ("ReLU", "ReLU", "BatchNormalization", "Convolution2DFunction", "Add")


def chain(length: int) -> Published:
    """Element-wise functions in a row, each of 1 MB and of cost 1, whose gradients read
    their outputs; the last one is the loss and takes next to nothing."""
    functions = [
        Function("Tanh", (t,), (t + 1,), (t + 1,), rank=t) for t in range(length)
    ]
    loss = Function("Loss", (length,), (length + 1,), (), rank=length)
    sizes = (MB,) * (length + 1) + (4,)
    names = ("0", *("_" for _ in sizes[1:]))
    return Published(f"chain of {length}", sizes, names, (*functions, loss))


def random_dag(seed: int, length: int) -> Published:
    """Functions that each read one to three of the tensors before, mostly recent ones,
    and a loss of what nobody else reads.

    Half of the gradients read the function's output, as activations' do, most others
    its inputs, as convolutions' do, and sums' nothing.
    """
    rng = random.Random(seed)
    sizes = [rng.choice(_SIZES) * MB]
    functions: list[Function] = []
    for output in range(1, length + 1):
        recent = range(max(output - 4, 0), output)
        inputs = {output - 1 if rng.random() < 0.7 else rng.choice(recent)}
        if rng.random() < 0.35:
            inputs.add(rng.randrange(output))
        if rng.random() < 0.1:
            inputs.add(rng.choice(recent))
        read = tuple(sorted(inputs))
        kind = rng.choice(_TYPES) if len(read) == 1 else "Add"
        retained = {"ReLU": (output,), "Add": ()}.get(kind, read)
        functions.append(Function(kind, read, (output,), retained, rank=output))
        sizes.append(rng.choice(_SIZES) * MB)
    read_by_some = {t for function in functions for t in function.inputs}
    ends = tuple(t for t in range(1, length + 1) if t not in read_by_some)
    functions.append(Function("Loss", ends, (length + 1,), ends, rank=length + 1))
    names = ("0", *("_" for _ in range(length + 1)))
    return Published(f"random {seed}", (*sizes, 4), names, tuple(functions))


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the scripts import it.")
