"""Lanczos tridiagonalisation that survives breakdown."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxkfac.curvature.operators._extras import load


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


def tridiagonalise(
    matvec: Callable[[Array], Array], start: Float[Array, " n"], num_steps: int, key: Key[Array, ""]
) -> Tridiagonal:
    r"""Lanczos with full reorthogonalisation, by ``matfree``.

    Where the Krylov space of ``start`` is exhausted before ``num_steps`` (an operator of low
    rank, repeated eigenvalues, zero) the recurrence has nothing left to normalise, and
    divides zero, or rounding noise, by its length. Textbooks restart from a random vector
    orthogonal to the basis. Here every product gets a random vector of the length of its
    rounding error added to it: harmless while there is something left, and the restart where
    there is not, since reorthogonalisation removes all but the new direction. Thus repeated
    eigenvalues are found with their multiplicities.

    Args:
        matvec: The product; linear and symmetric.
        start: The starting vector, of any length but 0.
        num_steps: $k$, at most the dimension.
        key: For the restarts.

    Memory:
        The basis, ``num_steps * n`` elements, up to three times.
    """
    decomp = load("matfree.decomp")
    epsilon = jnp.finfo(start.dtype).eps
    unit = start / jnp.linalg.norm(start)
    scale = jnp.linalg.norm(matvec(unit))
    # In units in which the operator is of order one, so that its size cannot underflow.
    divisor = jnp.where((scale > 0) & jnp.isfinite(scale), scale, jnp.ones((), scale.dtype))
    probe = jax.random.normal(key, start.shape, start.dtype)

    def perturbed(vector: Array) -> Array:
        # The algorithm shows no step number; the vector itself, new at each step, is the seed.
        seed = jax.lax.bitcast_convert_type(jnp.vdot(probe, vector).astype(jnp.float32), jnp.uint32)
        noise = jax.random.normal(jax.random.fold_in(key, seed), vector.shape, vector.dtype)
        return matvec(vector) / divisor + epsilon * noise / jnp.linalg.norm(noise)

    # Nothing here is differentiated, and the custom rule would hold every product's residuals.
    lanczos = decomp.tridiag_sym(num_steps, reortho="full", custom_vjp=False)
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
