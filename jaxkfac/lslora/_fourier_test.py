r"""The nonlinearity and its derivative."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.lslora import fourier
from jaxkfac.lslora._nonlinearity import FOURIER, activation, sin_cos_pi

COEFFICIENTS, SIGMA = (0.3, 0.8, -0.4, 0.6), -1.3


def by_the_formula(z, c, sigma):
    """In NumPy's float64."""
    x = np.tanh(np.asarray(z, np.float64) / (abs(sigma) + 1e-6))
    return c[0] + c[1] * x + c[2] * np.sin(np.pi * x) + c[3] * np.cos(np.pi * x)


def test_polynomials_are_sine_and_cosine_to_one_millionth():
    x = np.linspace(-1, 1, 100_001, dtype=np.float32)
    sine, cosine = jax.jit(sin_cos_pi)(jnp.asarray(x))
    angle = np.pi * x.astype(np.float64)
    assert np.abs(np.asarray(sine, np.float64) - np.sin(angle)).max() < 1e-6
    assert np.abs(np.asarray(cosine, np.float64) - np.cos(angle)).max() < 1e-6


def test_gradients_are_those_of_the_formula(x64):
    """Against JAX's own derivative of library functions, with stacked coefficients."""
    z = jnp.linspace(-3, 3, 24).reshape(2, 3, 4)
    c, sigma = jnp.array([COEFFICIENTS, (0.0, 1, 0, 0)]), jnp.array([SIGMA, 0.7])

    def library(z, c, sigma):
        x = jnp.tanh(z / (jnp.abs(sigma) + 1e-6)[:, None, None])
        c = c[:, :, None, None]
        return c[:, 0] + c[:, 1] * x + c[:, 2] * jnp.sin(jnp.pi * x) + c[:, 3] * jnp.cos(jnp.pi * x)

    def both(fn):
        return jax.vjp(fn, z, c, sigma)

    (got, pull), (want, pull_library) = both(fourier), both(library)
    np.testing.assert_allclose(got, want, rtol=1e-13)
    cotangent = jnp.cos(jnp.arange(24.0)).reshape(z.shape)
    for mine, theirs in zip(pull(cotangent), pull_library(cotangent), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-13)


def test_float32_is_within_a_millionth_of_float64():
    z = np.linspace(-4, 4, 4001, dtype=np.float32)
    got = jax.jit(fourier)(jnp.asarray(z), jnp.array(COEFFICIENTS), jnp.array(SIGMA))
    # Two polynomials, each below 1e-6, times coefficients that add up to one.
    np.testing.assert_allclose(got, by_the_formula(z, COEFFICIENTS, SIGMA), atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_backward_pass_keeps_one_array_in_the_dtype_of_u(dtype):
    u = jnp.zeros((64, 32), dtype)
    _, pull = jax.vjp(lambda *a: activation(FOURIER, *a), u, jnp.array(COEFFICIENTS))
    large = [x for x in jax.tree.leaves(pull) if x.size >= 32]
    assert [(x.shape, x.dtype) for x in large] == [((64, 32), dtype)]


def test_a_compiled_chain_keeps_one_array_for_each_link():
    """Not the sine and cosine that both passes compute."""
    links, u = 8, jnp.ones((64, 128))

    def chain(u, c):
        for _ in range(links):
            u = activation(FOURIER, u, c)
        return (u * u).sum()

    compiled = jax.jit(jax.grad(chain, (0, 1))).lower(u, jnp.array(COEFFICIENTS)).compile()
    # Beside them a cotangent and its products; with library derivatives it is six for each link.
    assert compiled.memory_analysis().temp_size_in_bytes <= (links + 3) * u.nbytes


def test_bfloat16_is_computed_in_float32():
    z = jnp.linspace(-3, 3, 401).astype(jnp.bfloat16)
    got = fourier(z, jnp.array(COEFFICIENTS), jnp.array(SIGMA))
    assert got.dtype == jnp.float32
    want = by_the_formula(z.astype(jnp.float32), COEFFICIENTS, SIGMA)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_gradients_of_bfloat16_are_those_of_float32_rounded():
    u = jnp.linspace(-3, 3, 401).astype(jnp.bfloat16)

    def gradients(u):
        out, pull = jax.vjp(lambda *a: activation(FOURIER, *a), u, jnp.array(COEFFICIENTS))
        return pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)))

    (du, dc), (du_wide, dc_wide) = gradients(u), gradients(u.astype(jnp.float32))
    assert du.dtype == jnp.bfloat16 and dc.dtype == jnp.float32
    np.testing.assert_array_equal(du, du_wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(dc, dc_wide)


def test_infinite_sigma_is_the_identity_with_a_finite_gradient():
    z, c, sigma = jnp.array([-2.0, 0.5]), jnp.array(COEFFICIENTS), jnp.array(jnp.inf)

    def identity(z, c, sigma):
        return (fourier(z, c, sigma, may_be_linear=True) * jnp.array([3.0, 5.0])).sum()

    assert float(identity(z, c, sigma)) == -2.0 * 3 + 0.5 * 5
    dz, dc, dsigma = jax.grad(identity, (0, 1, 2))(z, c, sigma)
    np.testing.assert_array_equal(dz, [3, 5])
    np.testing.assert_array_equal(dc, np.zeros(4))
    assert float(dsigma) == 0


@pytest.mark.parametrize(("ratio", "away"), [(0.57, 0.24), (1.0, 0.43), (3.0, 0.76)])
def test_first_coefficients_are_tanh_and_far_from_linear(ratio, away):
    """The numbers in Config's docstring, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    z = ratio * nodes
    got = np.asarray(fourier(jnp.asarray(z, jnp.float32), jnp.array([0.0, 1, 0, 0]), jnp.ones(())))
    np.testing.assert_allclose(got, np.tanh(z), atol=2e-6)
    distance = math.sqrt((weights * (got - z) ** 2).sum() / (weights * z**2).sum())
    assert distance == pytest.approx(away, abs=0.005)


@pytest.mark.slow
def test_forward_mode_differentiates_as_reverse_does(x64):
    z, c, sigma = jnp.linspace(-2, 2, 5), jnp.array(COEFFICIENTS), jnp.array(SIGMA)

    def total(z, c, sigma):
        return fourier(z, c, sigma, forward_mode=True).sum()

    tangents = (jnp.cos(z), jnp.ones(4), jnp.ones(()))
    _, forward = jax.jvp(total, (z, c, sigma), tangents)
    pulled = jax.grad(lambda *a: fourier(*a).sum(), (0, 1, 2))(z, c, sigma)
    reverse = sum(jnp.vdot(t, g) for t, g in zip(tangents, pulled, strict=True))
    np.testing.assert_allclose(forward, reverse, rtol=1e-12)
