"""The power of one layer's block, applied to its leaves."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxkfac.curvature._coverage import Owner
from jaxkfac.curvature._eigenbases import DiagonalEigenbasis, KroneckerEigenbasis
from jaxkfac.interception._layer import Layer, ParameterMatrix
from jaxkfac.linalg import (
    Damping,
    DampingMode,
    diagonal_power,
    kronecker_power,
    scale_in_eigenbasis,
)


class Power(NamedTuple):
    """A damped power, as :func:`apply_power` takes it."""

    exponent: float
    damping: Damping
    mode: DampingMode


def scale_diagonal(
    leaves: dict[str, Array],
    written: dict[str, Array],
    layer: Layer,
    basis: DiagonalEigenbasis,
    power: Power,
) -> None:
    """Write the power of a diagonal block over its part of ``written``; reads ``leaves``."""
    path, index = layer.weight.path, layer.weight.index
    if path not in leaves:
        return
    values = basis.raw_diagonal if power.exponent > 0 else basis.diagonal
    if values.shape == leaves[path].shape:  # else it is shaped like the slice already
        values = values[index]
    part = leaves[path][index]
    scale = diagonal_power(values.reshape(part.shape), power=power.exponent, damping=power.damping)
    new = (scale * part.astype(scale.dtype)).astype(part.dtype)
    written[path] = written[path].at[index].set(new) if index else new


def scale_kronecker(
    leaves: dict[str, Array],
    written: dict[str, Array],
    owner: Owner,
    basis: KroneckerEigenbasis,
    power: Power,
    *,
    joint: bool,
) -> None:
    """Write the power of a Kronecker block over the parts of ``written`` that it owns.

    With ``joint`` the bias is the last row of the block's matrix; else its block is G. A leaf
    that ``leaves`` lacks counts as 0.
    """
    layer = owner.layer
    _check_vectors(layer, basis)
    raw = power.exponent > 0
    a = basis.a_raw_values if raw else basis.a_values
    g = basis.g_raw_values if raw else basis.g_values
    weight = layer.weight if layer.weight.path in leaves else None
    bias = layer.bias if layer.bias is not None and layer.bias.path in leaves else None
    if weight is None and bias is None:
        return
    shape = (*layer.stack, layer.in_features, layer.out_features)
    kernel = _read(weight, leaves, shape, a.dtype)
    row = _read(bias, leaves, (*layer.stack, 1, layer.out_features), a.dtype)
    if joint:
        kernel = jnp.concatenate([kernel, row], axis=-2)
    if joint or owner.writes_weight:
        scale = kronecker_power(a, g, power=power.exponent, damping=power.damping, mode=power.mode)
        kernel = scale_in_eigenbasis(kernel, scale, basis.a_vectors, basis.g_vectors)
    if joint:
        kernel, row = kernel[..., :-1, :], kernel[..., -1:, :]
    elif owner.writes_bias:  # the bias's block is G
        scale = diagonal_power(g, power=power.exponent, damping=power.damping)
        row = scale_in_eigenbasis(row, scale[..., None, :], None, basis.g_vectors)
    if weight is not None and owner.writes_weight:
        written[weight.path] = weight.write(written[weight.path], kernel)
    if bias is not None and owner.writes_bias:
        written[bias.path] = bias.write(written[bias.path], row)


def _read(
    matrix: ParameterMatrix | None, leaves: dict[str, Array], shape: tuple[int, ...], dtype: Any
) -> Array:
    if matrix is None:
        return jnp.zeros(shape, dtype)
    return matrix.read(leaves[matrix.path]).reshape(shape).astype(dtype)


def _check_vectors(layer: Layer, basis: KroneckerEigenbasis) -> None:
    if (layer.a_dense and basis.a_vectors is None) or (layer.g_dense and basis.g_vectors is None):
        raise ValueError(
            f"the bases hold no eigenvectors of layer {layer.name!r}; decompose with vectors=True"
        )
