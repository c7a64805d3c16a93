import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.blocks import LongSum
from jaxkfac.jobs.cli.influence._score import summed_from, total_of

BATCHES = 2000


@pytest.fixture(scope="module")
def factors():
    objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["kernel"]), jk.Categorical())
    params = {"kernel": jnp.linspace(-0.3, 0.4, 6).reshape(3, 2)}
    batch = jnp.linspace(-1, 1.1, 21).reshape(7, 3), jnp.arange(7) % 2
    return jk.value_grad_and_factors(objective)(params, batch)[2]


def worst(total, one):
    leaves = zip(jax.tree.leaves(total), jax.tree.leaves(one), strict=True)
    pairs = [(np.asarray(x), BATCHES * np.asarray(y, np.float64)) for x, y in leaves]
    assert all(x.dtype == np.float32 for x, _ in pairs)
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
def test_sums_of_many_batches_keep_their_digits(factors, on_host):
    one = jax.tree.map(np.array, factors) if on_host else factors
    add = operator.add if on_host else jax.jit(operator.add, donate_argnums=0)
    total = summed_from(one, BATCHES, on_host=on_host)
    for _ in range(BATCHES - 1):
        total = add(total, one)
    assert worst(total_of(total), factors) < 2e-7
    kinds = {type(x) for x in jax.tree.leaves(total_of(total))}
    assert kinds == {np.ndarray} if on_host else np.ndarray not in kinds


def test_plain_sums_lose_them_and_few_batches_take_no_more_than_one_sum(factors):
    total = summed_from(factors, 256, on_host=False)
    assert total is factors and isinstance(summed_from(factors, 257, on_host=False), LongSum)
    add = jax.jit(operator.add)
    for _ in range(BATCHES - 1):
        total = add(total, factors)
    assert worst(total_of(total), factors) > 2e-6
