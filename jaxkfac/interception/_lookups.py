"""Lookups: entries of one axis of a parameter, each picked by an index that is data.

A lookup of vectors is an embedding. A lookup of matrices may be one too (the row of a table is laid
out as a matrix), or each row of data picks the kernel that it is multiplied by: then the axis
is a stack of experts. Which it is shows where the result is read: it is taken for a stack first,
and for a table where anything but such a product reads it.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._facts import Facts
from jaxkfac.interception._functions import JOINS
from jaxkfac.interception._propagate import Axes
from jaxkfac.interception._values import (
    Combined,
    Data,
    Derived,
    Picked,
    Use,
    Value,
    View,
    views_in,
)

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
