"""Covariances of Adam in the eigenbasis: factors, with some sides taken from the gradient."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxkfac.blocks import Factors, stored_like
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
        tables = {table: {} for table in ("a_sums", "a_counts", "g_sums")}
        for block in self.blocks:
            layer, name = block.layer, block.layer.name
            matrix = block.read(grads, dtype).get(name)
            if name in self.a and matrix is not None:
                product = jnp.matmul(matrix, matrix.mT, precision=jax.lax.Precision.HIGHEST)
                tables["a_sums"][layer.input] = came * product
                tables["a_counts"][layer.input] = jnp.broadcast_to(came, layer.stack)
            if name in self.g and matrix is not None:
                product = jnp.matmul(matrix.mT, matrix, precision=jax.lax.Precision.HIGHEST)
                # G is read as a mean over ``terms``, but A over its own count, here 1.
                tables["g_sums"][name] = terms * product
        merged = {}
        for table, new in tables.items():
            table_of_factors = {} if factors is None else getattr(factors, table)
            merged[table] = {
                key: new[key]
                if key in new
                else table_of_factors.get(key, jnp.zeros(x.shape, x.dtype))
                for key, x in getattr(like, table).items()
            }
        return stored_like(dataclasses.replace(like, terms=terms, **merged), like)


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

    def side(layer: Layer, size: int, *, dense: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*layer.stack, *[size] * (1 + dense)), dtype)

    a_sums, a_counts, g_sums = {}, {}, {}
    for layer in layers:
        size = layer.in_features + stacked.wants_ones(layer)
        own_a = side(layer, size, dense=layer.a_dense)
        own_g = side(layer, layer.out_features, dense=layer.g_dense)
        from_factors = layer.input in stacked.a_sums and layer.name not in a and not alone
        a_sums[layer.input] = stacked.a_sums[layer.input] if from_factors else own_a
        a_counts[layer.input] = jax.ShapeDtypeStruct(layer.stack, dtype)
        g_sums[layer.name] = own_g if alone or layer.name in g else stacked.g_sums[layer.name]
    out = dataclasses.replace(
        stacked, a_sums=a_sums, a_counts=a_counts, g_sums=g_sums, diagonals={}, layers=layers
    )
    return out.packed() if stacked.is_packed else out
