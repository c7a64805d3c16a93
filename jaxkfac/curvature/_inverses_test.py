import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import (
    eigendecompose,
    identity_bases,
    identity_inverses,
    invert,
    natural_gradient,
    precondition,
)

pytestmark = pytest.mark.usefixtures("x64")

LAYERS = (
    layer("q", (4, 3), bias="q_b"),
    layer("k", (4, 3), input="q"),
    layer("stack", (2, 3, 5), stack=1, bias="stack_b"),
    layer("table", (6, 4), kind="embedding", a_dense=False),
    layer("wide", (4, 6), bias="wide_b", g_dense=False),
    layer("scale", (4,), kind="scale", inputs=()),
)
DAMPINGS = {"pi": (0.3, "pi"), "factored": (0.3, "factored"), "pair": ((0.2, 0.7), "exact")}
damped = pytest.mark.parametrize(("damping", "mode"), DAMPINGS.values(), ids=DAMPINGS)
sharing = pytest.mark.parametrize("bias", ["joint", "separate"])


def problem(bias="joint"):
    factors = random_factors(LAYERS, jax.random.key(0), bias=bias)
    shapes = {m.path: m.atoms for x in LAYERS for m in (x.weight, x.bias) if m is not None}
    keys = jax.random.split(jax.random.key(1), len(shapes))
    grads = {p: jax.random.normal(k, s) for k, (p, s) in zip(keys, shapes.items(), strict=True)}
    return factors, grads | {"uncovered": jnp.ones(2)}


def assert_close(a, b, tol=1e-10):
    for path in b:
        assert np.allclose(a[path], b[path], rtol=tol, atol=tol), path


@pytest.mark.exhaustive
def test_only_the_reading_that_answers_for_a_parameter_has_inverses():
    """A tied table and head, and one kernel in both orientations."""
    head = layer("tied", (4, 6))
    table = dataclasses.replace(
        layer("tied", (4, 6), kind="embedding", a_dense=False),
        name="tied@embedding",
        input="tied@embedding",
    )
    other = layer("other", (4, 3), input="tied@embedding", a_dense=False)
    factors = random_factors((table, head, other), jax.random.key(0))
    held = invert(factors, damping=0.1, damping_mode="factored")
    assert set(held.g) == {"tied", "other"} == set(held.a)
    initial = identity_inverses(factors, damping=0.1, damping_mode="factored")
    assert jax.tree.structure(initial) == jax.tree.structure(held)
    grads = {"tied": jnp.ones((4, 6)), "other": jnp.ones((4, 3))}
    bases = eigendecompose(factors, max_condition=float("inf"))
    options = {"damping": 0.1, "damping_mode": "factored"}
    assert_close(precondition(grads, held), natural_gradient(grads, bases, **options))


@pytest.mark.exhaustive  # jaxkfac/optim/_preconditioner_test.py has it
@damped
@sharing
def test_two_products_equal_the_eigenvectors(damping, mode, bias):
    factors, grads = problem(bias)
    found = precondition(grads, invert(factors, damping=damping, damping_mode=mode))
    bases = eigendecompose(factors, max_condition=float("inf"))
    options = {"damping": damping, "damping_mode": mode, "missing": "identity"}
    assert_close(found, natural_gradient(grads, bases, **options))


@damped
def test_a_joint_block_is_its_damped_inverse_written_out(damping, mode):
    factors, grads = problem()
    found = precondition(grads, invert(factors, damping=damping, damping_mode=mode))
    a, g = (np.asarray(x) for x in factors["q"])
    if mode == "exact":
        to_a, to_g = damping
    else:
        pi = np.sqrt(np.trace(a) / 5 / (np.trace(g) / 3)) if mode == "pi" else 1.0
        to_a, to_g = pi * np.sqrt(damping), np.sqrt(damping) / pi
    both = np.concatenate([grads["q"], grads["q_b"][None]])
    solved = np.linalg.inv(a + to_a * np.eye(5)) @ both @ np.linalg.inv(g + to_g * np.eye(3))
    assert_close(found, {"q": solved[:-1], "q_b": solved[-1], "uncovered": np.ones(2)})


@pytest.mark.slow
@pytest.mark.sampled(1)
@damped
def test_identities_are_damped_as_eigenbases_of_the_identity(damping, mode):
    factors, grads = problem()
    inverses = identity_inverses(factors, damping=damping, damping_mode=mode)
    options = {"damping": damping, "damping_mode": mode, "missing": "identity"}
    expected = natural_gradient(grads, identity_bases(factors), **options)
    assert_close(precondition(grads, inverses), expected)
    made = invert(factors, damping=damping, damping_mode=mode)
    shapes = lambda x: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), x)
    assert jax.tree.structure(inverses) == jax.tree.structure(made)
    assert jax.tree.leaves(shapes(inverses)) == jax.tree.leaves(shapes(made))


def test_one_inverse_serves_layers_that_share_an_input_unless_pi_splits_it():
    factors, _ = problem()
    factors = random_factors((layer("q", (4, 3)), layer("k", (4, 3), input="q")), jax.random.key(0))
    stored = lambda mode: set(invert(factors, damping=0.1, damping_mode=mode).a)
    assert stored("factored") == {"q"} and stored("pi") == {"q", "k"}


def test_no_damping_leaves_a_bounded_condition_number():
    """An input that is always zero: a decomposition would raise its eigenvalue."""
    factors, _ = problem()
    factors.a_sums["q"] = factors.a_sums["q"].at[0].set(0).at[:, 0].set(0)
    inverses = invert(factors, damping=0.0, damping_mode="factored", max_condition=1e4)
    assert np.linalg.cond(inverses.a["k"]) <= 1.001e4
    broken = invert(factors, damping=0.0, damping_mode="factored", max_condition=float("inf"))
    assert np.isnan(broken.a["k"]).all() and np.isfinite(broken.g["k"]).all()


@pytest.mark.slow
def test_a_matrix_of_a_stack_that_is_not_finite_is_nan_alone():
    factors, _ = problem()
    factors.g_sums["stack"] = factors.g_sums["stack"].at[1, 0, 2].set(jnp.nan)  # one triangle
    inverses = jax.jit(lambda f: invert(f, damping=0.1, damping_mode="factored"))(factors)
    found = inverses.g["stack"]
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


def test_exact_damping_has_no_inverses():
    factors, _ = problem()
    with pytest.raises(ValueError, match="damping_mode='exact'.*'pi'"):
        invert(factors, damping=0.1, damping_mode="exact")


@pytest.mark.slow
@pytest.mark.sampled(1)
@damped
def test_packed_factors_decompose_and_invert_like_dense_ones(damping, mode):
    layers = (
        layer("q", (63, 3), bias="q_b"),  # with its ones 64
        layer("k", (63, 66), input="q"),  # reads the packed A without the ones
        layer("stack", (2, 65, 5), stack=1),
    )
    factors = random_factors(layers, jax.random.key(0))
    packed = factors.packed()
    options = {"damping": damping, "damping_mode": mode}
    dense = invert(factors, **options)
    for found in (invert(packed, **options), invert(packed, **options).packed()):
        for each in layers:
            for x, y in zip(found.of(each), dense.of(each), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    for placement in ("device", "host"):
        bases = [eigendecompose(x, placement=placement) for x in (factors, packed)]
        for x, y in zip(*map(jax.tree.leaves, bases), strict=True):
            np.testing.assert_array_equal(x, y)
