"""What a Keras user can do about memory today, and the same with our library.

Every peer is a compiled Keras model with the same weights, seeds and batch, so that one
`train_on_batch` can be compared with another's: peak, time, gradients, and the state
that a step leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memory_saving_gradients as msg
from models import MODELS, Workload

__all__ = ["PEERS", "Peer", "compiled"]

LEARNING_RATE = 1e-4
Names = Callable[[keras.Model], list[str]]


@dataclass(frozen=True)
class Peer:
    """One model that trains in one way.

    Attributes:
        model: Compiled; trains with plain SGD.
        slots: Where its optimizer writes gradients, by variable, in the order of stock.
        state: Batch statistics and seeds, in the order of stock.
        batch: Inputs and labels.
    """

    model: keras.Model
    slots: tuple[tf.Variable, ...]
    state: tuple[tf.Variable, ...]
    batch: tuple[tf.Tensor, tf.Tensor]

    def step(self) -> None:
        """One training step, as `fit` makes it."""
        self.model.train_on_batch(*self.batch)

    def gradients(self) -> list[np.ndarray]:
        """The gradients of the newest step."""
        return [slot.numpy() for slot in self.slots]

    def state_values(self) -> list[np.ndarray]:
        """Batch statistics and seeds after the newest step."""
        return [variable.numpy() for variable in self.state]


def compiled(
    name: str, make: Callable[..., keras.Model], scale: float, jit: bool
) -> Peer:
    """Builds a model of `models.py` and compiles it.

    Args:
        name: Of the model.
        make: One of `PEERS`.
        scale: Of the model.
        jit: Whether XLA compiles the step.
    """
    works: list[Workload] = []

    def build() -> keras.Model:
        works.append(MODELS[name](scale))
        return works[-1].model

    model = make(build, CUTS[name])
    (work,) = works
    slots = {id(v): tf.Variable(tf.zeros_like(v)) for v in work.variables}

    class Recorder(keras.optimizers.SGD):
        """SGD that leaves the gradients where they can be read."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            plain = variable.value if isinstance(variable, keras.Variable) else variable
            slots[id(plain)].assign(tf.convert_to_tensor(gradient))
            super().update_step(gradient, variable, learning_rate)

    model.compile(Recorder(LEARNING_RATE), LOSSES[name], jit_compile=jit)
    x, *labels = work.batch
    batch = (x, labels[0] if labels else x)
    return Peer(model, tuple(slots.values()), work.state, batch)


def _mean_square(_: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(y))


_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LOSSES = {
    "mlp": _mean_square,
    "transformer": _entropy,
    "resnet50": _entropy,
    "densenet121": _entropy,
}


# ---- ways to train

Build = Callable[[], keras.Model]


def _stock(build: Build, _: Names) -> keras.Model:
    return build()


def _remat_scope(mode: str) -> Callable[[Build, Names], keras.Model]:
    def make(build: Build, _: Names) -> keras.Model:
        with keras.RematScope(mode=mode):
            return build()

    return make


class InSegments(keras.Model):
    """A functional model cut into pieces, each recomputed by `tf.recompute_grad`."""

    def __init__(self, pieces: Sequence[keras.Model]) -> None:
        super().__init__()
        self.pieces = list(pieces)

    def call(self, x: Any, training: bool = False) -> Any:
        for piece in self.pieces[:-1]:
            x = tf.recompute_grad(lambda x, piece=piece: piece(x, training=training))(x)
        return self.pieces[-1](x, training=training)


def _recompute_grad(build: Build, cuts: Names) -> keras.Model:
    model = build()
    ends = [model.get_layer(name).output for name in cuts(model)]
    starts = [model.input, *ends]
    ends.append(model.output)
    return InSegments([keras.Model(a, b) for a, b in zip(starts, ends, strict=True)])


def _ours(mode: str) -> Callable[[Build, Names], keras.Model]:
    return lambda build, _: msg.memory_saving(build(), mode)


PEERS: dict[str, Callable[[Build, Names], keras.Model]] = {
    "stock": _stock,
    "RematScope activations": _remat_scope("activations"),
    "RematScope full": _remat_scope("full"),
    "recompute_grad": _recompute_grad,
    "memory": _ours("memory"),
    "speed": _ours("speed"),
}


# ---- where blocks end


def _every(count: int, kind: str, ending: str = "") -> Names:
    """Every so many layers of a class whose name ends so."""

    def names(model: keras.Model) -> list[str]:
        found = [
            layer.name
            for layer in model.layers
            if type(layer).__name__ == kind and layer.name.endswith(ending)
        ]
        step = min(count, max(1, len(found) // 2))  # small models are cut, too
        return found[step - 1 : -1 : step]

    return names


CUTS: dict[str, Names] = {
    "mlp": _every(8, "Activation"),
    "transformer": _every(2, "Add"),
    "resnet50": _every(1, "Activation", "_out"),
    "densenet121": _every(4, "Concatenate", "_concat"),
}
"""The layers after which `recompute_grad` cuts: residual blocks, or about sqrt(n)."""


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: bench_peers.py imports it.")
