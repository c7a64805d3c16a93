"""The encoder-decoder: one embedding, two stacks of scanned blocks, a head.

Shape suffixes: B rows, S tokens of the source, T tokens of the target, D width of the stream, V
vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxkfac.interception import mark_rows
from jaxkfac.jobs.models._networks import RMSNorm, TokenEmbedding
from jaxkfac.jobs.models.encoder_decoder._blocks import (
    CachedPairs,
    KeysValues,
    Pairs,
    PairsCache,
    Past,
    RelativePositions,
    Seen,
    SourceBlock,
    TargetBlock,
    check_pairs,
)
from jaxkfac.jobs.models.encoder_decoder._config import (
    NO_DROPOUT,
    Dropout,
    EncoderDecoderConfig,
    check_rate,
)


class BlockStack(nnx.Module):
    """Blocks in a scan, the table of positions that they share, and the last norm."""

    def __init__(
        self,
        config: EncoderDecoderConfig,
        block: type[SourceBlock] | type[TargetBlock],
        depth: int,
        *,
        remat: bool,
        has_embedding: bool,
        rngs: nnx.Rngs,
    ) -> None:
        self.depth, self.remat = depth, remat
        if has_embedding:
            self.embed_tokens = TokenEmbedding(config.vocabulary, config.width, rngs=rngs)

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked_blocks(rngs: nnx.Rngs) -> nnx.Module:
            return block(config, rngs=rngs)

        self.block = stacked_blocks(rngs)
        self.relative_attention_bias = RelativePositions(
            config, both_sides=block is SourceBlock, rngs=rngs
        )
        self.final_layer_norm = RMSNorm(config.width, config.norm_epsilon)

    def dropped(self, step: Any, x: Array, dropout: Dropout) -> Array:
        """Apply ``x = step(x, block, dropout)`` for all blocks, then the norm, with dropout.

        Each block uses its own random numbers.
        """

        def with_key(x: Array, block: Any, *key: Array) -> tuple[Array, None]:
            return step(x, block, Dropout(dropout.rate, *key)), None

        keys = dropout.at(1).split(self.depth)
        x, _ = self.scanned(with_key, dropout.at(0)(x), *keys)
        return dropout.at(2)(x)

    def scanned(self, step: Any, x: Array, *stacked: Any) -> Any:
        """Apply ``x, out = step(x, block, slices of stacked)`` for all blocks, then the norm."""
        step = nnx.remat(step) if self.remat else step
        scan = nnx.scan(
            step, in_axes=(nnx.Carry, 0, *(0 for _ in stacked)), out_axes=(nnx.Carry, 0)
        )
        x, outs = scan(x, self.block, *stacked)
        return self.final_layer_norm(x), outs


class EncoderDecoder(nnx.Module):
    """An encoder-decoder in the T5 layout: ``model(Pairs(...)) -> logits``.

    Logits are ``(B, T, V)`` in the dtype of the parameters. For generation the input is
    :class:`CachedPairs`. Softmax and norms are computed in float32. Rows of the source that its
    mask excludes are not in any factor; the model marks them (:func:`jaxkfac.mark_rows`).

    With a ``key`` it applies dropout as T5 does in training: to embedded tokens, attention
    weights, what every attention and feed-forward layer adds to the stream, inputs of ``wo``, and
    the outputs of each stack. Without a key it applies none, whatever the rate.

    Args:
        config: Sizes and options.
        dropout: Probability in [0, 1) of dropping an element, in calls with a key.
        remat: Recompute each block's activations in the backward pass.
        separate_embeddings: Give encoder and decoder embeddings of their own, and leave ``shared``
            unread, as PyTorch modules do whose weights are no longer tied.
        rngs: Keys for the initial values.

    Example:
        >>> config = EncoderDecoderConfig(vocabulary=97, width=32, hidden=48, encoder_depth=2,
        ...                               decoder_depth=2, num_heads=4, head_size=8)
        >>> model = EncoderDecoder(config, rngs=nnx.Rngs(0))
        >>> ids = jax.numpy.zeros((5, 7), int)
        >>> model(Pairs(ids, None, ids[:, :3])).shape
        (5, 3, 97)
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        *,
        dropout: float | int = 0.0,
        remat: bool = True,
        separate_embeddings: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.config, self.dropout = config, check_rate(dropout)
        self.separate_embeddings = separate_embeddings
        self.shared = TokenEmbedding(config.vocabulary, config.width, rngs=rngs)
        depths = (config.encoder_depth, config.decoder_depth)
        self.encoder, self.decoder = (
            BlockStack(
                config, block, depth, remat=remat, has_embedding=separate_embeddings, rngs=rngs
            )
            for block, depth in zip((SourceBlock, TargetBlock), depths, strict=True)
        )
        if not config.tied_head:
            init = nnx.initializers.normal(config.width**-0.5)
            self.lm_head = nnx.Linear(
                config.width, config.vocabulary, use_bias=False, kernel_init=init, rngs=rngs
            )

    def __call__(
        self, pairs: Pairs | CachedPairs, *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B V"], PairsCache]:
        if isinstance(pairs, CachedPairs):
            return self._next(*pairs)
        source, mask, target = _marked(pairs)
        dropout = Dropout(self.dropout, key)
        memory_BxSxD = self._encoded(source, mask, dropout.at(0))
        places = jnp.arange(target.shape[1])
        causal = (places[None, :] <= places[:, None])[None, None]
        seen = Seen(causal, self.decoder.relative_attention_bias(places, places))
        across = Seen(_keys(mask), None)

        def step(x: Array, block: TargetBlock, dropout: Dropout) -> Array:
            return block(x, seen, block.across(memory_BxSxD), across, None, dropout)[0]

        x_BxTxD = self._embedded(self.decoder, target)
        return self._head(self.decoder.dropped(step, x_BxTxD, dropout.at(1)))

    def _next(self, pairs: Pairs, cache: PairsCache) -> tuple[Array, PairsCache]:
        """Logits of the last token of each row."""
        source, mask, target = _marked(pairs)
        # Not nnx.cond, whose branches also return the parameters: 4-bit ones are not arrays.
        definition, state = nnx.split(self)
        across = jax.lax.cond(
            cache.filled == 0,
            lambda: nnx.merge(definition, state, copy=True)._across(source, mask),
            lambda: cache.across,
        )
        asking = cache.filled + jnp.arange(target.shape[1])
        places = jnp.arange(cache.own.keys.shape[2])
        seen = Seen(
            (places[None, :] <= asking[:, None])[None, None],
            self.decoder.relative_attention_bias(asking, places),
        )
        seen_across = Seen(_keys(mask), None)

        def step(
            x: Array, block: TargetBlock, own: KeysValues, across: KeysValues
        ) -> tuple[Array, KeysValues | None]:
            return block(x, seen, across, seen_across, Past(own, cache.filled))

        x_BxTxD, own = self.decoder.scanned(
            step, self._embedded(self.decoder, target), cache.own, across
        )
        cache = PairsCache(own, across, cache.filled + target.shape[1])
        return self._head(x_BxTxD[:, -1]), cache

    def _across(self, source: Array, mask: Array | None) -> KeysValues:
        """Keys and values of the source for every block of the decoder."""
        memory_BxSxD = self._encoded(source, mask)

        def step(memory: Array, block: TargetBlock) -> tuple[Array, KeysValues]:
            return memory, block.across(memory)

        scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        return scan(memory_BxSxD, self.decoder.block)[1]  # pyright: ignore[reportArgumentType]

    def _encoded(self, source: Array, mask: Array | None, dropout: Dropout = NO_DROPOUT) -> Array:
        places = jnp.arange(source.shape[1])
        seen = Seen(_keys(mask), self.encoder.relative_attention_bias(places, places))

        def step(x: Array, block: SourceBlock, dropout: Dropout) -> Array:
            return block(x, seen, dropout)

        return self.encoder.dropped(step, self._embedded(self.encoder, source), dropout)

    def _embedded(self, stack: BlockStack, ids: Array) -> Array:
        return (stack.embed_tokens if self.separate_embeddings else self.shared)(ids)

    def _head(self, x: Array) -> Array:
        if self.config.scaled_head:
            x = x * jnp.asarray(self.config.width**-0.5, x.dtype)
        return self.shared.attend(x) if self.config.tied_head else self.lm_head(x)


def _marked(pairs: Pairs) -> Pairs:
    """Mark the rows of the source, whose axes do not appear in the logits."""
    pairs = check_pairs(pairs)
    if pairs.source_mask is None:
        return pairs
    return pairs._replace(source=mark_rows(pairs.source, pairs.source_mask))


def _keys(mask_BxS: Array | None) -> Array | None:
    return None if mask_BxS is None else mask_BxS[:, None, None, :]
