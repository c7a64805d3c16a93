"""The Kronecker penalty against dense matrices, in float64, and what it is for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from tests._cases import CASES, case
from tests._checks import objective_of

pytestmark = pytest.mark.usefixtures("x64")

TOLERANCE = 1e-12


def factors_of(objective, params, batch, **options):
    return jax.jit(jk.value_grad_and_factors(objective, **options))(params, batch).factors


def near(params, seed=3):
    flat, unravel = ravel_pytree(params)
    return unravel(flat + jnp.asarray(np.random.default_rng(seed).normal(size=flat.shape)))


def assert_close(found, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def check(factors, params):
    """Value and derivative are those of the dense Kronecker matrix."""
    other = near(params)
    bases = jk.eigendecompose(factors, max_condition=float("inf"))
    dense = np.asarray(jk.operators.kronecker(bases, params).to_dense())
    moved = np.asarray(ravel_pytree(other)[0] - ravel_pytree(params)[0])
    penalty = jk.quadratic_penalty(factors, params, strength=0.3)
    value, grads = jax.jit(jax.value_and_grad(penalty))(other)
    assert_close(value, 0.15 * moved @ dense @ moved)
    assert_close(ravel_pytree(grads)[0], 0.3 * dense @ moved)
    assert penalty(params) == 0


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_derivative_are_those_of_the_dense_matrix(name, bias):
    model, _, params, batch = case(name)
    objective = objective_of(model)
    check(factors_of(objective, params, batch, bias=bias), params)


def perceptron(p, x):
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (5, 4)),
        "bias": jax.random.normal(keys[1], (4,)),
        "down": jax.random.normal(keys[2], (4, 3)),
    }
    batch = jax.random.normal(keys[3], (20, 5)), jnp.arange(20) % 3
    return jk.Objective(perceptron, jk.Categorical()), params, batch


@pytest.mark.slow
def test_the_blocks_are_kronecker_products_of_the_factors():
    """An oracle without the library's eigenbases: ``np.kron`` of both sides."""
    objective, params, batch = problem()
    factors, other = factors_of(objective, params, batch), near(params)
    found = jk.quadratic_penalty(factors, params)(other)
    moved = jax.tree.map(lambda x, y: np.asarray(x - y), other, params)
    up = np.concatenate([moved["up"], moved["bias"][None]]).ravel()
    parts = [(up, factors["up"]), (moved["down"].ravel(), factors["down"])]
    assert_close(found, sum(0.5 * d @ np.kron(f.a, f.g) @ d for d, f in parts))


@pytest.mark.slow
def test_a_table_that_is_read_twice_has_the_terms_of_both_layers():
    def tied(p, ids):
        return jnp.tanh(p["table"][ids]).mean(1) @ p["table"].T

    params = {"table": near({"table": jnp.zeros((5, 3))})["table"]}
    batch = jnp.asarray([[0, 1], [2, 3], [4, 0]]), jnp.asarray([1, 2, 3])
    factors = factors_of(jk.Objective(tied, jk.Categorical()), params, batch)
    other = near(params, 5)
    moved = other["table"] - params["table"]
    expected = 0.0
    for layer in factors.layers:
        matrix = np.asarray(layer.weight.read(moved))
        a = np.diag(factors[layer.name].a) if not layer.a_dense else factors[layer.name].a
        expected += 0.5 * np.sum(matrix * (a @ matrix @ factors[layer.name].g))
    assert len(factors) == 2
    assert_close(jk.quadratic_penalty(factors, params)(other), expected)


@pytest.mark.exhaustive
def test_the_sum_of_two_penalties_merges_two_fine_tunings():
    """Conjugate gradients on the sum reach the dense solution, the precision-weighted mean."""
    objective, first, batch = problem()
    second = near(first, 5)
    anchors, penalties, dense = (first, second), [], []
    for anchor in anchors:
        factors = factors_of(objective, anchor, batch, fisher="exact")
        penalties.append(jk.quadratic_penalty(factors, anchor))
        bases = jk.eigendecompose(factors, max_condition=float("inf"))
        dense.append(np.asarray(jk.operators.kronecker(bases, anchor).to_dense()))

    def total(params, penalties):
        return sum(penalty(params) for penalty in penalties)

    start = jax.tree.map(lambda x, y: (x + y) / 2, *anchors)
    rhs = jax.grad(total)(start, penalties)
    hessian = jk.operators.hessian(total, start, penalties)
    step = jk.operators.solve(hessian, rhs, damping=1e-6, rtol=1e-12).solution
    found = ravel_pytree(jax.tree.map(jnp.subtract, start, step))[0]
    middle, *flat = (np.asarray(ravel_pytree(x)[0]) for x in (start, *anchors))
    gradient = sum(f @ (middle - x) for f, x in zip(dense, flat))
    exact = middle - np.linalg.solve(sum(dense) + 1e-6 * np.eye(len(middle)), gradient)
    assert_close(found, exact, 1e-6)
    merged = jax.tree.map(jnp.subtract, start, step)
    assert total(merged, penalties) < 0.8 * total(start, penalties)


def test_it_is_an_argument_of_a_jitted_step_and_strength_may_be_traced():
    objective, params, batch = problem()
    factors, other = factors_of(objective, params, batch), near(params)
    penalty = jk.quadratic_penalty(factors, params, strength=2.0)
    found = jax.jit(lambda penalty, params: penalty(params))(penalty, other)
    traced = jax.jit(lambda s: jk.quadratic_penalty(factors, params, strength=s)(other))(2.0)
    np.testing.assert_allclose([found, traced], penalty(other), rtol=1e-12)


def test_bad_input_is_refused_by_name():
    objective, params, batch = problem()
    factors = factors_of(objective, params, batch)
    with pytest.raises(TypeError, match="factors"):
        jk.quadratic_penalty(params, params)
    with pytest.raises(ValueError, match="anchor: no leaf 'down'"):
        jk.quadratic_penalty(factors, {"up": params["up"], "bias": params["bias"]})
    with pytest.raises(ValueError, match=r"'down' has shape \(4, 7\)"):
        jk.quadratic_penalty(factors, params | {"down": jnp.ones((4, 7))})
    with pytest.raises(jk.UncoveredParameterError, match="'more'"):
        jk.quadratic_penalty(factors, params | {"more": jnp.ones(3)})
    free = jk.quadratic_penalty(factors, params | {"more": jnp.ones(3)}, missing="zero")
    assert free(params | {"more": jnp.zeros(3)}) == 0
    with pytest.raises(ValueError, match="and so is the penalty"):
        jk.quadratic_penalty(jax.tree.map(jnp.zeros_like, factors), params)
    fitted = {name: jnp.zeros_like(x) for name, x in factors.g_sums.items()}
    with pytest.raises(ValueError, match="and so is the penalty"):
        jk.quadratic_penalty(dataclasses.replace(factors, g_sums=fitted), params)
    nan = dataclasses.replace(factors, g_sums=factors.g_sums | {"up": jnp.full((4, 4), jnp.nan)})
    with pytest.raises(jk.NonFiniteFactorError, match="'up'"):
        jk.quadratic_penalty(nan, params)
    for strength in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="strength="):
            jk.quadratic_penalty(factors, params, strength=strength)
    penalty = jk.quadratic_penalty(factors, params)
    with pytest.raises(ValueError, match="leaf 'down' has shape"):
        penalty(params | {"down": jnp.ones((4, 7))})
    with pytest.raises(ValueError, match="'more'"):
        penalty(params | {"more": jnp.ones(3)})


def test_the_factors_of_one_step_in_turns_are_refused_by_the_absent_layer():
    params = {"a": jnp.ones((3, 3)), "b": jnp.ones((3, 2))}
    objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], jk.Gaussian())
    stats = jk.value_grad_and_factors(objective, collect=2)
    factors = stats(params, (jnp.eye(3), jnp.zeros((3, 2))), step=0).factors
    with pytest.raises(jk.UnknownLayerError, match="which has nothing of layer"):
        jk.quadratic_penalty(factors, params)
