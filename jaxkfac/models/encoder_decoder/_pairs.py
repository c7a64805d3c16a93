"""What an encoder-decoder reads: a source, and the target so far."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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
