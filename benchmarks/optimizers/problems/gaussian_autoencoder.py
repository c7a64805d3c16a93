"""An autoencoder of the digits with Gaussian outputs, 64-128-64-12 and mirrored."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.optimizers._digits import digits, images
from benchmarks.optimizers._problem import Mark, Problem, dense_layers

SIZES = (64, 128, 64, 12, 64, 128, 64)


def outputs(params: Any, x: jax.Array) -> jax.Array:
    """Pixels, from a code and through layers of tanh; code and pixels are linear."""
    for i, p in enumerate(params):
        x = x @ p["w"] + p["b"]
        x = x if i in (len(params) // 2 - 1, len(params) - 1) else jnp.tanh(x)
    return x


def _half_squares(outputs: jax.Array, pixels: jax.Array) -> jax.Array:
    return 0.5 * jnp.square(outputs - pixels).sum(-1).mean()


def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    """Half the squared distance of an image, the mean over the images."""
    pixels = batch.reshape(len(batch), -1)
    return _half_squares(mark("gaussian", outputs(params, pixels), pixels), pixels)


def validate(params: Any, data: Any) -> jax.Array:
    """The same on the digits held out."""
    held = data["validation_images"]
    pixels = held.reshape(len(held), -1)
    return _half_squares(outputs(params, pixels), pixels)


GAUSSIAN_AUTOENCODER = Problem(
    name="gaussian_autoencoder",
    title="Autoencoder with Gaussian outputs, 6 layers, digits",
    measure="half squared distance of held-out digits",
    fisher="mc",
    data=digits,
    initial=lambda seed: dense_layers(seed, SIZES),
    batch=images,
    loss=loss,
    validate=validate,
)
