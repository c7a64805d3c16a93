"""A small tanh network of the coordinates, for losses of its derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._problem import glorot


def network(seed: int, sizes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    """Glorot's parameters."""
    rng = np.random.default_rng(seed)
    shapes = zip(sizes, sizes[1:], strict=False)
    return [{"w": glorot(rng, n, m), "b": np.zeros(m, np.float32)} for n, m in shapes]


def value(params: Any, x: jax.Array) -> jax.Array:
    """At one point ``(coordinates,)``, or at rows of them."""
    for p in params[:-1]:
        x = jnp.tanh(x @ p["w"] + p["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[..., 0]


def relative_error(found: jax.Array, true: jax.Array) -> jax.Array:
    """In the L2 norm."""
    return jnp.linalg.norm(found - true) / jnp.linalg.norm(true)
