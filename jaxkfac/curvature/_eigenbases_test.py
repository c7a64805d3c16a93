"""Bases as values: what is a leaf, what they say without being told, how measurements add up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac.blocks import Corrections, update_average
from jaxkfac.blocks._random_factors_test import random_factors
from jaxkfac.curvature import apply_power, eigendecompose, identity_bases
from jaxkfac.factors._explicit_net_test import NET

FACTORS = random_factors(NET, jax.random.key(0))
IDENTITY = identity_bases(FACTORS)


def measured(seed, terms):
    """The identity bases with corrections as those of a batch would be."""
    rng, sums = np.random.default_rng(seed), {}
    for name, basis in IDENTITY.items():
        shape = getattr(basis, "diagonal", None)
        shape = (*basis.a_values.shape, *basis.g_values.shape) if shape is None else shape.shape
        sums[name] = jnp.asarray(rng.random(shape), jnp.float32)
    return dataclasses.replace(IDENTITY, corrections=Corrections(sums, {}, jnp.asarray(terms)))


def test_only_arrays_are_leaves():
    """Clipping is an option: a sum or a mean of bases leaves it as it is."""
    doubled = jax.tree.map(lambda x: 2 * x, IDENTITY)
    assert (doubled.max_condition, doubled.floor) == (IDENTITY.max_condition, IDENTITY.floor)
    assert doubled.layers == IDENTITY.layers and doubled.bias == IDENTITY.bias


def test_identity_bases_clip_as_decomposed_ones_do():
    decomposed = eigendecompose(FACTORS, vectors=False)
    assert decomposed.max_condition == IDENTITY.max_condition
    assert decomposed.floor == IDENTITY.floor


def test_measurements_of_two_batches_add_up_by_terms():
    first, second = measured(0, 3.0), measured(1, 5.0)
    both = first + second
    assert both.corrections.terms == 8
    for name in both:
        expected = (first.corrections.sums[name] + second.corrections.sums[name]) / 8
        found = both[name]
        raw = found.raw_diagonal if hasattr(found, "raw_diagonal") else found.raw_values
        np.testing.assert_allclose(raw, expected, rtol=1e-6)


def test_a_measurement_without_terms_leaves_an_average_unchanged():
    average, empty = measured(0, 3.0), measured(1, 0.0)
    nothing = jax.tree.map(jnp.zeros_like, empty.corrections)
    empty = dataclasses.replace(empty, corrections=nothing)
    found = average
    for _ in range(3):
        found = update_average(found, empty, 0.5)
    jax.tree.map(np.testing.assert_array_equal, found.corrections, average.corrections)


def test_what_was_measured_decays_and_what_is_new_does_not():
    first, second = measured(0, 3.0), measured(1, 5.0)
    found = first.decayed_sum(second, 0.5).corrections
    assert found.terms == 0.5 * 3 + 5
    for name, total in found.sums.items():
        expected = 0.5 * first.corrections.sums[name] + second.corrections.sums[name]
        np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_a_cut_takes_measured_values_below_it_for_zero():
    bases, kernel = measured(0, 3.0), np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2)
    tree = {x.weight.path: jnp.ones(x.weight.atoms) for x in NET}
    tree |= {x.bias.path: jnp.ones(x.bias.atoms) for x in NET if x.bias is not None}
    found = apply_power(tree | {"head/kernel": kernel}, bases, -1.0, 0.5, cut=0.5)
    values = np.asarray(bases["head/kernel"].raw_values)
    kept = (values > 0.5 * values.max())[:-1]
    assert kept.any() and not kept.all()
    expected = np.where(kept, kernel / (values[:-1] + 0.5), 0)
    np.testing.assert_allclose(found["head/kernel"], expected, rtol=1e-5)
