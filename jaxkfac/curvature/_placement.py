"""Where a factor is decomposed: on its own device while its workspace fits, else on the host."""

from typing import Any, Literal

import numpy as np

from jaxkfac.memory import free_bytes

Placement = Literal["auto", "device", "host"]

# The matrix that is overwritten, and 1 + 6 n + 2 n^2 elements of scratch: LWORK of LAPACK's ssyevd
# for eigenvectors. cuSOLVER says what it takes when it runs; its documentation has no formula.
WORKSPACE_MATRICES = 3


def matrices_that_fit(n: int, dtype: Any, device: Any) -> int | None:
    """How many ``(n, n)`` matrices can be decomposed at once on ``device``.

    Half of what ``memory_stats`` says is free is used; the rest is left to results and
    fragmentation. ``None`` is no known limit (the CPU keeps no such count).
    """
    free = free_bytes(device)
    if free is None:
        return None
    return int(free / 2 // (WORKSPACE_MATRICES * n**2 * np.dtype(dtype).itemsize))


def device_of(x: Any) -> Any:
    """The device of ``x`` for questions about memory: the first of several."""
    return next(iter(x.devices()))


def is_on_host(x: Any) -> bool:
    """Whether ``x`` belongs to an accelerator but lies in host memory."""
    return "host" in (x.sharding.memory_kind or "") and device_of(x).platform != "cpu"
