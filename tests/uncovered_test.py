"""What the table of layers calls uncovered is what collecting factors raises for, and no more."""

import jax
import jax.numpy as jnp
import pytest

import jaxkfac as jk

X = jax.random.normal(jax.random.key(0), (6, 3))
PARAMS = {"v": jax.random.normal(jax.random.key(1), (3, 4)), "scale": jnp.ones(4)}


def weight_norm(p, x):
    return x @ (p["v"] / jnp.linalg.norm(p["v"], axis=0) * p["scale"])


def with_batch_norm(p, x):
    h = weight_norm(p, x)
    return (h - h.mean(0)) / h.std(0)


def loss(model):
    return lambda p, batch: jnp.square(model(p, batch[0]) - batch[1]).mean()


def marked(model):
    return lambda p, batch: jnp.square(
        jk.mark_outputs(model(p, batch[0]), jk.Gaussian()) - batch[1]
    ).mean()


def paths(table):
    return {path for path, _ in table.problems}


def raised(objective, params, batch, **call):

    try:
        jk.value_grad_and_factors(objective).factor_shapes(params, batch, **call)
    except jk.UncoveredParameterError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model", [weight_norm, with_batch_norm])
@pytest.mark.parametrize("form", ["objective", "marked", "apply function"])
def test_a_weight_behind_another_is_uncovered_where_examples_meet(model, form):
    batch = X, jnp.zeros((6, 4))
    if form == "apply function":
        table = jk.find_layers(model, PARAMS, X)
        objective = jk.Objective(model, jk.Gaussian())
    else:
        objective = jk.Objective(model, jk.Gaussian()) if form == "objective" else marked(model)
        table = jk.find_layers(objective, PARAMS, batch)
    message = raised(objective, PARAMS, batch)
    assert bool(message) == bool(table.problems) == (model is with_batch_norm)
    assert all(f"{path}: {reason}" in message for path, reason in table.problems)


def test_a_loss_without_outputs_has_no_gradients_of_examples():
    batch = X, jnp.zeros((6, 4))
    table = jk.find_layers(loss(weight_norm), PARAMS, batch)
    assert paths(table) == {"v", "scale"}
    stats = jk.value_grad_and_factors(loss(weight_norm), loss_terms=6)
    with pytest.raises(jk.UncoveredParameterError, match="which need a jk.Objective"):
        stats.factor_shapes(PARAMS, batch)


def test_a_tuple_of_inputs_is_unpacked_as_an_objective_does():
    model = lambda p, x, y: x @ p["v"] + y * p["scale"]
    y = jnp.ones((6, 4))
    inputs = jk.find_layers(model, PARAMS, (X, y))
    assert str(inputs) == str(jk.find_layers(model, PARAMS, X, y))
