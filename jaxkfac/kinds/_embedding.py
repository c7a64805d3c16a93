"""Embeddings: a lookup of whole rows of a table."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.interception import (
    Atoms,
    AxisTable,
    Eqn,
    Site,
    Use,
    cast_varying,
    is_var,
    matrix_problem,
    order_problem,
    register_kind,
)
from jaxkfac.kinds._both_sides import TokenRows, aligned, split_examples, stack_of_slot
from jaxkfac.kinds._products import Products
from jaxkfac.kinds._rows import Array, Rows
from jaxkfac.kinds._two_sided import TwoSided


@register_kind
class Embedding(TwoSided):
    """Input rows are one-hot, so their second moment is a diagonal: how often each row was read."""

    name = "embedding"
    primitives = frozenset(("gather",))
    suffix = "embedding"
    rank = 1
    diagonal_inputs = True
    by_position = True

    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Any],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> list[Use] | str:
        (position,) = positions
        view, d = ins[position], eqn.params["dimension_numbers"]
        rows_of_table = (
            position == 0
            and len(d.start_index_map) == 1
            and tuple(d.collapsed_slice_dims) in ((), tuple(d.start_index_map))
            and not d.operand_batching_dims
        )
        if not rows_of_table:
            return "is read by a `gather` that does not pick whole rows"
        axis, shape = token_axis(eqn), eqn.invars[0].aval.shape
        if tuple(eqn.params["slice_sizes"]) != (*shape[:axis], 1, *shape[axis + 1 :]):
            return "is read by a `gather` that does not pick whole rows"
        problem = matrix_problem(table, view, "gather")
        if problem := problem or order_problem(table, view, view.axes or (), "gather"):
            return problem
        if any(view.axes[axis] == j.whole for j in view.joins):
            return "is one of the tables that are joined before `gather`"
        use = Use(self, eqn, position, view, scope, data=ins[1])
        use.in_axes = (view.axes[axis],)
        use.out_axes = (*view.axes[:axis], *view.axes[axis + 1 :])
        use.rows = tuple(ins[1].axes[:-1])
        return [use]

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        return repr(tuple(v.aval.shape for v in use.eqn.invars if is_var(v))[-1:])

    def outputs(self, site: Site, use: Use, cotangent: Array) -> Rows:
        numbers = site.eqn.params["dimension_numbers"]
        offset = list(numbers.offset_dims)
        if not numbers.collapsed_slice_dims:  # the axis of the rows is there, with size one
            kept = offset.pop(token_axis(site.eqn))
            cotangent = cotangent.squeeze(kept)
            offset = [d - (d > kept) for d in offset]
        rows = tuple(d for d in range(cotangent.ndim) if d not in offset)
        return Rows(cotangent, rows, (), tuple(zip(offset, use.out_axes, strict=True)))

    def input_moments(
        self,
        site: Site,
        use: Use,
        like: Mapping[str, Any],
        operands: Any,
        weights: Array | None,
        products: Products,
    ) -> dict[str, Any]:
        table, indices = operands[0], tokens_of(use, operands)
        dtype = like["a"].dtype
        ones = jnp.ones(indices.shape, dtype) if weights is None else weights.astype(dtype)
        ones = cast_varying(ones, indices)
        zeros = cast_varying(jnp.zeros(table.shape[token_axis(use.eqn)], dtype), indices)
        return {"a": zeros.at[indices].add(ones, mode="drop"), "a_count": ones.sum()}

    def both_sides(
        self,
        site: Site,
        use: Use,
        operands: Sequence[Any],
        cotangent: Array,
        weights: Array | None,
        examples: Atoms | None,
        like: Mapping[str, Any],
    ) -> TokenRows:
        split = functools.partial(
            split_examples, site, use, num_rows=len(use.rows), examples=examples
        )
        g = aligned(site, use, self.output_rows(site, use, cotangent, weights), stack_of_slot(like))
        return TokenRows(split(tokens_of(use, operands)), split(g))


def token_axis(eqn: Eqn) -> int:
    """The axis of the table along which its rows lie; the last one of a table of columns."""
    return eqn.params["dimension_numbers"].start_index_map[0]


def tokens_of(use: Use, operands: Any) -> Array:
    """Which rows of the table a lookup reads; none, out of range above, where it reads none."""
    tokens, rows = operands[1][..., 0], operands[0].shape[token_axis(use.eqn)]
    if tokens.dtype.itemsize < 4:
        tokens = tokens.astype(jnp.int32)  # which holds the number of rows
    if use.eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        return jnp.clip(tokens, 0, rows - 1)
    return jnp.where(tokens < 0, rows, tokens)  # else it counts from the end
