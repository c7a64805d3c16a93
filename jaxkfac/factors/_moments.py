"""Statistics of positions: every row of a layer by itself (``sharing="expand"``)."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.factors._rows import Array, Rows, in_own_order
from jaxkfac.interception import _compat
from jaxkfac.interception._rewrite import Site
from jaxkfac.interception._values import Use
from jaxkfac.linalg._gram import (
    PANELS_FROM,
    gram,
    gram_panels,
    statistics_dtype,
    unpack_panels,
)

Slot = dict[str, Any]


def moments(site: Site, use: Use, side: Rows, like: Any) -> Any:
    """Sum of outer products of rows, in the form of a slot's entry.

    ``like`` is a matrix, a vector for a diagonal, or a tuple for panels (see ``packs``);
    its leading axes beyond the stack of ``side`` are filled with copies.
    """
    if isinstance(like, tuple):
        return gram_panels(side.x, side.features[0][0])
    lead = len(side.batch)
    lost = 1 if use.free_stack and not lead else 0  # experts that share one input
    if like.ndim - lead - lost == 2:
        sums = _patch_moments(side) if use.kind == "conv" else _moments(side)
        sums = in_own_order(site, use, side, sums, lead=lead, copies=2)
    else:
        squares = jnp.square(side.x.astype(statistics_dtype(side.x.dtype)))
        sums = _summed(site, use, side, squares)
    return jnp.broadcast_to(sums, like.shape) if lost else sums


def _moments(side: Rows) -> Array:
    return gram(side.x, side.rows, side.batch)


def _patch_moments(side: Rows) -> Array:
    """Moments of wide patches by panels: mirrored here, which a run of many rows can bear."""
    size = math.prod(side.x.shape[d] for d in side.feature_axes)
    if side.batch or size < PANELS_FROM:
        return _moments(side)
    x = side.x.transpose(*side.rows, *side.feature_axes).reshape(-1, size)
    return unpack_panels(gram_panels(x, 1))


def packs(uses: Sequence[Use], side: str) -> bool:
    """Whether a factor can be gathered in panels: one feature axis in every use, no experts."""
    kinds = ("dense",) if side == "a" else ("dense", "conv", "embedding")
    return all(
        u.kind in kinds
        and not u.batch_axes
        and not u.free_stack
        and len(u.in_axes if side == "a" else u.out_axes) == 1
        for u in uses
    )


def input_moments(site: Site, use: Use, slot: Slot, side: Rows, weights: Array | None) -> Slot:
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


def tokens_of(use: Use, operands: Any) -> Array:
    """Which rows of the table a lookup reads; none, out of range above, where it reads none."""
    tokens, rows = operands[1][..., 0], operands[0].shape[0]
    if tokens.dtype.itemsize < 4:
        tokens = tokens.astype(jnp.int32)  # which holds the number of rows
    if use.eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        return jnp.clip(tokens, 0, rows - 1)
    return jnp.where(tokens < 0, rows, tokens)  # else it counts from the end


def token_counts(site: Site, use: Use, slot: Slot, operands: Any, weights: Array | None) -> Slot:
    """The input side of an embedding: how often each row of the table was read."""
    table, indices = operands[0], tokens_of(use, operands)
    dtype = slot["a"].dtype
    ones = jnp.ones(indices.shape, dtype) if weights is None else weights.astype(dtype)
    ones = _compat.cast_varying(ones, indices)
    zeros = _compat.cast_varying(jnp.zeros(table.shape[0], dtype), indices)
    return {"a": zeros.at[indices].add(ones, mode="drop"), "a_count": ones.sum()}


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
