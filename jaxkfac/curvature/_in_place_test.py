"""A refresh in place gives what a decomposition of the same factors gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks import _sides
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import (
    eigendecompose,
    identity_bases,
    identity_inverses,
    invert,
    refresh_bases,
    refresh_inverses,
)

pytestmark = pytest.mark.usefixtures("x64")

LAYERS = (
    layer("q", (4, 3), bias="q_b"),
    layer("k", (4, 3), input="q"),  # reads A without the ones
    layer("stack", (3, 2, 5), stack=1, bias="stack_b"),
    layer("tables", (3, 6, 4), kind="embedding", stack=1, a_dense=False),
    layer("wide", (4, 6), bias="wide_b", g_dense=False),
    layer("scale", (4,), kind="scale", inputs=()),
)
DAMPINGS = {"pi": (0.3, "pi"), "factored": (0.3, "factored"), "pair": ((0.2, 0.7), "exact")}


def assert_close(one, other):
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.fixture(params=["dense", "packed"])
def stored(request, monkeypatch):
    monkeypatch.setattr(_sides, "PACKED_FROM", 2)
    return (lambda x: x.packed()) if request.param == "packed" else (lambda x: x)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_bases_in_place_are_those_of_a_decomposition(bias, stored):
    factors = random_factors(LAYERS, jax.random.key(0), bias=bias)
    bases, failed = jax.jit(refresh_bases)(identity_bases(factors), stored(factors))
    assert int(failed) == 0
    assert_close(bases, eigendecompose(factors, placement="device"))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("damping", "mode"), DAMPINGS.values(), ids=DAMPINGS)
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_inverses_in_place_are_those_of_an_inversion(bias, damping, mode, stored):
    factors = random_factors(LAYERS, jax.random.key(0), bias=bias)
    options = {"damping": damping, "damping_mode": mode}
    refreshed = jax.jit(lambda old, factors: refresh_inverses(old, factors, **options))
    old = stored(identity_inverses(factors, **options))
    inverses, failed = refreshed(old, stored(factors))
    assert int(failed) == 0
    assert_close(inverses, stored(invert(factors, **options)))


def test_each_matrix_that_fails_keeps_its_old_result_and_is_counted():
    """One of a stack, a diagonal side, and a scale."""
    factors = random_factors(LAYERS, jax.random.key(0))
    g_sums = factors.g_sums | {"stack": factors.g_sums["stack"].at[1, 0, 0].set(jnp.nan)}
    a_sums = factors.a_sums | {"tables": factors.a_sums["tables"].at[2, 1].set(jnp.inf)}
    diagonals = {"scale": factors.diagonals["scale"].at[0].set(jnp.nan)}
    broken = dataclasses.replace(factors, a_sums=a_sums, g_sums=g_sums, diagonals=diagonals)
    old, good = identity_bases(factors), eigendecompose(factors, placement="device")
    bases, failed = jax.jit(refresh_bases)(old, broken)
    assert int(failed) == 3
    assert_close(bases.g["stack"].vectors[1], old.g["stack"].vectors[1])
    assert_close(bases.g["stack"].vectors[0], good.g["stack"].vectors[0])
    assert_close(bases.a["tables"].values[2], old.a["tables"].values[2])
    assert_close(bases.a["tables"].values[1], good.a["tables"].values[1])
    assert_close(bases.diagonals["scale"], old.diagonals["scale"])
