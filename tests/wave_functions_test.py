"""Layers of FermiNet and PsiFormer, written as these codes write them: one backward pass is exact.

The oracle runs every walker by itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from jaxkfac.interception import leaves_by_path
from tests._programs import normal

pytestmark = pytest.mark.usefixtures("x64")
WALKERS, ELECTRONS, UP, WIDTH, DETERMINANTS = 6, 4, 2, 6, 2
ATOMS = np.array([[0.0, 0.0, -1.0], [0.0, 0.0, 1.0]])


def linear(p, x):
    return x @ p["w"] + p["b"]


def distances(x):
    """Features of one and of two electrons, and their distances from the atoms and each other."""
    from_atoms, apart = x[:, None] - ATOMS[None], x[:, None] - x[None]
    r_atoms = jnp.linalg.norm(from_atoms, axis=-1, keepdims=True)
    # The norm has no derivative at zero, where an electron meets itself.
    r = jnp.linalg.norm(apart + jnp.eye(len(x))[..., None], axis=-1) * (1 - jnp.eye(len(x)))
    one = jnp.concatenate([from_atoms, r_atoms], -1).reshape(len(x), -1)
    return one, jnp.concatenate([apart, r[..., None]], -1), r_atoms[..., 0], r


def permutation_equivariant(one, two):
    """Each electron's features beside means over each spin, tiled for every electron."""
    means = [jnp.mean(h, 0, keepdims=True) for h in jnp.split(one, [UP])]
    tiled = [jnp.tile(mean, [len(one), 1]) for mean in means]
    return jnp.concatenate([one, *tiled, *[h.mean(0) for h in jnp.split(two, [UP])]], 1)


def orbitals(p, h, r_atoms):
    blocks = []
    for layer, envelope, h_spin, r in zip(
        p["orbital"], p["envelope"], jnp.split(h, [UP]), jnp.split(r_atoms, [UP]), strict=True
    ):
        decay = jnp.exp(-r[:, :, None] * envelope["sigma"]) * envelope["pi"]
        orbital = (linear(layer, h_spin) * decay.sum(1)).reshape(-1, DETERMINANTS, ELECTRONS)
        blocks.append(orbital.transpose(1, 0, 2))
    return jnp.concatenate(blocks, 1)


def log_of_determinants(p, matrices):
    signs, logs = jnp.linalg.slogdet(matrices)
    largest = lax.stop_gradient(logs.max())
    return jnp.log(jnp.abs(jnp.sum(signs * jnp.exp(logs - largest) * p["weights"]))) + largest


def ferminet(p, x):
    one, two, r_atoms, _ = distances(x)
    for of_one, of_two in zip(p["one"], p["two"], strict=True):
        new = jnp.tanh(linear(of_one, permutation_equivariant(one, two)))
        one = new if new.shape != one.shape else (one + new) / np.sqrt(2.0)
        new = jnp.tanh(linear(of_two, two))
        two = new if new.shape != two.shape else (two + new) / np.sqrt(2.0)
    return log_of_determinants(p, orbitals(p, permutation_equivariant(one, two), r_atoms))


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return p["scale"] * x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) + p["offset"]


def psiformer(p, x):
    one, _, r_atoms, r = distances(x)
    spins = np.repeat([[1.0], [-1.0]], [UP, ELECTRONS - UP], 0)
    h = jnp.concatenate([jnp.log1p(r_atoms), one, spins], 1) @ p["in"]
    for block in p["blocks"]:
        q, k, v = ((h @ block[name]).reshape(ELECTRONS, 2, -1) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[-1]), -1)
        attended = jnp.einsum("hij,jhd->ihd", weights, v).reshape(ELECTRONS, -1)
        h = layer_norm(block["first"], h + attended @ block["o"])
        h = layer_norm(block["second"], h + jnp.tanh(linear(block["mlp"], h)))
    pairs = r[np.triu_indices(ELECTRONS, 1)]
    jastrow = -jnp.sum(0.25 * p["alpha"] ** 2 / (p["alpha"] + pairs))
    return log_of_determinants(p, orbitals(p, h, r_atoms)) + jastrow


def draws(seed):
    """Parameters, one after the other."""
    while True:
        seed += 1
        yield lambda *shape, seed=seed: normal(seed, *shape)


def heads(draw, width):
    outputs = DETERMINANTS * ELECTRONS
    return {
        "orbital": [dense(draw, width, outputs) for _ in range(2)],
        "envelope": [
            {name: 1 + 0.1 * next(draw)(2, outputs) for name in ("sigma", "pi")} for _ in range(2)
        ],
        "weights": 1 + 0.1 * next(draw)(DETERMINANTS),
    }


def dense(draw, width, outputs):
    return {"w": next(draw)(width, outputs), "b": next(draw)(outputs)}


def ferminet_params():
    draw, width = draws(100), 3 * WIDTH + 2 * 4
    return {
        "one": [dense(draw, 3 * 8 + 2 * 4, WIDTH), dense(draw, width, WIDTH)],
        "two": [dense(draw, 4, 4), dense(draw, 4, 4)],
        **heads(draw, width),
    }


def psiformer_params():
    draw = draws(200)

    def norm():
        return {"scale": 1 + 0.1 * next(draw)(WIDTH), "offset": next(draw)(WIDTH)}

    block = {
        **{name: next(draw)(WIDTH, WIDTH) for name in "qkvo"},
        "first": norm(),
        "mlp": dense(draw, WIDTH, WIDTH),
        "second": norm(),
    }
    return {"in": next(draw)(11, WIDTH), "blocks": [block], "alpha": jnp.ones(1), **heads(draw, 6)}


NETWORKS = {
    "FermiNet": (ferminet, ferminet_params),
    "PsiFormer": (psiformer, psiformer_params),
}
BATCHES = {
    "vmap": lambda psi: jax.vmap(psi, (None, 0)),
    "map in chunks": lambda psi: lambda p, x: lax.map(lambda r: psi(p, r), x, batch_size=4),
    "map of chunks": lambda psi: (
        lambda p, x: lax.map(
            lambda rows: jax.vmap(psi, (None, 0))(p, rows), x.reshape(-1, 2, ELECTRONS, 3)
        ).reshape(len(x))
    ),
}


def local_energy(psi, p, x):
    """Without a potential: minus half the Laplacian, computed forward, and the squared slope."""

    def along(direction):
        slope = lambda x: jax.jvp(lambda x: psi(p, x), (x,), (direction,))[1]
        first, second = jax.jvp(slope, (x,), (direction,))
        return second + first**2

    directions = jnp.eye(x.size).reshape(-1, *x.shape)
    return -0.5 * jax.vmap(along)(directions).sum()


def energy_of(psi, in_batch):
    """FermiNet's loss; its rule marks the network."""

    @jax.custom_jvp
    def energy(p, walkers):
        energies = in_batch(lambda p, x: local_energy(psi, p, x))(p, walkers)
        return energies.mean(), energies

    @energy.defjvp
    def rule(primals, tangents):
        value, energies = energy(*primals)
        out, moved = jax.jvp(jax.vmap(psi, (None, 0)), primals, tangents)
        jk.mark_outputs(out, jk.Gaussian())
        dot = moved @ (energies - value) / len(out)
        return (value, value), (dot, jnp.zeros_like(value))

    return energy


def assert_factors_of_walkers(psi, params, walkers, factors, *, diagonals=True):
    """Kronecker factors are means over walkers run alone; a diagonal is of each one's gradient.

    Inside a loop over walkers a position's walker is not known, and diagonals are of positions.
    """
    objective = jk.Objective(lambda p, x: jax.vmap(psi, (None, 0))(p, x)[:, None], jk.Gaussian())
    stats = jax.jit(jk.value_grad_and_factors(objective, fisher="exact"))
    alone = [stats(params, (x[None], jnp.zeros((1, 1)))).factors for x in walkers]
    gradients = jax.vmap(jax.grad(psi), (None, 0))(params, walkers)
    squares = jax.tree.map(lambda g: np.mean(np.square(g), 0), gradients)
    by_path = leaves_by_path(squares)
    assert any(hasattr(factors[name], "diagonal") for name in factors)
    for name in factors:
        if hasattr(factors[name], "diagonal"):
            expected = [by_path[name]]
        else:
            sides = zip(*[one[name] for one in alone], strict=True)
            expected = [np.mean([np.asarray(x) for x in side], 0) for side in sides]
        if hasattr(factors[name], "diagonal") and not diagonals:
            continue
        for found, so in zip(factors[name], expected, strict=False):
            np.testing.assert_allclose(found, so, rtol=1e-8, atol=1e-11, err_msg=name)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_batch", BATCHES)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_exact_fisher_takes_one_backward_pass(network, in_batch, capsys):
    psi, init = NETWORKS[network]
    params, walkers = init(), normal(1, WALKERS, ELECTRONS, 3, scale=1.0)
    model = lambda p, x: BATCHES[in_batch](psi)(p, x)[:, None]
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Gaussian()), fisher="exact")
    factors = stats(params, (walkers, jnp.zeros((WALKERS, 1)))).factors
    assert not capsys.readouterr().err  # no pass for each example, which would be announced
    assert_factors_of_walkers(psi, params, walkers, factors, diagonals=in_batch == "vmap")
    assert not jk.find_layers(model, params, walkers).problems


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("network", NETWORKS)
def test_it_does_where_the_loss_is_an_energy_with_a_forward_laplacian(network, capsys):
    psi, init = NETWORKS[network]
    params, walkers = init(), normal(1, WALKERS, ELECTRONS, 3, scale=1.0)
    energy = energy_of(psi, BATCHES["map in chunks"])
    stats = jk.value_grad_and_factors(energy, fisher="exact", has_aux=True)
    (value, aux), grads, factors = jax.jit(stats)(params, walkers)
    assert not capsys.readouterr().err
    of_jax = jax.jit(jax.value_and_grad(energy, has_aux=True))(params, walkers)
    np.testing.assert_allclose((value, aux), of_jax[0], rtol=1e-10)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-9), grads,
                 of_jax[1])  # fmt: skip
    assert_factors_of_walkers(psi, params, walkers, factors)
