"""Where a factor is decomposed: on its own device while its workspace fits, else on the host."""

from typing import Any, Literal

import numpy as np

from jaxkfac.memory import free_bytes

Placement = Literal["auto", "device", "host"]

_WORKSPACE_MATRICES = 3  # the one that is overwritten, and the scratch of one
_LARGEST_CALL = 2**31 - 1  # bytes of matrices


def solver_scratch(n: int, number: int, itemsize: int) -> int:
    r"""Bytes that one call takes beside its matrices and results, to decompose all of one size.

    $1 + 6 n + 2 n^2$ elements for each matrix that is decomposed at the same time: LAPACK's, by
    its documentation. cuSOLVER's says what it takes when it runs, and has no formula in its
    documentation; for its batched solver this is LAPACK's for as many matrices as jaxlib gives
    it at once, which are at most 2**31 - 1 bytes.

    Args:
        n: Rows of a matrix.
        number: Of matrices; 1 where they are decomposed in turn.
        itemsize: Bytes of an element.

    References:
        LAPACK, ``ssyevd``, ``LWORK`` for ``JOBZ = 'V'``. jaxlib (since 0.7.2),
        ``jaxlib/gpu/solver_kernels_ffi.cc``, ``Syevd64Impl``. NVIDIA, cuSOLVER documentation,
        ``cusolverDnXsyevBatched_bufferSize``.
    """
    at_once = min(number, max(1, _LARGEST_CALL // (n**2 * itemsize)))
    return at_once * (1 + 6 * n + 2 * n**2) * itemsize


def matrices_that_fit(n: int, dtype: Any, device: Any) -> int | None:
    """How many ``(n, n)`` matrices can be decomposed at once on ``device``.

    Half of what ``memory_stats`` says is free is used; the rest is left to results and
    fragmentation. ``None`` is no known limit (the CPU keeps no such count).
    """
    free = free_bytes(device)
    if free is None:
        return None
    return int(free / 2 // (_WORKSPACE_MATRICES * n**2 * np.dtype(dtype).itemsize))


def device_of(x: Any) -> Any:
    """The device of ``x`` for questions about memory: the first of several."""
    return next(iter(x.devices()))


def is_on_host(x: Any) -> bool:
    """Whether ``x`` belongs to an accelerator but lies in host memory."""
    return "host" in (x.sharding.memory_kind or "") and device_of(x).platform != "cpu"
