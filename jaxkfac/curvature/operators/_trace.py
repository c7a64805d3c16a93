"""Estimates of the trace."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxkfac._checks import one_of
from jaxkfac.curvature.operators._estimate import Estimate, check_samples, monte_carlo, unbiased
from jaxkfac.curvature.operators._extras import load
from jaxkfac.curvature.operators._flat import Flat, coarsest_rounding, flatten, length
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._precision import full_precision

TraceMethod = Literal["xtrace", "xnystrace", "hutchinson"]


def trace(
    operator: Operator,
    *,
    key: Key[Array, ""],
    num_samples: int = 32,
    method: TraceMethod = "xtrace",
) -> Estimate:
    r"""Estimate the trace from products with random vectors.

    XTrace splits the trace into that on the range of the products, which is exact, and a
    stochastic remainder, and averages over which vector plays which part. Where eigenvalues
    decay its error falls much faster than the $1/\sqrt{m}$ of Hutchinson's estimator, and
    faster than Hutch++'s, whose symmetrisation it is.

    Args:
        operator: A symmetric operator.
        key: For the vectors.
        num_samples: $m \ge 2$. XTrace takes $2m$ products, the others $m$.
        method: ``"xtrace"``; ``"xnystrace"``: the same idea for positive semi-definite
            operators with half the products; ``"hutchinson"``: the mean of $v^\top A v$ over
            random signs, when memory allows no more than one vector.

    Returns:
        An :class:`Estimate`. Where the products of the first two methods would make up the
        whole matrix ($2m \ge$ the dimension) the value is exact and the error 0.
        Elsewhere ``"xnystrace"``, which would drop a negative part, gives not a number where its
        products show that the operator is not semi-definite.

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


# matfree takes products for rank-deficient below one rounding unit, an absolute bound. With
# products of this length it lies a thousand units of rounding above noise, and below the rest.
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
    found = unbiased(mean * scale, error * scale, num_samples)
    # XNysTrace divides by the eigenvalues it has found
    return jax.tree.map(lambda x: jnp.where(size == 0, jnp.zeros_like(x), x), found)


def _is_semidefinite(gram: Array, coarsest: float) -> Array:
    """Whether the vectors' products with each other are those of a semi-definite operator."""
    values = jnp.linalg.eigvalsh((gram + gram.T) / 2)
    return values[0] >= -(coarsest**0.5) * jnp.abs(values).max()
