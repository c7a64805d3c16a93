"""Where a factor is decomposed: on its own device while its workspace fits, else on the host."""

from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Sharding

from jaxkfac.memory import ProcessGroup, free_bytes

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


def matrices_that_fit(n: int, dtype: Any, like: Any) -> int | None:
    """How many ``(n, n)`` matrices can be decomposed at once where an array lies.

    Half of what ``memory_stats`` says is free is used; the rest is left to results and
    fragmentation. ``None`` is no known limit (the CPU keeps no such count). On devices of several
    processes the least of what they find.

    Args:
        n: Size.
        dtype: Of the matrices.
        like: The array, or a device.
    """
    is_array = isinstance(like, jax.Array)
    free = free_bytes(device_of(like.sharding) if is_array else like)
    if free is None:
        return None
    fit = int(free / 2 // (_WORKSPACE_MATRICES * n**2 * np.dtype(dtype).itemsize))
    group = ProcessGroup.of(like.sharding) if is_array else None
    return (
        fit if group is None else int(group.gathered(np.array(min(fit, 1 << 30), np.int32)).min())
    )


def device_of(sharding: Sharding) -> Any:
    """The device to ask about memory: the first that is of this process."""
    return next(iter(sharding.addressable_devices), next(iter(sharding.device_set)))


def is_on_host(x: Any) -> bool:
    """Whether ``x`` belongs to an accelerator but lies in host memory."""
    return "host" in (x.sharding.memory_kind or "") and device_of(x.sharding).platform != "cpu"
