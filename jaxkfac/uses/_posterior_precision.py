r"""The precision of a Laplace posterior, $P = m F + \operatorname{diag}(\delta)$, by its blocks."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature import (
    Eigenbases,
    OwnedBlock,
    block_eigenvalues,
    owned_blocks,
    precondition_blocks,
    precondition_many,
)
from jaxkfac.interception import Layer
from jaxkfac.linalg import statistics_dtype


@dataclasses.dataclass(frozen=True)
class PosteriorPrecision:
    r"""The blocks of a precision, as they stand for one prior and one noise.

    Attributes:
        bases: The curvature of the mean loss; eigenvalues are read as they were decomposed,
            negative ones as 0.
        scale: $m$: the number of loss terms over the variance of the noise.
        prior: $\delta$ of each layer, in the order of ``blocks``.
    """

    bases: Eigenbases
    scale: Float[Array, ""]
    prior: Float[Array, " layers"]

    @property
    def blocks(self) -> list[OwnedBlock]:
        """The blocks of all parameters."""
        return owned_blocks(self.bases)

    def eigenvalues(self) -> list[list[Array]]:
        """Of the data's part, $m F$, for each layer; a parameter has as many as it has elements."""
        return [[x for x in self._of_block(block) if x is not None] for block in self.blocks]

    def inverse_eigenvalues(self, name: str) -> tuple[Array | None, Array | None]:
        """Of a layer's block of $P^{-1}$, and of its bias where that has a block of its own."""
        at = [block.layer.name for block in self.blocks].index(name)
        both, delta = self._of_block(self.blocks[at]), self.prior[at]
        weight, bias = (None if x is None else 1 / (x + delta.astype(x.dtype)) for x in both)
        return weight, bias

    def _of_block(self, block: OwnedBlock) -> tuple[Array | None, Array | None]:
        both = block_eigenvalues(self.bases, block)
        weight, bias = (None if x is None else x * self.scale.astype(x.dtype) for x in both)
        return weight, bias

    def solved(
        self, many: Mapping[str, Float[Array, "many ..."]], power: float
    ) -> dict[str, Float[Array, "many ..."]]:
        """$P^p$ applied to parameters stacked along a leading axis; see ``precondition_many``."""
        found = precondition_many(many, self.bases, self._damping, power)
        return {path: self._scaled(x, power) for path, x in found.items()}

    def solved_by_layer(
        self, many: Mapping[str, Float[Array, "many ..."]], layers: tuple[Layer, ...], power: float
    ) -> Iterator[tuple[Layer, list[Array]]]:
        """The same of some layers, each by itself; see ``precondition_blocks``."""
        bases = dataclasses.replace(self.bases, layers=layers)
        for layer, parts in precondition_blocks(many, bases, self._damping, power):
            yield layer, [self._scaled(x, power) for x in parts if x is not None]

    @property
    def _damping(self) -> dict[str, Array]:
        each = zip(self.blocks, self.prior, strict=True)
        return {block.layer.name: delta / self.scale for block, delta in each}

    def _scaled(self, x: Array, power: float) -> Array:
        return x * (self.scale**power).astype(x.dtype)

    def log_determinant_ratio(self) -> Float[Array, " layers"]:
        r"""$\log \det P - \log \det \operatorname{diag}(\delta)$ of each layer."""
        of_layers = [
            sum(jnp.log1p(x / delta.astype(x.dtype)).sum() for x in values)
            for values, delta in zip(self.eigenvalues(), self.prior, strict=True)
        ]
        return jnp.stack([jnp.asarray(x, self.prior.dtype) for x in of_layers])

    def effective_parameters(self) -> Float[Array, " layers"]:
        r"""$\gamma = \sum_i \lambda_i / (\lambda_i + \delta)$ of each layer."""
        of_layers = [
            sum((x / (x + delta.astype(x.dtype))).sum() for x in values)
            for values, delta in zip(self.eigenvalues(), self.prior, strict=True)
        ]
        return jnp.stack([jnp.asarray(x, self.prior.dtype) for x in of_layers])


def raw(bases: Eigenbases) -> Eigenbases:
    """The bases with eigenvalues that are not clipped, but for negative ones, which are 0."""
    return dataclasses.replace(bases, max_condition=float("inf"), floor=0.0)


def squared_norms(blocks: list[OwnedBlock], leaves: Mapping[str, Any]) -> Float[Array, " layers"]:
    """Squares of the parameters that each layer answers for, summed."""
    found = []
    for block in blocks:
        parts = [matrix.read(leaves[matrix.path]) for matrix in block.parameters]
        wide = [x.astype(statistics_dtype(x.dtype)) for x in parts]
        found.append(jnp.stack([jnp.square(x).sum() for x in wide]).sum())
    return jnp.stack(found)
