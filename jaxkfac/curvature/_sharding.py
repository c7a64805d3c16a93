"""The sharding of results: that of the factor they were computed from, replicated."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from jaxkfac.curvature._placement import device_of
from jaxkfac.memory import put_leaf


class ResultSharding(NamedTuple):
    """Where results of one factor go, without holding the factor.

    Attributes:
        device: The (first) device of this process, ``None`` for a NumPy array.
        sharding: Where results are committed to, ``None`` for uncommitted results.
    """

    device: Any
    sharding: Sharding | None


UNCOMMITTED = ResultSharding(None, None)


def result_sharding(factor: Any) -> ResultSharding:
    """Results of a sharded factor are replicated, those of an uncommitted one uncommitted."""
    if not isinstance(factor, jax.Array):
        return UNCOMMITTED
    device = device_of(factor)
    sharding = factor.sharding
    if not factor.committed:
        return ResultSharding(device, None)
    if isinstance(sharding, NamedSharding):
        kind = sharding.memory_kind
        sharding = NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=kind)
        return ResultSharding(device, sharding)
    return ResultSharding(device, None if len(sharding.device_set) > 1 else sharding)


def put_result(result: np.ndarray, like: ResultSharding) -> Array:
    """Put a host result where its factor lives, in memory of its own."""
    return put_leaf(result, like.sharding)


def detached(x: Any) -> Any:
    """The same buffer as another array object, which keeps its own copy on the host.

    JAX keeps the NumPy copy of an array with the array, which the caller may hold for long.
    """
    if isinstance(x, jax.Array) and x.is_fully_replicated and x.addressable_shards:
        return x.addressable_data(0)
    return x
