"""What a decoder reads: tokens, and the keys and values of the tokens before them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxkfac.models.decoder._config import DecoderConfig


class Tokens(NamedTuple):
    """Token ids, and where they belong.

    A token sees the tokens of its own segment that stand before it in the row, and itself. So
    several texts packed into one row, each a segment with positions from 0, give what each
    would give in a row of its own, and padding (segment 0) is seen by padding alone.

    Attributes:
        ids: Token ids, shape ``(B, T)``.
        positions: Positions in the text, ``(B, T)``; by default the place in the row.
        segments: Texts in the row, ``(B, T)``, numbered from 1; 0 is padding. By default all
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
    """Keys and values of the tokens so far, in rows of S places, filled from the left.

    Attributes:
        keys: ``(L, B, S, K, Dh)``, rotated.
        values: ``(L, B, S, K, Dh)``.
        segments: Of the tokens, ``(B, S)``; 0 in places that are padding or not filled.
        lengths: How long each text may become, ``(B,)``. Where angles follow the length of the
            text they are those of this length from the first token on: what is in a cache
            cannot be turned again, since the tokens after it have read it.
        filled: How many places are filled, a scalar.
    """

    keys: Float[Array, "L B S K Dh"]
    values: Float[Array, "L B S K Dh"]
    segments: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    filled: Int[Array, ""]


class Cached(NamedTuple):
    """The tokens that come next, and the cache: ``apply_fn(params, Cached(...))``.

    The decoder then returns ``(logits (B, V) of each row's last token, cache)``, through the
    same parameters, so that whatever rewrites the decoder (adapters) rewrites this too. The
    cache must have places left for the tokens.
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
        config: Of the decoder.
        rows: Texts.
        places: Tokens that each row can hold.
        dtype: Of keys and values: that of the parameters.
        lengths: How long each text may become; by default ``places``.

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
