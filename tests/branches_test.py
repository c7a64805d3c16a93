"""Parameters inside branches: a branch that is not taken counts nothing, nor do rows elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import (
    assert_factors_close,
    assert_reported,
    assert_tree_close,
    objective_of,
)
from tests._likelihoods import mean_loss
from tests._oracle import oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN


def experts_params():
    return tree(0, up=(4, 5), up_bias=(5,), other=(4, 5), scale=(4,), down=(5, 3))


def branch(k, p, x, tap):
    if k == 0:
        return jnp.tanh(tap.dense("up", x, x @ p["up"] + p["up_bias"], bias=True))
    y = tap.scale("scale", x, x * p["scale"], shape=(4,))
    return jnp.sin(tap.dense("other", y, y @ p["other"]))


def of_branch(k):
    """The program with one branch written out."""

    def model(p, x, tap):
        y = branch(k, p, x["x"], tap)
        return tap.dense("down", y, y @ p["down"])

    return model


def with_cond(p, x, tap):
    y = lax.cond(
        x["k"][0] == 0, lambda p, x: branch(0, p, x, PLAIN), lambda p, x: branch(1, p, x, PLAIN),
        p, x["x"],
    )  # fmt: skip
    return y @ p["down"]


def with_switch(p, x, tap):
    branches = [
        lambda x: branch(0, p, x, PLAIN),
        jax.checkpoint(lambda x: branch(1, p, x, PLAIN)),
        lambda x: x @ jnp.ones((4, 5)),
    ]
    return lax.switch(x["k"][0], branches, x["x"]) @ p["down"]


def batch(*k):
    n = max(6, len(k))
    ks = jnp.asarray(k if len(k) > 1 else k * n)
    return {"x": normal(1, n, 4), "k": ks}, labels(2, n)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [with_cond, with_switch])
@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("bias", ["joint", pytest.param("separate", marks=pytest.mark.exhaustive)])
def test_only_the_branch_that_is_taken_has_statistics(x64, model, k, bias):
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model), bias=bias))
    params = experts_params()
    value, grads, factors = stats(params, batch(k))
    twin = of_branch(k)
    assert_tree_close(
        grads, jax.grad(lambda p: mean_loss(twin, "categorical", p, batch(k)))(params), 1e-10
    )
    expected = oracle(twin, params, batch(k), bias=bias)
    assert_factors_close({n: factors[n] for n in expected}, expected, 1e-10)
    (silent,) = {"up", "other"} - set(expected)
    assert float(factors.a_counts[silent]) == 0
    for leaf in jax.tree.leaves([factors[n] for n in set(factors) - set(expected)]):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.slow
def test_a_branch_in_a_loop_counts_the_iterations_that_take_it(x64):
    def looped(p, x, tap):
        @jax.checkpoint
        def step(x, k):
            first, second = (lambda x: jnp.tanh(x @ p["a"])), (lambda x: jnp.sin(x @ p["b"]))
            return lax.cond(k == 0, first, second, x), None

        return lax.scan(step, x, jnp.array([0, 1, 0]))[0] @ p["down"]

    def unrolled(p, x, tap):
        for k in (0, 1, 0):
            name, act = ("a", jnp.tanh) if k == 0 else ("b", jnp.sin)
            x = act(tap.dense(name, x, x @ p[name]))
        return tap.dense("down", x, x @ p["down"])

    params, data = tree(0, a=(4, 4), b=(4, 4), down=(4, 3)), (normal(1, 6, 4), labels(2, 6))
    factors = jax.jit(jk.value_grad_and_factors(objective_of(looped)))(params, data).factors
    assert_factors_close(factors, oracle(unrolled, params, data), 1e-10)
    assert float(factors.a_counts["a"]) == 12


def routed(p, x, tap):
    """Each example by itself, through the branch that its own index names."""

    def one(x, k):
        branches = [lambda x, k=k: branch(k, p, x, PLAIN) for k in (0, 1)]
        return lax.switch(k, branches, x)

    return jax.vmap(one)(x["x"], x["k"]) @ p["down"]


def selected(p, x, tap):
    """The same with every branch on every row."""
    each = [branch(k, p, x["x"], tap) for k in (0, 1)]
    y = jnp.where((x["k"] == 0)[:, None], *each)
    return tap.dense("down", y, y @ p["down"])


def factors_of_selected(params, data):
    """Brute force counts every row; here only those that reach an expert."""
    expected, x = oracle(selected, params, data), np.asarray(data[0]["x"])
    rows = {"up": np.concatenate([x, np.ones((6, 1))], 1), "other": x * params["scale"]}
    for k, (name, inputs) in enumerate(rows.items()):
        inputs = np.asarray(inputs)[np.asarray(data[0]["k"]) == k]
        expected[name] = expected[name]._replace(a=inputs.T @ inputs / len(inputs))
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_under_vmap_the_predicate_is_the_mask_of_rows(x64, wrap):
    params, data = experts_params(), batch(0, 1, 1, 0, 0, 1)
    model = wrap(lambda p, x: routed(p, x, PLAIN))
    stats = jk.value_grad_and_factors(objective_of(lambda p, x, tap: model(p, x)))
    value, grads, factors = jax.jit(stats)(params, data)
    assert_tree_close(
        grads, jax.grad(lambda p: mean_loss(selected, "categorical", p, data))(params), 1e-10
    )
    assert_factors_close(factors, factors_of_selected(params, data), 1e-10)


def test_what_a_branch_returns_of_a_parameter_is_reported(x64):
    def model(p, x):
        w = lax.cond(x[0, 0] > 0, lambda: p["w"], lambda: 2 * p["w"])
        return x @ w

    assert_reported(model, tree(0, w=(4, 3)), (normal(1, 5, 4),), "w", "returned by a branch")


@pytest.mark.exhaustive
def test_kfac_steps_through_branches(x64):
    stats = jk.value_grad_and_factors(objective_of(routed))
    params, data = experts_params(), batch(0, 1, 1, 0, 0, 1)
    tx = jk.kfac(0.1, like=stats.factor_shapes(params, data), damping=1e-2)
    state, values = tx.init(params), []
    for _ in range(3):
        value, grads, factors = stats(params, data)
        updates, state = tx.update(grads, state, params, factors=factors)
        params, values = optax.apply_updates(params, updates), [*values, float(value)]
    assert values[-1] < values[0]
