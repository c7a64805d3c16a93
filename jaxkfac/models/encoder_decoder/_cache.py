"""Keys and values of the tokens so far, and of the source."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxkfac.models.encoder_decoder._attention import KeysValues
from jaxkfac.models.encoder_decoder._config import EncoderDecoderConfig
from jaxkfac.models.encoder_decoder._pairs import Pairs


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
