"""What a Laplace posterior refuses."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxkfac._checks import scalar
from jaxkfac.curvature import Eigenbases
from jaxkfac.linalg import statistics_dtype


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
