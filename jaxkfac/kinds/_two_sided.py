"""The base class of kinds with a Kronecker block, which have input rows and output rows."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkfac.interception import Kind, LayerVjp, Use
from jaxkfac.interception.values import Atoms, Axes, SlotEntry
from jaxkfac.kinds._both_sides import BothSides, LowRankMatrices
from jaxkfac.kinds._moments import Products, input_moments, sum_of_outer_products
from jaxkfac.kinds._rows import ArrayOrShape, Rows, aligned, part_of_rows, split_examples
from jaxkfac.kinds._squares import Basis, rotate_outputs, scaled, squares_by_token

# ---------------- rows of an embedding


_EXACT = jax.lax.Precision.HIGHEST  # never TF32: scores add terms of both signs, which cancel


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Tokens and output rows of one use of an embedding.

    Attributes:
        tokens: ``(examples, positions)``; one position each if examples need not be separated.
        g: ``(examples, positions, features)``.
    """

    tokens: ArrayOrShape
    g: ArrayOrShape

    def both_rows(self) -> tuple[ArrayOrShape, ArrayOrShape]:
        """Tokens, ``(examples, positions, 1)``, and output rows."""
        return self.tokens[..., None], self.g

    def squares(self, like: dict[str, Any], basis: Basis) -> dict[str, Any]:
        """Sums of squares in a basis.

        Memory:
            Some copies of the output rows.
        """
        g = rotate_outputs(scaled(self.g, basis), basis, 2)
        return {"squares": squares_by_token(self.tokens, g, like["squares"].shape[0])}

    def gradients(self, like: dict[str, Any]) -> dict[str, Any]:
        """Gradients by example, each a full table."""
        table = like["gradients"]
        examples = jnp.arange(len(self.tokens))[:, None]
        rows = self.g.astype(table.dtype)
        zeros = jnp.zeros(table.shape, table.dtype)
        return {"gradients": zeros.at[examples, self.tokens].add(rows, mode="drop")}

    def scores(
        self,
        like: dict[str, Any],
        queries: ArrayOrShape | LowRankMatrices,
        bias_queries: ArrayOrShape | None,
    ) -> dict[str, Any]:
        """Inner products of the queries' tables with the examples' gradients.

        Memory:
            One copy of the output rows: queries are processed one by one, and no example's table
            is formed.
        """

        def read(table: ArrayOrShape) -> ArrayOrShape:
            return table.at[self.tokens].get(mode="fill", fill_value=0)

        def one(query: ArrayOrShape | LowRankMatrices) -> ArrayOrShape:
            if not isinstance(query, LowRankMatrices):
                return (read(query) * self.g.astype(query.dtype)).sum((1, 2))
            rows = self.g.astype(query.right.dtype)
            moved = jnp.einsum("nso,ro->nsr", rows, query.right, precision=_EXACT)
            return (read(query.left) * moved).sum((1, 2))

        return {"scores": jax.lax.map(one, queries)}


# ---------------- the base class


class TwoSided(Kind):
    """A kind whose parameter is a matrix between input rows and output rows.

    A new kind defines how it is found (``find``, ``reading``), and ``inputs`` and ``outputs``.
    """

    entries: ClassVar = {
        "a": SlotEntry(2),  # second moment of input rows
        "a_sum": SlotEntry(1),  # sum of input rows
        "a_count": SlotEntry(0),
        "a_rows": SlotEntry(1),  # sum of input rows by example
        "a_numbers": SlotEntry(0),
        # The cotangent of the product does not change with a constant factor of the parameter.
        "g": SlotEntry(0),
        "g_rows": SlotEntry(0),
    }

    def place(self, use: Use, axes: Axes) -> None:
        """Nothing to store: the rows are those of the data operand."""

    def inputs(self, vjp: LayerVjp) -> Rows:
        """The input rows of a use, all of them."""
        raise NotImplementedError

    def outputs(self, vjp: LayerVjp) -> Rows:
        """The cotangent of the result as rows."""
        raise NotImplementedError

    def input_rows(self, vjp: LayerVjp) -> Rows:
        return part_of_rows(vjp, self.inputs(vjp).masked(vjp.weights))

    def output_rows(self, vjp: LayerVjp) -> Rows:
        return part_of_rows(vjp, self.outputs(vjp).masked(vjp.weights))

    def over_input_rows(
        self, vjp: LayerVjp, statistic: Callable[[Rows, ArrayOrShape | None], Any]
    ) -> Any:
        """A statistic of input rows, summed over the chunks in which the rows are formed.

        Args:
            vjp: The use and its operands.
            statistic: A function from rows, and which of them exist, to a tree of arrays that are
                sums over rows. Rows that do not exist are zero.
        """
        return statistic(self.input_rows(vjp), vjp.weights)

    def input_moments(
        self, vjp: LayerVjp, like: Mapping[str, Any], products: Products
    ) -> dict[str, Any]:
        def sums(side: Rows, exists: ArrayOrShape | None) -> dict[str, Any]:
            return input_moments(vjp, like, side, exists, products)

        out = self.over_input_rows(vjp, sums)
        # A row that does not reach an expert is zero in its sum, so its count leaves the row out.
        exists = self.reached(vjp)
        if exists is not None:
            if vjp.weights is not None:
                weights = vjp.weights.astype(like["a_count"].dtype)
                exists = jnp.where(exists, weights, jnp.zeros((), weights.dtype))
            lead, stack = exists.ndim - len(vjp.use.rows), like["a_count"].shape
            count = exists.sum(range(lead, exists.ndim), dtype=like["a_count"].dtype)
            trailing = (1,) * (len(stack) - lead)
            out["a_count"] = jnp.broadcast_to(count.reshape(*count.shape, *trailing), stack)
        return out

    def second_moment(self, side: Rows, precision: jax.lax.PrecisionLike) -> ArrayOrShape:
        return sum_of_outer_products(side, precision)

    def both_sides(
        self, vjp: LayerVjp, examples: Atoms | None, like: Mapping[str, Any]
    ) -> BothSides | TokenRows:
        num_rows = len(vjp.use.rows)
        split = functools.partial(split_examples, vjp, num_rows=num_rows, examples=examples)
        stack = stack_of_slot(like)
        g = aligned(vjp, self.output_rows(vjp), stack)
        x = aligned(vjp, self.input_rows(vjp), stack)
        if examples is None:
            return BothSides((x, g), by_example=False)
        return BothSides((split(x), split(g)), by_example=True)


def stack_of_slot(like: Mapping[str, Any]) -> tuple[int, ...]:
    """Shape of the stacked axes of a layer, from its slot."""
    for key in ("gradients", "rotated"):
        if key in like:
            return like[key].shape[:-3]
    return next(
        like[key] for key in ("squares", "scores", "outputs", "products") if key in like
    ).shape[:-2]
