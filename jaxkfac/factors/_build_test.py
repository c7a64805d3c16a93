"""What the default of an option is, from shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.factors import Categorical, Gaussian, Objective, value_grad_and_factors


@pytest.mark.parametrize(("size", "dense"), [(16384, True), (16385, False)])
def test_a_side_of_16384_is_the_largest_that_is_kept_whole(size, dense):
    params, batch = {"w": jnp.zeros((size, 2))}, (jnp.zeros((3, size)), jnp.zeros(3, int))
    stats = value_grad_and_factors(Objective(lambda p, x: x @ p["w"], Categorical()))
    like = stats.factor_shapes(params, batch)
    assert like.a_sums["w"].shape == ((size, size) if dense else (size,))


SCALED = {
    "x / p": lambda p, x: x / p,
    "p / x": lambda p, x: p / x,
    "x ** p": lambda p, x: x**p,
    "p ** x": lambda p, x: p**x,
}


@pytest.mark.default(1)
@pytest.mark.parametrize("name", SCALED)
def test_on_either_side_of_a_quotient_or_power_squares_are_those_of_gradients(x64, name):
    x, y = jax.random.uniform(jax.random.key(0), (2, 5, 3), minval=0.5, maxval=2.0)
    p = jnp.asarray([0.6, 1.1, 1.7])
    objective = Objective(lambda p, x: SCALED[name](p["scale"], x), Gaussian())
    factors = value_grad_and_factors(objective)({"scale": p}, (x, y)).factors

    def loss(p, x, y):
        return 0.5 * jnp.square(SCALED[name](p, x) - y).sum()

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(p, x, y)
    np.testing.assert_allclose(factors.diagonals["scale"], jnp.square(gradients).sum(0), rtol=1e-12)
