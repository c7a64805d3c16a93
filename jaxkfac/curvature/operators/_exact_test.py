import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxkfac.curvature.operators import fisher, ggn, hessian
from jaxkfac.curvature.operators._small_nets_test import (
    PROBLEMS,
    attention_problem,
    dense_empirical,
    dense_expected,
    dense_gauss_newton,
    dense_hessian,
    mlp_problem,
)
from jaxkfac.factors import Bernoulli, Categorical, Objective

every_problem = pytest.mark.parametrize("name", PROBLEMS)


def build(name):
    function, likelihood = PROBLEMS[name]
    return function(likelihood)


def assert_close(a, b, rtol=1e-10):
    scale = float(jnp.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


@pytest.mark.slow
@pytest.mark.sampled(1)
@every_problem
def test_ggn_is_the_sum_over_terms_of_jacobian_hessian_jacobian(x64, name):
    problem = build(name)
    assert_close(ggn(*problem).to_dense(), dense_gauss_newton(*problem))


@pytest.mark.sampled(1)
@every_problem
def test_hessian_is_the_one_of_jax(x64, name):
    problem = build(name)
    assert_close(hessian(*problem).to_dense(), dense_hessian(*problem))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [n for n in PROBLEMS if "gaussian" not in n])
def test_exact_fisher_is_the_expectation_over_every_labelling(x64, name):
    objective, params, batch = build(name)
    batch = (batch[0][:2], *(x[:2] for x in batch[1:]))
    if len(batch) == 3:
        batch = (*batch[:2], jnp.array([[True, False, True], [True, True, True]]))
    expected = dense_expected(objective, params, batch)
    assert_close(fisher(objective, params, batch).to_dense(), expected)


@pytest.mark.slow
def test_exact_gaussian_fisher_is_jacobian_transposed_jacobian(x64):
    objective, params, (x, y) = mlp_problem("gaussian")
    flat, unravel = ravel_pytree(params)
    jacobian = jax.jacobian(lambda p: objective.apply_fn(unravel(p), x).ravel())(flat)
    assert_close(fisher(objective, params, (x, y)).to_dense(), jacobian.T @ jacobian / len(x))


@pytest.mark.slow
@pytest.mark.sampled(1)
@every_problem
def test_empirical_fisher_is_the_mean_of_outer_products(x64, name):
    problem = build(name)
    assert_close(fisher(*problem, fisher="empirical").to_dense(), dense_empirical(*problem))


@pytest.mark.sampled(1)
@every_problem
def test_mc_fisher_is_the_mean_of_empirical_ones_at_its_labels(x64, name):
    objective, params, batch = build(name)
    outputs = objective.apply_fn(params, batch[0])
    keys = jax.random.split(jax.random.key(3), 2)
    labels = jnp.stack([objective.likelihood.sample(k, outputs) for k in keys])
    found = fisher(objective, params, batch, fisher="mc", labels=labels).to_dense()
    expected = sum(dense_empirical(objective, params, batch, each) for each in labels) / 2
    assert_close(found, expected)


@pytest.mark.slow
def test_mc_fisher_is_unbiased(x64):
    problem = attention_problem()
    operator = fisher(*problem, fisher="mc", key=jax.random.key(0), samples=4000)
    exact = dense_gauss_newton(*problem)
    error = jnp.linalg.norm(operator.to_dense() - exact) / jnp.linalg.norm(exact)
    assert error < 0.05  # 1 / sqrt(samples) times the spread of one, about 2


@pytest.mark.slow
def test_mc_fisher_is_one_fixed_matrix_symmetric_and_semi_definite(x64):
    operator = fisher(*attention_problem(), fisher="mc", key=jax.random.key(0), samples=2)
    dense = operator.to_dense()
    np.testing.assert_array_equal(dense, operator.to_dense())
    assert_close(dense, dense.T)
    assert jnp.linalg.eigvalsh(dense).min() > -1e-12


@pytest.mark.slow
def test_fisher_of_an_unknown_likelihood_goes_through_its_columns(x64):
    objective, params, batch = attention_problem("bernoulli")
    other = Objective(objective.apply_fn, Own())
    expected = dense_gauss_newton(objective, params, batch)
    assert_close(fisher(other, params, batch).to_dense(), expected)
    # of this one the Hessian is another matrix, so the columns are what was taken
    assert jnp.abs(ggn(other, params, batch).to_dense() - expected).max() > 1e-3


@pytest.mark.slow
def test_a_subclass_with_terms_of_its_own_goes_through_its_columns(x64):
    class Twice(Bernoulli):
        def terms(self, outputs, targets):
            return 2 * super().terms(outputs, targets)

    objective, params, batch = attention_problem("bernoulli")
    other = Objective(objective.apply_fn, Twice())
    expected = dense_gauss_newton(objective, params, batch)
    operator = fisher(other, params, batch)
    assert_close(operator.to_dense(), expected)
    (form,) = operator.inner_products([params])[0]
    vector = ravel_pytree(params)[0]
    np.testing.assert_allclose(form, vector @ expected @ vector, rtol=1e-10)


class Own:
    """Bernoulli's Fisher, and terms whose Hessian is not it."""

    def check(self, outputs, targets, mask=None):
        pass

    def terms(self, outputs, targets):
        return 2 * Bernoulli().terms(outputs, targets)

    def sample(self, key, outputs):
        return Bernoulli().sample(key, outputs)

    def fisher_column(self, outputs, index):
        return Bernoulli().fisher_column(outputs, index)


class OneOutput(Own):
    """The same for a model that leaves out the last axis."""

    one_output = True


@pytest.mark.exhaustive
def test_fisher_by_columns_in_bfloat16_divides_by_the_true_number_of_terms():
    """256 is the last number before which bfloat16 holds them all; 1 / 256 is 0.4 % too much."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (257, 3)), jax.random.normal(keys[1], (3, 2))
    objective = Objective(lambda p, x: x @ p["w"], Own())
    half, single = (
        jnp.trace(
            fisher(
                objective, {"w": w.astype(dtype)}, (x.astype(dtype), jnp.zeros((257, 2), dtype))
            ).to_dense()
        )
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    np.testing.assert_allclose(half, single, rtol=3e-3)


@pytest.mark.slow
def test_ggn_equals_hessian_for_a_linear_model_but_not_for_a_deep_one(x64):
    linear = Objective(lambda p, x: x @ p["w"], Categorical())
    batch = (jax.random.normal(jax.random.key(0), (5, 3)), jnp.arange(5) % 2)
    params = {"w": jax.random.normal(jax.random.key(1), (3, 2))}
    assert_close(ggn(linear, params, batch).to_dense(), hessian(linear, params, batch).to_dense())
    deep = mlp_problem()
    assert jnp.abs(ggn(*deep).to_dense() - hessian(*deep).to_dense()).max() > 1e-2


def test_columns_of_one_output_without_a_last_axis_are_its_standard_deviations(x64):
    """A model that leaves out the last axis has one column for each example."""
    x, w = jax.random.normal(jax.random.key(0), (6, 3)), jnp.array([0.5, -1.0, 2.0])
    objective = Objective(lambda params, x: x @ params["w"], OneOutput())
    found = fisher(objective, {"w": w}, (x, jnp.zeros(6))).to_dense()
    p = jax.nn.sigmoid(x @ w)
    assert_close(found, (x * (p * (1 - p))[:, None]).T @ x / 6)
