"""The interface of a kind of layer, the records that it is given, and the registry of kinds.

The analysis of a program asks the kind that reads a primitive whether an equation is a use of it.
The code that gathers statistics asks the kind of a use for its rows. A kind is therefore one
class, and the rest of the library knows it only through this interface. The kinds themselves are
in ``jaxkfac.kinds``. The records are defined here because they and ``Kind`` name one another.
"""

import abc
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from jaxtyping import Array, Bool, Float, Key, Shaped

from jaxkfac._jaxpr_compat import LAYER, Eqn
from jaxkfac.interception.values._axes import Atoms, Axes, AxisTable, UseAxes
from jaxkfac.interception.values._encoded import bind
from jaxkfac.interception.values._slots import Slot
from jaxkfac.interception.values._values import Constant, Parameter, View


@dataclasses.dataclass(frozen=True)
class Data:
    """A value that depends on data.

    Attributes:
        number: Value number.
        axes: One entry per axis, in atoms.
        product: The layer uses whose product this value is, seen through views that nothing else
            reads; one for each parameter in the operand. A bias that is added to it is joined to
            one of them.
        product_axes: For each axis, the atoms of the parameter's free axes, or ``None``.
        products: If the value depends on no other data, the products of constants and parameters
            that it comes from (see ``_constant_rows``).
        constant: Whether it is a constant that is read as data, such as the zeros from which a
            recurrent state starts; the program joins its rows with those of data only later.
    """

    number: int
    axes: Axes
    product: "tuple[Use, ...]" = ()
    product_axes: tuple[Atoms | None, ...] = ()
    products: frozenset[Hashable] = frozenset()
    constant: bool = False


Value = Constant | Parameter | Data


class Scope(NamedTuple):
    """Where an equation is in the program.

    Attributes:
        scans: Identities of the enclosing scans and branches, outermost first.
        where: The equation and the calls around it; equal in every analysis of one program.
    """

    scans: tuple[int, ...]
    where: Hashable


class UseSite(NamedTuple):
    """The operand of an equation that is a parameter.

    Attributes:
        eqn: The equation.
        operand: Position of the parameter among its operands.
        scope: Where the equation is.
    """

    eqn: Eqn
    operand: int
    scope: Scope


class ElementDetail(NamedTuple):
    """What only the uses of elementwise kinds have.

    Attributes:
        whole_examples: Whether the gradient must be summed over an example before it is squared,
            because the gradient at each row is already a sum.
        features: The axes of the result that are features (the classes, for logits). Where the
            parameter has no elements along them, its gradient is summed over them before it is
            squared.
        joint: For a bias, the product that it is added to, if nothing else reads that product.
    """

    whole_examples: bool = False
    features: tuple[int, ...] = ()
    joint: "Use | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """One equation in which a parameter meets data by a rule.

    Attributes:
        kind: The kind of layer.
        view: The parameter's view there.
        at: The equation, and which of its operands the parameter is.
        data: The data operand, if there is one.
        axes: The axes that it reads.
        elements: For an elementwise kind, how its elements meet data.
        detail: What the kind alone has to know of the equation, a record of its own.
        layers: Name of the layer that this use belongs to, or ``None`` if it is not tapped; if each
            iteration reads another layer, the names of all of them. A parameter that is the whole
            tree has the name ``""``.
    """

    kind: "Kind"
    view: View
    at: UseSite
    data: Data | None = None
    axes: UseAxes = dataclasses.field(default=UseAxes())
    elements: ElementDetail = dataclasses.field(default=ElementDetail())
    detail: Any = None
    layers: tuple[str | None, ...] = ()

    @property
    def layer(self) -> str | None:
        """Name of the layer, or of the first one in a stack; ``None`` if none is tapped."""
        return next((name for name in self.layers if name is not None), None)


@dataclasses.dataclass(frozen=True)
class Site:
    """One equation handed to a handler, with the slots and masks of its layer uses.

    Attributes:
        uses: The uses in it that are tapped.
        slots: For each use, its slot.
        rows: For each use, which of its rows exist, or ``None`` if all do.
        active: For each use, whether its statistics are wanted, a scalar; ``None`` for always.
        table: The axis atoms.
    """

    eqn: Eqn
    uses: list[Use]
    slots: list[Slot]
    rows: list[Bool[Array, "..."] | Float[Array, "..."] | None]
    active: list[Bool[Array, ""] | None]
    table: AxisTable

    def without_values(self) -> "Site":
        """The site without arrays, for rules that must close over no tracer."""
        return dataclasses.replace(self, slots=[], rows=[], active=[])

    def bind(self, *operands: Any) -> Any:
        """Apply the original operation with all parameters of the equation."""
        return bind(self.eqn)(*operands[: len(self.eqn.invars)])


@dataclasses.dataclass(frozen=True)
class LayerVjp:
    """The vector-Jacobian product of one layer use: what its statistics are computed from.

    Attributes:
        site: The equation and the axis atoms, without arrays.
        use: The use of the layer in the equation.
        operands: The operands of the equation; for an insertion, the parameter alone. For a kind
            that reads ``picked`` entries, they end with the indices.
        cotangent: The cotangent of the result, with its shape; for an insertion, that of the
            parameter after it was broadcast.
        weights: Which rows exist, with the axes of ``use.axes.rows``; ``None`` if all do. For the
            moments of inputs these may be floating weights of rows.
        input_weights: Those weights, where positions have some; else ``None``.
        constants: Those of the slot.
        derivative: If the program reads a function of the parameter, the derivative of the operand
            with respect to the parameter, element by element.
        rows_key: A random key for rows that are drawn, if some are.
    """

    site: Site
    use: Use
    operands: Sequence[Any]
    cotangent: Shaped[Array, "..."]
    weights: Bool[Array, "..."] | Float[Array, "..."] | None = None
    input_weights: Float[Array, "..."] | None = None
    constants: Any = None
    derivative: Shaped[Array, "..."] | None = None
    rows_key: Key[Array, ""] | None = None

    @property
    def table(self) -> AxisTable:
        """The axis atoms."""
        return self.site.table

    @property
    def data(self) -> Shaped[Array, "..."]:
        """The operand that meets the parameter."""
        return self.operands[1 - self.use.at.operand]

    def masked_by(self, weights: Bool[Array, "..."] | Float[Array, "..."] | None) -> "LayerVjp":
        """The product with other rows left out; ``None`` for all rows, padding included."""
        return dataclasses.replace(self, weights=weights, input_weights=None)

    def with_input_weights(self) -> "LayerVjp":
        """The product for moments of inputs, where ``weights`` are those of positions, if any."""
        return self if self.input_weights is None else self.masked_by(self.input_weights)


@dataclasses.dataclass(frozen=True)
class Reads:
    """How a kind reads the operands of its equations; the defaults are those of a plain product.

    Attributes:
        encoded: Whether it accepts a parameter that is stored in another form than an array.
        complex: Whether it accepts data and cotangents that are complex.
        tokens: Whether the data is indices, as if each row were one-hot. The input side is then a
            diagonal, and its rows are positions with ``sharing="reduce"`` too.
        experts: Whether a free axis may be read as a stack of experts.
        picked: Whether each row picks its entry of the stack. The operands that a handler gets then
            end with the indices.
        contracts: For an elementwise kind, whether rows are summed over, so that none of their axes
            is an axis of the parameter.
        unless_matrix: The kind that applies instead if the parameter is no matrix.
        unless_one: The kind that applies instead if each row reads another entry of the parameter.
    """

    encoded: bool = False
    complex: bool = False
    tokens: bool = False
    experts: bool = False
    picked: bool = False
    contracts: bool = False
    unless_matrix: str | None = None
    unless_one: str | None = None


class Kind(abc.ABC):
    """A kind of layer: one operation in which a parameter meets data linearly.

    This is what the analysis of a program asks. How statistics are computed is the part of
    ``kinds.TwoSided`` and ``kinds.Elementwise``, of which each kind is one.

    Attributes:
        name: The name, as in ``Layer.kind``.
        primitives: The primitives that it reads; no other kind reads them. The calls of
            ``jk.layer("fourier", fn)`` are of the primitive ``layer:fourier``.
        suffix: The name of a further block of the same parameter, after ``@``.
        rank: If a parameter has several blocks, the block of the lowest rank answers for it.
        reads: How it reads the operands of its equations.
        elementwise: Whether each element of the parameter meets data by itself. The block is then
            a diagonal, or one dense matrix, and has no input side.
        inserts: Whether the parameter is placed beside data instead of multiplying it. One equation
            may then read several, and if the result is a scalar, it is a penalty.
        product: Whether the result is a product of rows. A bias may be joined to it, and its rows
            may be constants.
        covered: Whether its statistics are gathered in the gradient's backward pass.
    """

    name: ClassVar[str]
    primitives: ClassVar[frozenset[str]] = frozenset()
    suffix: ClassVar[str]
    rank: ClassVar[int] = 0
    reads: ClassVar[Reads] = Reads()
    elementwise: ClassVar[bool] = False
    inserts: ClassVar[bool] = False
    product: ClassVar[bool] = False
    covered: ClassVar[bool] = True

    @abc.abstractmethod
    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Value]) -> "Use | str":
        """The use of a parameter in an equation, or the reason in words why it is none.

        Args:
            table: The axis atoms.
            at: The equation, of one of the kind's primitives, and the position of the parameter.
            ins: The analysis' value of each operand; that of the parameter is a ``View``.
        """

    def result_axes(self, table: AxisTable, use: Use) -> Axes | None:
        """The axes of the result; ``None`` if the general rules for axes cover the primitive.

        If neither gives them, the result gets new axes, and layers after it have lost the example
        axis.
        """
        return None

    def with_result(self, use: Use, axes: Axes) -> Use:
        """The use, now that the axes of the result are known."""
        return use

    def contracted(self, use: Use) -> Axes:
        """The axes of the data operand that the product sums over; empty if it sums over none."""
        return ()

    def product_axes(self, use: Use, ndim: int) -> tuple[Atoms | None, ...] | None:
        """For each axis of a product, the parameter axis that it comes from, or ``None``."""
        return None

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        """How the equation reads its data operand; uses with equal answers share their inputs.

        Args:
            use: The use.
            place: Maps an axis to its positions in the parameter's own order.
        """
        raise NotImplementedError(f"{self.name!r} has no input side")

    def signature(self, use: Use) -> Hashable:
        """What else two uses of equal equations must have in common to share one program."""
        return ()


# Mutable, because importing the module that defines a kind registers it, as with JAX's registries
# of pytrees and primitives: users' modules register their kinds too. Nothing else writes to it.
_KINDS: dict[str, Kind] = {}
AnyKind = TypeVar("AnyKind", bound=Kind)


def register_kind(cls: type[AnyKind]) -> type[AnyKind]:
    """Register a kind of layer; a decorator of its class.

    Registering the same class again (a notebook cell that runs twice) replaces the first one.

    Raises:
        ValueError: another kind has its name, or reads one of its primitives.
    """
    for registered in _KINDS.values():
        if registered.name == cls.name:
            if _path(type(registered)) != _path(cls):
                raise ValueError(f"{cls.name!r} is the name of another kind of layer")
        elif both := registered.primitives & cls.primitives:
            names = ", ".join(f"`{name}`" for name in sorted(both))
            raise ValueError(
                f"{names} is read by the kind {registered.name!r}, not by {cls.name!r}"
            )
    _KINDS[cls.name] = cls()
    return cls


def _path(cls: type[Kind]) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def kind_named(name: str) -> Kind:
    """The kind called ``name``.

    Raises:
        ValueError: no kind has this name, for example because a saved layer has a kind whose
            module has not been imported.
    """
    if name not in _KINDS:
        raise ValueError(
            f"no kind of layer is called {name!r}, known are {sorted(_KINDS)}: import what "
            "registers it"
        )
    return _KINDS[name]


def kind_reading(primitive: str) -> Kind | None:
    """The kind that reads a primitive, or ``None``."""
    return next((kind for kind in _KINDS.values() if primitive in kind.primitives), None)


def kinds_of_layers() -> list[tuple[str, str]]:
    """The primitives of named layers that some kind reads, each with the kind's name."""
    every = ((name, kind.name) for kind in _KINDS.values() for name in kind.primitives)
    return sorted(pair for pair in every if pair[0].startswith(LAYER))
