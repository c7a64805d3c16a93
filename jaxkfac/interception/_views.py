"""Views: equations behind which a parameter is still seen, and the axes that it has there."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax.extend import core as jex

from jaxkfac._jaxpr_compat import Eqn, VarOrLiteral, is_complex, read_order
from jaxkfac.interception._kind import Value
from jaxkfac.interception._plan import Facts
from jaxkfac.interception.values._axes import Atoms, Axes, AxisTable, tiled
from jaxkfac.interception.values._index import Range
from jaxkfac.interception.values._values import Constant, Consumed, View, went_through

SAME_ELEMENTS = frozenset(
    "convert_element_type copy copy_p reduce_precision optimization_barrier name pvary pcast "
    "sharding_constraint reshard layout_constraint".split()
)
# Each element of the result is a function of one element of each operand.
ELEMENT_BY_ELEMENT = frozenset(
    "add sub mul div max min pow integer_pow exp exp2 log log1p expm1 tanh logistic sin cos tan "
    "asin acos atan sinh cosh asinh acosh atanh sqrt rsqrt cbrt neg abs sign square erf erfc "
    "erf_inv lgamma digamma select_n clamp add_any atan2 rem complex real imag conj".split()
)
_SELECTIONS = frozenset("slice dynamic_slice gather split pad broadcast_in_dim".split())


def view_of(facts: Facts, eqn: Eqn, ins: Sequence[Value]) -> list[View] | None:
    """The results as views, or ``None`` if the equation is no view.

    It is one only if exactly one operand is a view and every other operand is constant.
    """
    first = facts.equation_number(eqn, ins)
    views = _views(facts.table, eqn, ins, first)
    if views is None:
        return None
    name = eqn.primitive.name
    (view,) = (v for v in ins if isinstance(v, View))
    keeps_elements = name in SAME_ELEMENTS | ELEMENT_BY_ELEMENT
    return [
        dataclasses.replace(
            v if v.axes is not None or v.history.lost_by else went_through(v, lost_by=name),
            number=facts.equation_number(eqn, ins, k),
            arrangement=view.arrangement
            if keeps_elements
            else facts.arrangement(eqn, view, ins, k),
        )
        for k, v in enumerate(views)
    ]


def _views(table: AxisTable, eqn: Eqn, ins: Sequence[Value], number: int) -> list[View] | None:
    views = [i for i, v in enumerate(ins) if isinstance(v, View)]
    operands = [v for v in ins if not isinstance(v, View)]
    if eqn.primitive.name == "dynamic_slice":  # the index may well be data
        operands = []
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "optimization_barrier":
        return None  # handled operand by operand
    if len(views) != 1 or not all(isinstance(v, Constant) for v in operands):
        return None
    position = views[0]
    view: View = ins[position]  # type: ignore[assignment]
    if not jnp.issubdtype(out.dtype, jnp.inexact):  # integers have no gradient
        return None
    if name in SAME_ELEMENTS:
        return [dataclasses.replace(view, number=number)]
    if is_negated(eqn, position):
        view = went_through(view, scaled=(*view.history.scaled, number))
    if name == "neg":
        return [dataclasses.replace(view, number=number)]
    if name in ("mul", "div"):
        # `c / w` is no view: it is not linear in w, and is followed as a function (``_functions``).
        if name == "div" and position == 1:
            return None
        if name == "mul" and all(isinstance(v, Constant) and v.mask for v in operands):
            return [_masked(eqn, view, position, number)]
        return [_scaled(table, eqn, view, position, number)]
    if name == "select_n" and position > 0:  # elsewhere it is a constant, whose derivative is 0
        return [_masked(eqn, view, position, number)]
    if name in ("add", "sub", "add_any"):  # w + c has the derivatives of w
        # Where the constant broadcasts the parameter, one element is at several places.
        keeps_shape = eqn.invars[position].aval.shape == out.shape
        return [dataclasses.replace(view, number=number, axes=view.axes if keeps_shape else None)]
    if position != 0:
        return None
    if name in ("transpose", "squeeze", "reshape"):
        return [dataclasses.replace(view, number=number, axes=_moved(table, eqn, view.axes))]
    if name in ("slice", "dynamic_slice"):
        return [_slice(table, eqn, view, ins, number)]
    if name == "rev":
        return [_turned(table, eqn, view, number)]
    if name in ("broadcast_in_dim", "tile"):
        return [dataclasses.replace(view, number=number, axes=_broadcast(table, eqn, view.axes))]
    if name == "split":
        return _split(table, eqn, view)
    if name in _SELECTIONS:
        return [dataclasses.replace(view, number=number, axes=None) for _ in eqn.outvars]
    return None


def broadcast_axes(table: AxisTable, axes: Axes) -> tuple[int, ...]:
    """The axes that consist of broadcast atoms only."""
    return tuple(
        d
        for d, axis in enumerate(axes)
        if table.atoms(axis) and all(table.kinds(a) == {"broadcast"} for a in table.atoms(axis))
    )


def is_negated(eqn: Eqn, position: int) -> bool:
    """Whether an operand is multiplied by −1; the sign matters to rows with a column of ones."""
    return eqn.primitive.name == "neg" or (eqn.primitive.name == "sub" and position == 1)


def _masked(eqn: Eqn, view: View, position: int, number: int) -> View:
    """The view multiplied by zeros and ones."""
    keeps_shape = eqn.invars[position].aval.shape == eqn.outvars[0].aval.shape
    view = went_through(view, masked=view.history.masked or eqn.primitive.name)
    return dataclasses.replace(view, number=number, axes=view.axes if keeps_shape else None)


def _scaled(table: AxisTable, eqn: Eqn, view: View, position: int, number: int) -> View:
    """The view times a constant: a scalar keeps the matrix, an array keeps only the elements."""
    constant = eqn.invars[1 - position]
    mine, out = eqn.invars[position].aval.shape, eqn.outvars[0].aval.shape
    function, phase = view.history.function, view.history.phase
    if is_complex(constant):
        unit = _unit(constant)
        phase = phase * unit if eqn.primitive.name == "mul" else phase / (unit or 1)
        function = function or ("" if unit else eqn.primitive.name)
    if getattr(constant.aval, "size", 1) != 1:
        function = function or eqn.primitive.name
    axes = view.axes if mine == out else None
    scaled = (*view.history.scaled, number)
    view = went_through(view, scaled=scaled, function=function, phase=phase)
    return dataclasses.replace(view, number=number, axes=axes)


def _unit(constant: VarOrLiteral) -> complex:
    """A complex scalar divided by its absolute value; 0 if the program does not show it."""
    value = complex(constant.val) if isinstance(constant, jex.Literal) else 0j
    return value / abs(value) if value else 0j


def _moved(table: AxisTable, eqn: Eqn, axes: Axes | None) -> Axes | None:
    if axes is None:
        return None
    if eqn.primitive.name == "transpose":
        return tuple(axes[d] for d in eqn.params["permutation"])
    if eqn.primitive.name == "squeeze":
        return tuple(a for d, a in enumerate(axes) if d not in eqn.params["dimensions"])
    out = table.regroup([axes[d] for d in read_order(eqn)], eqn.outvars[0].aval.shape)
    return None if out is None else tuple(out)


def _broadcast(table: AxisTable, eqn: Eqn, axes: Axes | None) -> Axes | None:
    if axes is None:
        return None
    if eqn.primitive.name == "tile":
        return tiled(table, eqn, axes, "broadcast")
    shape, source = eqn.params["shape"], eqn.invars[0].aval.shape
    out = [table.new(s, "broadcast") for s in shape]
    for d, axis, size in zip(eqn.params["broadcast_dimensions"], axes, source, strict=True):
        if size == shape[d]:
            out[d] = axis
    return tuple(out)


def _turned(table: AxisTable, eqn: Eqn, view: View, number: int) -> View:
    """The view reversed along some axes; reversing twice restores the order.

    Reversing an axis reverses each of its atoms, however the program splits the axis.
    """
    if view.axes is None:
        return dataclasses.replace(view, number=number)
    before = set(table.atoms(view.history.reversed))
    turned = {a for d in eqn.params["dimensions"] for a in table.atoms(view.axes[d])}
    view = went_through(view, reversed=tuple(sorted(before ^ turned)))
    return dataclasses.replace(view, number=number)


def reversal(table: AxisTable, view: View, axis: Atoms) -> Literal["none", "part", "whole"]:
    """How much of an axis of a view is read back to front.

    Only a part of the axis is, if the parameter was reversed before it was put beside others.
    """
    atoms = set(table.atoms(axis))
    inside = [j.parameter_axis for j in view.joins if atoms.intersection(table.atoms(j.array_axis))]
    if any(reversal(table, view, piece_axis) != "none" for piece_axis in inside):
        return "part"
    turned = atoms.intersection(table.atoms(view.history.reversed))
    return "none" if not turned else "whole" if turned == atoms else "part"


def _slice(table: AxisTable, eqn: Eqn, view: View, ins: Sequence[Value], number: int) -> View:
    """A slice of a view: one entry of the leading axis is an index, a run of an axis is a range.

    Any other slice selects elements. The view of a parameter outside the slice has ``axes=None``.
    """
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    new = dataclasses.replace(view, number=number)
    if before == after:
        return new
    cut = [d for d in range(len(before)) if before[d] != after[d]]
    axes, starts = view.axes, _static_starts(eqn, cut)
    strides = eqn.params.get("strides") or (1,) * len(before)
    straight = axes and all(reversal(table, view, axes[d]) == "none" for d in cut)
    if not axes or not straight or any(strides[d] > 1 and after[d] > 1 for d in cut):
        return dataclasses.replace(new, axes=None)
    if starts is None:  # a traced index takes one entry of a stack, as a scan does
        if cut != [0] or after[0] != 1 or view.joins:
            return dataclasses.replace(new, axes=None)
        step = Consumed(before[0], axes[0], ("index", ins[1].number))
        source = view.source._replace(consumed=(*view.source.consumed, step))
        return dataclasses.replace(new, axes=((), *axes[1:]), source=source)
    for d in cut:
        new = part_of(table, new, d, starts[d], starts[d] + after[d])
    return new


def part_of(table: AxisTable, view: View, d: int, start: int, stop: int) -> View:
    """The view of the indices ``start`` to ``stop`` of one of its axes.

    If the parameter is only a part of the axis, the result holds the part of it that lies in the
    range; its join has size 0 if none does.
    """
    if view.axes is None:
        return view
    axis = table.atoms(view.axes[d])
    joined = next((j for j in view.joins if table.atoms(j.array_axis) == axis), None)
    if joined is not None:
        first, last = joined.start - start, joined.start + joined.size - start
        other_joins = tuple(j for j in view.joins if j is not joined)
        # A part that is sliced away keeps a join of size zero: the parameter is then not read here,
        # and ``_functions`` drops it.
        if last <= 0 or first >= stop - start:
            return dataclasses.replace(
                view, axes=None, joins=(*other_joins, joined._replace(size=0))
            )
        if first < 0 or last > stop - start:
            return dataclasses.replace(view, axes=None)
        if (first, last) == (0, stop - start):
            return _with_axis(view, d, joined.parameter_axis, joins=other_joins)
        cut_axis = table.range_of(axis, start, stop)
        return _with_axis(
            view,
            d,
            cut_axis,
            joins=(*other_joins, joined._replace(array_axis=cut_axis, start=first)),
        )
    source = view.source
    k = next((k for k, a in enumerate(source.origin) if axis and table.atoms(a) == axis), None)
    if k is None or any(not isinstance(at, Range) for at in source.index[k : k + 1]):
        return dataclasses.replace(view, axes=None)
    sizes = [math.prod(map(table.size, table.atoms(a))) for a in source.origin[: k + 1]]
    index = [*source.index, *(Range(0, n, n) for n in sizes[len(source.index) :])]
    previous = index[k]
    assert isinstance(previous, Range)
    start, stop = start + previous.start, stop + previous.start
    leading = k == 0 or not any(isinstance(at, Range) for at in source.index[:k])
    if stop == start + 1 and d == 0 and leading and not source.consumed:
        numbers = [at for at in index[:k] if not isinstance(at, Range)]
        if len(numbers) == k:
            entry = source._replace(index=(*numbers, start, *index[k + 1 :]))
            return _with_axis(view, d, (), source=entry)
    cut_axis = table.range_of(source.origin[k], start, stop)
    index[k] = previous._replace(start=start, stop=stop)
    origin = (*source.origin[:k], cut_axis, *source.origin[k + 1 :])
    return _with_axis(view, d, cut_axis, source=source._replace(index=tuple(index), origin=origin))


def _with_axis(view: View, d: int, axis: Atoms, **changes: Any) -> View:
    assert view.axes is not None
    axes = (*view.axes[:d], axis, *view.axes[d + 1 :])
    return dataclasses.replace(view, axes=axes, **changes)


def _split(table: AxisTable, eqn: Eqn, view: View) -> list[View]:
    axis, views, start = eqn.params["axis"], [], 0
    # jnp.split leaves NumPy integers, which no file format stores: hence int.
    for size in map(int, eqn.params["sizes"]):
        is_full = size == eqn.invars[0].aval.shape[axis]
        views.append(view if is_full else part_of(table, view, axis, start, start + size))
        start += size
    return views


def _static_starts(eqn: Eqn, cut: Sequence[int]) -> dict[int, int] | None:
    """Where a slice begins on each axis that it cuts; ``None`` if a start is traced."""
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive.name == "slice":
        return {d: int(eqn.params["start_indices"][d]) for d in cut}
    starts = {d: eqn.invars[1 + d] for d in cut}
    if all(isinstance(start, jex.Literal) for start in starts.values()):
        # `dynamic_slice` moves a start so that the slice fits.
        return {d: min(max(int(s.val), 0), shape[d] - out[d]) for d, s in starts.items()}
    return None
