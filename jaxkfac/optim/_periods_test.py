"""Periods of collection, accumulation and refreshes that never meet are seen."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.optim import kfac, multi_steps

OBJECTIVE = Objective(lambda p, x: x @ p["kernel"], Categorical())
STATS = value_grad_and_factors(OBJECTIVE, every=4)
PARAMS = {"kernel": jnp.ones((3, 2))}
BATCH = jnp.eye(3), jnp.arange(3) % 2
LIKE = STATS.factor_shapes(PARAMS, BATCH)


def run(tx, steps, *, compiled=False, stats=STATS):
    """The state after so many steps, whose numbers are ``steps``."""

    def update(state, step):
        _, grads, factors = stats(PARAMS, BATCH, step=step)
        return tx.update(grads, state, PARAMS, factors=factors)[1]

    state = tx.init(PARAMS)
    for step in steps:
        state = (jax.jit(update) if compiled else update)(state, step)
    return state


ODD = [1, 3, 5, 7, 9, 11]  # no multiple of 4 among them


@pytest.mark.slow
@pytest.mark.parametrize("inverse", ["eigh", "host"])
def test_outside_of_jit_kfac_raises_where_no_factors_came_by_the_second_refresh(inverse):
    tx = kfac(0.1, like=LIKE, refresh_every=2, inverse=inverse)
    state = run(tx, ODD[:3])
    assert int(state.missed) == 2
    with pytest.raises(ValueError, match="2 refreshes were due, and no factors have come"):
        run(tx, ODD[:4])


@pytest.mark.exhaustive
def test_outside_of_jit_multi_steps_raises_where_its_groups_hold_no_factors():
    tx = multi_steps(kfac(0.1, like=LIKE, refresh_every=1), 2)
    assert int(run(tx, ODD[:4]).inner.missed) == 2
    with pytest.raises(ValueError, match="2 refreshes were due, and no factors have come"):
        run(tx, ODD[:5])


@pytest.mark.slow
def test_multi_steps_that_is_given_counts_of_terms_alone_says_the_same():
    tx = multi_steps(kfac(0.1, like=LIKE, refresh_every=1), 1)
    state, grads = tx.init(PARAMS), jax.grad(OBJECTIVE)(PARAMS, BATCH)
    for _ in range(2):
        _, state = tx.update(grads, state, PARAMS, terms=3)
    with pytest.raises(ValueError, match="2 refreshes were due, and no factors have come"):
        tx.update(grads, state, PARAMS, terms=3)


@pytest.mark.slow
def test_inside_jit_the_state_says_how_many_refreshes_missed_their_factors():
    alone = kfac(0.1, like=LIKE, refresh_every=2)
    assert int(run(alone, ODD, compiled=True).missed) == 3
    grouped = run(multi_steps(alone, 2), ODD, compiled=True)
    assert int(grouped.inner.step) == 3 and int(grouped.inner.missed) == 2


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax.MultiSteps divides floats by an integer count
def test_optax_multi_steps_that_hands_on_the_last_micro_batch_alone_shows_in_the_state():
    """Its groups end at steps 3 and 7, and factors are collected at 0 and 4."""
    inner = kfac(0.1, like=LIKE, refresh_every=1)
    for tx, missed in ((optax.MultiSteps(inner, 4), 2), (multi_steps(inner, 4), 0)):
        state = run(tx, range(8), compiled=True)
        kept = state.inner if missed == 0 else state.inner_opt_state
        assert int(kept.step) == 2 and int(kept.missed) == missed


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("steps", "missed"), [(range(6), 0), ([1, 4, 5], 1), ([1, 2, 3, 4, 5], 2)])
def test_factors_that_come_later_than_the_first_step_are_no_error(steps, missed):
    """Nor where they come with the very call ahead of which two refreshes had none."""
    state = run(kfac(0.1, like=LIKE, refresh_every=2), steps)
    assert int(state.missed) == missed and float(state.average.terms) > 0
    grouped = run(multi_steps(kfac(0.1, like=LIKE, refresh_every=1), 1), [1, 3, 4, 5])
    assert int(grouped.inner.missed) == 2 and float(grouped.inner.average.terms) > 0


def test_a_step_that_is_skipped_misses_nothing():
    tx = kfac(0.1, like=LIKE, refresh_every=1)
    _, grads, factors = STATS(PARAMS, BATCH, step=1)
    grads = jax.tree.map(lambda x: x * jnp.nan, grads)
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS, factors=factors)
    assert int(state.skipped) == 1 and int(state.missed) == 0


@pytest.mark.slow
def test_eigenvalues_that_every_refresh_throws_away_are_refused():
    stats = value_grad_and_factors(OBJECTIVE)
    tx = kfac(0.1, like=stats.factor_shapes(PARAMS, BATCH), refresh_every=1)
    state = tx.init(PARAMS)
    _, grads, factors = stats(PARAMS, BATCH, bases=state.bases)
    with pytest.raises(ValueError, match="refresh_every=1 replaces these at every step"):
        tx.update(grads, state, PARAMS, factors=factors)
    with pytest.raises(ValueError, match="refresh_every=1 replaces these at every step"):
        kfac(0.1, like=factors, refresh_every=1)
