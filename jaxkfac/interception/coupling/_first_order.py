"""Rules for first-order primitives: the labels of a result from those of the operands.

A primitive without a rule proves nothing: its results are mixed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from jaxkfac._jaxpr_compat import Eqn, read_order
from jaxkfac.interception.coupling._indexing import (
    dynamic_slice,
    dynamic_update_slice,
    gather,
    picks_are_known,
    scatter,
)
from jaxkfac.interception.coupling._labels import (
    FREE,
    Labels,
    LazyIntegers,
    accumulated,
    entries_at,
    everywhere,
    joined,
    placed,
    reduced,
    reshaped,
    simplified,
    transposed,
    windowed,
)
from jaxkfac.interception.values._axes import ELEMENTWISE, MATRIX_FUNCTIONS, REDUCTIONS

Rule = Callable[[Eqn, Sequence[Labels], Sequence[LazyIntegers]], "list[Labels]"]

_MARKS = frozenset("jaxkfac_mark_outputs jaxkfac_mark_rows".split())
_CUMULATIVE = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())
_ELEMENTWISE = ((ELEMENTWISE | _MARKS) - _CUMULATIVE) | frozenset(
    "polygamma zeta igamma igammac lgamma digamma igamma_grad_a random_gamma_grad regularized_"
    "incomplete_beta bessel_i0e bessel_i1e bessel_i0 bessel_i1 clz complex eq_to lt_to le_to "
    "random_fold_in random_clone threefry2x32 random_seed mesh_cast layout_constraint xla_metadata "
    "dce_sink copy_p pbroadcast to_edtype from_edtype random_gamma erf_inv".split()
)
_INDEXED = frozenset("gather dynamic_slice dynamic_update_slice".split())


def rule_of(eqn: Eqn) -> Rule | None:
    """The rule of a first-order primitive, if there is one."""
    name = eqn.primitive.name
    if name in _ELEMENTWISE:
        return _elementwise
    if name in REDUCTIONS or name in ("reduce_xor", "reduce"):
        return _reduce
    if name in _CUMULATIVE:
        return _cumulative
    if name.startswith("scatter"):
        return scatter
    if name.startswith("reduce_window"):
        return _reduce_window
    return _RULES.get(name)


def is_certain(eqn: Eqn, integers: Sequence[LazyIntegers]) -> bool:
    """Whether unlike labels that a rule joins do meet, instead of only possibly, by an index."""
    name = eqn.primitive.name
    if name in _INDEXED or name.startswith("scatter"):
        return picks_are_known(eqn, integers)
    return True


def _rank(eqn: Eqn, result: int = 0) -> int:
    return len(getattr(eqn.outvars[result].aval, "shape", ()))


def _ints(axes: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Axes as Python integers; ``vmap`` makes some NumPy integers."""
    return tuple(map(int, axes))


def _pairs(numbers: Any) -> tuple[Any, Any]:
    """The contracted and the shared axes of a product, each for both operands."""
    contracted, batch = numbers
    return tuple(map(_ints, contracted)), tuple(map(_ints, batch))


def _shapes(eqn: Eqn) -> list[tuple[int, ...]]:
    return [getattr(v.aval, "shape", ()) for v in eqn.invars]


def _elementwise(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    if eqn.primitive.name == "optimization_barrier":
        # Its operands have different shapes, and result k is operand k alone: a join would let all
        # of them meet.
        return list(ins)
    if eqn.primitive.name in _MARKS:  # identities of their first operand
        return [ins[0]] * len(eqn.outvars)
    rank = _rank(eqn)
    out = joined(*ins)
    # Only scalars (a predicate, the bounds of a clamp) may differ in rank here, and the label of a
    # scalar holds for every entry.
    if out is not None and out.ndim != rank:
        out = out.reshape((1,) * rank)
    return [out] * len(eqn.outvars)


def _reduce(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    axes = _ints(eqn.params["axes" if "axes" in eqn.params else "dimensions"])
    number = len(eqn.outvars)
    # A variadic `reduce` has a computation that may combine all of its operands, so each result
    # depends on the same entries of every operand.
    out = joined(*ins[:number]) if number > 1 else ins[0]
    # The initial values follow the operands, and enter every result.
    out = joined(out, *[x for x in ins[number:] if x is None or not x.ndim])
    out = reduced(out, axes)
    return [None if out is None else out.squeeze(axes)] * number


def _cumulative(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    p = eqn.params
    return [simplified(accumulated(ins[0], int(p["axis"]), reverse=p["reverse"]))]


def _transpose(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    return [transposed(ins[0], eqn.params["permutation"])]


def _reshape(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    (before, *_), after = _shapes(eqn), eqn.outvars[0].aval.shape
    # A reshape may read its operand in another order than row by row (`dimensions=`); labels must
    # be read in that order, or they end on other entries.
    order = read_order(eqn)
    return [reshaped(transposed(ins[0], order), [before[d] for d in order], after)]


def _squeeze(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    x = ins[0]
    return [None if x is None else x.squeeze(_ints(eqn.params["dimensions"]))]


def _broadcast(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    return [placed(ins[0], _ints(eqn.params["broadcast_dimensions"]), _rank(eqn))]


def _tile(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    x = ins[0]
    if x is None:
        return [None]
    # One label for the whole axis is one for all of its copies too.
    return [np.tile(x, [1 if n == 1 else r for r, n in zip(eqn.params["reps"], x.shape)])]


def _slice(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    p, out = eqn.params, ins[0]
    strides = p["strides"] or [1] * len(p["start_indices"])
    for d, cut in enumerate(zip(p["start_indices"], p["limit_indices"], strides, strict=True)):
        out = entries_at(out, np.arange(*cut), d) if out is not None else None
    return [out]


def _pad(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    x, shape = ins[0], _shapes(eqn)[0]
    for d, (low, _, between) in enumerate(eqn.params["padding_config"]):
        after = eqn.outvars[0].aval.shape[d]
        x = windowed(
            x, d, shape[d], padding=int(low), base_dilation=int(between) + 1, entries=after
        )
    # The padding value may depend on an example. Its label then joins every entry, also those that
    # no padding reaches, which is more than is true but never less.
    return [joined(x, ins[1])]


def _rev(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    x = ins[0]
    return [None if x is None else np.flip(x, _ints(eqn.params["dimensions"]))]


def _concatenate(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    return [_side_by_side(ins, _shapes(eqn), int(eqn.params["dimension"]))]


def _stack(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    axis, shapes = int(eqn.params["axis"]), _shapes(eqn)
    expanded = [None if x is None else np.expand_dims(x, axis) for x in ins]
    return [_side_by_side(expanded, [(*s[:axis], 1, *s[axis:]) for s in shapes], axis)]


def _side_by_side(
    operands: Sequence[Labels], shapes: Sequence[tuple[int, ...]], axis: int
) -> Labels:
    if all(x is None for x in operands):
        return None
    rank = len(shapes[0])
    # An operand without labels needs explicit ones: `None` means that no entry has an example,
    # while here only this operand's entries have none.
    none = np.full((1,) * rank, FREE, np.int32)
    filled = [none if x is None else x for x in operands]
    # One label for the whole axis stays one label; written out, every later rule would have to
    # compare an entry for each place of the axis.
    if all(x is filled[0] for x in filled) and filled[0].shape[axis] == 1:
        return filled[0]
    other_sizes = np.broadcast_shapes(*[(*x.shape[:axis], *x.shape[axis + 1 :]) for x in filled])
    full_labels = []
    for x, shape in zip(filled, shapes, strict=True):
        x = everywhere(x, shape, [axis])
        assert x is not None
        size = shape[axis]
        full_labels.append(np.broadcast_to(x, (*other_sizes[:axis], size, *other_sizes[axis:])))
    return simplified(np.concatenate(full_labels, axis))


def _split(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    axis, out, start = int(eqn.params["axis"]), [], 0
    for size in eqn.params["sizes"]:
        out.append(entries_at(ins[0], np.arange(start, start + size), axis))
        start += size
    return out


def _unstack(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    axis, x = int(eqn.params["axis"]), ins[0]
    entries = [entries_at(x, np.array([k]), axis) for k in range(len(eqn.outvars))]
    return [None if p is None else p.squeeze(axis) for p in entries]


def _along_one(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    """The rule of primitives that read everything along one axis, such as a sort or top k."""
    p = eqn.params
    # The parameter has another name in each of `sort`, `top_k` and `approx_top_k`.
    axis = int(p.get("dimension", p.get("axis", p.get("reduction_dimension", -1))))
    rank = len(_shapes(eqn)[0])
    # A sort with several operands moves all of them by the keys, so a result depends on more than
    # its own operand.
    out = joined(*[reduced(x, [axis % rank]) for x in ins if x is None or x.ndim == rank])
    return [out] * len(eqn.outvars)


def _dot(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    contracted, batch = _pairs(eqn.params["dimension_numbers"])
    return [_product(_shapes(eqn)[:2], ins[:2], contracted, batch)]


def _product(shapes: Any, ins: Sequence[Labels], contracted: Any, batch: Any) -> Labels:
    ranks = [len(s) for s in shapes]
    free = [
        [d for d in range(ranks[k]) if d not in contracted[k] and d not in batch[k]] for k in (0, 1)
    ]
    number = len(batch[0])
    rank = number + len(free[0]) + len(free[1])
    offsets, operand_labels = (number, number + len(free[0])), []
    for k, x in enumerate(ins):
        x = reduced(x, contracted[k])
        if x is None:
            continue
        x = x.squeeze(contracted[k])
        remaining = [d for d in range(ranks[k]) if d not in contracted[k]]
        at = [
            batch[k].index(d) if d in batch[k] else offsets[k] + free[k].index(d) for d in remaining
        ]
        operand_labels.append(placed(x, at, rank))
    return joined(*operand_labels)


def _ragged_dot(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted, batch = _pairs(numbers.dot_dimension_numbers)
    groups, ragged = _ints(numbers.rhs_group_dimensions), _ints(numbers.lhs_ragged_dimensions)
    left_labels, right_labels, sizes = ins
    if right_labels is not None:
        # Which group multiplies a row depends on the sizes, so a row may read any of the groups.
        right_labels = reduced(right_labels, groups)
        right_labels = None if right_labels is None else right_labels.squeeze(groups)
    shape = _shapes(eqn)[1]
    remaining = [d for d in range(len(shape)) if d not in groups]
    # Where a run of contracted rows ends depends on the sizes: a result may read any row.
    if set(ragged) & set(contracted[0]):  # the result begins with the groups
        out = joined(_flat(left_labels), _flat(right_labels))
    else:
        mine = ([remaining.index(d) for d in contracted[1]], [remaining.index(d) for d in batch[1]])
        shapes = _shapes(eqn)[0], [shape[d] for d in remaining]
        out = _product(
            shapes, (left_labels, right_labels), (contracted[0], mine[0]), (batch[0], mine[1])
        )
    return [joined(*[_spread(x, _rank(eqn)) for x in (out, _flat(sizes))])]


def _flat(x: Labels) -> Labels:
    """The join of all labels of an array."""
    out = reduced(x, range(0 if x is None else x.ndim))
    return None if out is None else out.reshape(())


def _spread(x: Labels, rank: int) -> Labels:
    return x.reshape((1,) * rank) if x is not None and not x.ndim else x


def _sparse_dot(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    """A sparse matrix times an array, which reads all of the array's contracted axes.

    The entries of the matrix may be anywhere in it.
    """
    contracted, batch = _pairs(eqn.params["dimension_numbers"])
    data, indices, right = ins
    shapes = eqn.params["lhs_spinfo"].shape, _shapes(eqn)[2]
    out = _product(shapes, (None, right), contracted, batch)
    return [joined(out, *[_spread(_flat(x), _rank(eqn)) for x in (data, indices)])]


def _convolution(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    p, shapes, rank = eqn.params, _shapes(eqn), _rank(eqn)
    numbers, after = p["dimension_numbers"], eqn.outvars[0].aval.shape
    (n, c, *space), (_, i, *taps) = _ints(numbers.lhs_spec), _ints(numbers.rhs_spec)
    out_n, out_c, *out_space = _ints(numbers.out_spec)
    of_batch, of_channels = p["batch_group_count"], p["feature_group_count"]
    operand_labels = []
    left_labels, right_labels = ins
    if left_labels is not None:
        # A window reads its neighbors along `d`, so examples meet there if the program lays the
        # batch along a dimension of space.
        for k, d in enumerate(space):
            left_labels = windowed(
                left_labels,
                d,
                shapes[0][d],
                window=shapes[1][taps[k]],
                stride=int(p["window_strides"][k]),
                padding=int(p["padding"][k][0]),
                base_dilation=int(p["lhs_dilation"][k]),
                window_dilation=int(p["rhs_dilation"][k]),
                entries=after[out_space[k]],
            )
        goes_to = dict(zip((n, c, *space), (out_n, out_c, *out_space), strict=True))
        x = placed(left_labels, [goes_to[d] for d in range(rank)], rank)
        # A group of outputs reads its own input channels only; otherwise every output reads them
        # all.
        if of_channels > 1:
            x = _grouped(x, out_c, shapes[0][c], of_channels, after[out_c])
        elif of_batch > 1:
            # With batch groups the batch is divided over the output channels, so entries along both
            # of these axes may come from any example.
            x = reduced(x, [out_n, out_c])
        else:
            x = reduced(x, [out_c])
        operand_labels.append(x)
    if right_labels is not None:
        # A kernel that depends on examples is summed over its taps and input channels; only its
        # output channel remains in the result.
        x = reduced(right_labels, [i, *taps])
        if x is not None:
            operand_labels.append(placed(x.squeeze((i, *taps)), [out_c], rank))
    return [simplified(joined(*operand_labels))]


def _grouped(x: Labels, axis: int, before: int, groups: int, after: int) -> Labels:
    """Labels of channels in groups: the results of a group read all channels of the group."""
    if x is None or x.shape[axis] == 1:
        return x
    rows = np.moveaxis(x, axis, -1)
    rows = rows.reshape(*rows.shape[:-1], groups, before // groups)
    rows = reduced(rows, [rows.ndim - 1])
    assert rows is not None
    return np.moveaxis(np.repeat(rows.squeeze(-1), after // groups, -1), -1, axis)


def _reduce_window(
    eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]
) -> list[Labels]:
    p, shape, after = eqn.params, _shapes(eqn)[0], eqn.outvars[0].aval.shape
    rank = len(shape)
    x = joined(*[v for v in ins if v is None or v.ndim == rank])
    for d in range(rank):
        x = windowed(
            x,
            d,
            shape[d],
            window=int(p["window_dimensions"][d]),
            stride=int(p["window_strides"][d]),
            padding=int(p["padding"][d][0]),
            base_dilation=int(p["base_dilation"][d]) if p.get("base_dilation") else 1,
            window_dilation=int(p["window_dilation"][d]) if p.get("window_dilation") else 1,
            entries=after[d],
        )
    # Every window starts from the initial values, so what these depend on enters every result.
    initial = [v.reshape((1,) * rank) for v in ins if v is not None and v.ndim != rank]
    return [joined(x, *initial)] * len(eqn.outvars)


def _select_and_gather_add(
    eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]
) -> list[Labels]:
    return _reduce_window(eqn, ins, integers)


def _select_and_scatter_add(
    eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]
) -> list[Labels]:
    """The gradient of a maximum over windows, which may go anywhere along the window axes."""
    # A stride above one also moves entries, without a window that overlaps: entry k of the source
    # goes to entry k times the stride.
    moved = [d for d, w in enumerate(eqn.params["window_dimensions"]) if w > 1]
    moved += [d for d, s in enumerate(eqn.params["window_strides"]) if s > 1]
    return [joined(*[reduced(x, moved) for x in ins])]


def _fft(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    rank = _rank(eqn)
    return [reduced(ins[0], range(rank - len(eqn.params["fft_lengths"]), rank))]


def _of_matrices(core: int) -> Rule:
    """The rule of a function of each matrix, or vector, of a stack: it reads all of its entries."""

    def rule(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
        stack = len(_shapes(eqn)[0]) - core
        stack_labels = []
        for x in ins:
            # An operand may have one axis less than the matrices, such as the scales of reflectors.
            x = reduced(x, range(stack, 0 if x is None else x.ndim))
            stack_labels.append(None if x is None else x.reshape(x.shape[:stack]))
        out = joined(*stack_labels)
        return [placed(out, range(stack), _rank(eqn, k)) for k in range(len(eqn.outvars))]

    return rule


def _triangular_solve(
    eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]
) -> list[Labels]:
    """The rule reads the full matrix, and solves each column of the right-hand side by itself."""
    matrix, columns = ins
    rank = _rank(eqn)
    matrix = reduced(matrix, [rank - 2, rank - 1])
    return [joined(matrix, reduced(columns, [rank - 2 if eqn.params["left_side"] else rank - 1]))]


def _leading(eqn: Eqn, ins: Sequence[Labels], integers: Sequence[LazyIntegers]) -> list[Labels]:
    """The rule of primitives that add or remove trailing axes: bits of a key, keys from bits."""
    out = []
    for k in range(len(eqn.outvars)):
        rank, operand_labels = _rank(eqn, k), []
        for x in ins:
            if x is not None and x.ndim > rank:
                x = reduced(x, range(rank, x.ndim))
                x = None if x is None else x.reshape(x.shape[:rank])
            operand_labels.append(
                None if x is None else x.reshape(*x.shape, *[1] * (rank - x.ndim))
            )
        out.append(joined(*operand_labels))
    return out


_RULES: dict[str, Rule] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    "slice": _slice,
    "pad": _pad,
    "rev": _rev,
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _split,
    "unstack": _unstack,
    "sort": _along_one,
    "top_k": _along_one,
    "approx_top_k": _along_one,
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "bcoo_dot_general": _sparse_dot,
    "conv_general_dilated": _convolution,
    "select_and_gather_add": _select_and_gather_add,
    "select_and_scatter_add": _select_and_scatter_add,
    "fft": _fft,
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "triangular_solve": _triangular_solve,
    "random_wrap": _leading,
    "random_unwrap": _leading,
    "random_bits": _leading,
    "random_split": _leading,
    "bitcast_convert_type": _leading,
    "lu_pivots_to_permutation": _of_matrices(1),
} | dict.fromkeys(MATRIX_FUNCTIONS, _of_matrices(2))
