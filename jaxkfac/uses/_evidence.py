r"""The log marginal likelihood of a Laplace posterior, its data part apart from its prior part."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.uses._posterior_precision import PosteriorPrecision


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
