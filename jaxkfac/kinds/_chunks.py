"""Examples some at a time: what is formed of them must not all be alive at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Explicit gradients and rows of the examples that are alive at once.
CHUNK_BYTES = 32 * 2**20


def sum_over_strided_chunks(fn: Callable[[Any], Any], arrays: Any, size: int) -> Any:
    """Sum of ``fn``, a tree, over chunks of the leading axis, at most ``size`` entries at a time.

    A chunk takes entries a stride apart, so that an axis that is split over devices stays
    where it is.
    """
    number = jax.tree.leaves(arrays)[0].shape[0]
    size = max(1, min(size, number))
    steps = number // size
    if steps == 1 and size == number:
        return fn(arrays)
    whole = size * steps
    body = jax.tree.map(lambda x: x[:whole].reshape(size, steps, *x.shape[1:]), arrays)

    def chunk(index: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False), body
        )

    total = fn(jax.tree.map(lambda x: x[whole:], arrays) if whole < number else chunk(0))
    return jax.lax.scan(
        lambda total, index: (jax.tree.map(jnp.add, total, fn(chunk(index))), None),
        total,
        jnp.arange(0 if whole < number else 1, steps),
    )[0]


def one_by_one_on_cpu(fn: Callable[[Any, int], Any], arrays: Any, at_once: int) -> Any:
    """``fn(arrays, at_once)``, with one example at once on the CPU.

    XLA's CPU backend has a fast product for one example's gradient, not for a batch of them:
    2048 rows, eight an example, sides 512: 61 ms one by one, and 778 two at a time.
    """
    return jax.lax.platform_dependent(
        arrays, cpu=lambda arrays: fn(arrays, 1), default=lambda arrays: fn(arrays, at_once)
    )
