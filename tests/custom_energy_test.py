"""A loss with a derivative of its own, whose network is marked in it: FermiNet's energy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from tests._programs import normal, tree

pytestmark = pytest.mark.usefixtures("x64")


def log_psi(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def local_energy(p, x):
    f = lambda x: log_psi(p, x)
    slope, curve = jax.grad(f)(x), jnp.trace(jax.hessian(f)(x))
    return -0.5 * (curve + slope @ slope) + 0.5 * x @ x


def energy(place):
    """The mean local energy; its derivative is the covariance with that of log psi."""

    def marked(psi, here):
        return jk.mark_outputs(psi, jk.Gaussian()) if place == here else psi

    @jax.custom_jvp
    def loss(p, walkers):
        if place == "function":
            marked(jax.vmap(log_psi, (None, 0))(p, walkers), "function")
        return jax.vmap(local_energy, (None, 0))(p, walkers).mean()

    @loss.defjvp
    def rule(primals, tangents):
        p, walkers = primals
        energies = jax.vmap(local_energy, (None, 0))(p, walkers)
        value = loss(p, walkers)
        psi, dpsi = jax.jvp(jax.vmap(log_psi, (None, 0)), primals, tangents)
        marked(psi, "rule")
        return value, jnp.dot(dpsi, energies - value) / len(walkers)

    return loss


def problem():
    return tree(1, w=(3, 4), b=(4,), v=(4,)), normal(2, 6, 3, scale=1.0)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("wall", [lambda f: f, jax.jit], ids=["bare", "jit"])
@pytest.mark.parametrize("place", ["rule", "function"])
def test_the_network_marked_in_the_loss_or_its_rule_has_its_fisher(place, wall):
    params, x = problem()
    loss = wall(energy(place))
    stats = jax.jit(jk.value_grad_and_factors(loss, fisher="exact"))
    value, grads, factors = stats(params, x)
    expected = jax.value_and_grad(energy("nowhere"))(params, x)
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), grads, expected[1])
    h = np.tanh(x @ params["w"] + params["b"])
    g = (1 - h**2) * params["v"]
    rows = np.concatenate([x, np.ones((6, 1))], 1)
    np.testing.assert_allclose(factors["w"].a, rows.T @ rows / 6, rtol=1e-10)
    np.testing.assert_allclose(factors["w"].g, g.T @ g / 6, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(factors["v"].a, h.T @ h / 6, rtol=1e-10)
    np.testing.assert_allclose(factors["v"].g, np.eye(1), rtol=1e-10)
    fisher = jk.operators.ggn(loss, params, x).to_dense()
    jacobian = jax.jacobian(lambda v: log_psi(params | {"v": v}, x))(params["v"])
    np.testing.assert_allclose(fisher[4:8, 4:8], jacobian.T @ jacobian / 6, rtol=1e-9)
    assert not jk.find_layers(loss, params, x).problems


@pytest.mark.exhaustive
def test_given_targets_are_refused_and_sampled_ones_are_unbiased():
    params, x = problem()
    with pytest.raises(ValueError, match='mark 0 stands in .*custom_jvp.*"mc" or "exact"'):
        jk.value_grad_and_factors(energy("rule"))(params, x)
    of = lambda **options: jk.value_grad_and_factors(energy("rule"), **options)
    exact = of(fisher="exact")(params, x).factors
    labels = [log_psi(params, x) + jnp.stack([jnp.ones(6), -jnp.ones(6)])]
    drawn = of(fisher="mc")(params, x, labels=labels).factors
    np.testing.assert_allclose(drawn["v"].g, exact["v"].g, rtol=1e-10)
