"""Where a factor is decomposed: on its own device while its workspace fits, else on the host."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

Placement = Literal["auto", "device", "host"]

# syevd, on LAPACK and on cuSOLVER: the matrix it overwrites and about 2 n^2 of scratch.
_WORKSPACE_MATRICES = 3


def check_placement(placement: str) -> None:
    """Refuse an unknown placement."""
    if placement not in get_args(Placement):
        raise ValueError(f"placement must be one of {get_args(Placement)}, got {placement!r}")


def matrices_that_fit(n: int, dtype: Any, device: Any) -> int | None:
    """How many ``(n, n)`` matrices can be decomposed at once on ``device``.

    Half of what ``memory_stats`` says is free is used; the rest is left to results and
    fragmentation. ``None`` is no known limit (the CPU keeps no such count).
    """
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return max(int(free / 2 // (_WORKSPACE_MATRICES * n**2 * np.dtype(dtype).itemsize)), 0)


def is_traced(x: Any) -> bool:
    """Whether ``x`` has no value yet."""
    return isinstance(x, Tracer)


def home_of(x: Any) -> Any:
    """The device of ``x`` for questions about memory: the first of several."""
    return next(iter(x.devices()))


def is_on_host(x: Any) -> bool:
    """Whether ``x`` belongs to an accelerator but lies in host memory."""
    return "host" in (x.sharding.memory_kind or "") and home_of(x).platform != "cpu"


def send_home(result: np.ndarray, origin: Array) -> Array:
    """Put a host result where ``origin`` lives; replicated if ``origin`` is sharded.

    An array that was not committed to a device comes back uncommitted, so that it mixes
    with arrays of any device as before.
    """
    if not origin.committed:
        return jnp.asarray(result)
    sharding = origin.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    elif len(sharding.device_set) > 1:
        return jnp.asarray(result)
    return jax.device_put(result, sharding)
