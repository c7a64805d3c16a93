"""Periods of collection, accumulation and refreshes that never meet are seen."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.optim import LevenbergMarquardt, Optimizer, kfac, kfe_adam, multi_steps

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


# ---------------- collected for the refreshes


def collections(opt, calls, *, spoilt=()):
    """The calls whose factors were averaged, and the last state."""
    params, state, found = PARAMS, opt.init(PARAMS, BATCH), []
    step = jax.jit(opt.step)
    for n in range(calls):
        x, y = BATCH
        before = _average_of(state).terms
        params, state, _ = step(params, state, (x * jnp.nan if n in spoilt else x, y))
        found += [n] if _average_of(state).terms != before else []
    return found, state


def _average_of(state):
    return _inner(state).stacked_average


def _inner(state):
    """The state of kfac or kfe_adam, also behind ``multi_steps`` and ``inject_hyperparams``."""
    inner = getattr(state.inner, "inner", state.inner)
    return getattr(inner, "inner_state", inner)


COLLECTED = {
    "kfe_adam": (lambda: kfe_adam(0.01), {}, [0, 10]),
    "kfac": (kfac, {}, [0, 5, 10]),
    "fixed": (lambda: kfac(0.1), {}, [0, 5, 10]),
    "given": (lambda: kfac(0.1, refresh_every=4), {}, [0, 4, 8]),
    "each": (lambda: kfe_adam(0.01), {"every": 1}, list(range(12))),
    "every=3": (lambda: kfac(0.1), {"every": 3}, [0, 3, 6, 9]),
    "stagger": (lambda: kfac(0.1, stagger=True), {}, list(range(12))),
    "groups": (lambda: multi_steps(kfe_adam(0.01, refresh_every=3), 2), {}, [1, 7]),
    "injected": (lambda: optax.inject_hyperparams(kfac)(0.1), {}, [0, 5, 10]),
    "burn-in": (lambda: kfac(damping=LevenbergMarquardt(burn_in=2)), {}, [0, 1, 2, 7]),
}


@pytest.mark.default(2, slow=2)
@pytest.mark.parametrize(("build", "options", "expected"), COLLECTED.values(), ids=COLLECTED)
def test_factors_are_collected_at_the_updates_that_refresh(build, options, expected):
    opt = Optimizer(OBJECTIVE, build(), **options)
    found, state = collections(opt, 12)
    assert found == expected
    assert int(_inner(state).missed) == 0 and int(_inner(state).watch.stale) == 0


def test_an_update_that_is_skipped_collects_again():
    opt = Optimizer(OBJECTIVE, kfac(0.1))
    found, state = collections(opt, 9, spoilt=(0, 6, 7))
    assert found == [1, 8] and int(state.inner.step) == 6 and int(state.inner.missed) == 0


def test_periods_and_decay_follow_the_collection():
    of = lambda **options: value_grad_and_factors(OBJECTIVE, **options)
    for every, refreshes in ((1, 10), (4, 4)):
        stats = of(every=every)
        like = stats.factor_shapes(PARAMS, BATCH)
        assert like.origin.every == every
        written = {"refresh_every": refreshes, "decay": 0.95**every}
        ends = [
            run(tx, range(5), stats=stats)
            for tx in (kfac(0.1, like=like), kfac(0.1, like=like, **written))
        ]
        jax.tree.map(np.testing.assert_array_equal, *ends)


def test_a_state_of_another_period_goes_on_with_that_of_the_options():
    old = Optimizer(OBJECTIVE, kfe_adam(0.01), every=1)
    params, state, _ = old.step(PARAMS, old.init(PARAMS, BATCH), BATCH)
    new = Optimizer(OBJECTIVE, kfe_adam(0.01))
    held = flax.serialization.from_bytes(
        new.init(PARAMS, BATCH), flax.serialization.to_bytes(state)
    )
    assert held.form.every == 10
    terms = _average_of(held).terms
    _, after, _ = jax.jit(new.step)(params, held, BATCH)
    assert _average_of(after).terms == terms and int(after.inner.step) == 2
