"""Taps: operations whose backward pass emits curvature statistics.

A tap computes what the original equation computes. Its forward rule never touches its slot,
so the slot is no residual and remat policies see the original operation; its backward rule
returns the original cotangents and, as the cotangent of the slot, the statistics:

* ``a``: sum of input rows' outer products, ``a_sum`` and ``a_count`` their sum and number;
* ``g``: sum of outer products of the output's cotangent rows;
* ``diagonal``: sum over positions of squared per-position gradients.

Cotangents of a variable add up over its readers, stack along a scanned axis, and are summed
over devices, so the statistics do, without a line of code for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxkfac.interception import _compat
from jaxkfac.interception._rewrite import Site
from jaxkfac.interception._values import Use
from jaxkfac.linalg._gram import gram, gram_panels, statistics_dtype

Array = Any  # a tracer, a NumPy constant or, for a slot in a backward rule, its shape
Slot = dict[str, Any]


def tap(site: Site, operands: list[Any]) -> Any:
    """The handler that emits factors; see the module docstring."""
    if site.uses[0].kind == "bias":
        return _insert(site, operands)
    use, slot, rows = site.uses[0], site.slots[0], site.rows[0]
    statistics, like, bare = _STATISTICS[use.kind], _shapes(slot), site.without_values()

    @jax.custom_vjp
    def op(operands: Any, rows: Any, slot: Slot) -> Any:
        return bare.bind(*operands)

    def forward(operands: Any, rows: Any, slot: Slot) -> Any:
        return bare.bind(*operands), (operands, rows)

    def backward(saved: Any, cotangent: Any) -> Any:
        operands, rows = saved
        pulled = jax.vjp(bare.bind, *operands)[1](cotangent)
        emitted = statistics(bare, use, like, operands, cotangent, rows)
        typed = jax.tree.map(lambda v, s: v.astype(s.dtype), emitted, like)
        return list(pulled), None, typed

    op.defvjp(forward, backward)
    data = operands[1 - use.operand]
    return op(operands, rows, jax.tree.map(lambda s: _compat.cast_varying(s, data), slot))


def _shapes(slot: Slot) -> Slot:
    """Shapes and dtypes of a slot: all that a backward rule may close over."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), slot)


def _insert(site: Site, operands: list[Any]) -> Any:
    """Tap a parameter that is added to data, or put beside it, on its way in."""
    operands = list(operands)
    spread = site.eqn.primitive.name in ("add", "sub", "add_any")
    shape = site.eqn.outvars[0].aval.shape
    for use, slot, rows in zip(site.uses, site.slots, site.rows, strict=True):
        before = operands[use.operand]
        target = shape if spread else before.shape
        operands[use.operand] = _tapped_insert(before, target, slot, rows)
    return site.bind(*operands)


def _tapped_insert(parameter: Any, shape: tuple[int, ...], slot: Slot, rows: Any) -> Any:
    like = _shapes(slot)["diagonal"]

    def broadcast(parameter: Any) -> Any:
        return jnp.broadcast_to(parameter, shape) if parameter.shape != shape else parameter

    @jax.custom_vjp
    def op(parameter: Any, rows: Any, slot: Slot) -> Any:
        return broadcast(parameter)

    def forward(parameter: Any, rows: Any, slot: Slot) -> Any:
        return broadcast(parameter), (parameter, rows)

    def backward(saved: Any, cotangent: Any) -> Any:
        parameter, rows = saved
        (pulled,) = jax.vjp(broadcast, parameter)[1](cotangent)
        squared = jnp.square(_masked(cotangent, rows).astype(like.dtype))
        return pulled, None, {"diagonal": _sum_to(squared, like.shape)}

    op.defvjp(forward, backward)
    return op(parameter, rows, slot)


def _masked(x: Array, rows: Array | None) -> Array:
    """Rows that do not exist become zero; ``where``, because they may hold NaN."""
    return x if rows is None else jnp.where(rows, x, jnp.zeros((), x.dtype))


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which ``shape`` was broadcast."""
    if x.shape == shape:
        return x
    lead = x.ndim - len(shape)
    over = [d for d in range(x.ndim) if d < lead or (shape[d - lead] == 1 != x.shape[d])]
    return x.sum(over).reshape(shape)


def _moments(
    x: Array, rows: Sequence[int], batch: Sequence[int], slot: Slot, key: str, matrix_axes: int
) -> Array:
    """Gram matrix of ``x``, or its diagonal where the slot is a vector; features flattened."""
    if slot[key].ndim == len(batch) + matrix_axes - 1:
        order = (*batch, *[d for d in range(x.ndim) if d not in (*rows, *batch)])
        dtype = statistics_dtype(x.dtype)
        moved = jnp.square(x.astype(dtype)).sum(tuple(rows))
        kept = [d for d in range(x.ndim) if d not in rows]
        return moved.transpose([kept.index(d) for d in order])
    return gram(x, rows, batch, out_sharding=_replicated(x))


def _replicated(x: Array) -> NamedSharding | None:
    mesh = _compat.explicit_mesh(jax.typeof(x))
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def _order(site: Site, use: Use, axes: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Sizes of the atoms along ``axes`` and the permutation to the parameter's own order."""
    table = site.table
    where = {
        a: i
        for i, a in enumerate(
            a for axis in use.view.origin[len(use.view.index) :] for a in table.atoms(axis)
        )
    }
    atoms = [a for axis in axes for a in table.atoms(axis)]
    return [table.size(a) for a in atoms], sorted(range(len(atoms)), key=lambda i: where[atoms[i]])


def _in_own_order(
    matrix: Array, batch: int, sides: int, sizes: list[int], order: list[int]
) -> Array:
    """``(batch..., features...) * sides`` flattened in the parameter's own axis order."""
    lead, n = matrix.shape[:batch], math.prod(sizes)
    if order != sorted(order):
        k = len(sizes)
        matrix = matrix.reshape(*lead, *sizes * sides).transpose(
            *range(batch), *[batch + s * k + i for s in range(sides) for i in order]
        )
    return matrix.reshape(*lead, *[n] * sides)


def _side(
    site: Site,
    use: Use,
    x: Array,
    features: Sequence[tuple[int, Any]],
    batch: Sequence[int],
    slot: Slot,
    key: str,
) -> Array | tuple[Array, ...]:
    """One factor: ``features`` pairs each feature axis of ``x`` with its parameter axis.

    A slot that holds a tuple asks for panels (see ``_slots.packs``).
    """
    if isinstance(slot[key], tuple):
        return gram_panels(x, features[0][0])
    named = {d for d, _ in features}
    rows = [d for d in range(x.ndim) if d not in named and d not in batch]
    dense = slot[key].ndim - len(batch) == 2
    moments = _moments(x, rows, batch, slot, key, 2)
    axes = [axis for _, axis in sorted(features, key=lambda f: f[0])]
    sizes, order = _order(site, use, axes)
    return _in_own_order(moments, len(batch), 2 if dense else 1, sizes, order)


def _input_statistics(
    site: Site,
    use: Use,
    slot: Slot,
    x: Array,
    features: Sequence[tuple[int, Any]],
    batch: Sequence[int],
    rows: Array | None,
) -> Slot:
    """Everything the slot wants of the input rows; ``x`` is masked already."""
    out: Slot = {}
    if "a" not in slot:
        return out
    named = {d for d, _ in features}
    row_axes = tuple(d for d in range(x.ndim) if d not in named and d not in batch)
    stack = tuple(x.shape[d] for d in batch)
    lost = slot["a_count"].ndim - len(batch)  # experts read from a free axis share one input
    out["a"] = _side(site, use, x, features, batch, slot if not lost else _first(slot, lost), "a")
    number = math.prod(x.shape[d] for d in row_axes)
    dtype = slot["a_count"].dtype
    count = jnp.asarray(number, dtype) if rows is None else rows.sum(dtype=dtype)
    out["a_count"] = jnp.broadcast_to(count, stack)
    if "a_sum" in slot:
        total = x.sum(row_axes, dtype=dtype)
        kept = [d for d in range(x.ndim) if d not in row_axes]
        order = [*batch, *sorted(named)]
        total = total.transpose([kept.index(d) for d in order])
        axes = [axis for _, axis in sorted(features, key=lambda f: f[0])]
        out["a_sum"] = _in_own_order(total, len(batch), 1, *_order(site, use, axes))
    if lost:
        out = {k: jnp.broadcast_to(v, slot[k].shape) for k, v in out.items()}
    return jax.tree.map(lambda v: _compat.cast_varying(v, x), out)


def _first(slot: Slot, lost: int) -> Slot:
    return {k: jax.ShapeDtypeStruct(v.shape[lost:], v.dtype) for k, v in slot.items()}


def _dense(site: Site, use: Use, slot: Slot, operands: Any, cotangent: Any, rows: Any) -> Slot:
    contract, shared = site.eqn.params["dimension_numbers"]
    mine, other = use.operand, 1 - use.operand
    x = operands[other]
    row_axes = [d for d in range(x.ndim) if d not in (*contract[other], *shared[other])]
    if rows is not None:
        at = [1] * x.ndim
        for d, n in zip(row_axes, rows.shape, strict=True):
            at[d] = n
        x = _masked(x, rows.reshape(at))
    features = list(zip(contract[other], use.in_axes, strict=True))
    out = _input_statistics(site, use, slot, x, features, shared[other], rows)
    num_batch, num_free = len(shared[0]), len(use.out_axes)
    first_free = num_batch + (len(row_axes) if mine == 1 else 0)
    if rows is not None:
        at = [1] * cotangent.ndim
        start = num_batch + (0 if mine == 1 else num_free)
        at[start : start + len(row_axes)] = rows.shape
        cotangent = _masked(cotangent, rows.reshape(at))
    free = [(first_free + i, axis) for i, axis in enumerate(use.out_axes)]
    batch = list(range(num_batch))
    if use.free_stack:
        batch.append(free.pop(0)[0])
    out["g"] = _side(site, use, cotangent, free, batch, slot, "g")
    return out


def _conv(site: Site, use: Use, slot: Slot, operands: Any, cotangent: Any, rows: Any) -> Slot:
    p, x = site.eqn.params, operands[0]
    numbers = p["dimension_numbers"]
    kernel = operands[1].shape
    out: Slot = {}
    if "a" in slot:
        patches = jax.lax.conv_general_dilated_patches(
            x,
            [kernel[d] for d in numbers.rhs_spec[2:]],
            p["window_strides"],
            p["padding"],
            lhs_dilation=p["lhs_dilation"],
            rhs_dilation=p["rhs_dilation"],
            dimension_numbers=numbers,
            precision=jax.lax.Precision.HIGHEST,
        )
        order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
        patches = patches.transpose(order)
        patches = patches.reshape(*patches.shape[:-1], *[kernel[d] for d in numbers.rhs_spec[1:]])
        if rows is not None:
            at = (*rows.shape, *[1] * (patches.ndim - rows.ndim))
            patches = _masked(patches, rows.reshape(at))
        features = list(enumerate(use.in_axes, start=len(order) - 1))
        out = _input_statistics(site, use, slot, patches, features, (), rows)
    channel = numbers.out_spec[1]
    if rows is not None:
        order = (numbers.out_spec[0], *numbers.out_spec[2:])
        cotangent = _masked(cotangent.transpose(*order, channel), rows[..., None])
        channel = cotangent.ndim - 1
    out["g"] = _side(site, use, cotangent, [(channel, use.out_axes[0])], (), slot, "g")
    return out


def _embedding(site: Site, use: Use, slot: Slot, operands: Any, cotangent: Any, rows: Any) -> Slot:
    table, indices = operands[0], operands[1][..., 0]
    offset = site.eqn.params["dimension_numbers"].offset_dims
    out: Slot = {}
    if "a" in slot:
        dtype = slot["a"].dtype
        weights = jnp.ones(indices.shape, dtype) if rows is None else rows.astype(dtype)
        weights = _compat.cast_varying(weights, indices)
        zeros = _compat.cast_varying(jnp.zeros(table.shape[0], dtype), indices)
        out["a"] = zeros.at[indices].add(weights, mode="drop")
        out["a_count"] = weights.sum()
    if rows is not None:
        at = iter(rows.shape)
        shape = [1 if d in offset else next(at) for d in range(cotangent.ndim)]
        cotangent = _masked(cotangent, rows.reshape(shape))
    features = list(zip(offset, use.out_axes, strict=True))
    out["g"] = _side(site, use, cotangent, features, (), slot, "g")
    return out


def _scale(site: Site, use: Use, slot: Slot, operands: Any, cotangent: Any, rows: Any) -> Slot:
    like = slot["diagonal"]
    x = operands[1 - use.operand].astype(like.dtype)
    gradient = _masked(cotangent, rows).astype(like.dtype) * x
    return {"diagonal": _sum_to(jnp.square(_masked(gradient, rows)), like.shape)}


_STATISTICS: dict[str, Callable[..., Slot]] = {
    "dense": _dense,
    "conv": _conv,
    "embedding": _embedding,
    "scale": _scale,
}
