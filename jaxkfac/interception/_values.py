"""What the analysis knows of a value: constant, parameter seen through views, or data."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxkfac.interception._axes import Atoms, Axes
from jaxkfac.interception._index import Index, Join, Range


@dataclasses.dataclass(frozen=True)
class Constant:
    """Depends on neither parameters nor data.

    Attributes:
        number: Value number.
        mask: Whether every element is known to be 0 or 1.
    """

    number: int
    mask: bool = False


class Consumed(NamedTuple):
    """A stacked axis: its size, its atoms, and the scan or dynamic index that takes its entries."""

    size: int
    atoms: Atoms
    traced_index: tuple[str, int]


class Picked(NamedTuple):
    """An axis of a parameter of which each row of data picks its own entry.

    Attributes:
        axis: The parameter's axis.
        rows: The axes of the indices, which the view has in its place.
        indices: Value number of the indices.
        where: The lookup.
    """

    axis: Atoms
    rows: Axes
    indices: int
    where: Hashable


@dataclasses.dataclass(frozen=True)
class View:
    """A parameter seen through views that select, rename or scale its elements, or a function.

    Attributes:
        number: Value number; equal numbers are equal values.
        path: The parameter.
        index: Static index into its leading axes: a number, or a range of them.
        axes: One entry per axis in atoms of the parameter, or ``None`` where the view
            cannot be followed axis by axis (strides, a constant gather): such a view can
            still be a bias or a scale, but not a matrix.
        origin: The parameter's own axes; of a range, the range.
        uncut: The parameter's own axes, whatever range of them is seen.
        consumed: Stacked axes used up so far, outermost first: scan iterations and
            dynamic indices.
        scaled: Value numbers of the constants it was multiplied by.
        reversed: Atoms along which it is seen back to front.
        masked: The primitive that set some of its elements to constants, if one did: what is left
            of them is a matrix all the same.
        lost_by: The primitive behind which the axes can no longer be followed.
        function: The first primitive that made it a function of the parameter's elements, one by
            one, and no multiple of them (``exp``, a product of two parameters); it is no matrix
            of the parameter then.
        joins: The axes along which it is a part of the value only.
        members: Where it is one iteration's of a stack of parameters: each of them, in the order
            of the iterations. The view itself is the first one's.
        stacked_for: The scan over that stack.
        elements: Two views of a parameter with one number hold its elements in one arrangement.
        chosen: Of each choice of some rows (a cond under ``vmap``): for each axis that was
            broadcast to those rows, its atoms, and those of the choice.
        rowless: The primitive in which data without the example axis multiplied or shifted it.
        picked: The lookup behind which each row sees its own entry of one axis.
        computed_from: Where it is no parameter but a weight computed from some: their paths.
        looked_up: The lookup by constants that it came through, which may hold the examples' axis.
    """

    number: int
    path: str
    origin: Axes
    axes: Axes | None
    index: Index = ()
    consumed: tuple["Consumed", ...] = ()
    scaled: tuple[int, ...] = ()
    reversed: Atoms = ()
    lost_by: str = ""
    function: str = ""
    masked: str = ""
    joins: tuple[Join, ...] = ()
    members: tuple["View", ...] = ()
    stacked_for: int = 0
    elements: int = 0
    chosen: tuple[tuple[tuple[Atoms, Atoms], ...], ...] = ()
    rowless: str = ""
    picked: Picked | None = None
    uncut: Axes = ()
    computed_from: tuple[str, ...] = ()
    looked_up: Hashable = None

    @property
    def traced_indices(self) -> tuple[tuple[str, int], ...]:
        """What takes an entry of each stack, outermost first: scans and dynamic indices."""
        stacked = (("scan", self.stacked_for),) if self.members else ()
        return (*stacked, *(c.traced_index for c in self.consumed))

    @property
    def own(self) -> Axes:
        """The axes of the parameter that the static index leaves."""
        kept = [i for i, at in enumerate(self.index) if isinstance(at, Range)]
        return tuple(self.origin[i] for i in (*kept, *range(len(self.index), len(self.origin))))


@dataclasses.dataclass(frozen=True)
class Combined:
    """Parameters that meet one another, element by element or side by side, before data.

    Attributes:
        number: Value number.
        views: Each of them, as a view of the shape of this value.
        reasons: As in ``Derived``, of the parameters that are in it but are not seen in it.
        traced_indices: As in ``Derived``, of these.
    """

    number: int
    views: tuple[View, ...]
    reasons: tuple[tuple[str, str], ...] = ()
    traced_indices: frozenset[tuple[str, int]] = frozenset()


@dataclasses.dataclass(frozen=True)
class Derived:
    """Depends on parameters alone, but is no view of one of them.

    Attributes:
        number: Value number.
        reasons: ``(parameter path, what it went through first)``, in words.
        traced_indices: The scans over, and the dynamic indices into, stacks of these
            parameters, or of itself.
    """

    number: int
    reasons: tuple[tuple[str, str], ...]
    traced_indices: frozenset[tuple[str, int]] = frozenset()

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(path for path, _ in self.reasons)


Parameter = View | Combined | Derived


def traced_indices_in(values: Sequence[object]) -> frozenset[tuple[str, int]]:
    """The scans over, and dynamic indices into, stacks of the parameters in some values."""
    found: set[tuple[str, int]] = set()
    for value in values:
        found.update(i for view in views_in(value) for i in view.traced_indices)
        if isinstance(value, Combined | Derived):
            found |= value.traced_indices
    return frozenset(found)


def views_in(value: object) -> tuple[View, ...]:
    """The parameters that are seen in a value."""
    if isinstance(value, Combined):
        return value.views
    return (value,) if isinstance(value, View) else ()


@dataclasses.dataclass(frozen=True)
class CoverageNote:
    """Something the coverage report says of a parameter beside its uses."""

    path: str
    reason: str
    fatal: bool
