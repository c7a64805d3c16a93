"""Products of a constant and a parameter, made once for each example.

A program mapped over examples multiplies a constant and a parameter once for all of them:
``vmap`` of a derivative does so with the direction ``e_1`` in ``jvp``, and with the cotangent 1 in
``grad``. The result meets each example's data only later, and its own cotangent is a sum over
examples. The same program with the constant repeated for each example has a row for each.

The product, and what follows from it alone, is mapped over copies, one for each example. Where it
meets data, in an equation element by element or as the carry with which a scan begins, the copies
lie along the axis of the examples.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac.interception._axes import ELEMENTWISE, Atoms, Axes, AxisTable
from jaxkfac.interception._compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    bind,
    body_of,
    call_kind,
    checkpoint_like,
    is_var,
    of_operands,
    scan_counts,
    scan_like,
)
from jaxkfac.interception._kind import Use

_ALONG_AN_AXIS = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())


class Meeting(NamedTuple):
    """An equation in which what comes from products of constants meets data.

    Attributes:
        eqn: The equation.
        axes: Of each operand that is data with rows.
        products: The products that meet it.
        carry: Whether it is a scan, and they are the carry with which it begins.
    """

    eqn: Eqn
    axes: tuple[Axes, ...]
    products: frozenset[Hashable]
    carry: bool = False


class Repeats(NamedTuple):
    """What is to be repeated, by the place of an equation.

    Attributes:
        products: Number of copies, and the position of the parameter among the operands.
        meetings: The axis of the result, or of the carry, along which the copies lie.
    """

    products: dict[Hashable, tuple[int, int]]
    meetings: dict[Hashable, int]


def repeats(
    table: AxisTable,
    uses: Sequence[Use],
    meetings: Mapping[Hashable, Meeting],
    closed_in: frozenset[Hashable],
    examples: Sequence[Atoms],
) -> Repeats:
    """Which products can be repeated for the examples that they meet.

    Args:
        table: The axis atoms.
        uses: Products of a constant and a parameter that have no row for each example.
        meetings: Where they meet data.
        closed_in: Products whose results enter an equation that is not followed.
        examples: Axes of examples; a product meets those of one of them only.
    """
    found = Repeats({}, {})
    wanted = {use.where: use for use in uses if use.where not in closed_in}
    for where, use in wanted.items():
        own = {at: met for at, met in meetings.items() if where in met.products}
        for axis in examples:
            places = {at: _axis_of(table, met, axis) for at, met in own.items()}
            joint = {at: met.products <= wanted.keys() for at, met in own.items()}
            if own and None not in places.values() and all(joint.values()):
                size = 1
                for atom in table.atoms(axis):
                    size *= table.size(atom)
                found.products[where] = size, use.operand
                found.meetings.update((at, d) for at, d in places.items() if d is not None)
                break
    # Products that meet data together are repeated together.
    kept = found.products.keys()
    split = {at for at in found.meetings if not meetings[at].products <= kept}
    if split:
        rest = [u for u in uses if not any(u.where in meetings[at].products for at in split)]
        return repeats(table, rest, meetings, closed_in, examples)
    return found


def _axis_of(table: AxisTable, meeting: Meeting, examples: Atoms) -> int | None:
    """The axis along which the examples lie, if the equation goes by elements or is a loop."""
    name, wanted = meeting.eqn.primitive.name, table.atoms(examples)
    if meeting.carry:
        rank = len(meeting.axes[0])
    elif name not in ELEMENTWISE or name in _ALONG_AN_AXIS or len(meeting.eqn.outvars) != 1:
        return None
    else:
        rank = len(meeting.eqn.outvars[0].aval.shape)
    for axes in meeting.axes:
        for d, axis in enumerate(axes):
            if len(axes) == rank and table.atoms(axis) == wanted:
                return d
    return None


class _Copies(NamedTuple):
    """A value once for each example, along its first axis.

    Axes along which it was broadcast have size one, until an equation reads it that needs them:
    the examples may be among them.
    """

    x: Any


def repeated(closed: ClosedJaxpr, wanted: Repeats) -> ClosedJaxpr:
    """The program with products of constants repeated for each example."""

    def run(*args: Any) -> list[Any]:
        return _run(closed.jaxpr, closed.consts, args, (), wanted)

    shapes = [
        jax.ShapeDtypeStruct(
            v.aval.shape,
            v.aval.dtype,
            weak_type=getattr(v.aval, "weak_type", False),
            sharding=getattr(v.aval, "sharding", None),
        )
        for v in closed.jaxpr.invars
    ]
    return jax.make_jaxpr(run)(*shapes)


def _run(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], around: tuple[int, ...], todo: Repeats
) -> list[Any]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    inside = {where[: len(around) + 1] for where in todo.products if isinstance(where, tuple)}
    for position, eqn in enumerate(jaxpr.eqns):
        values = [env[v] if is_var(v) else v.val for v in eqn.invars]
        where, here = (*around, id(eqn)), (*around, position)
        copied = any(isinstance(v, _Copies) for v in values)
        kind = call_kind(eqn)
        if where in todo.products:
            out = [_product(eqn, values, *todo.products[where])]
        elif where in todo.meetings and copied:
            shape = eqn.outvars[0].aval.shape
            rows = [_aligned(v, todo.meetings[where], len(shape)) for v in values]
            out = [jnp.broadcast_to(bind(eqn)(*rows), shape)]
        elif kind == "scan" and (copied or here in inside):
            out = _scan(eqn, values, where, here, todo)
        elif copied and eqn.primitive.name == "broadcast_in_dim":
            out = [_broadcast(eqn, values[0])]
        elif kind in ("jit", "checkpoint") and (copied or here in inside):
            body, closed_over = body_of(eqn)

            def again(*values: Any, body=body, closed_over=closed_over, here=here) -> list[Any]:
                return _run(body, closed_over, values, here, todo)

            out = (checkpoint_like(eqn, again) if kind == "checkpoint" else again)(*values)
        elif copied:
            axes = [0 if isinstance(v, _Copies) else None for v in values]
            plain = [
                jnp.broadcast_to(v.x, (len(v.x), *var.aval.shape)) if isinstance(v, _Copies) else v
                for v, var in zip(values, eqn.invars, strict=True)
            ]
            out = jax.vmap(of_operands(eqn, jaxpr), axes)(*plain)
            out = [_Copies(x) for x in (out if eqn.primitive.multiple_results else [out])]
        else:
            out = of_operands(eqn, jaxpr)(*values)
            out = out if kind == "custom" or eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))
    return [env[v] if is_var(v) else v.val for v in jaxpr.outvars]


def _product(eqn: Eqn, values: Sequence[Any], number: int, parameter: int) -> _Copies:
    axes = [None if k == parameter else 0 for k in range(len(values))]
    rows = [
        v if k == parameter else jnp.broadcast_to(v, (number, *jnp.shape(v)))
        for k, v in enumerate(values)
    ]
    return _Copies(jax.vmap(bind(eqn), axes)(*rows))


def _broadcast(eqn: Eqn, value: _Copies) -> _Copies:
    shape = [1] * len(eqn.params["shape"])
    for d, size in zip(eqn.params["broadcast_dimensions"], value.x.shape[1:], strict=True):
        shape[d] = size
    return _Copies(value.x.reshape(-1, *shape))


def _scan(
    eqn: Eqn, values: Sequence[Any], where: Hashable, here: tuple[int, ...], todo: Repeats
) -> list[Any]:
    """A scan, its body with what is to be repeated in it."""
    (nc, nk), (body, consts) = scan_counts(eqn), body_of(eqn)
    carry = []
    for k in range(nc, nc + nk):
        value, shape = values[k], eqn.invars[k].aval.shape
        if isinstance(value, _Copies):
            axis = todo.meetings[where, k]
            value = jnp.broadcast_to(_aligned(value, axis, len(shape)), shape)
        carry.append(value)

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = _run(body, consts, [*values[:nc], *carry, *xs], here, todo)
        return out[:nk], out[nk:]

    last, stacked = scan_like(eqn, step, carry, list(values[nc + nk :]))
    return [*last, *stacked]


def _aligned(value: Any, axis: int, rank: int) -> Any:
    """Copies along one axis of a result, where the value itself has size one or as many."""
    if not isinstance(value, _Copies):
        return value
    x = value.x
    if x.ndim == 1:  # of a scalar
        return x.reshape([-1 if d == axis else 1 for d in range(rank)])
    if x.shape[1 + axis] == 1:
        return jnp.moveaxis(x.squeeze(1 + axis), 0, axis)
    return jnp.moveaxis(jnp.diagonal(x, axis1=0, axis2=1 + axis), -1, axis)
