"""Kronecker factors of a model, stored as sums and counts."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jaxkfac._errors import UnknownLayerError
from jaxkfac._text import array_text, short_repr, table_html
from jaxkfac.blocks._corrections import Corrections
from jaxkfac.blocks._origin import Origin, Turn, check_same_origin, sum_of_turns
from jaxkfac.blocks._sides import BiasMode, BlockKronecker, Place, Side, Sides
from jaxkfac.flax import serializable
from jaxkfac.interception import Layer

# ---------------- factors by layer


class KroneckerFactor(NamedTuple):
    """The two factors of one layer, as means; a diagonal side is a vector."""

    a: Array | np.ndarray
    g: Array | np.ndarray

    __repr__ = short_repr


class DiagonalFactor(NamedTuple):
    """The diagonal of one scale or lone bias, shaped like the parameter, as a mean."""

    diagonal: Array | np.ndarray

    __repr__ = short_repr


class CorrectedFactor(NamedTuple):
    """The two factors of one layer, and eigenvalues measured in their eigenbases.

    Attributes:
        a: As in ``KroneckerFactor``.
        g: As in ``KroneckerFactor``.
        corrected: The mean of squared gradients in the eigenbases, ``(stack..., in[+1], out)``,
            divided by the square of the bases' ``block_root`` (which is 1 unless the dtype cannot
            hold the squares of the gradients).
        corrected_bias: The mean of squared gradients of a bias with a block of its own,
            ``(stack..., out)``.
    """

    a: Array | np.ndarray
    g: Array | np.ndarray
    corrected: Array
    corrected_bias: Array | None

    __repr__ = short_repr


class CorrectedDiagonal(NamedTuple):
    """A diagonal, and the mean of squared gradients of whole examples, of the same shape."""

    diagonal: Array | np.ndarray
    corrected: Array

    __repr__ = short_repr


if TYPE_CHECKING:
    # The layer decides which of the four it is, so types cannot tell; with Any, factors[name].a
    # needs no isinstance.
    Factor = KroneckerFactor | Any
    _Named = Mapping[str, Factor]
else:
    Factor = KroneckerFactor | DiagonalFactor | CorrectedFactor | CorrectedDiagonal
    _Named = Mapping  # a runtime type checker would read an item, which factors of shapes refuse


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Factors(BlockKronecker, _Named):
    r"""Every factor of a model, stored as sums and counts so that they combine by adding.

    ``factors[name].a`` and ``.g`` are means. Add micro-batches, passes, devices and steps with
    ``+``; an exponential average is ``decay * average + factors``. A plain sum in float32 loses up
    to $2^{-25}$ of itself with each addition, which is 1 % after 200,000 batches. Sum very many
    batches with :class:`LongSum`, which takes twice the bytes.

    Attributes:
        a_sums: ``{layer.input: sum of a a^T}``, ``(stack..., in[+1], in[+1])``, or
            ``(stack..., in[+1])`` for a diagonal side. Layers that read the same input
            share one entry, unless marks give its rows other weights. The ones column of a joint
            bias is last; it is there when any layer of the group has a bias. :meth:`packed` factors
            hold one triangle of a matrix in a rectangle; ``factors[name].a`` is the matrix all the
            same.
        a_counts: ``{layer.input: number of rows}``, shape ``(stack...)``.
        g_sums: ``{layer.name: sum of g g^T}``, ``(stack..., out, out)`` or a vector.
        diagonals: ``{layer.name: sum of squared gradients}``, shaped like the parameter.
        terms: Number of loss terms, scalar.
        layers: The layers, static.
        bias: ``"joint"`` or ``"separate"``, static.
        loss_terms: Number of loss terms of the gradient that came with these factors, scalar, if
            factors are collected at some steps only (``every=``). Otherwise ``None``, because
            ``terms`` is that number.
        corrections: Sums of squared gradients in eigenbases, if eigenbases were passed
            (``bases=``); else ``None``. They are valid for these eigenbases only.
        origin: Fisher type and likelihoods, static; ``None`` if not known. A sum has the origin of
            its first summand, and summands with different origins are refused. An average
            (:func:`update_average`) keeps its own origin, whatever it is updated with.
        turn: The group of this step, if factors come in turns (``collect=``); else ``None``. Such
            factors lack the arrays of layers that have another turn, and arrays of a scan's layers
            have the iterations of this turn only. ``layers`` are those of the model all the same.
            In an average, ``turn.counts`` has the number of loss terms of each layer; its G and
            diagonals are means, and ``terms`` is 1, or 0 until every group has come once.
    """

    # Not Array: a pytree also holds shapes (`factor_shapes`), cotangents and None.
    a_sums: dict[str, Any]
    a_counts: dict[str, Any]
    g_sums: dict[str, Any]
    diagonals: dict[str, Any]
    terms: Any
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    bias: BiasMode = dataclasses.field(metadata={"static": True})
    loss_terms: Any = None
    corrections: Corrections | None = None
    origin: Origin | None = dataclasses.field(default=None, metadata={"static": True})
    turn: Turn | None = None

    _TABLES: ClassVar[Mapping[str, str]] = {"a": "a_sums", "g": "g_sums", "diagonals": "diagonals"}

    def __repr__(self) -> str:
        """One line, because the arrays would fill the screen."""
        traced = isinstance(self.terms, Tracer | jax.ShapeDtypeStruct)
        many = traced or getattr(self.terms, "ndim", 0)
        terms = array_text(self.terms) if many else str(self.terms)
        return f"Factors of {len(self)} layers, bias={self.bias!r}, terms={terms}"

    def _repr_html_(self) -> str:
        rows = []
        for layer in self.layers:
            sides = (layer.name, "") if layer.is_diagonal else (layer.input, layer.name)
            tables = (self.diagonals, {}) if layer.is_diagonal else (self.a_sums, self.g_sums)
            shapes = [array_text(t[s]) if s in t else "" for t, s in zip(tables, sides)]
            rows.append((layer.name, layer.kind, *shapes, layer.shares_input_with or ""))
        head = ("layer", "kind", "A, or the diagonal", "G", "A is stored with")
        return table_html(repr(self), head, rows, words=(0, 1, 4))

    @functools.cached_property
    def _inputs_with_ones(self) -> frozenset[str]:
        return frozenset(layer.input for layer in self.layers if self.wants_ones(layer))

    def __getitem__(self, name: str) -> Factor:
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self)):
            return jax.eval_shape(lambda factors: factors[name], self)  # from factor_shapes
        layer, more = self.layer(name), self.corrections
        if self.turn is not None and not self.has_arrays_of(layer):
            raise UnknownLayerError(
                f"these factors are of {self.turn} (collect=), which has nothing of layer "
                f"{name!r}: read it in an average, as jk.update_average makes it"
            )
        if layer.is_diagonal:
            diagonal = self.side(Place("diagonals", name)).mean
            if more is None:
                return DiagonalFactor(diagonal)
            return CorrectedDiagonal(diagonal, more.mean(more.sums[name]))
        a, g = self.side(Place("a", layer.input)), self.side(Place("g", name)).mean
        a = a.without_last() if self.has_ones(layer.input) and not self.wants_ones(layer) else a
        if more is None:
            return KroneckerFactor(a.mean, g)
        bias = more.mean(more.bias_sums[name]) if name in more.bias_sums else None
        return CorrectedFactor(a.mean, g, more.mean(more.sums[name]), bias)

    def has_arrays_of(self, layer: Layer) -> bool:
        """Whether the sums of a layer are there, which may have another turn."""
        return layer.name in self.diagonals or layer.name in self.g_sums

    def has_ones(self, input_name: str) -> bool:
        """Whether the stored input factor carries a ones column."""
        return input_name in self._inputs_with_ones

    def _count_of(self, place: Place) -> Any:
        return self.a_counts[place.key] if place.table == "a" else self.terms

    def with_sides(self, sides: Mapping[Place, Side], **changes: Any) -> "Factors":
        """Factors with other sums, and with their counts of A.

        Args:
            sides: All sides. Their data is read, and the counts of A. G and diagonals share one
                count, ``terms``, which is a field.
            **changes: Further fields to replace.
        """
        counts = {key: side.count for (table, key), side in sides.items() if table == "a"}
        return super().with_sides(sides, a_counts=counts, **changes)

    @classmethod
    def of_sides(cls, sides: Mapping[Place, Side], **fields: Any) -> "Factors":
        """Factors made of sides; ``fields`` are the others, at least terms, layers and bias."""
        return cls({}, {}, {}, {}, **fields).with_sides(sides)

    def __add__(self, other: "Factors") -> "Factors":
        check_same_origin("factors", self.origin, other.origin)
        turn = sum_of_turns(self.turn, other.turn)
        if turn and self.sides.keys() != other.sides.keys():
            raise ValueError(
                f"factors of two groups of {turn.of} (collect=) cannot be added: micro-batches of "
                "one step take the same step="
            )
        one, other = alike(without_turn(self), without_turn(other))
        return dataclasses.replace(jax.tree.map(jnp.add, one, other), turn=turn)

    def __rmul__(self, weight: Any) -> "Factors":
        turn, by_weight = self.turn, lambda x: weight * x
        if turn is None or turn.is_step:
            return dataclasses.replace(jax.tree.map(by_weight, without_turn(self)), turn=turn)
        # G and diagonals are means: they stay, and count for more or less.
        sides: Sides = {
            place: Side(weight * x.data, weight * x.count, x.is_matrix) if place.table == "a" else x
            for place, x in self.sides.items()
        }
        counts = jax.tree.map(by_weight, turn.counts)
        return self.with_sides(sides, turn=dataclasses.replace(turn, counts=counts))

    def is_finite(self) -> dict[str, Array]:
        """``{name: scalar bool}``; usable inside jit."""
        sides = self.sides
        finite = {
            layer.name: [jnp.isfinite(sides[place].data).all() for place in places_of(layer)]
            for layer in self.layers
            if self.turn is None or self.has_arrays_of(layer)
        }
        return {name: functools.reduce(jnp.logical_and, flags) for name, flags in finite.items()}


def places_of(layer: Layer) -> tuple[Place, ...]:
    """The sides of a layer's block in factors."""
    if layer.is_diagonal:
        return (Place("diagonals", layer.name),)
    return Place("a", layer.input), Place("g", layer.name)


def without_loss_terms(factors: Factors) -> Factors:
    """The factors without the count that belongs to a gradient."""
    return dataclasses.replace(factors, loss_terms=None)


def without_turn(factors: Factors) -> Factors:
    """The arrays of factors alone, whichever group they belong to."""
    return factors if factors.turn is None else dataclasses.replace(factors, turn=None)


def of_parameters(factors: Factors) -> Factors:
    """The factors that precondition gradients: without those of computed weights."""
    layers = tuple(layer for layer in factors.layers if not layer.computed_from)
    if len(layers) == len(factors.layers):
        return factors
    places = {place for layer in layers for place in places_of(layer)}
    names = {layer.name for layer in layers}
    measured = factors.corrections
    if measured is not None:
        measured = measured.with_sides({p: x for p, x in measured.sides.items() if p.key in names})
    return factors.with_sides(
        {place: side for place, side in factors.sides.items() if place in places},
        corrections=measured,
        layers=layers,
        turn=factors.turn and factors.turn.of_layers(names),
    )


def without_corrections(factors: Factors) -> Factors:
    """The factors without their measured eigenvalues."""
    return dataclasses.replace(factors, corrections=None)


def with_origin(factors: Factors, origin: Origin | None) -> Factors:
    """The factors with another origin, so that they match the structure of an average."""
    return factors if factors.origin == origin else dataclasses.replace(factors, origin=origin)


def alike(one: Factors, other: Factors) -> tuple[Factors, Factors]:
    """Drop optional fields that only one of the two has, because their sum would be unknown.

    Both get the origin and the storage of ``one``, so that an average keeps its structure inside
    ``scan``.
    """
    if (one.loss_terms is None) != (other.loss_terms is None):
        one, other = without_loss_terms(one), without_loss_terms(other)
    if (one.corrections is None) != (other.corrections is None):
        one, other = without_corrections(one), without_corrections(other)
    return one, stored_like(with_origin(other, one.origin), one)


def stored_like(factors: Factors, like: Factors) -> Factors:
    """The factors with those matrices packed that are packed in ``like``."""
    return factors.map_sides(Side.stored_like, like) if factors.layers == like.layers else factors
