r"""Kronecker-structured operators on matrices, in arrays only.

A layer's matrix $W$ is ``(stack..., in, out)``; its curvature block is $A \otimes G$, which
acts as $W \mapsto A W G$. In the eigenbases $A = Q_A \Lambda_A Q_A^\top$ and
$G = Q_G \Lambda_G Q_G^\top$ it is an elementwise product.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_EXACT = jax.lax.Precision.HIGHEST  # never TF32: these products are divided by eigenvalues


def into_eigenbasis(
    matrix: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in n_in"] | None,
    g_vectors: Float[Array, "*stack n_out n_out"] | None,
) -> Float[Array, "*stack n_in n_out"]:
    r"""$Q_A^\top W Q_G$; ``None`` is the identity (a diagonal side)."""
    if a_vectors is not None:
        matrix = jnp.matmul(a_vectors.mT, matrix, precision=_EXACT)
    if g_vectors is not None:
        matrix = jnp.matmul(matrix, g_vectors, precision=_EXACT)
    return matrix


def out_of_eigenbasis(
    matrix: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in n_in"] | None,
    g_vectors: Float[Array, "*stack n_out n_out"] | None,
) -> Float[Array, "*stack n_in n_out"]:
    r"""$Q_A W Q_G^\top$, the inverse of :func:`into_eigenbasis`."""
    if a_vectors is not None:
        matrix = jnp.matmul(a_vectors, matrix, precision=_EXACT)
    if g_vectors is not None:
        matrix = jnp.matmul(matrix, g_vectors.mT, precision=_EXACT)
    return matrix


def scale_in_eigenbasis(
    matrix: Float[Array, "*stack n_in n_out"],
    scale: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in n_in"] | None,
    g_vectors: Float[Array, "*stack n_out n_out"] | None,
) -> Float[Array, "*stack n_in n_out"]:
    r"""$Q_A (S \odot Q_A^\top W Q_G) Q_G^\top$: any function of $A \otimes G$ applied to $W$.

    Args:
        matrix: $W$.
        scale: $S$, the operator's eigenvalue for each element, as
            :func:`jaxkfac.linalg.kronecker_power` gives it.
        a_vectors: $Q_A$, eigenvectors in columns, or ``None`` for the identity.
        g_vectors: $Q_G$, likewise.

    Returns:
        A matrix like ``matrix``; products run at the highest precision of the dtype.
    """
    rotated = into_eigenbasis(matrix, a_vectors, g_vectors)
    return out_of_eigenbasis(rotated * scale, a_vectors, g_vectors)


def from_spectrum(
    values: Float[Array, "*stack n"], vectors: Float[Array, "*stack n n"]
) -> Float[Array, "*stack n n"]:
    r"""$Q \operatorname{diag}(\lambda) Q^\top$."""
    return jnp.matmul(vectors * values[..., None, :], vectors.mT, precision=_EXACT)
