import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.linalg._packed import fold_triangle, pack, packed_shape, unfold_triangle


def symmetric(*shape):
    x = jax.random.normal(jax.random.key(shape[-1]), shape)
    return x + x.mT


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 33])
def test_the_rectangle_is_that_of_the_host(n):
    matrix = np.asarray(symmetric(n, n))
    expected = pack(matrix, np.empty(packed_shape(n), matrix.dtype))
    assert np.array_equal(fold_triangle(jnp.asarray(matrix)), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (5, 5), (3, 6, 6), (2, 3, 5, 5), (0, 4, 4)])
def test_unfolding_gives_the_folded_matrices_back_bit_for_bit(shape):
    matrix = symmetric(*shape)
    folded = jax.jit(fold_triangle)(matrix)
    assert folded.shape == (*shape[:-2], *packed_shape(shape[-1]))
    assert jnp.array_equal(jax.jit(unfold_triangle)(folded), matrix)


def test_the_upper_triangle_is_never_read():
    matrix = symmetric(6, 6)
    marked = jnp.where(jnp.tri(6, dtype=bool), matrix, jnp.nan)
    assert jnp.array_equal(unfold_triangle(fold_triangle(marked)), matrix)
