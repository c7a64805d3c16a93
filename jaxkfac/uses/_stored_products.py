"""Products with rows of a gradient store: of queries, and of each row with itself."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature import (
    BlockDamping,
    Eigenbases,
    RotatedPart,
    owned_blocks,
    rotated_block,
    rotated_parts,
    rotated_powers,
)
from jaxkfac.interception import Layer
from jaxkfac.kinds import LowRankMatrices, rotate_gradients
from jaxkfac.uses._held import Queries

_EXACT = jax.lax.Precision.HIGHEST

Parts = tuple[RotatedPart, ...]


def width(parts: Parts) -> int:
    """How many numbers a row has."""
    return sum(part.size for part in parts)


def as_rows(blocks: Sequence[Float[Array, "..."]], parts: Parts) -> Float[Array, "many width"]:
    """Parts ``(stack..., many, rows, columns)`` side by side, each in the order of its shape."""
    moved = [_first(x, len(part.layer.stack)) for x, part in zip(blocks, parts, strict=True)]
    return jnp.concatenate([x.reshape(len(x), -1) for x in moved], 1)


def _first(block: Array, axis: int) -> Array:
    return jnp.moveaxis(block, axis, 0)


def _columns(parts: Parts) -> list[slice]:
    ends = itertools.accumulate((part.size for part in parts), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


@jax.jit
def rotated_queries(queries: Queries, bases: Eigenbases) -> list[Any]:
    """Queries in the eigenbasis, by part: ``(Q, size)``, or two factors of a layer at low rank."""
    found: list[Any] = []
    for block in owned_blocks(bases):
        layer, axis = block.layer, len(block.layer.stack)
        weight, bias = rotated_block(queries.whole, bases, block)
        if layer.name in queries.low_rank and layer.weight in block.parameters:
            found.append(_rotated_factors(queries, bases, layer))
            weight = None
        for x in (weight, bias):
            if x is not None:
                found.append(_first(x, axis).reshape(queries.number, -1))
    return found


def _rotated_factors(queries: Queries, bases: Eigenbases, layer: Layer) -> LowRankMatrices:
    """``(stack..., Q, in[+1], rank[+1])`` and ``(stack..., Q, rank[+1], out)``.

    A joint bias, which is no part of the weight's factors, is one more rank.
    """
    factors: Any = queries.of_weight(layer)
    a, g = bases.spectra(layer)
    left, right = (x.astype(g.values.dtype) for x in factors)
    if bases.wants_ones(layer):
        bias = queries.of_bias(layer)[..., None, :].astype(right.dtype)
        left = jnp.pad(left, [(0, 0)] * (left.ndim - 2) + [(0, 1), (0, 1)])
        left = left.at[..., -1, -1].set(1)
        right = jnp.concatenate([right, bias], -2)
    return LowRankMatrices(
        rotate_gradients(left, a.vectors, None), rotate_gradients(right, None, g.vectors)
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def products(
    rows: Float[Array, "n width"], queries: list[Any], parts: Parts, names: tuple[str, ...]
) -> Float[Array, "Q layers n"]:
    """Products of queries and rows, by layer."""
    by_layer: dict[str, Array] = {}
    for columns, part, query in zip(_columns(parts), parts, queries, strict=True):
        if (name := part.layer.name) not in names:
            continue
        if isinstance(query, LowRankMatrices):
            dense = jnp.einsum("...ir,...ro->...io", query.left, query.right, precision=_EXACT)
            query = _first(dense, len(part.layer.stack)).reshape(-1, part.size)
        some = rows[:, columns].astype(query.dtype)
        each = jnp.einsum("qs,ns->qn", query, some, precision=_EXACT)
        by_layer[name] = by_layer[name] + each if name in by_layer else each
    dtype = jnp.result_type(*[x.dtype for x in by_layer.values()])
    return jnp.stack([by_layer[name].astype(dtype) for name in names], 1)


@jax.jit
def weights_of(bases: Eigenbases, damping: Any) -> list[tuple[Array, Array]]:
    """Of each part the inverse eigenvalues ``(size,)`` and the roots of their unit, likewise."""
    return _weights(bases, damping)


@jax.jit
def heuristic_weights_of(bases: Eigenbases) -> list[tuple[Array, Array]]:
    """The same with the heuristic damping."""
    return _weights(bases, "heuristic")


def _weights(bases: Eigenbases, damping: BlockDamping) -> list[tuple[Array, Array]]:
    found = []
    for part, power in zip(rotated_parts(bases), rotated_powers(bases, damping), strict=True):
        root = jnp.broadcast_to(power.root, power.values.shape)
        found.append((power.values.reshape(part.size), root.reshape(part.size)))
    return found


@functools.partial(jax.jit, static_argnums=(2, 3))
def own_products(
    rows: Float[Array, "n width"],
    weights: list[tuple[Array, Array]],
    parts: Parts,
    names: tuple[str, ...],
) -> Float[Array, " n"]:
    """Products of each row with itself, through the inverse eigenvalues."""
    found = []
    for columns, part, (values, root) in zip(_columns(parts), parts, weights, strict=True):
        if part.layer.name in names:
            some = rows[:, columns].astype(values.dtype) * root
            found.append((jnp.square(some) * values).sum(1))
    dtype = jnp.result_type(*[x.dtype for x in found])
    return jnp.stack([x.astype(dtype) for x in found]).sum(0)


def rows_at_once(parts: Parts, max_bytes: int) -> int:
    """How many rows fit, once they are widened to float32."""
    return max(1, max_bytes // (4 * width(parts)))
