"""The outer eigenvalues of an operator by Lanczos, with error bounds."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from jaxkfac._errors import at_least_one, instance_of, one_of
from jaxkfac.curvature.operators._operator import (
    Operator,
    coarsest_rounding,
    flatten,
    full_precision,
    length,
    load,
)
from jaxkfac.interception import fast_convolutions

# ---------------- the check of symmetry


@jax.jit
def _products(operator: Operator, vectors: Array) -> Array:
    return jax.lax.map(fast_convolutions(flatten(operator).matvec), vectors)


def asymmetry_of(operator: Operator, key: Key[Array, ""]) -> Array:
    r"""$|u^\top A v - v^\top A u|$ for random $u, v$, relative to the lengths of the products.

    Raises:
        ValueError: it exceeds a third of the digits of the operator's coarsest dtype, or is not
            finite. Inside ``jit``, where it has no value yet, nothing is raised.
    """
    flat = flatten(operator)
    vectors = jax.random.normal(key, (2, flat.size), flat.dtype)
    (u, v), (au, av) = vectors, _products(operator, vectors)
    dot = functools.partial(jnp.vdot, precision="highest")
    uav, vau = dot(u, av), dot(v, au)
    lengths = length(au) + length(av)
    asymmetry = jnp.abs(uav - vau) / jnp.where(lengths == 0, jnp.ones((), flat.dtype), lengths)
    if isinstance(asymmetry, Tracer):
        return asymmetry
    # Rounding errors in A v are random, so u'A v shows their length whatever the dimension. A
    # softmax that is nearly certain loses digits in p (v - p'v): 8e-4 was seen in float32. An
    # operator that is not symmetric gives numbers of order one.
    if not float(asymmetry) <= coarsest_rounding(operator) ** (1 / 3):
        raise ValueError(
            "Lanczos needs a symmetric operator with finite products; for random u and v "
            f"<u, A v> = {float(uav):.6g} and <v, A u> = {float(vau):.6g}, with "
            f"|A u| + |A v| = {float(lengths):.6g}. Pass the symmetric part, or "
            "check_symmetric=False if this is rounding"
        )
    return asymmetry


# ---------------- Lanczos tridiagonalization that survives breakdown


class Tridiagonal(NamedTuple):
    r"""The eigendecomposition of $T = Q^\top A Q$ on one Krylov basis.

    Attributes:
        values: Ritz values, ascending, ``(num_steps,)``.
        weights: Squared first components of the eigenvectors of $T$: the quadrature weights
            of the starting vector, which sum to 1.
        vectors: Eigenvectors of $T$ in columns.
        basis: $Q^\top$, orthonormal rows ``(num_steps, n)``.
        residual: Length $\beta$ of the residual, the part of $A Q$ outside the Krylov space.
    """

    values: Float[Array, " k"]
    weights: Float[Array, " k"]
    vectors: Float[Array, "k k"]
    basis: Float[Array, "k n"]
    residual: Float[Array, ""]


# In rounding units of the operator. With 1, the direction that remains after reorthogonalization is
# mostly rounding itself, and in float32 its inner products with the basis reached 1e-5.
_NOISE = 16


def rounding(values: Float[Array, " k"]) -> Float[Array, ""]:
    """A bound on how far noise and rounding may have moved Ritz values, in their units."""
    steps = values.shape[-1]
    units = _NOISE * steps**0.5 + 10 * steps
    return units * jnp.finfo(values.dtype).eps * jnp.abs(values).max()


def tridiagonalise(
    matvec: Callable[[Array], Array], start: Float[Array, " n"], num_steps: int, key: Key[Array, ""]
) -> Tridiagonal:
    r"""Lanczos with full reorthogonalization, by ``matfree``.

    If the Krylov space of ``start`` is exhausted before ``num_steps`` (an operator of low rank,
    with repeated eigenvalues, or zero), the recurrence has no direction left to normalize, and
    divides zero or rounding noise by its length. Textbooks restart from a random vector
    orthogonal to the basis. Here a random vector, as long as a few rounding errors, is added to
    every product. It is harmless while a direction remains. When none remains it is the restart,
    because reorthogonalization removes all but the new direction. So repeated
    eigenvalues are found with their multiplicities, and the values are those of an operator
    that differs by :func:`rounding` at most.

    Args:
        matvec: The product; linear and symmetric.
        start: The starting vector, of any length but 0.
        num_steps: $k$, at most the dimension.
        key: For the restarts.

    Memory:
        The basis, ``num_steps * n`` elements, up to three times.
    """
    decomp = load("matfree.decomp")
    noise_length = _NOISE * jnp.finfo(start.dtype).eps
    unit = start / jnp.linalg.norm(start)
    scale = length(matvec(unit))
    # In units in which the operator is of order one, so that it cannot underflow.
    divisor = jnp.where((scale > 0) & jnp.isfinite(scale), scale, jnp.ones((), scale.dtype))
    probe = jax.random.normal(key, start.shape, start.dtype)

    def perturbed(vector: Array) -> Array:
        # The algorithm exposes no step number; the vector, new at each step, seeds the noise.
        seed = jax.lax.bitcast_convert_type(jnp.vdot(probe, vector).astype(jnp.float32), jnp.uint32)
        noise = jax.random.normal(jax.random.fold_in(key, seed), vector.shape, vector.dtype)
        return matvec(vector) / divisor + noise_length * noise / jnp.linalg.norm(noise)

    # Nothing here is differentiated, and the custom rule would store every product's residuals.
    lanczos = decomp.tridiag_sym(num_steps, reortho="full", custom_vjp=False)
    with full_precision():
        basis, matrix, residual, _ = lanczos(perturbed, unit)
    values, vectors = jnp.linalg.eigh(matrix)
    size = jnp.where(scale == 0, scale, divisor)  # a zero operator has eigenvalues of exactly 0
    return Tridiagonal(
        values * size,
        jnp.square(vectors[0]),
        vectors,
        basis,
        jnp.linalg.norm(residual) * size,
    )


# ---------------- outer eigenvalues


PyTree = Any
Which = Literal["magnitude", "largest", "smallest"]


class OperatorSpectrum(NamedTuple):
    r"""The result of :func:`jaxkfac.spectrum`.

    Attributes:
        eigenvalues: Ritz values, ``(num_eigenvalues,)``, in the order of ``which``.
        error_bounds: An eigenvalue of the operator lies within this distance of each value.
        vectors: A tree like ``operator.like`` with a leading axis of ``num_eigenvalues``,
            unit vectors; ``None`` unless requested.
        asymmetry: $|u^\top A v - v^\top A u|$ for random $u, v$, relative to the lengths of
            the products; NaN without ``check_symmetric``.
    """

    eigenvalues: Float[Array, " k"]
    error_bounds: Float[Array, " k"]
    vectors: Any
    asymmetry: Float[Array, ""]


def spectrum(
    operator: Operator,
    num_eigenvalues: int = 20,
    *,
    key: Key[Array, ""],
    num_steps: int | None = None,
    which: Which = "magnitude",
    vectors: bool = False,
    check_symmetric: bool = True,
) -> OperatorSpectrum:
    r"""Compute the outer eigenvalues of a symmetric operator by Lanczos.

    After $k$ steps from a random vector, $A Q = Q T + \beta q e_k^\top$. For an eigenpair
    $T s = \theta s$ the residual of $Qs$ has length $\beta |s_k|$, so an eigenvalue of $A$ lies
    within $\beta |s_k|$ of $\theta$. The bounds include the rounding of $k$ products.

    Args:
        operator: A symmetric operator, definite or not.
        num_eigenvalues: How many to return, limited to the dimension.
        key: For the starting vector.
        num_steps: $k$; by default four times ``num_eigenvalues`` plus 20, limited to the
            dimension, at which every eigenvalue is exact to rounding. Large bounds call for
            more steps.
        which: ``"magnitude"``: largest absolute value first; ``"largest"``: descending;
            ``"smallest"``: ascending.
        vectors: Whether to return the eigenvectors.
        check_symmetric: Whether to compare $u^\top A v$ with $v^\top A u$ first, at a cost of two
            products. Lanczos on an operator that is not symmetric gives plausible nonsense.

    Returns:
        An :class:`OperatorSpectrum`.

    Raises:
        ImportError: ``matfree`` is not installed.
        ValueError: the operator is not symmetric to a third of the digits of its coarsest dtype, or
            its products are not finite. Inside ``jit``, where values are not known, nothing
            is raised; inspect ``asymmetry``.

    Memory:
        ``num_steps`` vectors in at least float32, up to three times, besides the memory of the
        products.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> matrix = jnp.diag(jnp.arange(1.0, 6.0))
        >>> operator = jk.operators.from_function(jnp.matmul, matrix, jnp.zeros(5))
        >>> found = jk.spectrum(operator, 2, key=jax.random.key(0))
        >>> print(found.eigenvalues.round(3), bool((found.error_bounds < 1e-4).all()))
        [5. 4.] True

    References:
        Cornelius Lanczos, "An Iteration Method for the Solution of the Eigenvalue Problem of
        Linear Differential and Integral Operators", 1950. Beresford Parlett, "The Symmetric
        Eigenvalue Problem", 1980.
    """
    instance_of("operator", operator, Operator, "as jk.operators.ggn(objective, params, batch)")
    one_of("which", which, get_args(Which))
    at_least_one(num_eigenvalues=num_eigenvalues)
    if num_steps is not None and num_steps < num_eigenvalues:
        raise ValueError(
            f"num_steps={num_steps} gives as many eigenvalues, and num_eigenvalues is "
            f"{num_eigenvalues}"
        )
    flat = flatten(operator)
    steps = min(num_steps or 4 * num_eigenvalues + 20, flat.size)
    count = min(num_eigenvalues, steps)
    symmetry_key, start_key, restart_key = jax.random.split(key, 3)
    asymmetry = jnp.full((), jnp.nan, flat.dtype)
    if check_symmetric:
        asymmetry = asymmetry_of(operator, symmetry_key)
    start = jax.random.normal(start_key, (flat.size,), flat.dtype)
    krylov = _tridiagonalise(operator, start, restart_key, steps=steps)
    order = {
        "magnitude": jnp.argsort(-jnp.abs(krylov.values)),
        "largest": jnp.argsort(-krylov.values),
        "smallest": jnp.argsort(krylov.values),
    }[which][:count]
    bounds = krylov.residual * jnp.abs(krylov.vectors[-1]) + rounding(krylov.values)
    trees = None
    if vectors:
        with full_precision():
            trees = jax.vmap(flat.unflatten)(krylov.vectors[:, order].T @ krylov.basis)
    return OperatorSpectrum(krylov.values[order], bounds[order], trees, asymmetry)


# Compiled once for operators of one kind and shape, for example over a training run.
@functools.partial(jax.jit, static_argnames="steps")
def _tridiagonalise(operator: Operator, start: Array, key: Array, *, steps: int) -> Tridiagonal:
    return tridiagonalise(flatten(operator).matvec, start, steps, key)
