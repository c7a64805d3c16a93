"""Losses of a network's derivatives: constant tangents, and kernels read in both orientations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from tests._checks import assert_block_close
from tests._derivatives import FORMS, blocks_of, net, net_params, points
from tests._programs import normal

pytestmark = pytest.mark.usefixtures("x64")


def residual(form, wall=lambda f: f):
    return lambda p, x: FORMS[form](wall(lambda x: net(p, x)), x) - 1.0


def loss_of(inside, border=net):
    """A residual inside and a boundary condition, as a user writes them."""

    def loss(p, batch):
        x, z = batch
        r = jk.mark_outputs(jax.vmap(inside, (None, 0))(p, x), jk.Gaussian(), weight=2.0)
        b = jk.mark_outputs(jax.vmap(border, (None, 0))(p, z), jk.Gaussian(), weight=20.0)
        return jnp.square(r).mean() + 10 * jnp.square(b).mean()

    return loss


def pulls_of(fisher, outputs, labels):
    """Cotangents of each mark's outputs, (pulls, points, 1)."""
    if fisher == "exact":
        return np.ones((1, len(outputs), 1))
    if fisher == "mc":
        return (outputs[None] - labels)[..., None] / np.sqrt(len(labels))
    return outputs[None, :, None]


def check(inside, fisher="exact", wall=lambda f: f, loss=None):
    params, (x, z) = net_params(), points()
    loss = loss or loss_of(inside)
    labels = [normal(5, 2, len(x)), normal(6, 2, len(z))] if fisher == "mc" else None
    stats = jk.value_grad_and_factors(loss, fisher=fisher)
    extra = {"labels": labels} if labels else {}
    value, grads, factors = jax.jit(stats)(params, (x, z), **extra)
    expected = jax.value_and_grad(loss)(params, (x, z))
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), grads, expected[1])
    parts = []
    for k, (fn, xs, weight) in enumerate(((inside, x, 2.0), (net, z, 20.0))):
        outputs = np.asarray(jax.vmap(fn, (None, 0))(params, xs))
        pulls = pulls_of(fisher, outputs, None if labels is None else labels[k])
        parts.append((fn, xs, weight, pulls))
    joined = {layer.name: layer.bias is not None for layer in factors.layers}
    blocks = blocks_of(parts, params, joined)
    assert blocks.keys() == {x.name for x in factors.layers if x.kind == "dense"}
    for name, block in blocks.items():
        if fisher == "forward":
            block = block._replace(g=np.eye(len(block.g)))
        assert_block_close(factors[name], block, 1e-10, name)
    table = jk.find_layers(loss, params, (x, z))
    assert not table.problems and list(table) == list(factors)
    return factors


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_factors_of_a_derivative_are_those_of_brute_force(form):
    check(residual(form))


@pytest.mark.parametrize("fisher", ["empirical", "mc", "forward"])
def test_every_fisher_type_of_a_second_derivative(fisher):
    check(residual("forward over reverse"), fisher)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wall", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("form", ["hessian", "forward over forward"])
def test_a_network_inside_jit_or_remat(form, wall):
    walled = loss_of(residual(form, wall))
    check(residual(form), loss=walled)
