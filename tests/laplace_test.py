"""Laplace posteriors against dense ones, and against Bayesian linear regression, in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from tests._cases import CASES, case
from tests._checks import LIKELIHOODS, objective_of

pytestmark = pytest.mark.usefixtures("x64")

INF = float("inf")
TOLERANCE = 1e-10
RNG = np.random.default_rng(0)


def normal(*shape):
    with jax.enable_x64(True):
        return jnp.asarray(RNG.normal(size=shape))


def bases_of(objective, params, batch, *, corrected=False, **options):
    options = {"fisher": "exact"} | options
    bases = jk.eigendecompose(jk.value_grad_and_factors(objective, **options)(params, batch)[2])
    return jk.correct_eigenvalues(objective, bases)(params, batch) if corrected else bases


def assert_close(found, expected, tolerance=TOLERANCE):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def perceptron(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["u"]


def elements(p, x):
    """A scale and a lone bias beside dense layers."""
    h = jnp.tanh(x @ p["w"])
    return (h * p["scale"] + p["shift"]) @ p["u"]


def scanned(p, x):
    """A stack of three layers with biases, then a head."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] + w[1]), None), x, (p["k"], p["c"]))
    return x @ p["u"]


PARAMS = {"w": normal(3, 4), "b": normal(4), "u": normal(4, 3)}
BATCH = (normal(6, 3), jnp.asarray([0, 1, 1, 0, 2, 0]))
OBJECTIVE = jk.Objective(perceptron, jk.Categorical())
NETS = {
    "perceptron": (perceptron, PARAMS),
    "elements": (elements, PARAMS | {"b": None, "scale": normal(4), "shift": normal(4)}),
    "scanned": (scanned, {"k": normal(3, 3, 3), "c": normal(3, 3), "u": normal(3, 3)}),
}
NETS["elements"][1].pop("b")


def part(leaf, layer, matrix):
    return np.asarray(matrix.read(leaf)).reshape(math.prod(layer.stack), -1, layer.out_features)


def dense_curvature(bases, params):
    """F over ``ravel_pytree(params)``, block by block, from the eigendecompositions."""
    index = {
        path: np.asarray(x)
        for path, x in ravel_pytree(params)[1](jnp.arange(ravel_pytree(params)[0].size)).items()
    }
    dense = np.zeros([ravel_pytree(params)[0].size] * 2)

    def write(rows, block):
        dense[np.ix_(rows.ravel(), rows.ravel())] = block

    for layer in bases.layers:
        rows, basis = part(index[layer.weight.path], layer, layer.weight), bases[layer.name]
        if layer.is_diagonal:
            write(rows, np.diag(np.asarray(basis.raw_diagonal).ravel()))
            continue
        stacked = jax.tree.map(lambda x: x.reshape(len(rows), *x.shape[len(layer.stack) :]), basis)
        for k, own in enumerate(rows):
            one = jax.tree.map(lambda x, k=k: np.asarray(x[k]), stacked)
            values = np.outer(np.maximum(one.a_raw_values, 0), np.maximum(one.g_raw_values, 0))
            values = values if one.raw_values is None else one.raw_values
            vectors = np.kron(one.a_vectors, one.g_vectors)
            if layer.bias is not None:
                bias = part(index[layer.bias.path], layer, layer.bias)[k]
                if bases.bias == "joint":
                    own = np.concatenate([own, bias])
                else:
                    raw = one.g_raw_values if one.bias_raw_values is None else one.bias_raw_values
                    write(bias, one.g_vectors @ np.diag(raw) @ one.g_vectors.T)
            write(own, vectors @ np.diag(values.ravel()) @ vectors.T)
    return dense


def dense_prior(posterior, params):
    flat = {path: np.zeros(x.shape) for path, x in params.items()}
    values = np.broadcast_to(posterior.prior_precision, len(posterior.layers))
    for layer in posterior.bases.layers:
        for matrix in (layer.weight, layer.bias):
            if matrix is not None:
                flat[matrix.path][...] = values[posterior.layers.index(layer.name)]
    return np.asarray(ravel_pytree(flat)[0])


def dense(posterior, params, number):
    """Precision, and the Jacobian's function."""
    factor = number / float(posterior.noise) ** 2
    prior = dense_prior(posterior, params)
    return factor * dense_curvature(posterior.bases, params) + np.diag(prior), prior


def jacobians(model, params, inputs):
    flat, unravel = ravel_pytree(params)
    return np.asarray(jax.jacobian(lambda v: model(unravel(v), inputs))(flat))


def log_likelihood(objective, params, batch, noise=1.0):
    loss = float(objective(params, batch)) * batch[1].shape[0]
    if not isinstance(objective.likelihood, jk.Gaussian):
        return -loss
    return -loss / noise**2 - batch[1].size * np.log(noise * np.sqrt(2 * np.pi))


# ------------------------------------------------------------ the dense posterior


@pytest.mark.parametrize("corrected", [False, True], ids=["factors", "measured"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.sampled(6)
def test_evidence_and_variance_are_those_of_the_dense_posterior(net, bias, corrected):
    model, params = NETS[net]
    objective = jk.Objective(model, jk.Categorical())
    bases = bases_of(objective, params, BATCH, bias=bias, corrected=corrected)
    prior = 0.5 + np.arange(len(bases))
    posterior = jk.laplace(objective, params, bases, num_examples=6, prior_precision=prior)
    precision, prior = dense(posterior, params, 6)
    flat = np.asarray(ravel_pytree(params)[0])
    ratio = np.linalg.slogdet(precision)[1] - np.log(prior).sum()
    expected = log_likelihood(objective, params, BATCH) - (ratio + flat @ (prior * flat)) / 2
    assert_close(posterior.log_marginal_likelihood(BATCH), expected)
    each = jacobians(model, params, BATCH[0])
    expected = np.einsum("ncp,pq,ndq->ncd", each, np.linalg.inv(precision), each)
    assert_close(posterior.variance(BATCH[0]), expected)


def test_variance_is_the_same_whatever_fits_at_once():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    posterior = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6, prior_precision=0.3)
    whole = posterior.variance(BATCH[0])
    rows, parameters = 8 * (4 + 3), 3 * 8 * sum(x.size for x in PARAMS.values())
    for budget in (3 * rows * 2, 3 * rows, parameters):
        assert_close(posterior.variance(BATCH[0], max_bytes=budget), whole)
    with pytest.raises(jk.MemoryBudgetError, match="gradients of one output"):
        posterior.variance(BATCH[0], max_bytes=3 * rows - 1)
