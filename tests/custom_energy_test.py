"""A loss with a derivative of its own, whose network is marked in it: FermiNet's energy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkfac as jk
from tests._programs import normal, tree

pytestmark = pytest.mark.usefixtures("x64")


def log_psi(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def local_energy(p, x, log_psi=log_psi):
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


# ---------------------------------------------------------- the loss of FermiNet as it is shipped


class Auxiliary(NamedTuple):
    variance: Any
    local_energy: Any
    clipped_energy: Any
    grad_local_energy: Any = None


def mean_over_devices(x):
    return jax.lax.pmean(x, "walkers")


def bound_log_psi(p, x):
    """Of walkers that are drawn from a normal distribution, nearly."""
    return 0.1 * log_psi(p, x) - 0.25 * x @ x


@jax.custom_jvp
def total_energy(p, walkers):
    e = jax.vmap(lambda x: local_energy(p, x, bound_log_psi))(walkers)
    loss = mean_over_devices(e.mean())
    variance = mean_over_devices(((e - loss) ** 2).mean())
    return loss, Auxiliary(variance, e, e)


@total_energy.defjvp
def _total_energy_rule(primals, tangents):
    """Its energies are clipped, and a scalar of its auxiliary outputs stands for an array."""
    loss, aux = total_energy(*primals)
    spread = mean_over_devices(jnp.abs(aux.local_energy - loss).mean())
    clipped = jnp.clip(aux.local_energy, loss - 5 * spread, loss + 5 * spread)
    aux = aux._replace(clipped_energy=loss)
    psi, moved = jax.jvp(jax.vmap(bound_log_psi, (None, 0)), primals, tangents)
    jk.mark_outputs(psi, jk.Gaussian(), weight=2.0)
    dot = jnp.dot(moved, clipped - loss) / len(psi)
    return (loss, aux), (dot, jax.tree.map(jnp.zeros_like, aux))


def steps_on(number, tx, walkers):
    """Two steps under ``pmap``: parameters, state, loss and auxiliary outputs of each device."""
    params, devices = problem()[0], jax.devices()[:number]
    stats = jk.value_grad_and_factors(
        total_energy, fisher="exact", has_aux=True, axis_name="walkers"
    )

    def init(params, walkers):
        return tx.init(params, like=stats.factor_shapes(params, walkers))

    def step(params, state, walkers):
        (loss, aux), grads, extra = stats.step(params, walkers)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, loss, aux

    mapped = [jax.pmap(fn, "walkers", devices=devices) for fn in (init, step)]
    params = jax.tree.map(lambda x: jnp.stack([x] * number), params)
    walkers = walkers.reshape(number, -1, 3)
    state = mapped[0](params, walkers)
    for _ in range(2):
        params, state, loss, aux = mapped[1](params, state, walkers)
    return jax.tree.map(np.asarray, (params, state, loss, aux))


OPTIMIZERS = {
    "fixed": lambda: jk.kfac(0.05, damping=1e-2, axis_name="walkers"),
    "adaptive": lambda: jk.kfac(axis_name="walkers"),
    "kfe_adam": lambda: jk.kfe_adam(1e-2, axis_name="walkers"),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ferminets_loss_takes_the_steps_of_one_device_on_two(optimizer):
    walkers = normal(3, 64, 3, scale=1.0)
    params, _, loss, aux = steps_on(2, OPTIMIZERS[optimizer](), walkers)
    alone, _, loss_alone, _ = steps_on(1, OPTIMIZERS[optimizer](), walkers)
    assert aux.local_energy.shape == (2, 32) and aux.clipped_energy.shape == (2,)
    np.testing.assert_allclose(loss, np.repeat(loss_alone, 2), rtol=1e-9)
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf[0], leaf[1])
        np.testing.assert_allclose(leaf[0], alone[name][0], rtol=1e-7, atol=1e-9)
        assert np.abs(leaf[0] - problem()[0][name]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_energy_that_is_nan_on_one_device_is_skipped_on_all(optimizer):
    walkers = normal(3, 64, 3, scale=1.0).at[0, 0].set(jnp.nan)
    params, state, loss, _ = steps_on(2, OPTIMIZERS[optimizer](), walkers)
    assert np.isnan(loss).all() and (state.skipped == 2).all()
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf, np.stack([problem()[0][name]] * 2))
