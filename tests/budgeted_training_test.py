"""The whole chain under a byte budget: passes into the host service, and its bases into optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkfac as jk


@pytest.fixture(scope="module")
def problem():
    """A scanned residual net: stacked layers that share an input, a head with a bias."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "up": 0.4 * jax.random.normal(keys[0], (4, 6, 8)),
        "gate": 0.4 * jax.random.normal(keys[1], (4, 6, 8)),
        "down": 0.4 * jax.random.normal(keys[2], (4, 8, 6)),
        "head": {"kernel": 0.4 * jax.random.normal(keys[3], (6, 3)), "bias": jnp.zeros(3)},
    }

    def apply(p, x):
        def block(x, w):
            return x + (jnp.tanh(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(block), x, {k: p[k] for k in ("up", "gate", "down")})
        return x @ p["head"]["kernel"] + p["head"]["bias"]

    x = jax.random.normal(keys[4], (32, 6))
    return jk.Objective(apply, jk.Categorical()), params, (x, jnp.argmax(x[:, :3], -1))


BUDGET = 2000  # bytes: seven passes


@pytest.mark.slow
def test_a_budget_into_the_host_service_gives_the_bases_of_one_pass(problem):
    objective, params, batch = problem
    expected = jk.eigendecompose(jax.jit(jk.value_grad_and_factors(objective))(params, batch)[2])
    with jk.HostCurvature(decay=0.9, refresh_every=2, lag=1, timeout=60.0) as service:
        stats = jk.value_grad_and_factors(objective, max_factor_bytes=BUDGET, sink=(service, 0))
        assert len(stats.plan(params, batch).passes) > 3
        _, grads, rest = stats(params, batch)
        bases = service.bases(1)
    assert len(rest) == 0
    direction, wanted = (jk.natural_gradient(grads, b, damping=1e-3) for b in (bases, expected))
    for got, want in zip(jax.tree.leaves(direction), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", ["auto", "host", "device"])
def test_factors_in_host_memory_decompose_like_others(problem, placement):
    objective, params, batch = problem
    on_device = jax.jit(jk.value_grad_and_factors(objective))(params, batch).factors
    on_host = jax.tree.map(np.asarray, on_device)
    found, expected = (jk.eigendecompose(x, placement=placement) for x in (on_host, on_device))
    for name in expected:
        np.testing.assert_allclose(found[name].a_values, expected[name].a_values, rtol=1e-5)
        assert isinstance(found[name].g_vectors, jax.Array)


@pytest.mark.exhaustive
def test_training_under_a_budget_descends_with_bases_from_the_host(problem):
    objective, params, batch = problem
    tx = optax.chain(jk.scale_by_bases(damping=0.1), optax.sgd(0.1))
    state, losses = tx.init(params), []
    with jk.HostCurvature(decay=0.5, refresh_every=3, lag=1, timeout=60.0) as service:
        stats = jk.value_grad_and_factors(
            objective, fisher="mc", max_factor_bytes=BUDGET, sink=(service, 0)
        )
        for step, key in enumerate(jax.random.split(jax.random.key(1), 10)):
            loss, grads, _ = stats(params, batch, key, step=step)
            updates, state = tx.update(grads, state, params, bases=service.bases(step))
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0], losses
