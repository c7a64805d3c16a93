"""Products of a constant and a parameter, repeated for each example.

A program mapped over examples multiplies a constant and a parameter once for all of them. ``vmap``
of a derivative does so with the direction ``e_1`` for ``jvp``, and with the cotangent 1 for
``grad``. The result meets the data of each example only later, so its cotangent is a sum over
examples. If the constant is repeated for each example, the same program has a row for each.

The product, and everything computed from it alone, is mapped over copies, one for each example.
Where it meets data, in an elementwise equation or as the initial carry of a scan, the copies are
aligned with the axis of the examples.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac._interpreter import Interpreter, run_in_place, run_scan
from jaxkfac._jaxpr_compat import (
    ClosedJaxpr,
    Eqn,
    bind,
    body_of,
    call_kind,
    is_layer,
    is_loop,
    results_of,
    scan_counts,
)
from jaxkfac.interception._kind import Use
from jaxkfac.interception.values._axes import ELEMENTWISE, Atoms, Axes, AxisTable

# These keep all axes, as elementwise functions do, but would mix copies along the examples.
_ALONG_AN_AXIS = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())


class Meeting(NamedTuple):
    """An equation in which values from products of constants meet data.

    Attributes:
        eqn: The equation.
        axes: The axes of each operand that is data with rows.
        products: The products that it reads.
        carry: Whether it is a scan whose initial carry comes from the products.
    """

    eqn: Eqn
    axes: tuple[Axes, ...]
    products: frozenset[Hashable]
    carry: bool = False


class Repeats(NamedTuple):
    """The products and meetings to repeat, by the place of their equation.

    Attributes:
        products: The number of copies, and the position of the parameter among the operands.
        meetings: The axis of the result, or of the carry, along which the copies are aligned.
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
    """The products that can be repeated for the examples that they meet.

    Args:
        table: The axis atoms.
        uses: Products of a constant and a parameter that have no row for each example.
        meetings: The equations in which products meet data.
        closed_in: Products whose results enter an equation that is not followed.
        examples: Axes of examples; a product meets those of only one of them.
    """
    result = Repeats({}, {})
    candidates = {use.at.scope.where: use for use in uses if use.at.scope.where not in closed_in}
    for where, use in candidates.items():
        own_meetings = {at: met for at, met in meetings.items() if where in met.products}
        for axis in examples:
            places = {at: _axis_of(table, met, axis) for at, met in own_meetings.items()}
            joint = {at: met.products <= candidates.keys() for at, met in own_meetings.items()}
            # A product is repeated in all places or in none, because it has one shape, with or
            # without a copy for each example.
            if own_meetings and None not in places.values() and all(joint.values()):
                size = 1
                for atom in table.atoms(axis):
                    size *= table.size(atom)
                result.products[where] = size, use.at.operand
                result.meetings.update((at, d) for at, d in places.items() if d is not None)
                break
    # Products that meet data in one equation are repeated together or not at all.
    repeatable = result.products.keys()
    split = {at for at in result.meetings if not meetings[at].products <= repeatable}
    # Leaving one product out may split another meeting, so the rest is judged again.
    if split:
        remaining = [
            u for u in uses if not any(u.at.scope.where in meetings[at].products for at in split)
        ]
        return repeats(table, remaining, meetings, closed_in, examples)
    return result


def _axis_of(table: AxisTable, meeting: Meeting, examples: Atoms) -> int | None:
    """The axis of the examples, if the equation is elementwise or a loop; else ``None``."""
    name, example_atoms = meeting.eqn.primitive.name, table.atoms(examples)
    if meeting.carry:
        rank = len(meeting.axes[0])
    # Any other equation might sum over the copies, and count the constant once for each example.
    elif name not in ELEMENTWISE or name in _ALONG_AN_AXIS or len(meeting.eqn.outvars) != 1:
        return None
    else:
        rank = len(meeting.eqn.outvars[0].aval.shape)
    for axes in meeting.axes:
        for d, axis in enumerate(axes):
            # A merged axis (examples times positions) does not qualify: copies would be needed at
            # each position too.
            if len(axes) == rank and table.atoms(axis) == example_atoms:
                return d
    return None


class _Copies(NamedTuple):
    """Copies of a value, one for each example, along the first axis of ``x``.

    Axes along which the value was broadcast keep size one until an equation needs them in full,
    because one of them may be the axis of the examples.
    """

    x: Any


def repeated(closed: ClosedJaxpr, todo: Repeats) -> ClosedJaxpr:
    """The program with products of constants repeated for each example."""

    def run(*args: Any) -> list[Any]:
        return _Repeating(todo).run(closed.jaxpr, closed.consts, args, ())

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


class _Repeating(Interpreter[Any]):
    """Emits a program with its products repeated; its values are arrays and copies of arrays."""

    def __init__(self, todo: Repeats) -> None:
        self.todo = todo
        # Calls that contain a product, or read copies, are run again equation by equation; the
        # others stay calls.
        places = [where for where in todo.products if isinstance(where, tuple)]
        self.inside = {where[:k] for where in places for k in range(len(where))}

    def equation(
        self, eqn: Eqn, ins: list[Any], position: int, within: tuple[int, ...]
    ) -> Sequence[Any]:
        where, path = (*within, id(eqn)), (*within, position)
        copied = any(isinstance(v, _Copies) for v in ins)
        if where in self.todo.products:
            return [_product(eqn, ins, *self.todo.products[where])]
        if where in self.todo.meetings and copied:
            shape = eqn.outvars[0].aval.shape
            rows = [_aligned(v, self.todo.meetings[where], len(shape)) for v in ins]
            # Copies may have size one along an axis that the program broadcast; so may the result.
            return [jnp.broadcast_to(bind(eqn)(*rows), shape)]
        if is_loop(eqn) and (copied or path in self.inside):
            return self._scan(eqn, ins, where, path)
        if copied and eqn.primitive.name == "broadcast_in_dim":
            return [_broadcast(eqn, ins[0])]
        if call_kind(eqn) in ("jit", "checkpoint") and (
            path in self.inside or (copied and not is_layer(eqn))  # under `vmap` it keeps its name
        ):
            body = body_of(eqn)
            return run_in_place(eqn, lambda *values: self.run(*body, values, path), ins)
        if not copied:
            return results_of(eqn, ins)
        axes = [0 if isinstance(v, _Copies) else None for v in ins]
        plain = [
            jnp.broadcast_to(v.x, (len(v.x), *var.aval.shape)) if isinstance(v, _Copies) else v
            for v, var in zip(ins, eqn.invars, strict=True)
        ]
        out = jax.vmap(lambda *values: results_of(eqn, values), axes)(*plain)
        return [_Copies(x) for x in out]

    def _scan(
        self, eqn: Eqn, values: Sequence[Any], where: Hashable, path: tuple[int, ...]
    ) -> list[Any]:
        """A scan whose body repeats the products in it."""
        constants, carries = scan_counts(eqn)
        values = list(values)
        for k in range(constants, constants + carries):
            shape = eqn.invars[k].aval.shape
            if isinstance(values[k], _Copies):
                rows = _aligned(values[k], self.todo.meetings[where, k], len(shape))
                values[k] = jnp.broadcast_to(rows, shape)
        body = body_of(eqn)
        return run_scan(eqn, lambda *inside: self.run(*body, inside, path), values)


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


def _aligned(value: Any, axis: int, rank: int) -> Any:
    """Copies aligned with one axis of a result, where the value has size one or the full size."""
    if not isinstance(value, _Copies):
        return value
    x = value.x
    if x.ndim == 1:  # copies of a scalar
        return x.reshape([-1 if d == axis else 1 for d in range(rank)])
    if x.shape[1 + axis] == 1:
        return jnp.moveaxis(x.squeeze(1 + axis), 0, axis)
    # The value already has an entry for each example; copy n belongs to entry n, and the others are
    # dropped.
    return jnp.moveaxis(jnp.diagonal(x, axis1=0, axis2=1 + axis), -1, axis)
