"""Drawn rows: sums with their weights are unbiased, and the pool is renewed when it is due."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.factors import Gaussian, Objective
from jaxkfac.optim import draw_rows


def residual(params, x):
    """Large at few points, as at a shock."""
    return params["a"] * jnp.exp(-50 * x**2) + params["b"] * x - 0.1


PARAMS = {"a": jnp.asarray(2.0), "b": jnp.asarray(0.3)}
POOL = jnp.linspace(-1.0, 1.0, 64)


def statistics(x, weights):
    """The loss, its gradient and the curvature from weighted rows, as one vector."""
    jacobian = jax.vmap(jax.grad(residual), (None, 0))(PARAMS, x)
    rows = jnp.stack([jacobian["a"], jacobian["b"]], 1)
    r = residual(PARAMS, x)
    number = len(x)
    loss = 0.5 * (weights * r**2).sum() / number
    gradient = (weights * r) @ rows / number
    curvature = (rows * weights[:, None]).T @ rows / number
    return jnp.concatenate([loss[None], gradient, curvature.ravel()])


@pytest.mark.slow
def test_weighted_sums_of_drawn_rows_are_unbiased():
    draw = draw_rows(POOL, residual, 8)
    state = draw.init(PARAMS, jax.random.key(0))

    def one(key):
        found, _ = draw.draw(state, PARAMS, key)
        return statistics(found.rows, found.weights), statistics(
            found.rows, jnp.ones_like(found.weights)
        )

    keys = jax.random.split(jax.random.key(1), 10_000)
    weighted, plain = map(np.asarray, jax.jit(jax.vmap(one))(keys))
    exact = np.asarray(statistics(POOL, jnp.ones(64)))
    errors = weighted.std(0) / np.sqrt(len(keys))
    assert (np.abs(weighted.mean(0) - exact) < 4 * errors).all()
    assert (np.abs(plain.mean(0) - exact) > 40 * errors)[0]  # without weights it is far off
    uniform = draw_rows(POOL, residual, 8, uniform=1.0)
    found, _ = uniform.draw(uniform.init(PARAMS, keys[0]), PARAMS, keys[0])
    np.testing.assert_allclose(found.weights, 1.0, rtol=1e-6)


@pytest.mark.slow
def test_weights_in_an_objective_that_counts_give_the_same_loss():
    draw = draw_rows(POOL[:, None], lambda p, x: residual(p, x)[:, 0], 8)
    found, _ = draw.draw(draw.init(PARAMS, jax.random.key(0)), PARAMS, jax.random.key(1))
    objective = Objective(residual, Gaussian(), normalize="count")
    batch = found.rows, jnp.zeros_like(found.rows), found.weights
    expected = statistics(found.rows[:, 0], found.weights)[0]
    np.testing.assert_allclose(objective(PARAMS, batch), expected, rtol=1e-6)


def test_the_pool_is_renewed_at_every_kth_draw():
    draw = draw_rows(lambda key: jax.random.uniform(key, (16,)), residual, 4, every=3)
    step = jax.jit(draw.draw)
    states = [draw.init(PARAMS, jax.random.key(0))]
    for key in jax.random.split(jax.random.key(1), 7):
        states.append(step(states[-1], PARAMS, key)[1])
    changed = [bool((a.pool != b.pool).any()) for a, b in zip(states, states[1:], strict=False)]
    assert changed == [False, False, False, True, False, False, True]
    np.testing.assert_allclose(states[4].sizes, np.abs(residual(PARAMS, states[4].pool)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [jnp.zeros(16), jnp.full(16, jnp.nan).at[3].set(1.0)])
def test_residuals_of_zero_or_nan_leave_the_uniform_share(size):
    draw = draw_rows(jnp.arange(16.0), lambda p, x: size, 64)
    found, _ = draw.draw(draw.init(PARAMS, jax.random.key(0)), PARAMS, jax.random.key(1))
    assert jnp.isfinite(found.weights).all() and len(jnp.unique(found.indices)) > 4


def test_arguments_out_of_range_are_named():
    for options, match in (
        ({"number": 0}, "number"),
        ({"number": 4, "uniform": 0.0}, "uniform must be above 0"),
        ({"number": 4, "every": 0}, "every"),
    ):
        with pytest.raises(ValueError, match=match):
            draw_rows(POOL, residual, **options)
    with pytest.raises(ValueError, match="one leading axis"):
        draw_rows((POOL, POOL[:3]), residual, 4)
    with pytest.raises(ValueError, match="a number or vector for each row"):
        draw_rows(POOL, lambda p, x: x.sum(), 4).init(PARAMS, jax.random.key(0))
