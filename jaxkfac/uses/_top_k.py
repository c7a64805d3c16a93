"""The largest scores, kept while batches are streamed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TopK(NamedTuple):
    """The largest scores of each query, the largest first.

    Attributes:
        scores: ``(Q, k)``, with ``per="layer"`` ``(Q, layers, k)``; ``-inf`` where there are fewer
            than ``k`` examples.
        indices: The same of the examples' places in the stream, from 0; ``-1`` where there is none.
    """

    scores: Float[Array, "*queries k"]
    indices: Int[Array, "*queries k"]


def none_yet(shape: tuple[int, ...], k: int, dtype: jnp.dtype) -> TopK:
    """Before any example was seen."""
    return TopK(jnp.full((*shape, k), -jnp.inf, dtype), jnp.full((*shape, k), -1, jnp.int32))


def joined(
    best: TopK, scores: Float[Array, "*queries n"], exists: Bool[Array, " n"], start: int
) -> TopK:
    """The best of those so far and of one batch, whose first example is number ``start``."""
    places = jnp.where(exists, start + jnp.arange(len(exists), dtype=jnp.int32), -1)
    there = jnp.where(exists, scores, -jnp.inf)
    every = jnp.concatenate([best.scores, there], -1)
    indices = jnp.concatenate([best.indices, jnp.broadcast_to(places, there.shape)], -1)
    values, at = jax.lax.top_k(every, best.scores.shape[-1])
    return TopK(values, jnp.take_along_axis(indices, at, -1))
