"""Uses: equations in which a parameter meets data, read by the kind that knows the primitive."""

from collections.abc import Sequence

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._kind import kind_named, kind_reading
from jaxkfac.interception._values import Use, Value, View, views_in
from jaxkfac.interception._views import reversal


def uses_of(
    table: AxisTable, eqn: Eqn, ins: Sequence[Value], scope: tuple[int, ...]
) -> list[Use] | str:
    """The uses in an equation that reads at least one view and some data.

    Returns:
        One use per parameter operand, or the reason why no rule applies.
    """
    name = eqn.primitive.name
    kind = kind_reading(name)
    positions = [i for i, v in enumerate(ins) if views_in(v)]
    if len(positions) != 1 and not (kind is not None and kind.inserts):
        return f"meets another parameter in `{name}`"
    if kind is None:
        return f"is read by `{name}`, for which there is no rule"
    found: list[Use] = []
    for position in positions:
        for view in views_in(ins[position]):
            alone = [*ins[:position], view, *ins[position + 1 :]]
            if view.picked is not None:
                if kind.unless_one is None:
                    return f"is picked row by row and read by `{name}`, which is no product"
                uses = kind_named(kind.unless_one).find(table, eqn, alone, [position], scope)
            else:
                uses = kind.find(table, eqn, alone, [position], scope)
            if isinstance(uses, str) and kind.unless_matrix is not None:
                other = kind_named(kind.unless_matrix)
                instead = other.find(table, eqn, alone, [position], scope)
                uses = uses if isinstance(instead, str) else instead
            if isinstance(uses, str):
                return uses
            found += uses
    return found


def matrix_problem(table: AxisTable, view: View, name: str) -> str | None:
    """Why a view is no matrix whose axes are known, or ``None``."""
    if view.axes is None or view.function:
        first = view.function or view.lost_by
        return f"is no whole matrix behind `{first}`, where it meets data in `{name}`"
    if any("broadcast" in table.kinds(a) for axis in view.axes for a in table.atoms(axis)):
        return f"is broadcast before `{name}`"
    return None


def order_problem(table: AxisTable, view: View, axes: Sequence[Atoms], name: str) -> str | None:
    """Why the order of a view's elements along some axes is not the parameter's, or ``None``."""
    if any(reversal(table, view, axis) != "none" for axis in axes):
        return f"is back to front behind `rev`, where it meets data in `{name}`"
    return None
