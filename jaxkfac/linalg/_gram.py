"""Second moments of rows, accumulated in at least float32."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

PANELS = 3
PANELS_FROM = 512  # features; below it, smaller products cost as much as they save
# The limit on platforms other than a CPU, from a count of operations and kernels. For panels of
# eight layers of 512 an H100's compiler takes 1.4 times as long as for full products.
_PANELS_FROM_ELSEWHERE = 1024
_MAX_INDEX = 2**31 - 1
_ALIGNMENT = 16  # float32 in a cache line: panels that begin at one are faster


def statistics_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """The dtype for sums over rows of these dtypes: float32, or float64 if any has such parts."""
    double = any(jnp.dtype(d) in (jnp.float64, jnp.complex128) for d in dtypes)
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def gram(
    x: Float[Array, "..."],
    rows: Sequence[int],
    batch: Sequence[int] = (),
    *,
    precision: jax.lax.PrecisionLike = jax.lax.Precision.HIGHEST,
) -> Float[Array, "..."]:
    r"""The sum of outer products $\sum_r x_r x_r^\top$ over some axes of an array.

    Args:
        x: Any floating array.
        rows: Axes to sum over.
        batch: Axes that remain as a stack.
        precision: Precision of products of float32 rows, as in ``jax.lax.dot_general``; the default
            is full precision on every device. Narrower rows lose nothing in one pass.

    Returns:
        Shape ``(batch..., features..., features...)``, where the features are the remaining
        axes in order; float32, or float64 for float64 rows.
    """
    numbers = ((tuple(rows), tuple(rows)), (tuple(batch), tuple(batch)))
    return jax.lax.dot_general(
        x,
        x,
        numbers,
        precision=precision if x.dtype.itemsize >= 4 else None,
        preferred_element_type=statistics_dtype(x.dtype),
    )


def panel_shapes(size: int) -> tuple[tuple[int, int], ...]:
    """Shapes of the panels that hold the upper triangle of a ``(size, size)`` matrix."""
    return tuple((stop - start, size - start) for start, stop in _cuts(size))


def _cuts(size: int) -> list[tuple[int, int]]:
    inner = [round(size * i / PANELS / _ALIGNMENT) * _ALIGNMENT for i in range(1, PANELS)]
    return list(itertools.pairwise([0, *(min(edge, size) for edge in inner), size]))


def gram_panels(
    x: Float[Array, "..."],
    axis: int,
    *,
    precision: jax.lax.PrecisionLike = jax.lax.Precision.HIGHEST,
) -> tuple[Float[Array, "rows cols"], ...]:
    r"""The upper triangle of $\sum_r x_r x_r^\top$ as block rows, for one feature axis.

    Three panels do 2/3 of the full product's work; where that costs more than it saves, they are
    slices of the full product (``has_panels``). More panels would save operations, but lose as much
    to narrower products. Mirroring them (``unpack_panels``) costs memory traffic that pays off for
    one matrix, but not for a stack of them gathered in a loop.

    Args:
        x: Any floating array.
        axis: The feature axis; every other axis is summed over.
        precision: See ``gram``.

    Returns:
        Panel ``i`` holds the rows of block ``i`` and the columns from that block on.
    """
    products = partial(_panel_products, axis=axis, precision=precision)

    def of_whole(x: Array) -> tuple[Array, ...]:
        full_product = gram(x, _all_but(x, axis), precision=precision)
        return tuple(full_product[start:stop, start:] for start, stop in _cuts(x.shape[axis]))

    return _by_platform(x, axis, products, of_whole)


def symmetric_gram(
    x: Float[Array, "..."],
    axis: int,
    *,
    precision: jax.lax.PrecisionLike = jax.lax.Precision.HIGHEST,
) -> Float[Array, "size size"]:
    r"""The matrix $\sum_r x_r x_r^\top$ for one feature axis, by panels if it is wide.

    Args:
        x: Any floating array.
        axis: The feature axis; every other axis is summed over.
        precision: See ``gram``.
    """
    full_product = partial(gram, rows=_all_but(x, axis), precision=precision)
    if x.shape[axis] < PANELS_FROM:
        return full_product(x)
    products = partial(_panel_products, axis=axis, precision=precision)
    return _by_platform(x, axis, lambda x: unpack_panels(products(x)), full_product)


def has_panels(size: int, platform: str) -> bool:
    """Whether a matrix of this size is computed as one product per panel on this platform."""
    return size >= (PANELS_FROM if platform == "cpu" else _PANELS_FROM_ELSEWHERE)


def _by_platform(
    x: Array, axis: int, by_panels: Callable[[Array], Any], by_full_product: Callable[[Array], Any]
) -> Any:
    if has_panels(x.shape[axis], "other"):
        return by_panels(x)
    return jax.lax.platform_dependent(x, cpu=by_panels, default=by_full_product)


def _panel_products(x: Array, *, axis: int, precision: jax.lax.PrecisionLike) -> tuple[Array, ...]:
    size, rows = x.shape[axis], _all_but(x, axis)
    if x.dtype.itemsize < 4:
        # Without this XLA may round one operand of a product and leave the other in float32, as
        # it was computed. The result would be neither symmetric nor positive.
        x = jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(x.dtype).nmant)
    return tuple(
        jax.lax.dot_general(
            jax.lax.slice_in_dim(x, start, stop, axis=axis),
            jax.lax.slice_in_dim(x, start, size, axis=axis),
            ((rows, rows), ((), ())),
            precision=precision if x.dtype.itemsize >= 4 else None,
            preferred_element_type=statistics_dtype(x.dtype),
        )
        for start, stop in _cuts(size)
    )


def _all_but(x: Array, axis: int) -> tuple[int, ...]:
    return tuple(d for d in range(x.ndim) if d != axis)


@jax.jit  # traced once per shape, not once per layer
def unpack_panels(panels: tuple[Any, ...], border: tuple[Any, Any] | None = None) -> Any:
    """The full symmetric matrix from its block rows, each from the diagonal on.

    Blocks below the diagonal are transposes of those above. On the CPU this is one kernel, because
    kernels are compiled separately (16 matrices of 512: 0.17 s against 0.6 s, at the cost of a
    tenth of a millisecond for each run). On other platforms blocks are written one after the other:
    an H100's compiler gains nothing from one kernel and adds a copy, and a TPU gathers single
    elements slowly.

    Args:
        panels: ``(stack..., rows, columns)``; see ``panel_shapes``.
        border: Elements of one more row and column, and the corner where those meet:
            ``(stack..., n)`` and ``(stack...)``.

    Returns:
        ``(stack..., n, n)``, or with a border ``(stack..., n + 1, n + 1)``.
    """
    if panels[0].shape[-1] ** 2 >= _MAX_INDEX:
        return _written(panels, border)
    return jax.lax.platform_dependent(panels, border, cpu=_gathered, default=_written)


def _gathered(panels: tuple[Any, ...], border: tuple[Any, Any] | None) -> Any:
    """The matrix by a gather: every element is read at its place in its panel.

    Panels are not concatenated first: XLA's CPU compiler fuses a concatenation into the gather, and
    if panels are slices of one computed array, as the products of a single row are, all but the
    first come out wrong (jax 0.10.2).
    """
    stack, size = panels[0].shape[:-2], panels[0].shape[-1]
    full_size = size + (border is not None)
    edges = list(itertools.accumulate((p.shape[-2] for p in panels[:-1]), initial=0))
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (full_size, full_size), d) for d in (0, 1))
    first = sum(jnp.where(row >= edge, edge - last, 0) for last, edge in itertools.pairwise(edges))
    below = column < first  # left of the row's diagonal block: read the transposed element
    row, column = jnp.where(below, column, row), jnp.where(below, row, column)

    def entries_at(flat_panel: Array, place: Array) -> Array:
        inside = jnp.clip(place, 0, flat_panel.shape[-1] - 1)  # elements of other panels are masked
        return flat_panel.at[..., inside].get(mode="promise_in_bounds")

    matrix = jnp.zeros((*stack, *row.shape) if 0 in stack else (), panels[0].dtype)
    for edge, panel in zip(edges, panels, strict=True):
        if not panel.size:
            continue
        place = (row - edge) * panel.shape[-1] + column - edge
        matrix = jnp.where(row >= edge, entries_at(panel.reshape(*stack, -1), place), matrix)
    if border is not None:
        last, corner = entries_at(border[0], jnp.minimum(row, column)), border[1][..., None, None]
        last = jnp.where(jnp.minimum(row, column) == size, corner, last)
        matrix = jnp.where(jnp.maximum(row, column) == size, last, matrix)
    return matrix


def _written(panels: tuple[Any, ...], border: tuple[Any, Any] | None) -> Any:
    """The matrix written block by block."""
    first, stack = panels[0], panels[0].ndim - 2
    size = first.shape[-1]
    full_size = size + (border is not None)
    # One buffer, written in place: a concatenation of rows would be a kernel for each, and a copy.
    # The buffer is a padded panel, because zeros would not be sharded as the panels are.
    matrix = jnp.pad(
        first, [(0, 0)] * stack + [(0, full_size - first.shape[-2]), (0, full_size - size)]
    )

    def written(matrix: Array, block: Array, row: int, column: int) -> Array:
        return jax.lax.dynamic_update_slice(matrix, block, (*[0] * stack, row, column))

    edge = 0
    for i, panel in enumerate(panels):
        rows, columns = panel.shape[-2:]
        matrix = written(matrix, panel, edge, edge) if i else matrix
        if rows < columns:
            matrix = written(matrix, panel[..., rows:].mT, edge + rows, edge)
        edge += rows
    if border is not None:
        last = jnp.concatenate([border[0], border[1][..., None]], axis=-1)
        matrix = written(matrix, last[..., None, :], size, 0)
        matrix = written(matrix, last[..., None], 0, size)
    return matrix
