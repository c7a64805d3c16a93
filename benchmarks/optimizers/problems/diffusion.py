"""A denoising diffusion model of the digits: residual layers that the time of the noise modulates.

The twelfth problem, which a second reader chose before any optimizer had run on it: diffusion
models are among what JAX is used for most, and this one is unlike the other eleven in three ways.
Inputs and targets are new noise at every step, so that no batch comes twice and most of the loss
cannot be learned; a loss is a mean over tasks from nearly clean to nearly pure noise; and two paths
of the network are multiplied, features by what layers have made of the time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._digits import BATCH, digits, images
from benchmarks.optimizers._problem import Arrays, Mark, Problem, glorot

PIXELS, WIDTH, DEPTH, FREQUENCIES = 64, 128, 3, 16
HELD_OUT_DRAWS = 8  # of noise and time for each image held out


def _noise(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Times in [0, 1], spread evenly over a batch, and noise."""
    times = (np.arange(count) + rng.uniform(size=count)) / count
    return (
        rng.permutation(times).astype(np.float32),
        rng.normal(size=(count, PIXELS)).astype(np.float32),
    )


def data() -> Arrays:
    """The digits, and fixed times and noise for those held out."""
    found = digits()
    held = np.repeat(found["validation_images"], HELD_OUT_DRAWS, 0)
    times, noise = _noise(np.random.default_rng(0), len(held))
    return {
        "images": found["images"],
        "validation_images": held,
        "validation_times": times,
        "validation_noise": noise,
    }


def batch(data: Arrays, seed: int, step: int) -> tuple[np.ndarray, ...]:
    """Images, times and noise."""
    return images(data, seed, step), *_noise(np.random.default_rng((seed, step)), BATCH)


def initial(seed: int) -> dict[str, Any]:
    """Glorot's; each layer begins without modulation, and what goes back into the stream is smaller
    by the root of the depth.
    """
    rng = np.random.default_rng(seed)

    def dense(n: int, m: int, scale: float = 1.0) -> dict[str, np.ndarray]:
        return {"w": np.float32(scale) * glorot(rng, n, m), "b": np.zeros(m, np.float32)}

    return {
        "time1": dense(2 * FREQUENCIES, WIDTH),
        "time2": dense(WIDTH, WIDTH),
        "inputs": dense(PIXELS, WIDTH),
        "blocks": [
            {
                "modulation": dense(WIDTH, 2 * WIDTH, 0.0),
                "up": dense(WIDTH, WIDTH),
                "down": dense(WIDTH, WIDTH, DEPTH**-0.5),
            }
            for _ in range(DEPTH)
        ],
        "outputs": dense(WIDTH, PIXELS),
    }


def noise_in(params: Any, noisy: jax.Array, times: jax.Array) -> jax.Array:
    """The noise that an image holds."""

    def dense(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["w"] + p["b"]

    angles = times[:, None] * jnp.geomspace(1.0, 200.0, FREQUENCIES)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    time = jax.nn.silu(dense(params["time2"], jax.nn.silu(dense(params["time1"], waves))))
    x = dense(params["inputs"], noisy)
    for p in params["blocks"]:
        scale, shift = jnp.split(dense(p["modulation"], time), 2, -1)
        centered = x - x.mean(-1, keepdims=True)
        normed = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)
        x = x + dense(p["down"], jax.nn.silu(dense(p["up"], normed * (1 + scale) + shift)))
    return dense(params["outputs"], x)


def _noisy(images: jax.Array, times: jax.Array, noise: jax.Array) -> jax.Array:
    """Pixels in [-1, 1] and noise, on a quarter of a circle."""
    angle = (0.5 * jnp.pi * times)[:, None]
    pixels = 2 * images.reshape(len(images), -1) - 1
    return jnp.cos(angle) * pixels + jnp.sin(angle) * noise


def _half_squares(found: jax.Array, noise: jax.Array) -> jax.Array:
    return 0.5 * jnp.square(found - noise).sum(-1).mean()


def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    """Half the squared distance to the noise, the mean over images and times."""
    images, times, noise = batch
    found = mark("gaussian", noise_in(params, _noisy(images, times, noise), times), noise)
    return _half_squares(found, noise)


def validate(params: Any, data: Any) -> jax.Array:
    """The same on the digits held out, with times and noise that stay."""
    times, noise = data["validation_times"], data["validation_noise"]
    noisy = _noisy(data["validation_images"], times, noise)
    return _half_squares(noise_in(params, noisy, times), noise)


DIFFUSION = Problem(
    name="diffusion",
    title="Denoising diffusion of the digits, three residual blocks",
    measure="half squared distance to the noise in held-out digits",
    fisher="mc",
    data=data,
    initial=initial,
    batch=batch,
    loss=loss,
    validate=validate,
)
