"""The nearest matrix of a low rank, as two factors."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.kinds import LowRankMatrices
from jaxkfac.linalg import in_sequence

_EXACT = jax.lax.Precision.HIGHEST


def truncated(
    matrices: Float[Array, "Q ..."], rank: int, *, after: Array | None = None
) -> tuple[LowRankMatrices, Float[Array, " Q"]]:
    """The nearest matrices of ``rank``, and how far they are, as ratios of Frobenius norms.

    The singular vectors of the shorter side are those of its Gram matrix. Where rounding tells
    them from the nearest ones, the product is still a projection, and the error that of it.

    Args:
        matrices: ``(Q, stack..., in, out)``; one ratio for all of a stack.
        rank: At least 1.
        after: A result that goes before, see :func:`jaxkfac.linalg.in_sequence`.
    """
    n_in, n_out = matrices.shape[-2:]
    if n_in > n_out:
        other, errors = truncated(jnp.swapaxes(matrices, -1, -2), rank, after=after)
        return LowRankMatrices(
            *(jnp.swapaxes(x, -1, -2) for x in (other.right, other.left))
        ), errors
    norms = jnp.abs(matrices).max((-2, -1), keepdims=True)
    unit = matrices / jnp.where(norms > 0, norms, 1)  # squares of small gradients are 0
    gram = jnp.einsum("...io,...jo->...ij", unit, unit, precision=_EXACT)
    left = jnp.linalg.eigh(in_sequence(gram, after))[1][..., -rank:]
    right = jnp.einsum("...ir,...io->...ro", left, matrices, precision=_EXACT)
    rest = matrices - jnp.einsum("...ir,...ro->...io", left, right, precision=_EXACT)
    lost, whole = (_norms(x) for x in (rest, matrices))
    return LowRankMatrices(left, right), lost / jnp.where(whole > 0, whole, 1)


def _norms(matrices: Array) -> Float[Array, " Q"]:
    rows = matrices.reshape(len(matrices), -1)
    largest = jnp.abs(rows).max(1)
    unit = rows / jnp.where(largest > 0, largest, 1)[:, None]
    return largest * jnp.sqrt(jnp.square(unit).sum(1))
