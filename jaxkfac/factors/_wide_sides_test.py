"""Wide sides are the plain sums of outer products, put together by panels, or their diagonals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.linalg import PANELS_FROM

ROWS, WIDE = 7, PANELS_FROM + 8  # rows, features


def once(w, x):
    return x @ w


def twice(w, x):
    return jnp.tanh(x @ w) @ w


def in_a_loop(w, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=2)[0]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("apply", [once, twice, in_a_loop])
def test_wide_sides_are_sums_over_all_uses(x64, apply):
    """By hand: the sums of a layer of two uses are those of two layers of one use."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (WIDE, WIDE)) / WIDE
    x, y = (jax.random.normal(key, (ROWS, WIDE)) for key in keys[1:])
    value, grads, factors = value_grad_and_factors(Objective(apply, Gaussian()))(w, (x, y))
    expected_value, expected_grads = jax.value_and_grad(Objective(apply, Gaussian()))(w, (x, y))
    np.testing.assert_allclose(value, expected_value, rtol=1e-12)
    np.testing.assert_allclose(grads, expected_grads, rtol=1e-10, atol=1e-14)

    last = x @ w if apply is once else jnp.tanh(x @ w) @ w
    inputs = [x] if apply is once else [x, jnp.tanh(x @ w)]
    out = jnp.tanh(last) if apply is in_a_loop else last
    gradients = [out - y]
    if apply is in_a_loop:
        gradients[0] = gradients[0] * (1 - out**2)
    if apply is not once:
        gradients.append((gradients[0] @ w.T) * (1 - inputs[1] ** 2))
    (factor,) = factors.values()
    a, g = (sum(r.T @ r for r in rows) / ROWS for rows in (inputs, gradients))
    np.testing.assert_allclose(factor.a, a / len(inputs), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(factor.g, g, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_sides_beyond_max_dense_are_the_diagonals_of_the_whole_ones(x64, bias):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(keys[0], (4, 3)), "b": jax.random.normal(keys[1], (3,))}
    batch = jax.random.normal(keys[2], (ROWS, 4)), jax.random.normal(keys[3], (ROWS, 3))
    objective = Objective(lambda p, x: x @ p["w"] + p["b"], Gaussian())
    whole, diagonal = (
        value_grad_and_factors(objective, bias=bias, max_dense=n)(params, batch).factors["w"]
        for n in (16384, 2)
    )
    assert diagonal.a.shape == (4 + (bias == "joint"),) and diagonal.g.shape == (3,)
    np.testing.assert_allclose(diagonal.a, jnp.diag(whole.a), rtol=1e-12)
    np.testing.assert_allclose(diagonal.g, jnp.diag(whole.g), rtol=1e-12)


def test_a_wide_input_side_is_gathered_without_what_lies_below_its_diagonal():
    stats = value_grad_and_factors(Objective(once, Gaussian()))
    wide = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    call = stats.checked((wide, wide))
    (slot,) = jax.eval_shape(stats.statistics(stats.traced(wide, call)).slots).values()
    assert sum(panel.size for panel in jax.tree.leaves(slot.sums.inputs.a)) < 0.7 * wide.size
