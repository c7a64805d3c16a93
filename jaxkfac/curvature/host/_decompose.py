"""One decomposition: where it runs, what is tried in turn, and when the old basis will do."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._layout import EigenBlock, Place
from jaxkfac.curvature._placement import UNCOMMITTED, Placement, ResultSharding, matrices_that_fit
from jaxkfac.linalg import HostDType, HostSpectrum, eigh_checked, eigh_on_host
from jaxkfac.memory import ProcessGroup, in_equal_shares

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
            device: Of the factor, ``None`` where it is in host memory.
            previous: The eigenvectors there are, if they may be kept.

        Raises:
            NonFiniteFactorError: naming the matrix.
        """
        if previous is not None and self._tolerance is not None:
            reused = _reuse(matrix, previous, self._tolerance)
            if reused is not None:
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


# ---------------- several processes: each decomposes a share of a refresh, and they exchange the
# results


_Index = tuple[int, ...]


class Shares:
    """Who decomposes what.

    The matrices of factors that lie on devices of several processes are divided among these, one
    slice of a stack at a time, by the cubes of their sizes. Everything else each process does
    itself: diagonals, and factors of its own.

    Args:
        blocks: Of a refresh, in the same order in every process.
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
            parts = [(b, index) for b in shared for index in np.ndindex(b.source.stack)]
            owners = in_equal_shares([b.size**3 for b, _ in parts], len(group.devices))
            for (block, index), owner in zip(parts, owners, strict=True):
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
        """Complete results and failures by those of the other processes.

        Args:
            doing: For errors.
            about: What must be the same in every process.
            error: What this process fails with; nothing is exchanged then.
            results: Whole arrays, zero where they are not of this process.
            failures: A matrix that failed in one process has failed in all.
            zeros: Arrays for a block of which this process has nothing.

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
                    results.pop(place, None)
                    texts = group.told(str(failures.get(place, "")))
                    failures[place] = NonFiniteFactorError(next(filter(None, texts)))
                    continue
                whole = results.get(place) or zeros(block)
                for part in whole:
                    if part is not None:
                        part[...] = group.combined(part)
                results[place] = whole
