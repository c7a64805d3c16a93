"""A small tanh network of the coordinates, trained by losses of its derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.optimizers._problem import Arrays, Problem, dense_layers


def value(params: Any, x: jax.Array) -> jax.Array:
    """At one point ``(coordinates,)``, or at rows of them."""
    for p in params[:-1]:
        x = jnp.tanh(x @ p["w"] + p["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[..., 0]


def pinn(
    *,
    name: str,
    title: str,
    sizes: tuple[int, ...],
    steps: int,
    budget: float,
    data: Callable[[], Arrays],
    batch: Callable[[Arrays, int, int], Any],
    loss: Callable[..., Any],
) -> Problem:
    """The problem of such a network; ``data`` hold points and values for validation."""

    def validate(params: Any, data: Any) -> jax.Array:
        true = data["validation_values"]
        return jnp.linalg.norm(value(params, data["validation"]) - true) / jnp.linalg.norm(true)

    return Problem(
        name=name,
        title=title,
        measure="relative L2 error at other points",
        fisher="exact",
        steps=steps,
        budget=budget,
        data=data,
        initial=lambda seed: dense_layers(seed, sizes),
        batch=batch,
        loss=loss,
        validate=validate,
    )
