"""Losses of a network's derivatives: constant tangents, and kernels read in both orientations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import assert_block_close, assert_tree_close
from tests._derivatives import (
    FORMS,
    HIDDEN,
    D,
    along,
    blocks_of,
    direction,
    net,
    net_params,
    points,
)
from tests._oracle import Block
from tests._programs import normal, tree

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


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_factors_of_a_derivative_are_those_of_brute_force(form):
    check(residual(form))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fisher", ["empirical", "mc", "forward"])
def test_every_fisher_type_of_a_second_derivative(fisher):
    check(residual("forward over reverse"), fisher)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wall", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("form", ["hessian", "forward over forward"])
def test_a_network_inside_jit_or_remat(form, wall):
    walled = loss_of(residual(form, wall))
    check(residual(form), loss=walled)


LENGTH = 3


def scanned(p, x, wall=lambda f: f):
    """The network with a scan over its layers."""
    h = jnp.tanh(x @ p["w1"] + p["b1"])
    step = wall(lambda h, w: (jnp.tanh(h @ w[0] + w[1]), None))
    h = lax.scan(step, h, (p["m"], p["c"]))[0]
    return (h @ p["w3"] + p["b3"])[0]


def written_out(p, x, wall=lambda f: f):
    h = jnp.tanh(x @ p["w1"] + p["b1"])
    for i in range(LENGTH):
        h = wall(lambda h, w, b: jnp.tanh(h @ w + b))(h, p[f"m{i}"], p[f"c{i}"])
    return (h @ p["w3"] + p["b3"])[0]


def layers_apart(p):
    """The stacks as a parameter for each layer."""
    rest = {name: value for name, value in p.items() if name not in "mc"}
    return rest | {f"{name}{i}": p[name][i] for name in "mc" for i in range(LENGTH)}


def assert_stacked(factors, blocks):
    for layer in factors.layers:
        if layer.is_elementwise:
            continue
        names = [layer.name.replace("m", f"m{i}", 1) for i in range(LENGTH)]
        each = [blocks[n] for n in names] if layer.stack else [blocks[layer.name]]
        sides = zip(*[(block.a, block.g) for block in each], strict=True)
        a, g = (np.stack(side) if layer.stack else side[0] for side in sides)
        assert_block_close(factors[layer.name], Block("dense", a, g, None), 1e-10, layer.name)


def scanned_params():
    sizes = {"w1": (D, HIDDEN), "b1": (HIDDEN,), "w3": (HIDDEN, 1), "b3": (1,)}
    return tree(3, **sizes, m=(LENGTH, HIDDEN, HIDDEN), c=(LENGTH, HIDDEN))


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_a_network_that_scans_over_its_layers(form):
    """In reverse the last kernel times the cotangent 1 is the carry with which the scan begins."""
    params, (x, z) = scanned_params(), points()
    loss = loss_of(lambda p, x: FORMS[form](lambda x: scanned(p, x), x) - 1.0, scanned)
    value, grads, factors = jax.jit(jk.value_grad_and_factors(loss, fisher="exact"))(params, (x, z))
    assert_tree_close((value, grads), jax.value_and_grad(loss)(params, (x, z)), 1e-9)
    joined = {layer.name: layer.bias is not None for layer in factors.layers}
    joined |= {f"m{i}": joined["m"] for i in range(LENGTH)}
    inside = lambda p, x: FORMS[form](lambda x: written_out(p, x), x) - 1.0
    one = lambda xs: np.ones((1, len(xs), 1))
    parts = [(inside, x, 2.0, one(x)), (written_out, z, 20.0, one(z))]
    assert_stacked(factors, blocks_of(parts, layers_apart(params), joined))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("network", ["scanned", "written_out"])
@pytest.mark.parametrize("form", ["reverse over reverse", "hessian"])
def test_layers_that_a_derivative_recomputes_are_refused(form, network):
    """As it is and recomputed, a row would count twice: A by 12 % and G by 1 % were other ones."""
    params, of = scanned_params(), scanned
    if network == "written_out":
        params, of = layers_apart(params), written_out
    walled = functools.partial(of, wall=jax.checkpoint)
    loss = loss_of(lambda p, x: FORMS[form](lambda x: walled(p, x), x) - 1.0, walled)
    twice = {"m", "c"} if network == "scanned" else {"m0", "m1", "c0", "c1"}
    table = jk.find_layers(loss, params, points())
    assert {path for path, _ in table.problems} >= twice
    with pytest.raises(jk.UncoveredParameterError, match="put `jax.checkpoint` around the deriv"):
        jk.value_grad_and_factors(loss)(params, points())


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["reverse over reverse", "hessian"])
def test_a_checkpoint_around_the_derivative_changes_nothing(form):
    params, batch = scanned_params(), points()

    def factors_of(wall):
        inside = wall(lambda p, x: FORMS[form](lambda x: scanned(p, x), x) - 1.0)
        return jk.value_grad_and_factors(loss_of(inside, scanned), fisher="exact")(params, batch)

    assert_tree_close(factors_of(jax.checkpoint), factors_of(lambda f: f), 1e-10)


def test_a_constant_row_inside_of_a_loop_is_one_of_each_example():
    """Its product is made in the body, for all examples at once."""
    params = tree(0, w=(4, 4), u=(3, 4))

    def model(p, x, rows):
        step = jax.checkpoint(lambda h, _: (jnp.tanh(h @ p["w"] + rows @ p["u"]), None))
        return lax.scan(step, x, length=2)[0]

    x, y, ones = normal(1, 5, 4), normal(2, 5, 4), normal(3, 3)
    once = jk.Objective(lambda p, x: model(p, x, ones), jk.Gaussian())
    each = jk.Objective(
        lambda p, x: model(p, x, jnp.broadcast_to(ones, (5, 3)) + 0 * x[:, :1]), jk.Gaussian()
    )
    found, expected = (jk.value_grad_and_factors(o)(params, (x, y)).factors for o in (once, each))
    for name in ("w", "u"):
        np.testing.assert_allclose(found[name].a, expected[name].a, rtol=1e-10)
        np.testing.assert_allclose(found[name].g, expected[name].g, rtol=1e-10)


def random_features(p, x):
    """Linear in its kernel."""
    return (jnp.tanh(x @ normal(8, 2, 6)) @ p["w"])[0]


ALONG_ONE = {
    "grad": lambda f, x: jax.grad(f)(x)[0],
    "hessian": lambda f, x: jax.hessian(f)(x)[0, 0],
    "forward": lambda f, x: along(f, direction(0))(x),
    "forward over forward": lambda f, x: along(along(f, direction(0)), direction(0))(x),
    "forward over reverse": lambda f, x: along(jax.grad(f), direction(0))(x)[0],
    "reverse over forward": lambda f, x: jax.grad(along(f, direction(0)))(x)[0],
    "reverse over reverse": lambda f, x: jax.grad(lambda x: jax.grad(f)(x)[0])(x)[0],
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ALONG_ONE)
def test_a_linear_model_has_its_gauss_newton_matrix(form):
    """Whichever way it is differentiated, and so in whichever orientation its kernel is read."""
    params, (x, _) = {"w": normal(7, 6, 1)}, points()

    def loss(p, x):
        values = jax.vmap(lambda x: ALONG_ONE[form](lambda x: random_features(p, x), x))(x)
        return 0.5 * jnp.square(jk.mark_outputs(values, jk.Gaussian()) - 1.0).mean()

    hessian = jax.hessian(lambda w: loss({"w": w[:, None]}, x))(params["w"][:, 0])
    factors = jax.jit(jk.value_grad_and_factors(loss, fisher="exact"))(params, x).factors
    (name,) = factors
    np.testing.assert_allclose(np.kron(*factors[name]), hessian, rtol=1e-10, atol=1e-13)
    found = jk.operators.ggn(loss, params, x).to_dense()
    np.testing.assert_allclose(found, hessian, rtol=1e-10, atol=1e-13)


@pytest.mark.exhaustive  # see tests/tied_weights_test.py
def test_both_orientations_of_a_kernel_make_one_block():
    """Of one output each G is a number, so that the block is the sum of both."""
    factors = check(residual("grad"))
    bases = jk.eigendecompose(factors, max_condition=np.inf)
    (a, g), (turned_a, turned_g) = factors["w3"], factors["w3@transposed"]
    expected = np.kron(a, g) + np.kron(np.pad(turned_g, (0, 1)), turned_a)
    block = jk.reconstruct(bases)["w3"]
    np.testing.assert_allclose(np.kron(*block), expected, rtol=1e-9, atol=1e-12)
    with jk.HostCurvature(max_condition=np.inf) as service:
        service.push(factors, 0)
        held = jk.reconstruct(service.bases(5))["w3"]
    np.testing.assert_allclose(np.kron(*held), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.exhaustive  # see tests/tied_weights_test.py
def test_measured_eigenvalues_are_of_the_sum_of_both_orientations():
    params, (x, _) = net_params(), points()

    def loss(p, x):
        r = jax.vmap(residual("forward over reverse"), (None, 0))(p, x)
        return jnp.square(jk.mark_outputs(r, jk.Gaussian(), weight=2.0)).mean()

    factors = jk.value_grad_and_factors(loss, fisher="exact")(params, x).factors
    bases = jk.eigendecompose(factors)
    values = jk.correct_eigenvalues(loss, bases, fisher="exact")(params, x)["w2"].raw_values
    fisher = jk.operators.fisher(loss, params, x, fisher="exact").to_dense()
    kernel = jax.tree.map(jnp.zeros_like, params) | {"w2": jnp.ones_like(params["w2"])}
    own = np.flatnonzero(jax.flatten_util.ravel_pytree(kernel)[0])
    np.testing.assert_allclose(values.sum(), np.trace(fisher[np.ix_(own, own)]), rtol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "damping_mode", [pytest.param("exact", marks=pytest.mark.exhaustive), "pi"]
)
def test_both_readings_of_a_kernel_are_refreshed_together(x64, damping_mode):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"w1": (3, 8), "w2": (8, 6), "w3": (6, 1)}
    params = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=False)}

    def scalar(p, x):
        return (jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"]) @ p["w3"])[0]

    slope = jk.Objective(lambda p, x: jax.vmap(jax.grad(scalar, 1), (None, 0))(p, x), jk.Gaussian())
    batch = jax.random.normal(keys[3], (16, 3)), jax.random.normal(keys[4], (16, 3))
    _, grads, factors = jk.value_grad_and_factors(slope)(params, batch)
    both = []
    for stagger in (False, True):
        tx = jk.kfac(0.1, like=factors, damping=1e-2, damping_mode=damping_mode, refresh_every=4,
                     stagger=stagger)  # fmt: skip
        both.append(tx.update(grads, tx.init(params), params, factors=factors)[0])
    for whole, staggered in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(staggered, whole, rtol=1e-10, atol=1e-14)


@pytest.mark.exhaustive
def test_coordinates_may_be_stacked(x64):
    """Reverse mode ends in an ``unstack``, whose parts keep the points."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w1": jax.random.normal(keys[0], (2, 4)), "w2": jax.random.normal(keys[1], (4, 1))}
    points = tuple(jax.random.normal(key, (5,)) for key in keys[2:])

    def factors(together):
        def scalar(p, t, x):
            return (jnp.tanh(together([t, x]) @ p["w1"]) @ p["w2"])[0]

        def loss(p, batch):
            slope = jax.vmap(jax.grad(scalar, 1), (None, 0, 0))(p, *batch)
            return jnp.square(jk.mark_outputs(slope, jk.Gaussian(), weight=2.0)).mean()

        return jk.value_grad_and_factors(loss, fisher="exact")(params, points).factors

    stacked, array = factors(jnp.stack), factors(jnp.array)
    assert list(stacked) == list(array)
    for found, expected in zip(jax.tree.leaves(stacked), jax.tree.leaves(array), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
