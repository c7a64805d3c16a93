"""Biases: a parameter added to data, or put beside it."""

import math
from collections.abc import Sequence
from typing import Any

from jaxkfac.interception import (
    Atoms,
    AxisTable,
    Data,
    Eqn,
    Use,
    View,
    cuts_of,
    pieces_of,
    register_kind,
)
from jaxkfac.kinds._elementwise import Elementwise
from jaxkfac.kinds._rows import ArrayOrShape


@register_kind
class Bias(Elementwise):
    """One that is added to a product which nothing else reads may be joined to it.

    A class token put in front of data, or a table of positions, is a bias too.
    """

    name = "bias"
    primitives = frozenset("add add_any sub concatenate select_n dynamic_update_slice pad".split())
    suffix = "bias"
    inserts = True

    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Any],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> list[Use] | str:
        if eqn.primitive.name == "select_n" and 0 in positions:
            return "is the predicate of `select_n`"
        return [self._insertion(table, eqn, ins, position, scope) for position in positions]

    def gradient(self, use: Use, operands: Sequence[Any], cotangent: ArrayOrShape) -> ArrayOrShape:
        return cotangent

    def _insertion(
        self, table: AxisTable, eqn: Eqn, ins: Sequence[Any], position: int, scope: tuple[int, ...]
    ) -> Use:
        use = Use(self, eqn, position, ins[position], scope)
        others = [v for v in ins if isinstance(v, Data)]
        if eqn.primitive.name in ("add", "add_any") and len(others) == 1:
            use.data, use.rows = others[0], others[0].axes
            parts = others[0].product.parts if others[0].product is not None else ()
            its = (p for p in parts if _is_its_bias(table, use.view, others[0].product_axes, p))
            use.join = next(its, None)
        return use


def _is_its_bias(
    table: AxisTable, view: View, product_axes: Sequence[Atoms | None], product: Use
) -> bool:
    """Whether the view's own axes lie exactly on the free axes of the product's parameter."""
    if view.axes is None or view.reversed or view.scaled or view.function or view.masked:
        return False
    if view.traced_indices != product.view.traced_indices:
        return False
    if len(view.axes) != len(product_axes):
        return False
    axes = [(mine, free or ()) for mine, free in zip(view.axes, product_axes, strict=True)]
    if any(_owned(table, mine) != _owned(table, free) for mine, free in axes):
        return False
    if not view.joins and not product.view.joins:
        return True
    # Parts of a bias are those of parts of a kernel that lie where they do.
    mine, its = (pieces_of(table, v.joins) for v in (view, product.view))
    if mine is None or its is None:
        return False
    return all(
        cuts_of(table, mine, axis) == cuts_of(table, its, free)
        and its.keys() >= set(table.atoms(free))
        for axis, free in axes
        if _owned(table, free) > 1
    )


def _owned(table: AxisTable, axis: Atoms) -> int:
    """How many elements of the parameter itself an axis runs over."""
    atoms = table.atoms(axis)
    return math.prod(table.size(a) for a in atoms if "parameter" in table.kinds(a))
