"""Rules for indexing: gather, scatter and dynamic slices.

If an index is known, labels are picked as the entries are. If it is unknown, any entry along the
axis may be picked, so labels that differ along it are joined.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkfac._jaxpr_compat import Eqn
from jaxkfac.interception.coupling._labels import (
    FREE,
    MIXED,
    Labels,
    LazyIntegers,
    check_size,
    entries_at,
    everywhere,
    joined,
    placed,
    reduced,
    simplified,
)

_Index = np.ndarray | None  # along one axis of the operand; None if it is unknown


def gather(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    operand, indices = ins
    shape, rank = eqn.invars[0].aval.shape, len(eqn.outvars[0].aval.shape)
    numbers, sizes = eqn.params["dimension_numbers"], [int(s) for s in eqn.params["slice_sizes"]]
    rows = [d for d in range(rank) if d not in numbers.offset_dims]
    by_row = None if indices is None else placed(_of_rows(indices), rows, rank)
    if operand is None:
        return [by_row]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offsets = dict(
        zip(
            (d for d in range(len(shape)) if d not in gone),
            map(int, numbers.offset_dims),
            strict=True,
        )
    )
    lined_up = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    index: list[Any] = []
    for d in range(len(shape)):
        if operand.shape[d] == 1:
            index.append(np.zeros((1,) * rank, int))
            continue
        along_axis = np.zeros((1,) * rank, int)
        if d in offsets:
            along_axis = along_axis + _along(offsets[d], sizes[d], rank)
        if d in lined_up:
            along_axis = along_axis + _along(rows[lined_up[d]], shape[d], rank)
        # A slice over the full axis starts at 0, whatever the index is (it is clipped).
        elif d in numbers.start_index_map and sizes[d] < shape[d]:
            start = _start(integers[1], numbers.start_index_map.index(d))
            if start is None:
                # An unknown index may pick any entry along the axis.
                operand = reduced(operand, [d])
                index.append(np.zeros((1,) * rank, int))
                continue
            along_axis = along_axis + placed(np.clip(start, 0, shape[d] - sizes[d]), rows, rank)
        index.append(along_axis)
    check_size(np.broadcast_shapes(*[x.shape for x in index]))
    return [joined(simplified(operand[tuple(np.broadcast_arrays(*index))]), by_row)]


def scatter(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    operand, indices, updates = ins
    numbers = eqn.params["dimension_numbers"]
    shape, update_shape = (eqn.invars[k].aval.shape for k in (0, 2))
    rank = len(update_shape)
    rows = [d for d in range(rank) if d not in numbers.update_window_dims]
    if indices is not None:
        updates = joined(updates, placed(_of_rows(indices), rows, rank))
    if updates is None:
        return [operand]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = dict(
        zip(
            (d for d in range(len(shape)) if d not in gone),
            map(int, numbers.update_window_dims),
            strict=True,
        )
    )
    lined_up = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    index: list[_Index] = []
    for d in range(len(shape)):
        along_axis = np.zeros((1,) * rank, int)
        size = update_shape[windows[d]] if d in windows else 1
        if d in windows and (size < shape[d] or updates.shape[windows[d]] > 1):
            along_axis = along_axis + _along(windows[d], size, rank)
        elif d in windows:
            index.append(None)  # the full axis, with equal labels
            continue
        if d in lined_up:
            along_axis = along_axis + _along(rows[lined_up[d]], shape[d], rank)
        elif d in numbers.scatter_dims_to_operand_dims and size < shape[d]:
            start = _start(integers[1], numbers.scatter_dims_to_operand_dims.index(d))
            if start is None:
                index.append(None)
                continue
            # An update out of bounds goes to the border under this mode; others drop it (`_put`).
            if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
                start = np.clip(start, 0, shape[d] - size)
            along_axis = along_axis + placed(start, rows, rank)
        index.append(along_axis)
    return [joined(operand, _put(shape, index, updates, update_shape))]


def _put(
    shape: Sequence[int], index: Sequence[_Index], updates: np.ndarray, update_shape: Sequence[int]
) -> Labels:
    """Labels of zeros into which entries are put; anywhere along axes without an index."""
    full = np.broadcast_shapes(updates.shape, *[x.shape for x in index if x is not None])
    out_shape = [1 if x is None else s for s, x in zip(shape, index, strict=True)]
    check_size(full)
    check_size(out_shape)
    # Several updates may fall on one entry: its label is theirs if the largest and the smallest of
    # them agree.
    high = np.full(out_shape, FREE, np.int32)
    low = np.full(out_shape, MIXED, np.int32)
    at = [np.broadcast_to(np.zeros(1, int) if x is None else x, full).ravel() for x in index]
    sizes = zip(at, out_shape, strict=True)
    # JAX drops a window that is partly out of bounds. Here its inner entries keep their labels,
    # which can only make the answer more cautious.
    in_bounds = np.logical_and.reduce([(i >= 0) & (i < s) for i, s in sizes]) if at else slice(None)
    values = np.broadcast_to(updates, full).ravel()
    where = tuple(i[in_bounds] for i in at)
    if not at:
        return simplified(reduced(updates, range(updates.ndim)))
    np.maximum.at(high, where, values[in_bounds])
    np.minimum.at(low, where, np.where(values == FREE, np.int32(MIXED), values)[in_bounds])
    return simplified(np.where((high == low) | (high == FREE), high, np.int32(MIXED)))


def dynamic_slice(
    eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]
) -> list[Labels]:
    out, shape, sizes = ins[0], eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    for d, size in enumerate(sizes):
        if out is None or size == shape[d] or out.shape[d] == 1:
            continue
        start = integers[1 + d]()
        if start is None or not start.fully_known:
            out = reduced(out, [d])
        else:
            first = int(np.clip(start.values, 0, shape[d] - size))
            out = entries_at(out, np.arange(first, first + size), d)
    return [joined(simplified(out), *ins[1:])]


def dynamic_update_slice(
    eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]
) -> list[Labels]:
    operand, update = ins[:2]
    shape, sizes = (eqn.invars[k].aval.shape for k in (0, 1))
    cut = [d for d, size in enumerate(sizes) if size < shape[d]]
    starts = [integers[2 + d]() for d in cut]
    if any(x is None or not x.fully_known for x in starts):
        return [joined(operand, reduced(update, cut), *ins[2:])]
    none = np.full((1,) * len(shape), FREE, np.int32)
    before = none if operand is None else operand
    after = joined(update, *ins[2:])
    after = none if after is None else after
    if not cut:
        return [simplified(after)]
    # Overwritten entries lose their labels; a join would let the old examples meet the new ones.
    rank = len(shape)
    both = zip(before.shape, after.shape, strict=True)
    wide = [a if d in cut else max(a, b) for d, (a, b) in enumerate(both)]
    out = everywhere(np.broadcast_to(before, wide), shape, cut)
    assert out is not None
    out = out.copy()
    at: list[Any] = [slice(None)] * rank
    for d, start in zip(cut, starts, strict=True):
        assert start is not None
        # Starts are clipped, as XLA does, so that the slice is inside the operand.
        first = int(np.clip(start.values, 0, shape[d] - sizes[d]))
        at[d] = slice(first, first + sizes[d])
    out[tuple(at)] = after
    return [simplified(out)]


def picks_are_known(eqn: Eqn, integers: Sequence[LazyIntegers]) -> bool:
    """Whether all indices of an equation that picks entries are known."""
    name = eqn.primitive.name
    if name == "gather" or name.startswith("scatter"):
        indices = integers[1:2]
    else:
        indices = integers[1 if name == "dynamic_slice" else 2 :]
    return all((x := index()) is not None and x.fully_known for index in indices)


def _of_rows(indices: np.ndarray) -> np.ndarray:
    """Labels of index vectors, which run along the last axis."""
    labels = reduced(indices, [indices.ndim - 1])
    assert labels is not None
    return labels.squeeze(-1)


def _start(integers: LazyIntegers, position: int) -> np.ndarray | None:
    """One component of the index vectors, if it is known for every row."""
    indices = integers()
    if indices is None or not indices.is_known[..., position].all():
        return None
    return indices.values[..., position].astype(int)


def _along(axis: int, size: int, rank: int) -> np.ndarray:
    return np.arange(size).reshape([size if d == axis else 1 for d in range(rank)])
