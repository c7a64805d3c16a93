"""The power of one layer's block, and which layer preconditions which part of a parameter."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxkfac.curvature._eigenbases import (
    DiagonalEigenbasis,
    Eigenbases,
    KroneckerEigenbasis,
    check_vectors,
    map_slices,
)
from jaxkfac.interception import Layer, ParameterMatrix, kind_named
from jaxkfac.interception.values import Index, slices
from jaxkfac.linalg.spectral import (
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

# ---------------- which layer writes which parameter


@dataclasses.dataclass(frozen=True)
class Owner:
    """A layer and the parameters it writes.

    Attributes:
        layer: The layer.
        writes_weight: False if another layer writes the weight.
        writes_bias: False if another layer writes the bias, or there is none.
    """

    layer: Layer
    writes_weight: bool
    writes_bias: bool


@functools.lru_cache(maxsize=64)  # called at every call outside jit
def owners(layers: tuple[Layer, ...]) -> tuple[Owner, ...]:
    """Assign each parameter, or slice of one, to one layer.

    If several blocks cover the same parameter (a tied embedding and head, a parameter used in two
    orientations), a dense block goes before an embedding, because the embedding's rows are mostly
    zeros and the head sees every row. Among equals the block with the parameter's name goes first.

    Returns:
        The layers that write anything, the least preferred first: if a slice and the full parameter
        are both covered, the preferred block is written last.
    """
    # A computed weight is no parameter, so no step can be written into it.
    candidates = (layer for layer in layers if not layer.computed_from)
    ranked = sorted(
        candidates, key=lambda layer: (kind_named(layer.kind).rank, "@" in layer.suffix)
    )
    assigned: set[tuple[str, Index]] = set()
    chosen = []
    for layer in ranked:
        weight, bias = (_take(matrix, assigned) for matrix in (layer.weight, layer.bias))
        if weight or bias:
            chosen.append(Owner(layer, weight, bias))
    return tuple(reversed(chosen))


def _take(matrix: ParameterMatrix | None, assigned: set[tuple[str, Index]]) -> bool:
    if matrix is None or (matrix.path, matrix.index) in assigned:
        return False
    assigned.add((matrix.path, matrix.index))
    return True


def covered_indices(layers: Sequence[Layer]) -> dict[str, set[Index]]:
    """``{parameter path: indices of the covered slices}``; ``()`` is the full parameter."""
    indices: dict[str, set[Index]] = {}
    for layer in layers:
        for matrix in (None if layer.computed_from else layer.weight, layer.bias):
            if matrix is not None:
                indices.setdefault(matrix.path, set()).add(matrix.index)
    return indices


def uncovered_mask(shape: tuple[int, ...], indices: set[Index]) -> np.ndarray:
    """True on the elements of a parameter that no slice covers.

    The mask has only as many leading axes as the longest index; its trailing axes have size 1, so
    that it broadcasts against the parameter.
    """
    depth = max((len(index) for index in indices), default=0)
    mask = np.ones(shape[:depth], bool)
    for index in indices:
        mask[slices(index)] = False
    return mask.reshape((*shape[:depth], *[1] * (len(shape) - depth)))


def parameters_outside(
    layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Paths of the parameters that no layer owns completely."""
    indices = covered_indices(layers)
    return tuple(
        path
        for path, shape in shapes.items()
        if path not in indices or uncovered_mask(shape, indices[path]).any()
    )


# ---------------- the power of one layer's block


class Power(NamedTuple):
    """A damped power, with the options of :func:`apply_power`."""

    exponent: float
    damping: Damping
    mode: DampingMode
    cut: float


class Form(NamedTuple):
    """What is known of a layer without its arrays; layers with equal forms can be stacked.

    Attributes:
        joint: Whether the bias is the last row of the block's matrix; otherwise its block is G.
        writes_weight: Whether the layer writes its weight.
        writes_bias: Whether the layer writes its bias.
    """

    joint: bool
    writes_weight: bool
    writes_bias: bool


class Operands(NamedTuple):
    """The arrays of one layer: its matrix ``(stack..., in, out)`` and its eigenbasis.

    Attributes:
        kernel: The weight. If the tree has only the layer's joint bias, zeros; ``None`` if the
            layer does not need it.
        row: The bias, ``(stack..., 1, out)``; zeros or ``None`` in the same cases.
        basis: The layer's eigenbasis.
    """

    kernel: Array | None
    row: Array | None
    basis: KroneckerEigenbasis


def load_block(
    leaves: dict[str, Array], owner: Owner, bases: Eigenbases
) -> tuple[Form, Operands] | None:
    """The arguments of :func:`solve`; ``None`` if the tree has neither weight nor bias.

    Raises:
        ValueError: naming a layer whose eigenvectors were not computed.
    """
    layer, joint = owner.layer, bases.wants_ones(owner.layer)
    basis = bases.basis(layer)
    assert isinstance(basis, KroneckerEigenbasis)
    check_vectors(bases, layer)
    loaded = load_parts(leaves, owner, joint=joint, dtype=basis.a_values.dtype)
    if loaded is None:
        return None
    form, kernel, row = loaded
    return form, Operands(kernel, row, basis)


def load_parts(
    leaves: dict[str, Array], owner: Owner, *, joint: bool, dtype: DTypeLike
) -> tuple[Form, Array | None, Array | None] | None:
    """Read form, weight and bias of a layer; ``None`` if the tree has neither weight nor bias."""
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
    if joint:  # one matrix: a missing half is filled with zeros
        kernel = jnp.zeros(kernel_shape, dtype) if kernel is None else kernel
        row = jnp.zeros(row_shape, dtype) if row is None else row
    else:
        kernel = kernel if form.writes_weight else None
        row = row if form.writes_bias else None
    return form, kernel, row


def solve(form: Form, operands: Operands, power: Power) -> tuple[Array | None, Array | None]:
    """Apply the power to weight and bias; leading axes are a batch.

    A result is ``None`` if the layer does not write that parameter.
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
    # The root is applied before and after: its square may be out of range when the result is not.
    vectors = basis.a_vectors, basis.g_vectors
    return scale_in_eigenbasis(matrix * power.root, power.values, *vectors) * power.root


def quadratic(form: Form, operands: Operands, power: Power) -> tuple[Array | None, Array | None]:
    """Multiply weight and bias with what :func:`solve` returns, and sum over their elements.

    The sum of a joint bias is included in that of the weight. The layer of a joint block must write
    both.
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

    Positive powers use raw eigenvalues and negative powers clipped ones. Eigenvalues whose raw
    value is below ``cut`` give 0. Measured eigenvalues get the amount that the damping adds to the
    products that they replace.
    """
    a_raw, g_raw = basis.a_raw_values, basis.g_raw_values
    # Clipping limits what is divided by. Products with F take the values as they were decomposed.
    raw = power.exponent > 0
    a, g = (a_raw, g_raw) if raw else (basis.a_values, basis.g_values)
    how = {"power": power.exponent, "damping": power.damping, "mode": power.mode}
    if (measured := basis.measured) is not None:
        above = None
        if power.cut:
            rows = measured.raw_values.reshape(*measured.raw_values.shape[:-2], -1)
            above = above_rcond(rows, power.cut).reshape(measured.raw_values.shape)
        values = jnp.maximum(measured.raw_values if raw else measured.values, 0)
        return measured_power(values, measured.root, a, g, kept=above, **how)
    above = kronecker_above_rcond(a_raw, g_raw, power.cut) if power.cut else None
    return kronecker_power(a, g, kept=above, **how)


def powered_output_eigenvalues(basis: KroneckerEigenbasis, power: Power) -> Array:
    """Like :func:`powered_eigenvalues`, for a bias with a block of its own, ``(stack..., out)``."""
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
    """Write the results of :func:`solve` into the layer's parameters in ``written``."""
    for matrix, value in zip((layer.weight, layer.bias), solved, strict=True):
        if value is not None and matrix is not None:
            written[matrix.path] = matrix.write(written[matrix.path], value)


def scale_diagonal(
    leaves: dict[str, Array],
    written: dict[str, Array],
    layer: Layer,
    basis: DiagonalEigenbasis,
    power: Power,
) -> None:
    """Write the power of a diagonal block into ``written``, from the values in ``leaves``."""
    if layer.weight.path not in leaves:
        return
    raw = basis.raw_diagonal
    above = None
    if power.cut:
        # `map_slices` returns the dtype of the diagonal, so the answer comes as 1 or 0.
        above = map_slices(layer, raw, lambda x: above_rcond(x, power.cut).astype(x.dtype)) > 0
    scale = diagonal_power(
        raw if power.exponent > 0 else basis.diagonal,
        power=power.exponent,
        damping=power.damping,
        kept=above,
    )
    write_scaled(leaves, written, layer, scale)


def write_scaled(
    leaves: dict[str, Array], written: dict[str, Array], layer: Layer, scale: Array
) -> None:
    """Write ``scale`` times a leaf; ``scale`` has the shape of the parameter or of its slice."""
    path, index = layer.weight.path, layer.weight.at
    if path not in leaves:
        return
    leaf = leaves[path][index]
    layer.weight.check(leaf.shape)
    if scale.shape == leaves[path].shape:  # otherwise it already has the shape of the slice
        scale = scale[index]
    new = (scale.reshape(leaf.shape) * leaf.astype(scale.dtype)).astype(leaf.dtype)
    written[path] = written[path].at[index].set(new) if index else new


def _read(
    matrix: ParameterMatrix | None,
    leaves: dict[str, Array],
    shape: tuple[int, ...],
    dtype: DTypeLike,
) -> Array | None:
    if matrix is None or matrix.path not in leaves:
        return None
    return matrix.read(leaves[matrix.path]).reshape(shape).astype(dtype)
