"""Dense layers: a product that contracts axes of a parameter with axes of data."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxkfac.interception import (
    Atoms,
    AxisTable,
    Eqn,
    Site,
    Use,
    matrix_problem,
    order_problem,
    register_kind,
)
from jaxkfac.kinds._rows import Array, Rows
from jaxkfac.kinds._two_sided import TwoSided


@register_kind
class Dense(TwoSided):
    """Contracted axes are inputs, the parameter's free axes outputs, shared axes a stack."""

    name = "dense"
    primitives = frozenset(("dot_general",))
    suffix = "transposed"
    product = True
    stacks_outputs = True
    unless_matrix = "transformed"
    packs_inputs = True
    reads_encoded = True

    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Any],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> list[Use] | str:
        (position,) = positions
        view, data = ins[position], ins[1 - position]
        problem = matrix_problem(table, view, "dot_general")
        if problem := problem or order_problem(table, view, view.axes or (), "dot_general"):
            return problem
        contract, batch = eqn.params["dimension_numbers"]
        mine = {*contract[position], *batch[position]}
        theirs = {*contract[1 - position], *batch[1 - position]}
        use = Use(self, eqn, position, view, scope, data=data)
        use.in_axes = tuple(view.axes[d] for d in contract[position])
        use.batch_axes = tuple(view.axes[d] for d in batch[position])
        use.out_axes = tuple(a for d, a in enumerate(view.axes) if d not in mine)
        use.rows = tuple(a for d, a in enumerate(data.axes) if d not in theirs)
        return [use]

    def product_axes(self, use: Use, ndim: int) -> tuple[Atoms | None, ...]:
        rows: list[Atoms | None] = [None] * len(use.rows)
        free: list[Atoms | None] = list(use.out_axes)
        return (*use.batch_axes, *(rows + free if use.operand == 1 else free + rows))

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        contract, batch = use.eqn.params["dimension_numbers"]
        other = 1 - use.operand
        theirs = sorted(
            (place(axis), d) for axis, d in zip(use.in_axes, contract[other], strict=True)
        )
        return repr(([d for _, d in theirs], batch[other]))

    def inputs(self, site: Site, use: Use, operands: Sequence[Any]) -> Rows:
        contract, shared = site.eqn.params["dimension_numbers"]
        other = 1 - use.operand
        x, features = operands[other], sorted(zip(contract[other], use.in_axes, strict=True))
        taken = {*contract[other], *shared[other]}
        rows = tuple(d for d in range(x.ndim) if d not in taken)
        return Rows(x, rows, tuple(shared[other]), tuple(features))

    def outputs(self, site: Site, use: Use, cotangent: Array) -> Rows:
        _, shared = site.eqn.params["dimension_numbers"]
        num_batch, num_free, num_rows = len(shared[0]), len(use.out_axes), len(use.rows)
        first_free = num_batch + (num_rows if use.operand == 1 else 0)
        first_row = num_batch + (0 if use.operand == 1 else num_free)
        free = [(first_free + i, axis) for i, axis in enumerate(use.out_axes)]
        batch = list(range(num_batch))
        if use.free_stack:
            batch.append(free.pop(0)[0])
        rows = tuple(range(first_row, first_row + num_rows))
        return Rows(cotangent, rows, tuple(batch), tuple(free))
