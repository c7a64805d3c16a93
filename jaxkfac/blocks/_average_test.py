import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks._average import update_average, zeros_like
from jaxkfac.blocks._random_factors_test import layer, random_factors

LAYERS = (layer("w", (3, 2), bias="b"), layer("scale", (2,), kind="scale", inputs=()))


pytestmark = pytest.mark.usefixtures("x64")


def means(factors):
    return {name: factors[name] for name in factors}


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.allclose(x, y, rtol=1e-13), (x, y)


def test_first_step_is_the_steps_own_mean():
    factors = random_factors(LAYERS, jax.random.key(0))
    average = update_average(zeros_like(jax.eval_shape(lambda: factors)), factors, 0.95)
    assert_close(means(average), means(factors))


@pytest.mark.slow
def test_steps_weigh_by_decay_and_by_count():
    small = random_factors(LAYERS, jax.random.key(0), rows=10)
    large = random_factors(LAYERS, jax.random.key(1), rows=40)
    average = update_average(update_average(zeros_like(small), small, 0.5), large, 0.5)
    weights = 0.5 * 10 / (0.5 * 10 + 40), 40 / (0.5 * 10 + 40)
    expected = weights[0] * small["w"].a + weights[1] * large["w"].a
    assert_close(average["w"].a, expected)
    assert float(average.terms) == 0.5 * float(small.terms) + float(large.terms)


def test_average_keeps_its_dtypes_under_a_traced_decay():
    factors = random_factors(LAYERS, jax.random.key(0))
    average = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), factors)
    out = jax.jit(update_average)(average, factors, 0.9)
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(jnp.float32)}
    assert jnp.allclose(out["w"].a, factors["w"].a.astype(jnp.float32), rtol=1e-6)


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_decay_out_of_range_is_refused(decay):
    factors = random_factors(LAYERS, jax.random.key(0))
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\)"):
        update_average(factors, factors, decay)


def test_factors_of_other_layers_are_named():
    factors = random_factors(LAYERS, jax.random.key(0))
    other = random_factors((*LAYERS[1:], layer("v", (3, 2), bias="b")), jax.random.key(0))
    with pytest.raises(ValueError, match="factors lack the layer 'w'"):
        update_average(factors, other, 0.9)
    with pytest.raises(ValueError, match="have the layer 'w', which was not expected"):
        update_average(random_factors(LAYERS[1:], jax.random.key(0)), factors, 0.9)
    wider = random_factors((layer("w", (4, 2), bias="b"), LAYERS[1]), jax.random.key(0))
    with pytest.raises(ValueError, match="in_features=4.*in_features=3") as caught:
        update_average(factors, wider, 0.9)
    assert len(str(caught.value)) <= 200
    separate = random_factors(LAYERS, jax.random.key(0), bias="separate")
    with pytest.raises(ValueError, match="bias='separate', expected 'joint'"):
        update_average(factors, separate, 0.9)


def test_a_count_of_zero_is_nothing_new():
    """Between the collections of ``every=``; and each sum goes by its own count."""
    one, two = (random_factors(LAYERS, jax.random.key(i)) for i in range(2))
    nothing = zeros_like(one)
    average = update_average(update_average(zeros_like(one), one, 0.5), nothing, 0.5)
    assert_close(average, one)
    assert_close(update_average(average, two, 0.5), update_average(one, two, 0.5))
    rows_alone = dataclasses.replace(nothing, a_sums=two.a_sums, a_counts=two.a_counts)
    mixed = jax.jit(update_average)(one, rows_alone, 0.5)
    assert_close(mixed.g_sums, one.g_sums)
    assert_close(mixed.a_sums, update_average(one, two, 0.5).a_sums)
    assert_close((mixed.terms, mixed.diagonals), (one.terms, one.diagonals))


def test_the_gradients_own_count_adds_up_where_both_have_it():
    plain, other = (random_factors(LAYERS, jax.random.key(i)) for i in range(2))
    one, two = (dataclasses.replace(f, loss_terms=f.terms) for f in (plain, other))
    assert (one + two).loss_terms == one.terms + two.terms
    assert update_average(one, two, 0.5).loss_terms == 0.5 * one.terms + two.terms
    assert_close(one + other, plain + other)
    assert_close(update_average(plain, two, 0.5), update_average(plain, other, 0.5))


def test_an_expert_without_rows_keeps_its_average():
    """Each entry of a stack has a count of its own."""

    def stacked(seed, counts):
        one = random_factors(LAYERS, jax.random.key(seed))
        sums = jnp.stack([count * one.a_sums["w"] for count in counts])
        return dataclasses.replace(one, a_sums={"w": sums}, a_counts={"w": jnp.asarray(counts)})

    first, second = stacked(0, [2.0, 3.0]), stacked(1, [4.0, 0.0])
    average = update_average(first, second, 0.5)
    for table in ("a_sums", "a_counts"):
        found, old, new = (getattr(x, table)["w"] for x in (average, first, second))
        assert_close(found[1], old[1])
        assert_close(found[0], 0.5 * old[0] + new[0])


def test_a_gradients_count_that_only_one_summand_has_is_dropped():
    one, other = (random_factors(LAYERS, jax.random.key(i)) for i in range(2))
    counted = dataclasses.replace(one, loss_terms=jnp.asarray(7.0))
    for total in (counted + other, other + counted):
        assert total.loss_terms is None
        np.testing.assert_allclose(total.a_sums["w"], one.a_sums["w"] + other.a_sums["w"])
    both = counted + dataclasses.replace(other, loss_terms=jnp.asarray(2.0))
    assert float(both.loss_terms) == 9
