"""Symmetric eigendecomposition in host memory, in double precision by default."""

import contextlib
import functools
from typing import Literal, NamedTuple, cast, get_args

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.linalg.spectral._eigh import Spectrum, check_square, eigh_checked

HostDType = Literal["float32", "float64"]


class HostSpectrum(NamedTuple):
    """A :class:`Spectrum` in host memory, as NumPy arrays."""

    values: np.ndarray
    vectors: np.ndarray | None


def host_dtype(dtype: DTypeLike) -> HostDType:
    """The name of a dtype in which the host can decompose.

    Raises:
        ValueError: it is neither float32 nor float64.
    """
    name = np.dtype(dtype).name
    if name not in get_args(HostDType):
        raise ValueError(f"dtype must be one of {get_args(HostDType)}, got {name!r}")
    return cast(HostDType, name)


@functools.partial(jax.jit, static_argnames="dtype")
def _lapack(matrix: Array, *, dtype: np.dtype) -> Spectrum:
    """Solves the matrices of a batch in turn, so only one at a time is in double precision."""

    def solve(one: Array) -> tuple[Array, Array]:
        values, vectors = eigh_checked(one.astype(dtype))
        assert vectors is not None
        return values.astype(one.dtype), vectors.astype(one.dtype)

    if matrix.ndim == 2:
        return Spectrum(*solve(matrix))
    values, vectors = jax.lax.map(solve, matrix.reshape(-1, *matrix.shape[-2:]))
    return Spectrum(values.reshape(matrix.shape[:-1]), vectors.reshape(matrix.shape))


def _first_try(host: np.ndarray, dtype: np.dtype) -> HostSpectrum:
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # jax_platforms="cuda" leaves the CPU backend out
        return HostSpectrum(np.full(host.shape[:-1], np.nan), None)
    # A mesh that is set belongs to other devices, and applies to every jit.
    is_set = not jax.sharding.get_abstract_mesh().empty
    mesh = jax.set_mesh(Mesh(np.array([cpu]), ("cpu",))) if is_set else contextlib.nullcontext()
    with mesh, jax.enable_x64(dtype == np.float64):  # without x64 a double would become a single
        values, columns = _lapack(jax.device_put(host, cpu), dtype=dtype)
    return HostSpectrum(np.asarray(values), np.asarray(columns))


def _numpy_float64(matrix: np.ndarray) -> HostSpectrum:
    try:
        values, columns = np.linalg.eigh(matrix.astype(np.float64))
    except np.linalg.LinAlgError:
        return HostSpectrum(np.full(matrix.shape[:-1], np.nan, matrix.dtype), None)
    return HostSpectrum(np.asarray(values, matrix.dtype), np.asarray(columns, matrix.dtype))


def eigh_on_host(
    matrix: Array | np.ndarray,
    *,
    name: str,
    vectors: bool = True,
    dtype: DTypeLike = "float64",
) -> HostSpectrum:
    r"""Eigendecompose in host memory, whatever device the matrix lives on.

    The first try is a jitted LAPACK call on an array committed to the CPU (it holds no GIL). If its
    result is not finite, NumPy in float64 follows; if that is not finite either, an error. If JAX
    was started without its CPU backend, NumPy does the first try too.

    In float32 every eigenvalue has an error of about $\varepsilon \lambda_{\max}$: near
    $\lambda_{\max} / \kappa$ a relative error of $\varepsilon \kappa$. In float64 each is correct
    to the last digits of float32, to which it is rounded.

    Args:
        matrix: Symmetric, float32 or float64, ``(n, n)`` or a batch of such.
        name: The name of the matrix in an error: the layer's name and side.
        vectors: Whether to return the eigenvectors. They are computed in both cases, because
            LAPACK's values without vectors differ in the last digits.
        dtype: Dtype of the decomposition, ``"float64"`` or ``"float32"``; a float64 matrix is
            always decomposed in float64.

    Returns:
        The spectrum as NumPy arrays in the dtype of ``matrix``.

    Raises:
        ValueError: ``matrix`` is not square, or ``matrix`` or ``dtype`` is neither float32 nor
            float64.
        NonFiniteFactorError: naming the layer, if the matrix holds NaN or infinity in
            either triangle, or no decomposition is finite.

    Memory:
        About ``4 n**2`` elements of ``dtype`` beyond the input and the result, for one matrix of
        a batch at a time; the retry about ``10 n**2``.
    """
    host, work = np.asarray(matrix), host_dtype(dtype)
    check_square(host)
    finite = np.isfinite(host).all((-2, -1))
    if not finite.all():
        where = "" if finite.ndim == 0 else f" at stack index {_first_false(finite)}"
        raise NonFiniteFactorError(
            f"factor {name}{where} holds {_describe(host)}; look for a diverged loss or an "
            "overflow in this layer, and leave non-finite batches out of the average"
        )
    values, columns = _first_try(host, np.promote_types(host.dtype, work))
    if not np.isfinite(values).all():
        flat = [_numpy_float64(m) for m in host.reshape(-1, *host.shape[-2:])]
        values = np.stack([s.values for s in flat]).reshape(host.shape[:-1])
        if not np.isfinite(values).all():
            raise NonFiniteFactorError(
                f"factor {name} is finite but its eigendecomposition is not, in {work} "
                f"(LAPACK) nor in float64 (NumPy); shape {host.shape}, largest entry "
                f"{np.abs(host).max():.3g}"
            )
        columns = np.stack([s.vectors for s in flat if s.vectors is not None]).reshape(host.shape)
    return HostSpectrum(values, columns if vectors else None)


def _first_false(flags: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(~flags)[0])


def _describe(host: np.ndarray) -> str:
    return f"{np.isnan(host).sum()} NaN and {np.isinf(host).sum()} infinite of {host.size} entries"
