"""What the default of an option is, from shapes alone."""

import jax.numpy as jnp
import pytest

from jaxkfac.factors import Categorical, Objective, value_grad_and_factors


@pytest.mark.parametrize(("size", "dense"), [(16384, True), (16385, False)])
def test_a_side_of_16384_is_the_largest_that_is_kept_whole(size, dense):
    params, batch = {"w": jnp.zeros((size, 2))}, (jnp.zeros((3, size)), jnp.zeros(3, int))
    stats = value_grad_and_factors(Objective(lambda p, x: x @ p["w"], Categorical()))
    like = stats.factor_shapes(params, batch)
    assert like.a_sums["w"].shape == ((size, size) if dense else (size,))
