"""The eigenbases of every factor of a model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from jaxkfac._errors import instance_of
from jaxkfac._text import array_text, number, short_repr, table_html
from jaxkfac.blocks import (
    BiasMode,
    BlockKronecker,
    Corrections,
    Factors,
    Layout,
    MeasuredValues,
    Origin,
    Place,
    Side,
    check_same_layers,
    check_same_origin,
    layout_of,
)
from jaxkfac.flax import serializable
from jaxkfac.interception import Layer
from jaxkfac.linalg.spectral import Spectrum, block_root, clip_eigenvalues


class KroneckerEigenbasis(NamedTuple):
    """The eigenbasis of one layer with two factors.

    Attributes:
        a_values: Clipped eigenvalues of A, ``(stack..., in[+1])``.
        a_vectors: Eigenvectors of A in columns. ``None`` if A is a diagonal, whose eigenvectors
            are the identity, or if they were not computed (``vectors=False``).
        g_values: Clipped eigenvalues of G, ``(stack..., out)``.
        g_vectors: Like ``a_vectors``.
        a_raw_values: Eigenvalues of A as decomposed.
        g_raw_values: Eigenvalues of G as decomposed.
        values: In corrected bases, the clipped eigenvalues of the full block, measured one by one,
            ``(stack..., in[+1], out)``. ``None`` if they are products of the two factors'.
        raw_values: ``values`` as measured, without clipping.
        bias_values: In corrected bases, the clipped eigenvalues of a bias with a block of its own,
            ``(stack..., out)``. ``None`` if they are those of G.
        bias_raw_values: ``bias_values`` as measured, without clipping.
        measured: In corrected bases, ``values`` and ``raw_values`` divided by a unit that keeps
            them in the dtype's range.
    """

    a_values: Array
    a_vectors: Array | None
    g_values: Array
    g_vectors: Array | None
    a_raw_values: Array
    g_raw_values: Array
    values: Array | None = None
    raw_values: Array | None = None
    bias_values: Array | None = None
    bias_raw_values: Array | None = None
    measured: MeasuredValues | None = None

    __repr__ = short_repr


class DiagonalEigenbasis(NamedTuple):
    """The diagonal of one scale or lone bias, shaped like the parameter.

    Attributes:
        diagonal: Clipped over each stacked slice.
        raw_diagonal: As collected.
    """

    diagonal: Array
    raw_diagonal: Array

    __repr__ = short_repr


if TYPE_CHECKING:
    # The layer decides which of the two it is; with Any, bases[name].a_values needs no isinstance.
    Basis = KroneckerEigenbasis | Any
    _Named = Mapping[str, Basis]
else:
    Basis = KroneckerEigenbasis | DiagonalEigenbasis
    _Named = Mapping  # a runtime type checker would read an item, which computes it


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Eigenbases(BlockKronecker, _Named):
    """``{layer name: eigenbasis}``; values are stored as decomposed and clipped when read.

    Attributes:
        a: ``{layer.input: Spectrum}``: one for all layers that read the same input. It includes
            the ones row and column if any of these layers needs them.
        a_without_ones: ``{layer.input: Spectrum}`` without the ones row and column, only
            for inputs read by layers with and without a bias.
        g: ``{layer.name: Spectrum}``.
        diagonals: ``{layer.name: diagonal}``, shaped like the parameter.
        layers: The layers, static.
        bias: ``"joint"`` or ``"separate"``, static.
        max_condition: Bound of the clipping when read, static.
        floor: Smallest eigenvalue after clipping, static.
        corrections: Measured eigenvalues (:func:`correct_eigenvalues`), or ``None``. If they sum
            over no loss term, the products of the factors' eigenvalues are read instead. Combine
            measurements of several batches in the same eigenbases with ``+``, or average them with
            :func:`update_average`.
        origin: Fisher type and likelihoods of the eigenvalues, static: those of the factors or of
            the measurement; ``None`` if not known.
    """

    # A pytree also holds shapes, shardings and in_axes, so the leaves are not Array here.
    a: dict[str, Any]
    a_without_ones: dict[str, Any]
    g: dict[str, Any]
    diagonals: dict[str, Any]
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    bias: BiasMode = dataclasses.field(metadata={"static": True})
    max_condition: float = dataclasses.field(metadata={"static": True})
    floor: float = dataclasses.field(metadata={"static": True})
    corrections: Corrections | None = None
    origin: Origin | None = dataclasses.field(default=None, metadata={"static": True})

    _TABLES: ClassVar[Mapping[str, str]] = {
        table: table for table in ("a", "a_without_ones", "g", "diagonals")
    }

    @classmethod
    def of_blocks(
        cls,
        layout: Layout,
        spectra: Mapping[Place, Any],
        *,
        max_condition: float,
        floor: float,
        origin: Origin | None = None,
    ) -> "Eigenbases":
        """Build bases from the spectra of all blocks of ``layout``; a diagonal's is its mean."""
        origin = None if origin is None else origin.of_average()
        form = layout.layers, layout.bias, max_condition, floor
        empty = cls({}, {}, {}, {}, *form, origin=origin)
        return empty.with_sides({place: Side(spectra[place]) for place in layout.blocks})

    def has_matrix_at(self, place: Place) -> bool:
        """Never: vectors are not symmetric, so a spectrum is stored in full."""
        return False

    def __repr__(self) -> str:
        """One line, because the arrays would fill the screen."""
        corrected = "" if self.corrections is None else ", with measured eigenvalues"
        return (
            f"Eigenbases of {len(self)} layers, max_condition={self.max_condition:g}, "
            f"floor={self.floor:g}{corrected}"
        )

    def _repr_html_(self) -> str:
        rows = []
        for layer in self.layers:
            basis = self.basis(layer)
            if isinstance(basis, DiagonalEigenbasis):
                values = [("diagonal", basis.diagonal, basis.raw_diagonal)]
            else:
                values = [
                    ("A", basis.a_values, basis.a_raw_values),
                    ("G", basis.g_values, basis.g_raw_values),
                ]
            for side, clipped, raw in values:
                rows.append((layer.name, side, array_text(clipped), *_extremes(clipped, raw)))
        head = ("layer", "factor", "eigenvalues", "largest", "smallest", "after clipping")
        return table_html(repr(self), head, rows, words=(0, 1, 2))

    def __getitem__(self, name: str) -> Basis:
        return self.basis(self.layer(name))

    def basis(self, layer: Layer) -> KroneckerEigenbasis | DiagonalEigenbasis:
        """The eigenbasis of ``layer``."""
        if layer.is_diagonal:
            return self.diagonal_basis(layer)
        a, g = self.spectra(layer)
        return KroneckerEigenbasis(
            a_values=self._clipped(a.values),
            a_vectors=a.vectors,
            g_values=self._clipped(g.values),
            g_vectors=g.vectors,
            a_raw_values=a.values,
            g_raw_values=g.values,
            **({} if self.corrections is None else self._measured(self.corrections, layer)),
        )

    def _clipped(self, values: Array) -> Array:
        return clip_eigenvalues(values, self.max_condition, self.floor)

    def block_root(self, layer: Layer) -> Array:
        """The number by which gradients of a layer with two factors are divided before squaring."""
        a, g = self.spectra(layer)
        return block_root(a.values, g.values)

    def _measured(self, corrections: Corrections, layer: Layer) -> dict[str, Any]:
        a, g = self.spectra(layer)
        root = self.block_root(layer)
        measured = corrections.where_any(
            # Divided by the block's unit until they are read: eigenvalues of a block are products
            # of two, and leave float32's range long before the factors do.
            corrections.measured(layer.name, root, self.max_condition, self.floor),
            MeasuredValues(
                _products(self._clipped(a.values), self._clipped(g.values), root),
                _products(a.values, g.values, root),
                root,
            ),
        )
        values, raw_values = measured.in_own_units
        fields: dict[str, Any] = {"measured": measured, "values": values, "raw_values": raw_values}
        if layer.name in corrections.bias_sums:
            raw = corrections.mean(corrections.bias_sums[layer.name])
            raw = corrections.where_any(raw, g.values)
            fields |= {"bias_values": self._clipped(raw), "bias_raw_values": raw}
        return fields

    def diagonal_basis(self, layer: Layer) -> DiagonalEigenbasis:
        """The basis of a layer that is a diagonal, clipped over each stacked slice."""
        raw = self.diagonals[layer.name]
        if self.corrections is not None:
            measured = self.corrections.mean(self.corrections.sums[layer.name])
            # A measurement without terms (a step at which nothing was collected) says nothing, and
            # 0 would be read as no curvature.
            raw = self.corrections.where_any(measured, raw)
        clipped = map_slices(layer, raw, self._clipped)
        return DiagonalEigenbasis(diagonal=clipped, raw_diagonal=raw)

    def spectra(self, layer: Layer) -> tuple[Spectrum, Spectrum]:
        """The input and output spectra of a layer with two factors, as stored."""
        # The eigenvectors of A with its column of ones are not those of A without it, so a layer
        # without a bias needs its own.
        bare = layer.input in self.a_without_ones and not self.wants_ones(layer)
        return (self.a_without_ones if bare else self.a)[layer.input], self.g[layer.name]

    def is_finite(self) -> dict[str, Bool[Array, ""]]:
        """``{name: scalar bool}``; usable inside jit, where nothing can be raised."""
        finite = {}
        for layer in self.layers:
            stored = (
                [self.diagonals[layer.name]]
                if layer.is_diagonal
                else [spectrum.values for spectrum in self.spectra(layer)]
            )
            if self.corrections is not None:
                stored += self.corrections.of_layer(layer.name)
            finite[layer.name] = jnp.stack([jnp.isfinite(x).all() for x in stored]).all()
        return finite

    def __add__(self, other: "Eigenbases") -> "Eigenbases":
        """Add measurements of two batches in the same eigenbases, those of ``self``."""
        if self.corrections is not None:
            check_same_origin("measured eigenvalues", self.origin, other.origin)
        return self.decayed_sum(other, 1)

    def decayed_sum(self, new: "Eigenbases", decay: ArrayLike) -> "Eigenbases":
        """These bases with corrections ``decay * own + new``; missing ones count as zero.

        Raises:
            ValueError: ``new`` is not corrected, or the bases have other layers or shapes.
        """
        check_same_layers(new, self)
        _check_same_shapes(new, self)
        if new.corrections is None:
            raise ValueError("only measured eigenvalues are added, and these bases hold none")
        total, origin = new.corrections, new.origin
        if self.corrections is not None:
            total, origin = self.corrections.decayed(decay, new.corrections), self.origin
        return dataclasses.replace(self, corrections=total, origin=origin)


def _products(a_values: Array, g_values: Array, root: Array) -> Array:
    # An eigenvalue that is zero may be decomposed as slightly negative; the product of two such
    # would be positive.
    a, g = (jnp.maximum(x, 0) for x in (a_values, g_values))
    # Divided first, because the product of both may be out of range.
    return (a[..., :, None] / root) * (g[..., None, :] / root)


def _check_same_shapes(new: Eigenbases, expected: Eigenbases) -> None:
    """Refuse bases of other shapes. Different eigenvectors of equal shapes go unnoticed."""
    shapes, expected_shapes = (
        {place: jax.tree.map(np.shape, side.data) for place, side in x.sides.items()}
        for x in (new, expected)
    )
    for place in shapes | expected_shapes:
        found, wanted = shapes.get(place), expected_shapes.get(place)
        if found != wanted:
            raise ValueError(
                f"measured eigenvalues add up in the same eigenvectors, and these bases' "
                f"{place.table} of {place.key!r} have the shapes {found}, expected {wanted}"
            )


def check_vectors(bases: Eigenbases, layer: Layer) -> None:
    """Refuse bases without the eigenvectors of a layer with two factors (``vectors=False``)."""
    sides = zip(bases.spectra(layer), (layer.a_dense, layer.g_dense), strict=True)
    if any(dense and spectrum.vectors is None for spectrum, dense in sides):
        raise ValueError(
            f"the bases hold no eigenvectors of layer {layer.name!r}; decompose with vectors=True"
        )


def check_all_vectors(bases: Eigenbases, layer: Layer, purpose: str) -> None:
    """Refuse bases with only some eigenvectors of a layer (``rank=``), if all are needed."""
    for spectrum in bases.spectra(layer):
        if spectrum.vectors is not None and len(set(spectrum.vectors.shape[-2:])) > 1:
            rows, columns = spectrum.vectors.shape[-2:]
            raise ValueError(
                f"a factor of layer {layer.name!r} has {columns} eigenvectors of {rows}: {purpose} "
                "need all of them, that is bases without rank="
            )


def check_bases(bases: object) -> None:
    """Refuse what is not eigenbases, for example factors.

    Raises:
        TypeError: naming what it is.
    """
    remedy = "as jk.eigendecompose(factors) gives them"
    instance_of("bases", bases, Eigenbases, remedy)


def map_slices(layer: Layer, raw: Array, function: Callable[[Array], Array]) -> Array:
    """Map each stacked slice of a diagonal as a row, ``(stack..., n)`` to the same shape.

    Clipping by slice treats a scanned model like its unrolled twin. ``raw`` is shaped like the
    parameter, even if the layer is one slice of it, or like that slice.
    """
    matrix_of = dataclasses.replace(layer.weight, index=())
    if raw.size != matrix_of.size:
        matrix_of = layer.weight
    matrix = matrix_of.read(raw)
    rows = matrix.reshape(*matrix.shape[:-2], -1)
    return matrix_of.write(raw, function(rows).reshape(matrix.shape))


def identity_bases(
    like: Factors,
    *,
    max_condition: float = 1e6,
    floor: float = 0.0,
    eye: Callable[[int, Any], Array | np.ndarray] | None = None,
) -> Eigenbases:
    """Bases in which every factor is the identity: preconditioning changes nothing.

    Args:
        like: Factors, or their shapes (``stats.factor_shapes``).
        max_condition: Stored for reading, as in :func:`eigendecompose`.
        floor: Stored for reading, as in :func:`eigendecompose`.
        eye: Maps a size and a dtype to the eigenvectors; ``jnp.eye`` by default.

    Returns:
        Bases with the structure, shapes and dtypes of :func:`eigendecompose` for ``like``.
    """
    layout = layout_of(like.layers, like.bias)
    spectra: dict[Place, Any] = {}
    for place, block in layout.blocks.items():
        source = block.source
        shape = like.side(source.place).data
        if place.table == "diagonals":
            spectra[place] = jnp.ones(shape.shape, shape.dtype)
            continue
        n, dtype = block.size, shape.dtype
        vectors: Any = None  # a diagonal side may be as long as a vocabulary: its square is huge
        if source.dense:
            one = jnp.eye(n, dtype=dtype) if eye is None else eye(n, dtype)
            numpy = np if isinstance(one, np.ndarray) else jnp  # in host memory this is a view
            vectors = numpy.broadcast_to(one, (*source.stack, *one.shape))
        spectra[place] = Spectrum(jnp.ones((*source.stack, n), dtype), vectors)
    clipping = {"max_condition": max_condition, "floor": floor}
    return Eigenbases.of_blocks(layout, spectra, **clipping, origin=like.origin)


def _extremes(clipped: Any, raw: object) -> tuple[str, str, str]:
    """Largest, smallest, and smallest clipped value of a stack; empty for shapes and tracers."""
    if isinstance(raw, Tracer) or not isinstance(raw, jax.Array | np.ndarray):
        return "", "", ""
    extremes = (jnp.max(raw), jnp.min(raw), jnp.min(clipped))
    largest, smallest, raised = (number(float(x)) for x in jax.device_get(extremes))
    return largest, smallest, raised
