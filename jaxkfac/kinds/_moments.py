"""Statistics of positions: every row of a layer by itself (``sharing="expand"``)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxkfac.interception import Site, Slot, Use
from jaxkfac.kinds._rows import Array, Rows, in_own_order
from jaxkfac.linalg import PANELS_FROM, gram, gram_panels, statistics_dtype, unpack_panels


def moments(site: Site, use: Use, side: Rows, like: Any, *, panels: bool = False) -> Any:
    """Sum of outer products of rows, in the form of a slot's entry.

    ``like`` is a matrix, a vector for a diagonal, or a tuple for panels (see ``packs``);
    its leading axes beyond the stack of ``side`` are filled with copies. With ``panels`` a
    matrix is computed by panels and mirrored.
    """
    if isinstance(like, tuple) or panels:
        triangle = gram_panels(side.x, side.features[0][0])
        return triangle if isinstance(like, tuple) else unpack_panels(triangle)
    lead = len(side.batch)
    lost = 1 if use.free_stack and not lead else 0  # experts that share one input
    if like.ndim - lead - lost == 2:
        sums = use.kind.second_moment(side)
        sums = in_own_order(site, use, side, sums, lead=lead, copies=2)
    else:
        squares = jnp.square(side.x.astype(statistics_dtype(side.x.dtype)))
        sums = _summed(site, use, side, squares)
    return jnp.broadcast_to(sums, like.shape) if lost else sums


def sum_of_outer_products(side: Rows) -> Array:
    """Over rows, for each entry of the stack."""
    return gram(side.x, side.rows, side.batch)


def sum_over_patches(side: Rows) -> Array:
    """Moments of wide patches by panels: mirrored here, which a run of many rows can bear."""
    size = math.prod(side.x.shape[d] for d in side.feature_axes)
    if side.batch or size < PANELS_FROM:
        return sum_of_outer_products(side)
    x = side.x.transpose(*side.rows, *side.feature_axes).reshape(-1, size)
    return unpack_panels(gram_panels(x, 1))


def packs(uses: Sequence[Use], side: str) -> bool:
    """Whether a factor can be gathered in panels: one feature axis in every use, no experts."""
    return all(
        (side == "g" or u.kind.packs_inputs)
        and not u.batch_axes
        and not u.free_stack
        and len(u.in_axes if side == "a" else u.out_axes) == 1
        for u in uses
    )


def input_moments(
    site: Site, use: Use, slot: Mapping[str, Any], side: Rows, weights: Array | None
) -> Slot:
    """Everything the slot wants of the input rows: ``a``, ``a_count``, ``a_sum``."""
    dtype = slot["a_count"].dtype
    count = jnp.asarray(side.number, dtype) if weights is None else weights.sum(dtype=dtype)
    out = {
        "a": moments(site, use, side, slot["a"]),
        "a_count": jnp.broadcast_to(count, slot["a_count"].shape),
    }
    if "a_sum" in slot:
        total = _summed(site, use, side, side.x, dtype)
        out["a_sum"] = jnp.broadcast_to(total, slot["a_sum"].shape)
    return out


def _summed(site: Site, use: Use, side: Rows, x: Array, dtype: Any = None) -> Array:
    """``x`` summed over rows: ``(stack..., features)``."""
    total = x.sum(side.rows, dtype=dtype)
    kept = [d for d in range(side.x.ndim) if d not in side.rows]
    total = total.transpose([kept.index(d) for d in (*side.batch, *side.feature_axes)])
    return in_own_order(site, use, side, total, lead=len(side.batch), copies=1)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which ``shape`` was broadcast."""
    if x.shape == shape:
        return x
    lead = x.ndim - len(shape)
    over = [d for d in range(x.ndim) if d < lead or (shape[d - lead] == 1 != x.shape[d])]
    return x.sum(over).reshape(shape)
