"""Gradients in the eigenbasis: each block's part, and what a damped power does to it there."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature._damped_gradients import BlockDamping, diagonal_power_of, read_many
from jaxkfac.curvature._eigenbases import DiagonalEigenbasis, Eigenbases, check_all_vectors
from jaxkfac.curvature._owned_blocks import OwnedBlock, owned_blocks
from jaxkfac.curvature._quadratic_forms import block_powers
from jaxkfac.interception import Layer
from jaxkfac.kinds import in_unit, rotate_gradients


class RotatedPart(NamedTuple):
    """One block's part of a gradient: a weight, with a joint bias both, or a bias by itself.

    Attributes:
        layer: The layer that answers for it.
        shape: ``(stack..., rows, columns)``: ``(in[+1], out)`` of a weight, ``(1, n)`` of a
            diagonal and of a bias.
        is_bias: Whether it is a bias with a block of its own.
    """

    layer: Layer
    shape: tuple[int, ...]
    is_bias: bool

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def rotated_parts(bases: Eigenbases) -> tuple[RotatedPart, ...]:
    """The parts of a gradient, in the order of :func:`rotated`.

    Raises:
        ValueError: bases whose eigenvectors are not all there (``rank=``), in which a gradient is
            not rotated but projected; or a weight and a joint bias that two layers answer for.
    """
    parts = []
    for block in owned_blocks(bases):
        layer, stack = block.layer, block.layer.stack
        if layer.is_diagonal:
            columns = layer.weight.size // math.prod(stack)
            parts.append(RotatedPart(layer, (*stack, 1, columns), is_bias=False))
            continue
        check_all_vectors(bases, layer, "rotated gradients")
        joint, out = bases.wants_ones(layer), layer.out_features
        if layer.weight in block.parameters:
            parts.append(RotatedPart(layer, (*stack, layer.in_features + joint, out), False))
        if layer.bias in block.parameters and not joint:
            parts.append(RotatedPart(layer, (*stack, 1, out), is_bias=True))
    return tuple(parts)


def rotated(
    gradients: Mapping[str, Float[Array, "many ..."]],
    bases: Eigenbases,
    done: Mapping[str, Float[Array, "..."]] | None = None,
) -> list[Float[Array, "..."]]:
    r"""$Q_A^\top \nabla_m Q_G$ of every block, in the order of :func:`rotated_parts`.

    Args:
        gradients: ``{parameter path: (many, *parameter)}``.
        bases: Eigenbases with all vectors.
        done: ``{layer name: (stack..., many, in[+1], out)}`` of weights, with a joint bias of
            both, that are rotated already; ``gradients`` may lack these.
    """
    found = []
    for block in owned_blocks(bases):
        weight, bias = rotated_block(gradients, bases, block)
        if done is not None and block.layer.name in done:
            weight = done[block.layer.name]
        found += [part for part in (weight, bias) if part is not None]
    return found


def rotated_block(
    gradients: Mapping[str, Float[Array, "many ..."]], bases: Eigenbases, block: OwnedBlock
) -> tuple[Array | None, Array | None]:
    """Rotate one block: its weight, together with a joint bias, and a bias of its own.

    ``None`` for what the block does not have, and for a weight that ``gradients`` lacks.
    """
    layer = block.layer
    kernel, row = (
        read_many(gradients[matrix.path], matrix, layer)
        if matrix is not None and matrix in block.parameters and matrix.path in gradients
        else None
        for matrix in (layer.weight, layer.bias)
    )
    if layer.is_diagonal:
        assert kernel is not None
        lead = len(layer.stack) + 1
        return kernel.reshape(*kernel.shape[:lead], 1, -1), None
    a, g = bases.spectra(layer)
    dtype = g.values.dtype
    if bases.wants_ones(layer):
        if kernel is not None and row is not None:
            kernel = jnp.concatenate([kernel, row], -2)
        row = None
    if kernel is not None:
        kernel = rotate_gradients(kernel.astype(dtype), a.vectors, g.vectors)
    return kernel, None if row is None else rotate_gradients(row.astype(dtype), None, g.vectors)


class PartPower(NamedTuple):
    """A damped power of the eigenvalues of a :class:`RotatedPart`.

    Attributes:
        values: ``(stack..., rows, columns)``.
        root: ``(stack..., 1, 1)``: by its square the values are to be multiplied, which by itself
            may be out of range.
    """

    values: Array
    root: Array


def rotated_powers(
    bases: Eigenbases, damping: BlockDamping, power: float = -1.0
) -> list[PartPower]:
    r"""$(\lambda + \delta)^p$ of every block, in the order of :func:`rotated_parts`."""
    found = []
    for block in owned_blocks(bases):
        layer, basis = block.layer, bases.basis(block.layer)
        one = jnp.ones((*layer.stack, 1, 1), jnp.float32)
        if isinstance(basis, DiagonalEigenbasis):
            scale = diagonal_power_of(layer, basis, damping, power)[..., 0, :, :]
            found.append(PartPower(scale, one.astype(scale.dtype)))
            continue
        both, bias = block_powers(bases, layer, damping, power)
        if layer.weight in block.parameters:
            found.append(PartPower(both.values, both.root))
        if layer.bias in block.parameters and not bases.wants_ones(layer):
            assert bias is not None
            found.append(PartPower(bias[..., None, :], one.astype(bias.dtype)))
    return found


def rotated_squares(
    parts: list[Float[Array, "..."]], bases: Eigenbases
) -> list[Float[Array, "..."]]:
    """Sums of squares, in the units in which :class:`Corrections` hold them."""
    found = []
    for part, about in zip(parts, rotated_parts(bases), strict=True):
        layer, many = about.layer, len(about.layer.stack)
        whole_range = layer.is_diagonal or about.is_bias  # squares that are in range
        unit = None if whole_range else bases.block_root(layer)
        found.append(jnp.square(in_unit(part, unit)).sum(many))
    return found
