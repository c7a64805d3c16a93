"""Every Fisher type, with masks, positions and both sharings, against the brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.blocks import with_origin
from tests._cases import case
from tests._checks import (
    LIKELIHOODS,
    assert_factors_close,
    assert_tree_close,
    check,
    objective_of,
)
from tests._oracle import oracle
from tests._programs import attention, attention_params, labels, mlp, mlp_params, normal

pytestmark = pytest.mark.exhaustive  # minutes for the file; make test-exhaustive

OTHERS = ("mc", "exact", "forward", "exact_if_terms_do_not_mix")
SHARINGS = ("expand", "reduce")


def _drawn(fisher, targets, samples=2):
    """Labels of the targets' shape for each sample, where a Fisher type takes them."""
    if fisher != "mc":
        return None
    return labels(8, samples, *targets.shape)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", OTHERS)
@pytest.mark.parametrize("name", ["attention", "scan"])
def test_factors_where_tokens_mix_and_in_a_scan(x64, fisher, sharing, name):
    model, plain, params, (x, y) = case(name)
    check(
        model, params, (x, y), oracle_model=plain, fisher=fisher, sharing=sharing,
        labels=_drawn(fisher, y),
    )  # fmt: skip


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", OTHERS)
def test_masked_terms_and_absent_positions(x64, fisher, sharing):
    model, _, params, (x, y) = case("attention")
    here = jnp.asarray(np.arange(3) < np.array([[3], [2], [1]]))
    mask = jnp.asarray([[1, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
    check(
        model, params, (x, y, mask), fisher=fisher, sharing=sharing, positions=here,
        labels=_drawn(fisher, y),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["recurrent", "embedded", "experts", "uneven uses"])
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_layer_kinds(x64, fisher, name):
    model, plain, params, (x, y) = case(name)
    check(
        model, params, (x, y), oracle_model=plain, fisher=fisher, labels=_drawn(fisher, y)
    )  # fmt: skip


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", ["mc", "exact"])
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_other_likelihoods(x64, likelihood, fisher, sharing):
    x, y, drawn = normal(1, 3, 2, 4), normal(2, 3, 2, 3), normal(3, 2, 3, 2, 3, scale=2.0)
    if likelihood == "bernoulli":
        y, drawn = (y > 0).astype(y.dtype), (drawn > 0).astype(y.dtype)
    check(
        attention, attention_params(), (x, y), likelihood=likelihood, fisher=fisher,
        sharing=sharing, labels=drawn if fisher == "mc" else None,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["embedded", "nested scan"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_forward_has_identities_for_g_and_mean_squares_for_scales(x64, name, sharing):
    model, plain, params, batch = case(name)
    *_, factors = check(model, params, batch, oracle_model=plain, fisher="forward", sharing=sharing)
    g = np.asarray(factors["head"].g)
    np.testing.assert_array_equal(g, np.eye(len(g)))


# ------------------------------------------------------- what each type depends on


def test_forward_needs_no_key_and_no_labels(x64):
    model, _, params, (x, y) = case("rows")
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model), fisher="forward"))
    one, two = (stats(params, (x, t))[2] for t in (y, (y + 1) % 3))
    assert_tree_close(one, two, 0.0)


def test_the_exact_fisher_does_not_read_the_targets(x64):
    model, _, params, (x, y) = case("attention")
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model), fisher="exact"))
    one, two = (stats(params, (x, t)) for t in (y, (y + 1) % 3))
    assert_tree_close(one.factors, two.factors, 0.0)
    assert float(abs(one.value - two.value)) > 1e-3


def test_all_fisher_types_agree_on_everything_but_g(x64):
    """A, the counts and the number of terms never depend on what is pulled back."""
    model, _, params, (x, y) = case("attention")
    first = jk.value_grad_and_factors(objective_of(model))(params, (x, y))[2]
    for fisher in OTHERS:
        stats = jk.value_grad_and_factors(objective_of(model), fisher=fisher)
        drawn = {} if fisher != "mc" else {"labels": labels(8, 2, *y.shape)}
        other = stats(params, (x, y), **drawn)[2]
        assert_tree_close((other.a_sums, other.a_counts), (first.a_sums, first.a_counts), 1e-13)
        assert float(other.terms) == float(first.terms)


def test_forward_factors_of_the_oracle_hold_for_micro_batches(x64):
    """G stays the identity however batches add up."""
    model, _, params, (x, y) = case("rows")
    stats = jk.value_grad_and_factors(objective_of(model), fisher="forward")
    parts = [stats(params, (x[i], y[i]))[2] for i in (slice(0, 1), slice(1, 3))]
    assert_factors_close(
        parts[0] + parts[1], oracle(model, params, (x, y), fisher="forward"), 1e-10
    )


# ---------------------------------------------------------------------- exact


def test_the_shortcut_is_exact_where_no_layer_mixes_terms(x64):
    model, _, params, batch = case("rows")
    one, other = (
        jk.value_grad_and_factors(objective_of(model), fisher=fisher)(params, batch)[2]
        for fisher in ("exact", "exact_if_terms_do_not_mix")
    )
    assert_tree_close(with_origin(one, other.origin), other, 1e-12)


@pytest.mark.parametrize("name, sharing", [("attention", "expand"), ("rows", "reduce")])
def test_the_shortcut_is_biased_where_terms_mix(x64, name, sharing):
    """In attention, and in the sum over positions of reduce."""
    model, _, params, batch = case(name)
    first = {"attention": "v", "rows": "up/kernel"}[name]
    one, other = (
        np.asarray(
            jk.value_grad_and_factors(objective_of(model), fisher=fisher, sharing=sharing)(
                params, batch
            )[2][first].g
        )
        for fisher in ("exact", "exact_if_terms_do_not_mix")
    )
    assert np.abs(one - other).max() > 0.05 * np.abs(one).max()


# ------------------------------------------------------------------------- mc


def test_labels_equal_to_the_targets_give_the_empirical_fisher(x64):
    model, _, params, (x, y) = case("attention")
    stats = jk.value_grad_and_factors(objective_of(model), fisher="mc")
    drawn = stats(params, (x, y), labels=y[None])[2]
    given = jk.value_grad_and_factors(objective_of(model))(params, (x, y))[2]
    assert_tree_close(with_origin(drawn, given.origin), given, 1e-13)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_labelling_weighed_by_its_probability_gives_the_exact_fisher(x64, sharing):
    """One example of two terms that mix, three classes: nine labellings, no statistics."""
    p, x, y = attention_params(), normal(1, 1, 2, 4, scale=1.0), labels(2, 1, 2)
    objective = objective_of(attention)
    stats = jax.jit(jk.value_grad_and_factors(objective, fisher="mc", sharing=sharing))
    probability = np.asarray(jax.nn.softmax(objective.apply_fn(p, x)[0]))
    total: dict = {}
    for one, two in itertools.product(range(3), repeat=2):
        factors = stats(p, (x, y), labels=jnp.asarray([[[one, two]]]))[2]
        weight = probability[0, one] * probability[1, two]
        for name in factors:
            side = "g" if hasattr(factors[name], "g") else "diagonal"
            value = weight * np.asarray(getattr(factors[name], side))
            total[name] = total.get(name, 0.0) + value
    exact = jk.value_grad_and_factors(objective, fisher="exact", sharing=sharing)(p, (x, y))[2]
    for name, mean in total.items():
        side = "g" if hasattr(exact[name], "g") else "diagonal"
        np.testing.assert_allclose(mean, getattr(exact[name], side), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_sampled_labels_are_unbiased_under_reduce(x64, likelihood):
    """Labels shared between terms would put their cross terms into G."""
    p, x = attention_params(), normal(1, 2, 3, 4, scale=1.0)
    y = labels(2, 2, 3) if likelihood == "categorical" else jnp.zeros((2, 3, 3))
    count = 1500
    stats = jk.value_grad_and_factors(
        objective_of(attention, likelihood), fisher="mc", sharing="reduce"
    )
    keys = jax.random.split(jax.random.key(0), count)
    sampled = jax.jit(jax.vmap(lambda k: stats(p, (x, y), key=k)[2]))(keys)
    exact = oracle(attention, p, (x, y), likelihood=likelihood, fisher="exact", sharing="reduce")
    for name, block in exact.items():
        side = "diagonal" if block.g is None else "g"
        draws = np.asarray(getattr(jax.vmap(lambda f, n=name: f[n])(sampled), side))
        error = np.abs(draws.mean(0) - getattr(block, side))
        # five standard errors of the mean: about one false alarm in a million entries
        assert (error <= 5 * draws.std(0) / np.sqrt(count) + 1e-12).all(), name
        assert draws.std(0).max() > 0


def test_more_samples_have_less_variance_and_the_same_mean(x64):
    """Sixteen samples of one call: a sixteenth of the variance, within a factor of two.

    The variance of 400 draws is known to about 10% (its relative error is √(κ / 400) with a
    kurtosis κ of a few), so the factor is far from chance.
    """
    p, x, y = mlp_params(), normal(1, 2, 4), labels(2, 2)
    keys = jax.random.split(jax.random.key(1), 400)
    draws = {}
    for samples in (1, 16):
        stats = jk.value_grad_and_factors(objective_of(mlp), fisher="mc", samples=samples)
        run = jax.jit(jax.vmap(lambda k, s=stats: s(p, (x, y), key=k)[2]["down/kernel"].g))
        draws[samples] = np.trace(np.asarray(run(keys)), axis1=1, axis2=2)
    ratio = draws[1].var() / draws[16].var()
    assert 8 < ratio < 32
    exact = np.trace(oracle(mlp, p, (x, y), fisher="exact")["down/kernel"].g)
    for values in draws.values():
        assert abs(values.mean() - exact) < 5 * values.std() / np.sqrt(len(keys))


def test_samples_and_chunks_draw_the_same_labels(x64):
    p, x, y = mlp_params(), normal(1, 2, 4), labels(2, 2)
    one, other = (
        jk.value_grad_and_factors(objective_of(mlp), fisher="mc", samples=5, chunk=chunk)(
            p, (x, y), key=jax.random.key(2)
        )[2]
        for chunk in (1, 2)
    )
    assert_tree_close(one, other, 1e-13)
