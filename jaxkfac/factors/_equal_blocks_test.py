"""Blocks that are alike are traced once; shapes of factors need no trace of statistics at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.factors._statistics import Statistics

DEPTH = 5
KEYS = jax.random.split(jax.random.key(0), DEPTH)
PARAMS = {f"w{i}": jax.random.normal(KEYS[i], (6, 6)) for i in range(DEPTH)} | {"s": jnp.ones(6)}
BATCH = jax.random.normal(jax.random.key(1), (4, 3, 6)), jnp.arange(12).reshape(4, 3) % 6


def model(params, x):
    for i in range(DEPTH):
        x = jnp.tanh(x @ params[f"w{i}"])
    return x * params["s"]


@pytest.fixture
def emitted(monkeypatch):
    calls, original = [], Statistics.emit

    def emit(self, vjp, *rest):
        calls.append(vjp.use.layer)
        return original(self, vjp, *rest)

    monkeypatch.setattr(Statistics, "emit", emit)
    return calls


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_equal_layers_are_traced_once_and_give_the_same_numbers(sharing, emitted, monkeypatch):
    def run():
        stats = value_grad_and_factors(Objective(model, Categorical()), sharing=sharing)
        emitted.clear()
        return jax.jit(stats)(PARAMS, BATCH), list(emitted)

    shared, once = run()
    monkeypatch.setattr(Statistics, "signature", lambda self, site, use: None)
    alone, each = run()
    # The scale, the dense layers, and the first of them, whose input has no derivative.
    assert len(once) == 3 and len(each) == DEPTH + 1
    for a, b in zip(jax.tree.leaves(shared), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"sharing": "reduce"}, {"scales": "full_block"}, {"fisher": "forward"}, {"max_dense": 5}],
    ids=str,
)
def test_shapes_of_factors_are_those_of_the_factors_and_trace_no_statistics(options, emitted):
    stats = value_grad_and_factors(Objective(model, Categorical()), **options)
    shapes = stats.factor_shapes(PARAMS, BATCH)
    assert not emitted
    factors = stats(PARAMS, BATCH).factors
    assert jax.tree.structure(shapes) == jax.tree.structure(factors)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(factors), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
