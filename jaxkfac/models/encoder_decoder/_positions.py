"""Relative positions: a table of few rows, one number for each head, added to the scores."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkfac.models.encoder_decoder._config import EncoderDecoderConfig


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
