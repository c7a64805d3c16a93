"""A perceptron, 64-64-64-10, on the digits."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.optimizers._digits import classifier
from benchmarks.optimizers._problem import dense_layers

SIZES = (64, 64, 64, 10)


def logits(params: Any, images: jax.Array) -> jax.Array:
    """Of the classes."""
    x = images.reshape(len(images), -1)
    for p in params[:-1]:
        x = jnp.tanh(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


PERCEPTRON = classifier(
    name="perceptron",
    title="Perceptron, 64-64-64-10, digits",
    initial=lambda seed: dense_layers(seed, SIZES),
    logits=logits,
)
