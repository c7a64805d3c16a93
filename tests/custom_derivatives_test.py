"""Layers inside custom derivatives: the rule's gradient, and statistics of what it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxkfac as jk
from jaxkfac.interception import trace
from tests._checks import assert_factors_close, assert_tree_close, objective_of
from tests._likelihoods import mean_loss
from tests._oracle import oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN


def standardised(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


@jax.custom_vjp
def layer_norm(x, scale, bias):
    return standardised(x) * scale + bias


def _backward(saved, g):
    """By hand, and with half the gradient of the scale, to be seen."""
    x, scale = saved
    dx = jax.vjp(standardised, x)[1](g * scale)[0]
    return dx, 0.5 * (g * standardised(x)).sum((0, 1)), g.sum((0, 1))


layer_norm.defvjp(lambda x, s, b: (layer_norm(x, s, b), (x, s)), _backward)


@jax.custom_jvp
def dense(x, w, b):
    return jnp.tanh(x @ w + b)


@dense.defjvp
def _dense_rule(primals, tangents):
    (x, w, b), (dx, dw, db) = primals, tangents
    y = dense(x, w, b)
    return y, (1 - y * y) * (x @ dw + dx @ w + db)


@jax.custom_jvp
def centred(x, w):
    """Its function keeps rows apart, and its rule does not."""
    return x @ w


@centred.defjvp
def _centred_rule(primals, tangents):
    (x, w), (_, dw) = primals, tangents
    rows = x @ dw
    return centred(x, w), rows - rows.mean(0)


@jax.custom_jvp
def straight_through(x, w):
    """Rounded: the primal's own derivative is zero, the rule's is not."""
    return jnp.round(4 * (x @ w)) / 4


@straight_through.defjvp
def _straight_rule(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return straight_through(x, w), dx @ w + x @ dw


def model(p, x, tap):
    x = layer_norm(x, p["scale"], p["bias"])
    x = dense(x, p["w"], p["b"])
    return straight_through(x, p["head"])


def twin(p, x, tap):
    """The same derivatives, written out; a value that no derivative sees makes up the rounding."""
    y = standardised(x)
    y = tap.scale("scale", y, y * p["scale"], shape=(4,))
    y = tap.lone_bias("bias", y + p["bias"], shape=(4,))
    y = tap.lone_bias("b", tap.dense("w", y, y @ p["w"]) + p["b"], shape=(5,))
    y = jnp.tanh(y)
    z = tap.dense("head", y, y @ p["head"])
    return z + lax.stop_gradient(jnp.round(4 * z) / 4 - z)


def problem():
    return tree(0, scale=(4,), bias=(4,), w=(4, 5), b=(5,), head=(5, 3)), (
        normal(1, 2, 3, 4), labels(2, 2, 3),
    )  # fmt: skip


WALLS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda p, x: jax.vmap(lambda x: f(p, x[None])[0])(x),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("wall", WALLS.values(), ids=WALLS.keys())
def test_the_rules_give_the_gradient_and_the_statistics(x64, wall):
    params, batch = problem()
    step = wall(lambda p, x: model(p, x, PLAIN))
    objective = objective_of(lambda p, x, tap: step(p, x))
    assert not jk.find_layers(objective, params, batch).uncovered
    stats = jk.value_grad_and_factors(objective, scales="diagonal")
    value, grads, factors = jax.jit(stats)(params, batch)
    loss, gradient = jax.value_and_grad(objective)(params, batch)
    np.testing.assert_allclose(value, loss, rtol=1e-12)
    assert_tree_close(grads, gradient, 1e-12)
    true = jax.grad(lambda p: mean_loss(twin, "categorical", p, batch))(params)
    assert_tree_close(2 * grads["scale"], true["scale"], 1e-10)  # the rule's own, half of it
    assert_factors_close(factors, oracle(twin, params, batch), 1e-10)


@pytest.mark.slow
def test_inside_a_scan_of_layers(x64):
    def scanned(p, x, tap):
        step = jax.checkpoint(lambda x, w: (x + dense(x, w["w"], w["b"]), None))
        return lax.scan(step, x, p["layers"])[0] @ p["head"]

    def unrolled(p, x, tap):
        for i in range(2):
            y = tap.dense("layers/w", x, x @ p["layers"]["w"][i], at=(i,))
            y = tap.lone_bias("layers/b", y + p["layers"]["b"][i], shape=(4,), at=(i,))
            x = x + jnp.tanh(y)
        return tap.dense("head", x, x @ p["head"])

    params = tree(0, layers__w=(2, 4, 4), layers__b=(2, 4), head=(4, 3))
    batch = (normal(1, 5, 4), labels(2, 5))
    factors = jax.jit(jk.value_grad_and_factors(objective_of(scanned)))(params, batch).factors
    assert_factors_close(factors, oracle(unrolled, params, batch), 1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_other_fisher_types_go_through_the_rules(x64, fisher):
    params, batch = problem()
    options = {"fisher": fisher, "sharing": "reduce"}
    drawn = {"labels": labels(5, 1, 2, 3)} if fisher == "mc" else {}
    stats = jk.value_grad_and_factors(objective_of(model), **options)
    factors = jax.jit(stats)(params, batch, **drawn).factors
    assert_factors_close(factors, oracle(twin, params, batch, **options, **drawn), 1e-10)


@pytest.mark.exhaustive
def test_kfac_steps_through_custom_derivatives(x64):
    params, batch = problem()
    stats = jk.value_grad_and_factors(objective_of(model))
    tx = jk.kfac(0.1, like=stats.factor_shapes(params, batch), damping=1e-2)
    value, grads, factors = stats(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params, factors=factors)
    assert stats(optax.apply_updates(params, updates), batch).value < value


def test_examples_meet_in_the_rows_of_a_rule_though_its_data_has_no_derivative():
    traced = trace(
        lambda p, x: centred(lax.stop_gradient(x), p["w"]),
        tree(1, w=(4, 3)),
        normal(2, 5, 4),
        num_outputs=1,
    )
    assert traced.examples_meet("value").answer == "no"
    assert traced.examples_meet("derivative").answer == "yes"
