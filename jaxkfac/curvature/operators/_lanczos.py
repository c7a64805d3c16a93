"""Lanczos tridiagonalisation that survives breakdown."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxkfac.curvature.operators._extras import load
from jaxkfac.curvature.operators._flat import length
from jaxkfac.curvature.operators._precision import full_precision


class Tridiagonal(NamedTuple):
    r"""The eigendecomposition of $T = Q^\top A Q$ on one Krylov basis.

    Attributes:
        values: Ritz values, ascending, ``(num_steps,)``.
        weights: Squared first components of the eigenvectors of $T$: the quadrature weights
            of the starting vector, which sum to 1.
        vectors: Eigenvectors of $T$ in columns.
        basis: $Q^\top$, orthonormal rows ``(num_steps, n)``.
        residual: Length $\beta$ of what is left of the Krylov space.
    """

    values: Float[Array, " k"]
    weights: Float[Array, " k"]
    vectors: Float[Array, "k k"]
    basis: Float[Array, "k n"]
    residual: Float[Array, ""]


# In rounding units of the operator. With 1 the direction left over after reorthogonalisation is
# itself mostly rounding, and in float32 its inner products with the basis reached 1e-5.
_NOISE = 16


def rounding(values: Float[Array, " k"]) -> Float[Array, ""]:
    """How far noise and rounding may have moved Ritz values: a bound in their units."""
    steps = values.shape[-1]
    units = _NOISE * steps**0.5 + 10 * steps
    return units * jnp.finfo(values.dtype).eps * jnp.abs(values).max()


def tridiagonalise(
    matvec: Callable[[Array], Array], start: Float[Array, " n"], num_steps: int, key: Key[Array, ""]
) -> Tridiagonal:
    r"""Lanczos with full reorthogonalisation, by ``matfree``.

    Where the Krylov space of ``start`` is exhausted before ``num_steps`` (an operator of low
    rank, repeated eigenvalues, zero) the recurrence has nothing left to normalise, and
    divides zero, or rounding noise, by its length. Textbooks restart from a random vector
    orthogonal to the basis. Here every product gets a random vector of the length of a
    few rounding errors added to it: harmless while there is something left, and the restart where
    there is not, since reorthogonalisation removes all but the new direction. Thus repeated
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
    # In units in which the operator is of order one, so that its size cannot underflow.
    divisor = jnp.where((scale > 0) & jnp.isfinite(scale), scale, jnp.ones((), scale.dtype))
    probe = jax.random.normal(key, start.shape, start.dtype)

    def perturbed(vector: Array) -> Array:
        # The algorithm shows no step number; the vector itself, new at each step, is the seed.
        seed = jax.lax.bitcast_convert_type(jnp.vdot(probe, vector).astype(jnp.float32), jnp.uint32)
        noise = jax.random.normal(jax.random.fold_in(key, seed), vector.shape, vector.dtype)
        return matvec(vector) / divisor + noise_length * noise / jnp.linalg.norm(noise)

    # Nothing here is differentiated, and the custom rule would hold every product's residuals.
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
