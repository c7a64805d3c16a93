"""Dense layers: a product that contracts axes of a parameter with axes of data."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxkfac._jaxpr_compat import is_complex
from jaxkfac.interception import (
    Kind,
    LayerVjp,
    Reads,
    Use,
    UseSite,
    broadcast_axes,
    kind_named,
    register_kind,
)
from jaxkfac.interception.values import Atoms, Axes, AxisTable, UseAxes
from jaxkfac.kinds._rows import Rows, matrix_problem, order_problem
from jaxkfac.kinds._two_sided import TwoSided


class SharedRows(NamedTuple):
    """Which pairs of shared axes are rows, because the parameter was broadcast along them."""

    row_batch: tuple[int, ...]


@register_kind
class Dense(TwoSided):
    """Contracted axes are inputs, the parameter's free axes outputs, and shared axes a stack."""

    name = "dense"
    primitives = frozenset(("dot_general",))
    suffix = "transposed"
    product = True
    packs_inputs = True
    reads = Reads(
        encoded=True,
        complex=True,
        experts=True,
        unless_matrix="transformed",
        unless_one="gathered",
    )

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        eqn, position = at.eqn, at.operand
        view, data = ins[position], ins[1 - position]
        contract, batch = eqn.params["dimension_numbers"]
        repeated = broadcast_axes(table, view.axes or ())
        # A shared axis of size one may be a row to which the parameter was broadcast, or a stack.
        single = [d for d, axis in enumerate(view.axes or ()) if not table.atoms(axis)]
        rows = tuple(k for k, d in enumerate(batch[position]) if d in (*repeated, *single))
        along = {batch[position][k] for k in rows}
        for mine, its in [(batch[position][k], batch[1 - position][k]) for k in rows]:
            # The rows that chose the parameter are rows of the data that it meets here.
            for axis, chosen in itertools.chain(*view.chosen):
                if table.atoms(axis) == table.atoms(view.axes[mine]):
                    table.unify(chosen, data.axes[its])
        matrix_axes = view.axes and tuple(a for d, a in enumerate(view.axes) if d not in along)
        matrix = dataclasses.replace(view, axes=matrix_axes)
        problem = matrix_problem(table, matrix, "dot_general")
        if problem := problem or order_problem(table, matrix, matrix_axes or (), "dot_general"):
            return problem
        mine = {*contract[position], *batch[position]}
        theirs = {*contract[1 - position], *_stacked(batch[1 - position], rows)}
        axes = UseAxes(
            inputs=tuple(view.axes[d] for d in contract[position]),
            outputs=tuple(a for d, a in enumerate(view.axes) if d not in mine),
            stack=tuple(view.axes[d] for d in _stacked(batch[position], rows)),
            rows=tuple(a for d, a in enumerate(data.axes) if d not in theirs),
        )
        kind: Kind = self
        if is_complex(eqn.outvars[0]):  # each row is two: a real and an imaginary part
            kind = kind_named("complex")
            axes = axes._replace(rows=(*axes.rows, table.new(2, "feature")))
        return Use(kind, view, at, data, axes, detail=SharedRows(rows))

    def contracted(self, use: Use) -> Axes:
        contract, _ = use.at.eqn.params["dimension_numbers"]
        assert use.data is not None
        return tuple(use.data.axes[d] for d in contract[1 - use.at.operand])

    def product_axes(self, use: Use, ndim: int) -> tuple[Atoms | None, ...]:
        shared = use.at.eqn.params["dimension_numbers"][1][0]
        stack = iter(use.axes.stack)
        batch = [None if k in use.detail.row_batch else next(stack) for k in range(len(shared))]
        # Rows that are shared axes come first in the result, among the stack.
        rows: list[Atoms | None] = [None] * (len(use.axes.rows) - len(use.detail.row_batch))
        free: list[Atoms | None] = list(use.axes.outputs)
        return (*batch, *(rows + free if use.at.operand == 1 else free + rows))

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        contract, batch = use.at.eqn.params["dimension_numbers"]
        data_operand = 1 - use.at.operand
        theirs = sorted(
            # Sorted by the place in the parameter: `x @ w` and a transposed product that contracts
            # the same axes in another order read the same rows.
            (place(axis), d)
            for axis, d in zip(use.axes.inputs, contract[data_operand], strict=True)
        )
        return repr(([d for _, d in theirs], _stacked(batch[data_operand], use.detail.row_batch)))

    def inputs(self, vjp: LayerVjp) -> Rows:
        contract, shared = vjp.site.eqn.params["dimension_numbers"]
        x, use = vjp.data, vjp.use
        data_operand = 1 - use.at.operand
        features = sorted(zip(contract[data_operand], use.axes.inputs, strict=True))
        batch = _stacked(shared[data_operand], use.detail.row_batch)
        not_rows = {*contract[data_operand], *batch}
        rows = tuple(d for d in range(x.ndim) if d not in not_rows)
        return Rows(x, rows, batch, tuple(features))

    def outputs(self, vjp: LayerVjp) -> Rows:
        use, (contract, shared) = vjp.use, vjp.site.eqn.params["dimension_numbers"]
        data_operand, num_batch, num_free = (
            1 - use.at.operand,
            len(shared[0]),
            len(use.axes.outputs),
        )
        num_rows = len(use.axes.rows) - len(use.detail.row_batch)
        first_free = num_batch + (num_rows if use.at.operand == 1 else 0)
        first_row = num_batch + (0 if use.at.operand == 1 else num_free)
        free = [(first_free + i, axis) for i, axis in enumerate(use.axes.outputs)]
        batch = list(_stacked(range(num_batch), use.detail.row_batch))
        if use.axes.free_stack:
            # The experts are the parameter's first free axis: they read one input, and have a G
            # each.
            batch.append(free.pop(0)[0])
        # Rows are in the order of the data operand, and some of them may be shared axes.
        at = {shared[data_operand][k]: k for k in use.detail.row_batch}
        plain = iter(range(first_row, first_row + num_rows))
        not_rows = {*contract[data_operand], *_stacked(shared[data_operand], use.detail.row_batch)}
        axes = [d for d in range(len(use.axes.rows) + len(not_rows)) if d not in not_rows]
        rows = tuple(at[d] if d in at else next(plain) for d in axes)
        return Rows(vjp.cotangent, rows, tuple(batch), tuple(free))


@register_kind
class ComplexDense(Dense):
    r"""A real parameter as a part of a complex weight: ``z @ (re + 1j * im)``.

    With the parameter's phase $u$ (1 for a real part, i for an imaginary one), a row $z$ and the
    cotangent $g$ of its product, the gradient is $\Re(u z g^\top)$: the sum over two real rows,
    $\Re(uz) \Re(g)^\top$ and $\Im(uz) (-\Im(g))^\top$.
    """

    name = "complex"
    primitives = frozenset()
    suffix = "complex"
    reads = Reads(complex=True, experts=True)

    def product_axes(self, use: Use, ndim: int) -> None:
        """None: a bias that is added has no row of ones in the imaginary part."""
        return None

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        return repr((use.view.history.phase, super().reading(_without_parts(use), place)))

    def inputs(self, vjp: LayerVjp) -> Rows:
        rows = super().inputs(dataclasses.replace(vjp, use=_without_parts(vjp.use)))
        x: Any = rows.x if vjp.use.view.history.phase == 1 else rows.x * vjp.use.view.history.phase
        return _in_parts(rows, x.real, x.imag)

    def outputs(self, vjp: LayerVjp) -> Rows:
        rows = super().outputs(dataclasses.replace(vjp, use=_without_parts(vjp.use)))
        g: Any = rows.x
        return _in_parts(rows, g.real, -g.imag)


def _without_parts(use: Use) -> Use:
    """The use with one row in place of its two parts."""
    return dataclasses.replace(use, axes=use.axes._replace(rows=use.axes.rows[:-1]))


def _in_parts(rows: Rows, real: Any, imaginary: Any) -> Rows:
    """Rows of which each is two; the parts are the first axis, and the last axis of rows."""
    after = lambda axes: tuple(d + 1 for d in axes)
    features = tuple((d + 1, axis) for d, axis in rows.features)
    x = jnp.stack([real, imaginary])
    return Rows(x, (*after(rows.rows), 0), after(rows.batch), features)


def _stacked(axes: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """The shared axes that are a stack: those that are not rows."""
    return tuple(d for k, d in enumerate(axes) if k not in rows)
