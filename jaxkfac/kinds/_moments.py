"""Statistics of positions, where each row of a layer counts by itself (``sharing="expand"``)."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkfac._jaxpr_compat import Eqn, cast_varying
from jaxkfac.interception import LayerVjp, Use
from jaxkfac.interception.values import Statistic, entry, statistic
from jaxkfac.kinds._rows import ArrayOrShape, Rows, in_own_order
from jaxkfac.linalg import (
    PANELS_FROM,
    fold_triangle,
    gram,
    gram_panels,
    statistics_dtype,
    symmetric_gram,
    unfolded_size,
)

# ---------------- Gram products: over all rows or a random sample, and their precision


Precision = Literal["highest", "auto"]


class Products(NamedTuple):
    """How Gram products are computed. Static except for the key, which a backward rule receives.

    Attributes:
        fraction: The fraction of the rows that the moments are computed from.
        precision: The precision for float32 rows: ``"highest"``, or ``"auto"`` for the precision of
            the layer's own product.
        key: Selects the rows; ``None`` for all rows.
    """

    fraction: float = 1.0
    precision: Precision = "highest"
    key: Key[Array, ""] | None = None

    def precision_of(self, eqn: Eqn) -> Any:
        """The precision of a layer's Gram products, in the form for ``jax.lax.dot_general``."""
        if self.precision == "highest":
            return jax.lax.Precision.HIGHEST
        layer_precision = eqn.params.get("precision")
        # A product may state one precision for each operand. Both operands of a Gram product are
        # one array, so it takes the better one.
        return (
            max(layer_precision, key=lambda p: p.value)
            if isinstance(layer_precision, tuple)
            else layer_precision
        )

    def sampled(self, side: Rows, exists: Bool[Array, "..."] | None) -> tuple[Rows, Any]:
        """Some of the rows, and the factor for a sum over them; ``None`` if all rows are taken.

        Args:
            side: The rows; those that do not exist are zero.
            exists: Which rows exist, with the axes of ``use.axes.rows``: only these are drawn.
        """
        num_drawn = self._number_drawn(side.number)
        if num_drawn == side.number:
            return side, None
        outside = [d for d in range(side.x.ndim) if d not in side.rows]
        shape = [side.x.shape[d] for d in outside]
        x = side.x.transpose(*side.rows, *outside).reshape(side.number, *shape)
        flat = None if exists is None else exists.reshape(-1)
        index, times = draw_rows(self.key, side.number, num_drawn, flat)
        x = jnp.take(x, cast_varying(index, x), axis=0, mode="clip")
        moved = {d: 1 + i for i, d in enumerate(outside)}
        features = tuple((moved[d], axis) for d, axis in side.features)
        return Rows(x, (0,), tuple(moved[d] for d in side.batch), features), times

    def sampled_examples(self, rows: Float[Array, "*stack rows n"]) -> tuple[Array, Any]:
        """Like ``sampled``, for rows along the last axis but one."""
        number = rows.shape[-2]
        num_drawn = self._number_drawn(number)
        if num_drawn == number:
            return rows, None
        index, times = draw_rows(self.key, number, num_drawn, None)
        return jnp.take(rows, index, axis=-2, mode="clip"), times

    def _number_drawn(self, number: int) -> int:
        return number if self.key is None else max(1, round(self.fraction * number))


EVERY_ROW = Products()


@functools.partial(jax.jit, static_argnums=(1, 2))  # traced once per size, not once per layer
def draw_rows(
    key: Key[Array, ""], number: int, num_drawn: int, exists: Bool[Array, " number"] | None
) -> tuple[Int[Array, " num_drawn"], Float[Array, ""]]:
    r"""Draw rows such that ``number / num_drawn`` times a sum over them is unbiased.

    One row is drawn in each of ``num_drawn`` consecutive runs, so that the rows are spread out.
    All are then shifted cyclically by one uniform number, so that each row is equally likely
    whatever the lengths of the runs.

    Args:
        key: Random key for these rows.
        number: Number of rows.
        num_drawn: Number of rows to draw; some may be drawn twice.
        exists: Which rows exist: only these are drawn, unless none exists.

    Returns:
        Indices, and the number of existing rows for each row drawn.
    """
    within, around = jax.random.split(key)
    count = jnp.asarray(number) if exists is None else jnp.maximum(exists.sum(), 1)
    rows_per_draw = count.astype(float) / num_drawn
    places = (
        jnp.arange(num_drawn).astype(float) + jax.random.uniform(within, (num_drawn,))
    ) * rows_per_draw
    index = (places.astype(count.dtype) + jax.random.randint(around, (), 0, count)) % count
    if exists is not None:
        # Rows that exist come first, in their own order; ``index`` is below their number.
        index = jnp.argsort(~exists, stable=True)[index]
    return index, rows_per_draw


# ---------------- records: what one layer gathers of both sides


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Moment:
    """The sum of outer products of rows.

    Attributes:
        data: By form: matrices ``(stack..., n, n)``; the same with each triangle folded to half the
            size; a tuple of the panels of one triangle, without a stack; or diagonals
            ``(stack..., n)``.
        form: The form.
    """

    data: Any
    form: Literal["full", "folded", "panels", "diagonal"] = dataclasses.field(
        metadata={"static": True}
    )

    @property
    def size(self) -> int:
        """Number of features."""
        first = jax.tree.leaves(self.data)[0]  # the first panel is as wide as the matrix
        return unfolded_size(first) if self.form == "folded" else first.shape[-1]


@statistic
class InputMoments(Statistic):
    """Sums over input rows, by position: of their outer products, of ones, and of the rows."""

    a: Moment = entry(2)
    count: Any = entry(0)
    sum: Any = entry(1, default=None)


@statistic
class InputRows(Statistic):
    """Input rows summed over the positions of each example, and the numbers of positions."""

    numbers: Any = entry(0)
    rows: Any = entry(1)


@statistic
class SideSums(Statistic):
    """What one layer with two sides gathers: its input side and its output side.

    The output side is a ``Moment``, or an array of output rows summed over each example. The
    cotangent of a product does not change with a constant factor of the parameter.
    """

    inputs: InputMoments | InputRows | None = entry(None, default=None)
    outputs: Any = entry(0, default=None)


# ---------------- moments


def output_moments(
    vjp: LayerVjp, side: Rows, like: Moment, products: Products, *, panels: bool = False
) -> Moment:
    """The sum of outer products of rows, for a matrix of a sample of them."""
    times = None
    # Sampling spares products. A diagonal takes one pass over the rows, and stays exact.
    if like.form != "diagonal":
        side, times = products.sampled(side, vjp.weights)
    precision = products.precision_of(vjp.site.eqn)
    return _multiplied(moments(vjp, side, like, precision=precision, panels=panels), times)


def moments(
    vjp: LayerVjp,
    side: Rows,
    like: Moment,
    *,
    precision: jax.lax.PrecisionLike,
    panels: bool = False,
) -> Moment:
    """The sum of outer products of rows, in the form of ``like``.

    Axes of the stack that ``side`` lacks are filled with copies. With ``panels`` a wide matrix is
    computed by panels and mirrored (``symmetric_gram``).
    """
    # Panels only exist for one feature axis without a stack (see `packs`).
    if like.form == "panels" or panels:
        product = gram_panels if like.form == "panels" else symmetric_gram
        return Moment(product(side.x, side.features[0][0], precision=precision), like.form)
    use, lead = vjp.use, len(side.batch)
    kind: Any = use.kind
    if like.form != "diagonal":
        sums = kind.second_moment(side, precision)
        sums = in_own_order(vjp, side, sums, lead=lead, copies=2)
        sums = fold_triangle(sums) if like.form == "folded" else sums
    else:
        # The rows are widened before the square, which in 16 bits would underflow for small
        # gradients.
        squares = jnp.square(side.x.astype(statistics_dtype(side.x.dtype)))
        sums = _summed(vjp, side, squares)
    if use.axes.free_stack and not lead:  # experts that share one input
        sums = jnp.broadcast_to(sums, like.data.shape)
    return Moment(sums, like.form)


def _multiplied(sums: Any, times: ArrayOrShape | None) -> Any:
    return sums if times is None else jax.tree.map(lambda x: x * times.astype(x.dtype), sums)


def sum_of_outer_products(side: Rows, precision: jax.lax.PrecisionLike) -> ArrayOrShape:
    """The sum over rows, for each entry of the stack."""
    return gram(side.x, side.rows, side.batch, precision=precision)


def sum_over_patches(side: Rows, precision: jax.lax.PrecisionLike) -> ArrayOrShape:
    """Moments of wide patches by panels; mirroring costs little beside a run of many rows."""
    size = math.prod(side.x.shape[d] for d in side.feature_axes)
    if side.batch or size < PANELS_FROM:
        return sum_of_outer_products(side, precision)
    x = side.x.transpose(*side.rows, *side.feature_axes).reshape(-1, size)
    return symmetric_gram(x, 1, precision=precision)


def packs(uses: Sequence[Use], side: str) -> bool:
    """Whether a factor can be gathered in panels: each use has one feature axis and no experts."""
    return all(
        (side == "g" or getattr(u.kind, "packs_inputs", False))
        and not u.axes.stack
        and not u.axes.free_stack
        and len(u.axes.inputs if side == "a" else u.axes.outputs) == 1
        for u in uses
    )


def input_moments(
    vjp: LayerVjp,
    like: InputMoments,
    side: Rows,
    weights: ArrayOrShape | None,
    products: Products,
) -> InputMoments:
    """The statistics of the input side.

    ``side`` may be a chunk of the rows, and ``weights`` says which rows of the chunk exist, or what
    weights they have.
    """
    dtype, times = like.count.dtype, None
    count = jnp.asarray(side.number, dtype) if weights is None else weights.sum(dtype=dtype)
    summands = side  # of `sum`; of `a` they are the rows that are squared
    if weights is not None and weights.dtype != jnp.bool_:
        wide, of_rows = side.x.astype(dtype), side.spread(weights.astype(dtype))
        side = side._replace(x=wide * jnp.sqrt(of_rows))
        summands, weights = summands._replace(x=wide * of_rows), weights != 0
    if like.a.form != "diagonal":
        drawn, times = products.sampled(side, weights)
        # The key is the same, and so are the rows.
        summands = drawn if summands is side else products.sampled(summands, weights)[0]
        side = drawn
    precision = products.precision_of(vjp.site.eqn)
    a, total = _multiplied(moments(vjp, side, like.a, precision=precision), times), None
    if like.sum is not None:  # over the same rows, or A with a ones column is no second moment
        total = _multiplied(_summed(vjp, summands, summands.x, dtype), times)
        total = jnp.broadcast_to(total, like.sum.shape)
    return InputMoments(a, jnp.broadcast_to(count, like.count.shape), total)


def _summed(
    vjp: LayerVjp, side: Rows, x: ArrayOrShape, dtype: DTypeLike | None = None
) -> ArrayOrShape:
    """``x`` summed over rows: ``(stack..., features)``."""
    total = x.sum(side.rows, dtype=dtype)
    remaining = [d for d in range(side.x.ndim) if d not in side.rows]
    total = total.transpose([remaining.index(d) for d in (*side.batch, *side.feature_axes)])
    return in_own_order(vjp, side, total, lead=len(side.batch), copies=1)


def sum_to(x: ArrayOrShape, shape: tuple[int, ...]) -> ArrayOrShape:
    """Sum over the axes along which ``shape`` was broadcast."""
    if x.shape == shape:
        return x
    lead = x.ndim - len(shape)
    over = [d for d in range(x.ndim) if d < lead or (shape[d - lead] == 1 != x.shape[d])]
    return x.sum(over).reshape(shape)
