"""The power of one layer's block, and which layer answers for which part of a parameter."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkfac.curvature._eigenbases import (
    DiagonalEigenbasis,
    Eigenbases,
    KroneckerEigenbasis,
    map_slices,
)
from jaxkfac.interception import Index, Layer, ParameterMatrix, kind_named, slices
from jaxkfac.linalg import (
    Damping,
    DampingMode,
    ScaledPower,
    above_rcond,
    diagonal_power,
    kronecker_above_rcond,
    kronecker_power,
    measured_power,
    quadratic_form,
    scale_in_eigenbasis,
)

# ---------------- which layer answers for which part of which parameter


@dataclasses.dataclass(frozen=True)
class Owner:
    """A layer and the parameters it writes.

    Attributes:
        layer: The layer.
        writes_weight: False where another layer answers for the weight.
        writes_bias: Likewise for the bias; False where there is none.
    """

    layer: Layer
    writes_weight: bool
    writes_bias: bool


@functools.lru_cache(maxsize=64)  # it is asked for at every call outside jit
def owners(layers: tuple[Layer, ...]) -> tuple[Owner, ...]:
    """Give each (slice of a) parameter to one layer.

    Where several blocks cover the same parameter (a tied embedding and head, a parameter
    used in two orientations) a dense one goes before an embedding, and among equals the one
    that has the parameter's name: the embedding's rows are mostly zeros, the head sees every row.

    Returns:
        The layers that write anything, least preferred first, so that where a slice and
        its whole parameter are both covered the preferred one is written last.
    """
    mine = (layer for layer in layers if not layer.computed_from)
    ranked = sorted(mine, key=lambda layer: (kind_named(layer.kind).rank, "@" in layer.suffix))
    taken: set[tuple[str, Index]] = set()
    chosen = []
    for layer in ranked:
        weight, bias = (_take(matrix, taken) for matrix in (layer.weight, layer.bias))
        if weight or bias:
            chosen.append(Owner(layer, weight, bias))
    return tuple(reversed(chosen))


def _take(matrix: ParameterMatrix | None, taken: set[tuple[str, Index]]) -> bool:
    if matrix is None or (matrix.path, matrix.index) in taken:
        return False
    taken.add((matrix.path, matrix.index))
    return True


def covered_indices(layers: Sequence[Layer]) -> dict[str, set[Index]]:
    """``{parameter path: indices of the covered slices}``; ``()`` is all of it."""
    indices: dict[str, set[Index]] = {}
    for layer in layers:
        for matrix in (None if layer.computed_from else layer.weight, layer.bias):
            if matrix is not None:
                indices.setdefault(matrix.path, set()).add(matrix.index)
    return indices


def uncovered_mask(shape: tuple[int, ...], indices: set[Index]) -> np.ndarray:
    """True on the elements of a parameter that no slice covers.

    Only as many leading axes as the longest index has are kept: the mask broadcasts
    against the parameter after trailing axes of size 1 are added, as here they are.
    """
    depth = max((len(index) for index in indices), default=0)
    mask = np.ones(shape[:depth], bool)
    for index in indices:
        mask[slices(index)] = False
    return mask.reshape((*shape[:depth], *[1] * (len(shape) - depth)))


# ---------------- the power of one layer's block, applied to its leaves


class Power(NamedTuple):
    """A damped power, as :func:`apply_power` takes it."""

    exponent: float
    damping: Damping
    mode: DampingMode
    cut: float


class Form(NamedTuple):
    """What of a layer is known without its arrays; layers of one form are solved alike.

    Attributes:
        joint: The bias is the last row of the block's matrix; else its block is G.
        writes_weight: Whether the layer answers for its weight.
        writes_bias: Likewise for the bias.
    """

    joint: bool
    writes_weight: bool
    writes_bias: bool


class Operands(NamedTuple):
    """The arrays of one layer: its matrix ``(stack..., in, out)`` and its eigenbasis.

    Attributes:
        kernel: The weight; zeros where the tree lacks it and the bias is joint with it,
            ``None`` where the layer does not need it.
        row: The bias, ``(stack..., 1, out)``, likewise.
        basis: The layer's eigenbasis.
    """

    kernel: Array | None
    row: Array | None
    basis: KroneckerEigenbasis


def load_block(
    leaves: dict[str, Array], owner: Owner, bases: Eigenbases
) -> tuple[Form, Operands] | None:
    """What :func:`solve` takes; ``None`` if the tree has neither weight nor bias.

    Raises:
        ValueError: naming a layer whose eigenvectors were not computed.
    """
    layer, joint = owner.layer, bases.wants_ones(owner.layer)
    basis = bases.basis(layer)
    assert isinstance(basis, KroneckerEigenbasis)
    sides = ((layer.a_dense, basis.a_vectors), (layer.g_dense, basis.g_vectors))
    if any(dense and vectors is None for dense, vectors in sides):
        raise ValueError(
            f"the bases hold no eigenvectors of layer {layer.name!r}; decompose with vectors=True"
        )
    parts = load_parts(leaves, owner, joint=joint, dtype=basis.a_values.dtype)
    if parts is None:
        return None
    form, kernel, row = parts
    return form, Operands(kernel, row, basis)


def load_parts(
    leaves: dict[str, Array], owner: Owner, *, joint: bool, dtype: Any
) -> tuple[Form, Array | None, Array | None] | None:
    """Form, weight and bias of a layer; ``None`` if the tree has neither weight nor bias."""
    layer = owner.layer
    kernel_shape = (*layer.stack, layer.in_features, layer.out_features)
    row_shape = (*layer.stack, 1, layer.out_features)
    kernel = _read(layer.weight, leaves, kernel_shape, dtype)
    row = _read(layer.bias, leaves, row_shape, dtype)
    if kernel is None and row is None:
        return None
    form = Form(
        joint=joint,
        writes_weight=owner.writes_weight and kernel is not None,
        writes_bias=owner.writes_bias and row is not None,
    )
    if joint:  # each half needs the other
        kernel = jnp.zeros(kernel_shape, dtype) if kernel is None else kernel
        row = jnp.zeros(row_shape, dtype) if row is None else row
    else:
        kernel = kernel if form.writes_weight else None
        row = row if form.writes_bias else None
    return form, kernel, row


def solve(form: Form, operands: Operands, power: Power) -> tuple[Array | None, Array | None]:
    """The power applied to weight and bias, leading axes being a batch.

    ``None`` stands for a part that the layer does not write.
    """
    kernel, row, basis = operands
    if form.joint:
        assert kernel is not None and row is not None
        both = jnp.concatenate([kernel, row], axis=-2)
        both = _apply(powered_eigenvalues(basis, power), both, basis)
        kernel, row = both[..., :-1, :], both[..., -1:, :]
    else:
        if kernel is not None:
            kernel = _apply(powered_eigenvalues(basis, power), kernel, basis)
        if row is not None:  # the bias's block is G
            scale = powered_output_eigenvalues(basis, power)[..., None, :]
            row = scale_in_eigenbasis(row, scale, None, basis.g_vectors)
    return kernel if form.writes_weight else None, row if form.writes_bias else None


def _apply(power: ScaledPower, matrix: Array, basis: KroneckerEigenbasis) -> Array:
    # The root before and after: one square of it may be out of range where the result is not.
    vectors = basis.a_vectors, basis.g_vectors
    return scale_in_eigenbasis(matrix * power.root, power.values, *vectors) * power.root


def quadratic(form: Form, operands: Operands, power: Power) -> tuple[Array | None, Array | None]:
    """What :func:`solve` returns, multiplied with the weight and bias: sums over their elements.

    A joint bias is in the weight's. Of a joint block the layer has to write both.
    """
    kernel, row, basis = operands
    weight, bias = None, None
    if form.joint:
        assert kernel is not None and row is not None and form.writes_weight and form.writes_bias
        kernel, row = jnp.concatenate([kernel, row], axis=-2), None
    if kernel is not None:
        scale = powered_eigenvalues(basis, power)
        vectors = basis.a_vectors, basis.g_vectors
        weight = quadratic_form(kernel * scale.root, scale.values, *vectors)
    if row is not None:
        scale = powered_output_eigenvalues(basis, power)[..., None, :]
        bias = quadratic_form(row, scale, None, basis.g_vectors)
    return weight, bias


def powered_eigenvalues(basis: KroneckerEigenbasis, power: Power) -> ScaledPower:
    r"""The damped power of every eigenvalue of a layer's block, ``(stack..., in[+1], out)``.

    Raw eigenvalues for positive powers, clipped ones for negative powers; what the cut
    takes away, by raw eigenvalues, is 0. Measured eigenvalues get what the damping adds to
    the products they stand for.
    """
    a_raw, g_raw = basis.a_raw_values, basis.g_raw_values
    raw = power.exponent > 0
    a, g = (a_raw, g_raw) if raw else (basis.a_values, basis.g_values)
    how = {"power": power.exponent, "damping": power.damping, "mode": power.mode}
    if (measured := basis.measured) is not None:
        kept = None
        if power.cut:
            rows = measured.raw_values.reshape(*measured.raw_values.shape[:-2], -1)
            kept = above_rcond(rows, power.cut).reshape(measured.raw_values.shape)
        values = jnp.maximum(measured.raw_values if raw else measured.values, 0)
        return measured_power(values, measured.root, a, g, kept=kept, **how)
    kept = kronecker_above_rcond(a_raw, g_raw, power.cut) if power.cut else None
    return kronecker_power(a, g, kept=kept, **how)


def powered_output_eigenvalues(basis: KroneckerEigenbasis, power: Power) -> Array:
    """The same of a bias with a block of its own, ``(stack..., out)``."""
    raw, clipped = basis.g_raw_values, basis.g_values
    if basis.bias_raw_values is not None and basis.bias_values is not None:
        raw, clipped = basis.bias_raw_values, basis.bias_values
    return diagonal_power(
        raw if power.exponent > 0 else clipped,
        power=power.exponent,
        damping=power.damping,
        kept=above_rcond(raw, power.cut) if power.cut else None,
    )


def write_solved(
    written: dict[str, Array], layer: Layer, solved: tuple[Array | None, Array | None]
) -> None:
    """Write what :func:`solve` returned over its part of ``written``."""
    for matrix, part in zip((layer.weight, layer.bias), solved, strict=True):
        if part is not None and matrix is not None:
            written[matrix.path] = matrix.write(written[matrix.path], part)


def scale_diagonal(
    leaves: dict[str, Array],
    written: dict[str, Array],
    layer: Layer,
    basis: DiagonalEigenbasis,
    power: Power,
) -> None:
    """Write the power of a diagonal block over its part of ``written``; reads ``leaves``."""
    if layer.weight.path not in leaves:
        return
    raw = basis.raw_diagonal
    kept = None
    if power.cut:
        kept = map_slices(layer, raw, lambda x: above_rcond(x, power.cut).astype(x.dtype)) > 0
    scale = diagonal_power(
        raw if power.exponent > 0 else basis.diagonal,
        power=power.exponent,
        damping=power.damping,
        kept=kept,
    )
    write_scaled(leaves, written, layer, scale)


def write_scaled(
    leaves: dict[str, Array], written: dict[str, Array], layer: Layer, scale: Array
) -> None:
    """Write ``scale`` times the leaf of a diagonal, shaped like its parameter or its part."""
    path, index = layer.weight.path, layer.weight.at
    if path not in leaves:
        return
    part = leaves[path][index]
    layer.weight.check(part.shape)
    if scale.shape == leaves[path].shape:  # else it is shaped like the slice already
        scale = scale[index]
    new = (scale.reshape(part.shape) * part.astype(scale.dtype)).astype(part.dtype)
    written[path] = written[path].at[index].set(new) if index else new


def _read(
    matrix: ParameterMatrix | None, leaves: dict[str, Array], shape: tuple[int, ...], dtype: Any
) -> Array | None:
    if matrix is None or matrix.path not in leaves:
        return None
    return matrix.read(leaves[matrix.path]).reshape(shape).astype(dtype)
