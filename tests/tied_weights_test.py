"""One kernel in two products, in one orientation or in both: K-FAC, EKFAC and the operators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from tests._programs import normal

pytestmark = pytest.mark.usefixtures("x64")
N, D = 6, 4
MODELS = {
    "one orientation": lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]),
    "both orientations": lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T,
}
models = pytest.mark.parametrize("name", MODELS)


def problem(name):
    objective = jk.Objective(MODELS[name], jk.Gaussian())
    params = {"w": normal(0, D, D if name == "one orientation" else 5)}
    batch = normal(1, N, D), normal(2, N, D)
    alone = jax.tree.map(lambda x: x[:, None], batch)
    each = jax.vmap(jax.grad(objective), (None, 0))(params, alone)["w"]
    return objective, params, batch, each


@pytest.mark.sampled(1)
@models
def test_operators_are_those_of_the_whole_parameter(name):
    objective, params, batch, each = problem(name)
    rows = each.reshape(N, -1)
    fisher = jk.operators.fisher(objective, params, batch, fisher="empirical").to_dense()
    np.testing.assert_allclose(fisher, rows.T @ rows / N, rtol=1e-10, atol=1e-14)
    outputs = lambda w: MODELS[name]({"w": w}, batch[0])
    jacobian = jax.jacobian(outputs)(params["w"]).reshape(N * D, -1)
    ggn = jk.operators.ggn(objective, params, batch).to_dense()
    np.testing.assert_allclose(ggn, jacobian.T @ jacobian / N, rtol=1e-10, atol=1e-14)


@models
def test_kfac_solves_with_one_block(name):
    """Of two orientations it is the Kronecker product nearest to their sum."""
    objective, params, batch, _ = problem(name)
    stats = jk.value_grad_and_factors(objective)
    _, grads, factors = stats(params, batch)
    options = {"damping_mode": "exact", "momentum": 0.0, "max_condition": np.inf}
    tx = jk.kfac(1.0, like=factors, damping=1e-2, norm_constraint=None, **options)
    found, _ = tx.update(grads, tx.init(params), params, factors=factors)
    if name == "one orientation":
        a, g = factors["w"]
    else:
        a, g = jk.reconstruct(jk.eigendecompose(factors, max_condition=np.inf))["w"]
        both = np.kron(*factors["w"]) + np.kron(
            factors["w@transposed"].g, factors["w@transposed"].a
        )
        # No other product is as near: the rest is orthogonal to it.
        assert abs(np.vdot(both - np.kron(a, g), np.kron(a, g))) < 1e-10 * np.vdot(both, both)
    matrix = np.kron(a, g) + 1e-2 * np.eye(params["w"].size)
    expected = -np.linalg.solve(matrix, np.asarray(grads["w"]).reshape(-1))
    np.testing.assert_allclose(found["w"].reshape(-1), expected, rtol=1e-8)


@models
def test_measured_eigenvalues(name):
    """They are the diagonal of the Fisher in the block's eigenbases."""
    objective, params, batch, each = problem(name)
    factors = jk.value_grad_and_factors(objective)(params, batch).factors
    bases = jk.eigendecompose(factors)
    found = jk.correct_eigenvalues(objective, bases)(params, batch)["w"].raw_values
    basis = bases["w"]
    squares = jnp.square(jnp.einsum("ia,nij,jb->nab", basis.a_vectors, each, basis.g_vectors))
    np.testing.assert_allclose(found, squares.mean(0), rtol=1e-9, atol=1e-15)
