"""The blocks of a set of layers: the arrays of their factors, and the spectra made from them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac._errors import nearest
from jaxkfac.blocks._average import layer_difference
from jaxkfac.blocks._factors import Factors
from jaxkfac.blocks._sides import BiasMode, Place, Side, over_stack
from jaxkfac.interception import Layer

# ---------------- kernels that are read in both orientations
#
# A network that is differentiated with respect to its inputs in reverse mode reads a kernel forward
# and backward. The forward reading gives $A_1 \otimes G_1$. The backward reading has rows of output
# features as its inputs and rows of input features as its gradients, so its block, in the order of
# the first, is $G_2 \otimes A_2$. One Kronecker product stands for the sum of the two.


AnyArray = Any  # a JAX or NumPy array


def turned_pairs(layers: Sequence[Layer]) -> Iterator[tuple[Layer, Layer]]:
    """Pairs of layers that read the same kernel in opposite orientations.

    The first of a pair has the parameter's name. An A that further layers read stays unchanged for
    them, so such layers form no pair.
    """
    by_path: dict[Any, list[Layer]] = {}
    for layer in layers:
        by_path.setdefault((layer.weight.path, layer.weight.index), []).append(layer)
    readers: dict[str, int] = {}
    for layer in layers:
        readers[layer.input] = readers.get(layer.input, 0) + 1
    for group in by_path.values():
        first, *more = sorted(group, key=lambda layer: "@" in layer.suffix)
        for second in more:
            alone = readers[first.input] == readers[second.input] == 1
            if alone and first.kind == second.kind and second.weight.is_transpose_of(first.weight):
                yield first, second


def nearest_product(one: tuple[Side, Side], other: tuple[Side, Side]) -> tuple[Side, Side]:
    r"""The Kronecker product nearest to $A_1 \otimes G_1 + A_2 \otimes G_2$.

    In the Frobenius norm it is the leading singular pair of the sum of two outer products of
    vectors: a combination of $A_1$ and $A_2$, and one of $G_1$ and $G_2$, whose coefficients are an
    eigenvector of a 2 x 2 matrix. They are not negative, so both factors stay positive
    semi-definite. If one of the products is zero, or both G are multiples of each other, the result
    is exact.

    Args:
        one: $A_1$ and $G_1$.
        other: $A_2$ and $G_2$. Sides smaller than those of ``one`` (they lack the ones of a bias)
            are padded with zeros.

    Returns:
        The two factors; the first has the norm of $A_1$, unless that is zero.

    References:
        Van Loan and Pitsianis, Approximation with Kronecker products, 1993.
    """
    (a1, a2), (g1, g2) = (_alike(x, y) for x, y in zip(one, other, strict=True))
    xp: Any = _numpy_of(a1.data, g1.data)

    def over(x: AnyArray, y: AnyArray) -> AnyArray:
        return x / xp.where(y == 0, xp.ones_like(y), y)

    # Squares of entries leave the range of float32 long before the entries do. Powers of two change
    # no other bit.
    units = [_unit(x, xp) for x in (a1, a2, g1, g2)]
    of_unit = [_times(x, 1 / unit) for x, unit in zip((a1, a2, g1, g2), units, strict=True)]
    unit_norms = [xp.sqrt(_inner(x, x)) for x in of_unit]
    rho = over(over(_inner(of_unit[0], of_unit[1]), unit_norms[0]), unit_norms[1])
    tau = over(over(_inner(of_unit[2], of_unit[3]), unit_norms[2]), unit_norms[3])
    norms = [norm * unit for norm, unit in zip(unit_norms, units, strict=True)]
    w1, w2 = norms[0] * norms[2], norms[1] * norms[3]
    largest = xp.maximum(w1, w2)
    # Below they are squared, which would leave the range of float32 for small gradients.
    w1, w2 = over(w1, largest), over(w2, largest)
    # For sides of norm one the coefficients in A are the leading eigenvector of this matrix.
    cross = w1 * w2 * tau
    m11, m12 = w1**2 + cross * rho, w1**2 * rho + cross
    m21, m22 = cross + w2**2 * rho, cross * rho + w2**2
    half = (m11 - m22) / 2
    root = xp.sqrt(half**2 + m12 * m21)
    # Two formulas give the eigenvector. The one whose terms have the same sign has no cancellation.
    u1, u2 = xp.where(half >= 0, root + half, m12), xp.where(half >= 0, m21, root - half)
    none = (u1 == 0) & (u2 == 0)  # then every combination is equally near
    u1, u2 = xp.where(none, xp.ones_like(u1), u1), xp.where(none, xp.ones_like(u2), u2)
    v1, v2 = w1 * (u1 + rho * u2), w2 * (rho * u1 + u2)
    length = xp.sqrt(u1**2 + u2**2 + 2 * rho * u1 * u2)
    scale = xp.where(norms[0] > 0, norms[0], xp.ones_like(norms[0]))

    def combined(x: Side, y: Side, times: AnyArray, of: Sequence[AnyArray]) -> Side:
        first, second = _times(x, over(of[0], of[2]) * times), _times(y, over(of[1], of[3]) * times)
        return x.with_data(first.data + second.data)

    a = combined(a1, a2, scale / length, (u1, u2, norms[0], norms[1]))
    g = combined(g1, g2, largest / (length * scale), (v1, v2, norms[2], norms[3]))
    return a, g


def _axes(x: Side) -> tuple[int, ...]:
    return (-2, -1) if x.is_matrix else (-1,)


def _inner(x: Side, y: Side) -> AnyArray:
    """Inner products, ``(stack...)``."""
    return (x.data * y.data).sum(_axes(x))


def _unit(x: Side, xp: Any) -> AnyArray:
    """The largest power of two that no entry of a side exceeds, or 1; ``(stack...)``."""
    largest = abs(x.data).max(_axes(x))
    exponent = xp.frexp(largest)[1] - 1
    return xp.ldexp(xp.ones_like(largest), xp.where(largest == 0, 0, exponent))


def _times(x: Side, factor: AnyArray) -> Side:
    """Multiply a side by one number for each entry of the stack."""
    return x.with_data(x.data * over_stack(factor, x.data))


def _alike(x: Side, y: Side) -> tuple[Side, Side]:
    """Both as matrices or both as diagonals, the second padded with zeros to the first's size."""
    if x.is_matrix != y.is_matrix:
        # Not a slice of the flattened matrix, which is for the symmetric ones that are folded.
        x, y = (Side(z.data.diagonal(0, -2, -1)) if z.is_matrix else z for z in (x, y))
    if missing := x.size - y.size:
        widths = [(0, 0)] * (y.data.ndim - len(_axes(y))) + [(0, missing)] * len(_axes(y))
        y = y.with_data(_numpy_of(y.data).pad(y.data, widths))
    return x, y


def _numpy_of(*arrays: AnyArray) -> Any:
    return np if all(isinstance(x, np.ndarray) for x in arrays) else jnp


# ---------------- entries and blocks


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of factors.

    Attributes:
        place: Table ``a``, ``g`` or ``diagonals``, and the key.
        name: Its name in error messages.
        stack: Shape of the stacked axes; ``()`` for a diagonal, which is one vector.
        size: Size of the side, or of the full diagonal.
        dense: Whether it is a matrix.
    """

    place: Place
    name: str
    stack: tuple[int, ...]
    size: int
    dense: bool

    @functools.cached_property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the array; ``None`` for a diagonal, which has its parameter's shape."""
        if self.place.table == "diagonals":
            return None
        return (*self.stack, *[self.size] * (1 + self.dense))

    @property
    def elements(self) -> int:
        """How many distinct numbers it has; a symmetric matrix counts one triangle."""
        per_matrix = self.size * (self.size + 1) // 2 if self.dense else self.size
        return math.prod(self.stack) * per_matrix


class Orientations(NamedTuple):
    """The factors of a kernel that is read in both orientations.

    Attributes:
        a: A of the reading that has the parameter's name.
        g: G of that reading.
        turned_a: A of the other reading.
        turned_g: G of the other reading.
        turned_ones: Whether ``turned_a`` ends in the ones of that reading's own bias, which is not
            part of the kernel.
    """

    a: Entry
    g: Entry
    turned_a: Entry
    turned_g: Entry
    turned_ones: bool

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries that the product is computed from."""
        return self.a, self.g, self.turned_a, self.turned_g

    def product(self, mean: Callable[[Entry], Any]) -> tuple[Any, Any]:
        """A and G of the Kronecker product nearest to the sum of both readings, from means."""
        a, g, turned_a, turned_g = (Side(mean(x), is_matrix=x.dense) for x in self.entries)
        if self.turned_ones:
            turned_a = turned_a.without_last()
        nearest_a, nearest_g = nearest_product((a, g), (turned_g, turned_a))
        return nearest_a.data, nearest_g.data


@dataclasses.dataclass(frozen=True)
class EigenBlock:
    """One spectrum of the eigenbases, and what it is computed from.

    Attributes:
        place: Table ``a``, ``a_without_ones``, ``g`` or ``diagonals``, and the key.
        source: The entry it is computed from.
        without_ones: Whether the last row and column of the source are left out.
        both: For a kernel that is read in both orientations, all entries it is computed from.
    """

    place: Place
    source: Entry
    without_ones: bool
    both: Orientations | None = None

    @property
    def sources(self) -> tuple[Entry, ...]:
        """Every entry that it is computed from."""
        return (self.source,) if self.both is None else self.both.entries

    def mean(self, mean: Callable[[Entry], Any]) -> Any:
        """The matrix or diagonal that is decomposed, from the means of entries."""
        if self.both is not None:
            return self.both.product(mean)[self.place.table == "g"]
        side = Side(mean(self.source), is_matrix=self.source.dense)
        return side.without_last().data if self.without_ones else side.data

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return self.source.name + " without its ones" * self.without_ones

    @property
    def size(self) -> int:
        """Size of the side."""
        return self.source.size - self.without_ones


@dataclasses.dataclass(frozen=True)
class Layout:
    """The entries and blocks of a set of layers; a shared input has one entry.

    Attributes:
        layers: The layers.
        bias: ``"joint"`` or ``"separate"``.
        entries: Every array of the factors, without repeats.
        blocks: Every spectrum, without repeats.
    """

    layers: tuple[Layer, ...]
    bias: BiasMode
    entries: dict[Place, Entry]
    blocks: dict[Place, EigenBlock]

    @property
    def like(self) -> Factors:
        """Factors of these layers, without arrays."""
        return Factors.of_sides({}, terms=None, layers=self.layers, bias=self.bias)

    def merged(self, factors: Factors, *, complete: bool) -> "Layout":
        """This layout, with the layers of ``factors`` that it lacks appended.

        Args:
            factors: Factors of some of its layers, or of new ones.
            complete: Whether new layers are refused.

        Raises:
            ValueError: the two disagree about a layer or about biases, or a new layer is refused.
        """
        if factors.layers == self.layers and factors.bias == self.bias:
            return self
        if factors.bias != self.bias:
            raise ValueError(f"factors have bias={factors.bias!r}, expected {self.bias!r}")
        by_name = {layer.name: layer for layer in self.layers}
        for layer in factors.layers:
            if by_name.get(layer.name, layer) != layer:
                raise ValueError(layer_difference(layer, by_name[layer.name]))
        new = tuple(layer for layer in factors.layers if layer.name not in by_name)
        if not new:
            return self
        if complete:
            raise ValueError(
                f"factors have the layer {new[0].name!r}, which was not expected; the nearest are "
                f"{nearest(new[0].name, list(by_name))}"
            )
        return layout_of((*self.layers, *new), self.bias)

    def groups(self, count: int) -> list[list[EigenBlock]]:
        """Groups of about equal work; blocks that share an entry are in the same group."""
        joint: dict[Place, Place] = {}  # entry -> representative of the entries used together
        for block in self.blocks.values():
            places = [entry.place for entry in block.sources]
            joint_places = {joint.get(place, place) for place in places}
            first = joint.get(places[0], places[0])
            joint |= dict.fromkeys(places, first)
            joint |= {
                place: first
                for place, representative in joint.items()
                if representative in joint_places
            }
        by_entry: dict[Place, list[EigenBlock]] = {}
        for block in self.blocks.values():
            by_entry.setdefault(joint[block.source.place], []).append(block)
        groups: list[list[EigenBlock]] = [[] for _ in range(count)]
        loads = [0] * count
        # The largest first, each into the group with the least work: loads end close together.
        for blocks in sorted(by_entry.values(), key=_work, reverse=True):
            least = loads.index(min(loads))
            groups[least] += blocks
            loads[least] += _work(blocks)
        return groups


@functools.lru_cache(maxsize=64)  # called at every call outside jit
def layout_of(layers: tuple[Layer, ...], bias: BiasMode) -> Layout:
    """The entries and blocks of ``layers``."""
    like = Factors.of_sides({}, terms=None, layers=layers, bias=bias)
    entries: dict[Place, Entry] = {}
    blocks: dict[Place, EigenBlock] = {}
    for layer in layers:
        ones = like.has_ones(layer.input)
        for entry in _entries_of(layer, ones=ones):
            place = entry.place
            bare = place.table == "a" and ones and not like.wants_ones(layer)
            block_place = Place("a_without_ones", place.key) if bare else place
            source = entries.setdefault(place, entry)
            blocks.setdefault(block_place, EigenBlock(block_place, source, bare))
    for layer, turned in turned_pairs(layers):
        places = [Place(t, k) for x in (layer, turned) for t, k in (("a", x.input), ("g", x.name))]
        turned_ones = like.has_ones(turned.input)
        a, g, turned_a, turned_g = (entries[place] for place in places)
        both = Orientations(a, g, turned_a, turned_g, turned_ones)
        if bias == "joint" or layer.bias is None:  # a separate bias uses the first G by itself
            for place in places[:2]:
                blocks[place] = dataclasses.replace(blocks[place], both=both)
    return Layout(layers, bias, entries, blocks)


def _entries_of(layer: Layer, *, ones: bool) -> Iterator[Entry]:
    name = f"of layer {layer.name!r}"
    if layer.is_diagonal:
        place = Place("diagonals", layer.name)
        yield Entry(place, f"the diagonal {name}", (), layer.weight.size, dense=False)
        return
    a, g = Place("a", layer.input), Place("g", layer.name)
    yield Entry(a, f"A {name}", layer.stack, layer.in_features + ones, layer.a_dense)
    yield Entry(g, f"G {name}", layer.stack, layer.out_features, layer.g_dense)


def _work(blocks: list[EigenBlock]) -> int:
    return sum(math.prod(b.source.stack) * b.size ** (3 if b.source.dense else 1) for b in blocks)
