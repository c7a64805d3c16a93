"""One decomposition on host or device, the reuse of old bases, and the split over processes."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.blocks import EigenBlock, Place
from jaxkfac.curvature._placement import UNCOMMITTED, Placement, ResultSharding, matrices_that_fit
from jaxkfac.linalg.spectral import HostDType, HostSpectrum, eigh_checked, eigh_on_host
from jaxkfac.memory import ProcessGroup, in_equal_shares

_TIMED_SIZE = 1024  # larger matrices are timed by a block of it; the device gains with size


class Decomposer:
    r"""Decomposes matrices, from any thread.

    It tries in turn: with ``reuse_tolerance``, the existing basis; the device, if that is chosen;
    the host in ``dtype``; the host with NumPy in float64 (:func:`eigh_on_host`). A matrix that is
    not finite fails at once.

    Args:
        placement: ``"host"``, ``"device"``, or ``"auto"``. On an accelerator, ``"auto"`` takes the
            faster one for each size, measured at its first decomposition (sizes above 1,024 by
            a block of that size), and the host if the
            workspace does not fit in half of the free memory. On the CPU it takes the host.
        reuse_tolerance: $\tau$: eigenvectors $Q$ are kept, with
            $\lambda = \operatorname{diag}(Q^\top M Q)$, if the off-diagonal part of
            $Q^\top M Q$ is at most $\tau \lVert M \rVert_F$ in the Frobenius norm. Then
            $\lVert Q \operatorname{diag}(\lambda) Q^\top - M \rVert_F \le
            \tau \lVert M \rVert_F$, and no eigenvalue is off by more.
        dtype: The dtype in which the host decomposes.

    Attributes:
        chosen: ``{"size/dtype": "device" or "host"}``, the choices of ``"auto"``.
    """

    def __init__(
        self, placement: Placement, reuse_tolerance: float | None, dtype: HostDType
    ) -> None:
        self._placement, self._tolerance = placement, reuse_tolerance
        self._dtype: HostDType = dtype
        self.chosen: dict[str, str] = {}
        self._lock = threading.Lock()

    def decompose(
        self, matrix: np.ndarray, *, name: str, device: Any, previous: np.ndarray | None
    ) -> HostSpectrum:
        """Eigendecompose one matrix.

        Args:
            matrix: Symmetric, ``(n, n)``.
            name: For errors.
            device: The factor's device, ``None`` if it is in host memory.
            previous: The existing eigenvectors, if they may be kept.

        Raises:
            NonFiniteFactorError: naming the matrix.
        """
        if previous is not None and self._tolerance is not None:
            reused = _reuse(matrix, previous, self._tolerance)
            if reused is not None:
                return reused
        # A matrix that is not finite goes to the host's solver, which raises with the name of the
        # layer.
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
        # Timed once for each size, and by one worker, because two at once would measure each other.
        with self._lock:
            if key not in self.chosen:
                self.chosen[key] = _faster(matrix, device, self._dtype)
            return self.chosen[key]


def _faster(matrix: np.ndarray, device: Any, dtype: HostDType) -> str:
    if matrices_that_fit(len(matrix), matrix.dtype, device) == 0:
        return "host"
    block = np.ascontiguousarray(matrix[:_TIMED_SIZE, :_TIMED_SIZE])
    if not np.isfinite(block).all():
        # A solver may stop early at NaN, and its time would say nothing.
        block = np.eye(len(block), dtype=block.dtype)
    on_host = lambda matrix, _: eigh_on_host(matrix, name="used to compare speeds", dtype=dtype)
    seconds = {}
    for where, solve in (("device", _on_device), ("host", on_host)):
        solve(block, device)  # the first call compiles, and is not timed
        start = time.perf_counter()
        solve(block, device)
        seconds[where] = time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__)


_eigh = jax.jit(eigh_checked)


def _on_device(matrix: np.ndarray, device: Any) -> HostSpectrum | None:
    """Decompose on a device; ``None`` if it lacks memory or its result is not finite."""
    device = jax.local_devices()[0] if device is None else device
    with jax.enable_x64(matrix.dtype == np.float64):  # a new thread has the default setting
        try:
            values, vectors = jax.device_get(_eigh(jax.device_put(matrix, device)))
        except jax.errors.JaxRuntimeError as error:
            # Another program may have taken the device's memory since the choice was made; that is
            # no reason to fail.
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
    return HostSpectrum(values, vectors) if np.isfinite(values).all() else None


def _reuse(matrix: np.ndarray, vectors: np.ndarray, tolerance: float) -> HostSpectrum | None:
    """The old eigenvectors with new eigenvalues, if they still diagonalize the matrix."""
    rotated = vectors.T @ (matrix @ vectors)
    values = rotated.diagonal().copy()
    # This is the norm of the matrix itself, which a rotation keeps: the diagonal is still in it.
    norm = np.linalg.norm(rotated)
    np.fill_diagonal(rotated, 0)
    if not np.linalg.norm(rotated) <= tolerance * norm:  # False for NaN as well
        return None
    # Readers of a spectrum rely on ascending values; those of old vectors may be in any order.
    order = np.argsort(values, kind="stable")
    return HostSpectrum(values[order], vectors[:, order])


def failure(name: str, num_left_out: int) -> NonFiniteFactorError:
    """The error of a refresh if every contribution since the last one was left out."""
    return NonFiniteFactorError(
        f"factor {name}: all {num_left_out} contributions since the last refresh held NaN or "
        "infinity, or made the average overflow, and were left out of it; look for a diverged loss "
        "or an overflow"
    )


# ---------------- division among processes


_Index = tuple[int, ...]


class Shares:
    """The assignment of decompositions to processes.

    If a factor lies on devices of several processes, its matrices are divided among these, one
    slice of a stack at a time, by the cubes of their sizes. Each process handles diagonals and
    its own factors by itself.

    Args:
        blocks: The blocks of a refresh, in the same order in every process.
        shardings: Where the results go.
    """

    def __init__(
        self, blocks: Sequence[EigenBlock], shardings: dict[Place, ResultSharding]
    ) -> None:
        self._groups: dict[ProcessGroup, list[EigenBlock]] = {}
        self._of: dict[Place, ProcessGroup] = {}
        for block in blocks:
            where = shardings.get(block.source.place, UNCOMMITTED).sharding
            group = ProcessGroup.of(where) if block.source.dense else None
            if group is not None:
                self._groups.setdefault(group, []).append(block)
                self._of[block.place] = group
        self._owners: dict[tuple[Place, _Index], int] = {}
        for group, shared in self._groups.items():
            slices = [(b, index) for b in shared for index in np.ndindex(b.source.stack)]
            owners = in_equal_shares([b.size**3 for b, _ in slices], len(group.devices))
            for (block, index), owner in zip(slices, owners, strict=True):
                self._owners[block.place, index] = owner

    def __bool__(self) -> bool:
        """Whether anything is shared."""
        return bool(self._groups)

    def __contains__(self, block: EigenBlock) -> bool:
        """Whether a block is shared."""
        return block.place in self._of

    def of_this_process(self, block: EigenBlock) -> list[_Index]:
        """The slices of a block that this process decomposes."""
        indices = list(np.ndindex(block.source.stack))
        group = self._of.get(block.place)
        if group is None:
            return indices
        return [index for index in indices if self._owners[block.place, index] == group.rank]

    def exchange(
        self,
        doing: str,
        about: str,
        error: BaseException | None,
        results: dict[Place, HostSpectrum],
        failures: dict[Place, NonFiniteFactorError],
        zeros: Callable[[EigenBlock], HostSpectrum],
    ) -> None:
        """Add the results and failures of the other processes to those of this one.

        Args:
            doing: For errors.
            about: A description that must be equal in every process.
            error: The error of this process; then nothing is exchanged.
            results: Full arrays, zero in slices of other processes.
            failures: A matrix that failed in one process counts as failed in all.
            zeros: Arrays for a block of which this process has no slice.

        Raises:
            ProcessesDisagreeError: another process failed, or does something else.
            BaseException: ``error``.
        """
        for group, blocks in self._groups.items():
            group.agree(doing, about, error)
            failed = np.array([block.place in failures for block in blocks], np.uint8)
            anywhere = group.gathered(failed).max(0).tolist()
            for block, has_failed in zip(blocks, anywhere, strict=True):
                place = block.place
                if has_failed:
                    # A slice that failed anywhere makes the whole block fail everywhere, so that
                    # all processes keep the same old basis.
                    results.pop(place, None)
                    texts = group.told(str(failures.get(place, "")))
                    failures[place] = NonFiniteFactorError(next(filter(None, texts)))
                    continue
                full_result = results.get(place) or zeros(block)
                for array in full_result:
                    if array is not None:
                        # Each slice is zero in all processes but one, so a sum of all puts the
                        # block together.
                        array[...] = group.combined(array)
                results[place] = full_result
