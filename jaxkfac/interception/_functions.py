"""Equations of parameters alone: what is still seen of the parameters in their results.

A parameter stays in sight behind a view (``_views``), and where it goes through a function element
by element: ``exp(w)``, ``u * v``. Each element of the result then depends on one element of each
parameter, and a gradient of it is one of the parameter times a derivative, which rides along with
the slot (``_slots``). Whatever else is in the result is a value that the derivative may depend on.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jaxkfac.interception._axes import AxisTable
from jaxkfac.interception._compat import Eqn, body_of, call_kind
from jaxkfac.interception._facts import Facts, reasons_of
from jaxkfac.interception._values import Combined, Data, Derived, Parameter, Value, View, views_in
from jaxkfac.interception._views import ELEMENT_BY_ELEMENT, SAME_ELEMENTS, is_negated, view_of

_SUMS = frozenset("add sub add_any".split())  # of which each operand is a view


def seen_in(facts: Facts, eqn: Eqn, ins: Sequence[Value]) -> list[Value] | None:
    """What the results of an equation of parameters show of them; ``None`` if that is nothing."""
    parameters = [i for i, v in enumerate(ins) if isinstance(v, Parameter)]
    if len(parameters) == 1 and views_in(ins[parameters[0]]):
        if (views := _each_viewed(facts, eqn, ins, parameters[0])) is not None:
            return views
    if any(isinstance(v, Data) for v in ins) or not is_function(eqn):
        return None
    return _function(facts, eqn, ins)


def is_function(eqn: Eqn) -> bool:
    """Whether the result is a function of the operands element by element.

    A custom derivative of one is too: ``jax.nn.softplus``.
    """
    if len(eqn.outvars) != 1 or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return False
    shape = eqn.outvars[0].aval.shape
    if any(v.aval.shape not in ((), shape) for v in eqn.invars):
        return False
    if call_kind(eqn) == "custom":
        return all(map(_is_step, body_of(eqn)[0].eqns))
    return eqn.primitive.name in ELEMENT_BY_ELEMENT


def _is_step(eqn: Eqn) -> bool:
    """Whether an equation inside a custom derivative acts element by element."""
    if call_kind(eqn) in ("jit", "custom"):
        return all(map(_is_step, body_of(eqn)[0].eqns))
    if eqn.primitive.name == "broadcast_in_dim":
        return eqn.invars[0].aval.shape == ()
    name, out = eqn.primitive.name, eqn.outvars[0].aval.dtype
    return name in ELEMENT_BY_ELEMENT | SAME_ELEMENTS or not jnp.issubdtype(out, jnp.inexact)


def _each_viewed(
    facts: Facts, eqn: Eqn, ins: Sequence[Value], position: int
) -> list[Value] | None:
    """The results of a view of one value: each parameter in it is seen through that view."""
    value = ins[position]
    if isinstance(value, View):
        views = view_of(facts, eqn, ins)
        return None if views is None else list(views)
    before = list(views_in(value))
    each = [view_of(facts, eqn, [*ins[:position], v, *ins[position + 1 :]]) for v in before]
    if any(views is None for views in each):
        return None
    reasons = reasons_of([Derived(0, value.reasons)], "") if isinstance(value, Combined) else ()
    out: list[Value] = []
    for k in range(len(eqn.outvars)):
        number = facts.equation_number(eqn, ins, k)
        views = (dataclasses.replace(v[k], number=number) for v in each if v is not None)
        out.append(Combined(number, tuple(views), reasons))
    return out


def _function(facts: Facts, eqn: Eqn, ins: Sequence[Value]) -> list[Value]:
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    number = facts.equation_number(eqn, ins)
    reasons = dict(reasons_of([Derived(0, getattr(v, "reasons", ())) for v in ins], ""))
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
    views = tuple(view for path, view in found.items() if path not in reasons)
    if not views:
        return [Derived(number, tuple(sorted(reasons.items())))]
    if len(views) == 1 and not reasons:
        return list(views)
    return [Combined(number, views, tuple(sorted(reasons.items())))]


def _place(view: View) -> tuple[object, ...]:
    """What two views of one parameter have in common where their elements lie alike."""
    return view.elements, view.index, view.consumed


def _spread(facts: Facts, view: View, before: Sequence[int], after: Sequence[int]) -> View:
    """A scalar beside an array is one element that is everywhere."""
    if tuple(before) == tuple(after):
        return view
    axes = tuple(facts.table.new(size, "broadcast") for size in after)
    elements = facts.number(("spread", view.elements, tuple(after)))
    return dataclasses.replace(view, axes=axes, elements=elements)
