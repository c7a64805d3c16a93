"""Symmetric eigendecomposition of factors: clipped, checked, in the graph or on the host."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._errors import NonFiniteFactorError


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


class HostSpectrum(NamedTuple):
    """A :class:`Spectrum` in host memory, as NumPy arrays."""

    values: np.ndarray
    vectors: np.ndarray | None


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
    largest = jnp.maximum(values.max(-1, keepdims=True), 0)
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
    values, columns = jnp.linalg.eigh(matrix, symmetrize_input=False)
    ok = jnp.isfinite(matrix).all((-2, -1)) & jnp.isfinite(columns).all((-2, -1))
    values = jnp.where(ok[..., None], values, jnp.nan)
    ok = jnp.isfinite(values).all(-1, keepdims=True)
    return Spectrum(jnp.where(ok, values, jnp.nan), columns if vectors else None)


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
        on the CPU; cuSOLVER's batched solver needs it for every matrix of the batch.

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


@functools.partial(jax.jit, static_argnames="vectors")
def _lapack(matrix: Array, *, vectors: bool) -> Spectrum:
    return eigh_checked(matrix, vectors=vectors)


def _numpy_float64(matrix: np.ndarray, *, vectors: bool) -> HostSpectrum:
    double = matrix.astype(np.float64)
    try:
        if not vectors:
            return HostSpectrum(np.linalg.eigvalsh(double), None)
        values, columns = np.linalg.eigh(double)
    except np.linalg.LinAlgError:
        return HostSpectrum(np.full(matrix.shape[:-1], np.nan), None)
    return HostSpectrum(values, columns)


def _as_given(spectrum: HostSpectrum, dtype: np.dtype) -> HostSpectrum:
    values, vectors = spectrum
    return HostSpectrum(
        np.asarray(values, dtype), None if vectors is None else np.asarray(vectors, dtype)
    )


def eigh_on_host(matrix: Array | np.ndarray, *, name: str, vectors: bool = True) -> HostSpectrum:
    """Eigendecompose in host memory, whatever device the matrix lives on.

    A jitted LAPACK call on an array committed to the CPU (it holds no GIL), in the
    matrix's own dtype; if that is not finite, NumPy in float64; if that is not either, an
    error. Where JAX was started without its CPU backend, NumPy does the first try too.

    Args:
        matrix: Symmetric, float32 or float64, ``(n, n)`` or a batch of such.
        name: What to call the matrix in an error, the layer's name and side.
        vectors: Whether to return the eigenvectors.

    Returns:
        The spectrum as NumPy arrays in the dtype of ``matrix``.

    Raises:
        ValueError: ``matrix`` is not square, or neither float32 nor float64.
        NonFiniteFactorError: naming the layer, if the matrix holds NaN or infinity in
            either triangle, or no decomposition is finite.

    Memory:
        About ``3 n**2`` elements beyond the input; the retry about ``10 n**2``, one matrix
        of a batch at a time.
    """
    host = np.asarray(matrix)
    check_square(host)
    finite = np.isfinite(host).all((-2, -1))
    if not finite.all():
        where = "" if finite.ndim == 0 else f" at stack index {_first_false(finite)}"
        raise NonFiniteFactorError(
            f"factor {name}{where} holds {_describe(host)}; look for a diverged loss or an "
            "overflow in this layer, and leave non-finite batches out of the average"
        )
    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError:  # jax_platforms="cuda" leaves the CPU backend out
        spectrum = HostSpectrum(np.full(host.shape[:-1], np.nan), None)
    else:
        with jax.enable_x64(host.dtype == np.float64):  # else a double would become a single
            values, columns = _lapack(jax.device_put(host, cpu), vectors=vectors)
        spectrum = HostSpectrum(
            np.asarray(values), None if columns is None else np.asarray(columns)
        )
    if np.isfinite(spectrum.values).all():
        return _as_given(spectrum, host.dtype)
    flat = [_numpy_float64(m, vectors=vectors) for m in host.reshape(-1, *host.shape[-2:])]
    values = np.stack([s.values for s in flat]).reshape(host.shape[:-1])
    if not np.isfinite(values).all():
        raise NonFiniteFactorError(
            f"factor {name} is finite but its eigendecomposition is not, in {host.dtype} "
            f"(LAPACK) nor in float64 (NumPy); shape {host.shape}, largest entry "
            f"{np.abs(host).max():.3g}"
        )
    columns = [s.vectors for s in flat if s.vectors is not None]
    stacked = np.stack(columns).reshape(host.shape) if vectors else None
    return _as_given(HostSpectrum(values, stacked), host.dtype)


def _first_false(flags: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(~flags)[0])


def _describe(host: np.ndarray) -> str:
    return f"{np.isnan(host).sum()} NaN and {np.isinf(host).sum()} infinite of {host.size} entries"
