"""Rows of a gradient store: each example's gradient, flattened part by part, some at low rank."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature import Eigenbases
from jaxkfac.curvature.per_example import Queries
from jaxkfac.interception import Layer
from jaxkfac.kinds import LowRankMatrices, rotate_gradients
from jaxkfac.uses._damped_gradients import BlockDamping, owned_blocks
from jaxkfac.uses._rotated_blocks import (
    RotatedPart,
    rotated_block,
    rotated_parts,
    rotated_powers,
)

_EXACT = jax.lax.Precision.HIGHEST


# ---------------- the layout of a row


class RowPart(NamedTuple):
    """Where one block's part of a gradient is stored in a row.

    Attributes:
        block: The block's part.
        rank: Rank of its matrices, each stored as two factors; ``None`` if all elements are stored.
    """

    block: RotatedPart
    rank: int | None

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.block.layer.name

    @property
    def number_of_factors(self) -> tuple[int, int]:
        """Elements of the left and the right factors of a part at low rank."""
        assert self.rank is not None
        *stack, rows, columns = self.block.shape
        return math.prod(stack) * rows * self.rank, math.prod(stack) * self.rank * columns

    @property
    def size(self) -> int:
        """How many numbers are stored."""
        return self.block.size if self.rank is None else sum(self.number_of_factors)


Parts = tuple[RowPart, ...]


def row_parts(bases: Eigenbases, rank: int | None) -> Parts:
    """The parts of a row; a weight is stored at low rank where that takes fewer numbers."""
    return tuple(
        RowPart(block, rank if rank is not None and _saves(block, rank) else None)
        for block in rotated_parts(bases)
    )


def _saves(block: RotatedPart, rank: int) -> bool:
    rows, columns = block.shape[-2:]
    return rank * (rows + columns) < rows * columns


def check_rank(bases: Eigenbases, rank: int) -> None:
    """Refuse a rank that no layer's gradient has.

    Raises:
        ValueError: naming the layer whose shorter side is the longest.
    """
    blocks = [x for x in rotated_parts(bases) if not x.is_bias and not x.layer.is_diagonal]
    if not blocks:
        raise ValueError(f"rank={rank}: no layer's gradient is a matrix; leave rank= out")
    widest = max(blocks, key=lambda x: min(x.shape[-2:]))
    if rank > (largest := min(widest.shape[-2:])):
        raise ValueError(
            f"rank={rank} is above the shorter side of every layer; the widest is "
            f"{widest.layer.name!r}, {widest.shape[-2]} × {widest.shape[-1]}: choose a rank below "
            f"{largest}, or leave rank= out"
        )


def width(parts: Parts) -> int:
    """Number of elements in a row."""
    return sum(p.size for p in parts)


def full_width(parts: Parts) -> int:
    """Number of elements of a gradient."""
    return sum(p.block.size for p in parts)


def rows_at_once(parts: Parts, max_bytes: int) -> int:
    """How many gradients fit in float32."""
    return max(1, max_bytes // (4 * full_width(parts)))


def _columns(parts: Parts) -> list[slice]:
    ends = itertools.accumulate((p.size for p in parts), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _first(block: Array, axis: int) -> Array:
    return jnp.moveaxis(block, axis, 0)


# ---------------- writing rows


def as_rows(
    blocks: Sequence[Float[Array, "..."]], parts: Parts
) -> tuple[Float[Array, "many width"], list[Float[Array, " many"] | None]]:
    """Join arrays ``(stack..., many, rows, columns)`` into rows, each flattened in its order.

    Returns:
        The rows; and for each part at low rank what its matrices lose, as ratios of norms.
    """
    flattened, lost = [], []
    for block, p in zip(blocks, parts, strict=True):
        matrices = _first(block, len(p.block.layer.stack))
        number, error = len(matrices), None
        if p.rank is None:
            arrays: Sequence[Array] = (matrices,)
        else:
            arrays, error = nearest_of_rank(matrices, p.rank)
        flattened += [x.reshape(number, -1) for x in arrays]
        lost.append(error)
    return jnp.concatenate(flattened, 1), lost


_OVERSAMPLING = 8
_ITERATIONS = 2


def nearest_of_rank(
    matrices: Float[Array, "many ..."], rank: int
) -> tuple[tuple[Array, Array], Float[Array, " many"]]:
    r"""Matrices near the nearest of a rank (a truncated singular value decomposition), as factors.

    The range is found by two subspace iterations on $r + 8$ random vectors (algorithm 4.4 of Halko
    et al., 2011), the same vectors at every call. The result is exact up to rounding for matrices
    of rank $r$, for example of examples that pass a layer at $r$ positions. kronfluence decomposes
    its query gradients in this way, without the eight further vectors.

    Args:
        matrices: ``(many, stack..., rows, columns)``.
        rank: $r$, at most the shorter side.

    Returns:
        ``(many, stack..., rows, rank)`` and ``(many, stack..., rank, columns)``, the factor of the
        shorter side orthonormal; and the ratio of Frobenius norms of what is lost and of the
        matrices, ``(many,)``, over the whole stack.

    References:
        Nathan Halko, Per-Gunnar Martinsson and Joel Tropp, "Finding Structure with Randomness",
        2011.
    """
    rows, columns = matrices.shape[-2:]
    if rows > columns:
        (left, right), errors = nearest_of_rank(jnp.swapaxes(matrices, -1, -2), rank)
        return (jnp.swapaxes(right, -1, -2), jnp.swapaxes(left, -1, -2)), errors
    largest = jnp.abs(matrices).max(range(1, matrices.ndim), keepdims=True)
    scale = jnp.where(largest > 0, largest, 1)  # squares of small gradients are 0
    unit = matrices / scale
    basis, small = None, unit
    if (number := rank + _OVERSAMPLING) < rows:
        vectors = jax.random.normal(jax.random.key(0), (columns, number), matrices.dtype)
        basis = _orthonormal(_product(unit, vectors))
        for _ in range(_ITERATIONS):
            other_basis = _orthonormal(_product(jnp.swapaxes(unit, -1, -2), basis))
            basis = _orthonormal(_product(unit, other_basis))
        small = _product(jnp.swapaxes(basis, -1, -2), unit)
    right_basis, triangle = jnp.linalg.qr(jnp.swapaxes(small, -1, -2))
    u, s, v = jnp.linalg.svd(jnp.swapaxes(triangle, -1, -2), full_matrices=False)
    left = u[..., :rank] if basis is None else _product(basis, u[..., :rank])
    inner = s[..., :rank, None] * v[..., :rank, :]
    right = _product(inner, jnp.swapaxes(right_basis, -1, -2))
    axes = tuple(range(1, matrices.ndim))
    lost = jnp.sqrt(jnp.square(unit - _product(left, right)).sum(axes))
    norms = jnp.sqrt(jnp.square(unit).sum(axes))
    return (left, right * scale), lost / jnp.where(norms > 0, norms, 1)


def _orthonormal(matrices: Array) -> Array:
    return jnp.linalg.qr(matrices)[0]


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=_EXACT)


# ---------------- queries in the eigenbasis


@jax.jit
def rotated_queries(queries: Queries, bases: Eigenbases) -> list[Any]:
    """Queries in the eigenbasis, by part: ``(size, Q)``, or two factors for low rank.

    Rows are multiplied from the left: on a CPU, contracting the last axes of both takes longer.
    """
    by_part: list[Any] = []
    for block in owned_blocks(bases):
        layer, axis = block.layer, len(block.layer.stack)
        weight, bias = rotated_block(queries.whole, bases, block)
        if layer.name in queries.low_rank and layer.weight in block.parameters:
            by_part.append(_rotated_factors(queries, bases, layer))
            weight = None
        for x in (weight, bias):
            if x is not None:
                by_part.append(_first(x, axis).reshape(queries.number, -1).T)
    return by_part


def _rotated_factors(queries: Queries, bases: Eigenbases, layer: Layer) -> LowRankMatrices:
    """``(stack..., Q, in[+1], rank[+1])`` and ``(stack..., Q, rank[+1], out)``.

    A joint bias is not part of the weight's factors, so it adds one to the rank.
    """
    factors: Any = queries.of_weight(layer)
    a, g = bases.spectra(layer)
    left_factor, right_factor = (x.astype(g.values.dtype) for x in factors)
    if bases.wants_ones(layer):
        bias = queries.of_bias(layer)[..., None, :].astype(right_factor.dtype)
        left_factor = jnp.pad(left_factor, [(0, 0)] * (left_factor.ndim - 2) + [(0, 1), (0, 1)])
        left_factor = left_factor.at[..., -1, -1].set(1)
        right_factor = jnp.concatenate([right_factor, bias], -2)
    return LowRankMatrices(
        rotate_gradients(left_factor, a.vectors, None),
        rotate_gradients(right_factor, None, g.vectors),
    )


# ---------------- products with rows


@functools.partial(jax.jit, static_argnums=(2, 3))
def products(
    rows: Float[Array, "n width"], queries: list[Any], parts: Parts, names: tuple[str, ...]
) -> Float[Array, "Q layers n"]:
    """Products of queries and rows, by layer."""
    by_layer: dict[str, Array] = {}
    for columns, row_part, query in zip(_columns(parts), parts, queries, strict=True):
        if (name := row_part.name) not in names:
            continue
        scores = _part_products(rows[:, columns], query, row_part)
        by_layer[name] = by_layer[name] + scores if name in by_layer else scores
    dtype = jnp.result_type(*[x.dtype for x in by_layer.values()])
    return jnp.stack([by_layer[name].astype(dtype) for name in names], 1)


def _part_products(
    stored: Float[Array, "n part"], query: Any, row_part: RowPart
) -> Float[Array, "Q n"]:
    """Products of one part. Two low ranks are multiplied as factors where that is less work."""
    axis = len(row_part.block.layer.stack)
    if isinstance(query, LowRankMatrices):
        query_left, query_right = (_first(jnp.asarray(x), axis) for x in query)
        dtype, query_rank = query_left.dtype, query_right.shape[-2]
        rows, columns = row_part.block.shape[-2:]
        if row_part.rank and row_part.rank * query_rank * (rows + columns) < rows * columns:
            left, right = _factors(stored.astype(dtype), row_part)
            both_left = jnp.einsum("n...ir,q...ip->qn...rp", left, query_left, precision=_EXACT)
            both_right = jnp.einsum("n...ro,q...po->qn...rp", right, query_right, precision=_EXACT)
            return (both_left * both_right).sum(range(2, both_left.ndim))
        query = _product(query_left, query_right).reshape(len(query_left), -1).T
    gradients = _gradients(stored.astype(query.dtype), row_part)
    return _product(gradients, query).T


def _factors(stored: Float[Array, "n part"], row_part: RowPart) -> tuple[Array, Array]:
    """``(n, stack..., rows, rank)`` and ``(n, stack..., rank, columns)``."""
    *stack, rows, columns = row_part.block.shape
    split, _ = row_part.number_of_factors
    left = stored[:, :split].reshape(len(stored), *stack, rows, row_part.rank)
    return left, stored[:, split:].reshape(len(stored), *stack, row_part.rank, columns)


def _gradients(stored: Float[Array, "n part"], row_part: RowPart) -> Float[Array, "n size"]:
    """All elements of one part."""
    if row_part.rank is None:
        return stored
    return _product(*_factors(stored, row_part)).reshape(len(stored), -1)


@jax.jit
def weights_of(bases: Eigenbases, damping: Any) -> list[tuple[Array, Array]]:
    """For each part, the inverse eigenvalues and the roots of their unit, each ``(size,)``."""
    return _weights(bases, damping)


@jax.jit
def heuristic_weights_of(bases: Eigenbases) -> list[tuple[Array, Array]]:
    """Like :func:`weights_of`, with the heuristic damping."""
    return _weights(bases, "heuristic")


def _weights(bases: Eigenbases, damping: BlockDamping) -> list[tuple[Array, Array]]:
    by_part = []
    for block, power in zip(rotated_parts(bases), rotated_powers(bases, damping), strict=True):
        root = jnp.broadcast_to(power.root, power.values.shape)
        by_part.append((power.values.reshape(block.size), root.reshape(block.size)))
    return by_part


@functools.partial(jax.jit, static_argnums=(2, 3))
def own_products(
    rows: Float[Array, "n width"],
    weights: list[tuple[Array, Array]],
    parts: Parts,
    names: tuple[str, ...],
) -> Float[Array, " n"]:
    """Products of each row with itself, through the inverse eigenvalues."""
    by_part = []
    for columns, row_part, (values, root) in zip(_columns(parts), parts, weights, strict=True):
        if row_part.name in names:
            gradients = _gradients(rows[:, columns].astype(values.dtype), row_part)
            by_part.append(jnp.matmul(jnp.square(gradients * root), values, precision=_EXACT))
    dtype = jnp.result_type(*[x.dtype for x in by_part])
    return jnp.stack([x.astype(dtype) for x in by_part]).sum(0)
