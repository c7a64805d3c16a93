"""What a Laplace posterior computes, each compiled once for all posteriors of one model."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PyTree

from jaxkfac.factors import Batch, Gaussian
from jaxkfac.interception import leaves_by_path, with_leaves
from jaxkfac.linalg import statistics_dtype
from jaxkfac.uses._examples import batches_of
from jaxkfac.uses._linearised_variance import (
    LinearisedVariance,
    OutputDistribution,
    negative_log_predictive,
    rule_of,
)
from jaxkfac.uses._posterior_precision import (
    LogLikelihood,
    best_prior,
    best_prior_and_noise,
    has_maximum,
    log_evidence,
    squared_norms,
)

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
    targets = head.num_kept * (head.columns if gaussian else 0)
    return LogLikelihood(*(x.astype(dtype) for x in (loss, head.num_kept, targets)))


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


# ---------------- the prior precision that predicts held-out data best, of a grid


GRID = np.logspace(-4, 4, 25)


def best_prior_on(
    posterior: "LaplacePosterior",
    validation: Any,
    *,
    by_layer: bool,
    grid: Sequence[float | int] | None,
    max_bytes: int,
) -> "LaplacePosterior":
    """The posterior with the prior precision of the least negative log predictive probability."""
    numbers = _checked(grid)
    if not isinstance(posterior.likelihood, Gaussian):
        rule_of(posterior.likelihood, "probit")
    tune = _by_layer if by_layer else _one
    batches = (posterior.checked(some) for some in batches_of(validation))
    return posterior.replace(tune(posterior, batches, numbers, max_bytes), posterior.noise)


def _checked(grid: Sequence[float | int] | None) -> np.ndarray:
    numbers = np.asarray(GRID if grid is None else grid, np.float64)
    if numbers.ndim != 1 or not numbers.size or not (numbers > 0).all():
        raise ValueError(f"grid={grid}: expected positive numbers, at least one")
    return numbers


def _one(posterior: Any, batches: Any, grid: np.ndarray, max_bytes: int) -> np.floating:
    losses = np.zeros(len(grid))
    for batch in batches:
        for k, number in enumerate(grid):
            changed = posterior.replace(number, posterior.noise)
            outputs = output_distribution(changed, batch, max_bytes=max_bytes)
            losses[k] += _number(_loss(posterior, batch, outputs))
    return grid[int(losses.argmin())]


def _by_layer(posterior: Any, batches: Any, grid: np.ndarray, max_bytes: int) -> np.ndarray:
    """Layers take turns; each takes the number at which the loss is least, the others' fixed."""
    found: list[tuple[Batch, Array, list[Array]]] = []
    for batch in batches:
        each = [
            output_distribution(
                posterior.replace(number, posterior.noise),
                batch,
                max_bytes=max_bytes,
                by_layer=True,
            )
            for number in grid
        ]
        found.append((batch, each[0].mean, [x.covariance for x in each]))
    chosen = np.full(len(posterior.layers), len(grid) // 2)

    def loss(chosen: np.ndarray) -> float:
        total = 0.0
        for batch, mean, parts in found:
            of_layers = jnp.stack([parts[k][:, layer] for layer, k in enumerate(chosen)])
            covariance = of_layers.sum(0)
            total += _number(_loss(posterior, batch, OutputDistribution(mean, covariance)))
        return total

    best, changed = loss(chosen), True
    while changed:  # the loss falls with every change, so this ends
        changed = False
        for layer in range(len(chosen)):
            for k in range(len(grid)):
                other = chosen.copy()
                other[layer] = k
                if (value := loss(other)) < best:
                    chosen, best, changed = other, value, True
    return grid[chosen]


def _number(loss: Float[Array, ""]) -> float:
    """A loss that can be compared: NaN is neither more nor less than any."""
    if np.isnan(loss):
        raise ValueError(
            "validation: the negative log predictive probability of a batch is NaN: look for NaN "
            "in its inputs and targets, and for targets that are out of range"
        )
    return float(loss)


@jax.jit
def _loss(posterior: Any, batch: Batch, outputs: OutputDistribution) -> Float[Array, ""]:
    objective = posterior.examples.objective
    traced = posterior.examples.traced(posterior.params, batch, posterior.state)
    mean = outputs.mean.reshape(traced.out_shapes[0].shape)
    (head,) = objective.heads(objective.tree([mean]), batch.targets, batch.mask)
    return negative_log_predictive(head, outputs, posterior.noise)
