"""What a Gaussian over a model's outputs says of the targets, for each likelihood."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxkfac.factors import Bernoulli, Categorical, Gaussian, Head, kept_targets


class GaussianPrediction(NamedTuple):
    """A Gaussian over the targets of each loss term.

    Attributes:
        mean: The model's outputs.
        covariance: ``(N, ..., C, C)``, that of the outputs and the noise.
    """

    mean: Float[Array, "*outputs"]
    covariance: Float[Array, "*terms C C"]


class OutputDistribution(NamedTuple):
    """A Gaussian over the outputs of each loss term.

    Attributes:
        mean: The model's outputs.
        covariance: Theirs, without noise.
    """

    mean: Float[Array, "*terms C"]
    covariance: Float[Array, "*terms C C"]

    @property
    def variances(self) -> Float[Array, "*terms C"]:
        """The diagonal of the covariance."""
        return jnp.diagonal(self.covariance, axis1=-2, axis2=-1)

    @property
    def moderated(self) -> Float[Array, "*terms C"]:
        r"""$f / \sqrt{1 + \tfrac\pi8 v}$: logits that a probit's integral gives."""
        return self.mean / jnp.sqrt(1 + math.pi / 8 * self.variances)

    def samples(self, key: Key[Array, ""], number: int) -> Float[Array, "number *terms C"]:
        """Outputs drawn from it; a covariance may be singular."""
        values, vectors = jnp.linalg.eigh(self.covariance)
        root = vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :]
        noise = jax.random.normal(key, (number, *self.mean.shape), self.mean.dtype)
        exact = jax.lax.Precision.HIGHEST
        return self.mean + jnp.einsum("...ij,k...j->k...i", root, noise, precision=exact)


def bridge(outputs: OutputDistribution) -> Float[Array, "*terms C"]:
    r"""Class probabilities of the Dirichlet that the Laplace bridge maps the Gaussian to.

    Before, the Gaussian is conditioned on $\sum_c f_c = 0$, as in laplace-torch: a shift of all
    logits changes no probability.
    """
    mean, covariance = outputs
    rows, total = covariance.sum(-1), covariance.sum((-2, -1))[..., None]
    there = jnp.where(total > 0, total, jnp.ones_like(total))  # zero where all is certain
    mean = mean - rows * mean.sum(-1, keepdims=True) / there
    finfo = jnp.finfo(mean.dtype)
    least = finfo.eps * outputs.variances + finfo.tiny  # what rounding leaves of a difference
    variances = jnp.maximum(outputs.variances - rows * rows / there, least)
    classes = mean.shape[-1]
    # In logs, because confident logits overflow: alpha_c v_c = 1 - 2/C + e^f_c sum_d e^-f_d / C^2.
    inverse = jax.nn.logsumexp(-mean, axis=-1, keepdims=True) + mean - 2 * math.log(classes)
    constant = math.log(1 - 2 / classes) if classes > 2 else -math.inf
    return jax.nn.softmax(jnp.logaddexp(constant, inverse) - jnp.log(variances))


Rule = Callable[[OutputDistribution, Any, int], Float[Array, "*terms C"]]

PREDICTIVES: Mapping[type, Mapping[str, Rule]] = {
    Categorical: {
        "probit": lambda outputs, key, number: jax.nn.softmax(outputs.moderated),
        "bridge": lambda outputs, key, number: bridge(outputs),
        "mc": lambda outputs, key, number: jax.nn.softmax(outputs.samples(key, number)).mean(0),
    },
    Bernoulli: {
        "probit": lambda outputs, key, number: jax.nn.sigmoid(outputs.moderated),
        "mc": lambda outputs, key, number: jax.nn.sigmoid(outputs.samples(key, number)).mean(0),
    },
}


def rule_of(likelihood: Any, method: str) -> Rule:
    """How class probabilities come of outputs.

    Raises:
        ValueError: naming the methods that the likelihood has.
    """
    rules = PREDICTIVES.get(type(likelihood), {})
    if method not in rules:
        known = ", ".join(map(repr, rules))
        name = type(likelihood).__name__
        raise ValueError(
            f"method={method!r}: {name} has "
            + (f"{known}" if rules else "no predictive; take variance(inputs) and the model's own")
        )
    return rules[method]


def negative_log_predictive(
    head: Head, outputs: OutputDistribution, noise: Float[Array, ""]
) -> Float[Array, ""]:
    """Summed over the kept terms: by the probit's rule, or of a Gaussian exactly.

    Args:
        head: Outputs in their own shape, targets and mask.
        outputs: Their distribution, ``(N, terms, C)``.
        noise: Of a Gaussian.
    """
    if not isinstance(head.likelihood, Gaussian):
        return (
            head._replace(outputs=outputs.moderated.reshape(head.outputs.shape)).kept_terms().sum()
        )
    targets = kept_targets(head.targets, head.mask).reshape(outputs.mean.shape)
    residual = targets.astype(outputs.mean.dtype) - outputs.mean
    covariance = with_noise(outputs.covariance, noise)
    values, vectors = jnp.linalg.eigh(covariance)
    exact = jax.lax.Precision.HIGHEST
    rotated = jnp.einsum("...ij,...i->...j", vectors, residual, precision=exact)
    each = (jnp.square(rotated) / values + jnp.log(2 * math.pi * values)).sum(-1) / 2
    if head.mask is not None:
        each = jnp.where(head.mask.reshape(each.shape), each, 0)
    return each.sum()


def with_noise(
    covariance: Float[Array, "*terms C C"], noise: Float[Array, ""]
) -> Float[Array, "*terms C C"]:
    """The covariance of targets: that of outputs and the noise of each."""
    variance = jnp.square(noise).astype(covariance.dtype)
    return covariance + variance * jnp.eye(covariance.shape[-1], dtype=covariance.dtype)
