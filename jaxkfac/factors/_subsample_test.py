"""Factors of a random part of the rows: unbiased, their counts exact, the gradient untouched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.factors._options import check_sparing

KEYS = jax.random.split(jax.random.key(5), 4000)
INPUTS = jax.random.randint(jax.random.key(0), (5, 7), 0, 11)
TARGETS = jax.random.randint(jax.random.key(1), (5, 7), 0, 4)
THERE = jnp.arange(7) < jnp.array([7, 5, 3, 6, 2])[:, None]

pytestmark = pytest.mark.usefixtures("x64")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(6)(jnp.tanh(nn.Dense(8)(x))), None


class Scanned(nn.Module):
    """Embedding, scale, three blocks in a rematted scan, and a head."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(11, 6)(ids) * self.param("scale", nn.initializers.ones, (6,), jnp.float32)
        stack = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return nn.Dense(4)(stack()(x, None)[0])


@functools.cache
def scanned():
    model = Scanned()
    params = model.init(jax.random.key(2), INPUTS)
    return Objective(model.apply, Categorical()), jax.tree.map(lambda x: x.astype(float), params)


def assert_unbiased(objective, params, batch, positions=None, fraction=0.3, **options):
    full = value_grad_and_factors(objective, **options)
    part = value_grad_and_factors(objective, subsample=fraction, **options)
    value, grads, factors = full(params, batch, KEYS[0], positions)
    found = jax.jit(jax.vmap(lambda key: part(params, batch, key, positions)))(KEYS)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(found.grads), strict=True):
        np.testing.assert_allclose(b, jnp.broadcast_to(a, b.shape), rtol=1e-10, atol=1e-14)
    for a, b in zip(
        jax.tree.leaves(factors.a_counts), jax.tree.leaves(found.factors.a_counts), strict=True
    ):
        assert (a == b).all()
    moved = 0
    for a, b in zip(jax.tree.leaves(factors), jax.tree.leaves(found.factors), strict=True):
        b = np.asarray(b)
        error = b.std(0) / np.sqrt(len(b))
        # Where rows can hardly matter, a normal distribution of the mean is not to be had.
        assert (abs(b.mean(0) - a) <= 4 * error + 1e-12 * abs(a).max()).all()
        moved += bool((error > 1e-6 * abs(a).max()).any())
    assert moved > len(factors)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_a_part_are_unbiased(sharing, masked):
    objective, params = scanned()
    batch = (INPUTS, TARGETS, THERE) if masked else (INPUTS, TARGETS)
    assert_unbiased(objective, params, batch, THERE if masked else None, sharing=sharing)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"fisher": "exact"}, {"scales": "full_block"}])
def test_so_are_those_of_other_fisher_types_and_whole_blocks(options):
    objective, params = scanned()
    assert_unbiased(objective, params, (INPUTS, TARGETS), **options)


@pytest.mark.slow
def test_so_are_those_of_patches():
    def model(p, x):
        y = jax.lax.conv_general_dilated(
            x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(y + p["bias"]).mean((1, 2)) @ p["head"]

    keys = jax.random.split(jax.random.key(3), 4)
    params = {
        "kernel": jax.random.normal(keys[0], (3, 3, 2, 4)),
        "bias": jnp.zeros(4),
        "head": jax.random.normal(keys[1], (4, 3)),
    }
    x = jax.random.normal(keys[2], (3, 5, 4, 2))
    assert_unbiased(Objective(model, Categorical()), params, (x, jnp.arange(3)), fraction=0.5)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_every_row_is_the_full_factors(sharing):
    objective, params = scanned()
    full, part = (
        value_grad_and_factors(objective, sharing=sharing, subsample=fraction)
        for fraction in (None, 1.0)
    )
    batch = INPUTS, TARGETS
    for a, b in zip(
        jax.tree.leaves(full(params, batch, KEYS[0])),
        jax.tree.leaves(part(params, batch, KEYS[0])),
        strict=True,
    ):
        assert (a == b).all()


@pytest.mark.exhaustive
def test_the_block_of_a_joint_bias_stays_positive_under_a_mask():
    """Its sums are of the same rows, and its last element is the number of rows there are."""
    objective, params = scanned()
    part = value_grad_and_factors(objective, subsample=0.2)
    batch = INPUTS, TARGETS, THERE
    factors = jax.jit(jax.vmap(lambda key: part(params, batch, key, THERE).factors))(KEYS[:20])
    for name, sums in factors.a_sums.items():
        if not name.endswith("embedding"):
            assert (jnp.linalg.eigvalsh(sums)[..., 0] > -1e-12 * abs(sums).max()).all()
            assert jnp.allclose(sums[..., -1, -1], 23.0)


@pytest.mark.exhaustive
def test_passes_under_a_budget_draw_the_rows_of_one_pass(capsys):
    objective, params = scanned()
    one = value_grad_and_factors(objective, subsample=0.3)
    many = value_grad_and_factors(objective, subsample=0.3, max_factor_bytes=3000)
    batch, key = (INPUTS, TARGETS), KEYS[0]
    assert len(many.plan(params, batch, key).passes) > 2
    expected, found = one(params, batch, key).factors, many(params, batch, key).factors
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-15)


def test_bad_input_is_named():
    objective, params = scanned()
    for fraction in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"subsample=.* in \(0, 1\]"):
            value_grad_and_factors(objective, subsample=fraction)
    for fraction in ("a", True):
        with pytest.raises(ValueError, match=r"subsample=.* in \(0, 1\]"):
            check_sparing(1, fraction)
    with pytest.raises(ValueError, match="every=2.5: expected a whole number of steps"):
        check_sparing(2.5, None)
    with pytest.raises(ValueError, match="subsample=0.5 draws rows: pass key="):
        value_grad_and_factors(objective, subsample=0.5)(params, (INPUTS, TARGETS))
