"""Sums over arrays, and whether they are finite, by reductions that compile fast.

Of a vector of more than 32 entries XLA's CPU compiler sums in three kernels, and compiles each for
10 to 20 ms; of a matrix it leaves the sum to a library.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Inexact

_WHOLE = re.compile(
    r"\w+\[[\d,]*\]"
)  # as "float32[3]"; a type also says axes of meshes, and memory


def alike(*columns: Sequence[Array]) -> list[list[int]]:
    """The places of arrays that one program can join: traced, whole, and of one dtype.

    Arrays with values may lie on different devices, and of those that are divided over an explicit
    mesh, or that vary over the devices of a ``shard_map``, each is a group of its own.

    Args:
        columns: Of several, all of what stands at a place is looked at.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, row in enumerate(zip(*columns, strict=True)):
        joins = all(isinstance(x, Tracer) and _WHOLE.fullmatch(str(jax.typeof(x))) for x in row)
        groups[tuple(x.dtype for x in row) if joins else i].append(i)
    return list(groups.values())


def inner_product(
    left: Sequence[Inexact[Array, "..."]], right: Sequence[Inexact[Array, "..."]], dtype: DTypeLike
) -> Inexact[Array, ""]:
    """The sum of the products of all entries, in that dtype; arrays at a place are of one shape."""
    parts = [
        (x.astype(dtype) * y.astype(dtype)).sum()
        for x, y in zip(*_joined(left, right), strict=True)
    ]
    return sum(parts, jnp.zeros((), dtype))


def is_all_finite(*arrays: Inexact[Array, "..."]) -> Bool[Array, ""]:
    """Whether every entry of every array is finite.

    Of a matrix by a sum of zeros, but for what is not finite: that less itself is NaN. XLA's CPU
    compiler takes 0.03 s for it, and 0.1 s for ``jnp.isfinite(x).all()``, for which it writes all
    answers first; of ``x * 0`` it writes all zeros. The largest magnitude would do as well if
    YNNPACK, which takes it there, handed on NaN (jax 0.10.2).
    """
    arrays = tuple(map(jax.lax.stop_gradient, arrays))
    flags = [_is_finite(x) for x in _joined(arrays)[0]]
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def _is_finite(x: Array) -> Array:
    if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        return (x - x).sum() == 0
    # The least and the largest entry in one kernel, where one of the two would take three.
    ends = np.asarray([np.inf, -np.inf], x.dtype)
    least, most = jax.lax.reduce((x, x), (ends[0], ends[1]), _least_and_most, (0,))
    return (least > -jnp.inf) & (most < jnp.inf)  # of NaN neither holds


def _least_and_most(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, Array]:
    return jax.lax.min(a[0], b[0]), jax.lax.max(a[1], b[1])


def _joined(*columns: Sequence[Array]) -> list[list[Array]]:
    """The columns, each with the vectors that look alike as one."""
    rows = list(zip(*columns, strict=True))
    vectors = [row for row in rows if row[0].ndim == 1]
    groups = alike(*zip(*vectors, strict=True)) if vectors else []
    joined = [
        [jnp.concatenate([vectors[i][side] for i in places]) for places in groups]
        for side in range(len(columns))
    ]
    return [
        [row[side] for row in rows if row[0].ndim != 1] + joined[side]
        for side in range(len(columns))
    ]
