"""A block-diagonal Kronecker matrix as a dictionary of sides: sums, spectra or inverses."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.interception import Layer
from jaxkfac.linalg import diagonal, fold_triangle, is_folded, unfolded, unfolded_size

if TYPE_CHECKING:
    from typing import Self

BiasMode = Literal["joint", "separate"]
PACKED_FROM = 64  # a smaller triangle saves too little to pay for folding it


class Place(NamedTuple):
    """Where a side stands in a matrix.

    Attributes:
        table: ``"a"`` or ``"g"``, ``"a_without_ones"`` for a second A of an input whose other
            readers have a bias, ``"biases"`` for a bias with a block of its own, or
            ``"diagonals"`` for a layer that has one diagonal instead of two sides.
        key: The input's name for an A that layers share, else the layer's name.
    """

    table: str
    key: str


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """One factor of a block.

    Attributes:
        data: ``(stack..., n, n)``, or the rectangle of a folded triangle; ``(stack..., n)`` for a
            diagonal; shaped like the parameter for a layer without a second side. A ``Spectrum`` in
            eigenbases.
        count: What the data is a sum over, ``(stack...)`` or a scalar; ``None`` for what is no sum.
        is_matrix: Whether the data is a symmetric matrix, in full or folded.
    """

    data: Any
    count: Any = None
    is_matrix: bool = False

    def with_data(self, data: Any) -> "Side":
        """The side with other data of the same meaning."""
        return Side(data, self.count, self.is_matrix)

    @property
    def size(self) -> int:
        """The size ``n`` of the matrix or of the diagonal."""
        return unfolded_size(self.data) if self.is_matrix else self.data.shape[-1]

    def map_stack(self, function: Callable[..., Any], *others: "Side") -> "Side":
        """A function of the arrays that run along the stack: data, and counts that have axes.

        A scalar count stays, because it counts for every entry.
        """
        data = jax.tree.map(function, self.data, *(x.data for x in others))
        if self.count is None or not self.count.ndim:
            return self.with_data(data)
        return Side(data, function(self.count, *(x.count for x in others)), self.is_matrix)

    # -- storage ----------------------------------------------------------------------------

    @property
    def is_packed(self) -> bool:
        """Whether one triangle stands for a matrix."""
        return self.is_matrix and is_folded(self.data)

    def packed(self, least: int | None = None) -> "Side":
        """The side with one triangle of a matrix of size ``least`` or more, by default 64."""
        least = PACKED_FROM if least is None else least
        if not self.is_matrix or self.is_packed or self.size < least:
            return self
        return self.with_data(on_shapes(fold_triangle, self.data))

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the data with both triangles of a matrix."""
        shape = self.data.shape
        return (*shape[:-2], self.size, self.size) if self.is_packed else shape

    def in_full(self) -> "Side":
        """The side with both triangles of a matrix."""
        return self.with_data(on_shapes(unfolded, self.data)) if self.is_packed else self

    def stored_like(self, other: "Side") -> "Side":
        """The side, packed if ``other`` is."""
        return self.packed(0) if other.is_packed else self.in_full()

    # -- readings ---------------------------------------------------------------------------

    @property
    def diagonal(self) -> Any:
        """The diagonal of a matrix, ``(stack..., n)``; of anything else its data."""
        return diagonal(self.data) if self.is_matrix else self.data

    @property
    def mean(self) -> Any:
        """The data in full over its count, 0 where nothing was counted; NumPy in, NumPy out."""
        return self.with_data(mean_of(self.data, self.count)).in_full().data

    def without_last(self) -> "Side":
        """The side in full, without its last row and column, which hold the ones of a bias."""
        data = self.in_full().data
        return self.with_data(data[..., :-1, :-1] if self.is_matrix else data[..., :-1])


def decayed(old: Any, decay: Any, new: Any, weight: Any = None) -> Any:
    """``decay * old + weight * new`` in the dtype of ``old``; factors are given by the stack."""
    new = new.astype(old.dtype)
    if weight is not None:
        new = over_stack(weight, old).astype(old.dtype) * new
    return over_stack(jnp.asarray(decay), old).astype(old.dtype) * old + new


def over_stack(x: Any, like: Any) -> Any:
    """One value for each entry of a stack, with the axes to multiply the stack's arrays."""
    return x.reshape((*x.shape, *[1] * (like.ndim - x.ndim)))  # NumPy takes no empty call


def mean_of(total: Any, count: Any) -> Any:
    """``total / count``, and 0 where the count is 0; ``count`` has the axes of the stack.

    NumPy arrays stay in host memory: NumPy in, NumPy out.
    """
    numpy = np if isinstance(total, np.ndarray) else jnp
    count = numpy.where(count > 0, count, 1).astype(total.dtype)
    return total / over_stack(count, total)


def on_shapes(function: Callable[[Any], Any], x: Any) -> Any:
    """``function(x)``; of a shape, the shape of the result."""
    return jax.eval_shape(function, x) if isinstance(x, jax.ShapeDtypeStruct) else function(x)


Sides = dict[Place, Side]


class BlockKronecker:
    """A block-diagonal matrix with one block for each layer, and what all its forms share.

    :class:`Factors` holds sums, :class:`Eigenbases` spectra, :class:`Inverses` inverses. What is
    done to the matrix is done to its sides: :attr:`sides` lists them, and :meth:`with_sides` makes
    the same form from other ones. An A that several layers read is one side.
    """

    _TABLES: ClassVar[Mapping[str, str]]  # the field of each table of places
    layers: tuple[Layer, ...]
    bias: BiasMode

    # -- layers -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    # Cached for the life of one instance, so that looking up all layers stays linear.
    @functools.cached_property
    def _by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def layer(self, name: str) -> Layer:
        """The layer called ``name``.

        Raises:
            UnknownLayerError: no layer has this name; the nearest names are given.
        """
        if name in self._by_name:
            return self._by_name[name]
        names = nearest(name, list(self._by_name))
        raise UnknownLayerError(f"no layer {name!r}; the nearest names are {names}")

    def wants_ones(self, layer: Layer) -> bool:
        """Whether the A of ``layer`` includes the ones column."""
        return self.bias == "joint" and layer.bias is not None

    # -- sides ------------------------------------------------------------------------------

    @property
    def sides(self) -> Sides:
        """Every side, by its place."""
        places = (Place(t, k) for t, field in self._TABLES.items() for k in getattr(self, field))
        return {place: self.side(place) for place in places}

    def side(self, place: Place) -> Side:
        """The side at a place."""
        data = getattr(self, self._TABLES[place.table])[place.key]
        return Side(data, self._count_of(place), self.has_matrix_at(place))

    def _count_of(self, place: Place) -> Any:
        return None

    def has_matrix_at(self, place: Place) -> bool:
        """Whether the side at a place is a matrix, in full or folded."""
        return place.key in self._with_matrices.get(place.table, ())

    @functools.cached_property
    def _with_matrices(self) -> dict[str, frozenset[str]]:
        # Sums and spectra of A stand under the input, inverses under a layer that reads it.
        a = frozenset(key for x in self.layers if x.a_dense for key in (x.input, x.name))
        g = frozenset(x.name for x in self.layers if x.g_dense)
        return {"a": a, "a_without_ones": a, "g": g, "biases": g}

    def with_sides(self, sides: Mapping[Place, Side], **changes: Any) -> "Self":
        """The same form of other sides.

        Args:
            sides: The sides, all of them. Their data is read; whether it is a matrix follows from
                the layers.
            **changes: Further fields to replace.
        """
        tables: dict[str, dict[str, Any]] = {field: {} for field in self._TABLES.values()}
        for (table, key), side in sides.items():
            tables[self._TABLES[table]][key] = side.data
        return dataclasses.replace(self, **tables, **changes)  # pyright: ignore[reportArgumentType]

    def map_sides(self, function: Callable[..., Side], *others: "BlockKronecker") -> "Self":
        """The same form of ``function(side, *sides of the others at its place)``."""
        more = [other.sides for other in others]
        return self.with_sides(
            {place: function(side, *(x[place] for x in more)) for place, side in self.sides.items()}
        )

    # -- storage ----------------------------------------------------------------------------

    @property
    def is_packed(self) -> bool:
        """Whether any matrix is stored as one triangle."""
        return any(side.is_packed for side in self.sides.values())

    def packed(self) -> "Self":
        """The same matrix, with one triangle of every side of size 64 or more.

        A triangle takes ``n (n + 1) / 2`` elements (LAPACK's rectangular full packed format). Sums,
        averages and readings work as before and give the same bits. Where a matrix that you made
        yourself is not symmetric, its lower triangle counts.
        """
        return self.map_sides(Side.packed)

    def unpacked(self) -> "Self":
        """The same matrix, with every side in full."""
        return self.map_sides(Side.in_full)

    def packed_like(self, like: "BlockKronecker") -> "Self":
        """The same matrix, packed if ``like`` is."""
        return self.packed() if like.is_packed else self
