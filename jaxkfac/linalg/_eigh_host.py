"""Symmetric eigendecomposition in host memory, with a retry in double precision."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.linalg._eigh import Spectrum, check_square, eigh_checked


class HostSpectrum(NamedTuple):
    """A :class:`Spectrum` in host memory, as NumPy arrays."""

    values: np.ndarray
    vectors: np.ndarray | None


@jax.jit
def _lapack(matrix: Array) -> Spectrum:
    return eigh_checked(matrix)


def _first_try(host: np.ndarray) -> HostSpectrum:
    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError:  # jax_platforms="cuda" leaves the CPU backend out
        return HostSpectrum(np.full(host.shape[:-1], np.nan), None)
    with jax.enable_x64(host.dtype == np.float64):  # else a double would become a single
        values, columns = _lapack(jax.device_put(host, cpu))
    return HostSpectrum(np.asarray(values), np.asarray(columns))


def _values_alone(host: np.ndarray) -> HostSpectrum:
    """LAPACK without eigenvectors, which JAX would compute and drop."""
    try:
        return HostSpectrum(np.linalg.eigvalsh(host), None)
    except np.linalg.LinAlgError:
        return HostSpectrum(np.full(host.shape[:-1], np.nan), None)


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
    spectrum = _first_try(host) if vectors else _values_alone(host)
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
