"""Kronecker factors of a model, stored as sums and counts."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac._serialization import serializable
from jaxkfac._text import array_text, short_repr, table_html
from jaxkfac.blocks._corrections import Corrections
from jaxkfac.blocks._origin import Origin, Turn, check_same_origin, sum_of_turns
from jaxkfac.interception import Layer
from jaxkfac.linalg import fold_triangle, is_folded, unfolded, unfolded_size

PACKED_FROM = 64  # a smaller triangle saves too little to pay for folding it

# ---------------- factors by layer


BiasMode = Literal["joint", "separate"]


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
class Factors(_Named):
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

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

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

    def layer(self, name: str) -> Layer:
        """The layer called ``name``.

        Raises:
            UnknownLayerError: no layer has this name; the nearest names are given.
        """
        if name in self._by_name:
            return self._by_name[name]
        raise UnknownLayerError(f"no layer {name!r}; the nearest names are {nearest(name, self)}")

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    # Cached for the life of one instance, so that looking up all layers stays linear.
    @functools.cached_property
    def _by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    @functools.cached_property
    def _inputs_with_ones(self) -> frozenset[str]:
        return frozenset(layer.input for layer in self.layers if self.wants_ones(layer))

    def __getitem__(self, name: str) -> Factor:
        layer, more = self.layer(name), self.corrections
        if self.turn is not None and not self.has_arrays_of(layer):
            raise UnknownLayerError(
                f"these factors are of {self.turn} (collect=), which has nothing of layer "
                f"{name!r}: read it in an average, as jk.update_average makes it"
            )
        if layer.is_diagonal:
            diagonal = mean_of(self.diagonals[name], self.terms, 0)
            if more is None:
                return DiagonalFactor(diagonal)
            return CorrectedDiagonal(diagonal, more.mean(more.sums[name]))
        a, n = self.a_sums[layer.input], self.a_counts[layer.input]
        a, g = unfolded(a) if layer.a_dense else a, self.g_sums[name]
        g = unfolded(g) if layer.g_dense else g
        if self.has_ones(layer.input) and not self.wants_ones(layer):
            a = a[..., :-1, :-1] if layer.a_dense else a[..., :-1]
        a, g = mean_of(a, n, 1 + layer.a_dense), mean_of(g, self.terms, 0)
        if more is None:
            return KroneckerFactor(a, g)
        bias = more.mean(more.bias_sums[name]) if name in more.bias_sums else None
        return CorrectedFactor(a, g, more.mean(more.sums[name]), bias)

    def has_arrays_of(self, layer: Layer) -> bool:
        """Whether the sums of a layer are there, which may have another turn."""
        return layer.name in self.diagonals or layer.name in self.g_sums

    def wants_ones(self, layer: Layer) -> bool:
        """Whether the input factor of ``layer`` includes the ones column."""
        return self.bias == "joint" and layer.bias is not None

    def has_ones(self, input_name: str) -> bool:
        """Whether the stored input factor carries a ones column."""
        return input_name in self._inputs_with_ones

    def map_matrices(self, function: Callable[..., Any], *others: "Factors") -> "Factors":
        """Apply a function to the sums of every dense side, and leave everything else.

        Args:
            function: Called with a matrix of these factors, and the ones of ``others``.
            others: Factors of the same layers.
        """

        def mapped(table: str, dense: Collection[str]) -> dict[str, Any]:
            sums, *more = (getattr(x, table) for x in (self, *others))
            return {
                name: function(x, *(other[name] for other in more)) if name in dense else x
                for name, x in sums.items()
            }

        return dataclasses.replace(
            self,
            a_sums=mapped("a_sums", self.dense_inputs),
            g_sums=mapped("g_sums", self.dense_outputs),
        )

    @functools.cached_property
    def dense_inputs(self) -> frozenset[str]:
        """Keys of the ``a_sums`` that are matrices."""
        return frozenset(layer.input for layer in self.layers if layer.a_dense)

    @functools.cached_property
    def dense_outputs(self) -> frozenset[str]:
        """Keys of the ``g_sums`` that are matrices."""
        return frozenset(layer.name for layer in self.layers if layer.g_dense)

    @property
    def is_packed(self) -> bool:
        """Whether any matrix is stored as one triangle."""
        matrices = [self.a_sums[k] for k in self.dense_inputs if k in self.a_sums]
        matrices += [self.g_sums[k] for k in self.dense_outputs if k in self.g_sums]
        return any(map(is_folded, matrices))

    def packed(self) -> "Factors":
        """The same factors, with one triangle of every matrix of size 64 or more.

        A triangle takes ``n (n + 1) / 2`` elements (LAPACK's rectangular full packed format). Sums,
        averages and readings work as before and give the same bits. Where a matrix that you made
        yourself is not symmetric, its lower triangle counts.
        """
        return self.map_matrices(packed_matrix)

    def unpacked(self) -> "Factors":
        """The same factors, with every matrix in full."""
        return self.map_matrices(lambda x: on_shapes(unfolded, x))

    def __add__(self, other: "Factors") -> "Factors":
        check_same_origin("factors", self.origin, other.origin)
        turn = sum_of_turns(self.turn, other.turn)
        tables = "a_sums", "g_sums", "diagonals"
        if turn and any(getattr(self, x).keys() != getattr(other, x).keys() for x in tables):
            raise ValueError(
                f"factors of two groups of {turn.of} (collect=) cannot be added: micro-batches of "
                "one step take the same step="
            )
        one, other = alike(without_turn(self), without_turn(other))
        return dataclasses.replace(jax.tree.map(jnp.add, one, other), turn=turn)

    def __rmul__(self, weight: Any) -> "Factors":
        scaled, turn = lambda tree: jax.tree.map(lambda x: weight * x, tree), self.turn
        if turn is None or turn.is_step:
            return dataclasses.replace(scaled(without_turn(self)), turn=turn)
        return dataclasses.replace(  # means stay, and count for more or less
            self,
            a_sums=scaled(self.a_sums),
            a_counts=scaled(self.a_counts),
            turn=dataclasses.replace(turn, counts=scaled(turn.counts)),
        )

    def is_finite(self) -> dict[str, Array]:
        """``{name: scalar bool}``; usable inside jit."""
        return {
            layer.name: jnp.isfinite(self.diagonals[layer.name]).all()
            if layer.is_diagonal
            else jnp.isfinite(self.a_sums[layer.input]).all()
            & jnp.isfinite(self.g_sums[layer.name]).all()
            for layer in self.layers
            if self.turn is None or self.has_arrays_of(layer)
        }


def packed_matrix(x: Any) -> Any:
    """A stack of matrices, folded if they have the size for it and are not folded yet."""
    is_small = unfolded_size(x) < PACKED_FROM
    return x if is_small or is_folded(x) else on_shapes(fold_triangle, x)


def on_shapes(function: Callable[[Any], Any], x: Any) -> Any:
    """``function(x)``; of a shape, the shape of the result."""
    return jax.eval_shape(function, x) if isinstance(x, jax.ShapeDtypeStruct) else function(x)


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
    inputs, names = {layer.input for layer in layers}, {layer.name for layer in layers}

    def select(sums: dict[str, Any], chosen: set[str]) -> dict[str, Any]:
        return {name: x for name, x in sums.items() if name in chosen}

    measured = factors.corrections
    if measured is not None:
        measured = measured._replace(
            sums=select(measured.sums, names | set(factors.diagonals)),
            bias_sums=select(measured.bias_sums, names),
        )
    return dataclasses.replace(
        factors,
        a_sums=select(factors.a_sums, inputs),
        a_counts=select(factors.a_counts, inputs),
        g_sums=select(factors.g_sums, names),
        corrections=measured,
        layers=layers,
        turn=factors.turn and factors.turn.of_layers(names | set(factors.diagonals)),
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

    def follow(x: Any, other: Any) -> Any:
        if is_folded(x) == is_folded(other):
            return x
        return on_shapes(fold_triangle if is_folded(other) else unfolded, x)

    return factors.map_matrices(follow, like) if factors.layers == like.layers else factors


def mean_of(total: Any, count: Any, matrix_axes: int) -> Any:
    """``total / count``, and 0 where the count is 0; ``count`` has the axes of the stack.

    NumPy arrays stay in host memory: NumPy in, NumPy out.
    """
    numpy = np if isinstance(total, np.ndarray) else jnp
    count = numpy.where(count > 0, count, 1).astype(total.dtype)
    return total / count.reshape((*count.shape, *[1] * matrix_axes))
