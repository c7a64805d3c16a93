"""Outer products of what has been summed by example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.factors._explicit_net_test import layer
from jaxkfac.factors._taps import gradient_block, gradient_rows, outer_products
from jaxkfac.kinds import Products
from jaxkfac.linalg import PANELS_FROM

ALL = {"products": Products(), "precision": jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("stack", [0, 1])
def test_gradients_of_examples_are_rows_and_their_outer_products_add_up(stack):
    scale = layer("scale", (2, 3), kind="scale", stack=stack, inputs=())
    gradient = jnp.arange(24.0).reshape(2, 3, 4)  # four examples
    expected = np.moveaxis(gradient, -1, stack).reshape(*scale.stack, 4, -1)
    np.testing.assert_array_equal(gradient_rows(scale, gradient), expected)
    outer = expected.swapaxes(-1, -2) @ expected
    np.testing.assert_allclose(gradient_block(scale, gradient, **ALL), outer, rtol=1e-6)


@pytest.mark.parametrize("size", [3, PANELS_FROM + 8])
@pytest.mark.parametrize("dense", [False, True])
def test_outer_products_are_sums_over_rows_whole_or_their_diagonal(size, dense):
    rows = jax.random.normal(jax.random.key(0), (5, size))
    found, whole = outer_products(rows, dense=dense, **ALL), rows.T @ rows
    np.testing.assert_allclose(found, whole if dense else jnp.diag(whole), rtol=1e-5, atol=1e-5)
