r"""The prior precision, and a Gaussian's noise, that the evidence favours.

With the eigenvalues $\lambda$ of the data's part of the precision, the evidence is largest in
$\delta$ where the effective number of parameters $\gamma(\delta) = \sum_i \lambda_i /
(\lambda_i + \delta)$ equals $\delta \lVert\theta\rVert^2$. One side falls and the other grows, so
there is one such $\delta$, and bisection finds it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxkfac.uses._evidence import LogLikelihood
from jaxkfac.uses._posterior_precision import PosteriorPrecision

STEPS = 64  # each halves the bracket's logarithm, down to float64's last digits


def best_prior(
    precision: PosteriorPrecision, norms: Float[Array, " layers"], *, by_layer: bool
) -> Float[Array, " layers"]:
    """The maximum of the evidence in one prior precision, or in that of each layer.

    Where there is none (see ``has_maximum``) it stays as it is.
    """
    total, largest = _summed(by_layer), _largest(precision, norms, by_layer)
    norm = total(norms)
    sizes = [sum(x.size for x in each) for each in precision.eigenvalues()]
    number = total(jnp.asarray(sizes, norms.dtype))
    # One eigenvalue alone gives the lower end, as many of infinite size the upper.
    product = largest * norm
    low = 2 * largest / (product + jnp.sqrt(product * (product + 4)))

    def slope(prior: Array) -> Array:
        fitted = dataclasses.replace(precision, prior=prior).effective_parameters()
        return total(fitted) - prior * norm

    found = _bisected(slope, low, number / norm)
    return jnp.where((norm > 0) & (largest > 0), found, precision.prior)


def has_maximum(
    precision: PosteriorPrecision, norms: Float[Array, " layers"], *, by_layer: bool
) -> Bool[Array, " layers"]:
    """Whether the evidence has one: there is curvature, and not all parameters are zero."""
    return (_summed(by_layer)(norms) > 0) & (_largest(precision, norms, by_layer) > 0)


def best_prior_and_noise(
    precision: PosteriorPrecision,
    norms: Float[Array, " layers"],
    data: LogLikelihood,
    *,
    by_layer: bool,
) -> tuple[Float[Array, " layers"], Float[Array, ""]]:
    r"""The same with the noise $\sigma$ of a Gaussian, where its evidence is stationary too.

    That is where twice the loss is $\sigma^2$ times the number of targets less $\gamma$. The
    precision is that of a noise of one.
    """
    total = _summed(by_layer)

    def at(variance: Array) -> PosteriorPrecision:
        noisy = dataclasses.replace(precision, scale=precision.scale / variance)
        return dataclasses.replace(noisy, prior=best_prior(noisy, norms, by_layer=by_layer))

    def slope(variance: Array) -> Array:
        fitted = at(variance).effective_parameters().sum()
        return 2 * data.loss / variance - data.targets + fitted

    # gamma <= trace / (sigma^2 delta), so that where it is delta |theta|^2 it is at most
    # sqrt(trace |theta|^2) / sigma: these bound the variance from above.
    values = precision.eigenvalues()
    traces = jnp.stack([jnp.asarray(sum(x.sum() for x in each), norms.dtype) for each in values])
    both = jnp.sqrt(total(traces) * total(norms))
    root = both.sum() if by_layer else both[0]
    kept = jnp.where(has_maximum(precision, norms, by_layer=by_layer), 0, traces / precision.prior)
    product = 4 * (2 * data.loss + kept.sum()) * data.targets
    most = (root + jnp.sqrt(root**2 + product)) / (2 * data.targets)
    variance = _bisected(slope, 2 * data.loss / data.targets, jnp.square(most))
    return at(variance).prior, jnp.sqrt(variance)


def _summed(by_layer: bool) -> Callable[[Array], Array]:
    """A sum over all layers, as often as there are layers; by layer, each by itself."""
    return lambda x: x if by_layer else jnp.broadcast_to(x.sum(), x.shape)


def _largest(precision: PosteriorPrecision, norms: Array, by_layer: bool) -> Array:
    """The largest eigenvalue of each layer, or of all."""
    values = precision.eigenvalues()
    most = [jnp.stack([x.max().astype(norms.dtype) for x in each]).max() for each in values]
    each = jnp.stack(most)
    return each if by_layer else jnp.broadcast_to(each.max(), each.shape)


def _bisected(falling: Callable[[Any], Any], low: Array, high: Array) -> Array:
    """Where a falling function is zero, between two positive numbers, by geometric means."""

    def step(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = jnp.sqrt(low) * jnp.sqrt(high)
        left = falling(middle) > 0
        return jnp.where(left, middle, low), jnp.where(left, high, middle)

    low, high = jax.lax.fori_loop(0, STEPS, step, (low, jnp.maximum(low, high)))
    return jnp.sqrt(low) * jnp.sqrt(high)
