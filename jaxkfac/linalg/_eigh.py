"""Symmetric eigendecomposition of factors in the graph: checked and clipped."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Spectrum(NamedTuple):
    """Eigenvalues and eigenvectors of a (stack of) symmetric matrix, as decomposed.

    Attributes:
        values: ``(stack..., n)``. Ascending for a decomposed matrix, in the matrix's own
            order for a diagonal one. All NaN where the matrix or its decomposition is not
            finite.
        vectors: ``(stack..., n, n)`` in columns, or ``None``: the identity (a diagonal
            matrix), or not asked for.
    """

    values: Array
    vectors: Array | None


class ClippedEigh(NamedTuple):
    """What :func:`eigh_clipped` returns.

    Attributes:
        values: Clipped eigenvalues, ascending, ``(stack..., n)``.
        vectors: Eigenvectors in columns, ``(stack..., n, n)``.
        num_raised: How many eigenvalues of each matrix were raised, ``(stack...)``.
        is_finite: Whether the matrix and its decomposition are finite, ``(stack...)``;
            where they are not, ``values`` are NaN.
    """

    values: Float[Array, "*stack n"]
    vectors: Float[Array, "*stack n n"]
    num_raised: Int[Array, "*stack"]
    is_finite: Bool[Array, "*stack"]


def check_clipping(max_condition: float, floor: float) -> None:
    """Refuse a condition number below 1 and a negative floor (NaN included).

    Raises:
        ValueError: naming the argument and its value.
    """
    if not max_condition >= 1:
        raise ValueError(f"max_condition must be at least 1, got {max_condition}")
    if not floor >= 0:
        raise ValueError(f"floor must be zero or positive, got {floor}")


def check_square(matrix: Array | np.ndarray) -> None:
    """Refuse what is no (batch of a) square matrix in single or double precision.

    Raises:
        ValueError: naming the shape or the dtype.
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"a factor must be square, (..., n, n), got shape {matrix.shape}")
    if matrix.dtype not in (np.float32, np.float64):
        raise ValueError(f"a factor must be float32 or float64 to decompose, got {matrix.dtype}")


def clip_eigenvalues(
    values: Float[Array, "*stack n"], max_condition: float = 1e6, floor: float = 0.0
) -> Float[Array, "*stack n"]:
    r"""Raise every eigenvalue below $\max(\lambda_{\max}/\kappa, \text{floor})$ to it.

    Args:
        values: Eigenvalues in any order; the largest is sought on the last axis. An
            all-zero row stays zero; a negative rounding error never survives.
        max_condition: The bound $\kappa \ge 1$, dimensionless; ``inf`` only removes
            negative values.
        floor: Smallest eigenvalue allowed, in the matrix's own units.

    Returns:
        The clipped values, same order, shape and dtype. NaN stays NaN.

    Raises:
        ValueError: ``max_condition < 1`` or ``floor < 0``.
    """
    check_clipping(max_condition, floor)
    largest = values.max(-1, keepdims=True)
    return jnp.maximum(values, jnp.maximum(largest / max_condition, floor))


def eigh_checked(matrix: Float[Array, "*stack n n"], *, vectors: bool = True) -> Spectrum:
    """Eigendecompose in the graph; a non-finite matrix gives NaN values, never an error.

    LAPACK reads one triangle, so NaN in the other gives finite, wrong results: the whole
    input is checked, and the outcome written into the values, where every reader sees it.

    Args:
        matrix: Symmetric, float32 or float64; leading axes are a batch.
        vectors: Whether to return the eigenvectors.

    Returns:
        The eigenvalues ascending, the eigenvectors in columns.

    Raises:
        ValueError: ``matrix`` is not square, or its dtype has no eigendecomposition.
    """
    check_square(matrix)
    values, columns = _eigh(matrix)
    # One pass over both: a second reduction for each of 96 factors compiles for 0.8 s.
    ok = (jnp.isfinite(matrix) & jnp.isfinite(columns)).all((-2, -1))
    ok = (ok & jnp.isfinite(values).all(-1))[..., None]
    return Spectrum(jnp.where(ok, values, jnp.nan), columns if vectors else None)


def _eigh(matrix: Array) -> tuple[Array, Array]:
    """Batched on accelerators; on the CPU one LAPACK call after the other.

    XLA runs a batch on the CPU as concurrent LAPACK calls, each with threads of its own, and
    on few cores those can wait for one another forever (see :func:`in_sequence`).
    """

    def solve(matrix: Array) -> tuple[Array, Array]:
        values, columns = jnp.linalg.eigh(matrix, symmetrize_input=False)
        return values, columns

    if matrix.ndim == 2:
        return solve(matrix)
    batch = matrix.reshape(-1, *matrix.shape[-2:])
    values, columns = jax.lax.platform_dependent(
        batch, cpu=lambda batch: jax.lax.map(solve, batch), default=solve
    )
    return values.reshape(matrix.shape[:-1]), columns.reshape(matrix.shape)


def in_sequence(matrix: Array, after: Array | None) -> Array:
    """``matrix``, not to be read before ``after`` is known.

    Independent decompositions of one compiled program run at the same time on the CPU, and
    with a multi-threaded OpenBLAS two cores can deadlock (seen on jax 0.10.2, with every
    thread waiting). A data dependency that the compiler cannot fold away puts them in a row.

    Args:
        matrix: What is decomposed next.
        after: Values of the decomposition before it; ``None`` for the first.
    """
    if after is None:
        return matrix
    return matrix + (after.reshape(-1)[0] > jnp.inf).astype(matrix.dtype)  # adds zero


@functools.partial(jax.jit, static_argnames="vectors")
def _eigh_after(matrix: Array, after: Array | None, *, vectors: bool) -> Spectrum:
    return eigh_checked(in_sequence(matrix, after), vectors=vectors)


def eigh_in_turn(
    matrices: Sequence[Array], *, vectors: bool = True, after: Array | None = None
) -> list[Spectrum]:
    """Eigendecompose matrices one after the other, without stacking them: best on the CPU.

    LAPACK takes one matrix at a time whatever the batch, so a batch only adds a copy into
    the stack and one out of it, and XLA compiles the way out as one kernel for each matrix
    (96 factors of 16: 2.9 s, against 1.2 s here, where equal shapes share their kernels).

    Args:
        matrices: Each as for :func:`eigh_checked`, of any sizes.
        vectors: Whether to return the eigenvectors.
        after: Values of the decomposition that goes before the first, see
            :func:`in_sequence`.

    Returns:
        The spectra, in the given order.
    """
    spectra = []
    for matrix in matrices:
        spectra.append(_eigh_after(matrix, after, vectors=vectors))
        after = spectra[-1].values
    return spectra


def eigh_clipped(
    matrix: Float[Array, "*stack n n"], *, max_condition: float = 1e6, floor: float = 0.0
) -> ClippedEigh:
    r"""Eigendecompose a Kronecker factor with a bounded condition number.

    For symmetric $M = Q \operatorname{diag}(\lambda) Q^\top$, every eigenvalue below
    $\max(\lambda_{\max} / \kappa, \text{floor})$ is raised to it. Eigenvectors are
    untouched, so only flat directions change.

    Args:
        matrix: Symmetric positive semi-definite, shape ``(n, n)`` or a batch of such. Both
            triangles are checked for non-finite values, because LAPACK reads only one.
        max_condition: The bound $\kappa \ge 1$, dimensionless.
        floor: Smallest eigenvalue allowed, in the matrix's own units.

    Returns:
        ``values`` ``(n,)`` ascending, ``vectors`` ``(n, n)`` in columns, the scalars
        ``num_raised`` and ``is_finite``; dtype of ``matrix``; batched like ``matrix``.

    Raises:
        ValueError: ``matrix`` is not square, ``max_condition < 1`` or ``floor < 0``.
            Non-finite values never raise here; :func:`eigh_on_host` raises for them.

    Memory:
        About ``3 n**2`` elements beyond the input (LAPACK syevd), once for a whole batch
        on the CPU; cuSOLVER's batched solver needs it for every matrix of the batch, of which
        it is given as many at once as 2 GiB hold.

    Example:
        >>> import jax.numpy as jnp
        >>> values, vectors, num_raised, is_finite = eigh_clipped(
        ...     jnp.diag(jnp.array([0.0, 1.0, 4.0])), max_condition=100.0
        ... )
        >>> [round(float(v), 4) for v in values], int(num_raised), bool(is_finite)
        ([0.04, 1.0, 4.0], 1, True)
    """
    raw, vectors = eigh_checked(matrix)
    assert vectors is not None
    values = clip_eigenvalues(raw, max_condition, floor)
    return ClippedEigh(
        values=values,
        vectors=vectors,
        num_raised=(values > raw).sum(-1),
        is_finite=jnp.isfinite(raw).all(-1),
    )
