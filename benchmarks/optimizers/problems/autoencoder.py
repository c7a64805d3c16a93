"""The autoencoder of the K-FAC papers, 784-1000-500-250-30 and mirrored, on enlarged digits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._problem import Arrays, Mark, Problem, dense_layers, rows

SIZES = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
BATCH, HELD_OUT = 256, 288


def data() -> Arrays:
    """The training digits, each pixel repeated to 28 x 28; a fifth of them for validation."""
    from jaxkfac.data import load_digits

    images = np.asarray(load_digits("train", seed=0)[0], np.float32)
    images = np.repeat(np.repeat(images.reshape(-1, 8, 8), 4, 1), 4, 2)[:, 2:-2, 2:-2]
    images = images[np.random.default_rng(0).permutation(len(images))].reshape(len(images), -1)
    return {"train": images[HELD_OUT:], "validation": images[:HELD_OUT]}


def initial(seed: int) -> list[dict[str, np.ndarray]]:
    """Glorot's."""
    return dense_layers(seed, SIZES)


def batch(data: Arrays, seed: int, step: int) -> np.ndarray:
    """Images."""
    return data["train"][rows(len(data["train"]), BATCH, seed, step)]


def logits(params: Any, x: jax.Array) -> jax.Array:
    """Of the pixels."""
    for i, p in enumerate(params):
        x = x @ p["w"] + p["b"]
        x = x if i in (len(params) // 2 - 1, len(params) - 1) else jnp.tanh(x)
    return x


def _nats(z: jax.Array, x: jax.Array) -> jax.Array:
    softplus = jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
    return jnp.mean(jnp.sum(softplus - z * x, -1))


def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    """Mean over the images of the pixels' cross entropy."""
    return _nats(mark("bernoulli", logits(params, batch), batch), batch)


def validate(params: Any, data: Any) -> jax.Array:
    """The same on the images held out."""
    return _nats(logits(params, data["validation"]), data["validation"])


AUTOENCODER = Problem(
    name="autoencoder",
    title="Autoencoder, 8 layers, digits",
    measure="cross entropy of held-out images, nats",
    fisher="mc",
    steps=103,
    costly=True,
    budget=20.0,
    data=data,
    initial=initial,
    batch=batch,
    loss=loss,
    validate=validate,
)
