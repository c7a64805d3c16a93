"""The blocks of both stacks. Attribute names are Hugging Face's, so adapters' are too."""

from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array

from jaxkfac.models._rms_norm import RMSNorm
from jaxkfac.models.encoder_decoder._attention import KeysValues, PlainAttention, Seen
from jaxkfac.models.encoder_decoder._config import EncoderDecoderConfig
from jaxkfac.models.encoder_decoder._dropout import NO_DROPOUT, Dropout

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
