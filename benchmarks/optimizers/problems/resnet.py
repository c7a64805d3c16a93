"""A ResNet of width 16 with batch normalisation on 4,000 images of Fashion-MNIST."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._problem import Arrays, Mark, Problem, glorot, rows

WIDTHS = (16, 32, 64)  # of the stages, each one block; the second and third halve the image
BATCH, TRAIN, HELD_OUT = 128, 3200, 800
STATISTICS = 640  # training images of which evaluation takes the batch statistics


def data() -> Arrays:
    """4,000 images; a fifth of them for validation."""
    from benchmarks.optimizers._fashion_mnist import fashion_mnist

    images, labels = fashion_mnist(TRAIN + HELD_OUT)
    images = images[..., None]
    return {
        "images": images[:TRAIN],
        "labels": labels[:TRAIN],
        "validation_images": images[TRAIN:],
        "validation_labels": labels[TRAIN:],
    }


def initial(seed: int) -> dict[str, Any]:
    """Glorot's."""
    rng = np.random.default_rng(seed)

    def convolution(size: int, n: int, m: int) -> dict[str, np.ndarray]:
        scale, shift = np.ones(m, np.float32), np.zeros(m, np.float32)
        return {"kernel": glorot(rng, size, size, n, m), "scale": scale, "shift": shift}

    before = (WIDTHS[0], *WIDTHS[:-1])
    return {
        "stem": convolution(3, 1, WIDTHS[0]),
        "blocks": [
            {
                "first": convolution(3, n, m),
                "second": convolution(3, m, m),
                "skip": convolution(1, n, m),
            }
            for n, m in zip(before, WIDTHS, strict=True)
        ],
        "head": {"w": glorot(rng, WIDTHS[-1], 10), "b": np.zeros(10, np.float32)},
    }


def batch(data: Arrays, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and classes."""
    chosen = rows(len(data["labels"]), BATCH, seed, step)
    return data["images"][chosen], data["labels"][chosen]


def logits(params: Any, x: jax.Array, num_statistics: int | None = None) -> jax.Array:
    """Normalised by the mean and variance over the first ``num_statistics`` rows, or over all."""

    def convolved(p: Any, x: jax.Array, stride: int = 1) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, p["kernel"], (stride, stride), "SAME", dimension_numbers=layout
        )
        seen = x[:num_statistics]
        mean, variance = seen.mean((0, 1, 2)), seen.var((0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]

    x = jax.nn.relu(convolved(params["stem"], x))
    for i, p in enumerate(params["blocks"]):
        stride = 2 if i else 1
        h = jax.nn.relu(convolved(p["first"], x, stride))
        x = jax.nn.relu(convolved(p["second"], h) + convolved(p["skip"], x, stride))
    return x.mean((1, 2)) @ params["head"]["w"] + params["head"]["b"]


def _nats(z: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], -1).mean()


def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    """Mean cross entropy."""
    images, labels = batch
    return _nats(mark("categorical", logits(params, images), labels), labels)


def validate(params: Any, data: Any) -> jax.Array:
    """The same on the images held out, with the statistics of training images."""
    images = jnp.concatenate([data["images"][:STATISTICS], data["validation_images"]])
    return _nats(logits(params, images, STATISTICS)[STATISTICS:], data["validation_labels"])


RESNET = Problem(
    name="resnet",
    title="ResNet of width 16 with BatchNorm, Fashion-MNIST",
    measure="cross entropy of held-out images, nats",
    fisher="mc",
    steps=57,
    costly=True,
    budget=25.0,
    data=data,
    initial=initial,
    batch=batch,
    loss=loss,
    validate=validate,
)
