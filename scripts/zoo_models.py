"""The architectures of `zoo.py`: those of keras.applications, and some by hand.

A `Specimen` is one of them, ready for a step: it is handed a class of tapes and takes
its gradients with it. Sizes are such that a step takes seconds on two cores and that
most activations are counted by the allocator (it leaves out those under 256 KiB).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

__all__ = ["Specimen", "architectures"]

WORDS = 512
CLASSES = 10
LARGER = {"InceptionV3": 128, "InceptionResNetV2": 128, "Xception": 96}
"""Sides of the images for networks that shrink 64 x 64 to nothing."""
BATCHES = dict.fromkeys(LARGER, 8)
"""Sizes of the batches where not 16, nor that of a ConvNeXt: it is slow on a CPU."""

Gradients = Callable[..., Sequence[Any]]
Logits = Callable[[tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class Specimen:
    """One architecture with its weights and a batch.

    Attributes:
        variables: What is differentiated.
        state: What a forward pass changes besides: batch statistics and seeds.
        batch: The arguments of `gradients` after the first.
        gradients: From a class of tapes and the batch to a gradient for each variable.
    """

    variables: tuple[tf.Variable, ...]
    state: tuple[tf.Variable, ...]
    batch: tuple[tf.Tensor, ...]
    gradients: Gradients


def _specimen(
    networks: Sequence[keras.Model], batch: Sequence[Any], gradients: Gradients
) -> Specimen:
    """A specimen with the variables of Keras models, unwrapped."""
    return Specimen(
        tuple(v.value for model in networks for v in model.trainable_variables),
        tuple(v.value for model in networks for v in model.non_trainable_variables),
        tuple(tf.convert_to_tensor(array) for array in batch),
        gradients,
    )


def _entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(entropy)


def _classifier(
    model: keras.Model, batch: Sequence[Any], logits: Callable[..., Any] | None = None
) -> Specimen:
    """A model with cross-entropy; the last of the batch are the labels."""
    logits = logits or partial(model, training=True)

    def gradients(tape_class: Any, *batch: tf.Tensor) -> Sequence[Any]:
        *inputs, labels = batch
        with tape_class() as tape:
            found = logits(inputs if len(inputs) > 1 else inputs[0])
            loss = _entropy(found, labels)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return _specimen([model], batch, gradients)


def _images(count: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels, the same in every process."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((count, *shape)).astype("float32")
    return images, rng.integers(0, CLASSES, count).astype("int32")


def _text(count: int, length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, WORDS, (count, length)).astype("int32")


# ---- keras.applications


def _application(build: Callable[..., keras.Model], side: int, batch: int) -> Specimen:
    model = build(
        weights=None,
        input_shape=(side, side, 3),
        classes=CLASSES,
        classifier_activation=None,
    )
    return _classifier(model, _images(batch, side, side, 3))


# ---- transformers


class Positions(layers.Layer):
    """Adds a learned vector to each place of a sequence."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x: Any) -> Any:
        return x + self.table


def _attend(x: Any, context: Any = None, causal: bool = False) -> Any:
    """Pre-norm attention with dropout and a skip, to itself without a context."""
    width = x.shape[-1]
    y = layers.LayerNormalization()(x)
    context = y if context is None else context
    attention = layers.MultiHeadAttention(4, width // 4, dropout=0.1)
    y = attention(y, context, use_causal_mask=causal)
    return layers.Add()([x, layers.Dropout(0.1)(y)])


def _feed_forward(x: Any) -> Any:
    width = x.shape[-1]
    y = layers.LayerNormalization()(x)
    y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    return layers.Add()([x, layers.Dropout(0.1)(y)])


def gpt(batch: int = 16) -> Specimen:
    """A decoder of 6 layers with causal attention, dropout and tied embeddings."""
    length, width = 64, 128
    tokens = keras.Input([length], dtype="int32")
    embedding = layers.Embedding(WORDS, width)
    x = layers.Dropout(0.1)(Positions()(embedding(tokens)))
    for _ in range(6):
        x = _feed_forward(_attend(x, causal=True))
    model = keras.Model(tokens, layers.LayerNormalization()(x))

    def logits(tokens: tf.Tensor) -> tf.Tensor:
        table = embedding.embeddings.value
        return tf.matmul(model(tokens, training=True), table, transpose_b=True)

    text = _text(batch, length + 1)
    return _classifier(model, (text[:, :-1], text[:, 1:]), logits)


def translator(batch: int = 16) -> Specimen:
    """An encoder and a decoder of 3 layers each, with cross attention and dropout."""
    length, width = 64, 128
    source, target = (keras.Input([length], dtype="int32") for _ in range(2))
    x = Positions()(layers.Embedding(WORDS, width)(source))
    for _ in range(3):
        x = _feed_forward(_attend(x))
    context = layers.LayerNormalization()(x)
    y = Positions()(layers.Embedding(WORDS, width)(target))
    for _ in range(3):
        y = _feed_forward(_attend(_attend(y, causal=True), context))
    y = layers.Dense(WORDS)(layers.LayerNormalization()(y))
    text = _text(batch, length + 1)
    batches = (_text(batch, length, seed=1), text[:, :-1], text[:, 1:])
    return _classifier(keras.Model([source, target], y), batches)


def vit(batch: int = 16) -> Specimen:
    """A vision transformer of 6 layers on 8 x 8 patches of 8 x 8 pixels."""
    width = 128
    images = keras.Input([64, 64, 3])
    x = layers.Conv2D(width, 8, strides=8)(images)
    x = layers.Dropout(0.1)(Positions()(layers.Reshape([64, width])(x)))
    for _ in range(6):
        x = _feed_forward(_attend(x))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    model = keras.Model(images, layers.Dense(CLASSES)(x))
    return _classifier(model, _images(batch, 64, 64, 3))


# ---- U-Nets


def _unet(rank: int, side: int, filters: Sequence[int], batch: int) -> Specimen:
    """A U-Net on squares or cubes, two classes for each point."""
    convolution = layers.Conv2D if rank == 2 else layers.Conv3D
    back = layers.Conv2DTranspose if rank == 2 else layers.Conv3DTranspose
    pooling = layers.MaxPooling2D if rank == 2 else layers.MaxPooling3D

    def double(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = convolution(filters, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return x

    inputs = x = keras.Input([side] * rank + [1])
    skips = []
    for count in filters[:-1]:
        skips.append(double(x, count))
        x = pooling()(skips[-1])
    x = double(x, filters[-1])
    for count in filters[-2::-1]:
        x = back(count, 2, strides=2)(x)
        x = double(layers.Concatenate()([skips.pop(), x]), count)
    model = keras.Model(inputs, convolution(2, 1)(x))
    images, _ = _images(batch, *[side] * rank, 1)
    return _classifier(model, (images, (images[..., 0] > 0).astype("int32")))


def unet(batch: int = 8) -> Specimen:
    """A U-Net of depth 4 on images of 96 x 96."""
    return _unet(2, 96, (16, 32, 64, 128, 256), batch)


def unet3d(batch: int = 2) -> Specimen:
    """A U-Net of depth 2 on volumes of 32 x 32 x 32."""
    return _unet(3, 32, (8, 16, 32), batch)


# ---- other ways to train


def gan(batch: int = 32) -> Specimen:
    """A step of generator and discriminator with a tape each (DCGAN, 32 x 32)."""
    noise = keras.Input([64])
    x = layers.Reshape([4, 4, 128])(layers.Dense(4 * 4 * 128)(noise))
    for filters in (64, 32, 16):
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
        x = layers.Conv2DTranspose(filters, 4, strides=2, padding="same")(x)
    x = layers.Conv2D(3, 3, padding="same", activation="tanh")(x)
    generator = keras.Model(noise, x)
    images = x = keras.Input([32, 32, 3])
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 4, strides=2, padding="same")(x)
        x = layers.Dropout(0.2)(layers.LeakyReLU()(x))
    discriminator = keras.Model(images, layers.Dense(1)(layers.Flatten()(x)))
    networks = [generator, discriminator]

    def judged(logits: tf.Tensor, real: bool) -> tf.Tensor:
        labels = tf.ones_like(logits) if real else tf.zeros_like(logits)
        entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(entropy)

    def gradients(tape_class: Any, z: tf.Tensor, real: tf.Tensor) -> Sequence[Any]:
        with tape_class() as for_generator, tape_class() as for_discriminator:
            of_fake = discriminator(generator(z, training=True), training=True)
            of_real = discriminator(real, training=True)
            fooled = judged(of_fake, True)
            told = judged(of_real, True) + judged(of_fake, False)
        tapes = [(for_generator, fooled), (for_discriminator, told)]
        return [
            gradient
            for (tape, loss), model in zip(tapes, networks, strict=True)
            for gradient in tape.gradient(
                loss, [v.value for v in model.trainable_variables]
            )
        ]

    real, _ = _images(batch, 32, 32, 3)
    z, _ = _images(batch, 64)
    return _specimen(networks, (z, real), gradients)


def frozen(batch: int = 16) -> Specimen:
    """A frozen MobileNetV2 with a small head, of which alone gradients are taken."""
    backbone = keras.applications.MobileNetV2(
        weights=None, include_top=False, pooling="avg", input_shape=(64, 64, 3)
    )
    backbone.trainable = False
    images = keras.Input([64, 64, 3])
    x = layers.Dense(128, activation="relu")(backbone(images))
    model = keras.Model(images, layers.Dense(CLASSES)(layers.Dropout(0.2)(x)))
    return _classifier(model, _images(batch, 64, 64, 3))


BY_HAND: dict[str, Callable[..., Specimen]] = {
    "GPT-like": gpt,
    "encoder-decoder": translator,
    "ViT": vit,
    "U-Net": unet,
    "3-D U-Net": unet3d,
    "GAN": gan,
    "frozen backbone": frozen,
}


def architectures() -> dict[str, Callable[..., Specimen]]:
    """All architectures by name; each is made by a function of the size of a batch."""
    found: dict[str, Callable[..., Specimen]] = dict(BY_HAND)
    for name, build in sorted(vars(keras.applications).items()):
        if inspect.isfunction(build):
            side = LARGER.get(name, 64)
            batch = 4 if name.startswith("ConvNeXt") else BATCHES.get(name, 16)
            found[name] = partial(_application, build, side, batch=batch)
    return found


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: zoo.py imports it.")
