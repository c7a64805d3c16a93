import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxkfac.curvature.operators import from_function, ggn, hessian
from jaxkfac.curvature.operators._small_nets_test import mlp_problem
from jaxkfac.factors import Gaussian
from jaxkfac.interception import mark_outputs


def assert_close(a, b, rtol=1e-10):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def matrix_operator(matrix, like=None):
    return from_function(jnp.matmul, matrix, jnp.zeros(len(matrix)) if like is None else like)


@pytest.mark.slow
def test_sums_multiples_and_damping_are_those_of_the_matrices(x64):
    A, B = jax.random.normal(jax.random.key(0), (2, 4, 4))
    a, b = matrix_operator(A), matrix_operator(B)
    assert_close((a + b).to_dense(), A + B)
    assert_close((a - b).to_dense(), A - B)
    assert_close((-a).to_dense(), -A)
    for factor in (2, 2.0, np.float64(2), jnp.asarray(2.0), np.array(2)):
        assert_close((factor * a) @ B[0], 2 * A @ B[0])
        assert_close((a * factor) @ B[0], 2 * A @ B[0])
    assert_close((2.0 * (a + b).damped(0.1) + b).to_dense(), 2 * (A + B + 0.1 * jnp.eye(4)) + B)


@pytest.mark.slow
def test_curvatures_of_different_kinds_add(x64):
    problem = mlp_problem()
    total = ggn(*problem, chunk=2) + hessian(*problem)
    expected = ggn(*problem).to_dense() + hessian(*problem).to_dense()
    assert_close(total.to_dense(), expected)


def test_multiples_and_damping_are_of_the_same_batch_and_sums_may_be_of_parts():
    def loss(params, x):
        heads = mark_outputs(x @ params, Gaussian(), mask=x[:, 0] > 0), mark_outputs(x, Gaussian())
        return sum(jnp.square(head).mean() for head in heads)

    x = jnp.array([[1.0, 2.0], [-1.0, 0.5], [3.0, 1.0]])
    operator = ggn(loss, jnp.ones((2, 2)), x)
    assert operator.loss_terms == (2 * operator).damped(0.1).loss_terms == 2 + 3
    none = ggn(loss, jnp.ones((2, 2)), -jnp.abs(x))
    assert none.loss_terms == 3 and (operator + none).loss_terms is None


def test_multiples_and_damping_may_be_traced(x64):
    a, vector = matrix_operator(jnp.diag(jnp.arange(3.0))), jnp.ones(3)
    found = jax.jit(lambda a, s: (s * a).damped(s) @ vector)(a, 2.0)
    assert_close(found, jnp.array([2.0, 4.0, 6.0]))


def test_the_matrix_is_in_the_order_of_ravel_pytree(x64):
    params = {"a": {"b": jnp.zeros(2), "a": jnp.zeros(1)}, "a-c": jnp.zeros(1)}
    matrix = jnp.arange(16.0).reshape(4, 4)

    def product(matrix, tree):
        flat, unravel = ravel_pytree(tree)
        return unravel(matrix @ flat)

    assert_close(from_function(product, matrix, params).to_dense(), matrix)


@pytest.mark.slow
def test_a_product_has_the_structure_and_dtypes_of_the_vector():
    problem = mlp_problem()
    operator = ggn(*problem)
    vector = jax.tree.map(lambda x: x.astype(jnp.bfloat16), problem[1])
    product = operator(vector)
    assert jax.tree.structure(product) == jax.tree.structure(vector)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(product))
    by_path = operator @ {path: jnp.ones(leaf.shape) for path, leaf in operator.leaves.items()}
    assert by_path.keys() == operator.leaves.keys()


def test_vectors_that_do_not_fit_are_named():
    objective, params, batch = mlp_problem()
    operator = ggn(objective, params, batch)
    with pytest.raises(ValueError, match="expected a leaf 'second/kernel' of shape"):
        operator @ {"first": params["first"]}
    with pytest.raises(ValueError, match=r"'second/kernel' has shape \(4,\), expected \(4, 3\)"):
        operator @ {**params, "second": {"kernel": jnp.ones(4)}}
    with pytest.raises(ValueError, match="no leaf 'third'.*nearest"):
        operator @ {**params, "third": jnp.ones(1)}
    with pytest.raises(ValueError, match="second operator: .*no leaf ''"):
        operator + matrix_operator(jnp.eye(3))


def test_only_scalars_multiply_and_only_operators_are_added():
    operator = matrix_operator(jnp.eye(3))
    with pytest.raises(TypeError, match="expected a scalar"):
        operator * jnp.ones(3)
    with pytest.raises(TypeError, match="expected a scalar"):
        operator.damped(jnp.ones(3))
    with pytest.raises(TypeError, match="unsupported operand"):
        operator + 1.0
