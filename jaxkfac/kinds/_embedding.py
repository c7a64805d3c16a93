"""Embeddings: a lookup of rows of a table."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac._jaxpr_compat import Eqn, cast_varying, is_var
from jaxkfac.interception import LayerVjp, Lookup, Reads, Use, UseSite, register_kind
from jaxkfac.interception.values import Atoms, AxisTable, UseAxes
from jaxkfac.kinds._both_sides import BasisSquares, Gradients, LowRankMatrices, Scores
from jaxkfac.kinds._moments import InputMoments, Moment, Products
from jaxkfac.kinds._rows import (
    ArrayOrShape,
    Rows,
    aligned,
    matrix_problem,
    order_problem,
    split_examples,
)
from jaxkfac.kinds._squares import Basis, rotate_outputs, scaled, squares_by_token
from jaxkfac.kinds._two_sided import TwoSided

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

    def squares(self, like: BasisSquares, basis: Basis) -> BasisSquares:
        """Sums of squares in a basis.

        Memory:
            Some copies of the output rows.
        """
        g = rotate_outputs(scaled(self.g, basis), basis, 2)
        return BasisSquares(squares_by_token(self.tokens, g, like.weight.shape[0]))

    def gradients(self, like: Gradients) -> Gradients:
        """Gradients by example, each a full table."""
        table = like.weight
        examples = jnp.arange(len(self.tokens))[:, None]
        rows = self.g.astype(table.dtype)
        zeros = jnp.zeros(table.shape, table.dtype)
        return Gradients(zeros.at[examples, self.tokens].add(rows, mode="drop"))

    def scores(
        self,
        like: Scores,
        queries: ArrayOrShape | LowRankMatrices,
        bias_queries: ArrayOrShape | None,
    ) -> Scores:
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

        return Scores(jax.lax.map(one, queries))


# ---------------- the kind


@register_kind
class Embedding(TwoSided):
    """Input rows are one-hot, so their second moment is a diagonal: the count of each table row."""

    name = "embedding"
    primitives = frozenset(("gather",))
    suffix = "embedding"
    rank = 1
    reads = Reads(tokens=True)

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        view, lookup = ins[at.operand], Lookup.of(at.eqn)
        if at.operand != 0 or lookup is None:
            return "is read by a `gather` that does not pick whole rows"
        axis = lookup.axis
        problem = matrix_problem(table, view, "gather")
        if problem := problem or order_problem(table, view, view.axes or (), "gather"):
            return problem
        # An index into joined tables does not say which of them it reads.
        if any(view.axes[axis] == j.array_axis for j in view.joins):
            return "is one of the tables that are joined before `gather`"
        axes = UseAxes(
            inputs=(view.axes[axis],),
            outputs=(*view.axes[:axis], *view.axes[axis + 1 :]),
            rows=tuple(ins[1].axes[:-1]),  # the last axis of the indices is the index itself
        )
        return Use(self, view, at, ins[1], axes)

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        eqn, lookup = use.at.eqn, _lookup(use.at.eqn)
        shapes = tuple(v.aval.shape for v in eqn.invars if is_var(v))
        # The same indices count the rows of tables of other lengths, and the mode decides what one
        # out of range counts.
        length = eqn.invars[0].aval.shape[lookup.axis]
        return repr((shapes[-1:], length, str(eqn.params["mode"]), lookup.column))

    def outputs(self, vjp: LayerVjp) -> Rows:
        eqn, cotangent = vjp.site.eqn, vjp.cotangent
        offset = list(eqn.params["dimension_numbers"].offset_dims)
        unit_axis = _lookup(eqn).axis_in_result(eqn)
        # A lookup with `collapsed_slice_dims` left out keeps an axis of one in the result, which is
        # no feature.
        if unit_axis is not None:
            offset.remove(unit_axis)
            cotangent = cotangent.squeeze(unit_axis)
            offset = [d - (d > unit_axis) for d in offset]
        rows = tuple(d for d in range(cotangent.ndim) if d not in offset)
        return Rows(cotangent, rows, (), tuple(zip(offset, vjp.use.axes.outputs, strict=True)))

    def input_moments(self, vjp: LayerVjp, like: InputMoments, products: Products) -> InputMoments:
        eqn, weights = vjp.use.at.eqn, vjp.weights
        table, indices = vjp.operands[0], _lookup(eqn).entries(eqn, vjp.operands)
        dtype = like.count.dtype
        ones = jnp.ones(indices.shape, dtype) if weights is None else weights.astype(dtype)
        # Constants do not vary over devices inside `shard_map`, and a scatter needs operands of one
        # type.
        ones = cast_varying(ones, indices)
        zeros = cast_varying(jnp.zeros(table.shape[_lookup(eqn).axis], dtype), indices)
        # An index out of range stands for a row that picks nothing (``Lookup.entries``).
        a = Moment(zeros.at[indices].add(ones, mode="drop"), like.a.form)
        return InputMoments(a, ones.sum())

    def both_sides(
        self, vjp: LayerVjp, examples: Atoms | None, stack: tuple[int, ...]
    ) -> TokenRows:
        num_rows = len(vjp.use.axes.rows)
        split = functools.partial(split_examples, vjp, num_rows=num_rows, examples=examples)
        g = aligned(vjp, self.output_rows(vjp), stack)
        entries = _lookup(vjp.use.at.eqn).entries(vjp.use.at.eqn, vjp.operands)
        return TokenRows(split(entries), split(g))


def _lookup(eqn: Eqn) -> Lookup:
    lookup = Lookup.of(eqn)
    assert lookup is not None
    return lookup
