import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import UncoveredParameterError
from jaxkfac.curvature import apply_power, eigendecompose, reconstruct
from jaxkfac.curvature.operators import ggn, kronecker, spectrum
from jaxkfac.curvature.operators._small_nets_test import attention_problem, mlp_problem
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors


def bases_of(problem, **options):
    objective, params, batch = problem
    stats = value_grad_and_factors(objective, **options)
    return eigendecompose(stats(params, batch).factors, max_condition=jnp.inf)


def assert_close(a, b, rtol=1e-10):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.slow
def test_the_blocks_are_the_kronecker_products_of_the_factors(x64):
    problem = mlp_problem()
    bases = bases_of(problem)
    dense = kronecker(bases, problem[1]).to_dense()
    first, second = reconstruct(bases).values()
    # ravel_pytree puts the bias (4) before the kernel (3 * 4); the factor has it last
    block = jnp.kron(first.a, first.g)
    order = jnp.concatenate([jnp.arange(12, 16), jnp.arange(12)])
    assert_close(dense[:16, :16], block[jnp.ix_(order, order)])
    assert_close(dense[16:, 16:], jnp.kron(second.a, second.g))
    assert_close(dense[:16, 16:], 0)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("power, mode", [(-1.0, "exact"), (0.5, "pi"), (-0.5, "factored")])
def test_powers_and_damping_are_those_of_apply_power(x64, power, mode):
    problem = mlp_problem()
    bases = bases_of(problem)
    operator = kronecker(bases, power=power, damping=0.1, damping_mode=mode)
    expected = apply_power(problem[1], bases, power, 0.1, mode)
    jax.tree.map(assert_close, operator @ problem[1], expected)


def test_the_inverse_undoes_the_damped_operator(x64):
    problem = mlp_problem()
    bases = bases_of(problem)
    inverse = kronecker(bases, power=-1.0, damping=0.1)
    product = inverse @ (kronecker(bases).damped(0.1) @ problem[1])
    jax.tree.map(assert_close, product, problem[1])


@pytest.mark.exhaustive
def test_kronecker_is_the_ggn_of_a_linear_model_with_squared_error(x64):
    x = jax.random.normal(jax.random.key(0), (6, 3))
    params = {"w": jax.random.normal(jax.random.key(1), (3, 2))}
    problem = Objective(lambda p, x: x @ p["w"], Gaussian()), params, (x, jnp.zeros((6, 2)))
    bases = bases_of(problem, fisher="exact")
    assert_close(kronecker(bases, params).to_dense(), ggn(*problem).to_dense())


@pytest.mark.slow
def test_without_params_it_multiplies_and_adds_but_has_no_shapes(x64):
    objective, params, batch = attention_problem(masked=False)
    operator = kronecker(bases_of((objective, params, batch)))
    exact = ggn(objective, params, batch)
    known = kronecker(operator.bases, params)
    expected = jax.tree.map(jnp.add, exact @ params, known @ params)
    for total in (operator + exact, exact + operator):
        assert total.leaves == exact.leaves
        jax.tree.map(assert_close, total @ params, expected)
    with pytest.raises(ValueError, match=r"kronecker\(bases, params\)"):
        spectrum(operator, key=jax.random.key(0))


@pytest.mark.exhaustive
def test_missing_parameters_are_treated_as_in_apply_power():
    problem = mlp_problem()
    bases = bases_of(problem, layers="second/.*", uncovered="ignore")
    vector = jax.tree.map(jnp.ones_like, problem[1])
    with pytest.raises(UncoveredParameterError, match="first/kernel"):
        kronecker(bases) @ vector
    kept = kronecker(bases, missing="identity") @ vector
    assert (kept["first"]["kernel"] == 1).all()
    assert not (kept["second"]["kernel"] == 1).any()
    with pytest.raises(ValueError, match="damping"):
        kronecker(bases, damping=-1.0)


@pytest.mark.exhaustive
def test_a_kronecker_operator_is_an_argument_of_jit():
    problem = mlp_problem()
    operator = kronecker(bases_of(problem), problem[1], power=-1.0, damping=0.1)
    found = jax.jit(lambda o, v: o @ v)(operator, problem[1])
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), found, operator @ problem[1])
