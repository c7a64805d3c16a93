"""A layer named by ``jk.layer`` and a kind from outside that reads its calls: a Fourier layer."""

import functools
import re
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from jaxkfac.interception import _kind, register_kind
from jaxkfac.kinds import NamedLayer
from tests._checks import assert_tree_close
from tests._programs import normal

pytestmark = pytest.mark.usefixtures("x64")


def products(re, im, x):
    """Weights ``(modes, in, out)``, and functions ``(..., places, in)`` on a line."""
    spectrum = jnp.fft.rfft(x, axis=-2)[..., : len(re), :]
    return jnp.einsum("...ki,kio->...ko", spectrum, jax.lax.complex(re, im))


def fourier(re, im, x):
    return jnp.fft.irfft(products(re, im, x), x.shape[-2], axis=-2)


layer = jk.layer("fourier", fourier)


class Fourier(NamedLayer):
    """A product for each frequency; the real and imaginary parts of a spectrum are two rows."""

    name = "fourier"
    primitives = frozenset(("layer:fourier",))
    suffix = "fourier"
    matrices: ClassVar = {0: "sio", 1: "sio"}
    data, data_ndim = 2, 2

    def input_rows_at(self, parameter, operands):
        re, _, x = operands
        spectrum = jnp.fft.rfft(x, axis=0)[: len(re)] * (1j if parameter else 1)
        return jnp.stack([spectrum.real, spectrum.imag])

    def output_rows_at(self, parameter, operands, cotangent):
        back = lambda spectrum: jnp.fft.irfft(spectrum, len(cotangent), axis=0)
        (g,) = jax.vjp(back, products(*operands))[1](cotangent)
        return jnp.stack([g.real, -g.imag])


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(_kind, "_KINDS", dict(_kind._KINDS))
    register_kind(Fourier)


def model(p, x, layer=layer):
    h = jnp.tanh(x @ p["lift"])
    h = jnp.tanh(layer(p["re"], p["im"], h) + h @ p["w"])
    return (h @ p["out"]).mean(-2)


def parameters():
    shapes = {"lift": (2, 3), "re": (3, 3, 3), "im": (3, 3, 3), "w": (3, 3), "out": (3, 2)}
    return {name: normal(k, *shape) for k, (name, shape) in enumerate(shapes.items())}


def batch():
    return normal(5, 4, 8, 2), normal(6, 4, 2)


def found(fn, params, x):
    return {m.name: (m.kind, m.stack) for m in jk.find_layers(fn, params, x).layers}


def statistics(fn, params=None, **options):
    objective = jk.Objective(fn, jk.Gaussian())
    params = parameters() if params is None else params
    return jax.jit(jk.value_grad_and_factors(objective, **options))(params, batch())


# ------------------------------------------------------------ found


def test_vmap_of_data_and_of_parameters_keeps_the_axes_apart():
    params, (x, _) = parameters(), batch()
    assert found(model, params, x)["im"] == ("fourier", (3,))
    along_second = lambda p, x: jax.vmap(model, (None, 1))(p, jnp.moveaxis(x, 0, 1))
    assert found(along_second, params, x)["im"] == ("fourier", (3,))
    several = jax.tree.map(lambda w: jnp.stack([w, w]), params)
    ensemble = lambda p, x: jax.vmap(model, (0, None), 1)(p, x)
    assert found(ensemble, several, x)["im"] == ("fourier", (2, 3))


def test_without_parameters_or_data_a_call_is_an_ordinary_one():
    w = normal(0, 3, 3, 3)
    assert found(lambda p, x: layer(w, w, x @ p), normal(1, 2, 3), batch()[0]) == {
        "": ("dense", ())
    }


def test_a_name_that_no_kind_reads_is_an_error():
    other = jk.layer("wavelet", fourier)
    with pytest.raises(jk.UnknownLayerError, match=r"`layer:wavelet`.*`layer:fourier` \(by 'four"):
        jk.find_layers(functools.partial(model, layer=other), parameters(), batch()[0])


def test_a_parameter_that_is_closed_over_is_named():
    def closing(p, x):
        mine = jk.layer("fourier", lambda re, im, x: fourier(re, p["im"], x))
        return mine(p["re"], p["re"], x @ p["lift"])

    table = jk.find_layers(closing, parameters(), batch()[0])
    assert "is closed over by the function of `layer:fourier`" in dict(table.uncovered)["im"]
    assert table["re"].kind == "fourier"


class Wrong(Fourier):
    name = "wrong"
    primitives = frozenset(("layer:wrong",))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"matrices": {0: "io", 1: "sio"}}, r"has shape \(3, 3, 3\), whose axes are to be .*'io'"),
        ({"matrices": {0: "sio"}}, "is argument 1 of `layer:wrong`, whose kind reads arguments 0"),
        ({"data": 1}, r"meets data in \[2\] of `layer:wrong`, whose kind expects it in 1"),
        ({"data_ndim": 4}, "meets data with fewer axes than one point has"),
        (
            {"output_rows_at": lambda self, k, operands, g: jnp.fft.rfft(g, axis=0)[None, :3]},
            "output_rows_at of complex128, expected real rows",
        ),
        (
            {"input_rows_at": lambda self, k, operands: operands[2][None]},
            r"input_rows_at of shape \(1, 8, 3\), expected \(rows..., \[3, 3\]\)",
        ),
        (
            {"input_rows_at": lambda self, k, operands: operands[2][None, :3]},
            "different rows at both sides",
        ),
    ],
)
def test_what_does_not_fit_is_said(monkeypatch, changes, reason):
    for name, value in changes.items():
        monkeypatch.setattr(Wrong, name, value)
    register_kind(Wrong)
    table = jk.find_layers(
        functools.partial(model, layer=jk.layer("wrong", fourier)), parameters(), batch()[0]
    )
    assert any(re.search(reason, why) for _, why in table.uncovered), table.uncovered


def test_only_a_function_of_one_array_is_a_layer():
    with pytest.raises(ValueError, match="name=''"):
        jk.layer("", fourier)
    with pytest.raises(TypeError, match="expected one array"):
        jk.layer("two", lambda x: (x, x))(jnp.ones(3))
    with pytest.raises(ValueError, match="side effects"):
        jk.layer("loud", lambda x: jax.debug.print("{}", x) or x)(jnp.ones(3))


# ------------------------------------------------------------ the same function


@pytest.mark.slow
def test_value_and_derivatives_are_those_of_the_function():
    params, (x, _) = parameters(), batch()
    of = lambda layer: lambda p: model(p, x, layer).sum()
    for transform in (
        lambda fn: jax.value_and_grad(fn)(params),
        lambda fn: jax.jvp(jax.grad(fn), (params,), (params,)),
        lambda fn: jax.vmap(fn)(jax.tree.map(lambda w: jnp.stack([w, -w], 0), params)),
        lambda fn: jax.grad(jax.checkpoint(fn))(params),
    ):
        assert_tree_close(transform(of(layer)), transform(of(fourier)), 1e-12)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        p = {name: self.param(name, lambda _, w=w: w) for name, w in parameters().items()}
        return model(p, x)


class OfNnx(nnx.Module):
    def __init__(self):
        for name, w in parameters().items():
            setattr(self, name, nnx.Param(w))

    def __call__(self, x):
        return model({name: getattr(self, name)[...] for name in parameters()}, x)


PROGRAMS = {
    "jit": jax.jit(model),
    "checkpoint": jax.checkpoint(model),
    "vmap": lambda p, x: jax.vmap(model, (None, 1), 1)(p, jnp.moveaxis(x, 0, 1)).T,
    "linen": lambda p, x: Linen().apply({"params": p}, x),
    "nnx": jk.from_nnx(OfNnx())[0],
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_statistics_are_equal_in_every_program(program):
    expected, found = statistics(model), statistics(PROGRAMS[program])
    assert_tree_close(found.grads, expected.grads, 1e-12)
    for name in parameters():
        assert_tree_close(found.factors[name].a, expected.factors[name].a, 1e-12)
        assert_tree_close(found.factors[name].g, expected.factors[name].g, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"fisher": "exact"}])
def test_a_scan_over_layers_stacks_their_factors(options):
    one, p = parameters(), parameters()
    stack = {name: jnp.stack([one[name], -0.5 * one[name]]) for name in ("re", "im", "w")}
    ends = {"lift": p["lift"], "out": p["out"]}

    def step(h, p):
        return jnp.tanh(layer(p["re"], p["im"], h) + h @ p["w"]), None

    def scanned(p, x):
        h, _ = jax.lax.scan(jax.checkpoint(step), jnp.tanh(x @ p["lift"]), p["stack"])
        return (h @ p["out"]).mean(-2)

    def unrolled(p, x):
        h = jnp.tanh(x @ p["lift"])
        for k in range(2):
            h, _ = step(h, p[f"layer{k}"])
        return (h @ p["out"]).mean(-2)

    apart = {f"layer{k}": {name: w[k] for name, w in stack.items()} for k in range(2)}
    together = statistics(scanned, {**ends, "stack": stack}, **options).factors
    by_layer = statistics(unrolled, {**ends, **apart}, **options).factors
    for name in stack:
        for side in ("a", "g"):
            every = [getattr(by_layer[f"layer{k}/{name}"], side) for k in range(2)]
            assert_tree_close(getattr(together[f"stack/{name}"], side), jnp.stack(every), 1e-10)


# ------------------------------------------------------------ the factors


@pytest.mark.slow
def test_factors_of_a_linear_network_are_its_dense_fisher():
    """Exact where sine and cosine of a frequency are orthogonal: behind the constant."""
    params = {name: w for name, w in parameters().items() if name in ("re", "im")}
    linear = lambda p, x: layer(p["re"], p["im"], x)
    x = normal(7, 5, 8, 3)
    objective = jk.Objective(linear, jk.Gaussian())
    factors = jk.value_grad_and_factors(objective, fisher="exact")(params, (x, 0 * x)).factors
    flat, unravel = ravel_pytree(params)
    jacobian = jax.jacrev(lambda flat: fourier(unravel(flat)["re"], unravel(flat)["im"], x))(flat)
    rows = jax.vmap(unravel)(jacobian.reshape(-1, flat.size))
    terms = 5 * 8
    for name in params:
        for mode in (1, 2):
            of_mode = rows[name][:, mode].reshape(len(jacobian.reshape(-1, flat.size)), -1)
            dense = of_mode.T @ of_mode / terms
            kronecker = jnp.kron(factors[name].a[mode], factors[name].g[mode])
            np.testing.assert_allclose(kronecker, dense, rtol=1e-10, atol=1e-12)


def gradients_of_examples(objective, params, batch):
    terms = lambda p, one: objective(p, jax.tree.map(lambda v: v[None], one))
    grads = jax.jit(jax.vmap(jax.grad(terms), (None, 0)))(params, batch)
    return jax.vmap(lambda one: ravel_pytree(one)[0])(grads)


@pytest.mark.slow
def test_rows_multiply_to_the_gradient_of_each_example():
    objective = jk.Objective(model, jk.Gaussian())
    params, data = parameters(), batch()
    grads = gradients_of_examples(objective, params, data)
    found = jk.gram(objective, params, data, rows="losses")
    np.testing.assert_allclose(np.asarray(found), grads @ grads.T, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_influence_is_that_of_whole_gradients():
    objective = jk.Objective(model, jk.Gaussian())
    params, data = parameters(), batch()
    bases = jk.eigendecompose(statistics(model).factors)
    grads, unravel = gradients_of_examples(objective, params, data), ravel_pytree(params)[1]

    def solved(gradient, bases):
        solution = jk.natural_gradient(unravel(gradient), bases, damping=0.1)
        return ravel_pytree(solution)[0]

    for used in (bases, jk.correct_eigenvalues(objective, bases)(params, data)):
        scores = jk.influence(objective, params, used, data, data, damping=0.1)
        expected = jax.jit(jax.vmap(solved, (0, None)))(grads, used) @ grads.T
        np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_an_optimizer_trains_it_and_its_update_is_the_natural_gradient():
    objective = jk.Objective(model, jk.Gaussian())
    params, data = parameters(), batch()
    stats = jk.value_grad_and_factors(objective)
    tx = jk.kfac(1.0, like=stats.factor_shapes(params, data), damping=0.1,
                 momentum=0.0, norm_constraint=None)  # fmt: skip
    _, grads, factors = stats(params, data)
    updates, _ = tx.update(grads, tx.init(params), params, factors=factors)
    expected = jk.natural_gradient(grads, jk.eigendecompose(factors), damping=0.1)
    assert_tree_close(updates, jax.tree.map(jnp.negative, expected), 1e-8)

    opt = jk.Optimizer(objective)
    state, step, losses = opt.init(params, data), jax.jit(opt.step), []
    for key in jax.random.split(jax.random.key(0), 30):
        params, state, loss = step(params, state, data, key)
        losses.append(float(loss))
    jk.check_state(state)
    assert losses[-1] < 0.01 * losses[0]
    assert optax.tree.norm(params["im"]) > 0
