"""What the analysis records about a value that does not depend on data."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jaxkfac.interception.values._axes import Atoms, Axes
from jaxkfac.interception.values._index import Index, Join, Range


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that depends on neither parameters nor data.

    Attributes:
        number: Value number.
        mask: Whether every element is known to be 0 or 1.
    """

    number: int
    mask: bool = False


class Consumed(NamedTuple):
    """A stacked axis: its size, its atoms, and the scan or dynamic index that selects an entry."""

    size: int
    atoms: Atoms
    traced_index: tuple[str, int]


class Picked(NamedTuple):
    """An axis of a parameter along which each row of data picks an entry.

    Attributes:
        axis: The parameter's axis.
        rows: The axes of the indices; in the view they replace ``axis``.
        indices: Value number of the indices.
        where: The lookup equation.
    """

    axis: Atoms
    rows: Axes
    indices: int
    where: Hashable


class ViewSource(NamedTuple):
    """The entries of a parameter that a view reads.

    Attributes:
        path: The parameter.
        origin: The parameter's own axes; if the view sees a range of an axis, the range.
        uncut: The parameter's own axes in full, whatever range the view sees.
        index: Static index into its leading axes: a number, or a range of them.
        consumed: Stacked axes used up so far, outermost first: scan iterations and
            dynamic indices.
        members: If the view is one iteration's entry of a stack of parameters, the views of all of
            these parameters in the order of the iterations. The rest is that of the first.
        stacked_for: The scan over that stack.
        computed_from: For a weight that is computed from parameters, the paths of these.
    """

    path: str
    origin: Axes
    uncut: Axes
    index: Index = ()
    consumed: tuple[Consumed, ...] = ()
    members: tuple["View", ...] = ()
    stacked_for: int = 0
    computed_from: tuple[str, ...] = ()

    @property
    def traced_indices(self) -> tuple[tuple[str, int], ...]:
        """The scans and dynamic indices that select an entry of each stack, outermost first."""
        stacked = (("scan", self.stacked_for),) if self.members else ()
        return (*stacked, *(c.traced_index for c in self.consumed))

    @property
    def remaining_axes(self) -> Axes:
        """The axes of the parameter that remain behind the static index."""
        range_axes = [i for i, at in enumerate(self.index) if isinstance(at, Range)]
        return tuple(
            self.origin[i] for i in (*range_axes, *range(len(self.index), len(self.origin)))
        )


class ViewHistory(NamedTuple):
    """What a parameter went through on the way to a view of it.

    Attributes:
        scaled: Value numbers of the products with constants that it went through.
        reversed: Atoms along which it is read back to front.
        masked: The primitive that set some elements to constants, if one did. The remaining
            elements still form a matrix.
        function: The first primitive that made the value a function of the parameter's elements,
            one by one, that is no multiple of them (``exp``, a product of two parameters). The
            value is then no matrix of the parameter.
        phase: For a complex value, the number of absolute value 1 that multiplies the parameter:
            ``1j`` for an imaginary part.
        lost_by: The primitive behind which the axes can no longer be followed.
        rowless: The primitive in which data without the example axis multiplied or shifted it.
        looked_up: The lookup by constants that it came through, which may hold the example axis.
    """

    scaled: tuple[int, ...] = ()
    reversed: Atoms = ()
    masked: str = ""
    function: str = ""
    phase: complex = 1 + 0j
    lost_by: str = ""
    rowless: str = ""
    looked_up: Hashable = None


@dataclasses.dataclass(frozen=True)
class View:
    """A parameter seen through views, or an elementwise function of it.

    Attributes:
        number: Value number; equal numbers are equal values.
        arrangement: Number of the arrangement of the elements: two views of a parameter with equal
            numbers hold its elements in the same places.
        source: The entries of the parameter.
        axes: One entry per axis in atoms of the parameter, or ``None`` where the view
            cannot be followed axis by axis (strides, a constant gather): such a view can
            still be a bias or a scale, but not a matrix.
        joins: The axes along which the parameter is only a part of the value.
        chosen: For each choice of some rows (a cond under ``vmap``), for each axis that was
            broadcast to those rows: its atoms, and the atoms of the choice.
        picked: The lookup behind which each row reads its own entry of one axis.
        history: What the parameter went through.
    """

    number: int
    arrangement: int
    source: ViewSource
    axes: Axes | None
    joins: tuple[Join, ...] = ()
    chosen: tuple[tuple[tuple[Atoms, Atoms], ...], ...] = ()
    picked: Picked | None = None
    history: ViewHistory = dataclasses.field(default=ViewHistory())


def went_through(view: View, **changes: Any) -> View:
    """The view with entries of its history changed."""
    return dataclasses.replace(view, history=view.history._replace(**changes))


@dataclasses.dataclass(frozen=True)
class Combined:
    """Parameters that meet one another, element by element or side by side, before data.

    Attributes:
        number: Value number.
        views: Each of them, as a view with the shape of this value.
        reasons: As in ``Derived``, for parameters that the value depends on without being a view of
            them.
        traced_indices: As in ``Derived``, for those parameters.
    """

    number: int
    views: tuple[View, ...]
    reasons: tuple[tuple[str, str], ...] = ()
    traced_indices: frozenset[tuple[str, int]] = frozenset()


@dataclasses.dataclass(frozen=True)
class Derived:
    """A value that depends on parameters alone, but is no view of one of them.

    Attributes:
        number: Value number.
        reasons: Pairs of a parameter's path and what it went through first, in words.
        traced_indices: The scans over, and the dynamic indices into, stacks of these parameters or
            of this value.
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
    traced_indices: set[tuple[str, int]] = set()
    for value in values:
        traced_indices.update(i for view in views_in(value) for i in view.source.traced_indices)
        if isinstance(value, Combined | Derived):
            traced_indices |= value.traced_indices
    return frozenset(traced_indices)


def views_in(value: object) -> tuple[View, ...]:
    """The views of parameters in a value."""
    if isinstance(value, Combined):
        return value.views
    return (value,) if isinstance(value, View) else ()


@dataclasses.dataclass(frozen=True)
class CoverageNote:
    """A remark of the coverage report about a parameter, besides its uses."""

    path: str
    reason: str
    fatal: bool
