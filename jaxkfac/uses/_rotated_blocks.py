"""Quadratic forms of gradients, and gradients in the eigenbasis, block by block."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature import (
    DiagonalEigenbasis,
    Eigenbases,
    KroneckerEigenbasis,
    Power,
    check_all_vectors,
    powered_eigenvalues,
    powered_output_eigenvalues,
    quadratic,
)
from jaxkfac.curvature.per_example import read_many
from jaxkfac.interception import Layer
from jaxkfac.kinds import in_unit, rotate_gradients
from jaxkfac.linalg import sum_over_axis
from jaxkfac.linalg.spectral import ScaledPower
from jaxkfac.uses._damped_gradients import (
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
)

# ---------------- quadratic forms of gradients


def quadratic_forms(
    gradients: Mapping[str, Float[Array, "many ..."]],
    bases: Eigenbases,
    damping: DampingByLayer,
    power: float = -1.0,
) -> Float[Array, " many"]:
    r"""$\nabla_m^\top (F + \delta)^p \nabla_m$ for gradients stacked along a leading axis.

    If every element belongs to one block only, the form is a weighted sum of squares in the
    eigenbasis, which takes half the products of :func:`precondition_many`. Otherwise the result of
    that function is multiplied with the gradients.

    Args:
        gradients: As for :func:`precondition_many`; so are the other arguments.
        bases: The eigenbases.
        damping: $\delta$.
        power: $p$.

    Memory:
        Some copies of the gradients of the largest layer, or of one of its iterations.
    """
    # Where blocks overlap, only the block that owns an element counts there. The forms of all
    # blocks would count such an element twice.
    if not _answered_once(bases, gradients):
        solved = precondition_many(gradients, bases, damping, power)
        forms = [(gradients[path] * x).reshape(len(x), -1).sum(-1) for path, x in solved.items()]
    else:
        forms = [
            form.sum(range(len(layer.stack)))
            for layer, both in by_block(gradients, bases, damping, power, quadratic)
            for form in both
            if form is not None
        ]
    return sum(forms[1:], forms[0])


def block_powers(
    bases: Eigenbases, layer: Layer, damping: BlockDamping, power: float = -1.0
) -> tuple[ScaledPower, Array | None]:
    r"""$(\lambda + \delta)^p$ of a layer's block, and of a separate bias.

    Args:
        bases: The eigenbases.
        layer: A layer with two factors.
        damping: $\delta$, as for :func:`precondition_many`.
        power: $p$.

    Returns:
        ``(stack..., in[+1], out)`` with the root that gradients are multiplied by; and
        ``(stack..., out)`` for a separate bias, or ``None``.
    """
    basis = bases.basis(layer)
    assert isinstance(basis, KroneckerEigenbasis)
    own_bias = layer.bias is not None and not bases.wants_ones(layer)

    def one(basis: KroneckerEigenbasis) -> tuple[ScaledPower, Array | None]:
        both = Power(power, of_block(basis, damping), "exact", 0.0)
        bias_power = Power(power, of_bias(basis, damping), "exact", 0.0)
        bias = powered_output_eigenvalues(basis, bias_power) if own_bias else None
        return powered_eigenvalues(basis, both), bias

    # A heuristic damping is a number for each entry of the stack.
    for _ in layer.stack:
        one = jax.vmap(one)
    return one(basis)


def _answered_once(bases: Eigenbases, leaves: Mapping[str, Any]) -> bool:
    """Whether every element belongs to one layer, and a weight and its joint bias to the same."""
    shapes = {path: leaf.shape[1:] for path, leaf in leaves.items()}
    try:
        check_disjoint(owned_blocks(bases), shapes)
    except ValueError:
        return False
    return True


# ---------------- gradients in the eigenbasis


class RotatedPart(NamedTuple):
    """One block's part of a gradient: a weight (with its joint bias), or a separate bias.

    Attributes:
        layer: The layer that owns it.
        shape: ``(stack..., rows, columns)``: ``(in[+1], out)`` for a weight, ``(1, n)`` for a
            diagonal or a bias.
        is_bias: Whether it is a separate bias.
    """

    layer: Layer
    shape: tuple[int, ...]
    is_bias: bool

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


def rotated_parts(bases: Eigenbases) -> tuple[RotatedPart, ...]:
    """The parts of a gradient, in the order of :func:`rotated`.

    Raises:
        ValueError: bases with only some eigenvectors (``rank=``), which would project a gradient
            instead of rotating it; or a weight and a joint bias that belong to two layers.
    """
    all_parts = []
    for block in owned_blocks(bases):
        layer, stack = block.layer, block.layer.stack
        if layer.is_diagonal:
            columns = layer.weight.size // math.prod(stack)
            all_parts.append(RotatedPart(layer, (*stack, 1, columns), is_bias=False))
            continue
        check_all_vectors(bases, layer, "rotated gradients")
        joint, out = bases.wants_ones(layer), layer.out_features
        if layer.weight in block.parameters:
            all_parts.append(RotatedPart(layer, (*stack, layer.in_features + joint, out), False))
        if layer.bias in block.parameters and not joint:
            all_parts.append(RotatedPart(layer, (*stack, 1, out), is_bias=True))
    return tuple(all_parts)


def rotated(
    gradients: Mapping[str, Float[Array, "many ..."]],
    bases: Eigenbases,
    done: Mapping[str, Float[Array, "..."]] | None = None,
) -> list[Float[Array, "..."]]:
    r"""$Q_A^\top \nabla_m Q_G$ of every block, in the order of :func:`rotated_parts`.

    Args:
        gradients: ``{parameter path: (many, *parameter)}``.
        bases: Eigenbases with all vectors.
        done: ``{layer name: (stack..., many, in[+1], out)}``: weights (with their joint bias)
            that are already rotated; ``gradients`` may lack these.
    """
    rotated_values = []
    for block in owned_blocks(bases):
        weight, bias = rotated_block(gradients, bases, block)
        if done is not None and block.layer.name in done:
            weight = done[block.layer.name]
        rotated_values += [x for x in (weight, bias) if x is not None]
    return rotated_values


def rotated_block(
    gradients: Mapping[str, Float[Array, "many ..."]], bases: Eigenbases, block: OwnedBlock
) -> tuple[Array | None, Array | None]:
    """Rotate one block: its weight, together with a joint bias, and a separate bias.

    A result is ``None`` if the block does not have it, and for a weight that ``gradients`` lacks.
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
        root: ``(stack..., 1, 1)``. Multiply the values by its square; the square itself may be out
            of range.
    """

    values: Array
    root: Array


def rotated_powers(
    bases: Eigenbases, damping: BlockDamping, power: float = -1.0
) -> list[PartPower]:
    r"""$(\lambda + \delta)^p$ of every block, in the order of :func:`rotated_parts`."""
    powers = []
    for block in owned_blocks(bases):
        layer, basis = block.layer, bases.basis(block.layer)
        one = jnp.ones((*layer.stack, 1, 1), jnp.float32)
        if isinstance(basis, DiagonalEigenbasis):
            scale = diagonal_power_of(layer, basis, damping, power)[..., 0, :, :]
            powers.append(PartPower(scale, one.astype(scale.dtype)))
            continue
        both, bias = block_powers(bases, layer, damping, power)
        if layer.weight in block.parameters:
            powers.append(PartPower(both.values, both.root))
        if layer.bias in block.parameters and not bases.wants_ones(layer):
            assert bias is not None
            powers.append(PartPower(bias[..., None, :], one.astype(bias.dtype)))
    return powers


def rotated_squares(
    gradients: list[Float[Array, "..."]], bases: Eigenbases
) -> list[Float[Array, "..."]]:
    """Sums of squares over examples, in the units of :class:`Corrections`."""
    squares = []
    for gradient, about in zip(gradients, rotated_parts(bases), strict=True):
        layer, many = about.layer, len(about.layer.stack)
        in_range = layer.is_diagonal or about.is_bias  # no products of two factors' eigenvalues
        unit = None if in_range else bases.block_root(layer)
        squares.append(sum_over_axis(jnp.square(in_unit(gradient, unit)), many))
    return squares
