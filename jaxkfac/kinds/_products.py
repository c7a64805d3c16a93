"""How Gram products are formed: of all rows or of a random part of them, and how precisely."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkfac.interception import Eqn, cast_varying
from jaxkfac.kinds._rows import Rows

Precision = Literal["highest", "auto"]


class Products(NamedTuple):
    """How Gram products are formed. Static but for the key, which a backward rule is handed.

    Attributes:
        fraction: The part of the rows that they are formed of.
        precision: Of float32 rows: ``"highest"``, or ``"auto"`` for that of the layer itself.
        key: Which rows; ``None`` for all of them.
    """

    fraction: float = 1.0
    precision: Precision = "highest"
    key: Key[Array, ""] | None = None

    def precision_of(self, eqn: Eqn) -> Any:
        """The precision of a layer's Gram products, as ``jax.lax.dot_general`` takes it."""
        if self.precision == "highest":
            return jax.lax.Precision.HIGHEST
        own = eqn.params.get("precision")
        # Both operands of a Gram product are one array: of two settings it takes the better.
        return max(own, key=lambda p: p.value) if isinstance(own, tuple) else own

    def sampled(self, side: Rows, there: Bool[Array, "..."] | None) -> tuple[Rows, Any]:
        """Some of the rows, and the number by which a sum over them is to be multiplied.

        Args:
            side: The rows; those that do not exist are zero.
            there: Which exist, with the axes of ``use.rows``: only those are drawn.
        """
        kept = self._kept(side.number)
        if kept == side.number:
            return side, None
        outside = [d for d in range(side.x.ndim) if d not in side.rows]
        shape = [side.x.shape[d] for d in outside]
        x = side.x.transpose(*side.rows, *outside).reshape(side.number, *shape)
        flat = None if there is None else there.reshape(-1)
        index, times = draw_rows(self.key, side.number, kept, flat)
        x = jnp.take(x, cast_varying(index, x), axis=0, mode="clip")
        moved = {d: 1 + i for i, d in enumerate(outside)}
        features = tuple((moved[d], axis) for d, axis in side.features)
        return Rows(x, (0,), tuple(moved[d] for d in side.batch), features), times

    def sampled_examples(self, rows: Float[Array, "*stack rows n"]) -> tuple[Array, Any]:
        """The same of rows along the axis before the last."""
        number = rows.shape[-2]
        kept = self._kept(number)
        if kept == number:
            return rows, None
        index, times = draw_rows(self.key, number, kept, None)
        return jnp.take(rows, index, axis=-2, mode="clip"), times

    def _kept(self, number: int) -> int:
        return number if self.key is None else max(1, round(self.fraction * number))


EVERY_ROW = Products()


@functools.partial(jax.jit, static_argnums=(1, 2))  # traced once per size, not once per layer
def draw_rows(
    key: Key[Array, ""], number: int, kept: int, there: Bool[Array, " number"] | None
) -> tuple[Int[Array, " kept"], Float[Array, ""]]:
    r"""Rows such that ``number / kept`` times a sum over them has the whole sum as its mean.

    One row is drawn in each of ``kept`` neighbouring runs, so that they lie apart. Then all are
    moved round by one number, which is uniform: whatever the distances are, each row is as likely
    as any other.

    Args:
        key: For these rows.
        number: How many rows there are.
        kept: How many are drawn; some may be drawn twice.
        there: Which rows exist: of the others none is drawn, unless none exists.

    Returns:
        Indices, and how many rows there are for each that is drawn.
    """
    within, around = jax.random.split(key)
    count = jnp.asarray(number) if there is None else jnp.maximum(there.sum(), 1)
    each = count.astype(float) / kept
    places = (jnp.arange(kept).astype(float) + jax.random.uniform(within, (kept,))) * each
    index = (places.astype(count.dtype) + jax.random.randint(around, (), 0, count)) % count
    if there is not None:
        index = jnp.argsort(~there, stable=True)[index]
    return index, each
