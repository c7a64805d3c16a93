"""Experts: kernels that are gathered row by row, and rows that are sorted by expert."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxkfac._jaxpr_compat import Eqn
from jaxkfac.interception import Data, LayerVjp, Reads, Use, UseSite, register_kind
from jaxkfac.interception.values import Atoms, Axes, AxisTable, UseAxes
from jaxkfac.kinds._rows import ArrayOrShape, Rows, matrix_problem, order_problem, part_of_rows
from jaxkfac.kinds._two_sided import TwoSided

# ---------------- kernels gathered row by row: ``einsum("nd,ndk->nk", x, kernels[expert])``


class _PickedRows(NamedTuple):
    """Which axes of kernels that are gathered row by row are rows."""

    row_axes: tuple[int, ...]


@register_kind
class Gathered(TwoSided):
    """A stack of kernels, from which each row of data picks the kernel that multiplies it.

    The A of an expert is the mean over the rows that pick it; its G is over all loss terms.

    Memory:
        One copy of the rows for each expert.
    """

    name = "gathered"
    suffix = "gathered"
    reads = Reads(picked=True)

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        eqn, position = at.eqn, at.operand
        view, data = ins[position], ins[1 - position]
        if not isinstance(data, Data) or view.axes is None or view.history.function:
            return "is picked row by row and meets no rows of data"
        if problem := order_problem(table, view, view.axes, "dot_general"):
            return problem
        # Rows are compared by atoms and not by axes: the rows that pick may be split (examples,
        # tokens) in the data and joined in the kernels.
        picked = {a for axis in view.picked.rows for a in table.atoms(axis)}
        axes = _Axes.of(eqn, position)
        is_row: dict[int, bool] = {}  # axis of the kernels -> whether it is a row
        for d, axis in enumerate(view.axes):
            atoms = set(table.atoms(axis))
            # A shared axis of size one has no atoms, and is a row to which the kernel was
            # broadcast.
            of_rows = not atoms and d in axes.shared
            is_row[d] = of_rows or bool(atoms & picked)
            if atoms & picked != (atoms if is_row[d] else set()):
                return "is picked row by row and has rows and features on one axis"
            if not is_row[d] and any("parameter" not in table.kinds(a) for a in atoms):
                return "is picked row by row and was broadcast"
        for d, theirs in (axes.contracted | axes.shared).items():
            if is_row[d]:
                # The kernels' rows were made by the indices; where they meet the data's rows, both
                # are the same rows.
                table.unify(view.axes[d], data.axes[theirs])
        inputs = [d for d in axes.contracted if not is_row[d]]
        outputs = [d for d in axes.free if not is_row[d]]
        if not inputs or not outputs:
            return "is picked row by row and is no matrix"
        picked_rows = _PickedRows(tuple(d for d in is_row if is_row[d]))
        rows = [data.axes[d] for d in axes.rows_of_data(picked_rows.row_axes)]
        # Rows that only the kernels have: several picks for one row of data, as in top-k routing.
        rows += [view.axes[d] for d in axes.free if is_row[d]]
        every = [a for axis in rows for a in table.atoms(axis)]
        # Otherwise it is not known which row of data a picked kernel multiplies.
        if any(every.count(a) != 1 for axis in view.picked.rows for a in table.atoms(axis)):
            return "is picked row by row, by indices that do not run along the rows of data"
        use_axes = UseAxes(
            inputs=tuple(view.axes[d] for d in inputs),
            outputs=tuple(view.axes[d] for d in outputs),
            # The axis that was picked from comes first: the factors have an entry for each expert,
            # although the equation itself has none.
            stack=(view.picked.axis, *(view.axes[d] for d in axes.shared if not is_row[d])),
            rows=tuple(rows),
        )
        return Use(self, view, at, data, use_axes, detail=picked_rows)

    def result_axes(self, table: AxisTable, use: Use) -> Axes:
        axes, data = _Axes.of(use.at.eqn, use.at.operand), use.data
        assert data is not None and use.view.axes is not None
        shared = [data.axes[d] for d in axes.shared.values()]
        mine = [
            use.view.axes[d] if d in use.detail.row_axes else table.new(axes.shape[d], "feature")
            for d in axes.free
        ]
        theirs = [data.axes[d] for d in axes.other_free]
        return (*shared, *(theirs + mine if use.at.operand == 1 else mine + theirs))

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        axes, picked = _Axes.of(use.at.eqn, use.at.operand), use.view.picked
        assert picked is not None
        features = zip(use.axes.inputs, axes.inputs(use.detail.row_axes), strict=True)
        theirs = [d for _, d in sorted((place(axis), d) for axis, d in features)]
        rows = axes.rows_of_data(use.detail.row_axes)
        # The indices are part of it: the same data picked by other indices gives other sums for
        # each expert.
        return repr((theirs, rows, len(use.axes.rows), picked.indices))

    def inputs(self, vjp: LayerVjp) -> Rows:
        use, x = vjp.use, vjp.data
        axes = _Axes.of(use.at.eqn, use.at.operand)
        rows = axes.rows_of_data(use.detail.row_axes)
        more = range(
            x.ndim, x.ndim + len(use.axes.rows) - len(rows)
        )  # rows that only the kernels have
        stacked = tuple(axes.shared[d] for d in axes.shared if d not in use.detail.row_axes)
        features = sorted(zip(axes.inputs(use.detail.row_axes), use.axes.inputs, strict=True))
        x = jnp.expand_dims(x, tuple(more))
        return _by_expert(vjp, Rows(x, (*rows, *more), stacked, tuple(features)))

    def output_rows(self, vjp: LayerVjp) -> Rows:
        use, cotangent = vjp.use, vjp.cotangent
        axes = _Axes.of(use.at.eqn, use.at.operand)
        mine, theirs = axes.in_result(use.at.operand)
        # In the result of `dot_general` shared axes come first, then the free ones of the left
        # operand, then those of the right.
        theirs |= {d: k for k, d in enumerate(axes.shared.values())}
        # A row axis that the product sums over (a weighted sum of experts) is not in the cotangent;
        # it gets an axis of one, because each of its rows has the same cotangent.
        summed = [d for d in axes.rows_of_data(use.detail.row_axes) if d not in theirs]
        theirs |= {d: cotangent.ndim + k for k, d in enumerate(summed)}
        cotangent = jnp.expand_dims(cotangent, [theirs[d] for d in summed])
        rows = [theirs[d] for d in axes.rows_of_data(use.detail.row_axes)]
        rows += [mine[d] for d in axes.free if d in use.detail.row_axes]
        stacked = [k for k, d in enumerate(axes.shared) if d not in use.detail.row_axes]
        features = [mine[d] for d in axes.free if d not in use.detail.row_axes]
        features = tuple(zip(features, use.axes.outputs, strict=True))
        side = Rows(cotangent, tuple(rows), tuple(stacked), features)
        return _by_expert(vjp, side).masked(vjp.weights)

    def reached(self, vjp: LayerVjp) -> ArrayOrShape:
        table, rows, picked = vjp.table, vjp.use.axes.rows, vjp.use.view.picked
        assert picked is not None
        flat = [a for axis in rows for a in table.atoms(axis)]
        mine = [a for axis in picked.rows for a in table.atoms(axis)]
        order = sorted(range(len(mine)), key=lambda i: flat.index(mine[i]))
        # A handler of a kind that reads `picked` entries gets the indices as the last operand.
        index = vjp.operands[-1].reshape([table.size(a) for a in mine]).transpose(order)
        index = index.reshape([table.size(a) if a in mine else 1 for a in flat])
        number = _size(table, picked.axis)
        every = (number, *map(table.size, flat))
        reaches = index == jnp.arange(number, dtype=index.dtype).reshape(-1, *[1] * len(flat))
        shape = [_size(table, axis) for axis in rows]
        return jnp.broadcast_to(reaches, every).reshape(number, *shape)


class _Axes(NamedTuple):
    """How an equation reads the kernels.

    Attributes:
        contracted: From axes of the kernels that are summed over to the axes of data.
        shared: From axes that both operands have, in the kernels, to the axes of data.
        free: The other axes of the kernels.
        other_free: The other axes of data.
        shape: Shape of the kernels.
    """

    contracted: dict[int, int]
    shared: dict[int, int]
    free: list[int]
    other_free: list[int]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, eqn: Eqn, operand: int) -> "_Axes":
        contract, batch = eqn.params["dimension_numbers"]
        shapes = [v.aval.shape for v in eqn.invars]
        mine, data = operand, 1 - operand
        # `dimension_numbers` list pairs of axes in any order, so they are kept as pairs.
        contracted = dict(zip(contract[mine], contract[data], strict=True))
        shared = dict(zip(batch[mine], batch[data], strict=True))
        used = {*contracted.values(), *shared.values()}
        free = [d for d in range(len(shapes[mine])) if d not in contracted | shared]
        theirs = [d for d in range(len(shapes[data])) if d not in used]
        return cls(contracted, shared, free, theirs, shapes[mine])

    def inputs(self, rows: Sequence[int]) -> list[int]:
        """Axes of data that are features; ``rows`` are the axes of the kernels that are rows."""
        return [theirs for d, theirs in self.contracted.items() if d not in rows]

    def rows_of_data(self, rows: Sequence[int]) -> list[int]:
        """Axes of data that are rows."""
        both = self.contracted | self.shared
        return sorted([*self.other_free, *(both[d] for d in rows if d in both)])

    def in_result(self, operand: int) -> tuple[dict[int, int], dict[int, int]]:
        """Where the free axes of the kernels and of data are in the result."""
        first = (self.other_free, self.free) if operand == 1 else (self.free, self.other_free)
        at = [
            {d: len(self.shared) + start + i for i, d in enumerate(axes)}
            for start, axes in zip((0, len(first[0])), first, strict=True)
        ]
        return (at[1], at[0]) if operand == 1 else (at[0], at[1])


def _by_expert(vjp: LayerVjp, side: Rows) -> Rows:
    """One copy of the rows for each expert, zero where the rows pick another."""
    kind: Any = vjp.use.kind
    reaches = kind.reached(vjp)
    assert reaches is not None
    order = sorted(range(len(side.rows)), key=side.rows.__getitem__)
    shape = [1] * side.x.ndim
    for i in order:
        shape[side.rows[i]] = reaches.shape[1 + i]
    reaches = reaches.transpose(0, *(1 + i for i in order)).reshape(-1, *shape)
    return Rows(
        # `where` and not a product: a row of padding may hold NaN, which would reach every expert.
        jnp.where(reaches, side.x[None], jnp.zeros((), side.x.dtype)),
        tuple(1 + d for d in side.rows),
        (0, *(1 + d for d in side.batch)),
        tuple((1 + d, axis) for d, axis in side.features),
    )


def _size(table: AxisTable, axis: Atoms) -> int:
    size = 1
    for atom in table.atoms(axis):
        size *= table.size(atom)
    return size


# ---------------- rows sorted by expert: ``jax.lax.ragged_dot``


class _Runs(NamedTuple):
    """The value number of the sizes of the experts' runs of rows."""

    sizes: int


@register_kind
class Ragged(TwoSided):
    """A stack of kernels, each of which reads its own run of the rows.

    The A of an expert is the mean over the rows that reach it; its G is over all loss terms.

    Memory:
        One copy of the rows for each expert.
    """

    name = "ragged"
    primitives = frozenset(("ragged_dot_general",))
    suffix = "ragged"

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        numbers = at.eqn.params["ragged_dot_dimension_numbers"]
        contract, batch = numbers.dot_dimension_numbers
        # With ragged contracted axes, as in this product's own gradient, no operand is a stack of
        # experts.
        plain = tuple(map(tuple, batch)) == ((), ()) and len(contract[0]) == 1
        of_rows = tuple(numbers.lhs_ragged_dimensions) == (1 - contract[0][0],)
        if at.operand != 1 or not (plain and of_rows and len(numbers.rhs_group_dimensions) == 1):
            return "is read by a `ragged_dot_general` that is no stack of experts with rows of each"
        view, data = ins[1], ins[0]
        if not isinstance(data, Data):
            return "meets rows that are no data in `ragged_dot_general`"
        name = "ragged_dot_general"
        problem = matrix_problem(table, view, name)
        if problem := problem or order_problem(table, view, view.axes or (), name):
            return problem
        group, inputs = numbers.rhs_group_dimensions[0], contract[1][0]
        axes = UseAxes(
            inputs=(view.axes[inputs],),
            outputs=tuple(a for d, a in enumerate(view.axes) if d not in (group, inputs)),
            stack=(view.axes[group],),
            rows=(data.axes[1 - contract[0][0]],),
        )
        return Use(self, view, at, data, axes, detail=_Runs(ins[2].number))

    def result_axes(self, table: AxisTable, use: Use) -> Axes:
        return (use.axes.rows[0], table.new(use.at.eqn.outvars[0].aval.shape[1], "feature"))

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        # Experts with other group sizes read other rows. The sizes are compared by value number and
        # not by variable: a jitted function that is called twice has the same variables twice.
        return repr((use.detail.sizes, use.at.eqn.params["ragged_dot_dimension_numbers"]))

    def inputs(self, vjp: LayerVjp) -> Rows:
        use = vjp.use
        contract = use.at.eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
        x = jnp.moveaxis(vjp.operands[0], contract[0][0], 1)
        return _ragged_by_expert(x, vjp.operands, use.axes.inputs[0])

    def outputs(self, vjp: LayerVjp) -> Rows:
        return _ragged_by_expert(vjp.cotangent, vjp.operands, vjp.use.axes.outputs[0])

    def reached(self, vjp: LayerVjp) -> ArrayOrShape:
        return part_of_rows(vjp, Rows(_reached(vjp.operands), (1,), (0,), ())).x


def _reached(operands: Sequence[Any]) -> ArrayOrShape:
    """``(experts, rows)``: which rows reach which expert; rows after the last run reach none."""
    sizes = operands[2][:, None]
    ends = jnp.cumsum(sizes, 0, sizes.dtype)
    rows = jnp.arange(operands[0].shape[0], dtype=sizes.dtype)
    # Rows are sorted by expert, so each expert reads one run of them.
    return (rows < ends) & (rows >= ends - sizes)


def _ragged_by_expert(x: ArrayOrShape, operands: Sequence[Any], axis: Atoms) -> Rows:
    x = jnp.where(_reached(operands)[..., None], x, jnp.zeros((), x.dtype))
    return Rows(x, (1,), (0,), ((2, axis),))
