"""A network for Poisson's equation on the unit square, on fixed points, all of them each step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._pinn import pinn, value
from benchmarks.optimizers._problem import Arrays, Mark

INSIDE, EDGE = 900, 900  # as many: all layers of kfac-jax have the batch's rows


def data() -> Arrays:
    """Points inside and on the edge, and others at which the solution is compared."""
    rng = np.random.default_rng(0)
    edge = rng.uniform(size=(EDGE, 2))
    edge[np.arange(EDGE), np.arange(EDGE) % 2] = np.arange(EDGE) // 2 % 2
    inside, other = rng.uniform(size=(INSIDE, 2)), rng.uniform(size=(2500, 2))
    parts = {
        "inside": inside,
        "edge": edge,
        "validation": other,
        "validation_values": np.asarray(solution(jnp.asarray(other))),
    }
    return {name: part.astype(np.float32) for name, part in parts.items()}


def batch(data: Arrays, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """All points."""
    return data["inside"], data["edge"]


def solution(x: jax.Array) -> jax.Array:
    """That which the right-hand side is made from, zero on the edge."""
    return jnp.prod(jnp.sin(jnp.pi * x), -1)


def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    """Half the mean squares of the residual and, ten times, of the values on the edge."""
    inside, edge = batch
    second = jax.vmap(jax.hessian(value, 1), (None, 0))(params, inside)
    residual = jnp.trace(second, axis1=1, axis2=2) + 2 * jnp.pi**2 * solution(inside)
    residual = mark("gaussian", residual, jnp.zeros_like(residual))
    border = value(params, edge)
    border = mark("gaussian", border, jnp.zeros_like(border), 10.0)
    return 0.5 * jnp.square(residual).mean() + 5.0 * jnp.square(border).mean()


POISSON = pinn(
    name="poisson",
    title="Poisson's equation in a square, 2-64-64-1",
    sizes=(2, 64, 64, 1),
    steps=600,
    budget=4.0,
    data=data,
    batch=batch,
    loss=loss,
)
