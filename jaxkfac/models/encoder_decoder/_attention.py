"""Attention whose scores are not scaled, over the stream itself or over the encoder's.

Shape suffixes: B rows, T tokens asking, S places asked, H heads, K size of a head, D width of the
stream.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxkfac.linalg import statistics_dtype
from jaxkfac.models.encoder_decoder._config import EncoderDecoderConfig
from jaxkfac.models.encoder_decoder._dropout import NO_DROPOUT, Dropout


class KeysValues(NamedTuple):
    """What is asked: ``(B, S, H, K)`` each; with an axis of blocks before in a cache."""

    keys: Float[Array, "*L B S H K"]
    values: Float[Array, "*L B S H K"]


class Seen(NamedTuple):
    """What the tokens of a stack see of each other, the same in all its blocks.

    Attributes:
        mask: ``(B or 1, 1, T or 1, S)``; ``None``: everything.
        bias: Of relative positions, ``(1, H, T, S)``; ``None`` across the two stacks.
    """

    mask: Bool[Array, "..."] | None
    bias: Float[Array, "1 H T S"] | None


class PlainAttention(nnx.Module):
    """Queries, keys, values and the way back, each a kernel of its own without a bias."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = (config.num_heads, config.head_size)
        inner = config.num_heads * config.head_size

        def kernel(n_in: int, n_out: int, deviation: float) -> nnx.Linear:
            init = nnx.initializers.normal(deviation)
            return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=init, rngs=rngs)

        width = config.width
        # scores are not scaled, so the queries' kernel begins smaller
        self.q = kernel(width, inner, (width * config.head_size) ** -0.5)
        self.k = kernel(width, inner, width**-0.5)
        self.v = kernel(width, inner, width**-0.5)
        self.o = kernel(inner, width, inner**-0.5)

    def asked(self, x_BxSxD: Array) -> KeysValues:
        """Keys and values of a stream."""
        return KeysValues(*(self._by_head(kernel(x_BxSxD)) for kernel in (self.k, self.v)))

    def __call__(
        self, x_BxTxD: Array, asked: KeysValues, seen: Seen, dropout: Dropout = NO_DROPOUT
    ) -> Array:
        q_BxTxHxK = self._by_head(self.q(x_BxTxD))
        # Written out: jax.nn.dot_product_attention has its scores in float32 under x64 too.
        wide = statistics_dtype(x_BxTxD.dtype)
        scores_BxHxTxS = jnp.einsum(
            "bthk,bshk->bhts", q_BxTxHxK, asked.keys, preferred_element_type=wide
        )
        if seen.bias is not None:
            scores_BxHxTxS = scores_BxHxTxS + seen.bias.astype(wide)
        if seen.mask is not None:
            scores_BxHxTxS = jnp.where(seen.mask, scores_BxHxTxS, jnp.finfo(wide).min)
        weights_BxHxTxS = jax.nn.softmax(scores_BxHxTxS, axis=-1).astype(x_BxTxD.dtype)
        weights_BxHxTxS = dropout(weights_BxHxTxS)
        mixed_BxTxHxK = jnp.einsum("bhts,bshk->bthk", weights_BxHxTxS, asked.values)
        return self.o(mixed_BxTxHxK.reshape(*x_BxTxD.shape[:2], -1))

    def _by_head(self, x: Array) -> Array:
        return jnp.reshape(x, (*x.shape[:2], *self.heads))
