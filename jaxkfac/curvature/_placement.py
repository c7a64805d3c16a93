"""Where a factor is decomposed: on its own device while its workspace fits, else on the host."""

from typing import Any, Literal

import jax
import numpy as np

from jaxkfac.memory import ProcessGroup, free_bytes

Placement = Literal["auto", "device", "host"]

# syevd, on LAPACK and on cuSOLVER: the matrix it overwrites and about 2 n^2 of scratch.
WORKSPACE_MATRICES = 3


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
    free = free_bytes(device_of(like) if is_array else like)
    if free is None:
        return None
    fit = int(free / 2 // (WORKSPACE_MATRICES * n**2 * np.dtype(dtype).itemsize))
    group = ProcessGroup.of(like.sharding) if is_array else None
    return (
        fit if group is None else int(group.gathered(np.array(min(fit, 1 << 30), np.int32)).min())
    )


def device_of(x: Any) -> Any:
    """The device of ``x`` for questions about memory: the first that is of this process."""
    return next(iter(x.sharding.addressable_devices), next(iter(x.devices())))


def is_on_host(x: Any) -> bool:
    """Whether ``x`` belongs to an accelerator but lies in host memory."""
    return "host" in (x.sharding.memory_kind or "") and device_of(x).platform != "cpu"
