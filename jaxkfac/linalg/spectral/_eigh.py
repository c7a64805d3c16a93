"""Decompositions of symmetric factors in the graph: checked, clipped, tracked, inverted."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkfac.linalg._packed import diagonal
from jaxkfac.linalg._sums import alike, is_all_finite

# ---------------- the rcond of pseudo-inverses


def check_rcond(rcond: float) -> None:
    """Refuse an rcond outside ``[0, 1)`` (NaN included); callers name it ``cut=``.

    Raises:
        ValueError: naming the value.
    """
    if not 0 <= rcond < 1:
        raise ValueError(f"cut must be in [0, 1), relative to the largest eigenvalue, got {rcond}")


def above_rcond(values: Float[Array, "*stack n"], rcond: float) -> Bool[Array, "*stack n"]:
    r"""Whether $\lambda_i > c\,\lambda_{\max}$; the largest eigenvalue is that of the last axis.

    Args:
        values: Raw eigenvalues in any order; negative ones count as 0.
        rcond: $c \in [0, 1)$. In an all-zero row every eigenvalue counts as zero, as in
            ``numpy.linalg.pinv``; NaN never counts as zero, so it stays visible.

    Returns:
        True where the eigenvalue counts.
    """
    values = jnp.maximum(values, 0)
    return ~(values <= rcond * values.max(-1, keepdims=True))


def kronecker_above_rcond(
    a_values: Float[Array, "*stack n_in"], g_values: Float[Array, "*stack n_out"], rcond: float
) -> Bool[Array, "*stack n_in n_out"]:
    r""":func:`above_rcond` for the products $\lambda_{A,i} \lambda_{G,j}$ of one block.

    Each factor is first divided by its largest value: the product of two small factors would
    underflow, and the selection must not depend on the scale of the loss.
    """
    a, g = (_relative(jnp.maximum(values, 0)) for values in (a_values, g_values))
    return ~(a[..., :, None] * g[..., None, :] <= rcond)


def _relative(values: Array) -> Array:
    largest = values.max(-1, keepdims=True)
    return values / jnp.where(largest == 0, 1, largest)


# ---------------- eigendecompositions


class Spectrum(NamedTuple):
    """Eigenvalues and eigenvectors of a (stack of) symmetric matrix, as decomposed.

    Attributes:
        values: ``(stack..., n)``. Ascending for a decomposed matrix, in the order of the columns
            for tracked vectors, in the matrix's own order for a diagonal one. All NaN if the
            matrix or its decomposition is not finite.
        vectors: ``(stack..., n, n)`` in columns; ``None`` for the identity (a diagonal
            matrix), or if they were not requested.
    """

    values: Array
    vectors: Array | None


class ClippedEigh(NamedTuple):
    """The result of :func:`eigh_clipped`.

    Attributes:
        values: Clipped eigenvalues, ascending, ``(stack..., n)``.
        vectors: Eigenvectors in columns, ``(stack..., n, n)``.
        num_raised: Number of eigenvalues of each matrix that were raised, ``(stack...)``.
        is_finite: Whether the matrix and its decomposition are finite, ``(stack...)``;
            if they are not, ``values`` are NaN.
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
    """Refuse an array that is not a (batch of a) square matrix in single or double precision.

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
        values: Eigenvalues in any order; the largest is that of the last axis. An
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

    LAPACK reads one triangle, so NaN in the other gives finite, wrong results. The full input is
    therefore checked, and the outcome is written into the values, where every reader sees it.

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
    # One reduction over both: a second one for each of 96 factors compiles for 0.8 s.
    ok = (jnp.isfinite(matrix) & jnp.isfinite(columns)).all((-2, -1))
    ok = (ok & jnp.isfinite(values).all(-1))[..., None]
    return Spectrum(jnp.where(ok, values, jnp.nan), columns if vectors else None)


def _eigh(matrix: Array) -> tuple[Array, Array]:
    """A batched decomposition on accelerators; on the CPU, one LAPACK call after the other.

    XLA runs a batch on the CPU as concurrent LAPACK calls, each with its own threads, and on few
    cores these can wait for one another forever (see :func:`in_sequence`).
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
    """``matrix``, which cannot be read before ``after`` is known.

    Independent decompositions of one compiled program run at the same time on the CPU, and
    with a multi-threaded OpenBLAS two cores can deadlock (seen on jax 0.10.2, with every
    thread waiting). A data dependency that the compiler cannot fold away puts them in sequence.

    Args:
        matrix: The matrix to decompose next.
        after: Values of the decomposition before it; ``None`` for the first. There is nothing to
            wait for if they are those of an empty stack.
    """
    if after is None or not after.size:
        return matrix
    return matrix + (after.reshape(-1)[0] > jnp.inf).astype(matrix.dtype)  # adds zero


@functools.partial(jax.jit, static_argnames="vectors")
def _eigh_after(matrix: Array, after: Array | None, *, vectors: bool) -> Spectrum:
    return eigh_checked(in_sequence(matrix, after), vectors=vectors)


def eigh_in_turn(
    matrices: Sequence[Array], *, vectors: bool = True, after: Array | None = None
) -> list[Spectrum]:
    """Eigendecompose matrices one after the other, without stacking them: best on the CPU.

    LAPACK takes one matrix at a time in any case, so a batch only adds a copy into the stack and
    one out of it, and XLA compiles the second copy as one kernel for each matrix (96 factors of
    16: 2.9 s, against 1.2 s here, where equal shapes share their kernels).

    Args:
        matrices: Each as for :func:`eigh_checked`, of any sizes.
        vectors: Whether to return the eigenvectors.
        after: Values of the decomposition that precedes the first, see
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
        About ``3 n**2`` elements beyond the input (LAPACK syevd), on the CPU once for a whole
        batch. cuSOLVER's batched solver needs them for every matrix of the batch; it is given as
        many matrices at once as fit in 2 GiB.

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


# ---------------- tracked eigenvectors


_EXACT = jax.lax.Precision.HIGHEST  # vectors that are not orthogonal to rounding would drift


def iterate_eigenvectors(
    matrix: Float[Array, "*stack n n"],
    vectors: Float[Array, "*stack n n"],
    *,
    after: Array | None = None,
) -> Spectrum:
    r"""One step of orthogonal iteration from the eigenvectors of a nearby matrix.

    With $Z = M Q$, columns ordered by $q_i^\top M q_i$, the new vectors are the orthogonal factor
    of $Z = Q' R$. A column keeps its place, so that a quantity stored for each direction (a second
    moment) stays with the direction in which it was measured. The values are $q_i'^\top M q_i'$,
    and their sum is the trace of $M$.

    Args:
        matrix: $M$, symmetric positive semi-definite; leading axes are a batch.
        vectors: $Q$, orthogonal.
        after: Values of the decomposition before it, see ``in_sequence``.

    Returns:
        Values in the order of the columns, all NaN if they or the vectors are not finite; and the
        vectors.

    References:
        Golub and Van Loan, Matrix Computations, 2013, section 8.2.4. Vyas et al., SOAP: Improving
        and stabilizing Shampoo using Adam, 2024, which tracks Shampoo's eigenvectors in this way.
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
    else:  # one after the other on the CPU, whose LAPACK calls may wait for one another forever
        batch = tuple(x.reshape(-1, *x.shape[-2:]) for x in (matrix, vectors))
        values, columns = jax.lax.platform_dependent(
            batch, cpu=lambda batch: jax.lax.map(one, batch), default=jax.vmap(one)
        )
        values, columns = values.reshape(matrix.shape[:-1]), columns.reshape(matrix.shape)
    ok = jnp.isfinite(values).all(-1) & jnp.isfinite(columns).all((-2, -1))
    return Spectrum(jnp.where(ok[..., None], values, jnp.nan), columns)


# ---------------- inverses of damped factors


def damped_inverse(
    matrix: Float[Array, "*stack n n"],
    damping: Float[Array, "*#stack"],
    *,
    after: Array | None = None,
) -> Float[Array, "*stack n n"]:
    r"""$(M + \delta I)^{-1}$ of a symmetric positive semi-definite matrix, by Cholesky.

    Args:
        matrix: Float32 or float64; leading axes are a batch. Only the upper triangle is read,
            because the other must be equal.
        damping: $\delta$ of each matrix.
        after: A result that has to precede it, see :func:`jaxkfac.linalg.spectral.in_sequence`.

    Returns:
        The inverse; all NaN if the damped matrix is not positive definite, or not finite in the
        triangle that is read.

    Raises:
        ValueError: ``matrix`` is not square, or its dtype has no factorisation.

    Memory:
        About ``2 n**2`` elements beyond the result; on the CPU once for a whole batch.
    """
    check_square(matrix)
    n, dtype = matrix.shape[-1], matrix.dtype
    damping = jnp.broadcast_to(damping, matrix.shape[:-2]).astype(dtype)
    batch, shifts = matrix.reshape(math.prod(matrix.shape[:-2]), n, n), damping.reshape(-1)

    # As in `eigh_checked`: on the CPU one LAPACK call after the other.
    def in_turn(batch: Array, shifts: Array) -> Array:
        batch = in_sequence(batch, after)
        if len(batch) == 1:
            return _inverse(batch[0], shifts[0])[None]
        return jax.lax.map(lambda one: _inverse(*one), (batch, shifts))

    out = jax.lax.platform_dependent(batch, shifts, cpu=in_turn, default=jax.vmap(_inverse))
    return out.reshape(matrix.shape)


def row_sums(arrays: Sequence[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
    """The sums ``(stack...)`` over the last axes of arrays, with one sum for joined arrays."""
    rows = [x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in arrays]
    sums_by_place: dict[int, Array] = {}
    for places in alike(rows):
        width = max(rows[i].shape[1] for i in places)
        padded = [jnp.pad(rows[i], ((0, 0), (0, width - rows[i].shape[1]))) for i in places]
        total, begin = jnp.concatenate(padded).sum(-1), 0
        for i in places:
            end = begin + len(rows[i])
            sums_by_place[i], begin = total[begin:end].reshape(arrays[i].shape[:-1]), end
    return [sums_by_place[i] for i in range(len(rows))]


def _inverse(matrix: Array, shift: Array) -> Array:
    # LAPACK and cuSOLVER store columns contiguously, XLA rows. The transpose of a symmetric matrix
    # in one order is the matrix itself in the other. Without the transposes XLA would reorder the
    # matrix where it comes from, and if a loop carries it, at every step, whether due or not.
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    # Infinity minus itself is NaN, so that an infinite entry cannot give a finite inverse.
    damped = (matrix + (matrix - matrix) + shift * identity).T
    lower = jax.lax.linalg.cholesky(damped, symmetrize_input=False)
    # After the factor: a scheduler would make the identities of all layers first.
    identity = in_sequence(identity, lower)
    half = jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
    out = jax.lax.linalg.triangular_solve(lower, half, left_side=True, lower=True, transpose_a=True)
    # On some platforms a failed factorisation gives NaN in only a part of the result, and no error.
    # The diagonal, which bounds all entries, then holds NaN too.
    return jnp.where(is_all_finite(diagonal(out)), out.T, jnp.nan)
