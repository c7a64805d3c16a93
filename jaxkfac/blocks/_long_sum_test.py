import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks._average import LongSum, update_average, zeros_like
from jaxkfac.blocks._random_factors_test import layer, random_factors

LAYERS = (
    layer("w", (3, 4), bias="b"),
    layer("stacked", (2, 3, 2), stack=1),
    layer("scale", (2, 4), kind="scale", stack=1, inputs=(), g_dense=False),
)
BATCHES = 200_000


@pytest.fixture
def factors():
    """Of a batch whose number of rows is no multiple of a power of two."""
    return random_factors(LAYERS, jax.random.key(0), rows=1001, dtype=jnp.float32)


def worst(found, wanted):
    exact = [np.asarray(x, np.float64) for x in jax.tree.leaves(wanted)]
    return max(
        np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max()
        for x, y in zip(jax.tree.leaves(found), exact, strict=True)
    )


def summed(start, factors):
    return jax.jit(lambda total: jax.lax.fori_loop(0, BATCHES, lambda _, s: s + factors, total))(
        start
    )


@pytest.mark.slow
def test_a_sum_of_many_batches_keeps_its_digits(factors):
    wanted = jax.tree.map(lambda x: np.asarray(x, np.float64) * BATCHES, factors)
    assert worst(summed(LongSum.zeros(factors), factors).total, wanted) < 3e-7
    assert worst(summed(zeros_like(factors), factors), wanted) > 1e-5  # what it is for


def test_an_average_of_many_batches_needs_no_long_sum(factors):
    step = lambda _, average: update_average(average, factors, 0.95)
    average = jax.jit(lambda a: jax.lax.fori_loop(0, BATCHES, step, a))(zeros_like(factors))
    for name in factors:
        assert worst(average[name], factors[name]) < 1e-5


def test_terms_of_a_narrower_dtype_are_summed_in_the_sums(factors):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), factors)
    total = LongSum.zeros(factors) + narrow + narrow
    for x, y in zip(jax.tree.leaves(total.total), jax.tree.leaves(narrow), strict=True):
        assert x.dtype == jnp.float32 and jnp.array_equal(x, 2 * y.astype(jnp.float32))
