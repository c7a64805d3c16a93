"""A parameter that features share counts alike in factors, EKFAC and Laplace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk

pytestmark = pytest.mark.usefixtures("x64")

N, S = 5, 4
PARAMS = {
    "w": jax.random.normal(jax.random.key(0), (3, 4)),
    "v": jax.random.normal(jax.random.key(1), (4, 3)),
    "temperature": jnp.asarray(0.7),
}


def model(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"] * p["temperature"]


@pytest.fixture
def problem(x64):
    params = jax.tree.map(lambda x: x.astype(float), PARAMS)
    x = jax.random.normal(jax.random.key(2), (N, S, 3))
    targets = jax.random.randint(jax.random.key(3), (N, S), 0, 3)
    return jk.Objective(model, jk.Categorical()), params, (x, targets)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("per", "scales"), [("token", "diagonal"), ("example", "exact_diagonal")])
def test_ekfac_measures_what_factors_hold(problem, per, scales):
    objective, params, batch = problem
    factors = jk.value_grad_and_factors(objective, scales=scales)(params, batch).factors
    bases = jk.eigendecompose(factors)
    measured = jk.correct_eigenvalues(objective, bases, per=per)(params, batch)
    np.testing.assert_allclose(
        measured["temperature"].raw_diagonal, factors["temperature"].diagonal, rtol=1e-12
    )


@pytest.mark.slow
def test_the_evidence_of_a_temperature_is_that_of_the_variance_of_its_logits(problem):
    objective, params, batch = problem
    stats = jk.value_grad_and_factors(objective, fisher="exact")
    bases = jk.eigendecompose(stats(params, batch).factors, max_condition=np.inf)
    posterior = jk.laplace(
        objective, params, bases, num_examples=N, terms_per_example=S, layers="temperature"
    )
    logits = jnp.tanh(batch[0] @ params["w"]) @ params["v"]
    chances = jax.nn.softmax(logits * params["temperature"])
    mean = (chances * logits).sum(-1, keepdims=True)
    fisher = (chances * jnp.square(logits - mean)).sum(-1).mean()  # of one loss term
    precision = 1 + N * S * fisher
    penalty = 0.5 * (jnp.log(precision) + jnp.square(params["temperature"]))
    expected = -N * S * objective(params, batch) - penalty
    np.testing.assert_allclose(posterior.log_marginal_likelihood(batch), expected, rtol=1e-12)
