"""First values of A: the subspaces of EVA and of the gradient, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac._errors import NonFiniteFactorError, UnknownLayerError
from jaxkfac.lslora import Config, attach, init

KEYS = jax.random.split(jax.random.key(0), 5)
PARAMS = {
    "up": {"kernel": jax.random.normal(KEYS[0], (6, 5)), "bias": jnp.ones(5)},
    "down": {"kernel": jax.random.normal(KEYS[1], (5, 4))},
}
SCALES = jnp.asarray([3.0, 2.0, 1.0, 0.5, 0.3, 0.2])
X = jax.random.normal(KEYS[2], (40, 6)) * SCALES + 4.0
BATCH = (X, jnp.arange(40) % 4)


def fn(p, x):
    return jnp.tanh(x @ p["up"]["kernel"] + p["up"]["bias"]) @ p["down"]["kernel"]


STATS = jk.value_grad_and_factors(jk.Objective(fn, jk.Categorical()))
VALUE, GRADS, FACTORS = STATS(PARAMS, BATCH)
CONFIG = Config(rank=2, target=".*kernel", fourier_placement="none")


def made(kind, config=CONFIG, **source):
    return init(fn, config, PARAMS, X, key=KEYS[3], init=kind, **source)


def projector(a):
    a = np.asarray(a, np.float64)
    return a @ np.linalg.solve(a.T @ a, a.T)


def test_eva_spans_the_leading_directions_of_the_inputs_centred_where_there_is_a_bias():
    found = made("eva", factors=FACTORS)
    hidden = jnp.tanh(X @ PARAMS["up"]["kernel"] + PARAMS["up"]["bias"])
    for name, rows in (("up/kernel", X - X.mean(0)), ("down/kernel", hidden)):
        vectors = np.linalg.svd(np.asarray(rows, np.float64))[2][:2]
        np.testing.assert_allclose(projector(found[name].a), vectors.T @ vectors, atol=1e-5)
        np.testing.assert_allclose(found[name].a.T @ found[name].a, np.eye(2), atol=1e-6)


def test_gradient_spans_the_input_side_of_the_gradient():
    found = made("gradient", gradient=GRADS)
    for name in ("up", "down"):
        left = np.linalg.svd(np.asarray(GRADS[name]["kernel"], np.float64))[0][:, :2]
        np.testing.assert_allclose(projector(found[f"{name}/kernel"].a), left @ left.T, atol=1e-5)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize(
    ("kind", "source"), [("eva", {"factors": FACTORS}), ("gradient", {"gradient": GRADS})]
)
def test_the_model_is_the_base_and_the_rest_is_as_by_default(kind, source):
    config = Config(rank=2, target=".*kernel")
    plain, found = made("default", config), made(kind, config, **source)
    assert jax.tree.structure(plain) == jax.tree.structure(found)
    for name in plain:
        assert not np.any(found[name].b) and found[name].a.dtype == plain[name].a.dtype
        assert not np.allclose(found[name].a, plain[name].a)
    outputs = attach(fn, config)(PARAMS, found, X)
    np.testing.assert_array_equal(outputs, fn(PARAMS, X))


@pytest.mark.slow
def test_each_slice_of_a_stack_has_its_own_directions():
    def scanned(p, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["kernel"])[0]

    params = {"kernel": jax.random.normal(KEYS[4], (2, 6, 6)) / 2}
    batch = (X, jnp.zeros((40, 6)))
    stats = jk.value_grad_and_factors(jk.Objective(scanned, jk.Gaussian()))
    factors = stats(params, batch).factors
    config = Config(rank=2, target="kernel", fourier_placement="none")
    found = init(scanned, config, params, X, key=KEYS[0], init="eva", factors=factors)["kernel"].a
    for k, rows in enumerate((X, jnp.tanh(X @ params["kernel"][0]))):
        vectors = np.linalg.svd(np.asarray(rows, np.float64))[2][:2]
        np.testing.assert_allclose(projector(found[k]), vectors.T @ vectors, atol=1e-5)


def test_shapes_suffice():
    shapes = jax.eval_shape(lambda f: made("eva", factors=f), FACTORS)
    assert shapes["up/kernel"].a.shape == (6, 2)


@pytest.mark.slow
def test_bad_input_is_refused_by_name():
    zeros = jax.tree.map(jnp.zeros_like, FACTORS)
    with pytest.raises(ValueError, match=r"up/kernel.*inputs have 0 directions.*rank is 2"):
        made("eva", factors=zeros)
    with pytest.raises(ValueError, match=r"up/kernel.*gradient have 0 directions"):
        made("gradient", gradient=jax.tree.map(jnp.zeros_like, GRADS))
    few = STATS(PARAMS, (X[:2], BATCH[1][:2])).factors
    with pytest.raises(ValueError, match=r"up/kernel.*inputs have 1 directions"):
        made("eva", factors=few)
    with pytest.raises(NonFiniteFactorError, match="up/kernel"):
        made("eva", factors=jax.tree.map(lambda x: x * jnp.nan, FACTORS))
    with pytest.raises(ValueError, match=r"init='eva' reads the factors: pass factors="):
        made("eva")
    with pytest.raises(ValueError, match="gradient=: init='eva' does not read it"):
        made("eva", factors=FACTORS, gradient=GRADS)
    with pytest.raises((TypeError, ValueError), match="init.*pissa|parameter 'init'"):
        made("pissa")
    other = jk.Objective(lambda p, x: x @ p["w"], jk.Categorical())
    alien = jk.value_grad_and_factors(other)({"w": jnp.ones((6, 4))}, BATCH)
    with pytest.raises(UnknownLayerError, match="no layer 'up/kernel'.*nearest"):
        made("eva", factors=alien.factors)
    with pytest.raises(ValueError, match="no leaf 'up/kernel'"):
        made("gradient", gradient=alien.grads)
    with pytest.raises(ValueError, match="rank 5 is larger"):
        made("eva", Config(rank=5, target=".*kernel"), factors=FACTORS)


def test_folders_are_those_of_any_adapter(tmp_path):
    found = made("eva", factors=FACTORS)
    jk.lslora.save(tmp_path / "adapter", found, CONFIG, dialect="peft")
    adapters, _ = jk.lslora.load(tmp_path / "adapter", like=found)
    for x, y in zip(jax.tree.leaves(adapters), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(x, y)
