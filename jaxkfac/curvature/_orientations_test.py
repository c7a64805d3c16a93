"""Kernels that are read in both orientations."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks import Side
from jaxkfac.blocks._layout import nearest_product

RNG = np.random.default_rng(0)


matrix = functools.partial(Side, is_matrix=True)


def gram(n, dense=True, stack=()):
    x = RNG.normal(size=(*stack, n, 2))
    return x @ x.swapaxes(-1, -2) if dense else np.square(x[..., 0])


def nearest(terms):
    """The leading singular pair of the sum, its matrix written out."""
    whole = sum(np.outer(a.reshape(-1), g.reshape(-1)) for a, g in terms)
    u, s, v = np.linalg.svd(whole)
    return s[0] * np.outer(u[:, 0], v[0])


@pytest.mark.parametrize("dense", [True, False])
def test_the_product_is_the_nearest_one(dense, x64):
    for _ in range(5):
        one, other = (gram(4, dense), gram(3)), (gram(4, dense), gram(3))
        sides = [
            (Side(jnp.asarray(a), is_matrix=dense), matrix(jnp.asarray(g))) for a, g in (one, other)
        ]
        a, g = nearest_product(*sides)
        found = np.outer(a.data.reshape(-1), g.data.reshape(-1))
        np.testing.assert_allclose(found, nearest([one, other]), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(a.data), np.linalg.norm(one[0]), rtol=1e-12)
        assert np.linalg.eigvalsh(g.data).min() > -1e-12


def test_a_product_beside_zeros_stays_itself():
    """In NumPy as in host memory, in either place, padded for the ones of a bias."""
    a, g, smaller = gram(4), gram(3), gram(3)
    zeros = matrix(np.zeros((3, 3))), matrix(np.zeros((3, 3)))
    left, right = nearest_product((matrix(a), matrix(g)), zeros)
    np.testing.assert_allclose(left.data, a, rtol=1e-12)
    np.testing.assert_allclose(right.data, g, rtol=1e-12)
    dead = matrix(a), matrix(np.zeros((3, 3)))
    left, right = nearest_product(dead, (matrix(smaller), matrix(g)))
    padded = np.pad(smaller, (0, 1))
    np.testing.assert_allclose(np.kron(left.data, right.data), np.kron(padded, g), rtol=1e-12)
    assert isinstance(left.data, np.ndarray)
    nothing = nearest_product(zeros, zeros)
    assert not nothing[0].data.any() and not nothing[1].data.any()


def test_multiples_of_one_g_are_summed_exactly():
    a1, a2, g = gram(4), gram(4), gram(2)
    left, right = nearest_product(
        (matrix(a1), matrix(2 * g)),
        (matrix(a2), matrix(g)),
    )
    np.testing.assert_allclose(
        np.kron(left.data, right.data), np.kron(2 * a1 + a2, g), rtol=1e-9, atol=1e-12
    )


def test_every_entry_of_a_stack_has_its_own():
    stack = (2, 3)
    parts = [gram(4, stack=stack), gram(3, stack=stack), gram(4, stack=stack), gram(3, stack=stack)]
    a, g, b, h = (matrix(x) for x in parts)
    left, right = nearest_product((a, g), (b, h))
    at = (1, 2)
    one = nearest_product(*(tuple(matrix(x.data[at]) for x in pair) for pair in ((a, g), (b, h))))
    np.testing.assert_allclose(left.data[at], one[0].data, rtol=1e-12)
    np.testing.assert_allclose(right.data[at], one[1].data, rtol=1e-12)


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**60])
def test_factors_whose_squares_leave_float32_have_the_same_product(scale):
    a1, a2, g1, g2 = (gram(4).astype(np.float32) for _ in range(4))
    products = {}
    for times in (1.0, scale):
        g = [matrix(np.float32(times) * x) for x in (g1, g2)]
        products[times] = nearest_product((matrix(a1), g[0]), (matrix(a2), g[1]))
    np.testing.assert_array_equal(products[scale][0].data, products[1.0][0].data)
    np.testing.assert_array_equal(
        products[scale][1].data, np.float32(scale) * products[1.0][1].data
    )
