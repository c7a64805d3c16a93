"""Rows: one side of a layer use, whatever the kind of layer."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxkfac._errors import LostRowsError
from jaxkfac.interception import LayerVjp, reversal
from jaxkfac.interception.values import (
    Atoms,
    AxisTable,
    Piece,
    View,
    own_atoms,
    pieces_of,
)

if TYPE_CHECKING:
    ArrayOrShape = Array
else:

    @runtime_checkable
    class ArrayOrShape(Protocol):
        """A tracer, a NumPy constant or, for a slot in a backward rule, a shape."""

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> Any: ...


# ---------------- views that are no matrix


def matrix_problem(table: AxisTable, view: View, name: str) -> str | None:
    """The reason why a view is no matrix with known axes, or ``None``."""
    if view.axes is None or view.history.function:
        first = view.history.function or view.history.lost_by
        return f"is no whole matrix behind `{first}`, where it meets data in `{name}`"
    if any("broadcast" in table.kinds(a) for axis in view.axes for a in table.atoms(axis)):
        return f"is broadcast before `{name}`"
    return None


def order_problem(table: AxisTable, view: View, axes: Sequence[Atoms], name: str) -> str | None:
    """The reason why a view's elements along some axes are out of order, or ``None``."""
    if any(reversal(table, view, axis) != "none" for axis in axes):
        return f"is back to front behind `rev`, where it meets data in `{name}`"
    return None


# ---------------- rows


class Rows(NamedTuple):
    """One side of a use.

    Attributes:
        x: The values; rows that do not exist are zero.
        rows: Axes of ``x`` that run over rows, in the order of ``use.axes.rows``.
        batch: Axes of ``x`` that run over a stack (experts, groups).
        features: For each remaining axis of ``x``, ascending, the axis and the parameter's axis
            that it corresponds to.
    """

    x: ArrayOrShape
    rows: tuple[int, ...]
    batch: tuple[int, ...]
    features: tuple[tuple[int, Atoms], ...]

    @property
    def feature_axes(self) -> tuple[int, ...]:
        return tuple(d for d, _ in self.features)

    @property
    def number(self) -> int:
        """The number of rows for each entry of the stack."""
        return math.prod(self.x.shape[d] for d in self.rows)

    def masked(self, weights: ArrayOrShape | None) -> "Rows":
        """The rows with those that do not exist set to zero.

        ``weights`` have the axes of ``use.axes.rows``.
        """
        if weights is None:
            return self
        exists = weights if weights.dtype == jnp.bool_ else weights != 0
        return self._replace(x=masked(self.x, self.spread(exists)))

    def spread(self, weights: ArrayOrShape) -> ArrayOrShape:
        """Numbers of rows, with the axes of ``use.axes.rows``, along the axes of ``x``."""
        shape = [1] * self.x.ndim
        order = sorted(range(len(self.rows)), key=self.rows.__getitem__)
        for i in order:
            shape[self.rows[i]] = weights.shape[i]
        return weights.transpose(order).reshape(shape)


def part_of_rows(vjp: LayerVjp, side: Rows) -> Rows:
    """The rows of the use's parameter, from those of an array composed of several parameters."""
    use, table = vjp.use, vjp.table
    if not use.view.joins:
        return side
    pieces = pieces_of(table, use.view.joins)
    assert pieces is not None  # for other uses the coverage report has a row
    axes = dict(side.features) | dict(zip(side.batch, use.axes.stack, strict=False))
    x, gone = side.x, []
    for d, axis in axes.items():
        x = _cut(table, pieces, x, d, axis)
        axes[d] = own_atoms(table, pieces, axis)
        if d in side.batch and axes[d] == () != table.atoms(axis):  # one entry of a stack of parts
            gone.append(d)
    x = x.reshape([size for d, size in enumerate(x.shape) if d not in gone])

    def moved(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(d - sum(g < d for g in gone) for d in axes if d not in gone)

    features = tuple(
        zip(moved(side.feature_axes), [axes[d] for d in side.feature_axes], strict=True)
    )
    return Rows(x, moved(side.rows), moved(side.batch), features)


def _cut(
    table: AxisTable, pieces: Mapping[int, Piece], x: ArrayOrShape, d: int, axis: Atoms
) -> ArrayOrShape:
    """``x`` cut to the pieces of the atoms of one of its axes, ``axis``."""
    atoms = table.atoms(axis)
    if not any(a in pieces for a in atoms):
        return x
    before, after = x.shape[:d], x.shape[d + 1 :]
    x = x.reshape(*before, *map(table.size, atoms), *after)
    for i in reversed(range(len(atoms))):
        piece = pieces.get(atoms[i])
        if piece is not None:
            x = jax.lax.slice_in_dim(x, piece.start, piece.start + piece.size, axis=d + i)
            x = _cut(table, pieces, x, d + i, piece.parameter_atoms)
    return x.reshape(*before, -1, *after)


def masked(x: ArrayOrShape, rows: ArrayOrShape | None) -> ArrayOrShape:
    """Set rows that do not exist to zero; with ``where``, because they may hold NaN."""
    return x if rows is None else jnp.where(rows, x, jnp.zeros((), x.dtype))


def in_own_order(
    vjp: LayerVjp, side: Rows, x: ArrayOrShape, *, lead: int, copies: int = 1
) -> ArrayOrShape:
    """Features of ``x`` flattened in the parameter's own axis order.

    Args:
        vjp: The use and the axis atoms.
        side: The side, for its features.
        x: ``(lead axes..., features...)``, the features ``copies`` times.
        lead: Number of leading axes.
        copies: 1 for rows, 2 for their outer products.
    """
    table = vjp.table
    parameter_atoms = [a for axis in vjp.use.view.source.remaining_axes for a in table.atoms(axis)]
    atoms = [a for _, axis in side.features for a in table.atoms(axis)]
    sizes = [table.size(a) for a in atoms]
    # An equation may contract axes in any order; factors of all uses of a parameter have its own
    # order, or they could not be added.
    order = sorted(range(len(atoms)), key=lambda i: parameter_atoms.index(atoms[i]))
    before, n = x.shape[:lead], math.prod(sizes)
    if order != sorted(order):
        k = len(sizes)
        x = x.reshape(*before, *sizes * copies).transpose(
            *range(lead), *[lead + s * k + i for s in range(copies) for i in order]
        )
    return x.reshape(*before, *[n] * copies)


def by_example(vjp: LayerVjp, side: Rows, axes: Sequence[Atoms], examples: Atoms) -> ArrayOrShape:
    """Rows with the examples as the first axis: ``(examples, positions, stack..., features...)``.

    Args:
        vjp: The axis atoms, and what an error names.
        side: The rows.
        axes: The atoms of each row axis.
        examples: The atoms of the example axis, none for a single example.

    Raises:
        LostRowsError: the rows cannot be attributed to examples.
    """
    table, shape, first, position_axes = vjp.table, [], {}, []
    example_atoms = table.atoms(examples)
    for d, size in enumerate(side.x.shape):
        atoms = table.atoms(axes[side.rows.index(d)]) if d in side.rows else ()
        sizes = [table.size(a) for a in atoms]
        if d not in side.rows or math.prod(sizes) != size:
            atoms, sizes = (), [size]  # a feature, an axis of one row, or a shard
        for i, atom_size in enumerate(sizes):
            # The axis of examples may be one factor of a row axis that the model has merged
            # (examples times tokens).
            if atoms and atoms[i] in example_atoms:
                # The same examples twice: rows are pairs, as in a product of all examples with all.
                if atoms[i] in first:
                    raise _lost(vjp, "its rows run over pairs of examples")
                first[atoms[i]] = len(shape)
            elif d in side.rows:
                position_axes.append(len(shape))
            shape.append(atom_size)
    if len(first) != len(example_atoms):
        raise _lost(vjp, "its rows do not run along the examples")
    examples_first = [first[a] for a in example_atoms]
    outside_axes = [
        i for i in range(len(shape)) if i not in examples_first and i not in position_axes
    ]
    # Axes outside the rows are not split, so they are in the order of x.
    outside = [d for d in range(side.x.ndim) if d not in side.rows]
    tail = [outside_axes[outside.index(d)] for d in (*side.batch, *side.feature_axes)]
    x = side.x.reshape(shape).transpose(*examples_first, *position_axes, *tail)
    number = math.prod(shape[i] for i in examples_first)
    return x.reshape(number, -1, *[shape[i] for i in tail])


def _lost(vjp: LayerVjp, what: str) -> LostRowsError:
    path, primitive = vjp.use.view.source.path, vjp.site.eqn.primitive.name
    return LostRowsError(
        f"layer {path!r}: example axis lost at `{primitive}`: {what}, and statistics of whole "
        "examples were asked for. Leave the layer out with layers=, or ask for "
        'statistics of positions: sharing="expand", scales="diagonal", per="token".'
    )


def aligned(vjp: LayerVjp, side: Rows, stack: tuple[int, ...] = ()) -> ArrayOrShape:
    """``(rows..., stack..., features)``: rows as in ``use.axes``, features in the own order."""
    x = side.x.transpose(*side.rows, *side.batch, *side.feature_axes)
    lead = len(side.rows) + len(side.batch)
    x = in_own_order(vjp, side, x, lead=lead)
    shape = (*x.shape[: len(side.rows)], *stack, x.shape[-1])
    if len(side.batch) < len(stack):  # experts that read one input
        x = jnp.broadcast_to(jnp.expand_dims(x, len(side.rows)), shape)
    return x


def split_examples(
    vjp: LayerVjp, x: ArrayOrShape, *, num_rows: int, examples: Atoms | None
) -> ArrayOrShape:
    """Leading row axes as ``(examples, positions)``; without ``examples``, one position each."""
    if examples is None:
        return x.reshape(-1, 1, *x.shape[num_rows:])
    rows = tuple(range(num_rows))
    features = tuple((d, ()) for d in range(num_rows, x.ndim))
    return by_example(vjp, Rows(x, rows, (), features), vjp.use.axes.rows, examples)


# ---------------- sums over the positions of each example (``sharing="reduce"``)
#
# Cotangents of a slot add up over the uses of a parameter and the iterations of a scan, so the slot
# holds each example's sum over all of them; outer products and squares are formed afterwards,
# because they are not linear.


ExampleAxes = Sequence[tuple[Atoms, int]]  # atoms and length of each leading axis of the outputs


def example_sums(
    vjp: LayerVjp, side: Rows, examples: ExampleAxes, like: ArrayOrShape
) -> Float[Array, "*stack examples n"]:
    """Rows summed over the positions of each example, ``(stack..., examples, features)``."""
    total = _sums(vjp, side, examples, like.dtype)
    lead = 1 + len(side.batch)
    total = in_own_order(vjp, side, total, lead=lead)
    return jnp.broadcast_to(jnp.moveaxis(total, 0, lead - 1), like.shape)


def example_counts(
    vjp: LayerVjp,
    side: Rows,
    reached: Bool[Array, "..."] | None,
    examples: ExampleAxes,
    like: ArrayOrShape,
) -> Float[Array, "*stack examples"]:
    """The number of positions of each example, ``(stack..., examples)``.

    ``reached`` says which positions each entry of a stack reads; ``None`` means all.
    """
    use, weights = vjp.use, vjp.weights
    if reached is not None:
        present = reached if weights is None else reached & weights
        every = Rows(present, tuple(range(1, present.ndim)), (0,), ())
        counts = _sums(vjp, every, examples, like.dtype).T
        ones = (1,) * (len(like.shape) - 2)
        return jnp.broadcast_to(counts.reshape(len(counts), *ones, -1), like.shape)
    if weights is None and len(examples) > 1:
        axes = range(len(use.axes.rows))
        weights = jnp.ones([side.x.shape[side.rows[d]] for d in axes], bool)
    if weights is None:
        return jnp.full(like.shape, side.number // like.shape[-1], like.dtype)
    every = Rows(weights, tuple(range(weights.ndim)), (), ())
    counts = _sums(vjp, every, examples, like.dtype)
    return jnp.broadcast_to(counts, like.shape)


def _sums(
    vjp: LayerVjp, side: Rows, examples: ExampleAxes, dtype: Any
) -> Float[Array, "examples ..."]:
    """Sum rows over positions; the examples of all example axes follow one another.

    A use has rows for the examples of one axis; the sums of all other examples are zero.
    """
    table, axes = vjp.table, vjp.use.axes.rows
    mine = {a for axis in axes for a in table.atoms(axis)}
    axis_numbers = [k for k, (atoms, _) in enumerate(examples) if mine & {*table.atoms(atoms)}]
    if len(axis_numbers) > 1:
        raise LostRowsError(
            f"layer {vjp.use.view.source.path!r}: its rows run over pairs of examples of two "
            "jk.mark_outputs, and statistics of whole examples were asked for: take "
            'sharing="expand" and scales="diagonal", or leave the layer out with layers='
        )
    chosen = axis_numbers[0] if axis_numbers else 0
    x = by_example(vjp, side, axes, examples[chosen][0])
    total = x.sum(1, dtype=dtype)
    if len(examples) == 1:
        return total
    sizes = [size for _, size in examples]
    before, after = sum(sizes[:chosen]), sum(sizes[chosen + 1 :])
    return jnp.pad(total, [(before, after), *[(0, 0)] * (total.ndim - 1)])
