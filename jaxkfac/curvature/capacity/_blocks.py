"""The eigenvalues of every block of a model, as lists whose products they are."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._coverage import owners
from jaxkfac.curvature._eigenbases import DiagonalEigenbasis, Eigenbases, KroneckerEigenbasis
from jaxkfac.interception import Layer

_ONE = np.ones(1)


class CapacityBlock(NamedTuple):
    r"""All products $\alpha_i \gamma_j$ of two lists of eigenvalues, never formed.

    Where eigenvalues are no products (a diagonal, or values measured one by one), the first
    list is ``[1.0]`` and the second holds them all.

    Attributes:
        rows: The shorter list, float64, ascending, not negative.
        columns: The longer one, likewise.
        clipped: The smallest and the largest product after clipping.
        rounding: Up to which rows and columns are rounding errors of zeros.
    """

    rows: np.ndarray
    columns: np.ndarray
    clipped: tuple[float, float]
    rounding: tuple[float, float] = (0.0, 0.0)

    @property
    def size(self) -> int:
        """How many eigenvalues there are."""
        return len(self.rows) * len(self.columns)


class Slice(NamedTuple):
    """One stacked slice of a layer, or a layer without a stack.

    Attributes:
        weight: The block of the weight; with a joint bias the bias is part of it.
        bias: The block of a bias that has one of its own (``bias="separate"``).
        a: Eigenvalues of the factor A, or ``None`` for a diagonal.
        g: G as a block, or ``None`` for a diagonal.
    """

    weight: CapacityBlock
    bias: CapacityBlock | None = None
    a: np.ndarray | None = None
    g: CapacityBlock | None = None

    @property
    def blocks(self) -> list[CapacityBlock]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class LayerBlocks(NamedTuple):
    """The blocks of a layer.

    Attributes:
        name: Name of the layer.
        slices: One for each stacked slice, in the order of the stack.
        stacked: Whether there is a stack at all.
        counted: The blocks that belong to the whole model: those of parameters for which
            no other layer answers.
    """

    name: str
    slices: tuple[Slice, ...]
    stacked: bool
    counted: tuple[CapacityBlock, ...]


def layer_blocks(bases: Eigenbases) -> list[LayerBlocks]:
    """The blocks of every layer, on the host in float64.

    Raises:
        ValueError: the bases are traced.
        NonFiniteFactorError: naming the layer whose eigenvalues are not finite.
    """
    owned = {owner.layer.name: owner for owner in owners(bases.layers)}
    found = []
    for layer in bases.layers:
        slices = tuple(_slices(bases, layer))
        owner = owned.get(layer.name)
        if owner is not None and owner.writes_weight:
            own_bias = owner.writes_bias
            counted = [b for s in slices for b in (s.blocks if own_bias else [s.weight])]
        elif owner is not None:  # another layer has the weight; the block of the bias is G
            blocks = [s.g if s.bias is None else s.bias for s in slices]
            counted = [block for block in blocks if block is not None]
        else:
            counted = []
        found.append(LayerBlocks(layer.name, slices, bool(layer.stack), tuple(counted)))
    return found


def _slices(bases: Eigenbases, layer: Layer) -> list[Slice]:
    basis = bases.basis(layer)
    if isinstance(basis, DiagonalEigenbasis):
        raw, clipped = (diagonal_rows(layer, x) for x in (basis.raw_diagonal, basis.diagonal))
        return [Slice(block) for block in _listed(raw, clipped, layer, rounding=0.0)]
    a = _on_host(basis.a_raw_values, layer)
    rounding = _rounding(basis.g_raw_values, layer.g_dense)
    g_blocks = _listed(basis.g_raw_values, basis.g_values, layer, rounding=rounding)
    weights, biases = _weights(basis, layer), [None] * len(g_blocks)
    if basis.bias_raw_values is not None:
        biases = _listed(basis.bias_raw_values, basis.bias_values, layer, rounding=0.0)
    elif bases.bias == "separate" and layer.bias is not None:
        biases = g_blocks
    a_rows = a.reshape(len(g_blocks), a.shape[-1])
    return [Slice(*parts) for parts in zip(weights, biases, a_rows, g_blocks, strict=True)]


def _weights(basis: KroneckerEigenbasis, layer: Layer) -> list[CapacityBlock]:
    if basis.raw_values is not None and basis.values is not None:  # measured one by one
        raw, clipped = (x.reshape(*x.shape[:-2], -1) for x in (basis.raw_values, basis.values))
        return _listed(raw, clipped, layer, rounding=0.0)
    raw_a, raw_g, clipped_a, clipped_g = (
        _on_host(x, layer)
        for x in (basis.a_raw_values, basis.g_raw_values, basis.a_values, basis.g_values)
    )
    indices = np.ndindex(raw_a.shape[:-1])
    rounding = (
        _rounding(basis.a_raw_values, layer.a_dense),
        _rounding(basis.g_raw_values, layer.g_dense),
    )
    return [_block(raw_a[i], raw_g[i], (clipped_a[i], clipped_g[i]), rounding) for i in indices]


def _listed(raw: Any, clipped: Any, layer: Layer, *, rounding: float) -> list[CapacityBlock]:
    """The blocks of eigenvalues ``(stack..., n)`` that are no products."""
    raw, clipped = _on_host(raw, layer), _on_host(clipped, layer)
    indices = np.ndindex(raw.shape[:-1])
    return [_block(_ONE, raw[i], (_ONE, clipped[i]), (0.0, rounding)) for i in indices]


def _rounding(values: Any, dense: bool) -> float:
    r"""$n \varepsilon$ of a decomposed matrix, $\varepsilon$ of its own dtype; 0 of a diagonal.

    The factor was rounded in its dtype when it was summed, so that a zero eigenvalue of it reads
    as up to about $n \varepsilon \lambda_{\max}$, in whatever precision it was decomposed.
    Diagonals and measured eigenvalues are sums of squares, right to their last digits.
    """
    return values.shape[-1] * float(np.finfo(values.dtype).eps) if dense else 0.0


def _block(
    a: np.ndarray,
    g: np.ndarray,
    clipped: tuple[np.ndarray, np.ndarray],
    rounding: tuple[float, float],
) -> CapacityBlock:
    # Rounding leaves small negative eigenvalues of a positive semi-definite matrix: they are 0.
    sides = [(np.sort(np.maximum(x, 0)), share) for x, share in zip((a, g), rounding, strict=True)]
    (rows, of_rows), (columns, of_columns) = sorted(sides, key=lambda side: len(side[0]))
    low, high = (math.prod(max(float(end(x)), 0.0) for x in clipped) for end in (np.min, np.max))
    errors = float(of_rows * rows[-1]), float(of_columns * columns[-1])
    return CapacityBlock(rows, columns, (low, high), errors)


def diagonal_rows(layer: Layer, diagonal: Any) -> Any:
    """``(stack..., elements)`` of a diagonal shaped like the parameter or like its slice."""
    weight = dataclasses.replace(layer.weight, index=())
    if diagonal.size != weight.size:
        weight = layer.weight
    matrix = weight.read(diagonal)
    return matrix.reshape(*matrix.shape[:-2], -1)


def _on_host(values: Any, layer: Layer) -> np.ndarray:
    if isinstance(values, Tracer):
        raise ValueError(
            "capacity_metrics measures on the host and these bases are traced; return the bases "
            "from jit and call it outside"
        )
    array = np.asarray(values).astype(np.float64)
    if not np.isfinite(array).all():
        raise NonFiniteFactorError(
            f"the eigenvalues of layer {layer.name!r} are not finite: "
            f"{int((~np.isfinite(array)).sum())} of {array.size}; decompose with placement='host' "
            "to retry in float64, or look for NaN in the batch"
        )
    return array
