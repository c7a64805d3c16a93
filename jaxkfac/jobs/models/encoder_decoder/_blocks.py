"""The blocks of both stacks, their attention and positions, and what they read and cache."""

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

# ---------------- what an encoder-decoder reads: a source, and the target so far


class Pairs(NamedTuple):
    """Sources, and what the decoder reads beside them.

    Attributes:
        source: Token ids, ``(B, S)``.
        source_mask: True where a token of the source exists, ``(B, S)``; ``None``: all do. The
            others are seen by no token, and are rows of no factor.
        decoder_inputs: Ids of the target behind its start, ``(B, T)``. A token sees those before
            it and itself, so padding on the right needs no mask: leave it out of the loss, and
            out of the factors by ``positions=``.

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
    """The pairs, with a mask of booleans.

    Raises:
        ValueError: ids that are no integers of two axes, or shapes that do not go together.
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


# ---------------- relative positions: a table of few rows, one number for each head, added to the
# scores


def buckets(num: int, max_distance: int) -> np.ndarray:
    """Bucket of every distance from 0 to ``max_distance``, which stands for all beyond.

    The first half of the buckets are single distances; the others grow with the logarithm.
    """
    single = num // 2
    distance = np.arange(max_distance + 1, dtype=np.float32)
    # In float32, as where the weights come from: a bound may fall on a distance.
    far = np.log(np.maximum(distance, 1) / np.float32(single)) / np.float32(
        np.log(max_distance / single)
    )
    far = single + (far * np.float32(num - single)).astype(np.int32)
    return np.where(distance < single, distance.astype(np.int32), np.minimum(far, num - 1))


class RelativePositions(nnx.Module):
    """A bias of each score by where the key stands, seen from the query."""

    def __init__(self, config: EncoderDecoderConfig, *, both_sides: bool, rngs: nnx.Rngs) -> None:
        self.both_sides = both_sides
        self.num = config.num_buckets // 2 if both_sides else config.num_buckets
        self.max_distance = config.max_distance
        shape = (config.num_buckets, config.num_heads)
        self.embedding = nnx.Param(config.width**-0.5 * jax.random.normal(rngs.params(), shape))

    def __call__(
        self, asking: Int[Array, " T"], asked: Int[Array, " S"]
    ) -> Float[Array, "1 H T S"]:
        """The bias of places asked, for places asking."""
        ahead_TxS = asked[None, :] - asking[:, None]
        distance_TxS = jnp.abs(ahead_TxS) if self.both_sides else jnp.maximum(-ahead_TxS, 0)
        table = jnp.asarray(buckets(self.num, self.max_distance))
        bucket_TxS = table[jnp.minimum(distance_TxS, self.max_distance)]
        if self.both_sides:
            bucket_TxS = bucket_TxS + jnp.where(ahead_TxS > 0, self.num, 0)
        return jnp.take(self.embedding[...], bucket_TxS, axis=0).transpose(2, 0, 1)[None]


# ---------------- attention whose scores are not scaled, over the stream itself or over the
# encoder's
#
# Shape suffixes: B rows, T tokens asking, S places asked, H heads, K size of a head, D width of the
# stream.


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


# ---------------- keys and values of the tokens so far, and of the source


class PairsCache(NamedTuple):
    """What the decoder's blocks read again, an axis of blocks first.

    Attributes:
        own: Of the target, ``(L, B, P, H, K)`` each, in places filled from the left.
        across: Of the source, ``(L, B, S, H, K)`` each; computed while nothing is filled.
        filled: How many places are filled, a scalar.
    """

    own: KeysValues
    across: KeysValues
    filled: Int[Array, ""]


class CachedPairs(NamedTuple):
    """The tokens that come next, and the cache: ``apply_fn(params, CachedPairs(...))``.

    The model then returns ``(logits (B, V) of each row's last token, cache)``. With nothing
    filled it reads the source first; whatever rewrites the model (adapters) meets all its layers
    in this one program.
    """

    pairs: Pairs
    cache: PairsCache


def empty_pairs_cache(
    config: EncoderDecoderConfig, rows: int, sources: int, places: int, dtype: DTypeLike
) -> PairsCache:
    """A cache of nothing, for ``sources`` tokens of the source and ``places`` of the target."""
    heads = (config.num_heads, config.head_size)

    def zeros(length: int) -> KeysValues:
        shape = (config.decoder_depth, rows, length, *heads)
        return KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return PairsCache(zeros(places), zeros(sources), jnp.zeros((), jnp.int32))


# ---------------- the blocks of both stacks. Attribute names are Hugging Face's, so adapters' are
# too


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
    """A norm, and under its own name what comes after it."""

    def __init__(self, config: EncoderDecoderConfig, **inner: nnx.Module) -> None:
        self.layer_norm = RMSNorm(config.width, config.norm_epsilon)
        for name, module in inner.items():
            setattr(self, name, module)


class Sublayers(nnx.Module):
    """Numbered from 0."""

    def __init__(self, *sublayers: Sublayer) -> None:
        for number, sublayer in enumerate(sublayers):
            setattr(self, str(number), sublayer)

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))


class Past(NamedTuple):
    """The cached side of a decoder's block.

    Attributes:
        places: Keys and values of the block, ``(B, S, H, K)``.
        filled: How many places are filled.
    """

    places: KeysValues
    filled: Array


class SourceBlock(nnx.Module):
    """Attention, then the feed-forward layer, each normalised first and added to the stream."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.layer = Sublayers(
            Sublayer(config, SelfAttention=PlainAttention(config, rngs=rngs)),
            Sublayer(config, DenseReluDense=FeedForward(config, rngs=rngs)),
        )

    def __call__(self, x_BxSxD: Array, seen: Seen, dropout: Dropout = NO_DROPOUT) -> Array:
        first, last = self.layer[0], self.layer[1]
        normed = first.layer_norm(x_BxSxD)
        attend = first.SelfAttention
        found = attend(normed, attend.asked(normed), seen, dropout.at(0))
        x_BxSxD = x_BxSxD + dropout.at(1)(found)
        found = last.DenseReluDense(last.layer_norm(x_BxSxD), dropout.at(2))
        return x_BxSxD + dropout.at(3)(found)


class TargetBlock(nnx.Module):
    """A block of the decoder: between the two, attention over the encoder's outputs."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.layer = Sublayers(
            Sublayer(config, SelfAttention=PlainAttention(config, rngs=rngs)),
            Sublayer(config, EncDecAttention=PlainAttention(config, rngs=rngs)),
            Sublayer(config, DenseReluDense=FeedForward(config, rngs=rngs)),
        )

    def across(self, memory_BxSxD: Array) -> KeysValues:
        """Keys and values of the encoder's outputs."""
        return self.layer[1].EncDecAttention.asked(memory_BxSxD)

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
        asked = first.SelfAttention.asked(normed)
        if past is not None:
            asked = KeysValues(
                *(
                    jax.lax.dynamic_update_slice(places, new, (0, past.filled, 0, 0))
                    for places, new in zip(past.places, asked, strict=True)
                )
            )
        found = first.SelfAttention(normed, asked, seen, dropout.at(0))
        x_BxTxD = x_BxTxD + dropout.at(1)(found)
        normed = middle.layer_norm(x_BxTxD)
        found = middle.EncDecAttention(normed, across, seen_across, dropout.at(2))
        x_BxTxD = x_BxTxD + dropout.at(3)(found)
        found = last.DenseReluDense(last.layer_norm(x_BxTxD), dropout.at(4))
        return x_BxTxD + dropout.at(5)(found), None if past is None else asked
