"""Equations of parameters alone: what is still seen of the parameters in their results.

A parameter stays in sight behind a view (``_views``), and where it goes through a function element
by element: ``exp(w)``, ``u * v``. Each element of the result then depends on one element of each
parameter, and a gradient of it is one of the parameter times a derivative, which goes with the
slot (``_elements``). Whatever else is in the result is a value that this may depend on.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jaxkfac.interception._axes import Atoms
from jaxkfac.interception._compat import Eqn, body_of, call_kind
from jaxkfac.interception._facts import Facts
from jaxkfac.interception._joins import Join
from jaxkfac.interception._values import (
    Combined,
    Constant,
    Data,
    Derived,
    Parameter,
    Value,
    View,
    traced_indices_in,
    views_in,
)
from jaxkfac.interception._views import ELEMENT_BY_ELEMENT, SAME_ELEMENTS, is_negated, view_of

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
