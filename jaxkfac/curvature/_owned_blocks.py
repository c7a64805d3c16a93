"""The blocks of a model's curvature: what each answers for, and its eigenvalues, not negative."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.curvature._coverage import covered_indices, owners, uncovered_mask
from jaxkfac.curvature._damped_gradients import diagonal_rows
from jaxkfac.curvature._eigenbases import DiagonalEigenbasis, Eigenbases
from jaxkfac.interception import Layer, ParameterMatrix


class OwnedBlock(NamedTuple):
    """A layer, and the parameters for which it answers.

    Attributes:
        layer: The layer.
        parameters: Its weight, its bias, or both.
    """

    layer: Layer
    parameters: tuple[ParameterMatrix, ...]


def owned_blocks(bases: Eigenbases) -> list[OwnedBlock]:
    """The layers that answer for parameters, in their order.

    Raises:
        ValueError: a weight and a bias that is joint with it are answered for by two layers.
    """
    found = {}
    for owner in owners(bases.layers):
        layer = owner.layer
        both = (layer.weight, owner.writes_weight), (layer.bias, owner.writes_bias)
        parameters = tuple(matrix for matrix, mine in both if matrix is not None and mine)
        if bases.wants_ones(layer) and len(parameters) == 1:
            raise ValueError(
                f"the weight of layer {layer.name!r} and its bias are one block, and another layer "
                'answers for one of them: collect factors with bias="separate"'
            )
        found[layer.name] = OwnedBlock(layer, parameters)
    return [found[layer.name] for layer in bases.layers if layer.name in found]


def block_eigenvalues(bases: Eigenbases, block: OwnedBlock) -> tuple[Array | None, Array | None]:
    """Raw eigenvalues of a layer's blocks, negative ones as 0.

    Returns:
        Of the weight, with a joint bias of both, ``(stack..., in[+1], out)``, of a diagonal
        ``(stack..., n)``; and of a bias with a block of its own, ``(stack..., out)``. ``None`` for
        what another layer answers for.
    """
    layer, basis, weight, bias = block.layer, bases.basis(block.layer), None, None
    if isinstance(basis, DiagonalEigenbasis):
        return diagonal_rows(layer, basis.raw_diagonal), None
    if layer.weight in block.parameters:
        raw = basis.raw_values
        a, g = (jnp.maximum(x, 0) for x in (basis.a_raw_values, basis.g_raw_values))
        weight = a[..., :, None] * g[..., None, :] if raw is None else jnp.maximum(raw, 0)
    if layer.bias in block.parameters and not bases.wants_ones(layer):
        raw = basis.bias_raw_values
        bias = jnp.maximum(basis.g_raw_values if raw is None else raw, 0)
    return weight, bias


def parameters_outside(
    layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Paths of the parameters that no layer answers for, or not in all of their parts."""
    indices = covered_indices(layers)
    return tuple(
        path
        for path, shape in shapes.items()
        if path not in indices or uncovered_mask(shape, indices[path]).any()
    )


def check_disjoint(blocks: Sequence[OwnedBlock], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse blocks of which two answer for the same elements of a parameter.

    Raises:
        UnknownLayerError: a parameter is not there.
        ValueError: naming the layers.
    """
    readers: dict[str, list[tuple[str, ParameterMatrix]]] = {}
    for block in blocks:
        for matrix in block.parameters:
            readers.setdefault(matrix.path, []).append((block.layer.name, matrix))
    for path, owned in readers.items():
        if path not in shapes:
            raise UnknownLayerError(
                f"the bases cover {path!r}, and there is no such parameter; the nearest paths are "
                f"{nearest(path, shapes)}"
            )
        mask = uncovered_mask(shapes[path], {matrix.index for _, matrix in owned})
        size = math.prod(shapes[path])
        covered = size - size // mask.size * int(mask.sum())
        if sum(matrix.size for _, matrix in owned) > covered:
            names = ", ".join(repr(name) for name, _ in owned)
            raise ValueError(
                f"{names} answer for the same elements of {path!r}: choose one with layers="
            )
