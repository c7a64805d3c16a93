import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxkfac._errors import UnknownLayerError
from jaxkfac.curvature.operators import fisher, ggn, hessian
from jaxkfac.curvature.operators._exact_test import assert_close
from jaxkfac.curvature.operators._small_nets_test import attention_problem, mlp_problem
from jaxkfac.factors import Categorical, Gaussian, Objective

pytestmark = pytest.mark.exhaustive  # minutes for the file; make test-exhaustive

OPERATORS = {
    "ggn": ggn,
    "hessian": hessian,
    "empirical": lambda *a, **k: fisher(*a, fisher="empirical", **k),
    "mc": lambda *a, **k: fisher(*a, fisher="mc", key=jax.random.key(2), samples=2, **k),
}


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("kind", OPERATORS)
def test_chunks_change_nothing(x64, kind, chunk):
    problem = attention_problem()  # 4 examples of 3, 0, 2 and 3 kept terms
    whole = OPERATORS[kind](*problem).to_dense()
    assert_close(OPERATORS[kind](*problem, chunk=chunk).to_dense(), whole)


@pytest.mark.parametrize("kind", OPERATORS)
def test_masked_targets_may_be_anything(x64, kind):
    objective, params, (x, y, mask) = attention_problem()
    wild = jnp.where(mask, y, 99)
    a = OPERATORS[kind](objective, params, (x, y, mask)).to_dense()
    b = OPERATORS[kind](objective, params, (x, wild, mask)).to_dense()
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_masked_targets_may_be_nan(x64, kind, likelihood):
    objective, params, (x, y, mask) = attention_problem(likelihood)
    wild = jnp.where(mask[..., None], y, jnp.nan)
    a = OPERATORS[kind](objective, params, (x, y, mask)).to_dense()
    b = OPERATORS[kind](objective, params, (x, wild, mask)).to_dense()
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", OPERATORS)
def test_only_is_the_block_of_those_leaves(x64, kind):
    problem = attention_problem()
    part = OPERATORS[kind](*problem, only="in|scale")
    assert list(part.leaves) == ["in", "scale"]
    indices = ravel_pytree({k: jnp.full(v.shape, k in part.leaves) for k, v in problem[1].items()})
    kept = jnp.nonzero(indices[0])[0]
    assert_close(part.to_dense(), OPERATORS[kind](*problem).to_dense()[jnp.ix_(kept, kept)])


def test_only_does_not_differentiate_the_rest():
    @jax.custom_jvp
    def frozen(w):
        return w

    @frozen.defjvp
    def never(primals, tangents):
        raise AssertionError("the base was differentiated")

    def apply_fn(params, x):
        return (x @ frozen(params["base"])) @ params["adapter"]

    params = {"base": jnp.ones((3, 3)), "adapter": jnp.ones((3, 2))}
    batch = (jnp.ones((4, 3)), jnp.zeros((4, 2)))
    for kind in (ggn, hessian, lambda *a, **k: fisher(*a, fisher="empirical", **k)):
        operator = kind(Objective(apply_fn, Gaussian()), params, batch, only="adapter")
        operator @ {"adapter": jnp.ones((3, 2))}
    with pytest.raises(AssertionError, match="differentiated"):
        ggn(Objective(apply_fn, Gaussian()), params, batch) @ params


def test_hessian_of_a_scalar_loss_with_aux_key_and_only(x64):
    objective, params, batch = mlp_problem()

    def loss(params, batch, key):
        return objective(params, batch) * jax.random.uniform(key, dtype=batch[0].dtype), "aux"

    key = jax.random.key(5)
    factor = jax.random.uniform(key, dtype=batch[0].dtype)
    found = hessian(loss, params, batch, key=key, has_aux=True, only="first/.*")
    expected = hessian(objective, params, batch, only="first/.*")
    assert_close(found.to_dense(), factor * expected.to_dense())


def test_dropout_draws_the_same_masks_at_every_product_and_aux_is_left_out(x64):
    plain, params, batch = mlp_problem()

    def apply_fn(params, x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return plain.apply_fn(params, jnp.where(keep, x, 0)), {"statistics": x.mean()}

    key = jax.random.key(1)
    operator = ggn(Objective(apply_fn, Categorical(), has_aux=True), params, batch, key=key)
    dropped = jnp.where(jax.random.bernoulli(key, 0.5, batch[0].shape), batch[0], 0)
    assert_close(operator.to_dense(), ggn(plain, params, (dropped, batch[1])).to_dense())


@pytest.mark.parametrize("kind", OPERATORS)
def test_bfloat16_models_take_float32_vectors_and_return_them(kind):
    objective, params, batch = mlp_problem()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    inputs = batch[0].astype(jnp.bfloat16)
    vector = jax.tree.map(jnp.ones_like, params)
    found = OPERATORS[kind](objective, half, (inputs, batch[1]), chunk=2) @ vector
    expected = OPERATORS[kind](objective, params, batch, chunk=2) @ vector
    assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, found))
    a, b = ravel_pytree(found)[0], ravel_pytree(expected)[0]
    if kind != "mc":  # rounded outputs may sample another label
        assert jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(b)


def test_integer_leaves_are_held_out_and_pass_unchanged(x64):
    def apply_fn(params, x):
        return x @ params["w"] * params["step"].astype(x.dtype)

    params = {"step": jnp.array(2), "w": jnp.ones((3, 2))}
    operator = ggn(Objective(apply_fn, Gaussian()), params, (jnp.eye(3), jnp.zeros((3, 2))))
    product = operator @ params
    assert product["step"] == 2 and operator.size == 6
    np.testing.assert_allclose(product["w"], 4 / 3)


def test_an_operator_is_an_argument_of_jit_and_compiles_once():
    objective, params, batch = mlp_problem()
    traces = []

    @jax.jit
    def apply(operator, vector):
        traces.append(0)
        return operator @ vector

    first = ggn(objective, params, batch, chunk=2)
    other = ggn(objective, jax.tree.map(lambda x: 2 * x, params), batch, chunk=2)
    for operator in (first, other):
        found = apply(operator.damped(0.5), params)
        expected = operator.damped(0.5) @ params
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    assert len(traces) == 1
    built_inside = jax.jit(lambda p: ggn(objective, p, batch) @ p)(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        built_inside,
        ggn(objective, params, batch) @ params,
    )


@pytest.mark.parametrize("kind", OPERATORS)
def test_chunks_bound_the_memory(kind):
    objective, params, _ = mlp_problem()
    objective = Objective(deep, objective.likelihood)
    batch = (jnp.ones((512, 3)), jnp.zeros(512, jnp.int32))

    def temporaries(chunk):
        operator = OPERATORS[kind](objective, params, batch, chunk=chunk)
        compiled = jax.jit(lambda o, v: o @ v).lower(operator, params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(8) < temporaries(None) / 10


def deep(params, x):
    h = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    for _ in range(8):
        h = jnp.tanh(2 * h + 0.1)
    return h @ params["second"]["kernel"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(only="frist/.*"), "'first/bias'"),
        (dict(only="("), "not a regular expression"),
        (dict(chunk=0), "at least 1"),
        (dict(fisher="mc"), "pass key=, or labels="),
        (dict(labels=jnp.zeros((1, 5))), 'labels= are for fisher="mc"'),
        (dict(fisher="mc", labels=jnp.zeros((1, 4))), r"expected \(samples, \*targets\)"),
        (dict(fisher="mc", labels=jnp.zeros((0, 5), int)), r"expected \(samples, \*targets\)"),
        (dict(fisher="mc", labels=jnp.full((2, 5), 3)), "expected classes from 0 to 2"),
        (dict(fisher="mc", key=None, labels=jnp.zeros((1, 5)), samples=0), "samples=0"),
    ],
)
def test_bad_options_are_named(arguments, words):
    with pytest.raises((ValueError, UnknownLayerError), match=words):
        fisher(*mlp_problem(), **arguments)


def test_a_scalar_loss_has_no_outputs_and_no_chunks():
    objective, params, batch = mlp_problem()
    loss = lambda p, b: objective(p, b)
    for kind in (ggn, fisher):
        with pytest.raises(TypeError, match="expected a jk.Objective"):
            kind(loss, params, batch)
    with pytest.raises(ValueError, match="chunk: a scalar loss"):
        hessian(loss, params, batch, chunk=2)


def test_targets_that_do_not_fit_are_refused_when_the_operator_is_built():
    objective, params, (x, y) = mlp_problem()
    with pytest.raises(ValueError, match="targets run from"):
        ggn(objective, params, (x, y + 3))
    with pytest.raises(ValueError, match="expected \\(5,\\)"):
        hessian(objective, params, (x, y[:4]))
    attend = Objective(lambda p, xs: objective.apply_fn(p, xs[0]), objective.likelihood)
    with pytest.raises(ValueError, match="cuts the batch along its first axis"):
        ggn(attend, params, ((x, jnp.ones(2)), y), chunk=2)
