"""Losses of a network's derivatives by its inputs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkfac as jk
from tests import custom_energy_test, derivatives_test
from tests._derivatives import (
    along,
    blocks_of,
    direction,
    net,
    net_params,
    points,
)
from tests._oracle import Block
from tests._programs import normal
from tests.zoo import Case, program

FAMILY = "Derivatives by the inputs"


def _pinn(form):
    """A residual inside and a boundary condition, for a network in plain JAX."""
    inside = derivatives_test.residual(form)
    loss, params, (x, z) = derivatives_test.loss_of(inside), net_params(), points()
    joined = {
        layer.name: layer.bias is not None for layer in jk.find_layers(loss, params, (x, z)).layers
    }
    ones = lambda xs: np.ones((1, len(xs), 1))
    parts = [(inside, x, 2.0, ones(x)), (net, z, 20.0, ones(z))]
    factors = blocks_of(parts, params, joined)
    return Case(loss, params, (x, z), factors=factors, options={"fisher": "exact"})


@program("PINN, Poisson: trace of the Hessian", family=FAMILY, checked="brute force")
def _hessian():
    return _pinn("hessian")


@program("PINN, Poisson: jvp of jvp", family=FAMILY, checked="brute force")
def _jvp():
    return _pinn("forward over forward")


@program("PINN, Poisson: grad of grad", family=FAMILY, checked="brute force")
def _grad():
    return _pinn("reverse over reverse")


@program("PINN, Burgers: u_t + u u_x - nu u_xx", family=FAMILY, checked="brute force")
def _burgers():
    return _pinn("Burgers")


def _flow(apply_fn, params):
    """Momentum and incompressibility of velocity and pressure over a plane, and a wall."""

    def loss(p, batch):
        x, wall = batch

        def residual(x):
            u = lambda x: apply_fn(p, x)
            value, slope, curve = u(x), jax.jacfwd(u)(x), jax.hessian(u)(x)
            momentum = slope[:2] @ value[:2] + slope[2] - 0.1 * jnp.trace(curve[:2], 0, 1, 2)
            return jnp.append(momentum, slope[0, 0] + slope[1, 1])

        r = jk.mark_outputs(jax.vmap(residual)(x), jk.Gaussian())
        b = jk.mark_outputs(jax.vmap(lambda x: apply_fn(p, x)[:2])(wall), jk.Gaussian())
        return 0.5 * jnp.square(r).sum(-1).mean() + 0.5 * jnp.square(b).sum(-1).mean()

    return Case(loss, params, points(), options={"fisher": "exact"})


@program("Linen: Navier-Stokes, three outputs", family=FAMILY, checked="gradient")
def _linen_flow():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = jnp.sin(nn.Dense(5, param_dtype=jnp.float64)(x))
            return nn.Dense(3, param_dtype=jnp.float64)(x)

    model = Net()
    params = model.init(jax.random.key(0), jnp.ones(2))
    return _flow(model.apply, params)


@program("NNX: Navier-Stokes, three outputs", family=FAMILY, checked="gradient")
def _nnx_flow():
    class Net(nnx.Module):
        def __init__(self, rngs):
            sizes = {"rngs": rngs, "param_dtype": jnp.float64}
            self.first = nnx.Linear(2, 5, **sizes)
            self.last = nnx.Linear(5, 3, **sizes)

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)))

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)))
    return _flow(apply_fn, params)


@program("gradient matching: the slope of a potential", family=FAMILY, checked="brute force")
def _forces():
    """A force field as the gradient of an energy, as in models of molecules."""

    def apply_fn(p, x):
        return jax.vmap(jax.grad(lambda x: jnp.tanh(x @ p["w"]) @ p["v"]))(x)

    params = {"w": normal(1, 3, 4), "v": normal(2, 4)}
    x, y = normal(3, 5, 3), normal(4, 5, 3)
    slope = 1 - np.tanh(np.asarray(x @ params["w"])) ** 2
    error = np.asarray(apply_fn(params, x) - y)
    back = slope * np.asarray(params["v"])  # what the kernel's transpose multiplies
    factors = {"w@transposed": Block("dense", back.T @ back / 5, error.T @ error / 5, None)}
    return Case(jk.Objective(apply_fn, jk.Gaussian()), params, (x, y), factors=factors,
                likelihood="gaussian")  # fmt: skip


@program("FermiNet's energy, in its own custom_jvp", family=FAMILY, checked="brute force")
def _energy():
    params, x = custom_energy_test.problem()
    h = np.tanh(x @ params["w"] + params["b"])
    g = (1 - h**2) * np.asarray(params["v"])
    rows = np.concatenate([x, np.ones((6, 1))], 1)
    factors = {
        "w": Block("dense", rows.T @ rows / 6, g.T @ g / 6, None),
        "v": Block("dense", h.T @ h / 6, np.eye(1), None),
    }
    loss = custom_energy_test.energy("rule")
    return Case(loss, params, x, factors=factors, options={"fisher": "exact"})


@program("Sobolev training: values and slopes", family=FAMILY, checked="Gauss-Newton")
def _sobolev():
    """Linear in its kernel: one product of it alone leads to each of the two marks."""

    def loss(p, batch):
        x, y, dy = batch
        u = lambda x: jnp.tanh(x @ normal(8, 2, 6)) @ p["w"]
        value = jk.mark_outputs(jax.vmap(u)(x), jk.Gaussian())
        slope = jk.mark_outputs(jax.vmap(along(u, direction(0)))(x), jk.Gaussian(), weight=0.1)
        value, slope = jnp.square(value - y).sum(-1), jnp.square(slope - dy).sum(-1)
        return 0.5 * value.mean() + 0.05 * slope.mean()

    batch = normal(1, 5, 2), normal(2, 5, 2), normal(3, 5, 2)
    params = {"w": normal(4, 6, 2)}
    hessian = jax.hessian(lambda w: loss({"w": w}, batch))(params["w"]).reshape(6, 2, 6, 2)
    a = np.asarray(hessian[:, 0, :, 0]) / 1.1  # times G it is the matrix itself
    factors = {"w": Block("dense", a, 1.1 * np.eye(2), None)}
    return Case(loss, params, batch, factors=factors, options={"fisher": "exact"})
