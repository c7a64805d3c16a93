"""The precision of a Laplace posterior, its evidence, and the prior that maximizes it."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxkfac._errors import scalar
from jaxkfac.curvature import Eigenbases
from jaxkfac.factors import Gaussian
from jaxkfac.interception import Layer
from jaxkfac.linalg import statistics_dtype
from jaxkfac.uses._damped_gradients import (
    OwnedBlock,
    block_eigenvalues,
    owned_blocks,
    precondition_blocks,
    precondition_many,
)

# ---------------- checks


def statistics_dtype_of(bases: Eigenbases) -> Any:
    """The dtype in which the bases' eigenvalues are summed."""
    return statistics_dtype(*[x.dtype for x in jax.tree.leaves(bases)])


def warn_of_empirical(bases: Eigenbases) -> None:
    """Warn if the curvature consists of gradients at the given labels."""
    if bases.origin is not None and bases.origin.fisher == "empirical":
        warnings.warn(
            "the bases are of fisher='empirical', from gradients at the given labels. These "
            "gradients shrink where a label is fitted and grow where it is not, and no Hessian "
            "does that, so the posterior is not the model's. Collect factors with fisher='mc' "
            "or 'exact'",
            stacklevel=3,
        )


def check_positive(name: str, value: Any) -> None:
    """Refuse what is not a positive number."""
    scalar(name, value, "a positive number")
    if not isinstance(value, Tracer) and not (float(value) > 0 and np.isfinite(float(value))):
        raise ValueError(f"{name}={value}: expected a positive number")


def check_noise(likelihood: object, noise: ArrayLike) -> None:
    """Refuse what is not a positive number, and a noise of a likelihood that has none.

    A traced noise passes: compiled functions replace a posterior's noise by itself.
    """
    check_positive("noise", noise)
    if isinstance(likelihood, Gaussian) or isinstance(noise, Tracer):
        return
    if float(cast(Any, noise)) != 1:
        raise ValueError(f"noise={noise}: only a Gaussian likelihood has one")


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
    values = np.asarray(prior_precision)
    if not ((values > 0) & np.isfinite(values)).all():
        raise ValueError(f"prior_precision={prior_precision}: expected positive numbers")


def check_maximum(
    bounded_layers: Any, noise: Any, layers: Sequence[str], *, by_layer: bool
) -> None:
    """Refuse an evidence without a maximum; with several layers, warn which keep their prior."""
    names = [
        name
        for name, bounded in zip(layers, np.asarray(bounded_layers), strict=True)
        if not bounded
    ]
    if names:
        message = (
            f"the evidence has no maximum in the prior precision of {', '.join(map(repr, names))}: "
            "there is no curvature, or all parameters are zero"
        )
        if not by_layer or len(names) == len(layers):
            raise ValueError(message)
        warnings.warn(f"{message}; it stays as it is", stacklevel=3)
    if not (np.isfinite(noise) and noise > 0):
        raise ValueError(f"the evidence has no maximum in the noise: the residuals give {noise}")


# ---------------- the precision $P = m F + \operatorname{diag}(\delta)$


@dataclasses.dataclass(frozen=True)
class PosteriorPrecision:
    r"""The blocks of the precision for one prior and one noise.

    Attributes:
        bases: The curvature of the mean loss; eigenvalues are read as decomposed, with negative
            ones as 0.
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
        """Eigenvalues of $m F$ for each layer, as many as its parameters have elements."""
        return [[x for x in self._of_block(block) if x is not None] for block in self.blocks]

    def inverse_eigenvalues(self, name: str) -> tuple[Array | None, Array | None]:
        """Eigenvalues of a layer's block of $P^{-1}$, and of a separate bias's block."""
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
        solutions = precondition_many(many, self.bases, self._damping, power)
        return {path: self._scaled(x, power) for path, x in solutions.items()}

    def solved_by_layer(
        self, many: Mapping[str, Float[Array, "many ..."]], layers: tuple[Layer, ...], power: float
    ) -> Iterator[tuple[Layer, list[Array]]]:
        """Like :meth:`solved` for some layers, one at a time; see ``precondition_blocks``."""
        bases = dataclasses.replace(self.bases, layers=layers)
        for layer, solutions in precondition_blocks(many, bases, self._damping, power):
            yield layer, [self._scaled(x, power) for x in solutions if x is not None]

    @property
    def _damping(self) -> dict[str, Array]:
        pairs = zip(self.blocks, self.prior, strict=True)
        return {block.layer.name: delta / self.scale for block, delta in pairs}

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
    """The bases with unclipped eigenvalues, except that negative ones become 0."""
    return dataclasses.replace(bases, max_condition=float("inf"), floor=0.0)


def squared_norms(blocks: list[OwnedBlock], leaves: Mapping[str, Any]) -> Float[Array, " layers"]:
    """Sums of squares of the parameters that each layer owns."""
    by_block = []
    for block in blocks:
        matrices = [matrix.read(leaves[matrix.path]) for matrix in block.parameters]
        wide = [x.astype(statistics_dtype(x.dtype)) for x in matrices]
        by_block.append(jnp.stack([jnp.square(x).sum() for x in wide]).sum())
    return jnp.stack(by_block)


# ---------------- the log marginal likelihood


class LogLikelihood(NamedTuple):
    """Everything that the evidence needs from the data; independent of prior and noise.

    Attributes:
        loss: The sum of all loss terms.
        terms: Number of loss terms.
        targets: For a Gaussian, how many numbers were observed; else 0.
    """

    loss: Float[Array, ""]
    terms: Float[Array, ""]
    targets: Float[Array, ""]

    def value(self, noise: Float[Array, ""]) -> Float[Array, ""]:
        r"""$\log p(\mathcal D \mid \theta)$; for a Gaussian with noise of this deviation."""
        constant = self.targets * (0.5 * math.log(2 * math.pi) + jnp.log(noise))
        return -self.loss / jnp.square(noise) - constant


def log_evidence(
    precision: PosteriorPrecision,
    norms: Float[Array, " layers"],
    data: LogLikelihood,
    noise: Float[Array, ""],
) -> Float[Array, ""]:
    r"""The log-likelihood minus half of $\log\det P - \log\det P_0 + \theta^\top P_0 \theta$."""
    penalty = precision.log_determinant_ratio() + precision.prior * norms
    return data.value(noise) - penalty.sum() / 2


# ---------------- the best prior precision and noise
#
# With the eigenvalues $\lambda$ of $m F$, the evidence is largest in $\delta$ where the effective
# number of parameters $\gamma(\delta) = \sum_i \lambda_i / (\lambda_i + \delta)$ equals
# $\delta \lVert\theta\rVert^2$. The first side falls and the second grows with $\delta$, so there
# is one such $\delta$, and bisection finds it.


STEPS = 64  # each halves the logarithm of the bracket, down to float64's last digits


def best_prior(
    precision: PosteriorPrecision, norms: Float[Array, " layers"], *, by_layer: bool
) -> Float[Array, " layers"]:
    """Maximize the evidence in one prior precision, or in that of each layer.

    If it has no maximum (see ``has_maximum``), the prior stays the same.
    """
    total, largest = _summed(by_layer), _largest(precision, norms, by_layer)
    norm = total(norms)
    sizes = [sum(x.size for x in layer_values) for layer_values in precision.eigenvalues()]
    number = total(jnp.asarray(sizes, norms.dtype))
    # A single eigenvalue gives the lower end; that many infinite eigenvalues give the upper end.
    product = largest * norm
    low = 2 * largest / (product + jnp.sqrt(product * (product + 4)))

    def slope(prior: Array) -> Array:
        fitted = dataclasses.replace(precision, prior=prior).effective_parameters()
        return total(fitted) - prior * norm

    maximum = _bisected(slope, low, number / norm)
    return jnp.where((norm > 0) & (largest > 0), maximum, precision.prior)


def has_maximum(
    precision: PosteriorPrecision, norms: Float[Array, " layers"], *, by_layer: bool
) -> Bool[Array, " layers"]:
    """Whether the evidence has a maximum: there is curvature, and not all parameters are zero."""
    return (_summed(by_layer)(norms) > 0) & (_largest(precision, norms, by_layer) > 0)


def best_prior_and_noise(
    precision: PosteriorPrecision,
    norms: Float[Array, " layers"],
    data: LogLikelihood,
    *,
    by_layer: bool,
) -> tuple[Float[Array, " layers"], Float[Array, ""]]:
    r"""Maximize in the prior precision, and find the noise $\sigma$ that makes it stationary.

    That is where twice the loss equals $\sigma^2$ times the number of targets minus $\gamma$.
    ``precision`` must be the one for a noise of one.
    """
    total = _summed(by_layer)

    def at(variance: Array) -> PosteriorPrecision:
        noisy = dataclasses.replace(precision, scale=precision.scale / variance)
        return dataclasses.replace(noisy, prior=best_prior(noisy, norms, by_layer=by_layer))

    def slope(variance: Array) -> Array:
        fitted = at(variance).effective_parameters().sum()
        return 2 * data.loss / variance - data.targets + fitted

    # gamma <= trace / (sigma^2 delta); where gamma equals delta |theta|^2 it is therefore at most
    # sqrt(trace |theta|^2) / sigma. These bound the variance from above.
    values = precision.eigenvalues()
    traces = jnp.stack(
        [jnp.asarray(sum(x.sum() for x in layer_values), norms.dtype) for layer_values in values]
    )
    both = jnp.sqrt(total(traces) * total(norms))
    root = both.sum() if by_layer else both[0]
    fixed_bounds = jnp.where(
        has_maximum(precision, norms, by_layer=by_layer), 0, traces / precision.prior
    )
    product = 4 * (2 * data.loss + fixed_bounds.sum()) * data.targets
    most = (root + jnp.sqrt(root**2 + product)) / (2 * data.targets)
    variance = _bisected(slope, 2 * data.loss / data.targets, jnp.square(most))
    return at(variance).prior, jnp.sqrt(variance)


def _summed(by_layer: bool) -> Callable[[Array], Array]:
    """A sum over all layers, repeated for each layer; by layer, the identity."""
    return lambda x: x if by_layer else jnp.broadcast_to(x.sum(), x.shape)


def _largest(precision: PosteriorPrecision, norms: Array, by_layer: bool) -> Array:
    """The largest eigenvalue of each layer, or of all layers."""
    values = precision.eigenvalues()
    most = [
        jnp.stack([x.max().astype(norms.dtype) for x in layer_values]).max()
        for layer_values in values
    ]
    layer_values = jnp.stack(most)
    return layer_values if by_layer else jnp.broadcast_to(layer_values.max(), layer_values.shape)


def _bisected(falling: Callable[[Any], Any], low: Array, high: Array) -> Array:
    """The zero of a falling function between two positive numbers, by geometric bisection."""

    def step(_: ArrayLike, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = jnp.sqrt(low) * jnp.sqrt(high)
        is_above = falling(middle) > 0
        return jnp.where(is_above, middle, low), jnp.where(is_above, high, middle)

    low, high = jax.lax.fori_loop(0, STEPS, step, (low, jnp.maximum(low, high)))
    return jnp.sqrt(low) * jnp.sqrt(high)
