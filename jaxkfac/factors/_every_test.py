"""Factors at some steps only: between them the gradient alone, and counts of zero."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks import with_origin
from jaxkfac.factors import Categorical, Gaussian, Objective, value_grad_and_factors

KEY = jax.random.key(0)
PARAMS = {"w": jax.random.normal(KEY, (3, 4)), "b": jnp.ones(4), "scale": jnp.ones(4)}
X, Y = jax.random.normal(jax.random.key(1), (5, 3)), jnp.arange(5) % 4


def model(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) * params["scale"]


def with_aux(params, x):
    return model(params, x), {"mean": x.mean()}


OBJECTIVE = Objective(model, Categorical())


def with_count(stats):
    """``stats`` with the gradient's own count beside the factors, as ``every=`` gives it."""

    def counted(*args):
        found = stats(*args)
        factors = dataclasses.replace(found.factors, loss_terms=found.factors.terms)
        return found._replace(factors=factors)

    return counted


def assert_same(a, b):
    """But for what fusing does to the last bits: a branch is compiled by itself."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (OBJECTIVE, {}),
        (OBJECTIVE, {"fisher": "mc"}),
        (OBJECTIVE, {"sharing": "reduce"}),
        (Objective(with_aux, Categorical(), has_aux=True), {"fisher": "exact"}),
        (lambda p, batch: jnp.square(model(p, batch[0])).mean(), {"loss_terms": 5}),
    ],
    ids=["empirical", "mc", "reduce", "aux", "scalar loss"],
)
def test_between_collections_there_is_the_gradient_and_a_count_of_nothing(objective, options):
    batch = X, Y
    always = jax.jit(with_count(value_grad_and_factors(objective, **options)))
    stats = value_grad_and_factors(objective, every=3, **options)
    expected = always(PARAMS, batch, KEY)
    origin = dataclasses.replace(expected.factors.origin, every=3)
    structure = jax.tree.structure(expected._replace(factors=with_origin(expected.factors, origin)))
    traced = jax.jit(lambda step: stats(PARAMS, batch, KEY, step=step))
    outside = jax.jit(lambda: stats(PARAMS, batch, KEY, step=4))
    for step in range(5):
        found = traced(step)
        assert_same(found[:2], expected[:2])
        if step % 3 == 0:
            assert_same(found.factors, expected.factors)
        else:
            sums = dataclasses.replace(found.factors, loss_terms=None)
            assert not any(leaf.any() for leaf in jax.tree.leaves(sums))
            assert found.factors.loss_terms == expected.factors.loss_terms > 0
            assert jax.tree.structure(found) == structure
    assert_same(outside(), traced(4))
    assert jax.tree.structure(stats(PARAMS, batch, KEY, step=1)) == structure
    shapes = stats.factor_shapes(PARAMS, batch, KEY)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), expected.factors)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(types)
    assert jax.tree.structure(shapes) == jax.tree.structure(with_origin(types, origin))


def test_a_scan_over_steps_collects_where_it_is_due():
    stats = value_grad_and_factors(OBJECTIVE, every=2)

    def body(params, step):
        _, grads, factors = stats(params, (X, Y), step=step)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), factors.terms

    _, terms = jax.lax.scan(body, PARAMS, jnp.arange(5))
    assert terms.tolist() == [5, 0, 5, 0, 5]


@pytest.mark.slow
def test_a_step_without_collection_computes_no_product_of_rows():
    stats = value_grad_and_factors(OBJECTIVE, every=2)

    def flops(fn, *args):
        return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]

    x, y = jnp.ones((512, 3)), jnp.zeros(512, int)
    gradient = flops(jax.value_and_grad(OBJECTIVE), PARAMS, (x, y))
    between = flops(lambda p, b: stats(p, b, step=1), PARAMS, (x, y))
    collecting = flops(lambda p, b: stats(p, b, step=2), PARAMS, (x, y))
    assert between < 1.03 * gradient < collecting


@pytest.mark.slow
@pytest.mark.parametrize("sink", [False, True])
def test_passes_under_a_budget_are_run_where_they_are_due(sink, capsys):
    class Service:
        def __init__(self):
            self.pushed = []

        def push(self, factors, step, *, first_iteration):
            self.pushed.append(step)

    service = Service()
    options = {"sink": (service, 0)} if sink else {}
    stats = value_grad_and_factors(OBJECTIVE, every=2, max_factor_bytes=200, **options)
    expected = jax.jit(with_count(value_grad_and_factors(OBJECTIVE)))(PARAMS, (X, Y))
    for step in range(3):
        found = stats(PARAMS, (X, Y), step=step)
        for a, b in zip(jax.tree.leaves(expected[:2]), jax.tree.leaves(found[:2]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        assert float(found.factors.loss_terms) == 5
        if not sink:
            assert float(found.factors.terms) == (5 if step % 2 == 0 else 0)
            like = with_origin(expected.factors, found.factors.origin)
            assert jax.tree.structure(found.factors) == jax.tree.structure(like)
            assert found.factors.origin.every == 2
    assert set(service.pushed) == ({0, 2} if sink else set())


def test_the_second_pass_of_what_is_uncovered_waits_as_well(capsys):
    def loss_of(p, x):
        return jnp.exp(p["w"]) * x @ jnp.ones((3, 1))

    objective = Objective(loss_of, Gaussian())
    stats = value_grad_and_factors(objective, every=2, uncovered="diagonal")
    batch = X, jnp.zeros((5, 1))
    between, due = (stats({"w": jnp.ones(3)}, batch, step=step).factors for step in (1, 2))
    assert not between.diagonals["w"].any() and due.diagonals["w"].any()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="every=0: expected at least 1"):
        value_grad_and_factors(OBJECTIVE, every=0)
    with pytest.raises(ValueError, match="step=.*expected the number of this step, a whole number"):
        value_grad_and_factors(OBJECTIVE, every=2)(PARAMS, (X, Y), step=jnp.asarray([1]))
    with pytest.raises(ValueError, match="every=2 collects at some steps: pass step="):
        value_grad_and_factors(OBJECTIVE, every=2)(PARAMS, (X, Y))
