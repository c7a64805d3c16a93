"""Equations of parameters alone, and lookups of their entries."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkfac.interception._axes import Atoms, Axes
from jaxkfac.interception._compat import Eqn, body_of, call_kind
from jaxkfac.interception._index import Join
from jaxkfac.interception._kind import Data, Use, Value
from jaxkfac.interception._plan import Facts
from jaxkfac.interception._values import (
    Combined,
    Constant,
    Derived,
    Parameter,
    Picked,
    View,
    traced_indices_in,
    views_in,
)
from jaxkfac.interception._views import ELEMENT_BY_ELEMENT, SAME_ELEMENTS, is_negated, view_of

# ---------------- equations of parameters alone: what is still seen of the parameters in their
# results
#
# A parameter stays in sight behind a view (``_views``), and where it goes through a function
# element by element: ``exp(w)``, ``u * v``. Each element of the result then depends on one element
# of each parameter, and a gradient of it is one of the parameter times a derivative, which goes
# with the slot (``_elements``). Whatever else is in the result is a value that this may depend on.


JOINS = frozenset("concatenate stack pad".split())
_SUMS = frozenset("add sub add_any".split())  # of which each operand is a view


def seen_in(facts: Facts, eqn: Eqn, ins: Sequence[Value]) -> list[Value] | None:
    """What the results of an equation of parameters show of them; ``None`` if that is nothing."""
    if any(isinstance(v, Data) for v in ins) and eqn.primitive.name != "dynamic_slice":
        return None
    if eqn.primitive.name in JOINS:
        return _joined(facts, eqn, ins)
    parameters = [i for i, v in enumerate(ins) if isinstance(v, Parameter)]
    if len(parameters) == 1:
        views = _each_viewed(facts, eqn, ins, parameters[0])
        if views is not None:
            return views
    if any(isinstance(v, Data) for v in ins) or not is_function(eqn):
        return None
    return _function(facts, eqn, ins)


def is_function(eqn: Eqn) -> bool:
    """Whether the result is a function of the operands element by element.

    A custom derivative of one is too, if it goes forward: ``jax.nn.softplus``.
    """
    if len(eqn.outvars) != 1 or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return False
    shape = eqn.outvars[0].aval.shape
    if not all(broadcasts(v.aval.shape, shape) for v in eqn.invars):
        return False
    if call_kind(eqn) == "custom":
        return _has_derivative(eqn) and all(map(_is_step, body_of(eqn)[0].eqns))
    return eqn.primitive.name in ELEMENT_BY_ELEMENT


def broadcasts(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether an operand stands for one of the result's shape: a scalar, or axes of size one."""
    if not before:
        return True
    return len(before) == len(after) and all(
        b in (1, a) for b, a in zip(before, after, strict=True)
    )


def _has_derivative(eqn: Eqn) -> bool:
    """Whether a custom derivative gives it forward, and not only backward as ``custom_vjp``."""
    return eqn.primitive.name.startswith("custom_jvp_call")


def _is_step(eqn: Eqn) -> bool:
    """Whether an equation inside a custom derivative acts element by element."""
    if call_kind(eqn) == "custom" and not _has_derivative(eqn):
        return False
    if call_kind(eqn) in ("jit", "custom"):
        return all(map(_is_step, body_of(eqn)[0].eqns))
    if eqn.primitive.name == "broadcast_in_dim":
        return eqn.invars[0].aval.shape == ()
    name, out = eqn.primitive.name, eqn.outvars[0].aval.dtype
    return name in ELEMENT_BY_ELEMENT | SAME_ELEMENTS or not jnp.issubdtype(out, jnp.inexact)


def _each_viewed(facts: Facts, eqn: Eqn, ins: Sequence[Value], position: int) -> list[Value] | None:
    """The results of a view of one value: each parameter in it is seen through that view."""
    value = ins[position]
    if isinstance(value, Derived):
        return None
    if isinstance(value, View):
        views = view_of(facts, eqn, ins)
        return None if views is None else [_value(v.number, [v], []) for v in views]
    before = list(views_in(value))
    each = [view_of(facts, eqn, [*ins[:position], v, *ins[position + 1 :]]) for v in before]
    if any(views is None for views in each):
        return None
    return [
        _value(facts.equation_number(eqn, ins, k), [v[k] for v in each if v], [value])
        for k in range(len(eqn.outvars))
    ]


def _joined(facts: Facts, eqn: Eqn, ins: Sequence[Value]) -> list[Value] | None:
    """Parameters side by side: each is a part of the result along one axis, or several."""
    name, number, views = eqn.primitive.name, facts.equation_number(eqn, ins), []
    if name == "pad":
        if isinstance(ins[1], Parameter):
            return None
        views = [_padded(facts, eqn, view) for view in views_in(ins[0])]
    else:
        axis = eqn.params["axis" if name == "stack" else "dimension"]
        whole = facts.table.new(eqn.outvars[0].aval.shape[axis], "parameter")
        start = 0
        for value, operand in zip(ins, eqn.invars, strict=True):
            size = 1 if name == "stack" else operand.aval.shape[axis]
            for view in views_in(value):
                views.append(_beside(view, name, axis, whole, start, size))
            start += size
    arranged: dict[str, list[object]] = {}  # by path: all of it is one arrangement
    for view in views:
        arranged.setdefault(view.path, []).append((view.elements, view.joins[-1:]))
    views = [
        dataclasses.replace(
            v,
            number=number,
            elements=facts.number((name, str(eqn.params), *arranged[v.path])),
            lost_by=v.lost_by or ("" if v.axes is not None else name),
        )
        for v in views
    ]
    return [_value(number, views, ins)]


def _beside(view: View, name: str, axis: int, whole: Atoms, start: int, size: int) -> View:
    if view.axes is None or not whole:
        return view
    own = () if name == "stack" else view.axes[axis]
    after = view.axes[axis if name == "stack" else axis + 1 :]
    axes = (*view.axes[:axis], whole, *after)
    return dataclasses.replace(view, axes=axes, joins=(*view.joins, Join(whole, start, size, own)))


def _padded(facts: Facts, eqn: Eqn, view: View) -> View:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    for d, (low, high, between) in enumerate(eqn.params["padding_config"]):
        if low < 0 or high < 0 or between:
            return dataclasses.replace(view, axes=None)
        if low or high:
            whole = facts.table.new(after[d], "parameter")
            view = _beside(view, "pad", d, whole, int(low), before[d])
    return view


def _reasons_in(values: Sequence[Value]) -> dict[str, str]:
    return {path: why for v in values for path, why in getattr(v, "reasons", ())}


def _value(
    number: int, views: Sequence[View], ins: Sequence[Value], hidden: dict[str, str] | None = None
) -> Value:
    """A value made of others in which these are seen; nothing is, of a part that was sliced away.

    ``hidden`` says of further parameters why they are not seen any more.
    """
    reasons, traced_indices = (hidden or {}) | _reasons_in(ins), traced_indices_in(ins)
    views = [v for v in views if v.path not in reasons and all(j.size for j in v.joins)]
    lost = tuple(sorted(reasons.items()))
    if len(views) == 1 and not reasons:
        return views[0]
    if views:
        return Combined(number, tuple(views), lost, traced_indices)
    return Derived(number, lost, traced_indices) if reasons else Constant(number)


def _function(facts: Facts, eqn: Eqn, ins: Sequence[Value]) -> list[Value]:
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    number = facts.equation_number(eqn, ins)
    reasons: dict[str, str] = {}
    found: dict[str, View] = {}
    for position, value in enumerate(ins):
        for view in views_in(value):
            view = _spread(facts, view, eqn.invars[position].aval.shape, shape)
            before = found.setdefault(view.path, view)
            if before is not view and _place(before) != _place(view):
                # One derivative cannot stand for two elements of the parameter.
                reasons.setdefault(view.path, f"`{name}` with itself in another order")
            elif before is not view or name not in _SUMS:
                view = dataclasses.replace(view, function=view.function or name)
            elif is_negated(eqn, position):
                view = dataclasses.replace(view, scaled=(*view.scaled, number))
            found[view.path] = dataclasses.replace(view, number=number)
    return [_value(number, list(found.values()), ins, reasons)]


def _place(view: View) -> tuple[object, ...]:
    """What two views of one parameter have in common where their elements lie alike."""
    return view.elements, view.index, view.consumed


def _spread(facts: Facts, view: View, before: Sequence[int], after: Sequence[int]) -> View:
    """A scalar, or an axis of size one, beside an array is one element that is everywhere."""
    if tuple(before) == tuple(after):
        return view
    axes = None
    if view.axes is not None:
        kept = view.axes if before else ((),) * len(after)
        sizes = before or (1,) * len(after)
        axes = tuple(
            axis if b == a else facts.table.new(a, "broadcast")
            for axis, b, a in zip(kept, sizes, after, strict=True)
        )
    elements = facts.number(("spread", view.elements, tuple(after)))
    return dataclasses.replace(view, axes=axes, elements=elements)


# ---------------- lookups: entries of one axis of a parameter, each picked by an index that is data
#
# A lookup of vectors is an embedding. A lookup of matrices may be one too (the row of a table is
# laid out as a matrix), or each row of data picks the kernel that it is multiplied by: then the
# axis is a stack of experts. Which it is shows where the result is read: it is taken for a stack
# first, and for a table where anything but such a product reads it.


_CLAMPED = (jax.lax.GatherScatterMode.CLIP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


class Lookup(NamedTuple):
    """Of a ``gather`` that picks whole entries: along which axis.

    Attributes:
        axis: Of the operand.
        column: Where its index stands in the last axis of the indices.
    """

    axis: int
    column: int


def lookup_of(eqn: Eqn) -> Lookup | None:
    """How an equation picks whole entries of its operand; ``None`` if it does something else.

    Further indices, of axes that are taken whole, can only be zero: ``vmap`` makes them of
    ``w[i]``.
    """
    d, sizes, shape = (
        eqn.params["dimension_numbers"],
        eqn.params["slice_sizes"],
        eqn.invars[0].aval.shape,
    )
    picked, cut = list(d.start_index_map), [i for i, n in enumerate(shape) if sizes[i] != n]
    if len(cut) > 1 or not picked or d.operand_batching_dims:
        return None
    if cut and cut[0] not in picked:
        return None
    axis = cut[0] if cut else next((i for i in picked if shape[i] == 1), None)
    if axis is None or sizes[axis] != 1 or tuple(d.collapsed_slice_dims) not in ((), (axis,)):
        return None
    if len(picked) > 1 and eqn.params["mode"] not in _CLAMPED:
        return None
    return Lookup(axis, picked.index(axis))


def kept_axis(eqn: Eqn, lookup: Lookup) -> int | None:
    """Where the axis of the lookup is in the result, with size one; ``None`` if it is dropped."""
    d = eqn.params["dimension_numbers"]
    return None if d.collapsed_slice_dims else int(d.offset_dims[lookup.axis])


def entries_picked(eqn: Eqn, operands: Sequence[Any]) -> Int[Array, "..."]:
    """Which entry each row picks; none, out of range above, where it picks none."""
    lookup = lookup_of(eqn)
    assert lookup is not None
    entries, number = operands[1][..., lookup.column], operands[0].shape[lookup.axis]
    if entries.dtype.itemsize < 4:
        entries = entries.astype(jnp.int32)  # which holds the number of entries
    if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        return jnp.clip(entries, 0, number - 1)
    return jnp.where(entries < 0, number, entries)  # else it counts from the end


def stack_looked_up(facts: Facts, eqn: Eqn, ins: Sequence[Value], where: object) -> Value | None:
    """The result of a lookup of matrices as a view of the parameters; ``None`` if it is none."""
    lookup = lookup_of(eqn)
    value, indices = ins[0], ins[1]
    if lookup is None or not isinstance(indices, Data) or isinstance(value, Data):
        return None
    if not views_in(value) or getattr(value, "reasons", ()):
        return None
    views = [_looked_up(facts, eqn, lookup, view, indices, where) for view in views_in(value)]
    found = [view for view in views if view is not None]
    if len(found) < len(views):
        return None
    number = facts.equation_number(eqn, ins)
    found = [dataclasses.replace(v, number=number) for v in found]
    return found[0] if isinstance(value, View) else Combined(number, tuple(found))


def _looked_up(
    facts: Facts, eqn: Eqn, lookup: Lookup, view: View, indices: Data, where: object
) -> View | None:
    if view.axes is None or view.function or view.picked or view.chosen or view.members:
        return None
    axis = facts.table.atoms(view.axes[lookup.axis])
    if len(view.axes) < 3 or not axis or any(j.whole == view.axes[lookup.axis] for j in view.joins):
        return None
    if any(facts.table.kinds(a) != {"parameter"} for a in axis):
        return None
    offset = list(eqn.params["dimension_numbers"].offset_dims)
    kept = [a for d, a in enumerate(view.axes) if d != lookup.axis]
    at = kept_axis(eqn, lookup)
    if at is not None:
        offset.remove(at)
    rows, features = iter(indices.axes[:-1]), iter(kept)
    axes: Axes = tuple(
        () if d == at else next(features) if d in offset else next(rows)
        for d in range(len(eqn.outvars[0].aval.shape))
    )
    picked = Picked(axis, indices.axes[:-1], indices.number, where)
    arrangement = facts.arrangement(eqn, view, [view, indices])
    return dataclasses.replace(view, axes=axes, picked=picked, elements=arrangement)


def looked_up_by_constants(
    eqn: Eqn, ins: Sequence[Value], seen: Sequence[Value], where: Hashable
) -> list[Value]:
    """Views of entries that constants pick, with the lookup, which may be one for each row."""
    table = ins[0]
    if lookup_of(eqn) is None or not isinstance(table, View) or table.axes is None:
        return list(seen)
    return [dataclasses.replace(v, looked_up=where) if isinstance(v, View) else v for v in seen]


def without_lookup_if_grown(eqn: Eqn, ins: Sequence[Value], seen: Sequence[Value]) -> list[Value]:
    """Views; those that have grown lose their lookup, whose indices lack the new axis."""
    held = [x.aval.size for x, v in zip(eqn.invars, ins, strict=True) if views_in(v)]
    largest = max(held, default=0)

    def kept(value: Any, out: Any) -> Any:
        if out.aval.size <= largest:
            return value
        if isinstance(value, Combined):
            return dataclasses.replace(value, views=tuple(kept(v, out) for v in value.views))
        is_view = isinstance(value, View)
        return dataclasses.replace(value, looked_up=None) if is_view else value

    return [kept(v, out) for v, out in zip(seen, eqn.outvars, strict=False)]


def lookups_in(values: Sequence[Value]) -> set[object]:
    """Where the stacks were looked up that are seen in some values."""
    return {view.picked.where for v in values for view in views_in(v) if view.picked}


def is_followed(eqn: Eqn, kind: str | None, outs: Sequence[Value], uses: Sequence[Use]) -> bool:
    """Whether stacks that were looked up are still stacks behind an equation that reads them.

    Args:
        eqn: The equation.
        kind: Which call it is, or ``None``.
        outs: Its results.
        uses: The uses that were found in it.
    """
    if uses:
        return all(use.kind.picks or not use.view.picked for use in uses)
    if kind is not None:
        return kind != "shard_map" and not any(isinstance(v, Derived) for v in outs)
    if eqn.primitive.name in JOINS or not any(map(views_in, outs)):
        return False
    return all(
        view.axes is not None and not view.function and view.picked is not None
        for v in outs
        for view in views_in(v)
    )
