"""What a kind of layer says of itself, and the kinds that are known.

The analysis of a program asks the kind that reads a primitive whether an equation is a use of it.
Whoever gathers statistics asks the kind of a use for its rows. So a kind is one class, and this
is all that the rest of the library knows of it. The kinds themselves are in ``jaxkfac.kinds``.
"""

import abc
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from jaxtyping import Array, Bool, Shaped

from jaxkfac.interception._axes import Atoms, Axes, AxisTable
from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._encoded import bind
from jaxkfac.interception._slots import Slot, SlotEntry
from jaxkfac.interception._values import Constant, Parameter, View

RowWeights = Bool[Array, "..."] | None  # which rows exist, with the axes of ``Use.rows``


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


Value = Constant | Parameter | Data


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

    kind: "Kind"
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
class Site:
    """One equation handed to a handler, and for each of its layer uses what belongs to it.

    Attributes:
        eqn: The equation.
        uses: Its uses that are tapped.
        slots: Their slots.
        rows: Which of their rows exist, or ``None``.
        active: Whether their statistics are wanted, a scalar, or ``None`` for always.
        table: The axis atoms.
    """

    eqn: Eqn
    uses: list[Use]
    slots: list[Slot]
    rows: list[Bool[Array, "..."] | None]
    active: list[Bool[Array, ""] | None]
    table: AxisTable

    def without_values(self) -> "Site":
        """The site without arrays, for rules that must close over no tracer."""
        return dataclasses.replace(self, slots=[], rows=[], active=[])

    def bind(self, *operands: Any) -> Any:
        """The original operation, every parameter of the equation kept."""
        return bind(self.eqn)(*operands[: len(self.eqn.invars)])


class Kind(abc.ABC):
    """A kind of layer: one operation in which a parameter meets data linearly.

    Attributes:
        name: As in ``Layer.kind``.
        primitives: The equations that it reads; no other kind reads them.
        entries: The entries of its slots; see ``SlotEntry``.
        rank: Which block answers for a parameter that has several: the lowest.
        suffix: What a further block of the same parameter is called, behind ``@``.
        elementwise: Whether each element of the parameter meets data by itself: the block is a
            diagonal, or one dense matrix, and has no input side.
        contracts: Of an elementwise kind: whether rows are summed over, so that none of their axes
            is the parameter's.
        unless_matrix: The kind of a parameter that is read like this and is no matrix.
        unless_one: The kind of a parameter that is read like this, each row another entry of it.
        picks: Whether each row picks its entry of the stack: behind the operands of the equation
            stand the indices then.
        inserts: Whether the parameter stands beside data rather than times it: several may in one
            equation, and where the result is a scalar it is a penalty.
        product: Whether its result is a product of rows: a bias may be joined to it, and its rows
            may be constants.
        diagonal_inputs: Whether the input side is a diagonal.
        by_position: Whether its rows are positions under either sharing.
        stacks_outputs: Whether a free axis may be read as a stack of experts.
        packs_inputs: Whether its input rows lie as a matrix, so that panels of their second
            moment can be gathered.
        reads_encoded: Whether it takes a parameter that is held in another form than an array.
        covered: Whether it is gathered in the gradient's backward pass.
    """

    name: ClassVar[str]
    primitives: ClassVar[frozenset[str]] = frozenset()
    entries: ClassVar[Mapping[str, SlotEntry]] = {}
    rank: ClassVar[int] = 0
    suffix: ClassVar[str]
    elementwise: ClassVar[bool] = False
    contracts: ClassVar[bool] = False
    unless_matrix: ClassVar[str | None] = None
    unless_one: ClassVar[str | None] = None
    picks: ClassVar[bool] = False
    inserts: ClassVar[bool] = False
    product: ClassVar[bool] = False
    diagonal_inputs: ClassVar[bool] = False
    by_position: ClassVar[bool] = False
    stacks_outputs: ClassVar[bool] = False
    packs_inputs: ClassVar[bool] = False
    reads_encoded: ClassVar[bool] = False
    covered: ClassVar[bool] = True

    # -- finding ----------------------------------------------------------------------

    @abc.abstractmethod
    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Value],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> "list[Use] | str":
        """The uses in an equation, or in words why there is none.

        Args:
            table: The axis atoms.
            eqn: An equation of one of its primitives.
            ins: What is known of the operands.
            positions: Which of them are views of parameters: one, unless the kind ``inserts``.
            scope: Identities of the scans around the equation.
        """

    def result_axes(self, table: AxisTable, use: Use) -> Axes | None:
        """The axes of the result; ``None`` where the rules of axes know the primitive.

        Without them the result has new axes, and layers behind it have lost their examples.
        """
        return None

    @abc.abstractmethod
    def place(self, use: Use, axes: Axes) -> None:
        """Take note of the axes of the result."""

    def contracted(self, use: Use) -> Axes:
        """The axes of the data operand that the product sums over; none where it has no such."""
        return ()

    def product_axes(self, use: Use, ndim: int) -> tuple[Atoms | None, ...] | None:
        """For each axis of a product, the parameter axis it comes from; ``None`` if it is none."""
        return None

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        """How the equation reads its data operand; uses that agree share their inputs.

        Args:
            use: The use.
            place: From an axis to its positions in the parameter's own order.
        """
        raise NotImplementedError(f"{self.name!r} has no input side")

    # -- statistics of one use, in its backward pass ----------------------------------

    def gradient(
        self, use: Use, operands: Sequence[Any], cotangent: Shaped[Array, "..."]
    ) -> Shaped[Array, "..."]:
        """Of an elementwise kind: the parameter's gradient at each position, before any sum."""
        raise NotImplementedError(f"{self.name!r} is not elementwise")

    def elements(
        self,
        site: Site,
        use: Use,
        like: Mapping[str, Any],
        operands: Sequence[Any],
        cotangent: Shaped[Array, "..."],
        weights: RowWeights,
        examples: Atoms,
        derivative: Shaped[Array, "..."] | None,
    ) -> dict[str, Any]:
        """Of an elementwise kind: the entries of its slot that are ``like`` these.

        Args:
            site: The site of the use.
            use: The use.
            like: Shapes and dtypes of the slot: squares and their counts, or sums by example.
            operands: Operands of the equation.
            cotangent: Of its result, in the dtype of the slot.
            weights: Which rows exist, with the axes of ``use.rows``.
            examples: The atoms of the example axis.
            derivative: Of the operand with respect to the parameter, element by element, where
                the program reads a function of it.
        """
        raise NotImplementedError(f"{self.name!r} is not elementwise")

    def input_rows(self, site: Site, use: Use, operands: Sequence[Any], weights: RowWeights) -> Any:
        """The rows that a use reads, as ``Rows``; those that ``weights`` leave out are zero."""
        raise NotImplementedError(f"{self.name!r} has no rows of inputs")

    def output_rows(
        self, site: Site, use: Use, cotangent: Shaped[Array, "..."], weights: RowWeights
    ) -> Any:
        """The cotangent of its result, likewise."""
        raise NotImplementedError(f"{self.name!r} has no rows of outputs")

    def outputs_of(
        self,
        site: Site,
        use: Use,
        operands: Sequence[Any],
        cotangent: Shaped[Array, "..."],
        weights: RowWeights,
    ) -> Any:
        """The same, where which rows there are is known from the operands alone."""
        return self.output_rows(site, use, cotangent, weights)

    def reached(self, site: Site, use: Use, operands: Sequence[Any]) -> Bool[Array, "..."] | None:
        """Which rows reach which entry of its stack, ``(stack, rows...)``; ``None``: all do.

        Those that do not are zero among the rows of that entry.
        """
        return None

    def summed_input_rows(
        self, site: Site, use: Use, operands: Sequence[Any], weights: RowWeights
    ) -> Any:
        """Rows for whoever wants their sums over positions only: those may be done already."""
        return self.input_rows(site, use, operands, weights)

    def input_moments(
        self,
        site: Site,
        use: Use,
        like: Mapping[str, Any],
        operands: Sequence[Any],
        weights: RowWeights,
        products: Any,
    ) -> dict[str, Any]:
        """The entries of the input side: ``a``, ``a_count`` and, where it is wanted, ``a_sum``.

        ``products`` says how Gram products are formed: ``kinds.Products``.
        """
        raise NotImplementedError(f"{self.name!r} has no input side")

    def second_moment(self, side: Any, precision: Any) -> Any:
        """Sum of outer products of ``Rows``, in a precision of ``jax.lax.dot_general``."""
        raise NotImplementedError(f"{self.name!r} has no rows")

    def both_sides(
        self,
        site: Site,
        use: Use,
        operands: Sequence[Any],
        cotangent: Shaped[Array, "..."],
        weights: RowWeights,
        examples: Atoms | None,
        like: Mapping[str, Any],
    ) -> Any:
        """Both sides of a use by example, with methods ``squares``, ``gradients`` and ``scores``.

        Args:
            site: The site of the use.
            use: The use.
            operands: Operands of the equation.
            cotangent: Of its result.
            weights: Which rows exist, with the axes of ``use.rows``.
            examples: The atoms of the example axis; ``None`` where examples need not be told
                apart.
            like: The slot, for the stack.

        Raises:
            LostRowsError: the rows cannot be told apart by example.
        """
        raise NotImplementedError(f"{self.name!r} has no two sides")


# Mutable, because a kind is known from where its class is defined: users' modules register theirs
# at import, as JAX's own registries of pytrees and primitives have it. Nothing else writes to it.
_KINDS: dict[str, Kind] = {}
AnyKind = TypeVar("AnyKind", bound=Kind)


def register_kind(cls: type[AnyKind]) -> type[AnyKind]:
    """Make a kind of layer known; a decorator of its class.

    The same class again (a cell of a notebook that is run twice) takes its own place.

    Raises:
        ValueError: another kind has its name, or reads one of its primitives.
    """
    for other in _KINDS.values():
        if other.name == cls.name:
            if _path(type(other)) != _path(cls):
                raise ValueError(f"{cls.name!r} is the name of another kind of layer")
        elif both := other.primitives & cls.primitives:
            names = ", ".join(f"`{name}`" for name in sorted(both))
            raise ValueError(f"{names} is read by the kind {other.name!r}, not by {cls.name!r}")
    _KINDS[cls.name] = cls()
    return cls


def _path(cls: type[Kind]) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def kind_named(name: str) -> Kind:
    """The kind called ``name``.

    Raises:
        ValueError: none is: a saved layer of a kind whose module has not been imported.
    """
    if name not in _KINDS:
        raise ValueError(
            f"no kind of layer is called {name!r}, known are {sorted(_KINDS)}: import what "
            "registers it"
        )
    return _KINDS[name]


def kind_reading(primitive: str) -> Kind | None:
    """The kind that reads an equation, if one does."""
    return next((kind for kind in _KINDS.values() if primitive in kind.primitives), None)
