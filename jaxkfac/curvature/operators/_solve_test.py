import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxkfac.curvature import eigendecompose
from jaxkfac.curvature.operators import from_function, ggn, kronecker, solve
from jaxkfac.curvature.operators._small_nets_test import mlp_problem
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.interception import mark_outputs


def matrix_operator(matrix):
    return from_function(jnp.matmul, matrix, jnp.zeros(len(matrix), matrix.dtype))


def ill_conditioned():
    """A net whose inputs differ in size by a factor of 200, as unnormalised data do."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "first": jax.random.normal(keys[0], (12, 8)) / 12**0.5,
        "second": jax.random.normal(keys[1], (8, 4)),
    }
    x = jax.random.normal(keys[2], (300, 12)) * jnp.logspace(-2, 0.3, 12)
    y = jax.random.randint(keys[3], (300,), 0, 4)
    model = Objective(lambda p, x: jnp.tanh(x @ p["first"]) @ p["second"], Categorical())
    return model, params, (x, y)


@pytest.mark.slow
def test_the_solution_is_that_of_the_dense_system(x64):
    problem = mlp_problem()
    operator, rhs = ggn(*problem), jax.grad(problem[0])(*problem[1:])
    found = solve(operator, rhs, damping=0.01, rtol=1e-12)
    matrix = operator.to_dense() + 0.01 * jnp.eye(operator.size)
    expected = jnp.linalg.solve(matrix, ravel_pytree(rhs)[0])
    np.testing.assert_allclose(ravel_pytree(found.solution)[0], expected, rtol=1e-8, atol=1e-10)
    assert found.converged
    rough = solve(operator, rhs, damping=0.01, rtol=1e-4)  # above rounding
    residual = ravel_pytree(rhs)[0] - matrix @ ravel_pytree(rough.solution)[0]
    np.testing.assert_allclose(rough.residual_norm, jnp.linalg.norm(residual), rtol=1e-5)


@pytest.mark.exhaustive
def test_a_marked_loss_is_solved_as_its_objective_is(x64):
    objective, params, batch = ill_conditioned()

    def loss(params, batch):
        logits = mark_outputs(objective.apply_fn(params, batch[0]), Categorical())
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[1][:, None], 1).mean()

    rhs, options = jax.grad(loss)(params, batch), {"damping": 0.01, "rtol": 1e-12}
    found = solve(ggn(loss, params, batch), rhs, **options)
    expected = solve(ggn(objective, params, batch), rhs, **options)
    assert found.converged and int(found.num_steps) > 10
    for path, one in found.solution.items():
        np.testing.assert_allclose(one, expected.solution[path], rtol=1e-8, atol=1e-10)


@pytest.mark.exhaustive
def test_the_kronecker_inverse_takes_fewer_steps(x64):
    objective, params, batch = ill_conditioned()
    grads = jax.grad(objective)(params, batch)
    factors = value_grad_and_factors(objective, fisher="exact")(params, batch).factors
    bases = eigendecompose(factors, max_condition=jnp.inf)
    inverse = kronecker(bases, power=-1.0, damping=1e-5)
    options = dict(damping=1e-5, rtol=1e-6)
    plain = solve(ggn(objective, params, batch), grads, **options)
    helped = solve(ggn(objective, params, batch), grads, preconditioner=inverse, **options)
    assert plain.converged and helped.converged
    assert int(helped.num_steps) < 0.5 * int(plain.num_steps)  # measured: 141 and 419
    left, right = (ravel_pytree(found.solution)[0] for found in (plain, helped))
    # Both residuals are below rtol; the solutions may differ by the condition number times it.
    assert jnp.linalg.norm(left - right) < 1e-2 * jnp.linalg.norm(left)


@pytest.mark.slow
def test_the_exact_inverse_takes_one_step(x64):
    matrix = jnp.diag(jnp.logspace(-4, 2, 50))
    inverse = matrix_operator(jnp.diag(1 / jnp.diag(matrix)))
    found = solve(matrix_operator(matrix), jnp.ones(50), preconditioner=inverse)
    assert found.converged and found.num_steps == 1


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("length", [1e-12, 1.0, 1e12])
def test_steps_do_not_depend_on_the_units(size, length):
    # lineax alone calls the small ones singular, and gives NaN
    matrix = jnp.diag(jnp.linspace(1, 100, 2000))
    found = solve(matrix_operator(jnp.float32(size) * matrix), length * jnp.ones(2000))
    expected = solve(matrix_operator(matrix), jnp.ones(2000))
    assert found.converged and abs(found.num_steps - expected.num_steps) <= 1
    scaled = expected.solution * (length / size)
    np.testing.assert_allclose(found.solution, scaled, rtol=1e-3)


@pytest.mark.slow
def test_the_tolerance_is_on_the_residual(x64):
    matrix, rhs = jnp.diag(jnp.logspace(0, 4, 40)), jnp.arange(40.0)
    previous = 0
    for rtol in (1e-2, 1e-5, 1e-8):
        found = solve(matrix_operator(matrix), rhs, rtol=rtol)
        assert found.converged and found.residual_norm <= 1.01 * rtol * jnp.linalg.norm(rhs)
        assert found.num_steps > previous  # and no further than asked
        previous = found.num_steps
    loose = solve(matrix_operator(matrix), rhs, rtol=0.0, atol=50.0)
    assert 1 < loose.residual_norm <= 50.5


def test_a_zero_right_hand_side_has_a_zero_solution():
    found = solve(matrix_operator(jnp.eye(3)), jnp.zeros(3))
    assert found.converged and found.num_steps == 0 and not found.solution.any()


@pytest.mark.parametrize(
    "matrix", [jnp.zeros((4, 4)), jnp.diag(jnp.array([1.0, 0, 1, 1]))], ids=["zero", "singular"]
)
def test_a_singular_system_without_a_solution_does_not_converge(matrix):
    found = solve(matrix_operator(matrix), jnp.arange(1.0, 5.0), max_steps=20)
    assert not found.converged


@pytest.mark.slow
def test_a_solve_that_runs_out_of_steps_says_so():
    found = solve(matrix_operator(jnp.diag(jnp.logspace(0, 4, 40))), jnp.ones(40), max_steps=3)
    assert not found.converged and found.num_steps == 3


@pytest.mark.exhaustive
def test_solve_runs_inside_jit_with_traced_damping():
    problem = mlp_problem()
    rhs = jax.grad(problem[0])(*problem[1:])
    run = jax.jit(lambda operator, rhs, damping: solve(operator, rhs, damping=damping))
    found, expected = run(ggn(*problem), rhs, 0.1), solve(ggn(*problem), rhs, damping=0.1)
    assert found.converged
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        found.solution,
        expected.solution,
    )


@pytest.mark.slow
def test_bfloat16_leaves_are_solved_in_float32():
    matrix = jnp.diag(jnp.linspace(1, 4, 16)).astype(jnp.bfloat16)
    found = solve(matrix_operator(matrix), jnp.ones(16), rtol=0.02)
    assert found.converged and found.solution.dtype == jnp.float32
    np.testing.assert_allclose(found.solution, 1 / jnp.linspace(1, 4, 16), rtol=0.05)


def test_bad_options_are_named():
    operator = matrix_operator(jnp.eye(3))
    with pytest.raises(ValueError, match="expected neither negative, one positive"):
        solve(operator, jnp.ones(3), rtol=0.0)
    with pytest.raises(ValueError, match="damping=-1.0: expected zero or a positive number"):
        solve(operator, jnp.ones(3), damping=-1.0)
    with pytest.raises(ValueError, match="max_steps=0"):
        solve(operator, jnp.ones(3), max_steps=0)
    with pytest.raises(ValueError, match=r"has shape \(4,\), expected \(3,\)"):
        solve(operator, jnp.ones(4))
