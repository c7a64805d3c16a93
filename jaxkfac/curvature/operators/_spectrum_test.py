import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxkfac.curvature.operators import from_function, ggn, hessian, spectrum
from jaxkfac.curvature.operators._small_nets_test import mlp_problem

KEY = jax.random.key(0)


def matrix_operator(matrix):
    return from_function(jnp.matmul, matrix, jnp.zeros(len(matrix), matrix.dtype))


def with_eigenvalues(values, seed=0):
    noise = jax.random.normal(jax.random.key(seed), (len(values), len(values)))
    q, _ = jnp.linalg.qr(noise)
    matrix = q * values @ q.T
    return (matrix + matrix.T) / 2


def distance(found, true):
    """From each reported eigenvalue to the nearest true one."""
    return jnp.abs(found[:, None] - true).min(-1)


@pytest.mark.exhaustive
def test_every_eigenvalue_lies_within_its_bound_of_a_true_one(x64):
    true = jnp.logspace(-6, 2, 200) * jnp.where(jnp.arange(200) % 3 == 0, -1, 1)
    operator = matrix_operator(with_eigenvalues(true))
    for steps in (6, 12, 30, 80):
        found = spectrum(operator, 5, key=KEY, num_steps=steps)
        assert (distance(found.eigenvalues, true) <= found.error_bounds).all()
    # neither vacuous: the bounds say when the outermost ones are found
    assert found.error_bounds.max() < 1e-10
    np.testing.assert_allclose(found.eigenvalues[0], true[jnp.abs(true).argmax()], rtol=1e-10)
    few = spectrum(operator, 5, key=KEY, num_steps=6)
    assert distance(few.eigenvalues, true).max() > 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [ggn, hessian])
def test_all_steps_give_the_whole_spectrum(x64, kind):
    operator = kind(*mlp_problem())
    true = jnp.linalg.eigvalsh(operator.to_dense())
    found = spectrum(operator, operator.size, key=KEY, which="smallest")
    assert found.eigenvalues.shape == (operator.size,)
    np.testing.assert_allclose(found.eigenvalues, true, rtol=1e-10, atol=1e-13)
    assert (jnp.abs(found.eigenvalues - true) <= found.error_bounds).all()
    assert found.error_bounds.max() < 1e-10


@pytest.mark.slow
def test_the_order_is_the_one_asked_for(x64):
    true = jnp.array([-5.0, -2, 0, 1, 3, 4])
    operator = matrix_operator(with_eigenvalues(true))
    for which, expected in {
        "magnitude": [-5, 4, 3],
        "largest": [4, 3, 1],
        "smallest": [-5, -2, 0],
    }.items():
        found = spectrum(operator, 3, key=KEY, which=which)
        np.testing.assert_allclose(found.eigenvalues, expected, atol=1e-12)


@pytest.mark.slow
def test_eigenvectors_are_unit_trees_that_the_operator_stretches(x64):
    operator = ggn(*mlp_problem())
    found = spectrum(operator, 3, key=KEY, vectors=True)
    for i, value in enumerate(found.eigenvalues):
        vector = jax.tree.map(lambda x, i=i: x[i], found.vectors)
        assert jax.tree.structure(vector) == jax.tree.structure(operator.like)
        flat = ravel_pytree(vector)[0]
        np.testing.assert_allclose(jnp.linalg.norm(flat), 1, rtol=1e-12)
        product = ravel_pytree(operator @ vector)[0]
        np.testing.assert_allclose(product, value * flat, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [pytest.param(n, marks=[] if n == 5 else pytest.mark.exhaustive) for n in (2, 5, 12, 40)],
)
def test_breakdown_on_a_low_rank_operator_gives_its_eigenvalues(x64, steps):
    true = jnp.zeros(40).at[:3].set(jnp.array([3.0, 2.0, 1e-3]))
    found = spectrum(matrix_operator(with_eigenvalues(true)), 2, key=KEY, num_steps=steps)
    assert (distance(found.eigenvalues, true) <= found.error_bounds).all()
    if steps > 3:
        np.testing.assert_allclose(found.eigenvalues, true[:2], rtol=1e-10)


@pytest.mark.exhaustive
def test_repeated_eigenvalues_come_with_their_multiplicity(x64):
    true = jnp.array([2.0, 2, 2, 1, 1, 0, 0, 0])
    found = spectrum(matrix_operator(with_eigenvalues(true)), 8, key=KEY)
    np.testing.assert_allclose(found.eigenvalues, true, atol=1e-12)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("factor", [0.0, 1.0, 1e-30])
def test_zero_tiny_and_scalar_operators_are_exact(n, factor):
    operator = matrix_operator(factor * jnp.eye(n))
    found = spectrum(operator, 3, key=KEY)
    assert found.eigenvalues.shape == (min(n, 3),)
    np.testing.assert_allclose(found.eigenvalues, factor, rtol=1e-5)
    assert (found.error_bounds <= 1e-4 * factor).all()
    if factor == 0:
        assert not found.eigenvalues.any()


@pytest.mark.exhaustive
def test_leaves_without_gradient_change_nothing(x64):
    # most of the Krylov vectors' entries are exactly zero after the first product
    matrix = jnp.zeros((30, 30)).at[:3, :3].set(with_eigenvalues(jnp.array([1.0, 2, 3])))
    found = spectrum(matrix_operator(matrix), 5, key=KEY, num_steps=20)
    np.testing.assert_allclose(found.eigenvalues, [3, 2, 1, 0, 0], atol=1e-12)


@pytest.mark.slow
def test_a_nonsymmetric_operator_is_refused_with_both_products():
    matrix = with_eigenvalues(jnp.arange(1.0, 11)).at[0, 5].add(1.0)
    operator = matrix_operator(matrix)
    with pytest.raises(ValueError, match=r"symmetric operator.*<u, A v> = .* and <v, A u> = "):
        spectrum(operator, 3, key=KEY)
    assert jnp.isnan(spectrum(operator, 3, key=KEY, check_symmetric=False).asymmetry)
    inside = jax.jit(lambda o: spectrum(o, 3, key=KEY))(operator)
    assert inside.asymmetry > 1e-2


def test_products_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite products"):
        spectrum(matrix_operator(jnp.full((3, 3), jnp.nan)), key=KEY)


@pytest.mark.exhaustive
def test_rounding_is_not_taken_for_asymmetry():
    objective, params, (x, y) = mlp_problem()
    params, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, x))
    found = spectrum(ggn(objective, params, (x, y)), 2, key=KEY)
    exact = spectrum(ggn(*mlp_problem()), 2, key=KEY)
    np.testing.assert_allclose(found.eigenvalues, exact.eigenvalues, rtol=0.05)


@pytest.mark.exhaustive
def test_the_same_key_gives_the_same_bits_inside_jit_and_out(x64):
    operator = ggn(*mlp_problem())
    once, again = (spectrum(operator, 3, key=KEY) for _ in range(2))
    np.testing.assert_array_equal(once.eigenvalues, again.eigenvalues)
    inside = jax.jit(lambda o, k: spectrum(o, 3, key=k))(operator, KEY)
    np.testing.assert_allclose(inside.eigenvalues, once.eigenvalues, rtol=1e-10)


def test_bad_numbers_are_named():
    operator = matrix_operator(jnp.eye(3))
    with pytest.raises(ValueError, match="num_eigenvalues=0"):
        spectrum(operator, 0, key=KEY)
    with pytest.raises(ValueError, match="num_steps=2 gives as many eigenvalues"):
        spectrum(operator, 3, key=KEY, num_steps=2)
