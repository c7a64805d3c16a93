import jax
import jax.numpy as jnp
import optax
import pytest

from jaxkfac._errors import UncoveredParameterError
from jaxkfac.curvature import correct_eigenvalues, eigendecompose, natural_gradient
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.factors._explicit_net_test import net_batch, net_params, net_statistics
from jaxkfac.optim import scale_by_bases

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def problem():
    params = net_params(jax.random.key(0))
    grads, factors = net_statistics(params, net_batch(jax.random.key(1), 8))
    return params, grads, eigendecompose(factors)


def assert_close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.allclose(x, y, rtol=1e-12), (x, y)


@pytest.mark.slow
def test_chain_with_sgd_is_minus_rate_times_the_natural_gradient(problem):
    params, grads, bases = problem
    tx = optax.chain(scale_by_bases(damping=0.1, damping_mode="factored"), optax.sgd(1e-2))
    step = jax.jit(lambda g, s, p, b: tx.update(g, s, p, bases=b))
    updates, _ = step(grads, tx.init(params), params, bases)
    natural = natural_gradient(grads, bases, damping=0.1, damping_mode="factored")
    assert_close(updates, jax.tree.map(lambda g: -1e-2 * g, natural))


@pytest.mark.slow
def test_damping_schedule_reads_the_step_inside_scan(problem):
    params, grads, bases = problem
    table = jnp.array([0.1, 1.0, 10.0])
    tx = scale_by_bases(damping=lambda step: (table[step], 2 * table[step]))

    def body(state, _):
        updates, state = tx.update(grads, state, bases=bases)
        return state, updates

    _, updates = jax.lax.scan(body, tx.init(params), length=3)
    for t in range(3):
        expected = natural_gradient(grads, bases, damping=(table[t], 2 * table[t]))
        assert_close(jax.tree.map(lambda x, t=t: x[t], updates), expected)


def test_uncovered_parameters_keep_their_gradient_unless_told_otherwise(problem):
    _, grads, bases = problem
    grads["extra"] = jnp.ones(2)
    for missing, expected in (("identity", jnp.ones(2)), ("zero", jnp.zeros(2))):
        tx = scale_by_bases(damping=0.1, missing=missing)
        updates, _ = tx.update(grads, tx.init(grads), bases=bases)
        assert_close(updates["extra"], expected)
    tx = scale_by_bases(damping=0.1, missing="raise")
    with pytest.raises(UncoveredParameterError, match="'extra'"):
        tx.update(grads, tx.init(grads), bases=bases)


def test_apply_if_finite_leaves_out_a_step_with_broken_bases(problem):
    params, grads, bases = problem
    descent = optax.apply_if_finite(optax.sgd(1e-2, momentum=0.9), 5)
    tx = optax.chain(scale_by_bases(damping=0.1), descent)
    broken = jax.tree.map(lambda x: x * jnp.nan, bases)
    updates, (_, state) = tx.update(grads, tx.init(params), params, bases=broken)
    assert int(state.total_notfinite) == 1
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.inner_state))
    assert all(not x.any() for x in jax.tree.leaves(updates))


def test_bad_arguments_are_named(problem):
    _, grads, _ = problem
    with pytest.raises(ValueError, match="damping must be zero or positive"):
        scale_by_bases(damping=-1.0)
    tx = scale_by_bases(damping=1.0)
    with pytest.raises(ValueError, match="bases=bases"):
        tx.update(grads, tx.init(grads))


@pytest.mark.exhaustive
def test_measured_eigenvalues_scale_as_they_precondition():
    x, y = jax.random.normal(jax.random.key(2), (8, 3)), jnp.arange(8) % 2
    params = {"kernel": jax.random.normal(jax.random.key(3), (3, 2))}
    objective = Objective(lambda p, x: x @ p["kernel"], Categorical())
    _, grads, factors = value_grad_and_factors(objective)(params, (x, y))
    plain = eigendecompose(factors)
    measured = correct_eigenvalues(objective, plain)(params, (x, y))
    tx = scale_by_bases(damping=0.1)
    updates, _ = tx.update(grads, tx.init(params), bases=measured)
    assert_close(updates, natural_gradient(grads, measured, damping=0.1))
    assert not jnp.allclose(
        updates["kernel"], natural_gradient(grads, plain, damping=0.1)["kernel"]
    )
