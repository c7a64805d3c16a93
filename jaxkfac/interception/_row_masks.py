"""Masks: which constants are masks, and which rows of a layer use exist."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Shaped

from jaxkfac._errors import LostRowsError
from jaxkfac._jaxpr_compat import Eqn, is_var
from jaxkfac.interception._kind import Use, Value
from jaxkfac.interception._plan import MARK_ROWS, Plan
from jaxkfac.interception._views import SAME_ELEMENTS
from jaxkfac.interception.values._axes import Atoms, Axes, AxisTable
from jaxkfac.interception.values._values import Constant

# ---------------- constants whose elements are all 0 or 1


_OF_MASKS = SAME_ELEMENTS | frozenset(
    "mul select_n broadcast_in_dim tile reshape transpose squeeze slice rev concatenate "
    "stack".split()
)


_MOST = 1 << 16  # larger arrays on a device are judged by this many elements first


def holds_mask(constant: Any) -> bool:
    """Whether all elements of a constant are known to be zeros and ones.

    They are not known for an array divided over processes, because each process has only a part.
    For a large array, such as a base model's kernel, a few elements are fetched first.
    """
    dtype = jnp.result_type(constant)
    if dtype == np.bool_:
        return True
    # A tracer has no values, and a key is no number.
    if isinstance(constant, Tracer) or not jnp.issubdtype(dtype, np.number):
        return False
    if isinstance(constant, jax.Array):
        if not (constant.is_fully_addressable or constant.is_fully_replicated):
            return False
        if constant.size > _MOST:
            with jax.ensure_compile_time_eval():
                first = constant.addressable_data(0)[(0,) * (constant.ndim - 1)][:_MOST]
            # Most large constants are weights and differ from a mask in their first elements, so a
            # base model need not be fetched from its device.
            if not _zeros_and_ones(first):
                return False
    return _zeros_and_ones(constant)


def _zeros_and_ones(constant: ArrayLike) -> bool:
    values = np.asarray(constant)
    return bool(((values == 0) | (values == 1)).all())


def is_mask(eqn: Eqn, ins: Sequence[Value]) -> bool:
    """Whether an equation of constants returns a mask."""
    if eqn.outvars[0].aval.dtype == np.bool_:
        return True
    return eqn.primitive.name in _OF_MASKS and all(
        isinstance(v, Constant) and (v.mask or operand.aval.dtype == np.bool_)
        for v, operand in zip(ins, eqn.invars, strict=True)
    )


# ---------------- rows that exist: masks follow axis identities to each use


def mark_rows(x: Shaped[Array, "..."], mask: Shaped[Array, "*rows"]) -> Shaped[Array, "..."]:
    """Declare, inside a model, which rows of ``x`` exist. An identity.

    Where the engine cannot follow the axes of a mask to a layer (an encoder stream whose
    positions never reach the output, a shifted slice), name the rows in the model itself.
    Layers whose rows run along the marked axes leave the others out of their factors.

    Args:
        x: Any value, shape ``(*mask.shape, ...)``. Under ``jax.vmap`` the mapped axis is an axis of
            rows too.
        mask: True where the row exists, shape of the leading axes of ``x``; bool or integers.

    Returns:
        ``x``, unchanged.

    Raises:
        ValueError: the mask is floating, or its shape is not that of the leading axes of ``x``.
    """
    if jnp.issubdtype(mask.dtype, jnp.floating):
        raise ValueError(
            f"mark_rows: mask has dtype {mask.dtype}, expected bool (weights of positions go into "
            "positions=)"
        )
    mask = mask.astype(bool)  # an integer mask: 1 & 2 would be 0
    if x.shape[: mask.ndim] != mask.shape:
        raise ValueError(
            f"mark_rows: mask has shape {mask.shape}, expected the leading axes of x, "
            f"{x.shape[: mask.ndim]}"
        )
    return _primitive.bind(jnp.asarray(x), jnp.asarray(mask))


# A primitive, because a mask belongs to the leading axes: `vmap` of a `jit` with a name moves the
# axes of value and mask apart, and `jvp` adds operands and results to it.
_primitive = Primitive(MARK_ROWS)
_primitive.def_impl(lambda x, mask: x)
_primitive.def_abstract_eval(lambda x, mask: x)
mlir.register_lowering(_primitive, lambda ctx, x, mask: [x])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    # The tangent passes unmarked: what is computed from it meets the axes of the marked value.
    return _primitive.bind(*primals), tangents[0]


def _batch(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    (size,) = {x.shape[d] for x, d in zip(operands, axes, strict=True) if d is not None}
    # The mapped axis leads both: a mark has the leading axes of its value, and where the mask is
    # common to all calls it holds for the rows of each.
    x, mask = (
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, axes, strict=True)
    )
    return _primitive.bind(x, mask), 0


ad.primitive_jvps[_primitive] = _jvp
batching.primitive_batchers[_primitive] = _batch


def refuse_masks_apart(table: AxisTable, plan: Plan) -> None:
    """Refuse two masks of the same axes of which neither marks a value computed behind the other.

    A layer counts the rows that all masks before it keep. Behind one of such masks these are not
    the rows of its own input.
    """
    eqns = plan.jaxpr.eqns
    atoms = lambda mark: {a for axis in mark.axes for a in table.atoms(axis)}
    for position, mark in plan.marks.items():
        behind = set(eqns[position].outvars)
        for later in range(position + 1, len(eqns)):
            if any(is_var(v) and v in behind for v in eqns[later].invars):
                behind |= set(eqns[later].outvars)
                continue
            others = [plan.marks[later]] if later in plan.marks else []
            others += plan.calls[later].all_marks() if later in plan.calls else []
            if any(x.mask != mark.mask and atoms(x) == atoms(mark) for x in others):
                raise LostRowsError(
                    "two calls of jk.mark_rows have different masks for the same axes, and neither "
                    "value is computed from the other: layers behind the second call would leave "
                    "out the rows of both masks. Give both calls one mask."
                )
    for inner in plan.calls.values():
        refuse_masks_apart(table, inner)


class RowMask:
    """A mask and the atoms of its axes.

    Attributes:
        mask: Which rows exist; for ``positions=`` also floating weights of rows.
        complete: Whether the mask must cover every axis of rows: True for ``positions=``, False for
            a mark inside the model, which covers only its own axes.
    """

    def __init__(
        self,
        mask: Bool[Array, "*rows"] | Float[Array, "*rows"],
        axes: Sequence[Atoms],
        *,
        complete: bool,
    ) -> None:
        self.mask, self.axes, self.complete = mask, tuple(axes), complete

    def atoms(self, table: AxisTable) -> Atoms:
        return tuple(a for axis in self.axes for a in table.atoms(axis))


def row_weights(
    table: AxisTable, use: Use, masks: Sequence[RowMask], marks: Sequence[Axes] = ()
) -> Bool[Array, "*rows"] | Float[Array, "*rows"] | None:
    """The rows of a use that exist, as a boolean array over its row axes, or their weights.

    Args:
        table: The axis atoms.
        use: A use with ``rows``.
        masks: Every mask known at the use.
        marks: The axes of every mark of the program, known at the use or not.

    Returns:
        Boolean, or floating if a mask is, one axis per entry of ``use.axes.rows``; ``None`` if no
        mask covers them.

    Raises:
        LostRowsError: a mask for the whole program is given, and an axis of the rows comes
            from data but is covered by no mask; or a mark covers these rows and comes later
            in the program, or in an inner scan.
    """
    if use.kind.inserts and use.data is None:  # a class token: its row always exists
        return None
    path, primitive = use.view.source.path, use.at.eqn.primitive.name
    rows = [table.atoms(axis) for axis in use.axes.rows]
    flat = [a for axis in rows for a in axis]
    # Masks are compared by atoms: a mask over (examples, tokens) also covers rows in which the
    # model has merged the two.
    spoken = {a for m in masks for a in m.atoms(table)}
    for axes in marks:
        late = {a for axis in axes for a in table.atoms(axis)} & set(flat) - spoken
        if late:
            raise LostRowsError(
                f"layer {path!r} reads rows that jk.mark_rows names only later in the "
                "program, or inside another scan. Mark them before this layer."
            )
    if not spoken:
        return None
    # The parameter has elements of its own along these atoms, and the row of each element exists.
    parameter_atoms = {a for d, axis in enumerate(rows) if d in own_axes(table, use) for a in axis}
    lost = [
        a
        for a in flat
        if a not in spoken | parameter_atoms and table.kinds(a) & {"data", "derived"}
    ]
    if any(m.complete for m in masks) and (lost or spoken.isdisjoint(flat)):
        what = f"an axis of size {table.size(lost[0])}" if lost else "the example axis"
        raise LostRowsError(
            f"layer {path!r}: example axis lost at `{primitive}`: {what} of its rows cannot be "
            "traced to the mask. Name these rows with jk.mark_rows(x, mask) "
            "inside the model, or leave the layer out with layers=."
        )
    if spoken.isdisjoint(flat):
        return None
    weights = jnp.ones([table.size(a) for a in flat], bool)
    for mask in masks:
        weights = _both(weights, _spread(table, mask, flat))
    return weights.reshape([math.prod(map(table.size, axis)) for axis in rows])


def where_chosen(
    table: AxisTable,
    use: Use,
    weights: Bool[Array, "*rows"] | Float[Array, "*rows"] | None,
    choices: Sequence[RowMask],
) -> Bool[Array, "*rows"] | Float[Array, "*rows"] | None:
    """The rows that exist; none, if a choice for all rows at once excludes the use.

    Such a choice (a cond on a scalar) has no axis along which it could differ between rows.
    """
    for_all_rows = [mask.mask.reshape(()) for mask in choices if not mask.atoms(table)]
    if not for_all_rows:
        return weights
    shape = [math.prod(map(table.size, table.atoms(axis))) for axis in use.axes.rows]
    every = jnp.ones(shape, bool) if weights is None else weights
    for mask in for_all_rows:
        every = _both(every, mask)
    return every


def _both(one: Array, other: Array) -> Array:
    """The rows of both masks; the product of weights, and 0 where a mask leaves a row out."""
    if one.dtype == jnp.bool_ and other.dtype == jnp.bool_:
        return one & other
    if jnp.bool_ not in (one.dtype, other.dtype):
        return one * other
    mask, weights = (one, other) if one.dtype == jnp.bool_ else (other, one)
    return jnp.where(mask, weights, jnp.zeros((), weights.dtype))


def own_axes(table: AxisTable, use: Use) -> set[int]:
    """The row axes along which an elementwise use has elements of the parameter."""
    if not use.kind.elementwise or use.kind.reads.contracts:
        return set()
    shape = use.at.eqn.invars[use.at.operand].aval.shape
    lead = len(use.axes.rows) - len(shape)
    if use.view.axes is None:
        return {d + lead for d, size in enumerate(shape) if size > 1}
    return {
        d + lead
        for d, axis in enumerate(use.view.axes)
        if any("parameter" in table.kinds(a) for a in table.atoms(axis))
    }


def _spread(
    table: AxisTable, mask: RowMask, flat: list[int]
) -> Bool[Array, "*atoms"] | Float[Array, "*atoms"]:
    """The mask broadcast to the atoms of the rows; over its other atoms it is reduced by any.

    The largest weight is taken: a row that is computed from several positions exists if one of
    them does, and has weight 2 if all of them have.
    """
    atoms = mask.atoms(table)
    values = mask.mask.reshape([table.size(a) for a in atoms])
    away = tuple(i for i, a in enumerate(atoms) if a not in flat)
    # A mask without an axis among those of the rows says nothing about them.
    if len(away) == len(atoms):
        return jnp.ones([1] * len(flat), bool)
    values = values.any(away) if values.dtype == jnp.bool_ else values.max(away)
    present = [a for a in atoms if a in flat]
    where = {a: [i for i, b in enumerate(flat) if b == a] for a in present}
    out = jnp.ones([1] * len(flat), bool)
    for k in range(max(map(len, where.values()))):  # a pairwise layer has each atom twice
        at = {a: where[a][min(k, len(where[a]) - 1)] for a in present}
        order = sorted(range(len(present)), key=lambda i: at[present[i]])
        shape = [1] * len(flat)
        for a in present:
            shape[at[a]] = table.size(a)
        out = _both(out, values.transpose(order).reshape(shape))
    return out
