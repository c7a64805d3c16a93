"""Smoothed loss at the targets, and the model's own Fisher."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkfac as jk
from jaxkfac.jobs.cli.finetune._problem import SmoothedCategorical

SMOOTHED = SmoothedCategorical(smoothing=0.2)


@pytest.fixture
def net(x64):
    params = {"w": jax.random.normal(jax.random.key(0), (3, 5))}
    batch = (
        jax.random.normal(jax.random.key(1), (6, 3)),
        jnp.arange(6) % 5,
        jnp.arange(6) != 2,
    )
    return lambda p, x: x @ p["w"], params, batch


@pytest.mark.slow
def test_value_and_gradient_are_optaxs_of_smoothed_labels(net):
    apply_fn, params, (inputs, targets, mask) = net

    def expected(params):
        labels = optax.smooth_labels(jax.nn.one_hot(targets, 5), 0.2)
        terms = optax.softmax_cross_entropy(apply_fn(params, inputs), labels)
        return terms[mask].mean()

    stats = jk.value_grad_and_factors(jk.Objective(apply_fn, SMOOTHED), fisher="mc")
    value, grads, _ = stats(params, (inputs, targets, mask), jax.random.key(0))
    np.testing.assert_allclose(value, expected(params), rtol=1e-12)
    np.testing.assert_allclose(grads["w"], jax.grad(expected)(params)["w"], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_the_fisher_is_that_of_the_model(net, fisher):
    apply_fn, params, batch = net
    found, expected = (
        jk.value_grad_and_factors(jk.Objective(apply_fn, likelihood), fisher=fisher)(
            params, batch, jax.random.key(3)
        ).factors["w"]
        for likelihood in (SMOOTHED, jk.Categorical())
    )
    np.testing.assert_allclose(found.g, expected.g, rtol=1e-10)


def test_targets_beyond_the_classes_are_refused(net):
    apply_fn, params, (inputs, targets, _) = net
    with pytest.raises(ValueError, match="targets run from 1 to 5, expected classes from 0 to 4"):
        jk.Objective(apply_fn, SMOOTHED)(params, (inputs, targets + 1))
