"""Causal attention over grouped heads, within segments and a sliding window.

Shape suffixes: B rows, T tokens asking, S places asked, H query heads, K key and value heads,
D width of the stream, R rotated pairs.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from jaxkfac.models.decoder._config import DecoderConfig
from jaxkfac.models.decoder._rotary import rotate
from jaxkfac.models.decoder._tokens import Cache, Tokens

AttentionBy = Literal["xla", "cudnn"]


class Reading(NamedTuple):
    """What all blocks share about the tokens at hand.

    Attributes:
        angles: Of the tokens, ``(B, T, R)``.
        mask: ``(B, 1, T, S)``, what each token sees; ``None``: all before it, in its window.
    """

    angles: Array
    mask: Bool[Array, "B 1 T S"] | None


def read(config: DecoderConfig, tokens: Tokens, cache: Cache | None) -> Reading:
    """Angles and mask of tokens; the cache's marks must hold theirs already."""
    shape = tokens.ids.shape
    positions_BxT = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if tokens.positions is not None:
        positions_BxT = tokens.positions
    if tokens.segments is None:
        lengths_BxT = jnp.broadcast_to(positions_BxT.max(1, keepdims=True) + 1, shape)
        return Reading(config.rotary.angles(positions_BxT, lengths_BxT, config.head_size), None)
    marks_BxS, start = tokens.segments, 0
    if cache is not None:
        marks_BxS, start = cache.segments, cache.filled - shape[1]
    same_BxTxS = tokens.segments[:, :, None] == marks_BxS[:, None, :]
    if cache is None:
        lengths_BxT = jnp.where(same_BxTxS, positions_BxT[:, None, :], -1).max(-1) + 1
    else:
        lengths_BxT = jnp.broadcast_to(cache.lengths[:, None], shape)
    asking = start + jnp.arange(shape[1])[:, None]
    places = jnp.arange(marks_BxS.shape[1])
    seen_TxS = places <= asking
    if config.sliding_window is not None:
        seen_TxS &= places > asking - config.sliding_window
    angles = config.rotary.angles(positions_BxT, lengths_BxT, config.head_size)
    return Reading(angles, (same_BxTxS & seen_TxS)[:, None])


class Attention(nnx.Module):
    """One kernel to queries, keys and values, and one from the heads back to the stream."""

    def __init__(self, config: DecoderConfig, attention: AttentionBy, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention: AttentionBy = attention
        heads = config.num_heads * config.head_size
        bias, kv = config.attention_bias, config.num_kv_heads * config.head_size
        self.qkv_proj = nnx.Linear(config.width, heads + 2 * kv, use_bias=bias, rngs=rngs)
        self.o_proj = nnx.Linear(heads, config.width, use_bias=bias, rngs=rngs)

    def __call__(
        self, x_BxTxD: Array, reading: Reading, past: tuple[Cache, Array] | None
    ) -> tuple[Array, Cache | None]:
        config, shape = self.config, x_BxTxD.shape[:2]
        qkv = self.qkv_proj(x_BxTxD).reshape(*shape, -1, config.head_size)
        ends = (config.num_heads, config.num_heads + config.num_kv_heads)
        q_BxTxHxDh, k_BxTxKxDh, v_BxTxKxDh = jnp.split(qkv, ends, axis=2)
        scale = config.rotary.attention_factor
        q_BxTxHxDh, k_BxTxKxDh = (
            rotate(x, reading.angles, scale) for x in (q_BxTxHxDh, k_BxTxKxDh)
        )
        k_BxSxKxDh, v_BxSxKxDh, cache = k_BxTxKxDh, v_BxTxKxDh, None
        if past is not None:
            cache, k_BxSxKxDh, v_BxSxKxDh = _written(*past, k_BxTxKxDh, v_BxTxKxDh)
        window = config.sliding_window
        causal = reading.mask is None
        with jax.numpy_dtype_promotion("standard"):  # it adds float32 to bfloat16 inside
            mixed_BxTxHxDh = jax.nn.dot_product_attention(
                q_BxTxHxDh,
                k_BxSxKxDh,
                v_BxSxKxDh,
                mask=reading.mask,
                is_causal=causal,
                local_window_size=(window - 1, 0) if causal and window is not None else None,
                implementation=self.attention,
            )
        return self.o_proj(mixed_BxTxHxDh.reshape(*shape, -1)), cache


def _written(cache: Cache, layer: Array, k: Array, v: Array) -> tuple[Cache, Array, Array]:
    """The cache with a block's new keys and values, and all of that block's."""
    at = (layer, 0, cache.filled - k.shape[1], 0, 0)
    keys = jax.lax.dynamic_update_slice(cache.keys, k[None], at)
    values = jax.lax.dynamic_update_slice(cache.values, v[None], at)
    return cache._replace(keys=keys, values=values), keys[layer], values[layer]
