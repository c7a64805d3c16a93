"""Positions and features: a parameter that all classes share has one gradient at each position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import LostRowsError
from jaxkfac.factors import Bernoulli, Categorical, Gaussian, Objective, value_grad_and_factors

pytestmark = pytest.mark.usefixtures("x64")

N, S = 6, 4
RNG = np.random.default_rng(0)
SHAPES = {"w": (5, 4), "v": (4, 3), "t": (), "one": (1,)}
TARGETS = {
    Categorical(): RNG.integers(0, 3, (N, S)),
    Gaussian(): RNG.normal(size=(N, S, 3)),
    Bernoulli(): RNG.integers(0, 2, (N, S, 3)).astype(float),
}
PLACES = {
    "logits": lambda p, x: (jnp.tanh(x @ p["w"]) @ p["v"]) * jnp.exp(p["t"]) * p["one"],
    "inputs": lambda p, x: jnp.tanh((x * p["t"] + p["one"]) @ p["w"]) @ p["v"],
    "hidden": lambda p, x: (jnp.tanh(x @ p["w"]) * p["t"] + p["one"]) @ p["v"],
}


@pytest.fixture
def params():
    return {k: jax.random.normal(jax.random.key(i), n) for i, (k, n) in enumerate(SHAPES.items())}


@pytest.fixture
def batch(likelihood):
    x = jax.random.normal(jax.random.key(9), (N, S, 5))
    return x, jnp.asarray(TARGETS[likelihood])


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("likelihood", TARGETS, ids=repr)
def test_a_scalar_has_one_gradient_at_each_position(likelihood, place, params, batch):
    """It is the gradient of a copy of the scalar at that position: features are summed first."""
    objective = Objective(PLACES[place], likelihood)
    _, _, factors = value_grad_and_factors(objective, scales="diagonal")(params, batch)
    copies = {k: jnp.broadcast_to(params[k], (N, S, 1)) for k in ("t", "one")}
    grads = jax.grad(lambda copies: objective(params | copies, batch))(copies)
    terms = N * S
    for name, gradient in grads.items():
        expected = jnp.square(terms * gradient).sum() / terms
        np.testing.assert_allclose(factors[name].diagonal.sum(), expected, rtol=1e-12)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("likelihood", TARGETS, ids=repr)
def test_with_one_position_all_modes_agree(likelihood, params, batch):
    objective, batch = (
        Objective(PLACES["logits"], likelihood),
        jax.tree.map(lambda x: x[:, 0], batch),
    )
    by_position, by_example = (
        value_grad_and_factors(objective, scales=scales)(params, batch).factors
        for scales in ("diagonal", "exact_diagonal")
    )
    for name in ("t", "one"):
        np.testing.assert_allclose(
            by_position[name].diagonal, by_example[name].diagonal, rtol=1e-12
        )


@pytest.mark.slow
def test_pixels_that_no_product_reads_are_positions(params):
    """Each pixel has a gradient of the scale of a channel, also where it is pooled afterwards."""
    pixels = jax.random.normal(jax.random.key(8), (N, 3, 3, 4))
    objective = Objective(lambda p, x: (x * p["gain"]).mean((1, 2)) @ p["v"], Gaussian())
    params, targets = params | {"gain": jnp.linspace(0.5, 1.5, 4)}, jnp.ones((N, 3))
    _, _, factors = value_grad_and_factors(objective, scales="diagonal")(params, (pixels, targets))
    each = jnp.broadcast_to(params["gain"], pixels.shape)
    gradients = jax.grad(lambda each: objective(params | {"gain": each}, (pixels, targets)))(each)
    expected = N * jnp.square(gradients).sum((0, 1, 2))
    np.testing.assert_allclose(factors["gain"].diagonal, expected, rtol=1e-12)


def _diagonals(model, x, **options):
    params = {"w": jnp.sin(jnp.arange(12.0)).reshape(3, 4), "scale": jnp.cos(jnp.arange(4.0))}
    objective = Objective(model, Gaussian())
    stats = value_grad_and_factors(objective, layers="scale", uncovered="ignore", **options)
    return stats(params, (x, jnp.zeros(jax.eval_shape(model, params, x).shape))).factors["scale"]


def _scaled(p, x):
    return jnp.tanh(x @ p["w"]) * p["scale"]


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (_scaled, (5, 6, 3), "exact_diagonal"),
        (_scaled, (5, 3), "diagonal"),
        (_scaled, (1, 6, 3), "exact_diagonal"),
        (lambda p, x: _scaled(p, x.sum(1)) + p["scale"] ** 2, (5, 6, 3), "exact_diagonal"),
        # The loop has one example in each iteration, where none can be told from another.
        (lambda p, x: jax.lax.map(lambda one: _scaled(p, one), x), (5, 6, 3), None),
    ],
)
def test_scales_are_squared_by_example_where_the_example_is_known(model, shape, expected):
    x = jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape)
    automatic = _diagonals(model, x).diagonal
    if expected is None:
        with pytest.raises(LostRowsError):
            _diagonals(model, x, scales="exact_diagonal")
        expected = "diagonal"
    np.testing.assert_array_equal(automatic, _diagonals(model, x, scales=expected).diagonal)
