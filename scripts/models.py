"""The models on which everything is measured, one small function each.

A `Workload` is all that a measurement needs: variables, the state that a step changes
besides them (batch statistics, dropout seeds), a batch, and a loss. Sizes are those of
the figures in the README; `scale` below 1 makes a small one of the same shape, for
tests. Variables are plain `tf.Variable`s, so that stock `tf.gradients` takes them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import layers

__all__ = ["MODELS", "Workload", "chain", "resnet", "transformer"]

Loss = Callable[..., tf.Tensor]


@dataclass(frozen=True)
class Workload:
    """One model, ready for a step.

    Attributes:
        name: How the tables call it.
        variables: What is differentiated.
        state: What a forward pass changes besides: batch statistics and seeds.
        batch: The arguments of `loss`, on the device.
        loss: A scalar; builds ops, so call it in a graph or in a `tf.function`.
        model: The Keras model in it, if there is one.
        variables_bytes: The size of all variables together.
    """

    name: str
    variables: tuple[tf.Variable, ...]
    state: tuple[tf.Variable, ...]
    batch: tuple[tf.Tensor, ...]
    loss: Loss
    model: keras.Model | None = None

    @property
    def variables_bytes(self) -> int:
        return sum(v.dtype.size * v.shape.num_elements() for v in self.variables)

    def values(self) -> list[np.ndarray]:
        """Copies of all variables and of the state, for `restore`."""
        return [v.numpy() for v in (*self.variables, *self.state)]

    def restore(self, values: list[np.ndarray]) -> None:
        """Puts back what `values` returned, so that a step can be repeated exactly."""
        for variable, value in zip((*self.variables, *self.state), values, strict=True):
            variable.assign(value)


def _of_keras(name: str, model: keras.Model, batch: tuple, loss: Loss) -> Workload:
    """A workload of a Keras model, its variables unwrapped."""
    return Workload(
        name,
        tuple(v.value for v in model.trainable_variables),
        tuple(v.value for v in model.non_trainable_variables),
        tuple(tf.convert_to_tensor(array) for array in batch),
        loss,
        model,
    )


def _classifier(name: str, model: keras.Model, batch: tuple) -> Workload:
    """A model that returns logits, with cross-entropy; batch = (inputs, labels)."""

    def loss(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        logits = model(x, training=True)
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(entropy)

    return _of_keras(name, model, batch, loss)


def _images(batch: int, side: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels, the same in every process."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, side, side, 3)).astype("float32")
    return images, rng.integers(0, classes, batch).astype("int32")


def _scaled(size: int, scale: float, least: int = 1) -> int:
    return max(least, round(size * scale))


def chain(length: int, scale: float = 1.0) -> Workload:
    """`length` times `tf.tanh` on a tensor of 1 MiB: one activation is the unit.

    Every tenth is in the collection "checkpoints".
    """
    x = tf.Variable(tf.random.stateless_normal([512, _scaled(512, scale)], seed=[1, 2]))

    def loss(shift: tf.Tensor) -> tf.Tensor:
        y = x + shift
        for i in range(1, length + 1):
            y = tf.tanh(y)
            if i % 10 == 0:
                tf.compat.v1.add_to_collection("checkpoints", y)
        return tf.reduce_sum(y)

    # The shift is fed, or a graph without inputs would be folded to a constant.
    return Workload(f"chain {length}", (x,), (), (tf.constant(0.0),), loss)


def mlp(scale: float = 1.0) -> Workload:
    """64 x (Dense(512, gelu), then tanh) on a batch of 2048."""
    keras.utils.set_random_seed(0)
    width, depth = _scaled(512, scale, 8), _scaled(64, scale, 2)
    inputs = y = keras.Input([width])
    for _ in range(depth):
        y = layers.Dense(width, activation="gelu")(y)
        y = layers.Activation("tanh")(y)
    model = keras.Model(inputs, y)

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True)))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((_scaled(2048, scale, 8), width)).astype("float32")
    return _of_keras("MLP", model, (x,), loss)


def _transformer_block(x: keras.KerasTensor, width: int) -> keras.KerasTensor:
    """Pre-norm attention and feed-forward, each with dropout and a skip."""
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(8, width // 8, dropout=0.1)(
        y, y, use_causal_mask=True
    )
    x = layers.Add()([x, layers.Dropout(0.1)(y)])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation="gelu")(y)
    y = layers.Dense(width)(y)
    return layers.Add()([x, layers.Dropout(0.1)(y)])


def transformer(scale: float = 1.0, depth: int | None = None) -> Workload:
    """8 layers of width 256 with 8 heads and dropout, on 32 sequences of 128.

    Args:
        scale: Of all sizes.
        depth: So many layers instead of the scaled 8.
    """
    keras.utils.set_random_seed(0)
    width, length, words = 8 * _scaled(32, scale), _scaled(128, scale, 8), 1000
    inputs = keras.Input([length], dtype="int32")
    x = layers.Embedding(words, width)(inputs)
    for _ in range(depth or _scaled(8, scale)):
        x = _transformer_block(x, width)
    model = keras.Model(inputs, layers.Dense(words)(layers.LayerNormalization()(x)))
    rng = np.random.default_rng(0)
    text = rng.integers(0, words, (_scaled(32, scale), length + 1)).astype("int32")
    return _classifier("transformer", model, (text[:, :-1], text[:, 1:]))


def _convolution(x: keras.KerasTensor, filters: int, **kwargs) -> keras.KerasTensor:
    return layers.Conv2D(filters, 3, padding="same", use_bias=False, **kwargs)(x)


def _normed(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Activation("relu")(layers.BatchNormalization()(x))


def _residual_block(x: keras.KerasTensor, filters: int, strides: int):
    """Pre-activation basic block (He et al. 2016, 1603.05027)."""
    y = _normed(x)
    if x.shape[-1] != filters:
        x = layers.Conv2D(filters, 1, strides=strides, use_bias=False)(y)
    y = _convolution(y, filters, strides=strides)
    return layers.Add()([x, _convolution(_normed(y), filters)])


def resnet(blocks: int, batch: int) -> Workload:
    """Pre-activation CIFAR ResNet with batch norm, of 6 x `blocks` + 2 layers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input([32, 32, 3])
    x = _convolution(inputs, 16)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(blocks):
            x = _residual_block(x, filters, 2 if stage and not block else 1)
    x = layers.GlobalAveragePooling2D()(_normed(x))
    model = keras.Model(inputs, layers.Dense(10)(x))
    return _classifier(f"ResNet-{6 * blocks + 2}", model, _images(batch, 32, 10))


def resnet62(scale: float = 1.0) -> Workload:
    """The CIFAR ResNet of 62 layers, on a batch of 64."""
    return resnet(_scaled(10, scale), _scaled(64, scale))


def _double(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    return _normed(_convolution(_normed(_convolution(x, filters)), filters))


def unet(scale: float = 1.0) -> Workload:
    """U-Net of depth 4 with 16 to 256 filters on 16 images of 96 x 96."""
    keras.utils.set_random_seed(0)
    side = 16 * _scaled(6, scale)
    inputs = x = keras.Input([side, side, 3])
    skips = []
    for filters in (16, 32, 64, 128):
        skips.append(_double(x, filters))
        x = layers.MaxPooling2D()(skips[-1])
    x = _double(x, 256)
    for filters in (128, 64, 32, 16):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = _double(layers.Concatenate()([skips.pop(), x]), filters)
    model = keras.Model(inputs, layers.Conv2D(2, 1)(x))
    images, _ = _images(_scaled(16, scale), side, 2)
    labels = (images[..., 0] > 0).astype("int32")
    return _classifier("U-Net", model, (images, labels))


def _application(name: str, build: Callable[..., keras.Model], scale: float):
    """A network of `keras.applications` on 16 images of 96 x 96."""
    keras.utils.set_random_seed(0)
    side = 32 * _scaled(3, scale)
    model = build(
        weights=None,
        input_shape=(side, side, 3),
        classes=10,
        classifier_activation=None,
    )
    return _classifier(name, model, _images(_scaled(16, scale), side, 10))


def densenet121(scale: float = 1.0) -> Workload:
    """DenseNet121: no single-tensor bottleneck inside a dense block."""
    return _application("DenseNet121", keras.applications.DenseNet121, scale)


def resnet50(scale: float = 1.0) -> Workload:
    """ResNet50: 90 MiB of its peak are the gradients of its weights."""
    return _application("ResNet50", keras.applications.ResNet50, scale)


MODELS: dict[str, Callable[..., Workload]] = {
    "mlp": mlp,
    "transformer": transformer,
    "resnet62": resnet62,
    "unet": unet,
    "densenet121": densenet121,
    "resnet50": resnet50,
}


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: the benchmarks import it.")
