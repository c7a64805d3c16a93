"""Sums and maps over chunks are those over the whole, whatever is left over."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.linalg import map_over_chunks, sum_over_chunks

EXAMPLES = {"x": jnp.arange(21.0).reshape(7, 3), "n": jnp.arange(7)}
CHUNKS = [(None, 1), (7, 1), (9, 1), (1, 7), (2, 4), (3, 3), (6, 2)]  # and how many there are


@pytest.mark.parametrize(("chunk", "number"), CHUNKS)
def test_a_sum_over_chunks_is_the_sum_over_all_and_every_index_comes_once(chunk, number):
    def per_chunk(part, index):
        return part["x"].sum(0), part["n"].sum(), 0 if index is None else 10**index

    x, n, indices = sum_over_chunks(per_chunk, EXAMPLES, chunk)
    np.testing.assert_array_equal(x, EXAMPLES["x"].sum(0))
    assert n == 21
    assert indices == (0 if number == 1 else (10**number - 1) // 9)


@pytest.mark.parametrize(("chunk", "number"), CHUNKS)
def test_a_map_over_chunks_joins_what_each_gives_in_order(chunk, number):
    def per_chunk(part, index):
        return part["n"], jnp.full_like(part["n"], -1 if index is None else index)

    n, indices = map_over_chunks(per_chunk, EXAMPLES, chunk)
    np.testing.assert_array_equal(n, EXAMPLES["n"])
    np.testing.assert_array_equal(indices, -1 if number == 1 else np.arange(7) // chunk)
