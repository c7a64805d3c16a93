"""The compiled programs of a Laplace posterior; all posteriors of one model share them."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Key

from jaxkfac._arguments import ArrayTree, leaves_by_path, with_leaves
from jaxkfac.factors import Batch, Gaussian, ModelCall
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
    PosteriorPrecision,
    best_prior,
    best_prior_and_noise,
    has_maximum,
    log_evidence,
    squared_norms,
)


@runtime_checkable
class Posterior(Protocol):
    """What the programs read of a ``LaplacePosterior``, whose module imports this one."""

    @property
    def params(self) -> Any: ...
    @property
    def layers(self) -> Sequence[str]: ...
    @property
    def prior_precision(self) -> Any: ...
    @property
    def noise(self) -> Any: ...
    @property
    def state(self) -> Any: ...
    @property
    def examples(self) -> Any: ...
    @property
    def likelihood(self) -> Any: ...
    @property
    def precision(self) -> PosteriorPrecision: ...
    def replace(self, prior_precision: ArrayLike, noise: ArrayLike) -> Any: ...
    def checked(self, batch: ArrayTree) -> Batch: ...


AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


@jax.jit
def summed_terms(posterior: Posterior, batch: Batch) -> LogLikelihood:
    """The sums of one batch that the evidence needs."""
    objective = posterior.examples.objective
    outputs, _ = objective.outputs(posterior.params, batch.inputs, None, posterior.state)
    (head,) = objective.heads(outputs, batch.targets, batch.mask)
    loss, dtype = head.kept_terms().sum(), posterior.noise.dtype
    gaussian = isinstance(posterior.likelihood, Gaussian)
    # A term of weight w stands for w terms, each with its own noise, whatever the mean divides by.
    targets = head.total_weight * head.scale * (head.columns if gaussian else 0)
    return LogLikelihood(*(x.astype(dtype) for x in (loss, head.num_terms, targets)))


@jax.jit
def evidence_of(posterior: Posterior, data: LogLikelihood) -> Float[Array, ""]:
    """The log marginal likelihood."""
    return log_evidence(posterior.precision, _norms(posterior), data, posterior.noise)


@functools.partial(jax.jit, static_argnames="by_layer")
def best_on_evidence(
    posterior: Posterior, data: LogLikelihood | None, *, by_layer: bool
) -> tuple[Float[Array, "..."], Float[Array, ""], Bool[Array, " layers"]]:
    """The best prior precision and noise (unchanged without data), and where a maximum exists."""
    norms, noise = _norms(posterior), posterior.noise
    precision = posterior.precision
    if data is None:
        prior = best_prior(precision, norms, by_layer=by_layer)
    else:
        silent = posterior.replace(posterior.prior_precision, 1.0).precision
        prior, noise = best_prior_and_noise(silent, norms, data, by_layer=by_layer)
    bounded_layers = has_maximum(precision, norms, by_layer=by_layer)
    return prior if by_layer else prior[0], noise, bounded_layers


@functools.partial(jax.jit, static_argnames=("max_bytes", "by_layer"))
def output_distribution(
    posterior: Posterior, batch: Batch, *, max_bytes: int, by_layer: bool = False
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
def sampled(posterior: Posterior, key: Key[Array, ""], number: int) -> ArrayTree:
    r"""Samples $\theta + P^{-1/2} \varepsilon$."""
    leaves = leaves_by_path(posterior.params)
    paths = sorted({m.path for block in posterior.precision.blocks for m in block.parameters})
    noise = {}
    for path, path_key in zip(paths, jax.random.split(key, len(paths)), strict=True):
        leaf = leaves[path]
        dtype = statistics_dtype(leaf.dtype)
        noise[path] = jax.random.normal(path_key, (number, *leaf.shape), dtype)
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), posterior.params)
    moved = {
        path: (leaves[path].astype(x.dtype) + x).astype(leaves[path].dtype)
        for path, x in posterior.precision.solved(noise, -0.5).items()
    }
    return with_leaves(many, moved)


def _norms(posterior: Posterior) -> Float[Array, " layers"]:
    norms = squared_norms(posterior.precision.blocks, leaves_by_path(posterior.params))
    return norms.astype(posterior.noise.dtype)


# ---------------- the best prior precision of a grid, on held-out data


GRID = np.logspace(-4, 4, 25)


def best_prior_on(
    posterior: AnyPosterior,
    validation: Any,
    *,
    by_layer: bool,
    grid: Sequence[float | int] | None,
    max_bytes: int,
) -> AnyPosterior:
    """The posterior whose prior precision has the least negative log predictive probability."""
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


def _one(
    posterior: Posterior, batches: Iterable[Batch], grid: np.ndarray, max_bytes: int
) -> np.floating:
    losses = np.zeros(len(grid))
    for batch in batches:
        for k, number in enumerate(grid):
            changed = posterior.replace(number, posterior.noise)
            outputs = output_distribution(changed, batch, max_bytes=max_bytes)
            losses[k] += _number(_loss(posterior, batch, outputs))
    _check_least(losses.min())
    return grid[int(losses.argmin())]


def _by_layer(
    posterior: Posterior, batches: Iterable[Batch], grid: np.ndarray, max_bytes: int
) -> np.ndarray:
    """Layers take turns; each takes the number with the least loss while all others stay fixed."""
    predictions: list[tuple[Batch, Array, list[Array]]] = []
    for batch in batches:
        by_number = [
            output_distribution(
                posterior.replace(number, posterior.noise),
                batch,
                max_bytes=max_bytes,
                by_layer=True,
            )
            for number in grid
        ]
        predictions.append((batch, by_number[0].mean, [x.covariance for x in by_number]))
    chosen = np.full(len(posterior.layers), len(grid) // 2)

    def loss(chosen: np.ndarray) -> float:
        total = 0.0
        for batch, mean, covariances in predictions:
            of_layers = jnp.stack([covariances[k][:, layer] for layer, k in enumerate(chosen)])
            covariance = of_layers.sum(0)
            total += _number(_loss(posterior, batch, OutputDistribution(mean, covariance)))
        return total

    best, changed = loss(chosen), True
    while changed:  # the loss falls with every change, so this ends
        changed = False
        for layer in range(len(chosen)):
            for k in range(len(grid)):
                trial = chosen.copy()
                trial[layer] = k
                if (value := loss(trial)) < best:
                    chosen, best, changed = trial, value, True
    _check_least(best)
    return grid[chosen]


def _check_least(loss: float | np.floating) -> None:
    """Refuse a least loss that is infinite: no number of the grid is better than another."""
    if not np.isfinite(loss):
        raise ValueError(
            f"validation: the least negative log predictive probability of the grid is {loss}: "
            "look for targets whose logits are infinite, and for numbers that overflow"
        )


def _number(loss: Float[Array, ""]) -> float:
    """The loss as a number; NaN raises, because it compares with nothing."""
    if np.isnan(loss):
        raise ValueError(
            "validation: the negative log predictive probability of a batch is NaN: look for NaN "
            "in its inputs and targets, and for targets that are out of range"
        )
    return float(loss)


@jax.jit
def _loss(posterior: Posterior, batch: Batch, outputs: OutputDistribution) -> Float[Array, ""]:
    objective = posterior.examples.objective
    call = ModelCall(posterior.params, batch, state=posterior.state)
    traced = posterior.examples.traced(call)
    mean = outputs.mean.reshape(traced.out_shapes[0].shape)
    (head,) = objective.heads(objective.tree([mean]), batch.targets, batch.mask)
    return negative_log_predictive(head, outputs, posterior.noise)
