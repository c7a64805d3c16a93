"""An operator as a map of one long vector, which is what the outside libraries take."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkfac.curvature.operators._precision import as_outside
from jaxkfac.interception import is_differentiable
from jaxkfac.linalg import statistics_dtype


class Flat(NamedTuple):
    """An operator on vectors ``(size,)``.

    Attributes:
        matvec: The product, ``(size,)`` to ``(size,)``.
        size: The dimension.
        dtype: float64 where any leaf is, else float32: bfloat16 leaves meet the algorithm's
            own vectors only inside the product.
        unflatten: From a vector to a tree like ``operator.like``; leaves without a gradient
            become float0.
    """

    matvec: Callable[[Array], Array]
    size: int
    dtype: Any
    unflatten: Callable[[Array], Any]


def length(vector: Array) -> Array:
    """Euclidean length without the squares that overflow, or underflow to nothing."""
    largest = jnp.abs(vector).max()
    divisor = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return largest * jnp.linalg.norm(vector / divisor)


def wide_dtype(operator: Any) -> Any:
    """The dtype in which an operator's vectors are combined: at least float32."""
    return statistics_dtype(*(leaf.dtype for leaf in operator.leaves.values()))


def coarsest_rounding(operator: Any) -> float:
    """The rounding unit of the operator's coarsest dtype."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in operator.leaves.values())


def flatten(operator: Any) -> Flat:
    """View an operator as a map of one long vector."""
    structs, dtype = operator.leaves, wide_dtype(operator)
    ends = np.cumsum([leaf.size for leaf in structs.values()]).tolist()

    def pieces(vector: Array) -> list[Array]:
        parts = jnp.split(vector, ends[:-1])
        return [x.reshape(leaf.shape) for x, leaf in zip(parts, structs.values(), strict=True)]

    def matvec(vector: Array) -> Array:
        out = operator.product(dict(zip(structs, pieces(vector), strict=True)))
        return jnp.concatenate([out[path].astype(dtype).ravel() for path in structs])

    def unflatten(vector: Array) -> Any:
        return as_tree(operator.like, dict(zip(structs, pieces(vector), strict=True)))

    return Flat(as_outside(matvec), ends[-1], dtype, unflatten)


def as_tree(like: Any, leaves: dict[str, Array]) -> Any:
    """The tree of ``like`` with the given floating leaves in its dtypes; others are float0."""
    rest = iter(leaves.values())
    return jax.tree.map(
        lambda leaf: (
            next(rest).astype(leaf.dtype)
            if is_differentiable(leaf)
            else np.zeros(leaf.shape, jax.dtypes.float0)
        ),
        like,
    )
