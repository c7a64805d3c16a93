"""Stochastic Lanczos quadrature: traces of functions of an operator, and its density."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxkfac._checks import at_least_one
from jaxkfac.curvature.operators._estimate import Estimate, check_samples, monte_carlo
from jaxkfac.curvature.operators._extras import load
from jaxkfac.curvature.operators._flat import flatten
from jaxkfac.curvature.operators._lanczos import rounding, tridiagonalise
from jaxkfac.curvature.operators._operator import Operator, check_number
from jaxkfac.curvature.operators._symmetry import asymmetry_of

_SYMMETRY = 0x5359  # folded into the caller's key for the two vectors of the check


class SpectralDensity(NamedTuple):
    """What :func:`spectral_density` returns.

    Attributes:
        grid: Eigenvalues at which the density is given, ``(num_points,)``.
        density: Share of the eigenvalues per unit of ``grid``; its integral is 1.
        standard_error: Of each point, from the spread over the vectors.
        nodes: Ritz values, ``(num_samples, num_steps)``.
        weights: The share each stands for in its sample, rows that sum to 1.
        sigma: Width of the Gaussians.
    """

    grid: Float[Array, " p"]
    density: Float[Array, " p"]
    standard_error: Float[Array, " p"]
    nodes: Float[Array, "s k"]
    weights: Float[Array, "s k"]
    sigma: Float[Array, ""]


def spectral_density(
    operator: Operator,
    *,
    key: Key[Array, ""],
    num_steps: int = 64,
    num_samples: int = 8,
    num_points: int = 512,
    grid: Float[Array, " p"] | None = None,
    sigma: Any = None,
    check_symmetric: bool = True,
) -> SpectralDensity:
    r"""Estimate how the eigenvalues are distributed.

    For each random vector $v$ the Ritz values $\theta_i$ and weights $w_i$ of Lanczos are a
    Gaussian quadrature of $v^\top f(A) v / n$, exact for polynomials below degree $2k$. With a
    Gaussian for $f$, averaged over $v$,

    $$ \rho(x) = \frac1m \sum_v \sum_i w_i\, \mathcal N(x \mid \theta_i, \sigma^2) . $$

    Args:
        operator: A symmetric operator, definite or not.
        key: For the vectors.
        num_steps: $k$, at most the dimension is taken.
        num_samples: $m \ge 2$.
        num_points: Points of the default grid, which spans the Ritz values and four widths.
        grid: Where to evaluate, in the operator's units.
        sigma: $\sigma > 0$; by default a hundredth of the Ritz values' range, and at least
            a thousandth of the largest of them.
        check_symmetric: Whether to compare $u^\top A v$ with $v^\top A u$ first, two products.
            Lanczos on an operator that is not symmetric gives plausible nonsense.

    Returns:
        A :class:`SpectralDensity`. Times ``operator.size`` it is a density of counts.

    Raises:
        ImportError: ``matfree`` is not installed.
        ValueError: options out of range, or the operator is not symmetric to a third of the
            digits of its coarsest dtype (inside ``jit`` that is not seen).

    Memory:
        ``num_steps`` vectors in at least float32, up to three times; samples run one by one.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> matrix = jnp.diag(jnp.arange(1.0, 6.0))
        >>> operator = jk.operators.from_function(jnp.matmul, matrix, jnp.zeros(5))
        >>> found = jk.operators.spectral_density(operator, key=jax.random.key(0))
        >>> print(jnp.trapezoid(found.density, found.grid).round(3))
        1.0

    References:
        Shashanka Ubaru, Jie Chen and Yousef Saad, "Fast Estimation of tr(f(A)) via Stochastic
        Lanczos Quadrature", 2017. Behrooz Ghorbani, Shankar Krishnan and Ying Xiao, "An
        Investigation into Neural Net Optimization via Hessian Eigenvalue Density", 2019.
    """
    check_samples(num_samples)
    at_least_one(num_steps=num_steps, num_points=num_points)
    if sigma is not None:
        check_number("sigma", sigma, above_zero=True)
    if check_symmetric:
        asymmetry_of(operator, jax.random.fold_in(key, _SYMMETRY))
    nodes, weights = _quadrature(operator, key, num_steps=num_steps, num_samples=num_samples)
    low, high = nodes.min(), nodes.max()
    if sigma is None:
        width = jnp.maximum((high - low) / 100, jnp.abs(nodes).max() / 1000)
        width = jnp.where(width > 0, width, 1)
    else:
        width = jnp.asarray(sigma, nodes.dtype)
    if grid is None:
        grid = jnp.linspace(low - 4 * width, high + 4 * width, num_points)
    distance = (grid[:, None, None] - nodes) / width
    bells = jnp.exp(-0.5 * jnp.square(distance)) / (2 * jnp.pi) ** 0.5
    each = (bells * weights).sum(-1)  # per width: per unit, its square may overflow
    error = each.std(-1, ddof=1) / num_samples**0.5
    return SpectralDensity(grid, each.mean(-1) / width, error / width, nodes, weights, width)


@functools.partial(jax.jit, static_argnames=("num_steps", "num_samples"))
def _quadrature(
    operator: Operator, key: Array, *, num_steps: int, num_samples: int
) -> tuple[Array, Array]:
    """Nodes and weights of each random vector."""
    flat, steps = flatten(operator), min(num_steps, operator.size)
    start_key, restart_key = jax.random.split(key)
    like = jnp.zeros(flat.size, flat.dtype)
    sampler = load("matfree.stochtrace").sampler_signs(like, num=num_samples)

    def quadrature(vector: Array) -> tuple[Array, Array]:
        found = tridiagonalise(flat.matvec, vector, steps, restart_key)
        return found.values, found.weights

    return jax.lax.map(quadrature, sampler(start_key))


def log_determinant(
    operator: Operator,
    *,
    damping: Any,
    key: Key[Array, ""],
    num_steps: int = 64,
    num_samples: int = 32,
    check_symmetric: bool = True,
) -> Estimate:
    r"""Estimate $\log\det(A + \delta) = \operatorname{tr} \log(A + \delta)$ by quadrature.

    Args:
        operator: A positive semi-definite operator. Ritz values within rounding of 0 count
            as 0.
        damping: $\delta \ge 0$, in the operator's units; may be traced. 0 is right only for a
            positive definite operator: with an eigenvalue of 0 the answer is $-\infty$, with
            a negative one it is not a number.
        key: For the vectors.
        num_steps: Lanczos steps a vector, at most the dimension are taken. Too few
            *bias* the estimate, which the standard error does not show: raise them until it
            stays. A condition number $\kappa$ of $A + \delta$ wants about $\sqrt\kappa$.
        num_samples: Vectors, at least 2.
        check_symmetric: Whether to compare $u^\top A v$ with $v^\top A u$ first, two products.
            Lanczos on an operator that is not symmetric gives plausible nonsense.

    Returns:
        An :class:`Estimate`, in natural logarithms.

    Raises:
        ImportError: ``matfree`` is not installed.
        ValueError: options out of range, or the operator is not symmetric to a third of the
            digits of its coarsest dtype (inside ``jit`` that is not seen).

    Memory:
        ``num_steps`` vectors in at least float32, up to three times; samples run one by one.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> matrix = jnp.diag(jnp.arange(5.0))
        >>> operator = jk.operators.from_function(jnp.matmul, matrix, jnp.zeros(5))
        >>> found = jk.operators.log_determinant(operator, damping=1.0, key=jax.random.key(0))
        >>> print(found.value.round(3), jnp.log(120.0).round(3))
        4.787 4.787

    References:
        Shashanka Ubaru, Jie Chen and Yousef Saad, "Fast Estimation of tr(f(A)) via Stochastic
        Lanczos Quadrature", 2017.
    """
    check_samples(num_samples)
    at_least_one(num_steps=num_steps)
    check_number("damping", damping)
    if check_symmetric:
        asymmetry_of(operator, jax.random.fold_in(key, _SYMMETRY))
    return _log_determinant(operator, damping, key, num_steps=num_steps, num_samples=num_samples)


@functools.partial(jax.jit, static_argnames=("num_steps", "num_samples"))
def _log_determinant(
    operator: Operator, damping: Any, key: Array, *, num_steps: int, num_samples: int
) -> Estimate:
    flat = flatten(operator)
    start_key, restart_key = jax.random.split(key)
    delta = jnp.asarray(damping, flat.dtype)

    def integrand(matvec: Any, vector: Array) -> Array:
        found = tridiagonalise(matvec, vector, min(num_steps, flat.size), restart_key)
        noise = rounding(found.values)
        values = jnp.where(jnp.abs(found.values) <= noise, 0, found.values)
        # a direction without weight has no part in the sum, be its logarithm infinite
        terms = jnp.where(found.weights > 0, found.weights * jnp.log(values + delta), 0)
        return flat.size * terms.sum()

    return monte_carlo(integrand, flat, start_key, num_samples)
