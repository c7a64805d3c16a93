"""What a Laplace posterior computes, each compiled once for all posteriors of one model."""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PyTree

from jaxkfac.factors import Batch, Gaussian
from jaxkfac.interception import leaves_by_path, with_leaves
from jaxkfac.linalg import statistics_dtype
from jaxkfac.uses._evidence import LogLikelihood, log_evidence
from jaxkfac.uses._linearised_variance import LinearisedVariance
from jaxkfac.uses._posterior_precision import squared_norms
from jaxkfac.uses._predictive import OutputDistribution
from jaxkfac.uses._prior_tuning import best_prior, best_prior_and_noise, has_maximum

if TYPE_CHECKING:
    from jaxkfac.uses._laplace_posterior import LaplacePosterior


@jax.jit
def summed_terms(posterior: "LaplacePosterior", batch: Batch) -> LogLikelihood:
    """Of one batch."""
    objective = posterior.examples.objective
    outputs, _ = objective.outputs(posterior.params, batch.inputs, None, posterior.state)
    (head,) = objective.heads(outputs, batch.targets, batch.mask)
    loss, dtype = head.kept_terms().sum(), posterior.noise.dtype
    gaussian = isinstance(posterior.likelihood, Gaussian)
    targets = head.kept * (head.columns if gaussian else 0)
    return LogLikelihood(*(x.astype(dtype) for x in (loss, head.kept, targets)))


@jax.jit
def evidence_of(posterior: "LaplacePosterior", data: LogLikelihood) -> Float[Array, ""]:
    """The log marginal likelihood."""
    return log_evidence(posterior.precision, _norms(posterior), data, posterior.noise)


@functools.partial(jax.jit, static_argnames="by_layer")
def best_on_evidence(
    posterior: "LaplacePosterior", data: LogLikelihood | None, *, by_layer: bool
) -> tuple[Float[Array, "..."], Float[Array, ""], Bool[Array, " layers"]]:
    """Prior precision, noise (without data, as it is), and where there is a maximum."""
    norms, noise = _norms(posterior), posterior.noise
    precision = posterior.precision
    if data is None:
        prior = best_prior(precision, norms, by_layer=by_layer)
    else:
        silent = posterior.replace(posterior.prior_precision, 1.0).precision
        prior, noise = best_prior_and_noise(silent, norms, data, by_layer=by_layer)
    there = has_maximum(precision, norms, by_layer=by_layer)
    return prior if by_layer else prior[0], noise, there


@functools.partial(jax.jit, static_argnames=("max_bytes", "by_layer"))
def output_distribution(
    posterior: "LaplacePosterior", batch: Batch, *, max_bytes: int, by_layer: bool = False
) -> OutputDistribution:
    """Outputs ``(N, terms, C)`` and covariances ``(N, [layers,] terms, C, C)``."""
    variance = LinearisedVariance(
        posterior.examples,
        posterior.precision,
        posterior.params,
        posterior.state,
        max_bytes=max_bytes,
        by_layer=by_layer,
    )
    mean, covariance = variance(batch)
    return OutputDistribution(mean.astype(covariance.dtype), covariance)


@functools.partial(jax.jit, static_argnames="number")
def sampled(posterior: "LaplacePosterior", key: Key[Array, ""], number: int) -> PyTree:
    r"""$\theta + P^{-1/2} \varepsilon$."""
    leaves = leaves_by_path(posterior.params)
    paths = sorted({m.path for block in posterior.precision.blocks for m in block.parameters})
    noise = {}
    for path, own in zip(paths, jax.random.split(key, len(paths)), strict=True):
        leaf = leaves[path]
        dtype = statistics_dtype(leaf.dtype)
        noise[path] = jax.random.normal(own, (number, *leaf.shape), dtype)
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), posterior.params)
    moved = {
        path: (leaves[path].astype(x.dtype) + x).astype(leaves[path].dtype)
        for path, x in posterior.precision.solved(noise, -0.5).items()
    }
    return with_leaves(many, moved)


def _norms(posterior: "LaplacePosterior") -> Float[Array, " layers"]:
    norms = squared_norms(posterior.precision.blocks, leaves_by_path(posterior.params))
    return norms.astype(posterior.noise.dtype)
