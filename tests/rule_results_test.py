"""Rules whose results differ from their function's: what ``jax.value_and_grad`` gives, we give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jaxkfac as jk
from tests._programs import normal, tree

pytestmark = pytest.mark.usefixtures("x64")
N = 6


def log_psi(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def energies(p, x):
    return (x**2).sum(1) + (jnp.tanh(x @ p["w"]) ** 2).sum(1)


def problem():
    return tree(1, w=(3, 4), v=(4,)), normal(2, N, 3, scale=1.0)


def tangents_like(results, moved):
    """Tangents of a rule's results: ``moved`` for the first one, and zeros."""
    leaves, form = jax.tree.flatten(results)
    types = [jnp.asarray(x) for x in leaves]
    dots = [
        np.zeros(x.shape, jax.dtypes.float0)
        if not jnp.issubdtype(x.dtype, jnp.inexact)
        else jnp.broadcast_to(moved if k == 0 else 0.0, x.shape).astype(x.dtype)
        for k, x in enumerate(types)
    ]
    return jax.tree.unflatten(form, dots)


def by_jvp(of_function, of_rule, **options):
    """FermiNet's loss: the mean energy, and in its rule a covariance with the marked network."""

    def function(p, x, *_):
        e = energies(p, x)
        return of_function(e.mean(), e)

    def rule(*operands):
        (p, x), tangents = operands[-2:]
        if options.get("symbolic_zeros"):  # only a derivative in the parameters is known
            assert isinstance(tangents[1], SymbolicZero)
            tangents = tangents[0], jnp.zeros_like(x)
        e = energies(p, x)
        psi, moved = jax.jvp(log_psi, (p, x), tangents)
        jk.mark_outputs(psi, jk.Gaussian())
        results = of_rule(e.mean(), e)
        return results, tangents_like(results, moved @ (e - e.mean()) / len(e))

    static = options.pop("nondiff_argnums", ())
    call = jax.custom_jvp(function, nondiff_argnums=static)
    call.defjvp(rule, **options)
    return (lambda p, x: call(p, x, "static")) if static else call


def by_vjp(of_function, of_rule):
    def forward(p, x):
        e = energies(p, x)
        return of_rule(e.mean(), e), (jax.vjp(log_psi, p, x)[1], e)

    def backward(saved, cotangents):
        vjp, e = saved
        first = jax.tree.leaves(cotangents)[0].real.astype(e.dtype)
        return vjp(first * (e - e.mean()) / len(e))

    def function(p, x):
        e = energies(p, x)
        return of_function(e.mean(), e)

    call = jax.custom_vjp(function)
    call.defvjp(forward, backward)
    return call


SAME = lambda v, e: (v, e)
# What the function returns, and what its rule does.
RESULTS = {
    "same": (SAME, SAME),
    "auxiliary of another shape": (SAME, lambda v, e: (v, v)),
    "auxiliary (1,)": (lambda v, e: (v, v[None]), lambda v, e: (v, v)),
    "auxiliary of another dtype": (SAME, lambda v, e: (v, e.astype(jnp.float32))),
    "auxiliary of another structure": (SAME, lambda v, e: (v, {"e": e, "v": v})),
    "auxiliary where none was": (lambda v, e: (v, None), SAME),
    "integers": (lambda v, e: (v, jnp.arange(3, dtype=jnp.int32)),
                 lambda v, e: (v, jnp.arange(2, dtype=jnp.int32))),
    "integers for floats": (SAME, lambda v, e: (v, e > 0)),
    "floats for integers": (lambda v, e: (v, e > 0), SAME),
    "weak function": (lambda v, e: (v, 2.0), lambda v, e: (v, jnp.asarray(2.0, jnp.float64))),
    "weak rule": (lambda v, e: (v, jnp.asarray(2.0, jnp.float64)), lambda v, e: (v, 2.0)),
    "float32 value": (SAME, lambda v, e: (v.astype(jnp.float32), e)),
    "float64 value": (lambda v, e: (v.astype(jnp.float32), e), SAME),
    "scalar for (1,)": (lambda v, e: (v[None], e), SAME),
    "scalar for a vector": (lambda v, e: (e, e), SAME),
    "real for complex": (lambda v, e: (v + 0j, e + 0j), SAME),
    "real auxiliary for complex": (lambda v, e: (v, e + 1j), lambda v, e: (v, (e + 1j).real)),
    "complex auxiliary for real": (SAME, lambda v, e: (v, e + 1j)),
}  # fmt: skip
OPTIONS = {
    "": {},
    "symbolic": {"symbolic_zeros": True},
    "nondiff": {"nondiff_argnums": (2,)},
}


def in_a_loss(energy):
    def loss(p, x):
        value, aux = energy(p, x)
        return value + 0.1 * (p["w"] ** 2).sum(), aux

    return loss


WALLS = {
    "bare": lambda f: f,
    "vmap": lambda f: (
        lambda p, x: jax.tree.map(lambda leaf: leaf[0], jax.vmap(f, (None, 0))(p, x[None]))
    ),
    "in a loss": in_a_loss,
}
REFUSED = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: (
        lambda p, x: jax.tree.map(
            lambda leaf: leaf[0], lax.scan(lambda c, _: (c, f(p, x)), None, None, length=1)[1]
        )
    ),
}


def assert_equal_results(found, expected):
    """Structure, shapes, dtypes, weak types and values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(x) == jax.typeof(y) and jax.typeof(x).weak_type == jax.typeof(y).weak_type
        np.testing.assert_allclose(x, y, rtol=1e-12 if x.dtype != jnp.float32 else 1e-6)


def network_factors(p, x):
    objective = jk.Objective(lambda p, x: log_psi(p, x)[:, None], jk.Gaussian())
    return jk.value_grad_and_factors(objective, fisher="exact")(p, (x, jnp.zeros((len(x), 1))))[2]


def check(loss, options):
    params, x = problem()
    expected = jax.value_and_grad(loss, has_aux=True)(params, x)
    value, grads, factors = jk.value_grad_and_factors(loss, has_aux=True, **options)(params, x)
    assert_equal_results((value, grads), expected)
    return factors


@pytest.mark.default(2, slow=16)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("wall", WALLS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("results", RESULTS)
def test_a_custom_jvp_has_the_results_and_the_gradient_of_its_rule(results, options, wall):
    loss = WALLS[wall](by_jvp(*RESULTS[results], **OPTIONS[options]))
    factors = check(loss, {"fisher": "exact"} | ({"layers": "v"} if wall == "vmap" else {}))
    if wall == "vmap":  # a walker of the mapped axis is one term of N outputs
        return
    expected = network_factors(*problem())
    for name in expected:
        for found, so in zip(factors[name], expected[name], strict=True):
            np.testing.assert_allclose(found, so, rtol=1e-10, atol=1e-13)


@pytest.mark.default(1, slow=8)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("wall", WALLS)
@pytest.mark.parametrize("results", RESULTS)
def test_a_custom_vjp_has_the_results_and_the_gradient_of_its_rule(results, wall):
    loss = WALLS[wall](by_vjp(*RESULTS[results]))
    check(loss, {"loss_terms": N})


@pytest.mark.default(1, slow=6)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("wall", REFUSED)
@pytest.mark.parametrize("form", [by_jvp, by_vjp])
@pytest.mark.parametrize("results", ["auxiliary of another shape", "real for complex"])
def test_where_jax_raises_its_message_comes_whole(results, form, wall):
    params, x = problem()
    loss = REFUSED[wall](form(*RESULTS[results]))
    with pytest.raises(TypeError) as of_jax:
        jax.value_and_grad(loss, has_aux=True)(params, x)
    options = {"fisher": "exact"} if form is by_jvp and wall != "scan" else {"loss_terms": N}
    with pytest.raises((jk.UncoveredParameterError, TypeError)) as ours:
        jk.value_grad_and_factors(loss, has_aux=True, **options)(params, x)
    assert " ".join(str(of_jax.value).split()) in " ".join(str(ours.value).split())


@jax.custom_jvp
def column(p, x):
    """``(N, 1)``, and ``(N,)`` by its rule."""
    return log_psi(p, x)[:, None]


@column.defjvp
def _column_rule(primals, tangents):
    return jax.jvp(log_psi, primals, tangents)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_in_the_model_of_an_objective(fisher):
    params, x = problem()
    objective = jk.Objective(lambda p, x: column(p, x).reshape(-1, 1), jk.Gaussian())
    batch = (x, jnp.ones((N, 1)))
    value, grads, factors = jk.value_grad_and_factors(objective, fisher=fisher)(params, batch)
    assert_equal_results((value, grads), jax.value_and_grad(objective)(params, batch))
    if fisher == "exact":
        expected = network_factors(params, x)
        np.testing.assert_allclose(factors["w"].g, expected["w"].g, rtol=1e-10, atol=1e-13)


@pytest.mark.slow
def test_a_rule_that_differentiates_another_such_function():
    @jax.custom_jvp
    def energy(p, x):
        return column(p, x).mean(), column(p, x)

    @energy.defjvp
    def rule(primals, tangents):
        psi, moved = jax.jvp(column, primals, tangents)
        psi, e = jk.mark_outputs(psi, jk.Gaussian()), energies(*primals)
        value = e.mean(), psi
        return value, tangents_like(value, moved @ (e - e.mean()) / len(e))

    factors = check(energy, {"fisher": "exact"})
    expected = network_factors(*problem())
    np.testing.assert_allclose(factors["w"].g, expected["w"].g, rtol=1e-10, atol=1e-13)


@jax.custom_jvp
def of_data(x):
    return x.sum(1)


@of_data.defjvp
def _data_rule(primals, tangents):
    return jnp.zeros(2), jnp.zeros(2)


@pytest.mark.parametrize("read", [lambda p, x: x, lambda p, x: lax.stop_gradient(x @ p["w"])])
def test_a_rule_that_no_derivative_runs_changes_nothing(read):
    def loss(p, x):
        psi = jk.mark_outputs(log_psi(p, x), jk.Gaussian())
        return 0.5 * jnp.square(psi - of_data(read(p, x))).mean(), psi

    factors = check(loss, {"fisher": "exact"})
    np.testing.assert_allclose(factors["w"].a, network_factors(*problem())["w"].a, rtol=1e-10)


def complex_psi(p, x):
    return lax.complex(log_psi(p, x), (x @ p["w"])[:, 0])


FORMS = {"custom_jvp": jax.custom_jvp(complex_psi), "custom_vjp": jax.custom_vjp(complex_psi)}
FORMS["custom_jvp"].defjvp(lambda primals, tangents: jax.jvp(complex_psi, primals, tangents))
FORMS["custom_vjp"].defvjp(
    lambda p, x: (complex_psi(p, x), (p, x)), lambda saved, g: jax.vjp(complex_psi, *saved)[1](g)
)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_layers_behind_complex_results_of_a_rule_have_their_cotangents(form):
    """They had none, and G was zero."""
    params, x = problem()

    def loss_of(psi):
        def loss(p, x):
            z = psi(p, x)
            out = jk.mark_outputs(z.real * z.imag, jk.Gaussian())
            return 0.5 * jnp.square(out - x[:, 0]).mean(), out

        return loss

    factors = check(loss_of(FORMS[form]), {"fisher": "exact"})
    plain = jk.value_grad_and_factors(loss_of(complex_psi), fisher="exact", has_aux=True)
    for name, expected in plain(params, x).factors.items():
        for found, so in zip(factors[name], expected, strict=True):
            np.testing.assert_allclose(found, so, rtol=1e-10, atol=1e-13)
            assert np.abs(so).max() > 0
