"""A stochastic estimate, and the vectors it is taken over."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxkfac.curvature.operators._extras import load
from jaxkfac.curvature.operators._flat import Flat
from jaxkfac.curvature.operators._precision import full_precision


class Estimate(NamedTuple):
    """A mean over random vectors.

    Attributes:
        value: The estimate.
        standard_error: Its standard error, from the spread over the vectors; 0 where the
            value is exact. The terms of the two leave-one-out trace methods share vectors: for
            them it is an indication (measured, it was 0.6 to 0.75 of the true spread).
    """

    value: Float[Array, "*shape"]
    standard_error: Float[Array, "*shape"]


def check_samples(num_samples: int) -> None:
    """Refuse fewer than two samples, which have no spread."""
    if num_samples < 2:
        raise ValueError(
            f"num_samples={num_samples}: expected at least 2, the standard error is their spread"
        )


def monte_carlo(
    integrand: Callable[[Any, Array], Array], flat: Flat, key: Key[Array, ""], num_samples: int
) -> Estimate:
    """Mean and standard error of ``integrand(matvec, vector)`` over random signs.

    One vector at a time: memory is one product's.
    """
    stochtrace = load("matfree.stochtrace")
    sampler = stochtrace.sampler_signs(jnp.zeros(flat.size, flat.dtype), num=num_samples)

    def one(matvec: Any, vector: Array) -> Array:
        return jax.custom_batching.sequential_vmap(lambda v: integrand(matvec, v))(vector)

    estimate = stochtrace.estimator_monte_carlo_mean_and_sem(one, sampler)
    with full_precision():
        mean, error = estimate(flat.matvec, key)
    return unbiased(mean, error, num_samples)


def unbiased(mean: Array, error: Array, num_samples: int) -> Estimate:
    """With the spread over ``n - 1``; ``matfree`` divides by ``n``."""
    return Estimate(mean, error * (num_samples / (num_samples - 1)) ** 0.5)
