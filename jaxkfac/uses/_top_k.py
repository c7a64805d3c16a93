"""The largest scores, kept while batches are streamed."""

from html import escape
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._display import short_repr, table_html

_SHOWN = 20  # queries in a notebook


class TopK(NamedTuple):
    """The largest scores of each query, the largest first.

    Attributes:
        scores: ``(Q, k)``, with ``per="layer"`` ``(Q, layers, k)``; ``-inf`` where there are fewer
            than ``k`` examples whose score is a number.
        indices: The same of the examples' places in the stream, from 0; ``-1`` where there is none.
    """

    scores: Float[Array, "*queries k"]
    indices: Int[Array, "*queries k"]

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        if self.scores.ndim < 2 or isinstance(self.scores, Tracer):
            return escape(repr(self))
        k = self.scores.shape[-1]
        found = [x.reshape(-1, k)[:_SHOWN] for x in jax.device_get(self)]
        rows = [
            (str(i), *(f"{index}: {score:.3g}" if index >= 0 else "" for score, index in line))
            for i, line in enumerate(zip(s, n) for s, n in zip(*found))
        ]
        head = ("query", *(f"{rank}." for rank in range(1, k + 1)))
        notes = ["place in the stream: score"]
        if (more := self.scores.size // max(k, 1) - len(rows)) > 0:
            notes.append(f"and {more} more queries")
        return table_html(repr(self), head, rows, notes=notes)


def none_yet(shape: tuple[int, ...], k: int, dtype: jnp.dtype) -> TopK:
    """Before any example was seen."""
    return TopK(jnp.full((*shape, k), -jnp.inf, dtype), jnp.full((*shape, k), -1, jnp.int32))


def check_top_k(best: TopK, shape: tuple[int, ...]) -> None:
    """Refuse one of other queries, or of scores that were kept apart in another way.

    Raises:
        ValueError: naming both shapes.
    """
    if best.scores.shape[:-1] != shape:
        raise ValueError(
            f"top_k: expected a TopK of scores {(*shape, 'k')}, got {best.scores.shape}: go on "
            "with the queries, layers= and per= of the first part"
        )


def count_nan(scores: Float[Array, "*queries n"], exists: Bool[Array, " n"]) -> Int[Array, ""]:
    """How many examples have a score that is NaN."""
    bad = jnp.isnan(scores).reshape(-1, len(exists)).any(0)
    return (bad & exists).sum()


def joined(
    best: TopK, scores: Float[Array, "*queries n"], exists: Bool[Array, " n"], start: int
) -> TopK:
    """The best of those so far and of one batch, whose first example is number ``start``.

    A score that is NaN counts as none: ``top_k`` would rank it above all numbers.
    """
    counts = exists & ~jnp.isnan(scores)
    places = jnp.where(counts, start + jnp.arange(len(exists), dtype=jnp.int32), -1)
    every = jnp.concatenate([best.scores, jnp.where(counts, scores, -jnp.inf)], -1)
    indices = jnp.concatenate([best.indices, places], -1)
    values, at = jax.lax.top_k(every, best.scores.shape[-1])
    return TopK(values, jnp.take_along_axis(indices, at, -1))
