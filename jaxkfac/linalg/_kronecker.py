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
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack _ _"]:
    r"""$Q_A^\top W Q_G$; ``None`` is the identity (a diagonal side)."""
    if a_vectors is not None:
        matrix = jnp.matmul(_widened(a_vectors, matrix).mT, matrix, precision=_EXACT)
    if g_vectors is not None:
        matrix = jnp.matmul(matrix, _widened(g_vectors, matrix), precision=_EXACT)
    return matrix


def out_of_eigenbasis(
    matrix: Float[Array, "*stack r_in r_out"],
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack _ _"]:
    r"""$Q_A W Q_G^\top$, the inverse of :func:`into_eigenbasis`."""
    if a_vectors is not None:
        matrix = jnp.matmul(_widened(a_vectors, matrix), matrix, precision=_EXACT)
    if g_vectors is not None:
        matrix = jnp.matmul(matrix, _widened(g_vectors, matrix).mT, precision=_EXACT)
    return matrix


def scale_in_eigenbasis(
    matrix: Float[Array, "*stack n_in n_out"],
    scale: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack n_in n_out"]:
    r"""$Q_A (S \odot Q_A^\top W Q_G) Q_G^\top$: any function of $A \otimes G$ applied to $W$.

    Args:
        matrix: $W$.
        scale: $S$, the operator's eigenvalue for each element, as
            :func:`jaxkfac.linalg.kronecker_power` gives it.
        a_vectors: $Q_A$, eigenvectors in columns, or ``None`` for the identity. Fewer columns
            than rows are the last ones of a basis: every direction beside them has the scale
            of the first, ``scale[..., 0, :]``.
        g_vectors: $Q_G$, likewise.

    Returns:
        A matrix like ``matrix``; products run at the highest precision of the dtype.
    """
    if not _is_truncated(a_vectors):
        rotated = into_eigenbasis(matrix, a_vectors, None)
        return out_of_eigenbasis(_scale_outputs(rotated, scale, g_vectors), a_vectors, None)
    # The rest I - Q Q' has one scale, under which W as a whole is taken; what that is wrong by
    # lies in the columns of Q.
    assert a_vectors is not None
    rest = scale[..., :1, :]
    rotated = into_eigenbasis(matrix, a_vectors, None)
    kept = scale[..., -rotated.shape[-2] :, :]
    inside = _scale_outputs(rotated, kept, g_vectors) - _scale_outputs(rotated, rest, g_vectors)
    return _scale_outputs(matrix, rest, g_vectors) + out_of_eigenbasis(inside, a_vectors, None)


def quadratic_form(
    matrix: Float[Array, "*stack n_in n_out"],
    scale: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack"]:
    r"""$\langle W, Q_A (S \odot Q_A^\top W Q_G) Q_G^\top \rangle$: what
    :func:`scale_in_eigenbasis` gives, multiplied with the matrix itself.

    In the eigenbasis it is a weighed sum of squares, so that nothing is rotated back.

    Args:
        matrix: $W$.
        scale: $S$, as for :func:`scale_in_eigenbasis`.
        a_vectors: $Q_A$, likewise.
        g_vectors: $Q_G$, likewise.
    """
    if _is_truncated(a_vectors) or _is_truncated(g_vectors):
        found = matrix * scale_in_eigenbasis(matrix, scale, a_vectors, g_vectors)
    else:
        found = jnp.square(into_eigenbasis(matrix, a_vectors, g_vectors)) * scale
    return found.sum((-2, -1))


def _scale_outputs(matrix: Array, scale: Array, vectors: Array | None) -> Array:
    """The same on the right alone: rows are in their eigenbasis already."""
    rotated = into_eigenbasis(matrix, None, vectors)
    if not _is_truncated(vectors):
        return out_of_eigenbasis(rotated * scale, None, vectors)
    rest, kept = scale[..., :1], scale[..., -rotated.shape[-1] :]
    return matrix * rest + out_of_eigenbasis(rotated * (kept - rest), None, vectors)


def _is_truncated(vectors: Array | None) -> bool:
    return vectors is not None and vectors.shape[-1] < vectors.shape[-2]


def from_spectrum(
    values: Float[Array, "*stack n"], vectors: Float[Array, "*stack n r"]
) -> Float[Array, "*stack n n"]:
    r"""$Q \operatorname{diag}(\lambda) Q^\top$; directions beside $Q$ have the first eigenvalue."""
    vectors = _widened(vectors, values)
    if _is_truncated(vectors):
        rest, kept = values[..., :1], values[..., -vectors.shape[-1] :]
        identity = jnp.eye(values.shape[-1], dtype=values.dtype)
        inside = jnp.matmul(vectors * (kept - rest)[..., None, :], vectors.mT, precision=_EXACT)
        return rest[..., None] * identity + inside
    return jnp.matmul(vectors * values[..., None, :], vectors.mT, precision=_EXACT)


def _widened(vectors: Array, like: Array) -> Array:
    """Eigenvectors may be stored in fewer bits; the arithmetic has those of what they rotate."""
    return jnp.asarray(vectors, like.dtype)
