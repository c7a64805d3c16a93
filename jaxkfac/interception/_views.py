"""The view rule: equations through which a parameter can still be seen."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jax.extend import core as jex

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._compat import Eqn, read_order
from jaxkfac.interception._propagate import Axes
from jaxkfac.interception._values import Constant, Consumed, Value, View

SAME_ELEMENTS = frozenset(
    "convert_element_type copy copy_p reduce_precision optimization_barrier name pvary pcast "
    "sharding_constraint reshard layout_constraint".split()
)
_SELECTIONS = frozenset("slice dynamic_slice gather split pad broadcast_in_dim".split())


def view_of(table: AxisTable, eqn: Eqn, ins: Sequence[Value], number: int) -> list[View] | None:
    """The views that the results are, or ``None`` if the equation is no view.

    Exactly one operand must be a view and every other one constant.
    """
    views = _views(table, eqn, ins, number)
    if views is None:
        return None
    name = eqn.primitive.name
    return [
        dataclasses.replace(v, lost_by=name) if v.axes is None and not v.lost_by else v
        for v in views
    ]


def _views(table: AxisTable, eqn: Eqn, ins: Sequence[Value], number: int) -> list[View] | None:
    views = [i for i, v in enumerate(ins) if isinstance(v, View)]
    others = [v for v in ins if not isinstance(v, View)]
    if eqn.primitive.name == "dynamic_slice":  # the index may well be data
        others = []
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "optimization_barrier":
        return None  # handled operand by operand
    if len(views) != 1 or not all(isinstance(v, Constant) for v in others):
        return None
    position = views[0]
    view: View = ins[position]  # type: ignore[assignment]
    if not jnp.issubdtype(out.dtype, jnp.floating):  # times complex data, it is no real product
        return None
    if name in SAME_ELEMENTS:
        return [dataclasses.replace(view, number=number)]
    if is_negated(eqn, position):
        view = dataclasses.replace(view, scaled=(*view.scaled, number))
    if name == "neg":
        return [dataclasses.replace(view, number=number)]
    if name in ("mul", "div"):
        if name == "div" and position == 1:
            return None
        return [_scaled(table, eqn, view, position, number)]
    if name in ("add", "sub", "add_any"):  # w + c has the derivatives of w
        same = eqn.invars[position].aval.shape == out.shape
        return [dataclasses.replace(view, number=number, axes=view.axes if same else None)]
    if position != 0:
        return None
    if name in ("transpose", "squeeze", "reshape"):
        return [dataclasses.replace(view, number=number, axes=_moved(table, eqn, view.axes))]
    if name in ("slice", "dynamic_slice"):
        return [_slice(table, eqn, view, ins, number)]
    if name == "rev":
        return [_turned(table, eqn, view, number)]
    if name == "broadcast_in_dim":
        return [dataclasses.replace(view, number=number, axes=_broadcast(table, eqn, view.axes))]
    if name in _SELECTIONS:
        return [dataclasses.replace(view, number=number, axes=None) for _ in eqn.outvars]
    return None


def broadcast_axes(table: AxisTable, axes: Axes) -> tuple[int, ...]:
    """The axes along which a view was broadcast, and nothing else."""
    return tuple(
        d
        for d, axis in enumerate(axes)
        if table.atoms(axis) and all(table.kinds(a) == {"broadcast"} for a in table.atoms(axis))
    )


def is_negated(eqn: Eqn, position: int) -> bool:
    """Whether an operand is multiplied by −1, which rows beside a column of ones do see."""
    return eqn.primitive.name == "neg" or (eqn.primitive.name == "sub" and position == 1)


def _scaled(table: AxisTable, eqn: Eqn, view: View, position: int, number: int) -> View:
    """Times a constant: a scalar keeps the matrix, an array (a mask) only the elements."""
    other = eqn.invars[1 - position]
    mine, out = eqn.invars[position].aval.shape, eqn.outvars[0].aval.shape
    axes = view.axes
    if getattr(other.aval, "size", 1) != 1 or mine != out:
        axes = None
    return dataclasses.replace(view, number=number, axes=axes, scaled=(*view.scaled, number))


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
    shape, source = eqn.params["shape"], eqn.invars[0].aval.shape
    out = [table.new(s, "broadcast") for s in shape]
    for d, axis, size in zip(eqn.params["broadcast_dimensions"], axes, source, strict=True):
        if size == shape[d]:
            out[d] = axis
    return tuple(out)


def _turned(table: AxisTable, eqn: Eqn, view: View, number: int) -> View:
    """The view back to front along some axes; twice is not at all.

    Reversing an axis reverses each of its atoms, however the program splits it.
    """
    if view.axes is None:
        return dataclasses.replace(view, number=number)
    before = set(table.atoms(view.reversed))
    turned = {a for d in eqn.params["dimensions"] for a in table.atoms(view.axes[d])}
    return dataclasses.replace(view, number=number, reversed=tuple(sorted(before ^ turned)))


def reversal(table: AxisTable, view: View, axis: Atoms) -> Literal["none", "part", "whole"]:
    """How far a view is seen back to front along one of its axes."""
    atoms = set(table.atoms(axis))
    turned = atoms.intersection(table.atoms(view.reversed))
    return "none" if not turned else "whole" if turned == atoms else "part"


def _slice(table: AxisTable, eqn: Eqn, view: View, ins: Sequence[Value], number: int) -> View:
    """One element of the leading axis is an index. Any other slice selects elements."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    new = dataclasses.replace(view, number=number)
    if before == after:
        return new
    axes = view.axes
    cut = [d for d in range(len(before)) if before[d] != after[d]]
    if axes is None or cut != [0] or after[0] != 1 or reversal(table, view, axes[0]) != "none":
        return dataclasses.replace(new, axes=None)
    rest = ((), *axes[1:])
    start = _static_start(eqn)
    if start is None:  # a traced index walks along a stack, as a scan does
        step = Consumed(before[0], axes[0], ("index", ins[1].number))
        return dataclasses.replace(new, axes=rest, consumed=(*view.consumed, step))
    whole = view.origin[len(view.index)]
    if view.consumed or table.atoms(axes[0]) != table.atoms(whole):
        return dataclasses.replace(new, axes=None)
    return dataclasses.replace(new, axes=rest, index=(*view.index, start))


def _static_start(eqn: Eqn) -> int | None:
    if eqn.primitive.name == "slice":
        return int(eqn.params["start_indices"][0])
    start = eqn.invars[1]
    if isinstance(start, jex.Literal):
        return min(max(int(start.val), 0), eqn.invars[0].aval.shape[0] - 1)
    return None
