"""Equations of parameters alone, and lookups of a parameter's entries."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer

from jaxkfac._jaxpr_compat import Eqn, body_of, call_kind
from jaxkfac.interception._kind import Data, Use, Value
from jaxkfac.interception._plan import Facts
from jaxkfac.interception._views import ELEMENT_BY_ELEMENT, SAME_ELEMENTS, is_negated, view_of
from jaxkfac.interception.values._axes import Atoms, Axes
from jaxkfac.interception.values._index import Join
from jaxkfac.interception.values._values import (
    Combined,
    Constant,
    Derived,
    Parameter,
    Picked,
    View,
    traced_indices_in,
    views_in,
    went_through,
)

# ---------------- equations of parameters alone
#
# A parameter is still seen behind a view (``_views``) and behind an elementwise function:
# ``exp(w)``, ``u * v``. Each element of the result then depends on one element of each parameter,
# and its gradient times a derivative is the parameter's gradient; the derivative goes with the slot
# (``_elements``). Any other operand of such a result is a value on which the derivative may depend.


JOINS = frozenset("concatenate stack pad".split())
_SUMS = frozenset("add sub add_any complex".split())  # each operand of a sum is a view


def seen_in(facts: Facts, eqn: Eqn, ins: Sequence[Value]) -> list[Value] | None:
    """The results of an equation of parameters in which some are seen; ``None`` if none is."""
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
    """Whether the result is an elementwise function of the operands.

    That includes a function with a custom derivative in forward mode, such as ``jax.nn.softplus``.
    """
    if len(eqn.outvars) != 1 or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return False
    shape = eqn.outvars[0].aval.shape
    if not all(broadcasts(v.aval.shape, shape) for v in eqn.invars):
        return False
    if call_kind(eqn) == "custom":
        return _has_derivative(eqn) and all(map(_is_step, body_of(eqn)[0].eqns))
    return eqn.primitive.name in ELEMENT_BY_ELEMENT


def broadcasts(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether an operand broadcasts to a shape: it is a scalar, or some of its axes have size 1."""
    if not before:
        return True
    return len(before) == len(after) and all(
        b in (1, a) for b, a in zip(before, after, strict=True)
    )


def _has_derivative(eqn: Eqn) -> bool:
    """Whether a custom derivative has a forward mode, unlike that of a ``custom_vjp``."""
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
    """The results of a view of a value: each parameter in it is seen through the view."""
    value = ins[position]
    if isinstance(value, Derived):
        return None
    if isinstance(value, View):
        views = view_of(facts, eqn, ins)
        return None if views is None else [_value(v.number, [v], []) for v in views]
    before = list(views_in(value))
    views_of_each = [
        view_of(facts, eqn, [*ins[:position], v, *ins[position + 1 :]]) for v in before
    ]
    if any(views is None for views in views_of_each):
        return None
    return [
        _value(facts.equation_number(eqn, ins, k), [v[k] for v in views_of_each if v], [value])
        for k in range(len(eqn.outvars))
    ]


def _joined(facts: Facts, eqn: Eqn, ins: Sequence[Value]) -> list[Value] | None:
    """Parameters side by side: each one is a part of the result along one axis, or several."""
    name, number, views = eqn.primitive.name, facts.equation_number(eqn, ins), []
    if name == "pad":
        if isinstance(ins[1], Parameter):
            return None
        views = [_padded(facts, eqn, view) for view in views_in(ins[0])]
    else:
        axis = eqn.params["axis" if name == "stack" else "dimension"]
        joined_axis = facts.table.new(eqn.outvars[0].aval.shape[axis], "parameter")
        start = 0
        for value, operand in zip(ins, eqn.invars, strict=True):
            size = 1 if name == "stack" else operand.aval.shape[axis]
            for view in views_in(value):
                views.append(_beside(view, name, axis, joined_axis, start, size))
            start += size
    arranged: dict[str, list[object]] = {}  # by path: all parts of it are one arrangement
    for view in views:
        arranged.setdefault(view.source.path, []).append((view.arrangement, view.joins[-1:]))
    views = [
        dataclasses.replace(
            v if v.axes is not None or v.history.lost_by else went_through(v, lost_by=name),
            number=number,
            arrangement=facts.number((name, str(eqn.params), *arranged[v.source.path])),
        )
        for v in views
    ]
    return [_value(number, views, ins)]


def _beside(view: View, name: str, axis: int, joined_axis: Atoms, start: int, size: int) -> View:
    if view.axes is None or not joined_axis:
        return view
    piece_axis = () if name == "stack" else view.axes[axis]
    after = view.axes[axis if name == "stack" else axis + 1 :]
    axes = (*view.axes[:axis], joined_axis, *after)
    return dataclasses.replace(
        view, axes=axes, joins=(*view.joins, Join(joined_axis, start, size, piece_axis))
    )


def _padded(facts: Facts, eqn: Eqn, view: View) -> View:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    for d, (low, high, between) in enumerate(eqn.params["padding_config"]):
        if low < 0 or high < 0 or between:
            return dataclasses.replace(view, axes=None)
        if low or high:
            joined_axis = facts.table.new(after[d], "parameter")
            view = _beside(view, "pad", d, joined_axis, int(low), before[d])
    return view


def _reasons_in(values: Sequence[Value]) -> dict[str, str]:
    return {path: why for v in values for path, why in getattr(v, "reasons", ())}


def _value(
    number: int, views: Sequence[View], ins: Sequence[Value], hidden: dict[str, str] | None = None
) -> Value:
    """A result that contains these views; none, for a parameter whose part was sliced away.

    ``hidden`` gives, for further parameters, the reason why they are no longer seen.
    """
    reasons, traced_indices = (hidden or {}) | _reasons_in(ins), traced_indices_in(ins)
    views = [v for v in views if v.source.path not in reasons and all(j.size for j in v.joins)]
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
    views: dict[str, View] = {}
    for position, value in enumerate(ins):
        for view in views_in(value):
            view = _spread(facts, view, eqn.invars[position].aval.shape, shape)
            before = views.setdefault(view.source.path, view)
            if before is not view and _place(before) != _place(view):
                # One derivative cannot stand for two elements of the parameter.
                reasons.setdefault(view.source.path, f"`{name}` with itself in another order")
            # A parameter that is twice in a sum, as in `w + w`, is no view but a function: its
            # derivative is the sum over both places.
            elif before is not view or name not in _SUMS:
                view = went_through(view, function=view.history.function or name)
            elif is_negated(eqn, position):
                view = went_through(view, scaled=(*view.history.scaled, number))
            elif name == "complex" and position == 1:
                view = went_through(view, phase=view.history.phase * 1j)
            views[view.source.path] = dataclasses.replace(view, number=number)
    return [_value(number, list(views.values()), ins, reasons)]


def _place(view: View) -> tuple[object, ...]:
    """The key that two views of one parameter share if their elements are arranged alike."""
    return view.arrangement, view.source.index, view.source.consumed


def _spread(facts: Facts, view: View, before: Sequence[int], after: Sequence[int]) -> View:
    """A view broadcast to a shape: a scalar, or an axis of size one, appears at every place."""
    if tuple(before) == tuple(after):
        return view
    axes = None
    if view.axes is not None:
        axes_before = view.axes if before else ((),) * len(after)
        sizes = before or (1,) * len(after)
        axes = tuple(
            axis if b == a else facts.table.new(a, "broadcast")
            for axis, b, a in zip(axes_before, sizes, after, strict=True)
        )
    arrangement = facts.number(("spread", view.arrangement, tuple(after)))
    return dataclasses.replace(view, axes=axes, arrangement=arrangement)


# ---------------- lookups: each index, which is data, picks an entry of one axis of a parameter
#
# A lookup of vectors is an embedding. A lookup of matrices is ambiguous: the rows of a table may be
# laid out as matrices, or each row of data may pick the kernel that it is multiplied by, in which
# case the axis is a stack of experts. Only the equation that reads the result decides. The lookup
# is first taken for a stack, and for a table if anything but such a product reads it.


_CLAMPED = (jax.lax.GatherScatterMode.CLIP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)


class Lookup(NamedTuple):
    """The axis along which a ``gather`` picks entries.

    Attributes:
        axis: The axis of the operand.
        column: The position of its index in the last axis of the indices.
    """

    axis: int
    column: int

    @classmethod
    def of(cls, eqn: Eqn) -> "Lookup | None":
        """How an equation picks entries of its operand; ``None`` if it does something else.

        ``vmap`` of ``w[i]`` adds indices for axes that are read in full. These can only be zero.
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
        # A mode that fills picks nothing where an index of an axis that is read in full is not
        # zero.
        if len(picked) > 1 and eqn.params["mode"] not in _CLAMPED:
            return None
        return cls(axis, picked.index(axis))

    def axis_in_result(self, eqn: Eqn) -> int | None:
        """Where the looked-up axis is in the result, with size one; ``None`` if it is dropped."""
        d = eqn.params["dimension_numbers"]
        return None if d.collapsed_slice_dims else int(d.offset_dims[self.axis])

    def entries(self, eqn: Eqn, operands: Sequence[Any]) -> Integer[Array, "..."]:
        """The entry that each row picks; the number of entries, out of range, if it picks none."""
        picked, number = operands[1][..., self.column], operands[0].shape[self.axis]
        if picked.dtype.itemsize < 4:
            picked = picked.astype(jnp.int32)  # wide enough for the number of entries
        if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            return jnp.clip(picked, 0, number - 1)
        return jnp.where(picked < 0, number, picked)  # a negative index would count from the end


def stack_looked_up(facts: Facts, eqn: Eqn, ins: Sequence[Value], where: object) -> Value | None:
    """The result of a lookup of matrices as a view of the parameters, or ``None``."""
    lookup = Lookup.of(eqn)
    value, indices = ins[0], ins[1]
    if lookup is None or not isinstance(indices, Data) or isinstance(value, Data):
        return None
    if not views_in(value) or getattr(value, "reasons", ()):
        return None
    views = [_looked_up(facts, eqn, lookup, view, indices, where) for view in views_in(value)]
    followed = [view for view in views if view is not None]
    if len(followed) < len(views):
        return None
    number = facts.equation_number(eqn, ins)
    followed = [dataclasses.replace(v, number=number) for v in followed]
    return followed[0] if isinstance(value, View) else Combined(number, tuple(followed))


def _looked_up(
    facts: Facts, eqn: Eqn, lookup: Lookup, view: View, indices: Data, where: object
) -> View | None:
    if (
        view.axes is None
        or view.history.function
        or view.picked
        or view.chosen
        or view.source.members
    ):
        return None
    axis = facts.table.atoms(view.axes[lookup.axis])
    if (
        len(view.axes) < 3
        or not axis
        or any(j.array_axis == view.axes[lookup.axis] for j in view.joins)
    ):
        return None
    if any(facts.table.kinds(a) != {"parameter"} for a in axis):
        return None
    offset = list(eqn.params["dimension_numbers"].offset_dims)
    kernel_axes = [a for d, a in enumerate(view.axes) if d != lookup.axis]
    at = lookup.axis_in_result(eqn)
    if at is not None:
        offset.remove(at)
    rows, features = iter(indices.axes[:-1]), iter(kernel_axes)
    axes: Axes = tuple(
        () if d == at else next(features) if d in offset else next(rows)
        for d in range(len(eqn.outvars[0].aval.shape))
    )
    picked = Picked(axis, indices.axes[:-1], indices.number, where)
    arrangement = facts.arrangement(eqn, view, [view, indices])
    return dataclasses.replace(view, axes=axes, picked=picked, arrangement=arrangement)


def looked_up_by_constants(
    eqn: Eqn, ins: Sequence[Value], results: Sequence[Value], where: Hashable
) -> list[Value]:
    """The results, with the lookup noted where constants, maybe one for each row, pick entries."""
    table = ins[0]
    if Lookup.of(eqn) is None or not isinstance(table, View) or table.axes is None:
        return list(results)
    return [went_through(v, looked_up=where) if isinstance(v, View) else v for v in results]


def without_lookup_if_grown(
    eqn: Eqn, ins: Sequence[Value], results: Sequence[Value]
) -> list[Value]:
    """The results; a view larger than its operands loses its lookup.

    The indices of the lookup lack the axis that was added.
    """
    sizes = [x.aval.size for x, v in zip(eqn.invars, ins, strict=True) if views_in(v)]
    largest = max(sizes, default=0)

    def without_lookup(value: Any, out: Any) -> Any:
        if out.aval.size <= largest:
            return value
        if isinstance(value, Combined):
            return dataclasses.replace(
                value, views=tuple(without_lookup(v, out) for v in value.views)
            )
        return went_through(value, looked_up=None) if isinstance(value, View) else value

    return [without_lookup(v, out) for v, out in zip(results, eqn.outvars, strict=False)]


def lookups_in(values: Sequence[Value]) -> set[object]:
    """The lookups of the stacks that are seen in some values."""
    return {view.picked.where for v in values for view in views_in(v) if view.picked}


def is_followed(eqn: Eqn, kind: str | None, outs: Sequence[Value], uses: Sequence[Use]) -> bool:
    """Whether the results of an equation that reads looked-up stacks are still stacks.

    Args:
        eqn: The equation.
        kind: Which call it is, or ``None``.
        outs: The results.
        uses: The uses in the equation.
    """
    if uses:
        return all(use.kind.reads.picked or not use.view.picked for use in uses)
    if kind is not None:
        return kind != "shard_map" and not any(isinstance(v, Derived) for v in outs)
    if eqn.primitive.name in JOINS or not any(map(views_in, outs)):
        return False
    return all(
        view.axes is not None and not view.history.function and view.picked is not None
        for v in outs
        for view in views_in(v)
    )
