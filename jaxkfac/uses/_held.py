"""What is held of the queries of an influence function."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.curvature import read_many
from jaxkfac.factors import Origin
from jaxkfac.interception import Layer
from jaxkfac.kinds import LowRankMatrices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Queries:
    """Preconditioned gradients of queries, as :func:`prepare_queries` gives them; a pytree.

    Attributes:
        whole: ``{parameter path: (Q, *parameter)}``.
        low_rank: ``{layer name: its matrix as two factors}``, ``(Q, stack..., in, rank)`` and
            ``(Q, stack..., rank, out)``, of layers that are held at low rank.
        errors: ``(Q, layers)``: what that loses of each layer's matrix, as a ratio of Frobenius
            norms; 0 where nothing is lost.
        layers: The layers, static.
        origin: Of which Fisher type and likelihoods the bases were, static; see ``Eigenbases``.
    """

    # A pytree also holds shapes and shardings, so the leaves are not Array here.
    whole: dict[str, Any]
    low_rank: dict[str, LowRankMatrices]
    errors: Any
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    origin: Origin | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def number(self) -> int:
        """How many queries there are."""
        return len(self.errors)

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.whole, self.low_rank)))

    def of_weight(self, layer: Layer) -> Any:
        """``(stack..., Q, in, out)``, or two factors of it."""
        if layer.name not in self.low_rank:
            return read_many(self.whole[layer.weight.path], layer.weight, layer)
        axes = len(layer.stack)
        return LowRankMatrices(*(jnp.moveaxis(x, 0, axes) for x in self.low_rank[layer.name]))

    def of_bias(self, layer: Layer) -> Any:
        """``(stack..., Q, out)``, or ``None`` where there is no bias."""
        if layer.bias is None:
            return None
        return read_many(self.whole[layer.bias.path], layer.bias, layer)[..., 0, :]

    def dtype(self, layer: Layer) -> Any:
        """Of a layer's arrays."""
        held = self.low_rank.get(layer.name, self.whole.get(layer.weight.path))
        return jax.tree.leaves(held)[0].dtype
