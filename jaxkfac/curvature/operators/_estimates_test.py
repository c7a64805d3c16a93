import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.curvature.operators import (
    ggn,
    log_determinant,
    spectral_density,
    trace,
)
from jaxkfac.curvature.operators._operator import load
from jaxkfac.curvature.operators._small_nets_test import mlp_problem
from jaxkfac.curvature.operators._spectrum_test import matrix_operator, with_eigenvalues

KEY = jax.random.key(0)
METHODS = ["xtrace", "xnystrace", "hutchinson"]


def decaying(n=100):
    return 0.8 ** jnp.arange(n, dtype=float)


def assert_estimates(found, true, sigmas=4.0):
    """Within the standard error, which is itself an estimate, and small enough to say something."""
    assert 0 < found.standard_error < abs(true)
    assert jnp.abs(found.value - true) <= sigmas * found.standard_error


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_trace_is_within_its_standard_error(x64, method):
    operator = matrix_operator(with_eigenvalues(decaying()))
    assert_estimates(trace(operator, key=KEY, num_samples=12, method=method), decaying().sum())


@pytest.mark.exhaustive
def test_xtrace_is_far_better_than_hutchinson_where_eigenvalues_decay(x64):
    operator, true = matrix_operator(with_eigenvalues(decaying())), decaying().sum()
    found = {m: trace(operator, key=KEY, num_samples=24, method=m) for m in METHODS}
    for method in ("xtrace", "xnystrace"):
        assert found[method].standard_error < 0.05 * found["hutchinson"].standard_error
        np.testing.assert_allclose(found[method].value, true, rtol=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["xtrace", "hutchinson"])
def test_the_standard_error_is_that_of_repeated_estimates(x64, method):
    operator = matrix_operator(with_eigenvalues(1.0 / jnp.arange(1.0, 41)))
    estimates = [trace(operator, key=k, num_samples=10, method=method) for k in keys(40)]
    spread = jnp.std(jnp.stack([e.value for e in estimates]), ddof=1)
    stated = jnp.stack([e.standard_error for e in estimates]).mean()
    assert 0.6 < stated / spread < 1.7


def keys(n):
    return jax.random.split(KEY, n)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
def test_the_trace_is_exact_where_products_make_up_the_matrix(x64, method):
    operator = ggn(*mlp_problem())
    found = trace(operator, key=KEY, num_samples=operator.size, method=method)
    np.testing.assert_allclose(found.value, jnp.trace(operator.to_dense()), rtol=1e-12)
    assert found.standard_error == 0


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1.0, 1e-10, 1e10])
@pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
def test_the_trace_of_a_low_rank_operator_is_exact_at_every_size(method, size):
    true = size * jnp.zeros(60).at[:3].set(jnp.array([3.0, 2.0, 1.0]))
    found = trace(matrix_operator(with_eigenvalues(true)), key=KEY, num_samples=8, method=method)
    np.testing.assert_allclose(found.value, 6 * size, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", METHODS)
def test_a_small_operator_is_not_taken_for_one_of_low_rank(method):
    # matfree alone finds every product below one unit of rounding, and the remainder empty
    true = 1e-9 * jnp.linspace(1, 2, 80)
    found = trace(matrix_operator(with_eigenvalues(true)), key=KEY, num_samples=8, method=method)
    np.testing.assert_allclose(found.value, true.sum(), rtol=0.05)
    assert found.standard_error > 0


@pytest.mark.default(2, slow=1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 50])
def test_the_trace_of_zero_is_zero(method, n):
    found = trace(matrix_operator(jnp.zeros((n, n))), key=KEY, num_samples=4, method=method)
    assert found.value == 0 and found.standard_error == 0


@pytest.mark.slow
@pytest.mark.parametrize("negative", [100, 50, 30])
def test_xnystrace_of_an_indefinite_operator_is_not_a_number(x64, negative):
    # matfree drops the negative part, and calls the error 0
    signs = jnp.where(jnp.arange(100) < negative, -1.0, 1.0)
    operator = matrix_operator(with_eigenvalues(signs * jnp.linspace(0.5, 1.5, 100)))
    found = trace(operator, key=KEY, num_samples=20, method="xnystrace")
    assert jnp.isnan(found.value) and jnp.isnan(found.standard_error)


@pytest.mark.exhaustive  # as _spectrum_test.py has it
def test_lanczos_estimates_refuse_an_operator_that_is_not_symmetric(x64):
    operator = matrix_operator(jax.random.normal(KEY, (30, 30)) + 30 * jnp.eye(30))
    for estimate in (spectral_density, functools.partial(log_determinant, damping=1.0)):
        with pytest.raises(ValueError, match="symmetric operator"):
            estimate(operator, key=KEY)
        estimate(operator, key=KEY, check_symmetric=False)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_negative_width_or_damping_is_refused(bad):
    operator = matrix_operator(jnp.eye(3))
    for sigma in (bad, 0.0):
        with pytest.raises(ValueError, match=f"sigma={sigma}: expected a positive number"):
            spectral_density(operator, key=KEY, sigma=sigma)
    with pytest.raises(ValueError, match=f"damping={bad}: expected zero or a positive number"):
        log_determinant(operator, key=KEY, damping=bad)


@pytest.mark.slow
@pytest.mark.parametrize("damping", [1e-2, 1.0])
def test_the_log_determinant_is_within_its_standard_error(x64, damping):
    operator = matrix_operator(with_eigenvalues(decaying(60)))
    found = log_determinant(operator, damping=damping, key=KEY, num_samples=16)
    assert_estimates(found, jnp.log(decaying(60) + damping).sum())


@pytest.mark.exhaustive
def test_the_log_determinant_of_a_network_matches_the_dense_one(x64):
    operator = ggn(*mlp_problem())
    _, true = jnp.linalg.slogdet(operator.to_dense() + 0.1 * jnp.eye(operator.size))
    found = log_determinant(operator, damping=0.1, key=KEY, num_samples=16)
    assert_estimates(found, true)


@pytest.mark.exhaustive
def test_the_log_determinant_of_scalar_and_zero_operators_is_exact():
    for matrix in (jnp.zeros((9, 9)), 2 * jnp.eye(9), jnp.zeros((1, 1))):
        found = log_determinant(matrix_operator(matrix), damping=0.5, key=KEY)
        np.testing.assert_allclose(
            found.value, len(matrix) * jnp.log(matrix[0, 0] + 0.5), rtol=1e-5
        )
        np.testing.assert_allclose(found.standard_error, 0, atol=1e-5)


@pytest.mark.slow
def test_the_log_determinant_of_a_singular_operator_is_minus_infinity(x64):
    true = jnp.arange(20.0)
    found = log_determinant(matrix_operator(with_eigenvalues(true)), damping=0.0, key=KEY)
    assert found.value == -jnp.inf


@pytest.mark.exhaustive
def test_the_density_integrates_to_one_and_counts_eigenvalues(x64):
    true = jnp.concatenate([jnp.full(30, 1.0), jnp.full(10, 5.0)])
    operator = matrix_operator(with_eigenvalues(true))
    found = spectral_density(operator, key=KEY, num_samples=60, sigma=0.1)
    np.testing.assert_allclose(jnp.trapezoid(found.density, found.grid), 1, rtol=1e-3)
    upper = jnp.trapezoid(jnp.where(found.grid > 3, found.density, 0), found.grid)
    np.testing.assert_allclose(upper, 0.25, atol=0.03)
    np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-12)


@pytest.mark.slow
def test_the_density_is_that_of_the_dense_eigenvalues_within_its_error(x64):
    true, grid = jnp.linspace(-1, 2, 50), jnp.linspace(-1.5, 2.5, 9)
    operator = matrix_operator(with_eigenvalues(true))
    found = spectral_density(operator, key=KEY, num_samples=50, grid=grid, sigma=0.3)
    bells = jnp.exp(-0.5 * ((grid[:, None] - true) / 0.3) ** 2) / (0.3 * (2 * jnp.pi) ** 0.5)
    error = jnp.abs(found.density - bells.mean(-1))
    assert (error <= 4 * found.standard_error).all()
    assert found.standard_error.max() < 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize("factor", [0.0, 1.0, 1e-20])
def test_the_density_of_scalar_operators_is_finite(factor):
    found = spectral_density(matrix_operator(factor * jnp.eye(5)), key=KEY)
    assert all(jnp.isfinite(x).all() for x in found)
    np.testing.assert_allclose(jnp.trapezoid(found.density, found.grid), 1, rtol=1e-3)


@pytest.mark.exhaustive
def test_estimates_run_inside_jit():
    operator = ggn(*mlp_problem(), chunk=2)
    run = jax.jit(
        lambda o, k: (
            trace(o, key=k, num_samples=4).value,
            log_determinant(o, damping=1.0, key=k, num_samples=2).value,
        )
    )
    first, second = run(operator, KEY)
    assert jnp.isfinite(first) and jnp.isfinite(second)


def test_one_sample_has_no_standard_error():
    operator = matrix_operator(jnp.eye(3))
    for estimate in (
        trace,
        spectral_density,
        lambda *a, **k: log_determinant(*a, damping=1.0, **k),
    ):
        with pytest.raises(ValueError, match="at least 2"):
            estimate(operator, key=KEY, num_samples=1)


def test_a_missing_library_names_the_extra():
    with pytest.raises(ImportError, match=r'pip install "jaxkfac\[operators\]"'):
        load("no_such_library.module")
