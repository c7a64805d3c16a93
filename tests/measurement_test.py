"""Queries by a measurement of their own, against explicit gradients, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from tests.influence_test import bases_of, flat, gradients, normal

pytestmark = pytest.mark.usefixtures("x64")


def apply_fn(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def tokens(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] + x.sum(-1, keepdims=True)


def margin(outputs, query):
    others = jnp.where(
        jnp.arange(len(outputs), dtype=query.targets.dtype) == query.targets, -jnp.inf, outputs
    )
    return outputs[query.targets] - others.max()


def chosen_tokens(outputs, query):
    picked = jnp.take_along_axis(jax.nn.log_softmax(outputs), query.targets[:, None], 1)[:, 0]
    return jnp.where(query.mask, picked, 0).sum()


def loss(outputs, query):
    return -jax.nn.log_softmax(outputs)[query.targets]


PARAMS = {"up": normal(4, 5), "bias": normal(5), "down": normal(5, 3)}
OBJECTIVE = jk.Objective(apply_fn, jk.Categorical())
BATCH = (normal(6, 4), jnp.asarray([0, 1, 2, 0, 1, 2]))
QUERIES = (normal(3, 4), jnp.asarray([2, 1, 0]))
MASK = jnp.asarray([[True, False], [True, True], [False, True]])


def check(objective, batch, queries, measurement):
    """The gradient of each query's measurement by itself, preconditioned, with each example's."""
    bases = bases_of(objective, PARAMS, batch)
    found = jk.influence(
        objective, PARAMS, bases, queries, batch, damping=0.1, measurement=measurement
    )
    whole = objective.batch(queries)

    def one(params, n):
        query = jax.tree.map(lambda x: x[n], whole)
        outputs = objective.apply_fn(params, query.inputs[None])[0]
        return measurement(outputs, query)

    each = [jax.grad(one)(PARAMS, n) for n in range(len(queries[1]))]
    solve = lambda g: jk.natural_gradient(g, bases, damping=0.1)
    solved = np.stack([ravel_pytree(solve(g))[0] for g in each])
    expected = solved @ flat(gradients(objective, PARAMS, batch)).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.exhaustive
def test_a_margin_scores_as_its_explicit_gradient():
    check(OBJECTIVE, BATCH, QUERIES, margin)


@pytest.mark.slow
def test_a_log_likelihood_of_some_tokens_scores_as_its_explicit_gradient():
    objective = jk.Objective(tokens, jk.Categorical())
    batch = (normal(6, 2, 4), jnp.asarray([[0, 1], [2, 0], [1, 2]] * 2))
    check(objective, batch, (normal(3, 2, 4), batch[1][:3], MASK), chosen_tokens)


@pytest.mark.exhaustive
def test_the_loss_as_a_measurement_scores_as_the_loss():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    plain = jk.influence(OBJECTIVE, PARAMS, bases, QUERIES, BATCH)
    found = jk.influence(OBJECTIVE, PARAMS, bases, QUERIES, BATCH, measurement=loss)
    np.testing.assert_allclose(found, plain, rtol=1e-10)
    few = jk.prepare_queries(
        OBJECTIVE, PARAMS, bases, QUERIES, measurement=loss, max_bytes=3000
    )  # a few at a time
    np.testing.assert_allclose(jk.influence(OBJECTIVE, PARAMS, None, few, BATCH), plain, rtol=1e-10)


def test_a_measurement_that_is_no_scalar_is_refused():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)

    def score(measurement, queries=QUERIES):
        return jk.influence(OBJECTIVE, PARAMS, bases, queries, BATCH, measurement=measurement)

    with pytest.raises(ValueError, match=r"one floating scalar of each query.*shape \(3,\)"):
        score(lambda outputs, query: outputs)
    with pytest.raises(ValueError, match=r"one floating scalar.*int"):
        score(lambda outputs, query: outputs.argmax())
    with pytest.raises(ValueError, match=r"one floating scalar.*got float"):
        score(lambda outputs, query: 1.0)
    held = jk.prepare_queries(OBJECTIVE, PARAMS, bases, QUERIES)
    with pytest.raises(ValueError, match=r"pass it to jk\.prepare_queries"):
        score(margin, held)
