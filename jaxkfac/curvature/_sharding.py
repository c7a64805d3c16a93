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
        factor: The factor's sharding, ``None`` for a NumPy array.
        committed: Whether the factor is committed to it.
    """

    factor: Sharding | None
    committed: bool

    @property
    def device(self) -> Any:
        """The (first) device of this process, ``None`` for a NumPy array."""
        return None if self.factor is None else device_of(self.factor)

    @property
    def sharding(self) -> Sharding | None:
        """Where results are committed to: replicated, ``None`` for uncommitted results."""
        factor = self.factor if self.committed else None
        if isinstance(factor, NamedSharding):
            return NamedSharding(factor.mesh, PartitionSpec(), memory_kind=factor.memory_kind)
        return None if factor is None or len(factor.device_set) > 1 else factor


UNCOMMITTED = ResultSharding(None, False)


def result_sharding(factor: Any) -> ResultSharding:
    """Results of a sharded factor are replicated, those of an uncommitted one uncommitted."""
    if not isinstance(factor, jax.Array):
        return UNCOMMITTED
    return ResultSharding(factor.sharding, factor.committed)


def put_result(result: np.ndarray, like: ResultSharding, *, gives_up: bool = False) -> Array:
    """Put a host result where its factor lives, in memory of its own or, given up, in its."""
    return put_leaf(result, like.sharding, gives_up=gives_up)
