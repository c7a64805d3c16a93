"""Kernels that are read in both orientations."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.curvature._layout import Side, nearest_product

RNG = np.random.default_rng(0)


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
        sides = [(Side(jnp.asarray(a), dense), Side(jnp.asarray(g), True)) for a, g in (one, other)]
        a, g = nearest_product(*sides)
        found = np.outer(a.x.reshape(-1), g.x.reshape(-1))
        np.testing.assert_allclose(found, nearest([one, other]), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(a.x), np.linalg.norm(one[0]), rtol=1e-12)
        assert np.linalg.eigvalsh(g.x).min() > -1e-12


def test_a_product_beside_zeros_stays_itself():
    """In NumPy as in host memory, in either place, padded for the ones of a bias."""
    a, g, smaller = gram(4), gram(3), gram(3)
    zeros = Side(np.zeros((3, 3)), True), Side(np.zeros((3, 3)), True)
    left, right = nearest_product((Side(a, True), Side(g, True)), zeros)
    np.testing.assert_allclose(left.x, a, rtol=1e-12)
    np.testing.assert_allclose(right.x, g, rtol=1e-12)
    dead = Side(a, True), Side(np.zeros((3, 3)), True)
    left, right = nearest_product(dead, (Side(smaller, True), Side(g, True)))
    padded = np.pad(smaller, (0, 1))
    np.testing.assert_allclose(np.kron(left.x, right.x), np.kron(padded, g), rtol=1e-12)
    assert isinstance(left.x, np.ndarray)
    nothing = nearest_product(zeros, zeros)
    assert not nothing[0].x.any() and not nothing[1].x.any()


def test_multiples_of_one_g_are_summed_exactly():
    a1, a2, g = gram(4), gram(4), gram(2)
    left, right = nearest_product(
        (Side(a1, True), Side(2 * g, True)), (Side(a2, True), Side(g, True))
    )
    np.testing.assert_allclose(
        np.kron(left.x, right.x), np.kron(2 * a1 + a2, g), rtol=1e-9, atol=1e-12
    )


def test_every_entry_of_a_stack_has_its_own():
    stack = (2, 3)
    parts = [gram(4, stack=stack), gram(3, stack=stack), gram(4, stack=stack), gram(3, stack=stack)]
    a, g, b, h = (Side(x, True) for x in parts)
    left, right = nearest_product((a, g), (b, h))
    at = (1, 2)
    one = nearest_product(*(tuple(Side(x.x[at], True) for x in pair) for pair in ((a, g), (b, h))))
    np.testing.assert_allclose(left.x[at], one[0].x, rtol=1e-12)
    np.testing.assert_allclose(right.x[at], one[1].x, rtol=1e-12)


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**60])
def test_factors_whose_squares_leave_float32_have_the_same_product(scale):
    a1, a2, g1, g2 = (gram(4).astype(np.float32) for _ in range(4))
    products = {}
    for times in (1.0, scale):
        g = [Side(np.float32(times) * x, True) for x in (g1, g2)]
        products[times] = nearest_product((Side(a1, True), g[0]), (Side(a2, True), g[1]))
    np.testing.assert_array_equal(products[scale][0].x, products[1.0][0].x)
    np.testing.assert_array_equal(products[scale][1].x, np.float32(scale) * products[1.0][1].x)
