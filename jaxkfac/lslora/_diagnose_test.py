"""The regulariser and the diagnosis, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.lslora import Adapter, Config, attach, diagnose, fourier_loss

A, B = jnp.ones((4, 2)), jnp.ones((2, 4))
LONE = Adapter(A, B, jnp.array([0.0, 1.5, -0.5, 0.25]), jnp.array(2.0))
SCANNED = Adapter(
    jnp.stack([A, A]),
    jnp.stack([B, -B]),
    jnp.array([[0.0, 1, 0, 0], [1.0, 1, 0, -1]]),
    jnp.array([0.5, 4.0]),
)
PLAIN = Adapter(A, B, None, None)
ADAPTERS = {"lone": LONE, "scan": SCANNED, "plain": PLAIN, "head": jnp.ones(3)}


def test_the_regulariser_is_the_mean_over_slices_without_a_constant_on_the_device():
    by_hand = [(0.25 + 0.25 + 0.0625) / 4, 0, 2 / 4]
    np.testing.assert_allclose(fourier_loss(ADAPTERS), np.mean(by_hand), rtol=1e-6)
    grads = jax.grad(lambda a: fourier_loss(a))(ADAPTERS)
    np.testing.assert_allclose(grads["lone"].coefficients, [0, 1 / 12, -1 / 12, 1 / 24], rtol=1e-6)
    assert not np.any(grads["scan"].sigma)
    with jax.transfer_guard("disallow"):  # no number comes to the host, none is sent from it
        jax.jit(fourier_loss)(ADAPTERS)


def test_plain_lora_has_no_regulariser():
    with pytest.raises(ValueError, match="no adapter has coefficients"):
        fourier_loss({"plain": PLAIN})


def test_the_diagnosis_is_an_array_for_each_slice():
    found = diagnose(ADAPTERS)
    assert set(found) == {"lone", "scan"}
    np.testing.assert_allclose(found["lone"].deviation, (0.5 + 0.5 + 0.25) / 4, rtol=1e-6)
    np.testing.assert_allclose(found["lone"].nonlinearity, 0.75)
    np.testing.assert_allclose(found["scan"].deviation, [0, 0.5])
    np.testing.assert_allclose(found["scan"].nonlinearity, [0, 1])
    assert found["scan"].saturated is None


def test_the_saturated_fraction_is_that_of_the_batch():
    def fn(p, x):
        return jax.lax.scan(lambda c, w: (c + 0 * (c @ w), None), x, p["scan"])[0]

    x = jnp.array([[1.0, 0, 0, 0], [0.1, 0, 0, 0], [0, 0, 0, 0]])
    adapters = {"scan": SCANNED}
    config = Config(rank=2, alpha=2, target="scan")
    found = diagnose(adapters, attach(fn, config), {"scan": jnp.zeros((2, 4, 4))}, x)
    # First slice: z = 2, 0.2 and 0 over sigma = 0.5; tanh(4) > 0.95. Second: sigma = 4.
    np.testing.assert_allclose(found["scan"].saturated, [1 / 3, 0], rtol=1e-6)
    with pytest.raises(ValueError, match="got one without examples"):
        diagnose(adapters, attach(fn, config), {"scan": jnp.zeros((2, 4, 4))}, x[:0])
