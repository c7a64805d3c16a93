"""Experts whose rows lie one after the other: ``jax.lax.ragged_dot``."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxkfac.interception import (
    Atoms,
    Axes,
    AxisTable,
    Data,
    Eqn,
    Site,
    Use,
    matrix_problem,
    order_problem,
    register_kind,
)
from jaxkfac.kinds._rows import ArrayOrShape, Rows, part_of_rows
from jaxkfac.kinds._two_sided import TwoSided


@register_kind
class Ragged(TwoSided):
    """A stack of kernels, each of which reads its own run of the rows.

    A of an expert is the mean over the rows that reach it, G is over all loss terms.

    Memory:
        The rows once for each expert.
    """

    name = "ragged"
    primitives = frozenset(("ragged_dot_general",))
    suffix = "ragged"

    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Any],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> list[Use] | str:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contract, batch = numbers.dot_dimension_numbers
        plain = tuple(map(tuple, batch)) == ((), ()) and len(contract[0]) == 1
        of_rows = tuple(numbers.lhs_ragged_dimensions) == (1 - contract[0][0],)
        if list(positions) != [1] or not (
            plain and of_rows and len(numbers.rhs_group_dimensions) == 1
        ):
            return "is read by a `ragged_dot_general` that is no stack of experts with rows of each"
        view, data = ins[1], ins[0]
        if not isinstance(data, Data):
            return "meets rows that are no data in `ragged_dot_general`"
        name = "ragged_dot_general"
        problem = matrix_problem(table, view, name)
        if problem := problem or order_problem(table, view, view.axes or (), name):
            return problem
        group, inputs = numbers.rhs_group_dimensions[0], contract[1][0]
        use = Use(self, eqn, 1, view, scope, data=data)
        use.batch_axes, use.in_axes = (view.axes[group],), (view.axes[inputs],)
        use.out_axes = tuple(a for d, a in enumerate(view.axes) if d not in (group, inputs))
        use.rows = (data.axes[1 - contract[0][0]],)
        return [use]

    def result_axes(self, table: AxisTable, use: Use) -> Axes:
        return (use.rows[0], table.new(use.eqn.outvars[0].aval.shape[1], "feature"))

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        # Experts of other sizes read other rows.
        return repr((use.eqn.invars[2], use.eqn.params["ragged_dot_dimension_numbers"]))

    def inputs(self, site: Site, use: Use, operands: Sequence[Any]) -> Rows:
        contract = use.eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
        x = jnp.moveaxis(operands[0], contract[0][0], 1)
        return _by_expert(x, operands, use.in_axes[0])

    def outputs_of(
        self,
        site: Site,
        use: Use,
        operands: Sequence[Any],
        cotangent: ArrayOrShape,
        weights: ArrayOrShape | None,
    ) -> Rows:
        side = _by_expert(cotangent, operands, use.out_axes[0])
        return part_of_rows(site, use, side.masked(weights))

    def reached(self, site: Site, use: Use, operands: Sequence[Any]) -> ArrayOrShape:
        return part_of_rows(site, use, Rows(_reached(operands), (1,), (0,), ())).x


def _reached(operands: Sequence[Any]) -> ArrayOrShape:
    """``(experts, rows)``: which rows reach which expert; rows behind the last run reach none."""
    sizes = operands[2][:, None]
    ends = jnp.cumsum(sizes, 0, sizes.dtype)
    rows = jnp.arange(operands[0].shape[0], dtype=sizes.dtype)
    return (rows < ends) & (rows >= ends - sizes)


def _by_expert(x: ArrayOrShape, operands: Sequence[Any], axis: Atoms) -> Rows:
    x = jnp.where(_reached(operands)[..., None], x, jnp.zeros((), x.dtype))
    return Rows(x, (1,), (0,), ((2, axis),))
