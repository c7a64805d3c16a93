"""One decomposition: where it runs, what is tried in turn, and when the old basis will do."""

import threading
import time
from typing import Any

import jax
import numpy as np

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._placement import Placement, matrices_that_fit
from jaxkfac.linalg import HostDType, HostSpectrum, eigh_checked, eigh_on_host

_TIMED_SIZE = 1024  # larger ones are judged by their leading block: the device only gains


class Decomposer:
    r"""Decomposes matrices, from any thread.

    The order of attempts: where ``reuse_tolerance`` is given, the basis there is; on the
    device, where that is chosen; on the host in ``dtype``; there with NumPy in float64
    (:func:`eigh_on_host`). A matrix that is not finite fails at once.

    Args:
        placement: ``"host"``, ``"device"``, or ``"auto"``: on an accelerator, the faster one
            for each size, measured at its first decomposition, and the host where the
            workspace does not fit in half of what is free; on the CPU the host.
        reuse_tolerance: $\tau$: eigenvectors $Q$ are kept, with
            $\lambda = \operatorname{diag}(Q^\top M Q)$, if the off-diagonal part of
            $Q^\top M Q$ is at most $\tau \lVert M \rVert_F$ in the Frobenius norm. Then
            $\lVert Q \operatorname{diag}(\lambda) Q^\top - M \rVert_F \le
            \tau \lVert M \rVert_F$, and no eigenvalue is off by more.
        dtype: In which the host decomposes.

    Attributes:
        chosen: ``{"size/dtype": "device" or "host"}``, what ``"auto"`` has decided.
        num_reused: How many decompositions were saved.
    """

    def __init__(
        self, placement: Placement, reuse_tolerance: float | None, dtype: HostDType
    ) -> None:
        self._placement, self._tolerance = placement, reuse_tolerance
        self._dtype: HostDType = dtype
        self.chosen: dict[str, str] = {}
        self.num_reused = 0
        self._lock = threading.Lock()

    def decompose(
        self, matrix: np.ndarray, *, name: str, device: Any, previous: np.ndarray | None
    ) -> HostSpectrum:
        """Eigendecompose one matrix.

        Args:
            matrix: Symmetric, ``(n, n)``.
            name: For errors.
            device: Of the factor, ``None`` where it is in host memory.
            previous: The eigenvectors there are, if they may be kept.

        Raises:
            NonFiniteFactorError: naming the matrix.
        """
        if previous is not None and self._tolerance is not None:
            reused = _reuse(matrix, previous, self._tolerance)
            if reused is not None:
                with self._lock:
                    self.num_reused += 1
                return reused
        if self._where(matrix, device) == "device" and np.isfinite(matrix).all():
            spectrum = _on_device(matrix, device)
            if spectrum is not None:
                return spectrum
        return eigh_on_host(matrix, name=name, dtype=self._dtype)

    def _where(self, matrix: np.ndarray, device: Any) -> str:
        if self._placement != "auto":
            return self._placement
        if device is None or device.platform == "cpu":
            return "host"
        key = f"{len(matrix)}/{matrix.dtype}"
        with self._lock:
            if key not in self.chosen:
                self.chosen[key] = _faster(matrix, device, self._dtype)
            return self.chosen[key]


def _faster(matrix: np.ndarray, device: Any, dtype: HostDType) -> str:
    if matrices_that_fit(len(matrix), matrix.dtype, device) == 0:
        return "host"
    block = np.ascontiguousarray(matrix[:_TIMED_SIZE, :_TIMED_SIZE])
    if not np.isfinite(block).all():
        block = np.eye(len(block), dtype=block.dtype)
    on_host = lambda matrix, _: eigh_on_host(matrix, name="used to compare speeds", dtype=dtype)
    seconds = {}
    for where, solve in (("device", _on_device), ("host", on_host)):
        solve(block, device)  # compiles
        start = time.perf_counter()
        solve(block, device)
        seconds[where] = time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__)


_eigh = jax.jit(eigh_checked)


def _on_device(matrix: np.ndarray, device: Any) -> HostSpectrum | None:
    """``None`` where the device has no room or its result is not finite."""
    device = jax.local_devices()[0] if device is None else device
    with jax.enable_x64(matrix.dtype == np.float64):  # a thread of its own has the default
        try:
            values, vectors = jax.device_get(_eigh(jax.device_put(matrix, device)))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
    return HostSpectrum(values, vectors) if np.isfinite(values).all() else None


def _reuse(matrix: np.ndarray, vectors: np.ndarray, tolerance: float) -> HostSpectrum | None:
    """The old eigenvectors with new eigenvalues, if they still diagonalise."""
    rotated = vectors.T @ (matrix @ vectors)
    values = rotated.diagonal().copy()
    whole = np.linalg.norm(rotated)
    np.fill_diagonal(rotated, 0)
    if not np.linalg.norm(rotated) <= tolerance * whole:  # False for NaN as well
        return None
    order = np.argsort(values, kind="stable")
    return HostSpectrum(values[order], vectors[:, order])


def failure(name: str, num_left_out: int) -> NonFiniteFactorError:
    """What a refresh fails with where every contribution since the last one was left out."""
    return NonFiniteFactorError(
        f"factor {name}: all {num_left_out} contributions since the last refresh held NaN or "
        "infinity, or made the average overflow, and were left out of it; look for a diverged loss "
        "or an overflow"
    )
