"""Embeddings: a lookup of rows of a table."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxkfac._jaxpr_compat import Eqn, cast_varying, is_var
from jaxkfac.interception import LayerVjp, Lookup, Reads, Use, register_kind
from jaxkfac.interception.values import Atoms, AxisTable
from jaxkfac.kinds._moments import InputMoments, Moment, Products
from jaxkfac.kinds._rows import Rows, aligned, matrix_problem, order_problem, split_examples
from jaxkfac.kinds._two_sided import TokenRows, TwoSided


@register_kind
class Embedding(TwoSided):
    """Input rows are one-hot, so their second moment is a diagonal: the count of each table row."""

    name = "embedding"
    primitives = frozenset(("gather",))
    suffix = "embedding"
    rank = 1
    reads = Reads(tokens=True)

    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Any],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> list[Use] | str:
        (position,) = positions
        view = ins[position]
        lookup = Lookup.of(eqn)
        if position != 0 or lookup is None:
            return "is read by a `gather` that does not pick whole rows"
        axis = lookup.axis
        problem = matrix_problem(table, view, "gather")
        if problem := problem or order_problem(table, view, view.axes or (), "gather"):
            return problem
        # An index into joined tables does not say which of them it reads.
        if any(view.axes[axis] == j.array_axis for j in view.joins):
            return "is one of the tables that are joined before `gather`"
        use = Use(self, eqn, position, view, scope, data=ins[1])
        use.in_axes = (view.axes[axis],)
        use.out_axes = (*view.axes[:axis], *view.axes[axis + 1 :])
        # The last axis of the indices is the index itself.
        use.rows = tuple(ins[1].axes[:-1])
        return [use]

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        eqn, lookup = use.eqn, _lookup(use.eqn)
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
        return Rows(cotangent, rows, (), tuple(zip(offset, vjp.use.out_axes, strict=True)))

    def input_moments(self, vjp: LayerVjp, like: InputMoments, products: Products) -> InputMoments:
        eqn, weights = vjp.use.eqn, vjp.weights
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
        num_rows = len(vjp.use.rows)
        split = functools.partial(split_examples, vjp, num_rows=num_rows, examples=examples)
        g = aligned(vjp, self.output_rows(vjp), stack)
        entries = _lookup(vjp.use.eqn).entries(vjp.use.eqn, vjp.operands)
        return TokenRows(split(entries), split(g))


def _lookup(eqn: Eqn) -> Lookup:
    lookup = Lookup.of(eqn)
    assert lookup is not None
    return lookup
