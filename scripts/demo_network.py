"""What the demo trains: a pre-activation ResNet, and the images that it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["IMAGES", "Batch", "Weights", "digits", "loss_of", "resnet"]

IMAGES = 1797
"""How many there are in the data set."""

Batch = tuple[np.ndarray, np.ndarray]


def digits(size: int) -> Iterator[Batch]:
    """Endless batches of (images [size, 32, 32, 1] from 0 to 1, labels)."""
    import tensorflow as tf
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    small = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    with tf.init_scope():
        large = tf.image.resize(small, [32, 32]).numpy()
    rng = np.random.default_rng(0)
    while True:
        chosen = rng.choice(len(labels), size, replace=False)
        yield large[chosen], labels[chosen].astype("int32")


@dataclass
class Weights:
    """The variables of a network, made on the first pass and handed out again after.

    Their place in the pass decides their start values, so that all copies start alike.
    """

    variables: list[Any] = field(default_factory=list)
    position: int = 0

    def __call__(self, shape: Sequence[int], constant: float | None = None) -> Any:
        import tensorflow as tf

        if self.position == len(self.variables):
            value = np.full(shape, constant, "float32")
            if constant is None:
                rng = np.random.default_rng(self.position)
                value = rng.standard_normal(shape).astype("float32")
                value *= np.sqrt(2 / np.prod(shape[:-1]))
            self.variables.append(tf.Variable(value))
        self.position += 1
        return self.variables[self.position - 1]


def resnet(images: Any, weights: Weights, blocks: int) -> Any:
    """Logits of a pre-activation ResNet (He et al. 2016, arXiv 1603.05027)."""
    import tensorflow as tf

    def convolve(x: Any, filters: int, size: int = 3, stride: int = 1) -> Any:
        kernel = weights([size, size, x.shape[-1], filters])
        return tf.nn.conv2d(x, kernel, stride, "SAME")

    def normed(x: Any) -> Any:
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        offset, scale = weights(mean.shape, 0.0), weights(mean.shape, 1.0)
        x = tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)
        return tf.nn.relu(x)

    weights.position = 0
    x = convolve(images, 16)
    for filters in (16, 32, 64):
        for _ in range(blocks):
            y, stride = normed(x), filters // x.shape[-1]
            if stride > 1:
                x = convolve(y, filters, 1, stride)
            x = x + convolve(normed(convolve(y, filters, 3, stride)), filters)
    pooled = tf.reduce_mean(normed(x), [1, 2])
    return pooled @ weights([64, 10]) + weights([10], 0.0)


def loss_of(weights: Weights, blocks: int, images: Any, labels: Any) -> Any:
    """Mean cross-entropy of a batch."""
    import tensorflow as tf

    logits = resnet(images, weights, blocks)
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(entropy)


if __name__ == "__main__":
    print(f"{__doc__}\nNot a program of its own: demo.py imports it.")
