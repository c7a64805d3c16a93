"""Inverses of damped factors, by Cholesky in the graph."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.linalg._eigh import check_square, in_sequence
from jaxkfac.linalg._sums import alike, is_all_finite


def damped_inverse(
    matrix: Float[Array, "*stack n n"],
    damping: Float[Array, "*#stack"],
    *,
    after: Array | None = None,
) -> Float[Array, "*stack n n"]:
    r"""$(M + \delta I)^{-1}$ of a symmetric positive semi-definite matrix.

    Args:
        matrix: Float32 or float64; leading axes are a batch. One triangle is read, the other
            being the same.
        damping: $\delta$ of each matrix.
        after: A result that goes before, see :func:`jaxkfac.linalg.in_sequence`.

    Returns:
        The inverse; all NaN where the damped matrix is not positive definite, or not finite.

    Raises:
        ValueError: ``matrix`` is not square, or its dtype has no factorisation.

    Memory:
        About ``2 n**2`` elements beyond the result; on the CPU once for a whole batch.
    """
    check_square(matrix)
    n, dtype = matrix.shape[-1], matrix.dtype
    damping = jnp.broadcast_to(damping, matrix.shape[:-2]).astype(dtype)
    batch, shifts = matrix.reshape(-1, n, n), damping.reshape(-1)

    # As in `eigh_checked`: on the CPU one LAPACK call after the other.
    def in_turn(batch: Array, shifts: Array) -> Array:
        batch = in_sequence(batch, after)
        if len(batch) == 1:
            return _inverse(batch[0], shifts[0])[None]
        return jax.lax.map(lambda one: _inverse(*one), (batch, shifts))

    out = jax.lax.platform_dependent(batch, shifts, cpu=in_turn, default=jax.vmap(_inverse))
    return out.reshape(matrix.shape)


def diagonal(matrix: Float[Array, "*stack n n"]) -> Float[Array, "*stack n"]:
    """The diagonal, as a slice: on a CPU a gather compiles longer, and a mask writes a matrix."""
    size = matrix.shape[-1]
    return matrix.reshape(*matrix.shape[:-2], size * size)[..., :: size + 1]


def traces(matrices: Sequence[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
    """The traces ``(stack...)`` of each ``(stack..., n, n)``, by one sum of what can be joined."""
    rows = [diagonal(x).reshape(-1, x.shape[-1]) for x in matrices]
    found: dict[int, Array] = {}
    for places in alike(rows):
        width = max(rows[i].shape[1] for i in places)
        padded = [jnp.pad(rows[i], ((0, 0), (0, width - rows[i].shape[1]))) for i in places]
        total, begin = jnp.concatenate(padded).sum(-1), 0
        for i in places:
            end = begin + len(rows[i])
            found[i], begin = total[begin:end].reshape(matrices[i].shape[:-2]), end
    return [found[i] for i in range(len(rows))]


def _inverse(matrix: Array, shift: Array) -> Array:
    # LAPACK and cuSOLVER keep columns together, XLA rows. Of a symmetric matrix the transpose in
    # the one order is itself in the other; else XLA reorders it where it comes from, and for a
    # matrix that a loop carries does so at every step, due or not.
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    # Infinity less itself is NaN, which no factorisation leaves in the inverse of the others.
    damped = (matrix + (matrix - matrix) + shift * identity).T
    lower = jax.lax.linalg.cholesky(damped, symmetrize_input=False)
    half = jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
    out = jax.lax.linalg.triangular_solve(lower, half, left_side=True, lower=True, transpose_a=True)
    # A factorisation that fails gives NaN in a part of it on some platforms, and no error: in the
    # diagonal, too, which bounds all entries.
    return jnp.where(is_all_finite(diagonal(out)), out.T, jnp.nan)
