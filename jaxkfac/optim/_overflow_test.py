"""Batches whose factors no average can hold are skipped, and a lost average begins anew."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.optim import kfac, kfe_adam, multi_steps
from jaxkfac.optim._watch import is_in_range

HUGE = 2.2e18  # three batches of such inputs have finite factors, and an infinite average
ORDINARY = 12
TRANSFORMS = {
    "fixed": lambda like: kfac(0.1, like=like, refresh_every=2),
    "eigh": lambda like: kfac(0.1, like=like, refresh_every=2, inverse="eigh"),
    "adaptive": lambda like: kfac(like=like, refresh_every=2),
    "kfe_adam": lambda like: kfe_adam(0.01, like=like, refresh_every=2),
}


def model(params, x):
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]


KEYS = jax.random.split(jax.random.key(0), 5)
PARAMS = {
    name: jax.random.normal(key, shape) / 2
    for name, key, shape in zip("abc", KEYS, [(6, 5), (5, 5), (5, 4)], strict=False)
}
X, Y = jax.random.normal(KEYS[3], (ORDINARY, 8, 6)), jnp.arange(8) % 4
STATS = value_grad_and_factors(Objective(model, Categorical()), fisher="mc")
LIKE = STATS.factor_shapes(PARAMS, (X[0], Y))
FACTORS = [STATS(PARAMS, (x, Y), key)[2] for x, key in zip(X, jax.random.split(KEYS[4], 12))]
GRADS = STATS(PARAMS, (X[0], Y), KEYS[4])[1]


def trained(tx, inputs, keys, *, adapts=False):
    """Parameters and state after a batch of each of the inputs, in one scan."""

    def step(carry, given):
        (params, state), (x, key) = carry, given
        _, grads, factors = STATS(params, (x, Y), key)
        more = STATS.adaptation(params, (x, Y), key) if adapts else {}
        updates, state = tx.update(grads, state, params, factors=factors, **more)
        return (jax.tree.map(jnp.add, params, updates), state), None

    first = PARAMS, tx.init(PARAMS)
    return jax.jit(lambda: jax.lax.scan(step, first, (inputs, keys))[0])()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRANSFORMS)
def test_batches_of_outsized_factors_leave_training_as_if_they_had_not_come(name):
    tx, keys = TRANSFORMS[name](LIKE), jax.random.split(jax.random.key(1), ORDINARY)
    run = functools.partial(trained, tx, adapts=name == "adaptive")
    expected, _ = run(X, keys)
    which = jnp.array([0, 1, 0, 0, 0, *range(2, ORDINARY)])
    inputs = X[which].at[2:5].multiply(HUGE)
    params, state = run(inputs, keys[which])
    assert int(state.skipped) == int(state.watch.outsized) == 3
    assert int(state.watch.restarted) == 0 and int(state.step) == ORDINARY
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.stacked_average))
    for path, x in expected.items():
        np.testing.assert_array_equal(params[path], x, err_msg=path)
        assert not np.array_equal(x, PARAMS[path])


@pytest.mark.exhaustive
def test_a_gradient_whose_covariance_is_outsized_is_skipped():
    """In SOAP's order, where the gradient is what is averaged."""
    tx = kfe_adam(0.01, like=LIKE, covariance="gradient")
    state = tx.init(PARAMS)
    for scale in (1.0, 1e12, 1.0):
        grads = {name: scale * x for name, x in GRADS.items()}
        _, state = tx.update(grads, state, PARAMS, factors=None)
    assert (int(state.step), int(state.skipped), int(state.watch.outsized)) == (1, 1, 1)


def lose(state, table, name):
    """The state with one infinite average, as earlier versions left it in checkpoints."""
    held = getattr(state.stacked_average, table)
    held = held | {name: held[name].at[..., 1, 1].set(jnp.inf).at[..., 0, 1].set(jnp.nan)}
    return state._replace(
        stacked_average=dataclasses.replace(state.stacked_average, **{table: held})
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("table", ["a_sums", "g_sums"])
@pytest.mark.parametrize("name", ["fixed", "eigh", "kfe_adam"])
def test_an_average_that_is_infinite_begins_anew_and_the_others_go_on(name, table):
    tx = TRANSFORMS[name](LIKE)
    step = jax.jit(lambda s, f: tx.update(GRADS, s, PARAMS, factors=f)[1])
    whole = tx.init(PARAMS)
    for factors in FACTORS[:3]:
        whole = step(whole, factors)
    key = next(iter(getattr(whole.stacked_average, table)))
    lost, before = lose(whole, table, key), whole
    for i, factors in enumerate(FACTORS[3:]):
        whole, lost = step(whole, factors), step(lost, factors)
        assert int(lost.watch.restarted) == 1 and int(lost.kept) == 0
        if i == 0:
            mean, terms = FACTORS[3], whole.stacked_average.terms
            expected = getattr(mean, table)[key]
            if table == "g_sums":
                expected = expected * (terms / mean.terms)
            found = getattr(lost.stacked_average, table)[key]
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    for other in ("a_sums", "g_sums"):
        for k, x in getattr(whole.stacked_average, other).items():
            same = np.array_equal(getattr(lost.stacked_average, other)[k], x)
            assert same == ((other, k) != (table, key))
    assert int(whole.watch.restarted) == 0
    changed = jax.tree.map(
        lambda x, y: bool((x != y).any()), lost.stacked_bases, before.stacked_bases
    )
    assert all(jax.tree.leaves(changed))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(lost.stacked_bases))


@pytest.mark.exhaustive
def test_an_average_without_new_rows_waits_for_some():
    tx = TRANSFORMS["fixed"](LIKE)
    state = lose(tx.update(GRADS, tx.init(PARAMS), PARAMS, factors=FACTORS[0])[1], "g_sums", "b")
    nothing = jax.tree.map(jnp.zeros_like, FACTORS[0])
    for factors in (None, nothing):
        _, state = tx.update(GRADS, state, PARAMS, factors=factors)
    assert int(state.watch.restarted) == 0
    _, state = tx.update(GRADS, state, PARAMS, factors=FACTORS[1])
    assert int(state.watch.restarted) == 1
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.stacked_average))


@pytest.mark.exhaustive
def test_a_micro_batch_of_outsized_factors_is_left_out_of_its_group():
    def end(sequence):
        tx = multi_steps(TRANSFORMS["fixed"](LIKE), len(sequence))
        step = jax.jit(lambda s, f: tx.update(GRADS, s, PARAMS, factors=f))
        state, updates = tx.init(PARAMS), None
        for factors in sequence:
            updates, state = step(state, factors)
        return updates, state

    expected, _ = end([FACTORS[0], FACTORS[1]])
    sums = {name: HUGE**2 * x for name, x in FACTORS[2].a_sums.items()}
    outsized = dataclasses.replace(FACTORS[2], a_sums=sums)
    updates, state = end([FACTORS[0], outsized, FACTORS[1]])
    assert (int(state.skipped), int(state.inner.skipped), int(state.inner.step)) == (1, 0, 1)
    for path, x in expected.items():
        np.testing.assert_array_equal(updates[path], x, err_msg=path)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_of_every_table_are_in_range_up_to_the_root_of_the_largest_number(dtype):
    layers = (layer("w", (3, 4), bias="b"), layer("u", (4, 2), g_dense=False))
    factors = random_factors(layers, jax.random.key(0), dtype=dtype)
    assert is_in_range(factors)
    for table, name in [("a_sums", "w"), ("g_sums", "w"), ("g_sums", "u")]:
        for size, fits in [(1.7e19, True), (2e19, False), (jnp.nan, False)]:
            sums = getattr(factors, table)
            large = sums | {name: jnp.full_like(sums[name], size)}
            assert bool(is_in_range(dataclasses.replace(factors, **{table: large}))) is fits
