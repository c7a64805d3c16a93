"""How primitives hand the axes of their data operands on to their results.

Only axes of values that depend on data propagate: were those of parameters and constants to, a
mask of shape ``(S, S)`` would make query and key positions the same axis.
"""

from collections.abc import Sequence
from typing import Any

from jaxkfac.interception._axes import ELEMENTWISE, REDUCTIONS, Atoms, AxisTable
from jaxkfac.interception._compat import Eqn, read_order

Axes = tuple[Atoms, ...]


def fresh(table: AxisTable, shape: Sequence[int], kind: Any = "derived") -> Axes:
    return tuple(table.new(size, kind) for size in shape)


def merge(table: AxisTable, axes: Sequence[Axes | None], shape: Sequence[int]) -> Axes:
    """Axes of values combined element by element, size-one axes broadcasting."""
    out: list[Atoms | None] = [None] * len(shape)
    for operand in axes:
        if operand is None or len(operand) != len(shape):
            continue
        for d, axis in enumerate(operand):
            if axis == () and shape[d] != 1:
                continue  # size one broadcasts: it says nothing of the other operands' axis
            if out[d] is None:
                out[d] = axis
            else:
                table.unify(out[d], axis)  # type: ignore[arg-type]
    return tuple(
        table.new(s, "feature") if a is None else a for a, s in zip(out, shape, strict=True)
    )


def propagate(table: AxisTable, eqn: Eqn, ins: Sequence[Axes | None]) -> list[Axes]:
    """Axes of every result of a first-order equation; ``None`` marks non-data operands."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
    if name == "optimization_barrier":
        return [
            fresh(table, s, "feature") if i is None else i for i, s in zip(ins, shapes, strict=True)
        ]
    if name in ELEMENTWISE:
        return [merge(table, ins, shape) for shape in shapes]
    rule = _RULES.get(name)
    if name in REDUCTIONS:
        rule = _reduce
    if rule is None or (ins[0] is None and name not in _ANY_OPERAND):
        return [fresh(table, shape) for shape in shapes]
    out = rule(table, eqn, ins, params, shapes)
    return out if isinstance(out, list) else [out]


def _reduce(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    return tuple(a for d, a in enumerate(ins[0]) if d not in params["axes"])


def _transpose(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    return tuple(ins[0][d] for d in params["permutation"])


def _squeeze(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    return tuple(a for d, a in enumerate(ins[0]) if d not in params["dimensions"])


def _reshape(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    out = table.regroup([ins[0][d] for d in read_order(eqn)], shapes[0])
    return fresh(table, shapes[0]) if out is None else tuple(out)


def _broadcast(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    source = dict(zip(params["broadcast_dimensions"], ins[0], strict=True))
    return tuple(source.get(d) or table.new(s, "feature") for d, s in enumerate(shapes[0]))


def _dot(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    (lc, rc), (lb, rb) = params["dimension_numbers"]
    left, right = ins
    if left is not None and right is not None:
        for i, j in zip((*lb, *lc), (*rb, *rc), strict=True):
            table.unify(left[i], right[j])
    given: Any = right if left is None else left
    dims = rb if left is None else lb
    out = [given[i] for i in dims] if dims else []
    for axes, var, used in ((left, eqn.invars[0], (*lc, *lb)), (right, eqn.invars[1], (*rc, *rb))):
        for d, size in enumerate(var.aval.shape):
            if d not in used:
                out.append(axes[d] if axes is not None else table.new(size, "feature"))
    return tuple(out)


def _gather(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    if ins[0] is not None or ins[1] is None:
        return fresh(table, shapes[0])
    offset, rows = params["dimension_numbers"].offset_dims, iter(ins[1][:-1])
    return tuple(
        table.new(s, "feature") if d in offset else next(rows) for d, s in enumerate(shapes[0])
    )


def _cut(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    """Slices keep the axes they do not cut.

    A part of an axis is not the axis: entry i of it is another entry i, and a mask of the whole
    says nothing of it. Nor is an axis that is back to front.
    """
    before, flipped = eqn.invars[0].aval.shape, params.get("dimensions", ())
    return tuple(
        a if before[d] == s and d not in flipped else table.new(s, "derived")
        for d, (a, s) in enumerate(zip(ins[0], shapes[0], strict=True))
    )


def _concatenate(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    axis = params["dimension"]
    without = [None if i is None else (*i[:axis], (), *i[axis + 1 :]) for i in ins]
    shape = (*shapes[0][:axis], 1, *shapes[0][axis + 1 :])
    out = merge(table, without, shape)
    return (*out[:axis], table.new(shapes[0][axis], "derived"), *out[axis + 1 :])


def _stack(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    axis, shape = params["axis"], shapes[0]
    out = merge(table, ins, (*shape[:axis], *shape[axis + 1 :]))
    return (*out[:axis], table.new(shape[axis], "derived"), *out[axis:])


def _split(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    axis = params["axis"]
    kinds = {k for a in table.atoms(ins[0][axis]) for k in table.kinds(a)}
    # Parts of features are features; parts of anything else might hold the examples.
    kind = "feature" if "feature" in kinds else "derived"
    return [(*ins[0][:axis], table.new(s[axis], kind), *ins[0][axis + 1 :]) for s in shapes]


def _convolution(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    """Example axis kept, positions and channels new."""
    numbers = params["dimension_numbers"]
    out = [table.new(s, "derived") for s in shapes[0]]
    if params["batch_group_count"] == 1:
        out[numbers.out_spec[0]] = ins[0][numbers.lhs_spec[0]]
    out[numbers.out_spec[1]] = table.new(shapes[0][numbers.out_spec[1]], "feature")
    return tuple(out)


def _windows(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    return tuple(
        a if w == 1 and s == t else table.new(t, "derived")
        for a, w, s, t in zip(
            ins[0], params["window_dimensions"], eqn.invars[0].aval.shape, shapes[0], strict=True
        )
    )


def _top_k(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    return [(*ins[0][:-1], table.new(s[-1], "derived")) for s in shapes]


def _sort(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    axis = params["dimension"]  # along it the order depends on the data
    merged = merge(table, ins, shapes[0])
    one = (*merged[:axis], table.new(shapes[0][axis], "derived"), *merged[axis + 1 :])
    return [one] * len(shapes)


def _scatter(table: AxisTable, eqn: Eqn, ins: Any, params: dict[str, Any], shapes: Any) -> Any:
    return ins[0]


_ANY_OPERAND = ("dot_general", "gather", "concatenate", "stack")  # the first may be no data
_RULES = {
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter-add": _scatter,
    "scatter_mul": _scatter,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "gather": _gather,
    "slice": _cut,
    "dynamic_slice": _cut,
    "pad": _cut,
    "rev": _cut,
    "dynamic_update_slice": _cut,
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _split,
    "conv_general_dilated": _convolution,
    "reduce_window_sum": _windows,
    "reduce_window_max": _windows,
    "reduce_window_min": _windows,
    "top_k": _top_k,
    "sort": _sort,
}
