"""Eigenvectors that are tracked while their matrix changes slowly."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.linalg._eigh import Spectrum, in_sequence

_EXACT = jax.lax.Precision.HIGHEST  # vectors that are not orthogonal to rounding would drift


def iterate_eigenvectors(
    matrix: Float[Array, "*stack n n"],
    vectors: Float[Array, "*stack n n"],
    *,
    after: Array | None = None,
) -> Spectrum:
    r"""One step of orthogonal iteration from the eigenvectors of a matrix nearby.

    With $Z = M Q$, columns ordered by $q_i^\top M q_i$, the new vectors are the orthogonal factor
    of $Z = Q' R$. A column keeps its place, so that what is kept for each direction (a second
    moment) stays with the direction that it was measured in. Values are $q_i'^\top M q_i'$, of
    which the sum is the trace of $M$.

    Args:
        matrix: $M$, symmetric positive semi-definite; leading axes are a batch.
        vectors: $Q$, orthogonal.
        after: Values of what is decomposed before it, see ``in_sequence``.

    Returns:
        Values in the order of the columns, all NaN where they or the vectors are not finite; and
        the vectors.

    References:
        Golub and Van Loan, Matrix Computations, 2013, section 8.2.4. Vyas et al., SOAP: Improving
        and stabilizing Shampoo using Adam, 2024, which tracks Shampoo's eigenvectors so.
    """
    matrix = in_sequence(matrix, after)

    def one(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        matrix, vectors = pair
        moved = jnp.matmul(matrix, vectors, precision=_EXACT)
        order = jnp.argsort(-(vectors * moved).sum(-2))
        columns = jnp.linalg.qr(moved[:, order])[0]
        columns = columns[:, jnp.argsort(order)]
        values = (columns * jnp.matmul(matrix, columns, precision=_EXACT)).sum(-2)
        return values, columns

    if matrix.ndim == 2:
        values, columns = one((matrix, vectors))
    else:  # one after the other on the CPU, whose LAPACK calls may wait for one another for ever
        batch = tuple(x.reshape(-1, *x.shape[-2:]) for x in (matrix, vectors))
        values, columns = jax.lax.platform_dependent(
            batch, cpu=lambda batch: jax.lax.map(one, batch), default=jax.vmap(one)
        )
        values, columns = values.reshape(matrix.shape[:-1]), columns.reshape(matrix.shape)
    ok = jnp.isfinite(values).all(-1) & jnp.isfinite(columns).all((-2, -1))
    return Spectrum(jnp.where(ok[..., None], values, jnp.nan), columns)
