import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.curvature import eigendecompose
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.uses._damped_gradients import check_block_damping


def test_without_damping_each_slice_of_a_diagonal_is_measured_by_its_own_largest_value():
    """One slice is 1e12 times the other, and neither is singular."""
    objective = Objective(
        lambda p, x: jax.lax.scan(lambda h, s: (h * s, None), x, p)[0], Gaussian()
    )
    batch = jnp.ones((3, 2)), jnp.zeros((3, 2))
    factors = value_grad_and_factors(objective)(jnp.ones((2, 2)), batch).factors
    (name,) = factors
    scales = jnp.array([[1.0], [1e-12]])
    apart = dataclasses.replace(factors, diagonals={name: factors.diagonals[name] * scales})
    check_block_damping(0.0, eigendecompose(apart))
    singular = factors.diagonals[name].at[1, 0].set(0)
    zero = dataclasses.replace(factors, diagonals={name: singular})
    with pytest.raises(ValueError, match="1 eigenvalues of layer"):
        check_block_damping(0.0, eigendecompose(zero, max_condition=np.inf))
