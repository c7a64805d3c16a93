"""Normalisation scales and lone biases: diagonals by row and by example, and full blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from tests._cases import case
from tests._checks import assert_tree_close, check, objective_of
from tests._dense import fisher_block, root_fisher
from tests._programs import labels, normal, tree

pytestmark = pytest.mark.exhaustive  # minutes for the file; make test-exhaustive

SHARINGS = ("expand", "reduce")
CASES = ("attention", "embedded", "nested scan", "recurrent", "shared layers")


@pytest.mark.parametrize("scales", ["exact_diagonal", "full_block"])
@pytest.mark.parametrize("name", CASES)
def test_blocks_by_example_are_those_of_the_brute_force(x64, name, scales):
    model, plain, params, batch = case(name)
    check(model, params, batch, oracle_model=plain, scales=scales)


@pytest.mark.parametrize("fisher", ["mc", "exact"])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", ["embedded", "nested scan"])
def test_full_blocks_of_every_fisher_type(x64, name, sharing, fisher):
    model, plain, params, (x, y) = case(name)
    check(
        model, params, (x, y), oracle_model=plain, scales="full_block", sharing=sharing,
        fisher=fisher, labels=labels(8, 2, *y.shape) if fisher == "mc" else None,
    )  # fmt: skip


@pytest.mark.parametrize("scales", ["exact_diagonal", "full_block"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_masked_terms_and_absent_positions(x64, sharing, scales):
    model, plain, params, batch = case("shared layers")
    here = jnp.asarray(np.arange(3) < np.array([[3], [2], [1]]))
    check(
        model, params, (*batch, here), oracle_model=plain, positions=here, sharing=sharing,
        scales=scales,
    )  # fmt: skip


@pytest.mark.parametrize("scales", ["exact_diagonal", "full_block"])
def test_blocks_by_example_do_not_depend_on_the_sharing(x64, scales):
    model, _, params, batch = case("embedded")
    one, other = (
        jk.value_grad_and_factors(objective_of(model), scales=scales, sharing=sharing)(
            params, batch
        )[2]
        for sharing in SHARINGS
    )
    for name in ("scale", "shift", "places", "token"):
        assert_tree_close(one[name], other[name], 1e-13)


def test_reduce_takes_diagonals_by_example(x64):
    model, _, params, batch = case("attention")
    reduce, exact, expand = (
        jk.value_grad_and_factors(objective_of(model), **options)(params, batch)[2]["norm"].diagonal
        for options in ({"sharing": "reduce"}, {"scales": "exact_diagonal"}, {})
    )
    np.testing.assert_allclose(reduce, exact, rtol=1e-12)
    assert np.abs(np.asarray(expand - exact)).max() > 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_a_full_block_is_the_block_of_the_dense_fisher(x64, fisher):
    """Without any approximation, in the parameter's own order, and its diagonal beside it."""
    model, plain, params, batch = case("embedded")
    root = root_fisher(plain, params, batch, fisher=fisher)
    full, diagonal = (
        jk.value_grad_and_factors(objective_of(model), fisher=fisher, scales=scales)(params, batch)[
            2
        ]
        for scales in ("full_block", "exact_diagonal")
    )
    for name in ("scale", "shift", "places", "token"):
        block = fisher_block(root, name)
        np.testing.assert_allclose(full[name].g, block, rtol=1e-10, atol=1e-15)
        np.testing.assert_array_equal(full[name].a, [1.0])
        np.testing.assert_allclose(
            diagonal[name].diagonal, np.diag(block).reshape(params[name].shape), rtol=1e-10,
            atol=1e-15,
        )  # fmt: skip


def test_full_blocks_of_a_stack_have_one_block_for_each_slice(x64):
    model, plain, params, batch = case("nested scan")
    factors = jk.value_grad_and_factors(objective_of(model), scales="full_block")(params, batch)[2]
    root = root_fisher(plain, params, batch, fisher="empirical")
    assert factors["b/scale"].a.shape == (2, 2, 1) and factors["b/scale"].g.shape == (2, 2, 4, 4)
    for i, j in np.ndindex(2, 2):
        slices = {name: g[:, i, j] for name, g in root.items() if name.startswith("b/")}
        for name in ("b/scale", "b/shift"):
            block = fisher_block(slices, name)
            np.testing.assert_allclose(factors[name].g[i, j], block, rtol=1e-10, atol=1e-15)


def test_the_natural_gradient_of_a_full_block_solves_with_it(x64):
    """Eigenbases and powers take the block like any other factor."""
    model, _, params, batch = case("attention")
    stats = jk.value_grad_and_factors(objective_of(model), scales="full_block")
    _, grads, factors = stats(params, batch)
    bases = jk.eigendecompose(factors, max_condition=float("inf"))
    found = jk.natural_gradient(grads, bases, damping=1e-3)["norm"]
    block = np.asarray(factors["norm"].g) + 1e-3 * np.eye(4)
    np.testing.assert_allclose(found, np.linalg.solve(block, grads["norm"]), rtol=1e-8)


def test_scales_over_several_axes_and_one_plus_scale(x64):
    """A scale of heads and features, and one that is added to one."""

    def model(p, x, tap):
        h = x.reshape(*x.shape[:2], 2, 2)
        h = tap.scale("heads", h, h * p["heads"], shape=(2, 2))
        h = h.reshape(x.shape)
        h = tap.scale("scale", h, h * (1.0 + p["scale"]), shape=(4,))
        h = jnp.cumsum(jnp.tanh(h), axis=1)
        return tap.dense("w", h, h @ p["w"])

    p = tree(91, heads=(2, 2), scale=(4,), w=(4, 3))
    batch = (normal(1, 3, 2, 4, scale=1.0), labels(2, 3, 2))
    for scales in ("exact_diagonal", "full_block"):
        check(model, p, batch, scales=scales)


def test_a_full_block_in_remat_and_jit(x64):
    """Per-example sums pass every wall that rows pass."""
    model, _, params, batch = case("attention")
    wrapped = lambda p, x, tap: jax.checkpoint(jax.jit(lambda p, x: model(p, x, tap)))(p, x)
    check(wrapped, params, batch, oracle_model=model, scales="full_block", sharing="reduce")
