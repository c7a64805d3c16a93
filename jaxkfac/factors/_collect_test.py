"""A collector's programs and defaults, and the outer products of sums by example."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks._random_factors_test import layer
from jaxkfac.factors import Categorical, Gaussian, Objective, value_grad_and_factors
from jaxkfac.factors._diagonal_pass import gradient_block, gradient_rows, outer_products
from jaxkfac.kinds import Products
from jaxkfac.linalg import PANELS_FROM

PARAMS = {"w": jax.random.normal(jax.random.key(0), (3, 4)), "b": jnp.ones(4)}
X, Y = jax.random.normal(jax.random.key(1), (5, 3)), jnp.arange(5) % 4


@dataclasses.dataclass(frozen=True)
class Counted(Categorical):
    """Notes each time that Python reads the loss terms."""

    read: list = dataclasses.field(default_factory=list)

    def terms(self, outputs, targets):
        self.read.append(None)
        return super().terms(outputs, targets)


@pytest.fixture
def counted():
    """Statistics, and what Python read of them."""
    likelihood = Counted()

    def apply_fn(params, x):
        likelihood.read.append(None)
        return jnp.tanh(x @ params["w"] + params["b"])

    return value_grad_and_factors(Objective(apply_fn, likelihood)), likelihood.read


def test_a_second_call_outside_jit_traces_nothing(counted):
    stats, read = counted
    stats(PARAMS, (X, Y))
    read.clear()
    stats(PARAMS, (X + 1, Y))
    assert not read


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize(
    "setting", [lambda: jax.default_matmul_precision("float32"), lambda: jax.enable_x64(True)]
)
def test_a_call_under_another_setting_is_traced_under_it(counted, setting):
    stats, read = counted
    stats(PARAMS, (X, Y))
    read.clear()
    with setting():
        stats(PARAMS, (X, Y))
    assert read


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
def test_the_first_call_and_the_second_are_what_jit_computes(fisher):
    objective = Objective(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), Categorical())
    stats = value_grad_and_factors(objective, fisher=fisher)
    key = jax.random.key(2)
    first, second = stats(PARAMS, (X, Y), key), stats(PARAMS, (X, Y), key)
    compiled = jax.jit(stats)(PARAMS, (X, Y), key)
    assert jax.tree.structure(first) == jax.tree.structure(second) == jax.tree.structure(compiled)
    for one, two, three in zip(*map(jax.tree.leaves, (first, second, compiled)), strict=True):
        assert isinstance(one, jax.Array) and one.dtype == three.dtype
        assert (one == two).all()
        assert jnp.allclose(one, three, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fisher", "batch", "labels"),
    [
        ("empirical", (X, Y + 4), None),
        ("mc", (X, Y), Y[None] + 4),
        ("empirical", (X, Y, jnp.zeros(5, bool)), None),
    ],
)
def test_values_are_checked_at_every_call(fisher, batch, labels):
    objective = Objective(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), Categorical())
    stats = value_grad_and_factors(objective, fisher=fisher)
    good = (X, Y, *[jnp.ones(5, bool) for _ in batch[2:]])
    stats(PARAMS, good, labels=None if labels is None else Y[None])
    with pytest.raises(ValueError, match="classes from 0 to 3|masks every"):
        stats(PARAMS, batch, labels=labels)


@pytest.mark.slow
def test_neither_arguments_nor_tracers_are_held(counted):
    stats, _ = counted
    x = X + 1
    with jax.checking_leaks():
        stats(PARAMS, (x, Y))
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None


def test_what_a_loss_closes_over_inside_jit_is_read_at_each_call():
    stats = {}

    @jax.jit
    def value(scale):
        objective = Objective(lambda p, x: scale * jnp.tanh(x @ p["w"] + p["b"]), Categorical())
        stats["of"] = value_grad_and_factors(objective)
        return stats["of"](PARAMS, (X, Y)).value, stats["of"](PARAMS, (X, Y)).value

    one, again = value(1.0)
    assert one == again
    assert value(0.0)[0] != one


@pytest.mark.parametrize("fisher", ["empirical", "exact", "mc"])
def test_shapes_are_those_of_a_call_without_a_key_unless_labels_are_sampled(fisher):
    seen = []

    def apply_fn(params, x, key=None):
        seen.append(key is not None)
        return x @ params["w"]

    stats = value_grad_and_factors(Objective(apply_fn, Categorical()), fisher=fisher)
    like = stats.factor_shapes({"w": PARAMS["w"]}, (X, Y))
    assert like.a_sums["w"].shape == (3, 3) and like.g_sums["w"].shape == (4, 4)
    assert set(seen) == {fisher == "mc"}


def test_a_leaf_without_a_gradient_gets_zeros_and_a_key_itself():
    params = PARAMS | {"steps": jnp.arange(1, 4), "key": jax.random.key(2)}
    objective = Objective(lambda p, x: x @ p["w"] + p["steps"].sum().astype(float), Categorical())
    _, grads, _ = value_grad_and_factors(objective)(params, (X, Y))
    assert grads["steps"].dtype == params["steps"].dtype
    assert not grads["steps"].any() and grads["key"] == params["key"]
    assert grads["w"].any() and not grads["b"].any()


# ---------------- defaults of options, from shapes alone


@pytest.mark.parametrize(("size", "dense"), [(16384, True), (16385, False)])
def test_a_side_of_16384_is_the_largest_that_is_kept_whole(size, dense):
    params, batch = {"w": jnp.zeros((size, 2))}, (jnp.zeros((3, size)), jnp.zeros(3, int))
    stats = value_grad_and_factors(Objective(lambda p, x: x @ p["w"], Categorical()))
    like = stats.factor_shapes(params, batch)
    assert like.a_sums["w"].shape == ((size, size) if dense else (size,))


SCALED = {
    "x / p": lambda p, x: x / p,
    "p / x": lambda p, x: p / x,
    "x ** p": lambda p, x: x**p,
    "p ** x": lambda p, x: p**x,
}


@pytest.mark.default(1)
@pytest.mark.parametrize("name", SCALED)
def test_on_either_side_of_a_quotient_or_power_squares_are_those_of_gradients(x64, name):
    x, y = jax.random.uniform(jax.random.key(0), (2, 5, 3), minval=0.5, maxval=2.0)
    p = jnp.asarray([0.6, 1.1, 1.7])
    objective = Objective(lambda p, x: SCALED[name](p["scale"], x), Gaussian())
    factors = value_grad_and_factors(objective)({"scale": p}, (x, y)).factors

    def loss(p, x, y):
        return 0.5 * jnp.square(SCALED[name](p, x) - y).sum()

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(p, x, y)
    np.testing.assert_allclose(factors.diagonals["scale"], jnp.square(gradients).sum(0), rtol=1e-12)


# ---------------- outer products of what has been summed by example


ALL = {"products": Products(), "precision": jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("stack", [0, 1])
def test_gradients_of_examples_are_rows_and_their_outer_products_add_up(stack):
    scale = layer("scale", (2, 3), kind="scale", stack=stack, inputs=())
    gradient = jnp.arange(24.0).reshape(2, 3, 4)  # four examples
    expected = np.moveaxis(gradient, -1, stack).reshape(*scale.stack, 4, -1)
    np.testing.assert_array_equal(gradient_rows(scale, gradient), expected)
    outer = expected.swapaxes(-1, -2) @ expected
    np.testing.assert_allclose(gradient_block(scale, gradient, **ALL), outer, rtol=1e-6)


@pytest.mark.parametrize("size", [3, PANELS_FROM + 8])
@pytest.mark.parametrize("dense", [False, True])
def test_outer_products_are_sums_over_rows_whole_or_their_diagonal(size, dense):
    rows = jax.random.normal(jax.random.key(0), (5, size))
    found, whole = outer_products(rows, dense=dense, **ALL), rows.T @ rows
    np.testing.assert_allclose(found, whole if dense else jnp.diag(whole), rtol=1e-5, atol=1e-5)
