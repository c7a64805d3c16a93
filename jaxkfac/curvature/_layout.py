"""The blocks of some layers: the arrays of their factors, and the spectra computed from them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxkfac._errors import nearest
from jaxkfac.curvature._orientations import Side, nearest_product, turned_pairs
from jaxkfac.factors import BiasMode, Factors
from jaxkfac.interception import Layer


class Place(NamedTuple):
    """A table of :class:`Factors` or :class:`Eigenbases`, and a key of it."""

    table: str
    key: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of factors.

    Attributes:
        place: ``a`` or ``g`` or ``diagonals``, and the key.
        name: What errors call it.
        stack: Shape of the stacked axes; ``()`` for a diagonal, which is one vector.
        size: Of a side, or of the whole diagonal.
        dense: Whether it is a matrix.
    """

    place: Place
    name: str
    stack: tuple[int, ...]
    size: int
    dense: bool

    @functools.cached_property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the array, ``None`` for a diagonal: that of its parameter."""
        if self.place.table == "diagonals":
            return None
        return (*self.stack, *[self.size] * (1 + self.dense))

    @property
    def elements(self) -> int:
        """How many numbers are stored."""
        each = self.size * (self.size + 1) // 2 if self.dense else self.size
        return math.prod(self.stack) * each


class Orientations(NamedTuple):
    """The factors of a kernel that is read in both orientations.

    Attributes:
        a: Of the reading that has the parameter's name.
        g: Likewise.
        turned_a: Of the other one.
        turned_g: Likewise.
        turned_ones: Whether ``turned_a`` ends in the ones of that reading's own bias, which is no
            part of the kernel.
    """

    a: Entry
    g: Entry
    turned_a: Entry
    turned_g: Entry
    turned_ones: bool

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All that the product is computed from."""
        return self.a, self.g, self.turned_a, self.turned_g

    def product(self, mean: Callable[[Entry], Any]) -> tuple[Any, Any]:
        """A and G of the nearest Kronecker product to the sum of both, from means."""
        a, g, turned_a, turned_g = (Side(mean(x), x.dense) for x in self.entries)
        if self.turned_ones:
            turned_a = turned_a.without_last()
        left, right = nearest_product((a, g), (turned_g, turned_a))
        return left.x, right.x


@dataclasses.dataclass(frozen=True)
class EigenBlock:
    """One spectrum of the eigenbases.

    Attributes:
        place: ``a``, ``a_without_ones``, ``g`` or ``diagonals``, and the key.
        source: The entry it is computed from.
        without_ones: Whether the last row and column of the source are left out.
        both: Of a kernel that is read in both orientations: all that it is computed from.
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
        """What is decomposed, from the means of entries."""
        if self.both is not None:
            return self.both.product(mean)[self.place.table == "g"]
        matrix = mean(self.source)
        if not self.without_ones:
            return matrix
        return matrix[..., :-1, :-1] if self.source.dense else matrix[..., :-1]

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.source.name + " without its ones" * self.without_ones

    @property
    def size(self) -> int:
        """Of the side."""
        return self.source.size - self.without_ones


@dataclasses.dataclass(frozen=True)
class Layout:
    """What :func:`layout_of` says of some layers; a shared input has one entry.

    Attributes:
        layers: The layers.
        bias: ``"joint"`` or ``"separate"``.
        entries: Every array of factors, each once.
        blocks: Every spectrum, each once.
    """

    layers: tuple[Layer, ...]
    bias: BiasMode
    entries: dict[Place, Entry]
    blocks: dict[Place, EigenBlock]

    def merged(self, factors: Factors, *, complete: bool) -> "Layout":
        """This layout with the layers of ``factors`` that it lacks at its end.

        Args:
            factors: Of some of its layers, or of others.
            complete: Whether others are refused.

        Raises:
            ValueError: the two disagree about a layer, or about biases; or a layer is refused.
        """
        if factors.layers == self.layers and factors.bias == self.bias:
            return self
        if factors.bias != self.bias:
            raise ValueError(f"factors have bias={factors.bias!r}, expected {self.bias!r}")
        known = {layer.name: layer for layer in self.layers}
        for layer in factors.layers:
            if known.get(layer.name, layer) != layer:
                raise ValueError(f"factors hold {layer}, expected {known[layer.name]}")
        new = tuple(layer for layer in factors.layers if layer.name not in known)
        if not new:
            return self
        if complete:
            raise ValueError(
                f"factors have the layer {new[0].name!r}, which was not expected; the nearest are "
                f"{nearest(new[0].name, list(known))}"
            )
        return layout_of((*self.layers, *new), self.bias)

    def groups(self, count: int) -> list[list[EigenBlock]]:
        """Blocks in groups of about equal work; what is computed from one entry is in one group."""
        joint: dict[Place, Place] = {}
        for block in self.blocks.values():
            places = [entry.place for entry in block.sources]
            known = {joint.get(place, place) for place in places}
            first = joint.get(places[0], places[0])
            joint |= dict.fromkeys(places, first)
            joint |= {place: first for place, other in joint.items() if other in known}
        by_entry: dict[Place, list[EigenBlock]] = {}
        for block in self.blocks.values():
            by_entry.setdefault(joint[block.source.place], []).append(block)
        groups: list[list[EigenBlock]] = [[] for _ in range(count)]
        loads = [0] * count
        for blocks in sorted(by_entry.values(), key=_work, reverse=True):
            least = loads.index(min(loads))
            groups[least] += blocks
            loads[least] += _work(blocks)
        return groups


@functools.lru_cache(maxsize=64)  # it is asked for at every call outside jit
def layout_of(layers: tuple[Layer, ...], bias: BiasMode) -> Layout:
    """The entries and blocks of ``layers``."""
    like = factors_without_arrays(layers, bias)
    entries: dict[Place, Entry] = {}
    blocks: dict[Place, EigenBlock] = {}
    for layer in layers:
        ones = like.has_ones(layer.input)
        for entry in _entries_of(layer, ones=ones):
            place = entry.place
            bare = place.table == "a" and ones and not like.wants_ones(layer)
            own = Place("a_without_ones", place.key) if bare else place
            source = entries.setdefault(place, entry)
            blocks.setdefault(own, EigenBlock(own, source, bare))
    for layer, turned in turned_pairs(layers):
        places = [Place(t, k) for x in (layer, turned) for t, k in (("a", x.input), ("g", x.name))]
        turned_ones = like.has_ones(turned.input)
        a, g, turned_a, turned_g = (entries[place] for place in places)
        both = Orientations(a, g, turned_a, turned_g, turned_ones)
        if bias == "joint" or layer.bias is None:  # else the bias's block is G alone
            for place in places[:2]:
                blocks[place] = dataclasses.replace(blocks[place], both=both)
    return Layout(layers, bias, entries, blocks)


def factors_without_arrays(layers: tuple[Layer, ...], bias: BiasMode) -> Factors:
    """Factors that know of every layer where its ones are."""
    return Factors({}, {}, {}, {}, None, layers, bias)


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
