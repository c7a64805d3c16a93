"""The eigenbases of every factor of a model."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.factors._factors import BiasMode, Factors
from jaxkfac.interception._layer import Layer
from jaxkfac.linalg import Spectrum, clip_eigenvalues


class KroneckerEigenbasis(NamedTuple):
    """The eigenbasis of one layer with two factors.

    Attributes:
        a_values: Clipped eigenvalues of A, ``(stack..., in[+1])``.
        a_vectors: Eigenvectors of A in columns, or ``None``: the identity where A is a
            diagonal, or not computed (``vectors=False``).
        g_values: Clipped eigenvalues of G, ``(stack..., out)``.
        g_vectors: Like ``a_vectors``.
        a_raw_values: Eigenvalues of A as decomposed.
        g_raw_values: Eigenvalues of G as decomposed.
    """

    a_values: Array
    a_vectors: Array | None
    g_values: Array
    g_vectors: Array | None
    a_raw_values: Array
    g_raw_values: Array


class DiagonalEigenbasis(NamedTuple):
    """The diagonal of one scale or lone bias, shaped like the parameter.

    Attributes:
        diagonal: Clipped over each stacked slice.
        raw_diagonal: As collected.
    """

    diagonal: Array
    raw_diagonal: Array


if TYPE_CHECKING:
    _Named = Mapping[str, KroneckerEigenbasis | DiagonalEigenbasis]
else:
    _Named = Mapping  # a runtime type checker would read an item, and so compute it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Eigenbases(_Named):
    """``{layer name: eigenbasis}``; values are clipped on read, stored as decomposed.

    Attributes:
        a: ``{layer.input: Spectrum}``: one for all layers that read the same input, with
            the ones row and column where any of them wants it.
        a_without_ones: ``{layer.input: Spectrum}`` without the ones row and column, only
            for inputs read by layers with and without a bias.
        g: ``{layer.name: Spectrum}``.
        diagonals: ``{layer.name: diagonal}``, shaped like the parameter.
        layers: The layers, static.
        bias: ``"joint"`` or ``"separate"``, static.
        max_condition: Bound of the clipping on read, static.
        floor: Smallest eigenvalue of the clipping on read, static.
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

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> KroneckerEigenbasis | DiagonalEigenbasis:
        for layer in self.layers:
            if layer.name == name:
                return self.basis(layer)
        raise UnknownLayerError(f"no layer {name!r}; the nearest names are {nearest(name, self)}")

    def __contains__(self, name: object) -> bool:
        return any(layer.name == name for layer in self.layers)

    def basis(self, layer: Layer) -> KroneckerEigenbasis | DiagonalEigenbasis:
        """The eigenbasis of ``layer``, found without a search."""
        if layer.is_diagonal:
            raw = self.diagonals[layer.name]
            return DiagonalEigenbasis(diagonal=self._clip_diagonal(layer, raw), raw_diagonal=raw)
        a, g = self.spectra(layer)
        return KroneckerEigenbasis(
            a_values=clip_eigenvalues(a.values, self.max_condition, self.floor),
            a_vectors=a.vectors,
            g_values=clip_eigenvalues(g.values, self.max_condition, self.floor),
            g_vectors=g.vectors,
            a_raw_values=a.values,
            g_raw_values=g.values,
        )

    def spectra(self, layer: Layer) -> tuple[Spectrum, Spectrum]:
        """The input and output spectra of a layer with two factors, as stored."""
        bare = layer.input in self.a_without_ones and not self.wants_ones(layer)
        return (self.a_without_ones if bare else self.a)[layer.input], self.g[layer.name]

    def wants_ones(self, layer: Layer) -> bool:
        """Whether the input factor of ``layer`` includes the ones column."""
        return self.bias == "joint" and layer.bias is not None

    def is_finite(self) -> dict[str, Bool[Array, ""]]:
        """``{name: scalar bool}``; usable inside jit, where nothing can be raised."""
        finite = {}
        for layer in self.layers:
            stored = (
                [self.diagonals[layer.name]]
                if layer.is_diagonal
                else [spectrum.values for spectrum in self.spectra(layer)]
            )
            finite[layer.name] = jnp.stack([jnp.isfinite(x).all() for x in stored]).all()
        return finite

    def _clip_diagonal(self, layer: Layer, raw: Array) -> Array:
        # Per stacked slice, so that a scanned model is clipped like its unrolled twin.
        whole = dataclasses.replace(layer.weight, index=())
        if raw.size != whole.size:
            whole = layer.weight
        matrix = whole.read(raw)
        rows = matrix.reshape(*matrix.shape[:-2], -1)
        clipped = clip_eigenvalues(rows, self.max_condition, self.floor)
        return whole.write(raw, clipped.reshape(matrix.shape))


def identity_bases(like: Factors, *, max_condition: float = 1e6, floor: float = 0.0) -> Eigenbases:
    """Bases in which every factor is the identity: preconditioning changes nothing.

    Args:
        like: Factors, or their shapes (``stats.factor_shapes``), which say what there is.
        max_condition: Kept for reading, as in :func:`eigendecompose`.
        floor: Kept for reading, as in :func:`eigendecompose`.

    Returns:
        Bases of the structure, shapes and dtypes :func:`eigendecompose` gives for ``like``.
    """
    a, bare, g, diagonals = {}, {}, {}, {}
    for layer in like.layers:
        if layer.is_diagonal:
            shape = like.diagonals[layer.name]
            diagonals[layer.name] = jnp.ones(shape.shape, shape.dtype)
            continue
        shape = like.a_sums[layer.input]
        ones, wants = like.has_ones(layer.input), like.wants_ones(layer)
        table, size = (bare, shape.shape[-1] - 1) if ones and not wants else (a, shape.shape[-1])
        if layer.input not in table:
            table[layer.input] = _identity(layer, size, shape.dtype, dense=layer.a_dense)
        shape = like.g_sums[layer.name]
        g[layer.name] = _identity(layer, shape.shape[-1], shape.dtype, dense=layer.g_dense)
    return Eigenbases(
        a=a,
        a_without_ones=bare,
        g=g,
        diagonals=diagonals,
        layers=like.layers,
        bias=like.bias,
        max_condition=max_condition,
        floor=floor,
    )


def _identity(layer: Layer, size: int, dtype: Any, *, dense: bool) -> Spectrum:
    vectors = jnp.broadcast_to(jnp.eye(size, dtype=dtype), (*layer.stack, size, size))
    return Spectrum(jnp.ones((*layer.stack, size), dtype), vectors if dense else None)
