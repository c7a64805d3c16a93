"""The decoder: embedding, scanned blocks, norm, head.

Shape suffixes: B rows, T tokens, D width of the residual stream, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkfac.jobs.models._networks import RMSNorm, TokenEmbedding
from jaxkfac.jobs.models.decoder._attention import (
    Attention,
    AttentionBy,
    Cache,
    Cached,
    Reading,
    Tokens,
    of_block,
    read,
    softcapped,
)
from jaxkfac.jobs.models.decoder._config import Activation, DecoderConfig
from jaxkfac.linalg import statistics_dtype

_ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": jax.nn.gelu,
}


class GatedMLP(nnx.Module):
    """``down(silu(gate) * up)``, with gate and up from one kernel (or another activation)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        width, hidden, bias = config.width, config.hidden, config.mlp_bias
        self.activation: Activation = config.activation
        self.gate_up_proj = nnx.Linear(width, 2 * hidden, use_bias=bias, rngs=rngs)
        self.down_proj = nnx.Linear(hidden, width, use_bias=bias, rngs=rngs)

    def __call__(self, x_BxTxD: Array) -> Array:
        gate, up = jnp.split(self.gate_up_proj(x_BxTxD), 2, axis=-1)
        return self.down_proj(_ACTIVATIONS[self.activation](gate) * up)


class DecoderBlock(nnx.Module):
    """Attention, then the gated layer; each normalises its input and adds to the stream.

    With ``post_norms`` the outputs of both are also normalised. Then ``post_attention_layernorm``
    comes after attention; otherwise it is the norm before the gated layer.
    """

    def __init__(self, config: DecoderConfig, attention: AttentionBy, *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = norm_of(config)
        self.self_attn = Attention(config, attention, rngs=rngs)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = GatedMLP(config, rngs=rngs)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.pre_feedforward_layernorm = norm_of(config)
            self.post_feedforward_layernorm = norm_of(config)

    def __call__(
        self, x_BxTxD: Array, reading: Reading, past: tuple[Cache, Array] | None
    ) -> tuple[Array, Cache | None]:
        mixed_BxTxD, cache = self.self_attn(self.input_layernorm(x_BxTxD), reading, past)
        if not self.post_norms:
            x_BxTxD = x_BxTxD + mixed_BxTxD
            return x_BxTxD + self.mlp(self.post_attention_layernorm(x_BxTxD)), cache
        x_BxTxD = x_BxTxD + self.post_attention_layernorm(mixed_BxTxD)
        added_BxTxD = self.mlp(self.pre_feedforward_layernorm(x_BxTxD))
        return x_BxTxD + self.post_feedforward_layernorm(added_BxTxD), cache


class Stream(nnx.Module):
    """Everything before the head. Attributes have Hugging Face's names, as adapters do."""

    def __init__(
        self, config: DecoderConfig, remat: bool, attention: AttentionBy, *, rngs: nnx.Rngs
    ) -> None:
        self.config, self.remat = config, remat
        self.embed_tokens = TokenEmbedding(config.vocabulary, config.width, rngs=rngs)

        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked_blocks(rngs: nnx.Rngs) -> DecoderBlock:
            return DecoderBlock(config, attention, rngs=rngs)

        self.layers = stacked_blocks(rngs)
        self.norm = norm_of(config)

    def __call__(self, tokens: Tokens, cache: Cache | None) -> tuple[Array, Any]:
        readings = read(self.config, tokens, cache)

        def step(carry: Any, block: DecoderBlock, layer: Array) -> Any:
            x_BxTxD, cache = carry
            reading = of_block(readings, self.config, layer)
            return block(x_BxTxD, reading, None if cache is None else (cache, layer))

        if self.remat:
            step = nnx.remat(step)
        scan = nnx.scan(step, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        x_BxTxD = self.embed_tokens(tokens.ids)
        if (scale := self.config.embedding_scale) != 1:
            x_BxTxD = x_BxTxD * jnp.asarray(scale, x_BxTxD.dtype)
        x_BxTxD, cache = scan((x_BxTxD, cache), self.layers, jnp.arange(self.config.depth))
        return self.norm(x_BxTxD), cache


class Decoder(nnx.Module):
    """A decoder of the Phi-3 layout: ``decoder(inputs) -> logits``.

    Inputs are token ids ``(B, T)`` or :class:`Tokens`; logits are ``(B, T, V)`` in the dtype of
    the parameters. For generation the input is :class:`Cached`. One kernel computes queries, keys
    and values and another gate and up, as in Phi-3; Llama, Mistral, Qwen and Gemma compute the
    same function with concatenated kernels and the options in their config.
    Softmax, norms and angles are computed in float32.

    Args:
        config: Sizes and options.
        remat: Recompute each block's activations in the backward pass.
        attention: Passed to ``jax.nn.dot_product_attention``: ``"xla"`` works everywhere;
            ``"cudnn"`` is flash attention, on NVIDIA GPUs, for parameters in bfloat16 or float16.
        rngs: Keys for the initial values.

    Raises:
        ValueError: ``"cudnn"`` is used with soft-capped scores.

    Example:
        >>> config = DecoderConfig(vocabulary=97, width=32, hidden=48, depth=2, num_heads=4,
        ...                        num_kv_heads=2, head_size=8, context=64)
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> model(jax.numpy.zeros((5, 7), int)).shape
        (5, 7, 97)
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        remat: bool = True,
        attention: AttentionBy = "xla",
        rngs: nnx.Rngs,
    ) -> None:
        if attention == "cudnn" and config.attention_softcap is not None:
            raise ValueError("attention='cudnn' has no soft-capping of scores: take 'xla'")
        self.config = config
        self.model = Stream(config, remat, attention, rngs=rngs)
        if not config.tied_head:
            self.lm_head = nnx.Linear(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(
        self, inputs: Int[Array, "B T"] | Tokens | Cached
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B V"], Cache]:
        if isinstance(inputs, Cached):
            return self._next(*inputs)
        tokens = inputs if isinstance(inputs, Tokens) else Tokens(inputs)
        _check(tokens)
        return self._head(self.model(tokens, None)[0])

    def _next(self, tokens: Tokens, cache: Cache) -> tuple[Array, Cache]:
        """Logits of the last token of each row."""
        _check(tokens)
        shape = tokens.ids.shape
        positions = jnp.arange(shape[1]) + cache.filled
        if tokens.positions is not None:
            positions = tokens.positions
        segments = 1 if tokens.segments is None else tokens.segments
        positions, segments = (
            jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in (positions, segments)
        )
        marks = jax.lax.dynamic_update_slice(cache.segments, segments, (0, cache.filled))
        cache = cache._replace(segments=marks, filled=cache.filled + shape[1])
        x_BxTxD, cache = self.model(Tokens(tokens.ids, positions, segments), cache)
        return self._head(x_BxTxD[:, -1]), cache

    def _head(self, x: Array) -> Array:
        logits = self.model.embed_tokens.attend(x) if self.config.tied_head else self.lm_head(x)
        if (cap := self.config.logit_softcap) is None:
            return logits
        wide = logits.astype(statistics_dtype(logits.dtype))
        return softcapped(wide, cap).astype(logits.dtype)


def norm_of(config: DecoderConfig) -> RMSNorm:
    """A norm of the residual stream."""
    return RMSNorm(config.width, config.norm_epsilon, unit_offset=config.unit_offset)


def _check(tokens: Tokens) -> None:
    shape = tokens.ids.shape
    if len(shape) != 2 or not jnp.issubdtype(tokens.ids.dtype, jnp.integer):
        raise ValueError(f"ids: expected integers of shape (B, T), got {tokens.ids.dtype} {shape}")
    for name in ("positions", "segments"):
        if (x := getattr(tokens, name)) is not None and x.shape != shape:
            raise ValueError(f"{name}: expected the shape of the ids, {shape}, got {x.shape}")
