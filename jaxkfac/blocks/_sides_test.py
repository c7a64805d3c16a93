"""A side alone knows how its array is stored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks import Place, Side, update_average
from jaxkfac.blocks._random_factors_test import layer, random_factors

SCALAR = layer("c", (), kind="scale", inputs=())


def square(n, stack=()):
    x = np.random.default_rng(n).normal(size=(*stack, n, n)).astype(np.float32)
    return x + x.swapaxes(-1, -2)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
@pytest.mark.parametrize("stack", [(), (2, 3)])
def test_a_packed_side_reads_as_the_full_one(n, stack):
    full = Side(square(n, stack), np.full(stack, 4.0, np.float32), is_matrix=True)
    packed = full.packed(0)
    assert packed.size == full.size == n and packed.is_packed == (n > 1)
    assert packed.full_shape == full.full_shape == full.data.shape
    for one, other in ((packed.mean, full.mean), (packed.diagonal, full.diagonal)):
        assert isinstance(one, np.ndarray)
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(packed.without_last().data, full.data[..., :-1, :-1])
    shapes = jax.eval_shape(lambda: Side(jnp.asarray(full.data), is_matrix=True).packed(0).data)
    assert shapes.shape == packed.data.shape


def test_a_small_side_is_packed_where_another_one_is():
    full, packed = (Side(square(5), is_matrix=True).packed(least) for least in (None, 0))
    assert not full.is_packed and full.stored_like(packed).is_packed
    assert not packed.stored_like(full).is_packed


def test_a_scalar_in_host_memory_has_a_mean():
    factors = jax.tree.map(np.asarray, random_factors((SCALAR,), jax.random.key(0)))
    mean = factors["c"].diagonal
    assert isinstance(mean, np.ndarray | np.floating)
    np.testing.assert_allclose(mean, factors.diagonals["c"] / factors.terms, rtol=1e-6)


def test_an_average_of_other_sides_is_refused_by_their_place():
    factors = random_factors((layer("w", (3, 2)),), jax.random.key(0))
    less = dataclasses.replace(factors, g_sums={})
    with pytest.raises(ValueError, match=r"only one of the two has .*'g'.*'w'"):
        update_average(factors, less, 0.5)
    assert factors.side(Place("g", "w")).count is factors.terms
