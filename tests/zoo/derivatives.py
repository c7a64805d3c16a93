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
from tests._oracle import Block, oracle
from tests._programs import normal, tree
from tests._taps import PLAIN
from tests.zoo import Case, program

FAMILY = "Derivatives by the inputs"


def _pinn(form, traced=None):
    """A residual inside and a boundary condition; ``traced`` is the residual for brute force."""
    inside = derivatives_test.residual(form) if isinstance(form, str) else form
    loss, params, (x, z) = derivatives_test.loss_of(inside), net_params(), points()
    joined = {
        layer.name: layer.bias is not None for layer in jk.find_layers(loss, params, (x, z)).layers
    }
    ones = lambda xs: np.ones((1, len(xs), 1))
    parts = [(traced or inside, x, 2.0, ones(x)), (net, z, 20.0, ones(z))]
    factors = blocks_of(parts, params, joined)
    return Case(loss, params, (x, z), factors=factors, options={"fisher": "exact"})


@program(
    "PINN, Poisson: trace of the Hessian",
    family=FAMILY,
    checked="brute force",
    unchecked=("b1", "b2"),
)
def _hessian():
    return _pinn("hessian")


@program(
    "PINN, Poisson: jvp of jvp", family=FAMILY, checked="brute force", unchecked=("b1", "b2", "b3")
)
def _jvp():
    return _pinn("forward over forward")


@program(
    "PINN, Poisson: grad of grad", family=FAMILY, checked="brute force", unchecked=("b1", "b2")
)
def _grad():
    return _pinn("reverse over reverse")


@program(
    "PINN, Burgers: u_t + u u_x - nu u_xx",
    family=FAMILY,
    checked="brute force",
    unchecked=("b1", "b2"),
)
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


@program(
    "gradient matching: the slope of a potential",
    family=FAMILY,
    checked="brute force",
    unchecked=("v", "w"),
)
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


# ------------------------------------------------------------------ the Laplacian, forward


def folx_laplacian(**options):
    """Poisson's residual by folx, which sends each product's value, slopes and Laplacian on."""
    import folx

    def inside(p, x):
        return folx.forward_laplacian(lambda x: net(p, x), **options)(x).laplacian - 1.0

    return inside


@program("PINN, Poisson: folx's forward Laplacian", family=FAMILY, checked="brute force",
         unchecked=("b1", "b2", "b3"), needs=("folx",))  # fmt: skip
def _folx():
    return _pinn(folx_laplacian(), traced=folx_laplacian(disable_jit=True))


SPARSE = {
    "w1": "`dot_general` with a constant",
    "b1": "has the example axis lost at `add`",
    "w2": "is read inside `dot_general`",
    "b2": "has the example axis lost at `add`",
    "w3": "is read inside `dot_general`",
}


@program("PINN, Poisson: folx with sparse Jacobians", family=FAMILY, checked="gradient",
         uncovered=SPARSE, needs=("folx",))  # fmt: skip
def _sparse():
    """Below its threshold folx keeps the entries that are not zero, and maps products over them."""
    loss = derivatives_test.loss_of(folx_laplacian(sparsity_threshold=6))
    return Case(loss, net_params(), points(), options={"fisher": "exact"})


# ------------------------------------------------------------------ FermiNet's network

ATOMS, UP, ELECTRONS, DETERMINANTS = normal(9, 2, 3, scale=1.0), 2, 3, 2


def log_psi(p, x, tap):
    """FermiNet's log|psi| at (..., electrons, 3): two streams, envelopes, determinants."""
    from_atoms = x[..., :, None, :] - ATOMS
    r = jnp.linalg.norm(from_atoms, axis=-1, keepdims=True)
    one = jnp.concatenate([from_atoms, r], -1).reshape(*x.shape[:-1], -1)
    apart, eye = x[..., :, None, :] - x[..., None, :, :], jnp.eye(ELECTRONS)[..., None]
    lengths = jnp.linalg.norm(apart + eye, axis=-1, keepdims=True) * (1 - eye)
    two = jnp.concatenate([apart, lengths], -1)

    def dense(at, layer, h):
        return tap.dense(f"{at}/w", h, h @ layer["w"] + layer["b"], bias=True)

    for i, layer in enumerate(p["layers"]):
        means = [h.mean(-2, keepdims=True) for h in jnp.split(one, [UP], -2)]
        pairs = [h.mean(-3) for h in jnp.split(two, [UP], -3)]
        seen = [one, *(jnp.broadcast_to(h, one.shape) for h in means), *pairs]
        new = jnp.tanh(dense(f"layers/{i}/one", layer["one"], jnp.concatenate(seen, -1)))
        one = one + new if i else new
        if "two" in layer:
            two = jnp.tanh(dense(f"layers/{i}/two", layer["two"], two))
    orbitals = []
    for k, part in enumerate((slice(None, UP), slice(UP, None))):
        own, h, r_spin = p["spins"][k], one[..., part, :], r[..., part, :, :]
        decay = tap.scale(
            f"spins/{k}/sigma", r_spin, r_spin * own["sigma"], shape=own["sigma"].shape
        )
        decay = jnp.exp(-decay)
        decay = tap.scale(f"spins/{k}/pi", decay, decay * own["pi"], shape=own["pi"].shape).sum(-2)
        y = tap.dense(f"spins/{k}/w", h, h @ own["w"]) * decay
        orbitals.append(y.reshape(*y.shape[:-1], DETERMINANTS, ELECTRONS))
    matrices = jnp.moveaxis(jnp.concatenate(orbitals, -3), -2, -3)
    signs, logs = jnp.linalg.slogdet(matrices)
    top = logs.max(-1, keepdims=True)
    return top[..., 0] + jnp.log(jnp.abs((signs * jnp.exp(logs - top)).sum(-1)))


@program(
    "FermiNet: the logarithm of its wave function, as it stands",
    family=FAMILY,
    checked="brute force",
)
def _fermi_net():
    columns = DETERMINANTS * ELECTRONS
    shapes = {"w": (5, columns), "sigma": (2, columns), "pi": (2, columns)}
    first = {"one": tree(0, w=(32, 5), b=(5,)), "two": tree(1, w=(4, 3), b=(3,))}
    layers = [first, {"one": tree(2, w=(21, 5), b=(5,))}]
    params = {"layers": layers, "spins": [tree(4, **shapes), tree(5, **shapes)]}
    x, twin = normal(1, 4, ELECTRONS, 3, scale=1.0), lambda p, x, tap: log_psi(p, x, tap)[:, None]
    factors = oracle(twin, params, (x, jnp.zeros((4, 1))), likelihood="gaussian", fisher="exact")
    one = lambda p, x: log_psi(p, x, PLAIN)
    objective = jk.Objective(jax.vmap(one, (None, 0)), jk.Gaussian())
    options = {"fisher": "exact"}
    return Case(objective, params, (x, jnp.zeros(4)), factors=factors, options=options)
