"""Axis identities: which axis of an inner value is which axis of an argument."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jaxkfac._jaxpr_compat import Eqn, read_order

# ---------------- axis atoms
#
# Every axis of every value is a tuple of *atoms*. An atom stands for one set of indices. A
# union-find merges atoms that the program uses as one (``x + y`` makes their axes the same), and a
# reshape splits an atom in two where a boundary falls inside it. Axes of size one have no atoms.
# Equal sizes alone prove nothing: an unknown primitive makes fresh atoms, and a fresh atom is no
# example axis.


Atoms = tuple[int, ...]
Axes = tuple[Atoms, ...]
AxisKind = Literal["data", "derived", "feature", "parameter", "broadcast"]

ELEMENTWISE = frozenset(
    "add sub mul div max min pow integer_pow exp exp2 log log1p expm1 tanh logistic sin cos "
    "tan asin acos atan sinh cosh asinh acosh atanh sqrt rsqrt cbrt neg abs sign square erf "
    "erfc erf_inv lgamma digamma convert_element_type copy copy_p stop_gradient select_n eq "
    "ne lt le gt ge and or not xor floor ceil round is_finite clamp name add_any rem "
    "nextafter atan2 reduce_precision pvary pcast sharding_constraint reshard "
    "cumsum cumprod cummax cummin cumlogsumexp optimization_barrier population_count real "
    "imag conj jaxkfac_mark_outputs shift_left shift_right_logical shift_right_arithmetic".split()
)
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split()
)
MATRIX_FUNCTIONS = frozenset(  # of each matrix of a stack
    "cholesky eigh eig lu qr geqrf svd schur hessenberg tridiagonal householder_product".split()
)


class UseAxes(NamedTuple):
    """The axes of a use, each in atoms.

    Attributes:
        inputs: The parameter's contracted axes, in the equation's order.
        outputs: Its free axes, in the equation's order.
        stack: Its axes that are shared with the data (experts, feature groups).
        rows: Axes of the data operand that are neither contracted nor shared.
        result: Axes of the result, for a scale or bias.
        free_stack: Whether the first output axis is read as a stack of experts.
    """

    inputs: Axes = ()
    outputs: Axes = ()
    stack: Axes = ()
    rows: Axes = ()
    result: Axes = ()
    free_stack: bool = False


class AxisTable:
    """Union-find over axis atoms, with splits.

    Attributes:
        views: Atoms that number equal views of the same rows, concatenated along one axis.
    """

    def __init__(self) -> None:
        self.views: set[int] = set()
        self._parent: list[int] = []
        self._size: list[int] = []
        self._kinds: list[set[AxisKind]] = []
        self._split: dict[int, Atoms] = {}
        self._ranges: dict[tuple[Atoms, int, int], Atoms] = {}

    def new(self, size: int, kind: AxisKind) -> Atoms:
        """A fresh axis; no atoms if its size is one."""
        if size == 1:
            return ()
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._kinds.append({kind})
        return (len(self._parent) - 1,)

    def range_of(self, axis: Atoms, start: int, stop: int) -> Atoms:
        """A run of the indices of a parameter's axis; equal runs have equal atoms."""
        key = (self.atoms(axis), start, stop)
        if key not in self._ranges:
            self._ranges[key] = self.new(stop - start, "parameter")
        return self._ranges[key]

    def size(self, atom: int) -> int:
        return self._size[self._find(atom)]

    def kinds(self, atom: int) -> set[AxisKind]:
        return self._kinds[self._find(atom)]

    def _find(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def atoms(self, axis: Atoms) -> Atoms:
        """The axis in current atoms, after all merges and splits so far."""
        out: list[int] = []
        for atom in axis:
            atom = self._find(atom)
            out += self.atoms(self._split[atom]) if atom in self._split else [atom]
        return tuple(out)

    def unify(self, x: Atoms, y: Atoms) -> None:
        """Declare two axes to be the same set of indices, if their sizes agree."""
        left_atoms, right_atoms = list(self.atoms(x)), list(self.atoms(y))
        if math.prod(map(self.size, left_atoms)) != math.prod(map(self.size, right_atoms)):
            return  # one of them broadcasts
        while left_atoms and right_atoms:
            a, b = self._find(left_atoms.pop(0)), self._find(right_atoms.pop(0))
            if a == b:
                continue
            if self._size[a] == self._size[b]:
                self._parent[a] = b
                self._kinds[b] |= self._kinds[a]
            elif self._size[a] > self._size[b] and self._size[a] % self._size[b] == 0:
                left_atoms[:0] = self._divide(a, b)
            elif self._size[b] % self._size[a] == 0:
                right_atoms[:0] = self._divide(b, a)
            else:
                return

    def _divide(self, big: int, first: int) -> Atoms:
        remaining = self.new(self._size[big] // self._size[first], _any(self._kinds[big]))
        self._split[big] = (first, *remaining)
        return remaining

    def regroup(self, axes: Sequence[Atoms], sizes: Sequence[int]) -> list[Atoms] | None:
        """Axes of a reshape to ``sizes``; ``None`` if the boundaries do not divide."""
        flat = [a for axis in axes for a in self.atoms(axis)]
        out = []
        for size in sizes:
            group, have = [], 1
            while have < size:
                if not flat:
                    return None
                atom = flat.pop(0)
                if size % (have * self._size[atom]) == 0:
                    group.append(atom)
                    have *= self._size[atom]
                elif self._size[atom] % (size // have) == 0:
                    kind = _any(self._kinds[atom])
                    here = self.new(size // have, kind)
                    remaining = self.new(self._size[atom] // (size // have), kind)
                    self._split[atom] = (*here, *remaining)
                    group += here
                    have = size
                    flat[:0] = remaining
                else:
                    return None
            out.append(tuple(group))
        return out


def _any(kinds: set[AxisKind]) -> AxisKind:
    return min(kinds)  # the order of a set of strings differs between processes


# ---------------- propagation: the axes of results from the axes of data operands
#
# Only axes of values that depend on data propagate. If those of parameters and constants did, a
# mask of shape ``(S, S)`` would make query and key positions the same axis.


def fresh(table: AxisTable, shape: Sequence[int], kind: AxisKind = "derived") -> Axes:
    return tuple(table.new(size, kind) for size in shape)


def merge(table: AxisTable, axes: Sequence[Axes | None], shape: Sequence[int]) -> Axes:
    """Axes of values combined element by element; axes of size one broadcast."""
    out: list[Atoms | None] = [None] * len(shape)
    for operand in axes:
        if operand is None or len(operand) != len(shape):
            continue
        for d, axis in enumerate(operand):
            if axis == () and shape[d] != 1:
                continue  # size one broadcasts: it says nothing about the other operands' axis
            if out[d] is None:
                out[d] = axis
            else:
                table.unify(out[d], axis)  # type: ignore[arg-type]
    return tuple(
        table.new(s, "feature") if a is None else a for a, s in zip(out, shape, strict=True)
    )


def propagate(table: AxisTable, eqn: Eqn, ins: Sequence[Axes | None]) -> list[Axes]:
    """Axes of each result of a first-order equation; ``None`` stands for operands without data."""
    name, shapes = eqn.primitive.name, _result_shapes(eqn)
    if name == "optimization_barrier":
        return [
            fresh(table, s, "feature") if i is None else i for i, s in zip(ins, shapes, strict=True)
        ]
    if name in ELEMENTWISE:
        return [merge(table, ins, shape) for shape in shapes]
    if name in _OF_ALL:
        return _OF_ALL[name](table, eqn, ins)
    rule = _reduce if name in REDUCTIONS else _OF_FIRST.get(name)
    if rule is None or ins[0] is None:
        return [fresh(table, shape) for shape in shapes]
    return rule(table, eqn, ins[0])


def _result_shapes(eqn: Eqn) -> list[tuple[int, ...]]:
    return [getattr(v.aval, "shape", ()) for v in eqn.outvars]


# ---------------------------------------------------------------- rules of the first operand


def _reduce(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    remaining = tuple(a for d, a in enumerate(axes) if d not in eqn.params["axes"])
    return [remaining for _ in eqn.outvars]


def _transpose(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    return [tuple(axes[d] for d in eqn.params["permutation"])]


def _squeeze(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    return [tuple(a for d, a in enumerate(axes) if d not in eqn.params["dimensions"])]


def _reshape(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    (shape,) = _result_shapes(eqn)
    out = table.regroup([axes[d] for d in read_order(eqn)], shape)
    return [fresh(table, shape) if out is None else tuple(out)]


def _broadcast(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    (shape,) = _result_shapes(eqn)
    source = dict(zip(eqn.params["broadcast_dimensions"], axes, strict=True))
    return [tuple(source.get(d) or table.new(s, "feature") for d, s in enumerate(shape))]


def tiled(table: AxisTable, eqn: Eqn, axes: Axes, kind: AxisKind) -> Axes:
    """Axes of an array put beside itself: entry ``i`` of copy ``k`` is at ``k * size + i``."""
    reps = zip(axes, map(int, eqn.params["reps"]), strict=True)
    return tuple((*table.new(copies, kind), *axis) for axis, copies in reps)


def _tile(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    return [tiled(table, eqn, axes, "feature")]


def _cut(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    """Slices keep the axes that they do not cut.

    A part of an axis is a new axis: its entry i is another entry, and a mask of the full axis says
    nothing about it. A reversed axis is a new axis too. One of several equal views that were
    concatenated is its own axis again.
    """
    before, (after,) = eqn.invars[0].aval.shape, _result_shapes(eqn)
    moved = set(eqn.params.get("dimensions", ()))  # those that `rev` turns
    # Padding at one end and negative padding at the other shift an axis, and keep its length.
    padding = eqn.params.get("padding_config", ())
    moved |= {d for d, (low, _, between) in enumerate(padding) if low or between}
    starts, strides = eqn.params.get("start_indices"), eqn.params.get("strides")

    def cut(d: int) -> Atoms:
        view = None
        if starts is not None and (strides is None or strides[d] == 1):
            view = _view(table, axes[d], starts[d], after[d])
        return table.new(after[d], "derived") if view is None else view

    return [
        tuple(
            a if s == t and d not in moved else cut(d)
            for d, (a, s, t) in enumerate(zip(axes, before, after, strict=True))
        )
    ]


def _view(table: AxisTable, axis: Atoms, start: int, size: int) -> Atoms | None:
    """The rows behind one of several equal views that were concatenated, or ``None``.

    An axis that a reshape split is excluded, because a mask may say which of its blocks exist.
    """
    first, *rows = table.atoms(axis) or (-1,)
    if first not in table.views or math.prod(map(table.size, rows)) != size or start % size:
        return None
    return tuple(rows)


def _of_rows(table: AxisTable, atoms: Atoms) -> bool:
    """Whether an axis may hold examples or positions, but no features."""
    return bool(atoms) and all(table.kinds(a) <= {"data", "derived"} for a in atoms)


def _split(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    axis = eqn.params["axis"]
    kinds = {k for a in table.atoms(axes[axis]) for k in table.kinds(a)}
    # A part of features is features; a part of anything else might hold the examples.
    kind = "feature" if "feature" in kinds else "derived"
    out, start = [], 0
    for shape in _result_shapes(eqn):
        view = _view(table, axes[axis], start, shape[axis])
        new_axis = table.new(shape[axis], kind) if view is None else view
        out.append((*axes[:axis], new_axis, *axes[axis + 1 :]))
        start += shape[axis]
    return out


def _unstack(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    axis = eqn.params["axis"]
    return [(*axes[:axis], *axes[axis + 1 :])] * len(eqn.outvars)


def _convolution(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    """Keeps the example axis; positions and channels are new."""
    (shape,), numbers = _result_shapes(eqn), eqn.params["dimension_numbers"]
    out = [table.new(s, "derived") for s in shape]
    if eqn.params["batch_group_count"] == 1:
        out[numbers.out_spec[0]] = axes[numbers.lhs_spec[0]]
    out[numbers.out_spec[1]] = table.new(shape[numbers.out_spec[1]], "feature")
    return [tuple(out)]


def _windows(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    before, (after,) = eqn.invars[0].aval.shape, _result_shapes(eqn)
    windows = eqn.params["window_dimensions"]
    return [
        tuple(
            a if w == 1 and s == t else table.new(t, "derived")
            for a, w, s, t in zip(axes, windows, before, after, strict=True)
        )
    ]


def _top_k(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    along = eqn.params.get("axis", len(axes) - 1) % len(axes)
    return [
        (*axes[:along], table.new(s[along], "derived"), *axes[along + 1 :])
        for s in _result_shapes(eqn)
    ]


def _of_matrices(core: int) -> Callable[[AxisTable, Eqn, Axes], list[Axes]]:
    """The rule of a function of each matrix, or vector, of a stack: the stack stays."""

    def rule(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
        stack = axes[: len(axes) - core]
        return [
            (*stack, *fresh(table, shape[len(stack) :], "derived")) for shape in _result_shapes(eqn)
        ]

    return rule


def _fft(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    """The transformed axes are the last ones; the others stay."""
    return _of_matrices(len(eqn.params["fft_lengths"]))(table, eqn, axes)


def _scatter(table: AxisTable, eqn: Eqn, axes: Axes) -> list[Axes]:
    return [axes]


# ---------------------------------------------------------------- rules of all operands


def _dot(table: AxisTable, eqn: Eqn, ins: Sequence[Axes | None]) -> list[Axes]:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    left_axes, right_axes = ins
    if left_axes is not None and right_axes is not None:
        for i, j in zip((*lb, *lc), (*rb, *rc), strict=True):
            table.unify(left_axes[i], right_axes[j])
    out: list[Atoms] = []
    if left_axes is not None:
        out += [left_axes[i] for i in lb]
    elif right_axes is not None:
        out += [right_axes[j] for j in rb]
    for axes, var, used in (
        (left_axes, eqn.invars[0], (*lc, *lb)),
        (right_axes, eqn.invars[1], (*rc, *rb)),
    ):
        for d, size in enumerate(var.aval.shape):
            if d not in used:
                out.append(axes[d] if axes is not None else table.new(size, "feature"))
    return [tuple(out)]


def _triangular_solve(table: AxisTable, eqn: Eqn, ins: Sequence[Axes | None]) -> list[Axes]:
    (shape,), columns = _result_shapes(eqn), ins[1]
    stack = merge(table, [None if axes is None else axes[:-2] for axes in ins], shape[:-2])
    out = [*stack, *fresh(table, shape[-2:], "derived")]
    if columns is not None:  # each column is solved by itself
        column = len(out) - (1 if eqn.params["left_side"] else 2)
        out[column] = columns[column]
    return [tuple(out)]


def _gather(table: AxisTable, eqn: Eqn, ins: Sequence[Axes | None]) -> list[Axes]:
    (shape,), (operand, indices) = _result_shapes(eqn), ins
    if operand is not None or indices is None:
        return [fresh(table, shape)]
    offset, rows = eqn.params["dimension_numbers"].offset_dims, iter(indices[:-1])
    return [
        tuple(table.new(s, "feature") if d in offset else next(rows) for d, s in enumerate(shape))
    ]


def _concatenate(table: AxisTable, eqn: Eqn, ins: Sequence[Axes | None]) -> list[Axes]:
    (shape,), axis = _result_shapes(eqn), eqn.params["dimension"]
    without = [None if i is None else (*i[:axis], (), *i[axis + 1 :]) for i in ins]
    out = merge(table, without, (*shape[:axis], 1, *shape[axis + 1 :]))
    axes_joined = {() if i is None else table.atoms(i[axis]) for i in ins}
    along = table.new(shape[axis], "derived")
    if len(axes_joined) == 1 and len(ins) > 1 and _of_rows(table, (rows := axes_joined.pop())):
        number = table.new(len(ins), "derived")
        table.views.update(number)
        along = (*number, *rows)
    return [(*out[:axis], along, *out[axis + 1 :])]


def _stack(table: AxisTable, eqn: Eqn, ins: Sequence[Axes | None]) -> list[Axes]:
    (shape,), axis = _result_shapes(eqn), eqn.params["axis"]
    out = merge(table, ins, (*shape[:axis], *shape[axis + 1 :]))
    return [(*out[:axis], table.new(shape[axis], "derived"), *out[axis:])]


def _sort(table: AxisTable, eqn: Eqn, ins: Sequence[Axes | None]) -> list[Axes]:
    shapes, axis = _result_shapes(eqn), eqn.params["dimension"]
    merged = merge(table, ins, shapes[0])
    # Along the sorted axis the order depends on the keys, so it is a new axis.
    one = (*merged[:axis], table.new(shapes[0][axis], "derived"), *merged[axis + 1 :])
    return [one] * len(shapes)


_OF_FIRST: dict[str, Callable[[AxisTable, Eqn, Axes], list[Axes]]] = {
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter-add": _scatter,
    "scatter_mul": _scatter,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "tile": _tile,
    "slice": _cut,
    "dynamic_slice": _cut,
    "pad": _cut,
    "rev": _cut,
    "dynamic_update_slice": _cut,
    "split": _split,
    "unstack": _unstack,
    "conv_general_dilated": _convolution,
    "reduce_window_sum": _windows,
    "reduce_window_max": _windows,
    "reduce_window_min": _windows,
    "top_k": _top_k,
    "fft": _fft,
    "lu_pivots_to_permutation": _of_matrices(1),
} | dict.fromkeys(MATRIX_FUNCTIONS, _of_matrices(2))
_OF_ALL: dict[str, Callable[[AxisTable, Eqn, Sequence[Axes | None]], list[Axes]]] = {
    "dot_general": _dot,
    "gather": _gather,
    "concatenate": _concatenate,
    "stack": _stack,
    "sort": _sort,
    "triangular_solve": _triangular_solve,
}
