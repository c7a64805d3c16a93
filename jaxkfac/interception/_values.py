"""What the analysis knows of a value: constant, parameter seen through views, or data."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxkfac.interception._axes import Atoms, Axes
from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._index import Index, Join, Range
from jaxkfac.interception._kind import Kind


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


@dataclasses.dataclass(frozen=True)
class Data:
    """Depends on data.

    Attributes:
        number: Value number.
        axes: One entry per axis, in atoms.
        product: The layer use of which this value is the product, seen through views that
            nothing else reads; a bias added to it is joined to that use.
        product_axes: Per axis, the atoms of the parameter's free axes, or ``None``.
        products: Where it depends on no other data: the products of constants and parameters that
            it comes from (see ``_constant_rows``).
    """

    number: int
    axes: Axes
    product: "Use | None" = None
    product_axes: tuple[Atoms | None, ...] = ()
    products: frozenset[Hashable] = frozenset()


Parameter = View | Combined | Derived
Value = Constant | Parameter | Data


def traced_indices_in(values: Sequence[Value]) -> frozenset[tuple[str, int]]:
    """The scans over, and dynamic indices into, stacks of the parameters in some values."""
    found: set[tuple[str, int]] = set()
    for value in values:
        found.update(i for view in views_in(value) for i in view.traced_indices)
        if isinstance(value, Combined | Derived):
            found |= value.traced_indices
    return frozenset(found)


def views_in(value: Value) -> tuple[View, ...]:
    """The parameters that are seen in a value."""
    if isinstance(value, Combined):
        return value.views
    return (value,) if isinstance(value, View) else ()


@dataclasses.dataclass(eq=False)
class Use:
    """One equation in which a parameter meets data by a rule.

    Attributes:
        kind: The kind of layer.
        eqn: The equation.
        operand: Position of the parameter among the operands.
        view: The parameter's view there.
        scope: Identities of the scans and branches around it, outermost first.
        in_axes: Atoms of the contracted axes, in the equation's order.
        out_axes: Atoms of the free axes, in the equation's order.
        batch_axes: Atoms of the axes shared with the data (experts, feature groups).
        rows: Atoms of the data operand's axes that are neither contracted nor shared.
        result: Atoms of the result's axes, for a scale or bias.
        data: The data operand, if there is one.
        from_constant: Whether that operand is a constant (the zeros that a recurrent state
            starts from), whose rows the program joins with those of data only later.
        whole_examples: Of an elementwise use: whether its gradient has to be summed over an example
            before it is squared, because it is a sum at every row already.
        features: Of an elementwise use: the axes of the result that are features (of logits the
            classes); where it has no elements of its own along them, its gradient is summed
            before it is squared.
        parts: Where the parameter is a part of an array: the uses of all its parts.
        join: For a bias: the product it is added to, if nothing else reads that product.
        layer: Name of the layer this use belongs to, or ``None`` while it is not tapped.
        layers: Names of all of them, where each iteration's is another layer; ``None`` where it
            is none that is tapped. A parameter that is the whole tree has the name ``""``.
        free_stack: Whether its first free axis is read as a stack of experts.
        row_batch: Of a dense layer: which pairs of shared axes are rows, the parameter having
            been broadcast along them.
        row_axes: Of kernels gathered by row: which of their axes are rows.
        groups: Of a convolution: the sizes of ``batch_axes``.
        reversed: Of a convolution: for each of its spatial axes, whether the kernel is seen
            back to front along it.
        where: The equation and the calls around it; the same in every analysis of one program.
    """

    kind: Kind
    eqn: Eqn
    operand: int
    view: View
    scope: tuple[int, ...]
    in_axes: Axes = ()
    out_axes: Axes = ()
    batch_axes: Axes = ()
    rows: Axes = ()
    result: Axes = ()
    data: Data | None = None
    from_constant: bool = False
    whole_examples: bool = False
    features: tuple[int, ...] = ()
    parts: Sequence["Use"] = ()
    join: "Use | None" = None
    layer: str | None = None
    layers: tuple[str | None, ...] = ()
    free_stack: bool = False
    row_batch: tuple[int, ...] = ()
    row_axes: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    reversed: tuple[bool, ...] = ()
    where: Hashable = None


@dataclasses.dataclass(frozen=True)
class CoverageNote:
    """Something the coverage report says of a parameter beside its uses."""

    path: str
    reason: str
    fatal: bool
