"""Influence and Laplace posteriors of examples that are divided among devices by their sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkfac as jk
from tests._checks import two_devices
from tests._programs import labels, normal

OBJECTIVE = jk.Objective(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], jk.Categorical())


def uses(params, batch):
    factors = jk.value_grad_and_factors(OBJECTIVE, fisher="exact")(params, batch).factors
    bases = jk.eigendecompose(factors)
    queries = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)[:2]), batch)
    posterior = jk.laplace(OBJECTIVE, params, bases, num_examples=8)
    return {
        "scores": jk.influence(OBJECTIVE, params, bases, queries, batch),
        "at low rank": jk.influence(OBJECTIVE, params, bases, queries, batch, query_rank=2),
        "the best": jk.influence(OBJECTIVE, params, bases, queries, batch, top_k=3),
        "self": jk.self_influence(OBJECTIVE, params, bases, batch),
        "evidence": posterior.log_marginal_likelihood(batch),
        "tuned": posterior.tune_prior(batch).prior_precision,
        "tuned on others": posterior.tune_prior(validation=batch).prior_precision,
        "variance": posterior.variance(batch[0]),
        "probit": posterior.predict(batch[0]),
        "sampled": posterior.predict(batch[0], "mc", key=jax.random.key(0)),
    }


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_uses_of_a_divided_batch_are_those_of_one_device(x64, kind):
    params = {"w": normal(1, 3, 5), "v": normal(2, 5, 4)}
    batch = normal(3, 8, 3), labels(4, 8, classes=4)
    expected = uses(params, batch)
    with two_devices():
        mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            found = uses(jax.device_put(params, P()), jax.device_put(batch, P("x")))
    for name, values in expected.items():
        for mine, other in zip(*map(jax.tree.leaves, (found[name], values)), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12, err_msg=name)
