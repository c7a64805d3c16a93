"""Stochastic estimates of traces, traces of functions, and the density of eigenvalues."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from jaxkfac._errors import at_least_one, one_of
from jaxkfac.curvature.operators._operator import (
    Flat,
    Operator,
    check_number,
    coarsest_rounding,
    flatten,
    full_precision,
    length,
    load,
)
from jaxkfac.curvature.operators._spectrum import asymmetry_of, rounding, tridiagonalise

# ---------------- means over random vectors


class Estimate(NamedTuple):
    """A mean over random vectors.

    Attributes:
        value: The estimate.
        standard_error: Its standard error, from the spread over the vectors; 0 if the value is
            exact. The terms of the two leave-one-out trace methods share vectors, so for them it is
            only an indication (measured, it was 0.6 to 0.75 of the true spread).
    """

    value: Float[Array, "*shape"]
    standard_error: Float[Array, "*shape"]


def check_samples(num_samples: int) -> None:
    """Refuse fewer than two samples, which have no standard error."""
    if num_samples < 2:
        raise ValueError(
            f"num_samples={num_samples}: expected at least 2, the standard error is their spread"
        )


def monte_carlo(
    integrand: Callable[[Any, Array], Array], flat: Flat, key: Key[Array, ""], num_samples: int
) -> Estimate:
    """Mean and standard error of ``integrand(matvec, vector)`` over random signs.

    It uses one vector at a time, so that memory is that of one product.
    """
    stochtrace = load("matfree.stochtrace")
    sampler = stochtrace.sampler_signs(jnp.zeros(flat.size, flat.dtype), num=num_samples)

    def one(matvec: Callable[[Array], Array], vector: Array) -> Array:
        return jax.custom_batching.sequential_vmap(lambda v: integrand(matvec, v))(vector)

    estimate = stochtrace.estimator_monte_carlo_mean_and_sem(one, sampler)
    with full_precision():
        mean, error = estimate(flat.matvec, key)
    return unbiased(mean, error, num_samples)


def unbiased(mean: Array, error: Array, num_samples: int) -> Estimate:
    """Rescale the error to a spread over ``n - 1``; ``matfree`` divides by ``n``."""
    return Estimate(mean, error * (num_samples / (num_samples - 1)) ** 0.5)


# ---------------- the trace


TraceMethod = Literal["xtrace", "xnystrace", "hutchinson"]


def trace(
    operator: Operator,
    *,
    key: Key[Array, ""],
    num_samples: int = 32,
    method: TraceMethod = "xtrace",
) -> Estimate:
    r"""Estimate the trace from products with random vectors.

    XTrace computes the trace on the range of all products but one exactly, and estimates the
    remainder with the vector left out. It averages over the choice of that vector. If
    eigenvalues decay, its error falls much faster than the $1/\sqrt{m}$ of Hutchinson's
    estimator, and faster than that of Hutch++, of which it is a symmetric version.

    Args:
        operator: A symmetric operator.
        key: For the random vectors.
        num_samples: $m \ge 2$. XTrace takes $2m$ products, the others $m$.
        method: ``"xtrace"``; ``"xnystrace"``: the same idea for positive semi-definite operators,
            with half the products; ``"hutchinson"``: the mean of $v^\top A v$ over random signs,
            for when memory allows only one vector.

    Returns:
        An :class:`Estimate`. If the products of the first two methods would determine the
        full matrix ($2m \ge$ the dimension), the value is exact and the error 0. Otherwise
        ``"xnystrace"``, which would drop a negative part, returns NaN if its products show that the
        operator is not semi-definite.

    Raises:
        ImportError: ``matfree`` is not installed.
        ValueError: an unknown method or fewer than two samples.

    Memory:
        ``3 * num_samples`` vectors in at least float32; one for ``"hutchinson"``. Products
        run one at a time.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> matrix = jnp.diag(jnp.arange(1.0, 6.0))
        >>> operator = jk.operators.from_function(jnp.matmul, matrix, jnp.zeros(5))
        >>> found = jk.operators.trace(operator, key=jax.random.key(0))
        >>> print(found.value, found.standard_error)
        15.0 0.0

    References:
        Ethan Epperly, Joel Tropp and Robert Webber, "XTrace: Making the Most of Every Sample in
        Stochastic Trace Estimation", 2024.
    """
    one_of("method", method, get_args(TraceMethod))
    check_samples(num_samples)
    # XTrace would take as many products as the matrix has columns, which give the trace exactly.
    # XNysTrace, with half of them, changes over at the same size.
    if method != "hutchinson" and 2 * num_samples >= operator.size:
        exact = jnp.trace(operator.to_dense())
        return Estimate(exact, jnp.zeros_like(exact))
    return _estimate(operator, key, method=method, num_samples=num_samples)


@functools.partial(jax.jit, static_argnames=("method", "num_samples"))
def _estimate(operator: Operator, key: Array, *, method: str, num_samples: int) -> Estimate:
    flat = flatten(operator)
    if method != "hutchinson":
        return _leave_one_out(method, flat, key, num_samples, coarsest_rounding(operator))
    return monte_carlo(
        lambda matvec, vector: jnp.vdot(vector, matvec(vector)), flat, key, num_samples
    )


# matfree takes products for dependent if what is new in one is below the rounding unit, an absolute
# bound. At this length products are thousands of times longer than the bound, and their rounding
# errors a thousand times shorter.
_LENGTH = 1e-3


def _leave_one_out(
    method: str, flat: Flat, key: Array, num_samples: int, coarsest: float
) -> Estimate:
    stochtrace = load("matfree.stochtrace")
    build = {
        "xtrace": stochtrace.leave_one_out_xtrace,
        "xnystrace": stochtrace.leave_one_out_xnystrace,
    }
    like = jnp.zeros(flat.size, flat.dtype)
    sampler = stochtrace.sampler_sphere(like, num=num_samples)
    size = length(flat.matvec(sampler(key)[0]))
    scale = jnp.where(size == 0, jnp.ones((), flat.dtype), size / _LENGTH)

    @jax.custom_batching.custom_vmap
    def matvec(vector: Array) -> Array:
        return flat.matvec(vector) / scale

    @matvec.def_vmap
    def _(_, __, vectors: Array) -> tuple[Array, bool]:
        products = jax.lax.map(matvec, vectors)
        if method == "xnystrace":
            gram = jnp.matmul(vectors, products.T, precision="highest")
            products = jnp.where(_is_semidefinite(gram, coarsest), products, jnp.nan)
        return products, True

    estimate = stochtrace.estimator_leave_one_out_mean_and_sem(build[method](), sampler)
    with full_precision():
        mean, error = estimate(matvec, key)
    estimated = unbiased(mean * scale, error * scale, num_samples)
    # XNysTrace divides by the eigenvalues it has found, which is 0 / 0 for a zero operator.
    return jax.tree.map(lambda x: jnp.where(size == 0, jnp.zeros_like(x), x), estimated)


def _is_semidefinite(gram: Array, coarsest: float) -> Array:
    """Whether the Gram matrix of vectors and products allows a semi-definite operator."""
    values = jnp.linalg.eigvalsh((gram + gram.T) / 2)
    return values[0] >= -(coarsest**0.5) * jnp.abs(values).max()


# ---------------- stochastic Lanczos quadrature


_SYMMETRY = 0x5359  # folded into the caller's key for the two vectors of the check


class SpectralDensity(NamedTuple):
    """The result of :func:`spectral_density`.

    Attributes:
        grid: Eigenvalues at which the density is given, ``(num_points,)``.
        density: Share of the eigenvalues per unit of ``grid``; its integral is 1.
        standard_error: Standard error at each point, from the spread over the vectors.
        nodes: Ritz values, ``(num_samples, num_steps)``.
        weights: Each node's weight in its sample; rows sum to 1.
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
    r"""Estimate the distribution of the eigenvalues.

    For each random vector $v$ the Ritz values $\theta_i$ and weights $w_i$ of Lanczos are a
    Gaussian quadrature of $v^\top f(A) v / n$, exact for polynomials below degree $2k$. With a
    Gaussian for $f$, averaged over $v$,

    $$ \rho(x) = \frac1m \sum_v \sum_i w_i\, \mathcal N(x \mid \theta_i, \sigma^2) . $$

    Args:
        operator: A symmetric operator, definite or not.
        key: For the random vectors.
        num_steps: $k$, limited to the dimension.
        num_samples: $m \ge 2$.
        num_points: Points of the default grid, which spans the Ritz values and four widths.
        grid: Where to evaluate, in the operator's units.
        sigma: $\sigma > 0$; by default a hundredth of the Ritz values' range, and at least
            a thousandth of the largest of them.
        check_symmetric: Whether to compare $u^\top A v$ with $v^\top A u$ first, at a cost of two
            products. Lanczos on an operator that is not symmetric gives plausible nonsense.

    Returns:
        A :class:`SpectralDensity`. Multiplied by ``operator.size`` it is a density of counts.

    Raises:
        ImportError: ``matfree`` is not installed.
        ValueError: options out of range, or the operator is not symmetric to a third of the
            digits of its coarsest dtype (inside ``jit`` this is not checked).

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
    each_sample = (bells * weights).sum(-1)  # per width; per unit its square may overflow
    error = each_sample.std(-1, ddof=1) / num_samples**0.5
    return SpectralDensity(grid, each_sample.mean(-1) / width, error / width, nodes, weights, width)


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
        krylov = tridiagonalise(flat.matvec, vector, steps, restart_key)
        return krylov.values, krylov.weights

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
        damping: $\delta \ge 0$, in the operator's units; may be traced. 0 is correct only for a
            positive definite operator: with an eigenvalue of 0 the answer is $-\infty$, with
            a negative one it is NaN.
        key: For the random vectors.
        num_steps: Lanczos steps for each vector, limited to the dimension. Too few steps *bias* the
            estimate, which the standard error does not show; raise them until the estimate stays
            the same. A condition number $\kappa$ of $A + \delta$ needs about $\sqrt\kappa$ steps.
        num_samples: Vectors, at least 2.
        check_symmetric: Whether to compare $u^\top A v$ with $v^\top A u$ first, at a cost of two
            products. Lanczos on an operator that is not symmetric gives plausible nonsense.

    Returns:
        An :class:`Estimate`, in natural logarithms.

    Raises:
        ImportError: ``matfree`` is not installed.
        ValueError: options out of range, or the operator is not symmetric to a third of the
            digits of its coarsest dtype (inside ``jit`` this is not checked).

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
    operator: Operator, damping: ArrayLike, key: Array, *, num_steps: int, num_samples: int
) -> Estimate:
    flat = flatten(operator)
    start_key, restart_key = jax.random.split(key)
    delta = jnp.asarray(damping, flat.dtype)

    def integrand(matvec: Callable[[Array], Array], vector: Array) -> Array:
        krylov = tridiagonalise(matvec, vector, min(num_steps, flat.size), restart_key)
        noise = rounding(krylov.values)
        values = jnp.where(jnp.abs(krylov.values) <= noise, 0, krylov.values)
        # A direction without weight does not count, even if its logarithm is infinite.
        terms = jnp.where(krylov.weights > 0, krylov.weights * jnp.log(values + delta), 0)
        return flat.size * terms.sum()

    return monte_carlo(integrand, flat, start_key, num_samples)
