"""What is known about each entry of an array: the example it depends on, or its integer."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import numpy as np

from jaxkfac._jaxpr_compat import Eqn, VarOrLiteral, read_order, reshape_groups

# ---------------- labels: for each entry of an array, the one example that it depends on
#
# A label is the number of an example, ``FREE`` for an entry that depends on no example, or
# ``MIXED`` for an entry that depends on several, or on an unknown one. The labels of an array of
# shape ``(s_0, s_1, ...)`` are an integer array of the same rank that broadcasts to it: an axis
# along which they are all equal has length one. So the labels of a batch of activations ``(N, S,
# D)`` are an array ``(N, 1, 1)`` for all ``S`` and ``D``. ``None`` stands for labels that are all
# ``FREE``.
#
# Labels are exact through any primitive that moves entries (reshapes that merge the batch in either
# order, crops put side by side, a permutation by constant indices), and joining two unlike labels
# gives ``MIXED``. Axes therefore need no names here: a reshape that loses an axis keeps its labels.


Labels: TypeAlias = np.ndarray | None

FREE = -1
MIXED = 2**30  # above every example, so that a maximum finds it
MOST_LABELS = 2**25  # for one array; 128 MB


class TooManyLabelsError(Exception):
    """The labels of an array would take more memory than they are worth."""


def examples_along(axis: int, rank: int, number: int) -> np.ndarray:
    """Labels by which entry ``i`` along an axis belongs to example ``i``."""
    return np.arange(number, dtype=np.int32).reshape(
        [number if d == axis else 1 for d in range(rank)]
    )


def mixed(rank: int) -> Labels:
    return np.full((1,) * rank, MIXED, np.int32)


@overload
def joined(first: np.ndarray, /, *more: Labels) -> np.ndarray: ...
@overload
def joined(*all_labels: Labels) -> Labels: ...
def joined(*all_labels: Labels) -> Labels:
    """Labels of a result of all of these, entry by entry; ranks are equal, or zero."""
    out = None
    for labels in all_labels:
        if labels is None or out is labels:
            continue
        if out is None:
            out = labels
            continue
        rank = max(out.ndim, labels.ndim)
        x, y = (v if v.ndim else v.reshape((1,) * rank) for v in (out, labels))
        check_size(np.broadcast_shapes(x.shape, y.shape))
        where_unlike = np.where(y == FREE, x, np.where(x == FREE, y, np.int32(MIXED)))
        out = np.where(x == y, x, where_unlike)
    return out


def check_size(shape: Sequence[int]) -> None:
    if math.prod(shape) > MOST_LABELS:
        raise TooManyLabelsError(f"{math.prod(shape)} labels of one array")


@overload
def reduced(labels: np.ndarray, axes: Iterable[int]) -> np.ndarray: ...
@overload
def reduced(labels: None, axes: Iterable[int]) -> None: ...
def reduced(labels: Labels, axes: Iterable[int]) -> Labels:
    """Labels of a result of all entries along some axes, which keep length one."""
    if labels is None:
        return None
    axes = tuple(d for d in axes if labels.shape[d] > 1)
    return _join_of(labels, axes) if axes else labels


def _join_of(labels: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    # Entries that depend on no example count in neither bound; unequal bounds are two examples.
    high = labels.max(axes, keepdims=True)
    low = np.where(labels == FREE, np.int32(MIXED), labels).min(axes, keepdims=True)
    return np.where((high == low) | (high == FREE), high, np.int32(MIXED))


def accumulated(labels: Labels, axis: int, *, reverse: bool) -> Labels:
    """Labels of results that depend on their own entry and all entries before it along an axis."""
    if labels is None or labels.shape[axis] == 1:
        return labels
    x = np.flip(labels, axis) if reverse else labels
    high = np.maximum.accumulate(x, axis)
    low = np.minimum.accumulate(np.where(x == FREE, np.int32(MIXED), x), axis)
    out = np.where((high == low) | (high == FREE), high, np.int32(MIXED))
    return np.flip(out, axis) if reverse else out


def simplified(labels: Labels) -> Labels:
    """The labels with length one along every axis along which they are all equal."""
    if labels is None or labels.size == 0:
        return None
    for d in range(labels.ndim):
        if labels.shape[d] > 1:
            first = np.take(labels, [0], d)
            if (labels == first).all():
                labels = first
    return None if labels.size == 1 and labels.flat[0] == FREE else labels


def everywhere(labels: Labels, shape: Sequence[int], axes: Iterable[int]) -> Labels:
    """The labels with some axes at their full length in an array of this shape."""
    if labels is None:
        return None
    axes = set(axes)
    full = [s if d in axes else n for d, (s, n) in enumerate(zip(shape, labels.shape, strict=True))]
    check_size(full)
    return np.broadcast_to(labels, full)


def transposed(labels: Labels, order: Sequence[int]) -> Labels:
    return None if labels is None else labels.transpose([int(d) for d in order])


def placed(labels: Labels, at: Sequence[int], rank: int) -> Labels:
    """Labels whose axis ``d`` becomes axis ``at[d]`` of a result of this rank; others are new."""
    if labels is None:
        return None
    order = sorted(range(len(at)), key=lambda d: at[d])
    out = labels.transpose(order)
    shape = [1] * rank
    for d in order:
        shape[at[d]] = labels.shape[d]
    return out.reshape(shape)


def reshaped(labels: Labels, before: Sequence[int], after: Sequence[int]) -> Labels:
    """Labels after a row-major reshape; only axes that it merges or splits are spread."""
    if labels is None:
        return None
    if math.prod(before) == 0:
        return None
    spread, out_shape = list(labels.shape), []
    for ins, outs in reshape_groups(before, after):
        varied = any(labels.shape[d] > 1 for d in ins)
        for d in ins:
            spread[d] = before[d] if varied else labels.shape[d]
        out_shape += [after[d] if varied else 1 for d in outs]
    check_size(spread)
    return simplified(np.broadcast_to(labels, spread).reshape(out_shape))


def entries_at(labels: Labels, index: np.ndarray, axis: int) -> Labels:
    """Labels of the entries at an index along an axis; negative ones are ``FREE``."""
    if labels is None or labels.shape[axis] == 1:
        return labels
    out = np.take(labels, np.maximum(index, 0), axis)
    if (index < 0).any():
        shape = [-1 if d == axis else 1 for d in range(labels.ndim)]
        out = np.where((index < 0).reshape(shape), np.int32(FREE), out)
    return simplified(out)


def windowed(
    labels: Labels,
    axis: int,
    size: int,
    *,
    window: int = 1,
    stride: int = 1,
    padding: int = 0,
    base_dilation: int = 1,
    window_dilation: int = 1,
    entries: int,
) -> Labels:
    """Labels of results that each read a window of entries along an axis.

    Args:
        labels: Labels of the operand.
        axis: The axis along which the window moves.
        size: Its length in the operand.
        window: Number of entries in a window.
        stride: Distance from window to window.
        padding: Number of entries padded at the start.
        base_dilation: Distance between entries of the operand.
        window_dilation: Distance between entries of a window.
        entries: Length of the axis in the result.
    """
    if labels is None or labels.shape[axis] == 1:
        return labels
    at = np.arange(entries)[:, None] * stride - padding
    at = at + np.arange(window)[None] * window_dilation
    in_operand = (at >= 0) & (at % base_dilation == 0) & (at // base_dilation < size)
    index = np.where(in_operand, at // base_dilation, -1)
    check_size([math.prod(labels.shape), window])
    rows = np.take(labels, np.maximum(index, 0).ravel(), axis)
    shape = [-1 if d == axis else 1 for d in range(labels.ndim)]
    rows = np.where(in_operand.ravel().reshape(shape), rows, np.int32(FREE))
    split = [*labels.shape[:axis], entries, window, *labels.shape[axis + 1 :]]
    return simplified(_join_of(rows.reshape(split), (axis + 1,)).squeeze(axis + 1))


# ---------------- integers and booleans that are known when a program is traced
#
# If its indices are known, so are the examples that a gather picks. Indices are often known only in
# part: ``x[arange(n), chosen]`` builds one array with both columns. A known array therefore has a
# mask of its known entries beside it, and primitives that move entries move the mask too. All of
# this is evaluated only on demand: most programs never need it.


MOST_ENTRIES = 2**20


class KnownArray(NamedTuple):
    """An array of which some entries are known.

    Attributes:
        values: The entries.
        is_known: Which of them are known.
    """

    values: np.ndarray
    is_known: np.ndarray

    @classmethod
    def of(cls, values: Any) -> "KnownArray":
        values = np.asarray(values)
        return cls(values, np.ones(values.shape, bool))

    @property
    def fully_known(self) -> bool:
        return bool(self.is_known.all())


LazyIntegers = Callable[[], KnownArray | None]


def no_integers() -> KnownArray | None:
    """The integers of an array without known entries."""
    return None


def computed_once(ask: LazyIntegers) -> LazyIntegers:
    """The function ``ask``, evaluated at most once."""
    result: list[KnownArray | None] = []

    def again() -> KnownArray | None:
        if not result:
            result.append(ask())
        return result[0]

    return again


def can_be_known(var: VarOrLiteral) -> bool:
    """Whether an array is small enough, and holds integers or booleans."""
    dtype, shape = getattr(var.aval, "dtype", None), getattr(var.aval, "shape", ())
    plain = isinstance(dtype, np.dtype) and dtype.kind in "iub"
    return plain and math.prod(shape) <= MOST_ENTRIES


def known_result(eqn: Eqn, ins: Sequence[LazyIntegers], result: int = 0) -> LazyIntegers:
    """The integers of a result of a first-order equation."""

    def ask() -> KnownArray | None:
        operands = [one() for one in ins]
        if eqn.primitive.name in _MOVES:
            return _moved(eqn, operands)
        if any(x is None or not x.fully_known for x in operands):
            return None
        return _evaluated(eqn, [x.values for x in operands if x is not None], result)

    return computed_once(ask)


def _evaluated(eqn: Eqn, operands: Sequence[np.ndarray], result: int) -> KnownArray:
    if eqn.primitive.name in _NUMPY:
        values = _NUMPY[eqn.primitive.name](*operands)
        return KnownArray.of(np.asarray(values, eqn.outvars[0].aval.dtype))
    with jax.ensure_compile_time_eval():
        out = eqn.primitive.bind(*map(jax.numpy.asarray, operands), **eqn.params)
    return KnownArray.of(out[result] if eqn.primitive.multiple_results else out)


def _moved(eqn: Eqn, operands: Sequence[KnownArray | None]) -> KnownArray | None:
    """The known entries after a primitive that moves entries without reading them."""
    if all(x is None for x in operands):
        return None
    shapes = [v.aval.shape for v in eqn.invars]
    move = _MOVES[eqn.primitive.name]
    arrays = [
        KnownArray(np.zeros(shape, int), np.zeros(shape, bool)) if x is None else x
        for x, shape in zip(operands, shapes, strict=True)
    ]
    values, is_known = [x.values for x in arrays], [x.is_known for x in arrays]
    dtype = eqn.outvars[0].aval.dtype
    return KnownArray(move(eqn, values).astype(dtype), move(eqn, is_known).astype(bool))


def _reshape(eqn: Eqn, arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0].transpose(read_order(eqn)).reshape(eqn.outvars[0].aval.shape)


def _broadcast(eqn: Eqn, arrays: Sequence[np.ndarray]) -> np.ndarray:
    shape, at = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for d, s in zip(at, arrays[0].shape, strict=True):
        sizes[d] = s
    return np.broadcast_to(arrays[0].reshape(sizes), shape)


def _slice(eqn: Eqn, arrays: Sequence[np.ndarray]) -> np.ndarray:
    p = eqn.params
    strides = p["strides"] or [1] * arrays[0].ndim
    cuts = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return arrays[0][tuple(slice(a, b, c) for a, b, c in cuts)]


_MOVES: dict[str, Callable[[Eqn, Sequence[np.ndarray]], np.ndarray]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "tile": lambda eqn, arrays: np.tile(arrays[0], eqn.params["reps"]),
    "slice": _slice,
    "squeeze": lambda eqn, arrays: arrays[0].reshape(eqn.outvars[0].aval.shape),
    "expand_dims": lambda eqn, arrays: arrays[0].reshape(eqn.outvars[0].aval.shape),
    "transpose": lambda eqn, arrays: arrays[0].transpose(eqn.params["permutation"]),
    "concatenate": lambda eqn, arrays: np.concatenate(list(arrays), eqn.params["dimension"]),
    "rev": lambda eqn, arrays: np.flip(arrays[0], eqn.params["dimensions"]),
    "convert_element_type": lambda eqn, arrays: arrays[0],
    "copy": lambda eqn, arrays: arrays[0],
    "stop_gradient": lambda eqn, arrays: arrays[0],
    "optimization_barrier": lambda eqn, arrays: arrays[0],
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "select_n": lambda which, *cases: np.select(
        [which.astype(int) == k for k in range(len(cases))], cases
    ),
}
