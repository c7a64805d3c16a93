"""A network for Burgers' equation with a shock, on fixed points, all of them each step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._pinn import pinn, value
from benchmarks.optimizers._problem import Arrays, Mark

INSIDE, EDGE = 2000, 2000  # as many: all layers of kfac-jax have the batch's rows
VISCOSITY = 0.01 / np.pi


def solution(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """By Cole and Hopf's transformation, with Gauss and Hermite's 200 points; from -sin(pi x)."""
    nodes, weights = np.polynomial.hermite.hermgauss(200)
    y = x[:, None] - np.sqrt(4 * VISCOSITY * t)[:, None] * nodes
    power = -np.cos(np.pi * y) / (2 * np.pi * VISCOSITY)
    kernel = weights * np.exp(power - power.max(1, keepdims=True))
    return -(np.sin(np.pi * y) * kernel).sum(1) / kernel.sum(1)


def data() -> Arrays:
    """Points (x, t) inside [-1, 1] x [0, 1], at its beginning and on its sides, and others at
    which the solution is compared.
    """
    rng, scale = np.random.default_rng(0), np.array([2.0, 1.0])
    inside, edge, other = (rng.uniform(size=(n, 2)) * scale for n in (INSIDE, EDGE, 2500))
    for points in (inside, edge, other):
        points[:, 0] -= 1
    edge[: EDGE // 2, 1] = 0
    edge[EDGE // 2 :, 0] = np.where(np.arange(EDGE // 2) % 2, 1, -1)
    parts = {
        "inside": inside,
        "edge": edge,
        "edge_values": np.where(edge[:, 1] == 0, -np.sin(np.pi * edge[:, 0]), 0),
        "validation": other,
        "validation_values": solution(*other.T),
    }
    return {name: part.astype(np.float32) for name, part in parts.items()}


def batch(data: Arrays, seed: int, step: int) -> tuple[np.ndarray, ...]:
    """All points."""
    return data["inside"], data["edge"], data["edge_values"]


def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    """Half the mean squares of the residual and, ten times, of what is missed on the edge."""
    inside, edge, values = batch
    first = jax.vmap(jax.grad(value, 1), (None, 0))(params, inside)
    second = jax.vmap(jax.hessian(value, 1), (None, 0))(params, inside)[:, 0, 0]
    residual = first[:, 1] + value(params, inside) * first[:, 0] - VISCOSITY * second
    residual = mark("gaussian", residual, jnp.zeros_like(residual))
    border = mark("gaussian", value(params, edge), values, 10.0)
    return 0.5 * jnp.square(residual).mean() + 5.0 * jnp.square(border - values).mean()


BURGERS = pinn(
    name="burgers",
    title="Burgers' equation, 2-32-32-32-1",
    sizes=(2, 32, 32, 32, 1),
    steps=1000,
    budget=12.0,
    data=data,
    batch=batch,
    loss=loss,
)
