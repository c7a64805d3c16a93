"""A kind of layer made outside the library: found, gathered, decomposed and measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import UncoveredParameterError
from jaxkfac.curvature import correct_eigenvalues, eigendecompose
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.interception import Use, _kind, find_layers, kind_named, register_kind
from jaxkfac.interception.values import UseAxes
from jaxkfac.kinds import Dense, Elementwise

pytestmark = pytest.mark.usefixtures("x64")


class Angle(Elementwise):
    """The angle of a parameter and data."""

    name = "angle"
    primitives = frozenset(("atan2",))
    suffix = "angle"

    def find(self, table, at, ins):
        if at.operand != 0:
            return "is the second operand"
        return Use(self, ins[0], at, ins[1], UseAxes(rows=ins[1].axes))

    def gradient(self, vjp):
        n, x = (v.astype(vjp.cotangent.dtype) for v in vjp.operands)
        return vjp.cotangent * x / (jnp.square(n) + jnp.square(x))


@pytest.fixture
def angle(monkeypatch):
    monkeypatch.setattr(_kind, "_KINDS", dict(_kind._KINDS))
    return register_kind(Angle)


def model(p, x):
    return jnp.tanh(x @ p["w"]) + jnp.arctan2(3.0 * p["n"], 2 + jnp.square(x))


def problem():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 4))), "n": jnp.asarray(rng.normal(size=4))}
    x, y = (jnp.asarray(rng.normal(size=(5, 3, 4))) for _ in range(2))
    return Objective(model, Gaussian()), params, (x, y)


def example_gradients(objective, params, batch):
    """Gradient of each example's sum of terms."""
    terms = lambda p, one: 3 * objective(p, jax.tree.map(lambda v: v[None], one))
    return jax.vmap(jax.grad(terms), (None, 0))(params, batch)


def test_without_the_kind_its_name_says_nothing():
    with pytest.raises(ValueError, match="no kind of layer is called 'angle'"):
        kind_named("angle")


def test_without_the_kind_its_parameter_is_uncovered():
    objective, params, batch = problem()
    with pytest.raises(UncoveredParameterError, match="n: is read by `atan2`"):
        value_grad_and_factors(objective)(params, batch)


def test_it_is_found_and_gives_value_and_gradient(angle):
    objective, params, batch = problem()
    layer = find_layers(model, params, batch[0])["n"]
    assert (layer.kind, layer.is_diagonal, layer.out_features) == ("angle", True, 4)
    value, grads, _ = value_grad_and_factors(objective)(params, batch)
    expected = jax.value_and_grad(objective)(params, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), (value, grads), expected
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_its_diagonal_is_that_of_the_fisher(angle, fisher):
    """Each example's gradient, squared, with the constant 3 accounted for."""
    objective, params, batch = problem()
    options = {"fisher": fisher, "scales": "exact_diagonal"}
    found = value_grad_and_factors(objective, **options)(params, batch).factors["n"].diagonal
    if fisher == "empirical":
        squares = jnp.square(example_gradients(objective, params, batch)["n"]).sum(0)
    else:  # of a Gaussian: the Jacobian's rows
        jacobian = jax.jacobian(lambda n: model({**params, "n": n}, batch[0]))(params["n"])
        squares = jnp.square(jacobian).sum((0, 1, 2))
    np.testing.assert_allclose(found, squares / 15, rtol=1e-12)


def test_its_dense_block_is_measured_in_its_eigenvectors(angle):
    objective, params, batch = problem()
    gradients = np.asarray(example_gradients(objective, params, batch)["n"])
    stats = value_grad_and_factors(objective, scales="full_block")
    factors = stats(params, batch).factors
    np.testing.assert_allclose(factors["n"].g, gradients.T @ gradients / 15, rtol=1e-10)
    bases = eigendecompose(factors)
    found = correct_eigenvalues(objective, bases)(params, batch)
    turned = gradients @ np.asarray(bases["n"].g_vectors)
    expected = np.square(turned).sum(0) / 15
    np.testing.assert_allclose(np.ravel(found["n"].raw_values), expected, rtol=1e-8, atol=1e-14)


def test_no_two_kinds_share_a_name_or_a_primitive(angle):
    first = kind_named("angle")
    register_kind(Angle)  # the same class: a cell of a notebook, run again
    assert kind_named("angle") is not first

    class Same(Dense):
        name = "angle"
        primitives = frozenset()

    with pytest.raises(ValueError, match="'angle' is the name of another kind"):
        register_kind(Same)

    class Other(Dense):
        name = "other"

    with pytest.raises(ValueError, match="`dot_general` is read by the kind 'dense'"):
        register_kind(Other)
