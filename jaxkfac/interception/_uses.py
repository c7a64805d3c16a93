"""The use rules: equations in which a parameter meets data, one rule per kind of layer."""

import math
from collections.abc import Sequence
from typing import Any

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._values import Data, Use, Value, View
from jaxkfac.interception._views import reversal

INSERTIONS = frozenset("add add_any sub concatenate select_n dynamic_update_slice pad".split())


def uses_of(
    table: AxisTable, eqn: Any, ins: Sequence[Value], scope: tuple[int, ...]
) -> list[Use] | str:
    """The uses in an equation that reads at least one view and some data.

    Returns:
        One use per parameter operand, or the reason why no rule applies.
    """
    name = eqn.primitive.name
    positions = [i for i, v in enumerate(ins) if isinstance(v, View)]
    if name in INSERTIONS:
        if name == "select_n" and 0 in positions:
            return "is the predicate of `select_n`"
        return [_insertion(table, eqn, ins, i, scope) for i in positions]
    if len(positions) != 1:
        return f"meets another parameter in `{name}`"
    position = positions[0]
    rule = {
        "dot_general": _dense,
        "conv_general_dilated": _convolution,
        "gather": _embedding,
        "mul": _scale,
    }.get(name)
    if rule is None:
        return f"is read by `{name}`, for which there is no rule"
    return rule(table, eqn, ins, position, scope)


def _matrix_problem(table: AxisTable, view: View, name: str) -> str | None:
    if view.axes is None:
        return f"is no whole matrix behind `{view.lost_by}`, where it meets data in `{name}`"
    if any("broadcast" in table.kinds(a) for axis in view.axes for a in table.atoms(axis)):
        return f"is broadcast before `{name}`"
    return None


def _order_problem(table: AxisTable, view: View, axes: Sequence[Atoms], name: str) -> str | None:
    if any(reversal(table, view, axis) != "none" for axis in axes):
        return f"is back to front behind `rev`, where it meets data in `{name}`"
    return None


def _dense(table, eqn, ins, position, scope) -> list[Use] | str:
    view, data = ins[position], ins[1 - position]
    problem = _matrix_problem(table, view, "dot_general")
    if problem := problem or _order_problem(table, view, view.axes or (), "dot_general"):
        return problem
    contract, batch = eqn.params["dimension_numbers"]
    mine = {*contract[position], *batch[position]}
    theirs = {*contract[1 - position], *batch[1 - position]}
    use = Use("dense", eqn, position, view, scope, data=data)
    use.in_axes = tuple(view.axes[d] for d in contract[position])
    use.batch_axes = tuple(view.axes[d] for d in batch[position])
    use.out_axes = tuple(a for d, a in enumerate(view.axes) if d not in mine)
    use.rows = tuple(a for d, a in enumerate(data.axes) if d not in theirs)
    return [use]


def _convolution(table, eqn, ins, position, scope) -> list[Use] | str:
    view, p = ins[position], eqn.params
    if position != 1:
        return "is the signal, not the kernel, of `conv_general_dilated`"
    if p["batch_group_count"] != 1:
        return "is the kernel of a `conv_general_dilated` whose examples are grouped"
    if problem := _matrix_problem(table, view, "conv_general_dilated"):
        return problem
    numbers, groups = p["dimension_numbers"], p["feature_group_count"]
    out, channels, *spatial = (view.axes[d] for d in numbers.rhs_spec)
    order = [reversal(table, view, axis) for axis in spatial]
    straight = [out, channels, *(a for a, o in zip(spatial, order, strict=True) if o == "part")]
    if problem := _order_problem(table, view, straight, "conv_general_dilated"):
        return problem
    parts = table.regroup([out], [groups, eqn.invars[1].aval.shape[numbers.rhs_spec[0]] // groups])
    if parts is None:
        return f"has outputs that do not split into the {groups} groups of `conv_general_dilated`"
    use = Use("conv", eqn, position, view, scope, data=ins[0])
    use.in_axes = (channels, *spatial)
    use.batch_axes = tuple((a,) for a in table.atoms(parts[0]))
    use.groups = tuple(table.size(a) for a in table.atoms(parts[0]))
    use.out_axes = (parts[1],)
    use.reversed = tuple(o == "whole" for o in order)
    return [use]


def _embedding(table, eqn, ins, position, scope) -> list[Use] | str:
    view, d = ins[position], eqn.params["dimension_numbers"]
    rows_of_table = (
        position == 0
        and tuple(d.start_index_map) == (0,)
        and tuple(d.collapsed_slice_dims) == (0,)
        and not d.operand_batching_dims
        and tuple(eqn.params["slice_sizes"][1:]) == eqn.invars[0].aval.shape[1:]
    )
    if not rows_of_table:
        return "is read by a `gather` that does not pick whole rows"
    problem = _matrix_problem(table, view, "gather")
    if problem := problem or _order_problem(table, view, view.axes or (), "gather"):
        return problem
    use = Use("embedding", eqn, position, view, scope, data=ins[1])
    use.in_axes, use.out_axes = (view.axes[0],), tuple(view.axes[1:])
    use.rows = tuple(ins[1].axes[:-1])
    return [use]


def _scale(table, eqn, ins, position, scope) -> list[Use] | str:
    data = ins[1 - position]
    return [Use("scale", eqn, position, ins[position], scope, data=data, rows=data.axes)]


def _insertion(table, eqn, ins, position, scope) -> Use:
    use = Use("bias", eqn, position, ins[position], scope)
    others = [v for v in ins if isinstance(v, Data)]
    if eqn.primitive.name in ("add", "add_any") and len(others) == 1:
        use.data, use.rows = others[0], others[0].axes
        if others[0].product is not None and _is_its_bias(table, use.view, others[0]):
            use.join = others[0].product
    return use


def _is_its_bias(table: AxisTable, view: View, product: Data) -> bool:
    """Whether the view's own axes lie exactly on the free axes of the product's parameter."""
    if view.axes is None or view.reversed or view.scaled or product.product is None:
        return False
    if [c.walker for c in view.consumed] != [c.walker for c in product.product.view.consumed]:
        return False
    return len(view.axes) == len(product.product_axes) and all(
        _owned(table, mine) == (1 if free is None else _owned(table, free))
        for mine, free in zip(view.axes, product.product_axes, strict=True)
    )


def _owned(table: AxisTable, axis: Atoms) -> int:
    """How many elements of the parameter itself an axis runs over."""
    atoms = table.atoms(axis)
    return math.prod(table.size(a) for a in atoms if "parameter" in table.kinds(a))


def product_axes(use: Use, ndim: int) -> tuple[Atoms | None, ...]:
    """For each axis of a dense or convolution product, the parameter axis it comes from."""
    if use.kind == "conv":
        out: list[Atoms | None] = [None] * ndim
        channels = tuple(a for axis in (*use.batch_axes, *use.out_axes) for a in axis)
        out[use.eqn.params["dimension_numbers"].out_spec[1]] = channels
        return tuple(out)
    rows: list[Atoms | None] = [None] * len(use.rows)
    free: list[Atoms | None] = list(use.out_axes)
    return (*use.batch_axes, *(rows + free if use.operand == 1 else free + rows))
