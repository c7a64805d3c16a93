"""The precision of a Laplace posterior, its evidence, and the prior that this favors."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxkfac._errors import scalar
from jaxkfac.curvature import (
    Eigenbases,
    OwnedBlock,
    block_eigenvalues,
    owned_blocks,
    precondition_blocks,
    precondition_many,
)
from jaxkfac.interception import Layer
from jaxkfac.linalg import statistics_dtype

# ---------------- what a Laplace posterior refuses


def statistics_dtype_of(bases: Eigenbases) -> Any:
    """The dtype in which their eigenvalues are added up."""
    return statistics_dtype(*[x.dtype for x in jax.tree.leaves(bases)])


def warn_of_empirical(bases: Eigenbases) -> None:
    """Say where the curvature is made of the gradients at the given labels."""
    if bases.origin is not None and bases.origin.fisher == "empirical":
        warnings.warn(
            "the bases are of fisher='empirical', of gradients at the given labels: these shrink "
            "where a label is fitted and grow where it is not, which no Hessian does, so that the "
            "posterior is not that of the model. Collect factors with fisher='mc' or 'exact'",
            stacklevel=3,
        )


def check_positive(name: str, value: Any) -> None:
    """Refuse what is no positive number."""
    scalar(name, value, "a positive number")
    if not isinstance(value, Tracer) and not (float(value) > 0 and np.isfinite(float(value))):
        raise ValueError(f"{name}={value}: expected a positive number")


def check_prior(prior_precision: ArrayLike, layers: Sequence[str]) -> None:
    """Refuse a prior precision that is not positive, or not one for each layer."""
    if not isinstance(prior_precision, Tracer | ArrayLike):
        raise TypeError(
            "prior_precision: expected a positive number, or an array of one for each layer, got "
            f"{type(prior_precision).__name__}"
        )
    shape = jnp.shape(prior_precision)
    if shape not in ((), (len(layers),)):
        raise ValueError(
            f"prior_precision has shape {shape}, expected a number, or ({len(layers)},), one for "
            f"each of {', '.join(map(repr, layers))}"
        )
    if isinstance(prior_precision, Tracer):
        return
    known = np.asarray(prior_precision)
    if not ((known > 0) & np.isfinite(known)).all():
        raise ValueError(f"prior_precision={prior_precision}: expected positive numbers")


def check_maximum(there: Any, noise: Any, layers: Sequence[str], *, by_layer: bool) -> None:
    """Refuse an evidence without a maximum; say which layers keep their prior, of several."""
    names = [name for name, bounded in zip(layers, np.asarray(there), strict=True) if not bounded]
    if names:
        said = (
            f"the evidence has no maximum in the prior precision of {', '.join(map(repr, names))}: "
            "there is no curvature, or all parameters are zero"
        )
        if not by_layer or len(names) == len(layers):
            raise ValueError(said)
        warnings.warn(f"{said}; it stays as it is", stacklevel=3)
    if not (np.isfinite(noise) and noise > 0):
        raise ValueError(f"the evidence has no maximum in the noise: the residuals give {noise}")


# ---------------- the precision of a Laplace posterior, $P = m F + \operatorname{diag}(\delta)$,
# by its blocks


@dataclasses.dataclass(frozen=True)
class PosteriorPrecision:
    r"""The blocks of a precision, as they stand for one prior and one noise.

    Attributes:
        bases: The curvature of the mean loss; eigenvalues are read as they were decomposed,
            negative ones as 0.
        scale: $m$: the number of loss terms over the variance of the noise.
        prior: $\delta$ of each layer, in the order of ``blocks``.
    """

    bases: Eigenbases
    scale: Float[Array, ""]
    prior: Float[Array, " layers"]

    @property
    def blocks(self) -> list[OwnedBlock]:
        """The blocks of all parameters."""
        return owned_blocks(self.bases)

    def eigenvalues(self) -> list[list[Array]]:
        """Of the data's part, $m F$, for each layer; a parameter has as many as it has elements."""
        return [[x for x in self._of_block(block) if x is not None] for block in self.blocks]

    def inverse_eigenvalues(self, name: str) -> tuple[Array | None, Array | None]:
        """Of a layer's block of $P^{-1}$, and of its bias where that has a block of its own."""
        at = [block.layer.name for block in self.blocks].index(name)
        both, delta = self._of_block(self.blocks[at]), self.prior[at]
        weight, bias = (None if x is None else 1 / (x + delta.astype(x.dtype)) for x in both)
        return weight, bias

    def _of_block(self, block: OwnedBlock) -> tuple[Array | None, Array | None]:
        both = block_eigenvalues(self.bases, block)
        weight, bias = (None if x is None else x * self.scale.astype(x.dtype) for x in both)
        return weight, bias

    def solved(
        self, many: Mapping[str, Float[Array, "many ..."]], power: float
    ) -> dict[str, Float[Array, "many ..."]]:
        """$P^p$ applied to parameters stacked along a leading axis; see ``precondition_many``."""
        found = precondition_many(many, self.bases, self._damping, power)
        return {path: self._scaled(x, power) for path, x in found.items()}

    def solved_by_layer(
        self, many: Mapping[str, Float[Array, "many ..."]], layers: tuple[Layer, ...], power: float
    ) -> Iterator[tuple[Layer, list[Array]]]:
        """The same of some layers, each by itself; see ``precondition_blocks``."""
        bases = dataclasses.replace(self.bases, layers=layers)
        for layer, parts in precondition_blocks(many, bases, self._damping, power):
            yield layer, [self._scaled(x, power) for x in parts if x is not None]

    @property
    def _damping(self) -> dict[str, Array]:
        each = zip(self.blocks, self.prior, strict=True)
        return {block.layer.name: delta / self.scale for block, delta in each}

    def _scaled(self, x: Array, power: float) -> Array:
        return x * (self.scale**power).astype(x.dtype)

    def log_determinant_ratio(self) -> Float[Array, " layers"]:
        r"""$\log \det P - \log \det \operatorname{diag}(\delta)$ of each layer."""
        of_layers = [
            sum(jnp.log1p(x / delta.astype(x.dtype)).sum() for x in values)
            for values, delta in zip(self.eigenvalues(), self.prior, strict=True)
        ]
        return jnp.stack([jnp.asarray(x, self.prior.dtype) for x in of_layers])

    def effective_parameters(self) -> Float[Array, " layers"]:
        r"""$\gamma = \sum_i \lambda_i / (\lambda_i + \delta)$ of each layer."""
        of_layers = [
            sum((x / (x + delta.astype(x.dtype))).sum() for x in values)
            for values, delta in zip(self.eigenvalues(), self.prior, strict=True)
        ]
        return jnp.stack([jnp.asarray(x, self.prior.dtype) for x in of_layers])


def raw(bases: Eigenbases) -> Eigenbases:
    """The bases with eigenvalues that are not clipped, but for negative ones, which are 0."""
    return dataclasses.replace(bases, max_condition=float("inf"), floor=0.0)


def squared_norms(blocks: list[OwnedBlock], leaves: Mapping[str, Any]) -> Float[Array, " layers"]:
    """Squares of the parameters that each layer answers for, summed."""
    found = []
    for block in blocks:
        parts = [matrix.read(leaves[matrix.path]) for matrix in block.parameters]
        wide = [x.astype(statistics_dtype(x.dtype)) for x in parts]
        found.append(jnp.stack([jnp.square(x).sum() for x in wide]).sum())
    return jnp.stack(found)


# ---------------- the log marginal likelihood of a Laplace posterior, its data part apart from its
# prior part


class LogLikelihood(NamedTuple):
    """What the evidence reads of the data; it does not change with the prior or the noise.

    Attributes:
        loss: The sum of all loss terms.
        terms: How many there are.
        targets: Of a Gaussian, how many numbers were observed; else 0.
    """

    loss: Float[Array, ""]
    terms: Float[Array, ""]
    targets: Float[Array, ""]

    def value(self, noise: Float[Array, ""]) -> Float[Array, ""]:
        r"""$\log p(\mathcal D \mid \theta)$, of a Gaussian with noise of this deviation."""
        constant = self.targets * (0.5 * math.log(2 * math.pi) + jnp.log(noise))
        return -self.loss / jnp.square(noise) - constant


def log_evidence(
    precision: PosteriorPrecision,
    norms: Float[Array, " layers"],
    data: LogLikelihood,
    noise: Float[Array, ""],
) -> Float[Array, ""]:
    r"""The log-likelihood less half of $\log\det P - \log\det P_0 + \theta^\top P_0 \theta$."""
    penalty = precision.log_determinant_ratio() + precision.prior * norms
    return data.value(noise) - penalty.sum() / 2


# ---------------- the prior precision, and a Gaussian's noise, that the evidence favours
#
# With the eigenvalues $\lambda$ of the data's part of the precision, the evidence is largest in
# $\delta$ where the effective number of parameters $\gamma(\delta) = \sum_i \lambda_i /
# (\lambda_i + \delta)$ equals $\delta \lVert\theta\rVert^2$. One side falls and the other grows, so
# there is one such $\delta$, and bisection finds it.


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
