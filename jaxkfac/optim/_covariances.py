"""Covariances of Adam in the eigenbasis: factors, with some sides taken from the gradient."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxkfac.blocks import Factors, Place, Side, Sides, stored_like
from jaxkfac.curvature import Eigenbases, owners
from jaxkfac.interception import Layer

Covariance = Literal["factors", "gradient"]


class Block(NamedTuple):
    """The parameters of a layer as one matrix, or as two.

    Attributes:
        layer: The layer; sides that are rotated are dense in it.
        weight: Whether it owns its weight.
        bias: Whether it owns its bias.
        joint: Whether the bias is the last row of the weight's matrix.
    """

    layer: Layer
    weight: bool
    bias: bool
    joint: bool

    def read(self, leaves: dict[str, Array], dtype: DTypeLike) -> dict[str, Array]:
        """``{name of second moment: (stack..., in[+1], out)}``, for the leaves in the tree."""
        layer = self.layer
        shapes = (layer.in_features, layer.out_features), (1, layer.out_features)
        weight, row = (
            None
            if matrix is None or matrix.path not in leaves
            else matrix.read(leaves[matrix.path]).reshape(*layer.stack, *shape).astype(dtype)
            for matrix, shape in zip((layer.weight, layer.bias), shapes, strict=True)
        )
        if self.joint:
            if weight is None and row is None:
                return {}
            halves = [
                jnp.zeros((*layer.stack, *shape), dtype) if half is None else half
                for half, shape in zip((weight, row), shapes, strict=True)
            ]
            return {layer.name: jnp.concatenate(halves, -2)}
        both = {layer.name: weight if self.weight else None}
        both[self.name_of_bias] = row if self.bias else None
        return {name: x for name, x in both.items() if x is not None}

    def write(self, leaves: dict[str, Array], steps: dict[str, Array]) -> None:
        """The inverse of :meth:`read`, into the parts of ``leaves`` that it owns."""
        layer, weight = self.layer, steps.get(self.layer.name)
        row = steps.get(self.name_of_bias)
        if self.joint and weight is not None:
            weight, row = weight[..., :-1, :], weight[..., -1:, :]
        targets = (layer.weight, weight, self.weight), (layer.bias, row, self.bias)
        for matrix, value, mine in targets:
            if mine and matrix is not None and value is not None and matrix.path in leaves:
                leaves[matrix.path] = matrix.write(leaves[matrix.path], value)

    @property
    def name_of_bias(self) -> str:
        """The name of the second moment of a bias with its own matrix."""
        return f"{self.layer.name} (bias)"

    def vectors(self, bases: Eigenbases, name: str) -> tuple[Array | None, Array | None]:
        """Eigenvectors of both sides of one of its matrices; ``None`` for the identity."""
        a, g = bases.spectra(self.layer)
        return a.vectors if name == self.layer.name else None, g.vectors


@dataclasses.dataclass(frozen=True, eq=False)
class Covariances:
    """The averaged covariances: the factors, with some sides replaced by those of the gradient.

    Attributes:
        like: Shapes.
        blocks: The parameters that are rotated.
        a: Names of the layers whose input side is the gradient's covariance.
        g: Names of the layers whose output side is the gradient's covariance.
        alone: Whether all sides are, so that no factors are needed.
    """

    like: Factors
    blocks: tuple[Block, ...]
    a: frozenset[str]
    g: frozenset[str]
    alone: bool

    @classmethod
    def of(cls, stacked: Factors, covariance: Covariance, max_side: int) -> "Covariances":
        """Choose the sides, from the shapes of the factors of a stacked model."""
        alone = covariance == "gradient"
        owned = {owner.layer.name: owner for owner in owners(stacked.layers)}
        paths = [(layer.weight.path, layer.weight.index) for layer in stacked.layers]

        def may_be_rotated(layer: Layer) -> bool:
            # Another reading of the parameter has its own factors, which both would change.
            single = paths.count((layer.weight.path, layer.weight.index)) == 1
            return layer.name in owned and owned[layer.name].writes_weight and (single or alone)

        shared = {layer.input for layer in stacked.layers if not may_be_rotated(layer)}
        layers, blocks, a, g = [], [], set(), set()
        for layer in stacked.layers:
            owner = owned.get(layer.name)
            if layer.is_diagonal or (owner is None and alone):
                continue
            joint, may = stacked.wants_ones(layer), may_be_rotated(layer)
            if (alone or not layer.a_dense) and layer.input not in shared and may:
                a |= {layer.name} if 1 < layer.in_features + joint <= max_side else set()
            if (alone or not layer.g_dense) and may:
                g |= {layer.name} if 1 < layer.out_features <= max_side else set()
            rotated = dataclasses.replace(
                layer,
                input=layer.name if layer.name in a or alone else layer.input,
                a_dense=layer.name in a or (layer.a_dense and not alone),
                g_dense=layer.name in g or (layer.g_dense and not alone),
            )
            layers.append(rotated)
            if owner is not None:
                blocks.append(Block(rotated, owner.writes_weight, owner.writes_bias, joint))
        gradient_sides = frozenset(a), frozenset(g)
        like = _with_sides(stacked, tuple(layers), *gradient_sides, alone=alone)
        return cls(like, tuple(blocks), *gradient_sides, alone)

    def of_gradient(self, grads: dict[str, Array], factors: Factors | None) -> Factors | None:
        """The contribution of a step to the average.

        Args:
            grads: Leaves of the gradient of the stacked model.
            factors: Factors of the stacked model, or ``None`` if none come.
        """
        if factors is None and not self.alone:
            return None
        like, dtype = self.like, self.like.terms.dtype
        terms = jnp.ones((), dtype) if self.alone or factors is None else factors.terms
        came = (terms > 0).astype(dtype)
        sides: Sides = {} if factors is None else factors.sides
        for block in self.blocks:
            layer, name = block.layer, block.layer.name
            matrix = block.read(grads, dtype).get(name)
            if name in self.a and matrix is not None:
                product = jnp.matmul(matrix, matrix.mT, precision=jax.lax.Precision.HIGHEST)
                count = jnp.broadcast_to(came, layer.stack)
                sides[Place("a", layer.input)] = Side(came * product, count, True)
            if name in self.g and matrix is not None:
                product = jnp.matmul(matrix.mT, matrix, precision=jax.lax.Precision.HIGHEST)
                # G is read as a mean over ``terms``, but A over its own count, here 1.
                sides[Place("g", name)] = Side(terms * product, terms, True)
        for place, shapes in like.sides.items():
            if place not in sides:
                data, count = (jnp.zeros(x.shape, x.dtype) for x in (shapes.data, shapes.count))
                sides[place] = Side(data, count)
        merged = {place: sides[place] for place in like.sides}
        return stored_like(like.with_sides(merged, terms=terms), like)


def _with_sides(
    stacked: Factors,
    layers: tuple[Layer, ...],
    a: frozenset[str],
    g: frozenset[str],
    *,
    alone: bool,
) -> Factors:
    """Shapes of the factors of some layers, packed if those are."""
    dtype = stacked.terms.dtype

    def side(layer: Layer, size: int | None = None, *, dense: bool = False) -> Any:
        sizes = () if size is None else [size] * (1 + dense)
        return jax.ShapeDtypeStruct((*layer.stack, *sizes), dtype)

    sides, collected = {}, stacked.sides
    for layer in layers:
        size = layer.in_features + stacked.wants_ones(layer)
        at_a, at_g = Place("a", layer.input), Place("g", layer.name)
        own_a, count = side(layer, size, dense=layer.a_dense), side(layer)
        if at_a in collected and layer.name not in a and not alone:
            own_a = collected[at_a].data
        sides[at_a] = Side(own_a, count)
        own_g = side(layer, layer.out_features, dense=layer.g_dense)
        sides[at_g] = Side(own_g) if alone or layer.name in g else collected[at_g]
    return stacked.with_sides(sides, layers=layers).packed_like(stacked)
