"""Causal attention over grouped heads, within segments and a sliding window.

Shape suffixes: B rows, T query tokens, S key places, H query heads, K key and value heads, D width
of the residual stream, R rotated pairs.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac.jobs.models._networks import RMSNorm
from jaxkfac.jobs.models.decoder._config import DecoderConfig
from jaxkfac.jobs.models.decoder._rotary import Rotary, rotate
from jaxkfac.linalg import statistics_dtype

# ---------------- soft caps of scores and logits, and attention with capped scores
#
# Shape suffixes: B rows, T query tokens, S key places, K key and value heads, G query heads for
# each of them, H all query heads, d size of a head.


def softcapped(x: Array, cap: float | int) -> Array:
    """``cap tanh(x / cap)``."""
    return cap * jnp.tanh(x / cap)


def softcapped_attention(
    q_BxTxHxd: Array,
    k_BxSxKxd: Array,
    v_BxSxKxd: Array,
    mask_Bx1xTxS: Bool[Array, "B 1 T S"],
    *,
    scale: float | int,
    cap: float | int,
) -> Array:
    """``jax.nn.dot_product_attention`` with soft-capped scores, which JAX does not offer."""
    shape, wide = q_BxTxHxd.shape, statistics_dtype(q_BxTxHxd.dtype)
    q_BxTxKxGxd = q_BxTxHxd.reshape(*shape[:2], k_BxSxKxd.shape[2], -1, shape[3])
    scores_BxKxGxTxS = jnp.einsum(
        "BTKGd,BSKd->BKGTS", q_BxTxKxGxd, k_BxSxKxd, preferred_element_type=wide
    )
    scores_BxKxGxTxS = softcapped(scores_BxKxGxTxS * scale, cap)
    least = jnp.finfo(wide).min
    scores_BxKxGxTxS = jnp.where(mask_Bx1xTxS[:, :, None], scores_BxKxGxTxS, least)
    weights_BxKxGxTxS = jax.nn.softmax(scores_BxKxGxTxS, -1).astype(v_BxSxKxd.dtype)
    mixed_BxTxKxGxd = jnp.einsum("BKGTS,BSKd->BTKGd", weights_BxKxGxTxS, v_BxSxKxd)
    return mixed_BxTxKxGxd.reshape(shape)


# ---------------- input of a decoder: tokens, and keys and values of the tokens before them


class Tokens(NamedTuple):
    """Token ids with their positions and segments.

    A token attends to itself and to earlier tokens of its own segment in the row. So several
    texts packed into one row, each a segment with positions from 0, give the same results as
    in rows of their own, and only padding attends to padding (segment 0).

    Attributes:
        ids: Token ids, shape ``(B, T)``.
        positions: Positions in the text, ``(B, T)``; by default the index in the row.
        segments: Number of the text in the row, ``(B, T)``, from 1; 0 is padding. By default all
            tokens of a row are one text.

    Example:
        >>> import jax.numpy as jnp
        >>> packed = Tokens(  # texts of three and two tokens, and one place of padding
        ...     ids=jnp.asarray([[5, 6, 7, 8, 9, 0]]),
        ...     positions=jnp.asarray([[0, 1, 2, 0, 1, 0]]),
        ...     segments=jnp.asarray([[1, 1, 1, 2, 2, 0]]))
        >>> packed.ids.shape
        (1, 6)
    """

    ids: Int[Array, "B T"]
    positions: Int[Array, "B T"] | None = None
    segments: Int[Array, "B T"] | None = None


class Cache(NamedTuple):
    """Keys and values of the tokens so far, in rows of S places that are filled from the left.

    Attributes:
        keys: ``(L, B, S, K, Dh)``, rotated.
        values: ``(L, B, S, K, Dh)``.
        segments: Segments of the tokens, ``(B, S)``; 0 for padding and for empty places.
        lengths: Final length of each text, ``(B,)``. If angles depend on the length of the text,
            this length is used from the first token on: cached keys cannot be rotated again,
            since later tokens have already attended to them.
        filled: Number of filled places, a scalar.
    """

    keys: Float[Array, "L B S K Dh"]
    values: Float[Array, "L B S K Dh"]
    segments: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    filled: Int[Array, ""]


class Cached(NamedTuple):
    """The next tokens, and the cache: ``apply_fn(params, Cached(...))``.

    The decoder then returns ``(logits (B, V) of each row's last token, cache)``. It uses the same
    parameters, so changes to the decoder, such as adapters, also apply here. The cache must have
    enough free places for the tokens.
    """

    tokens: Tokens
    cache: Cache


def empty_cache(
    config: DecoderConfig,
    rows: int,
    places: int,
    dtype: DTypeLike,
    *,
    lengths: Int[Array, " B"] | None = None,
) -> Cache:
    """A cache without tokens.

    Args:
        config: Sizes of the decoder.
        rows: Number of texts.
        places: Number of tokens that each row can hold.
        dtype: Dtype of keys and values, which is that of the parameters.
        lengths: Final length of each text; by default ``places``.

    Memory:
        ``2 L B S K Dh`` elements.
    """
    shape = (config.depth, rows, places, config.num_kv_heads, config.head_size)
    return Cache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        segments=jnp.zeros((rows, places), jnp.int32),
        lengths=jnp.full(rows, places, jnp.int32) if lengths is None else lengths,
        filled=jnp.zeros((), jnp.int32),
    )


# ---------------- attention


AttentionBy = Literal["xla", "cudnn"]


class Reading(NamedTuple):
    """Inputs of attention that blocks share.

    Attributes:
        angles: Rotary angles of the tokens, ``(B, T, R)``.
        scale: Factor of their cosine and sine.
        mask: ``(B, 1, T, S)``, the places that each token attends to; ``None`` means all
            earlier ones in its window.
    """

    angles: Array
    scale: Float[Array, ""]
    mask: Bool[Array, "B 1 T S"] | None


def read(config: DecoderConfig, tokens: Tokens, cache: Cache | None) -> tuple[Reading, ...]:
    """Inputs of attention for blocks with the window and, if both kinds exist, those without.

    The segments of the tokens must already be in the cache.
    """
    shape = tokens.ids.shape
    positions_BxT = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if tokens.positions is not None:
        # In a narrow or unsigned dtype the -1 below, or a length, would wrap.
        positions_BxT = tokens.positions.astype(jnp.int32)
    same_BxTxS, start, segments = None, 0, tokens.segments
    mixed, capped = config.windowed is not None, config.attention_softcap is not None
    if segments is None and (mixed or capped):  # masks per kind, or attention written out here
        same_BxTxS = jnp.ones((1, shape[1], shape[1]), bool)
    if segments is None:
        lengths_BxT = jnp.broadcast_to(positions_BxT.max(1, keepdims=True) + 1, shape)
    elif cache is None:
        same_BxTxS = segments[:, :, None] == segments[:, None, :]
        lengths_BxT = jnp.where(same_BxTxS, positions_BxT[:, None, :], -1).max(-1) + 1
    else:
        start = cache.filled - shape[1]
        same_BxTxS = segments[:, :, None] == cache.segments[:, None, :]
        lengths_BxT = jnp.broadcast_to(cache.lengths[:, None], shape)

    def reading(rotary: Rotary, window: int | None) -> Reading:
        angles = rotary.angles(positions_BxT, lengths_BxT, config.head_size)
        scale = jnp.asarray(rotary.attention_factor, angles.dtype)
        if same_BxTxS is None:
            return Reading(angles, scale, None)
        asking = start + jnp.arange(shape[1])[:, None]
        places = jnp.arange(same_BxTxS.shape[2])
        seen_TxS = places <= asking
        if window is not None:
            seen_TxS &= places > asking - window
        return Reading(angles, scale, (same_BxTxS & seen_TxS)[:, None])

    windowed = reading(config.local_rotary or config.rotary, config.sliding_window)
    return (windowed, reading(config.rotary, None)) if mixed else (windowed,)


def of_block(readings: tuple[Reading, ...], config: DecoderConfig, layer: Array) -> Reading:
    """The inputs of attention for a block, by its number."""
    if config.windowed is None:
        return readings[0]
    windowed = jnp.asarray(config.windowed)[layer]
    return jax.tree.map(lambda x, y: jnp.where(windowed, x, y), *readings)


class Attention(nnx.Module):
    """One kernel for queries, keys and values, and one from the heads back to the stream."""

    def __init__(self, config: DecoderConfig, attention: AttentionBy, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention: AttentionBy = attention
        heads = config.num_heads * config.head_size
        bias, kv = config.attention_bias, config.num_kv_heads * config.head_size
        qkv_bias = bias or config.qkv_bias
        self.qkv_proj = nnx.Linear(config.width, heads + 2 * kv, use_bias=qkv_bias, rngs=rngs)
        self.o_proj = nnx.Linear(heads, config.width, use_bias=bias, rngs=rngs)
        if config.head_norms:
            options = {"unit_offset": config.unit_offset}
            self.q_norm = RMSNorm(config.head_size, config.norm_epsilon, **options)
            self.k_norm = RMSNorm(config.head_size, config.norm_epsilon, **options)

    def __call__(
        self, x_BxTxD: Array, reading: Reading, past: tuple[Cache, Array] | None
    ) -> tuple[Array, Cache | None]:
        config, shape = self.config, x_BxTxD.shape[:2]
        qkv = self.qkv_proj(x_BxTxD).reshape(*shape, -1, config.head_size)
        ends = (config.num_heads, config.num_heads + config.num_kv_heads)
        q_BxTxHxDh, k_BxTxKxDh, v_BxTxKxDh = jnp.split(qkv, ends, axis=2)
        if config.head_norms:
            q_BxTxHxDh, k_BxTxKxDh = self.q_norm(q_BxTxHxDh), self.k_norm(k_BxTxKxDh)
        q_BxTxHxDh, k_BxTxKxDh = (
            rotate(x, reading.angles, reading.scale) for x in (q_BxTxHxDh, k_BxTxKxDh)
        )
        k_BxSxKxDh, v_BxSxKxDh, cache = k_BxTxKxDh, v_BxTxKxDh, None
        if past is not None:
            cache, k_BxSxKxDh, v_BxSxKxDh = _written(*past, k_BxTxKxDh, v_BxTxKxDh)
        mixed_BxTxHxDh = self._mixed(q_BxTxHxDh, k_BxSxKxDh, v_BxSxKxDh, reading.mask)
        return self.o_proj(mixed_BxTxHxDh.reshape(*shape, -1)), cache

    def _mixed(self, q: Array, k: Array, v: Array, mask: Array | None) -> Array:
        """Values, weighted by the scores of queries and keys."""
        config, causal = self.config, mask is None
        scale, window = config.attention_scale, config.sliding_window
        if (cap := config.attention_softcap) is not None:
            assert mask is not None
            scale = config.head_size**-0.5 if scale is None else scale
            return softcapped_attention(q, k, v, mask, scale=scale, cap=cap)
        with jax.numpy_dtype_promotion("standard"):  # JAX adds float32 to bfloat16 here
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                mask=mask,
                scale=scale,
                is_causal=causal,
                local_window_size=(window - 1, 0) if causal and window is not None else None,
                implementation=self.attention,
            )


def _written(cache: Cache, layer: Array, k: Array, v: Array) -> tuple[Cache, Array, Array]:
    """The cache with new keys and values of a block, and all keys and values of that block."""
    at = (layer, 0, cache.filled - k.shape[1], 0, 0)
    keys = jax.lax.dynamic_update_slice(cache.keys, k[None], at)
    values = jax.lax.dynamic_update_slice(cache.values, v[None], at)
    return cache._replace(keys=keys, values=values), keys[layer], values[layer]
