"""The identity of axes: which axis of an inner value is which axis of an outer one.

Every axis of every value is a tuple of *atoms*. An atom stands for one set of indices; a
union-find merges atoms that the program uses as one (``x + y`` makes their axes the same),
and a reshape splits an atom in two where a boundary falls inside it. Axes of size one have
no atoms. Nothing is ever concluded from equal sizes alone: a primitive that is not known
here makes fresh atoms, and a fresh atom is nobody's example axis.
"""

import math
from collections.abc import Sequence
from typing import Literal

Atoms = tuple[int, ...]
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


class AxisTable:
    """Union-find over axis atoms, with splits.

    Attributes:
        views: Atoms that number equal views of the same rows, put side by side.
    """

    def __init__(self) -> None:
        self.views: set[int] = set()
        self._parent: list[int] = []
        self._size: list[int] = []
        self._kinds: list[set[AxisKind]] = []
        self._split: dict[int, Atoms] = {}
        self._parts: dict[tuple[Atoms, int, int], Atoms] = {}

    def new(self, size: int, kind: AxisKind) -> Atoms:
        """A fresh axis; no atoms if its size is one."""
        if size == 1:
            return ()
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._kinds.append({kind})
        return (len(self._parent) - 1,)

    def part(self, axis: Atoms, start: int, stop: int) -> Atoms:
        """A run of the indices of an axis of a parameter: the same atoms for the same run."""
        key = (self.atoms(axis), start, stop)
        if key not in self._parts:
            self._parts[key] = self.new(stop - start, "parameter")
        return self._parts[key]

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
        """The axis in today's atoms: merged and split as far as the program has gone."""
        out: list[int] = []
        for atom in axis:
            atom = self._find(atom)
            out += self.atoms(self._split[atom]) if atom in self._split else [atom]
        return tuple(out)

    def unify(self, x: Atoms, y: Atoms) -> None:
        """Declare two axes to be the same set of indices, if their sizes agree."""
        left, right = list(self.atoms(x)), list(self.atoms(y))
        if math.prod(map(self.size, left)) != math.prod(map(self.size, right)):
            return  # one of them broadcasts
        while left and right:
            a, b = self._find(left.pop(0)), self._find(right.pop(0))
            if a == b:
                continue
            if self._size[a] == self._size[b]:
                self._parent[a] = b
                self._kinds[b] |= self._kinds[a]
            elif self._size[a] > self._size[b] and self._size[a] % self._size[b] == 0:
                left[:0] = self._divide(a, b)
            elif self._size[b] % self._size[a] == 0:
                right[:0] = self._divide(b, a)
            else:
                return

    def _divide(self, big: int, first: int) -> Atoms:
        rest = self.new(self._size[big] // self._size[first], _any(self._kinds[big]))
        self._split[big] = (first, *rest)
        return rest

    def regroup(self, axes: Sequence[Atoms], sizes: Sequence[int]) -> list[Atoms] | None:
        """Axes of a reshape to ``sizes``; None where the boundaries do not divide."""
        flat = [a for axis in axes for a in self.atoms(axis)]
        out = []
        for size in sizes:
            taken, have = [], 1
            while have < size:
                if not flat:
                    return None
                atom = flat.pop(0)
                if size % (have * self._size[atom]) == 0:
                    taken.append(atom)
                    have *= self._size[atom]
                elif self._size[atom] % (size // have) == 0:
                    kind = _any(self._kinds[atom])
                    inner = self.new(size // have, kind)
                    outer = self.new(self._size[atom] // (size // have), kind)
                    self._split[atom] = (*inner, *outer)
                    taken += inner
                    have = size
                    flat[:0] = outer
                else:
                    return None
            out.append(tuple(taken))
        return out


def _any(kinds: set[AxisKind]) -> AxisKind:
    return min(kinds)
