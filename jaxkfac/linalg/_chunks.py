"""Sums over a leading axis, some entries at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
PerChunk = Callable[[PyTree, Any], PyTree]


def _as_it_is(body: PerChunk) -> PerChunk:
    return body


def sum_over_chunks(
    per_chunk: PerChunk,
    examples: PyTree,
    chunk: int | None,
    *,
    in_loop: Callable[[PerChunk], PerChunk] = _as_it_is,
) -> PyTree:
    """Sum of ``per_chunk(chunk of examples, chunk's index)``; the last may be shorter.

    The index is ``None`` where there is one chunk, the whole batch. Of several, ``in_loop`` makes
    the body of the loop from ``per_chunk``.

    Memory:
        That of one chunk, plus the sum.
    """
    parts = _cut(examples, chunk)
    if parts is None:
        return per_chunk(examples, None)
    whole, indices, tail = parts
    shapes = jax.eval_shape(per_chunk, jax.tree.map(lambda x: x[0], whole), indices[0])
    body = in_loop(per_chunk)
    total, _ = jax.lax.scan(
        lambda total, part: (jax.tree.map(jnp.add, total, body(*part)), None),
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        (whole, indices),
    )
    if tail is not None:
        total = jax.tree.map(jnp.add, total, per_chunk(tail, indices[-1] + 1))
    return total


def map_over_chunks(
    per_chunk: PerChunk,
    examples: PyTree,
    chunk: int | None,
    *,
    in_loop: Callable[[PerChunk], PerChunk] = _as_it_is,
) -> PyTree:
    """What ``per_chunk`` gives for each chunk, joined along the first axis; see above."""
    parts = _cut(examples, chunk)
    if parts is None:
        return per_chunk(examples, None)
    whole, indices, tail = parts
    body = in_loop(per_chunk)
    mapped = jax.lax.map(lambda part: body(*part), (whole, indices))
    mapped = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped)
    if tail is None:
        return mapped
    rest = per_chunk(tail, indices[-1] + 1)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), mapped, rest)


def _cut(examples: PyTree, chunk: int | None) -> tuple[PyTree, Any, PyTree] | None:
    """Whole chunks stacked, their indices, and the shorter tail, if there is one."""
    number = jax.tree.leaves(examples)[0].shape[0]
    if chunk is None or chunk >= number:
        return None
    count, left = divmod(number, chunk)
    cut = count * chunk
    whole = jax.tree.map(lambda x: x[:cut].reshape(count, chunk, *x.shape[1:]), examples)
    tail = jax.tree.map(lambda x: x[cut:], examples) if left else None
    return whole, jnp.arange(count), tail
