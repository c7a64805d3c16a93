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
    "both biases": lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T + p["c"],
    "both biases, decoder first": lambda p, x: jnp.tanh(
        jnp.tanh(x @ p["w"].T + p["c"]) @ p["w"] + p["b"]
    ),
}
SHAPES = {
    "one orientation": {"w": (D, D)},
    "both orientations": {"w": (D, 5)},
    "both biases": {"w": (D, 5), "b": (5,), "c": (D,)},
    "both biases, decoder first": {"w": (5, D), "b": (D,), "c": (5,)},
}
models = pytest.mark.parametrize("name", MODELS)


def problem(name):
    objective = jk.Objective(MODELS[name], jk.Gaussian())
    params = {k: normal(10 + i, *shape) for i, (k, shape) in enumerate(SHAPES[name].items())}
    params["w"] = normal(0, *SHAPES[name]["w"])
    width = MODELS[name](params, jnp.ones((1, D))).shape[-1]
    batch = normal(1, N, D), normal(2, N, width)
    alone = jax.tree.map(lambda x: x[:, None], batch)
    each = jax.vmap(jax.grad(objective), (None, 0))(params, alone)
    return objective, params, batch, each


def both(factors):
    """The block of the kernel, and of the bias that is joint with it: the sum of both readings."""
    first, turned = factors["w"], factors["w@transposed"]
    kernel = slice(0, len(first.g))  # without the ones of its own bias
    a2 = turned.a[kernel, kernel]
    rows = len(first.a) - len(turned.g)
    return np.kron(*first) + np.kron(np.pad(turned.g, (0, rows)), a2)


@pytest.mark.slow
@pytest.mark.sampled(1)
@models
def test_operators_are_those_of_the_whole_parameter(name):
    objective, params, batch, each = problem(name)
    rows = np.concatenate([each[k].reshape(N, -1) for k in sorted(params)], 1)
    fisher = jk.operators.fisher(objective, params, batch, fisher="empirical").to_dense()
    np.testing.assert_allclose(fisher, rows.T @ rows / N, rtol=1e-10, atol=1e-14)
    jacobian = jax.jacobian(lambda p: MODELS[name](p, batch[0]))(params)
    rows = np.concatenate([jacobian[k].reshape(batch[1].size, -1) for k in sorted(params)], 1)
    ggn = jk.operators.ggn(objective, params, batch).to_dense()
    np.testing.assert_allclose(ggn, rows.T @ rows / N, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.sampled(1)
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
        whole = both(factors)
        # No other product is as near: the rest is orthogonal to it.
        assert abs(np.vdot(whole - np.kron(a, g), np.kron(a, g))) < 1e-10 * np.vdot(whole, whole)
    biases = [grads["b"][None]] if "b" in grads else []
    gradient = np.concatenate([grads["w"], *biases])
    matrix = np.kron(a, g) + 1e-2 * np.eye(gradient.size)
    expected = -np.linalg.solve(matrix, gradient.reshape(-1)).reshape(gradient.shape)
    np.testing.assert_allclose(found["w"], expected[: len(found["w"])], rtol=1e-8)
    if biases:
        np.testing.assert_allclose(found["b"], expected[-1], rtol=1e-8)
        turned = factors["w@transposed"]
        gradient = np.concatenate([np.asarray(grads["w"]).T, grads["c"][None]])
        matrix = np.kron(*turned) + 1e-2 * np.eye(gradient.size)
        expected = -np.linalg.solve(matrix, gradient.reshape(-1)).reshape(gradient.shape)
        np.testing.assert_allclose(found["c"], expected[-1], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.sampled(1)
@models
def test_measured_eigenvalues(name):
    """They are the diagonal of the Fisher in the block's eigenbases."""
    objective, params, batch, each = problem(name)
    factors = jk.value_grad_and_factors(objective)(params, batch).factors
    bases = jk.eigendecompose(factors)
    found = jk.correct_eigenvalues(objective, bases)(params, batch)["w"].raw_values
    basis = bases["w"]
    rows = [each["w"], *([each["b"][:, None]] if "b" in each else [])]
    gradients = jnp.concatenate(rows, 1)
    squares = jnp.square(jnp.einsum("ia,nij,jb->nab", basis.a_vectors, gradients, basis.g_vectors))
    np.testing.assert_allclose(found, squares.mean(0), rtol=1e-9, atol=1e-15)


def test_a_square_kernel_with_both_biases_is_decomposed():
    """Its sides do not tell the readings apart."""
    model = MODELS["both biases"]
    params = {"w": normal(0, D, D), "b": normal(1, D), "c": normal(2, D)}
    batch = normal(3, N, D), normal(4, N, D)
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Gaussian()))
    factors = stats(params, batch).factors
    a, g = jk.reconstruct(jk.eigendecompose(factors, max_condition=np.inf))["w"]
    first, turned = factors["w"], factors["w@transposed"]
    whole = np.kron(*first) + np.kron(np.pad(turned.g, (0, 1)), turned.a[:D, :D])
    assert abs(np.vdot(whole - np.kron(a, g), np.kron(a, g))) < 1e-10 * np.vdot(whole, whole)
