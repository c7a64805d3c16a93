"""Gradients in the eigenbasis, block by block, and their quadratic forms."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature._damped_gradients import (
    BlockDamping,
    DampingByLayer,
    OwnedBlock,
    by_block,
    check_disjoint,
    diagonal_power_of,
    of_bias,
    of_block,
    owned_blocks,
    precondition_many,
    read_many,
)
from jaxkfac.curvature._eigenbases import (
    DiagonalEigenbasis,
    Eigenbases,
    KroneckerEigenbasis,
    check_all_vectors,
)
from jaxkfac.curvature._layer_power import (
    Power,
    powered_eigenvalues,
    powered_output_eigenvalues,
    quadratic,
)
from jaxkfac.interception import Layer
from jaxkfac.kinds import in_unit, rotate_gradients
from jaxkfac.linalg import ScaledPower

# ---------------- gradients multiplied with themselves, through a damped power of the curvature


def quadratic_forms(
    gradients: Mapping[str, Float[Array, "many ..."]],
    bases: Eigenbases,
    damping: DampingByLayer,
    power: float = -1.0,
) -> Float[Array, " many"]:
    r"""$\nabla_m^\top (F + \delta)^p \nabla_m$ for gradients stacked along a leading axis.

    Where every element has one block that answers for it, the blocks' parts are weighed sums of
    squares in the eigenbasis, with half the products that :func:`precondition_many` takes. Else
    that is what is multiplied.

    Args:
        gradients: As for :func:`precondition_many`, like all that follows.
        bases: The eigenbases.
        damping: $\delta$.
        power: $p$.

    Memory:
        Some copies of the gradients of the largest layer, or of one of its iterations.
    """
    if not _answered_once(bases, gradients):
        solved = precondition_many(gradients, bases, damping, power)
        parts = [(gradients[path] * x).reshape(len(x), -1).sum(-1) for path, x in solved.items()]
    else:
        parts = [
            part.sum(range(len(layer.stack)))
            for layer, both in by_block(gradients, bases, damping, power, quadratic)
            for part in both
            if part is not None
        ]
    return sum(parts[1:], parts[0])


def block_powers(
    bases: Eigenbases, layer: Layer, damping: BlockDamping, power: float = -1.0
) -> tuple[ScaledPower, Array | None]:
    r"""$(\lambda + \delta)^p$ of a layer's block, and of a bias that has one of its own.

    Args:
        bases: The eigenbases.
        layer: One with two factors.
        damping: $\delta$, as for :func:`precondition_many`.
        power: $p$.

    Returns:
        ``(stack..., in[+1], out)``, by a root that gradients are multiplied by, and
        ``(stack..., out)`` or ``None``.
    """
    basis = bases.basis(layer)
    assert isinstance(basis, KroneckerEigenbasis)
    own_bias = layer.bias is not None and not bases.wants_ones(layer)

    def one(basis: KroneckerEigenbasis) -> tuple[ScaledPower, Array | None]:
        both = Power(power, of_block(basis, damping), "exact", 0.0)
        own = Power(power, of_bias(basis, damping), "exact", 0.0)
        bias = powered_output_eigenvalues(basis, own) if own_bias else None
        return powered_eigenvalues(basis, both), bias

    for _ in layer.stack:
        one = jax.vmap(one)
    return one(basis)


def _answered_once(bases: Eigenbases, leaves: Mapping[str, Any]) -> bool:
    """Whether one layer answers for each element, and for a weight and a bias that is joint."""
    shapes = {path: leaf.shape[1:] for path, leaf in leaves.items()}
    try:
        check_disjoint(owned_blocks(bases), shapes)
    except ValueError:
        return False
    return True


# ---------------- gradients in the eigenbasis: each block's part, and what a damped power does to
# it there


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
