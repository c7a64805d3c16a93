"""Blocks of encoder and decoder, their attention and positions, their inputs and caches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac.jobs.models._networks import RMSNorm
from jaxkfac.jobs.models.encoder_decoder._config import NO_DROPOUT, Dropout, EncoderDecoderConfig
from jaxkfac.linalg import statistics_dtype

# ---------------- input of an encoder-decoder: a source, and the target so far


class Pairs(NamedTuple):
    """Sources, and the inputs of the decoder.

    Attributes:
        source: Token ids, ``(B, S)``.
        source_mask: Whether a token of the source is real, ``(B, S)``; ``None`` means all are. No
            token attends to the others, and they are not rows of any factor.
        decoder_inputs: Ids of the target after a start token, ``(B, T)``. A token attends to
            itself and earlier ones, so padding on the right needs no mask: exclude it from the
            loss, and from the factors with ``positions=``.

    Example:
        >>> import jax.numpy as jnp
        >>> pairs = Pairs(  # one place of the source is padding; the target is 7, 8
        ...     source=jnp.asarray([[5, 6, 1, 0]]),
        ...     source_mask=jnp.asarray([[True, True, True, False]]),
        ...     decoder_inputs=jnp.asarray([[0, 7]]))
        >>> pairs.decoder_inputs.shape
        (1, 2)
    """

    source: Int[Array, "B S"]
    source_mask: Bool[Array, "B S"] | None
    decoder_inputs: Int[Array, "B T"]


def check_pairs(pairs: Pairs) -> Pairs:
    """The pairs with a boolean mask.

    Raises:
        ValueError: ids are not integers with two axes, or shapes do not match.
    """
    source, mask, target = pairs
    for name, ids in (("source", source), ("decoder_inputs", target)):
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"{name}: expected integers of two axes, got {ids.dtype} {ids.shape}")
    if source.shape[0] != target.shape[0]:
        raise ValueError(
            f"decoder_inputs: expected the {source.shape[0]} rows of the source, got "
            f"{target.shape[0]}"
        )
    if mask is not None and mask.shape != source.shape:
        raise ValueError(
            f"source_mask: expected the shape of the source, {source.shape}, got {mask.shape}"
        )
    return Pairs(source, None if mask is None else mask.astype(bool), target)


# ---------------- relative positions
#
# Relative positions: a small table with a number for each head, added to the scores.


def buckets(num: int, max_distance: int) -> np.ndarray:
    """Bucket of every distance from 0 to ``max_distance``, which represents all larger ones.

    The first half of the buckets are single distances; the others grow logarithmically.
    """
    single = num // 2
    distance = np.arange(max_distance + 1, dtype=np.float32)
    # In float32, as in the reference: a bound can coincide with a distance.
    far = np.log(np.maximum(distance, 1) / np.float32(single)) / np.float32(
        np.log(max_distance / single)
    )
    far = single + (far * np.float32(num - single)).astype(np.int32)
    return np.where(distance < single, distance.astype(np.int32), np.minimum(far, num - 1))


class RelativePositions(nnx.Module):
    """A bias for each score, by the position of the key relative to the query."""

    def __init__(self, config: EncoderDecoderConfig, *, both_sides: bool, rngs: nnx.Rngs) -> None:
        self.both_sides = both_sides
        self.num = config.num_buckets // 2 if both_sides else config.num_buckets
        self.max_distance = config.max_distance
        shape = (config.num_buckets, config.num_heads)
        self.embedding = nnx.Param(config.width**-0.5 * jax.random.normal(rngs.params(), shape))

    def __call__(
        self, query_places: Int[Array, " T"], key_places: Int[Array, " S"]
    ) -> Float[Array, "1 H T S"]:
        """The bias for pairs of query and key places."""
        ahead_TxS = key_places[None, :] - query_places[:, None]
        distance_TxS = jnp.abs(ahead_TxS) if self.both_sides else jnp.maximum(-ahead_TxS, 0)
        table = jnp.asarray(buckets(self.num, self.max_distance))
        bucket_TxS = table[jnp.minimum(distance_TxS, self.max_distance)]
        if self.both_sides:
            bucket_TxS = bucket_TxS + jnp.where(ahead_TxS > 0, self.num, 0)
        return jnp.take(self.embedding[...], bucket_TxS, axis=0).transpose(2, 0, 1)[None]


# ---------------- attention
#
# Attention with unscaled scores, over the stream itself or over the encoder's outputs.
#
# Shape suffixes: B rows, T query tokens, S key places, H heads, K size of a head, D width of the
# stream.


class KeysValues(NamedTuple):
    """Keys and values: ``(B, S, H, K)`` each; in a cache with a leading axis of blocks."""

    keys: Float[Array, "*L B S H K"]
    values: Float[Array, "*L B S H K"]


class Seen(NamedTuple):
    """What the tokens of a stack attend to. All blocks of the stack share it.

    Attributes:
        mask: ``(B or 1, 1, T or 1, S)``; ``None`` means everything.
        bias: Bias of relative positions, ``(1, H, T, S)``; ``None`` between the two stacks.
    """

    mask: Bool[Array, "..."] | None
    bias: Float[Array, "1 H T S"] | None


class PlainAttention(nnx.Module):
    """Queries, keys, values and outputs, each with its own kernel and no bias."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = (config.num_heads, config.head_size)
        inner = config.num_heads * config.head_size

        def kernel(n_in: int, n_out: int, deviation: float) -> nnx.Linear:
            init = nnx.initializers.normal(deviation)
            return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=init, rngs=rngs)

        width = config.width
        # scores are not scaled, so the initial kernel of the queries is smaller
        self.q = kernel(width, inner, (width * config.head_size) ** -0.5)
        self.k = kernel(width, inner, width**-0.5)
        self.v = kernel(width, inner, width**-0.5)
        self.o = kernel(inner, width, inner**-0.5)

    def keys_values(self, x_BxSxD: Array) -> KeysValues:
        """Keys and values of a stream."""
        return KeysValues(*(self._by_head(kernel(x_BxSxD)) for kernel in (self.k, self.v)))

    def __call__(
        self, x_BxTxD: Array, keys_values: KeysValues, seen: Seen, dropout: Dropout = NO_DROPOUT
    ) -> Array:
        q_BxTxHxK = self._by_head(self.q(x_BxTxD))
        # Written out: jax.nn.dot_product_attention computes scores in float32 even under x64.
        wide = statistics_dtype(x_BxTxD.dtype)
        scores_BxHxTxS = jnp.einsum(
            "bthk,bshk->bhts", q_BxTxHxK, keys_values.keys, preferred_element_type=wide
        )
        if seen.bias is not None:
            scores_BxHxTxS = scores_BxHxTxS + seen.bias.astype(wide)
        if seen.mask is not None:
            scores_BxHxTxS = jnp.where(seen.mask, scores_BxHxTxS, jnp.finfo(wide).min)
        weights_BxHxTxS = jax.nn.softmax(scores_BxHxTxS, axis=-1).astype(x_BxTxD.dtype)
        weights_BxHxTxS = dropout(weights_BxHxTxS)
        mixed_BxTxHxK = jnp.einsum("bhts,bshk->bthk", weights_BxHxTxS, keys_values.values)
        return self.o(mixed_BxTxHxK.reshape(*x_BxTxD.shape[:2], -1))

    def _by_head(self, x: Array) -> Array:
        return jnp.reshape(x, (*x.shape[:2], *self.heads))


# ---------------- keys and values of the tokens so far, and of the source


class PairsCache(NamedTuple):
    """Keys and values that the decoder's blocks reuse, with a leading axis of blocks.

    Attributes:
        own: Keys and values of the target, ``(L, B, P, H, K)`` each, filled from the left.
        across: Those of the source, ``(L, B, S, H, K)`` each; computed when nothing is filled.
        filled: Number of filled places, a scalar.
    """

    own: KeysValues
    across: KeysValues
    filled: Int[Array, ""]


class CachedPairs(NamedTuple):
    """The next tokens, and the cache: ``apply_fn(params, CachedPairs(...))``.

    The model then returns ``(logits (B, V) of each row's last token, cache)``. If nothing is
    filled, it reads the source first, so this one program contains all layers, and changes to the
    model, such as adapters, apply to all of them.
    """

    pairs: Pairs
    cache: PairsCache


def empty_pairs_cache(
    config: EncoderDecoderConfig, rows: int, sources: int, places: int, dtype: DTypeLike
) -> PairsCache:
    """An empty cache for ``sources`` tokens of the source and ``places`` of the target."""
    heads = (config.num_heads, config.head_size)

    def zeros(length: int) -> KeysValues:
        shape = (config.decoder_depth, rows, length, *heads)
        return KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return PairsCache(zeros(places), zeros(sources), jnp.zeros((), jnp.int32))


# ---------------- blocks
#
# Blocks of encoder and decoder. Attributes have Hugging Face's names, as adapters do.


_ACTIVATIONS = {"relu": jax.nn.relu, "gelu_new": jax.nn.gelu, "silu": jax.nn.silu}


class FeedForward(nnx.Module):
    """``wo(act(wi(x)))``, or ``wo(act(wi_0(x)) * wi_1(x))``."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.activation = config.activation

        def kernel(n_in: int, n_out: int) -> nnx.Linear:
            init = nnx.initializers.normal(n_in**-0.5)
            return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=init, rngs=rngs)

        self.gated = config.gated
        if config.gated:
            self.wi_0 = kernel(config.width, config.hidden)
            self.wi_1 = kernel(config.width, config.hidden)
        else:
            self.wi = kernel(config.width, config.hidden)
        self.wo = kernel(config.hidden, config.width)

    def __call__(self, x: Array, dropout: Dropout = NO_DROPOUT) -> Array:
        act = _ACTIVATIONS[self.activation]
        hidden = act(self.wi_0(x)) * self.wi_1(x) if self.gated else act(self.wi(x))
        return self.wo(dropout(hidden))


class Sublayer(nnx.Module):
    """A norm, and the layer after it under its own name."""

    def __init__(self, config: EncoderDecoderConfig, **inner: nnx.Module) -> None:
        self.layer_norm = RMSNorm(config.width, config.norm_epsilon)
        for name, module in inner.items():
            setattr(self, name, module)


class Sublayers(nnx.Module):
    """A list of sublayers with the attribute names 0, 1, ..."""

    def __init__(self, *sublayers: Sublayer) -> None:
        for number, sublayer in enumerate(sublayers):
            setattr(self, str(number), sublayer)

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))


class Past(NamedTuple):
    """The cache of a decoder's block.

    Attributes:
        places: Keys and values of the block, ``(B, S, H, K)``.
        filled: Number of filled places.
    """

    places: KeysValues
    filled: Array


class SourceBlock(nnx.Module):
    """Attention, then the feed-forward layer; each normalises its input and adds to the stream."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.layer = Sublayers(
            Sublayer(config, SelfAttention=PlainAttention(config, rngs=rngs)),
            Sublayer(config, DenseReluDense=FeedForward(config, rngs=rngs)),
        )

    def __call__(self, x_BxSxD: Array, seen: Seen, dropout: Dropout = NO_DROPOUT) -> Array:
        first, last = self.layer[0], self.layer[1]
        normed = first.layer_norm(x_BxSxD)
        attend = first.SelfAttention
        update = attend(normed, attend.keys_values(normed), seen, dropout.at(0))
        x_BxSxD = x_BxSxD + dropout.at(1)(update)
        update = last.DenseReluDense(last.layer_norm(x_BxSxD), dropout.at(2))
        return x_BxSxD + dropout.at(3)(update)


class TargetBlock(nnx.Module):
    """A block of the decoder, with attention over the encoder's outputs between the two."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.layer = Sublayers(
            Sublayer(config, SelfAttention=PlainAttention(config, rngs=rngs)),
            Sublayer(config, EncDecAttention=PlainAttention(config, rngs=rngs)),
            Sublayer(config, DenseReluDense=FeedForward(config, rngs=rngs)),
        )

    def across(self, memory_BxSxD: Array) -> KeysValues:
        """Keys and values of the encoder's outputs."""
        return self.layer[1].EncDecAttention.keys_values(memory_BxSxD)

    def __call__(
        self,
        x_BxTxD: Array,
        seen: Seen,
        across: KeysValues,
        seen_across: Seen,
        past: Past | None,
        dropout: Dropout = NO_DROPOUT,
    ) -> tuple[Array, KeysValues | None]:
        first, middle, last = self.layer[0], self.layer[1], self.layer[2]
        normed = first.layer_norm(x_BxTxD)
        keys_values = first.SelfAttention.keys_values(normed)
        if past is not None:
            keys_values = KeysValues(
                *(
                    jax.lax.dynamic_update_slice(places, new, (0, past.filled, 0, 0))
                    for places, new in zip(past.places, keys_values, strict=True)
                )
            )
        update = first.SelfAttention(normed, keys_values, seen, dropout.at(0))
        x_BxTxD = x_BxTxD + dropout.at(1)(update)
        normed = middle.layer_norm(x_BxTxD)
        update = middle.EncDecAttention(normed, across, seen_across, dropout.at(2))
        x_BxTxD = x_BxTxD + dropout.at(3)(update)
        update = last.DenseReluDense(last.layer_norm(x_BxTxD), dropout.at(4))
        return x_BxTxD + dropout.at(5)(update), None if past is None else keys_values
