"""Adaptive K-FAC never ends above its start, bad input included, and ``check_state`` helps.

The table of many problems is ``python -m benchmarks.robust``.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkfac as jk
from benchmarks.optimizers.problems import PROBLEMS
from benchmarks.robust._runs import RATES, UNCHANGED, VARIATIONS, Runs
from benchmarks.robust._scripts import SCRIPTS

STEPS = 60


# ---------------- situations of the table


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", SCRIPTS, ids=lambda problem: problem.name)
def test_the_three_scripts_end_below_their_start(problem):
    """Seed 6 of the recurrent network leaves its plateau last; see the record."""
    run = Runs("kfac")
    for seed in (0, 1, 2, 6) if problem.name == "spirals" else (0, 1):
        with jax.numpy_dtype_promotion("standard"):
            found = run(problem, UNCHANGED, seed)
        assert found["last"] < 0.5 * found["first"], found
        if problem.name != "spirals":  # one batch, so that every loss is of the same examples
            assert found["highest"] == found["first_loss"], found


@pytest.mark.exhaustive
@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda variation: variation.name)
def test_a_changed_perceptron_ends_below_its_start_and_is_not_stuck(variation):
    problem, run, adam = PROBLEMS["perceptron"], Runs("kfac"), Runs("adam")
    for seed in range(3):
        with jax.numpy_dtype_promotion("standard"):
            found = run(problem, variation, seed)
            peers = [adam(problem, variation, seed, rate)["last"] for rate in RATES]
        assert found["last"] < found["first"], found
        assert found["first"] - found["last"] >= 0.5 * (found["first"] - min(peers)), (found, peers)


# ---------------- a small network whose outputs are saturated


def saturated(n=64):
    """Parameters and a batch of features up to 30."""
    rng, sizes = np.random.default_rng(0), (9, 64, 64, 2)
    scaled = [rng.normal(size=s) / s[0] ** 0.5 for s in zip(sizes, sizes[1:], strict=False)]
    x = 30 * rng.random((n, 9))
    params = [{"w": w.astype(np.float32)} for w in scaled]
    batch = x.astype(np.float32), (x[:, 0] > 15).astype(np.int32)
    return jax.tree.map(jnp.asarray, (params, batch))


def network(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"])
    return x @ params[-1]["w"]


STATS = jk.value_grad_and_factors(jk.Objective(network, jk.Categorical()), fisher="mc")


def trained(make, batch=None, *, adapts, steps=STEPS, first=1.0, rise=0.0):
    """Losses and the last state of ``make(like)``, on one batch.

    Args:
        make: Maps ``like`` to the optimizer.
        batch: By default 64 saturated examples.
        adapts: Whether it takes ``stats.adaptation``.
        steps: Their number.
        first: Factor of the inputs at the first step.
        rise: What ``value_fn`` adds to the loss.
    """
    params, default = saturated()
    batch = default if batch is None else batch
    tx = make(STATS.factor_shapes(params, batch))

    def step(carry, given):
        (params, state), (key, factor) = carry, given
        rows = (batch[0] * factor, batch[1])
        value, grads, factors = STATS(params, rows, key)
        more = STATS.adaptation(params, rows, key) if adapts else {"value": value}
        if rise:
            loss = more["value_fn"]
            more["value_fn"] = lambda params: loss(params) + rise
        updates, state = tx.update(grads, state, params, factors=factors, **more)
        return (optax.apply_updates(params, updates), state), value

    keys, factors = jax.random.split(jax.random.key(0), steps), jnp.ones(steps).at[0].set(first)
    scan = jax.jit(lambda *carry: jax.lax.scan(step, carry, (keys, factors)))
    (_, state), losses = scan(params, tx.init(params))
    return np.asarray(losses), state


def complaints(state):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        jk.check_state(state)
    return [str(warning.message) for warning in said]


BAD = {
    "a batch of one": {"n": 1},
    "NaN at the first step": {"first": np.nan},
    "inputs of 1e6": {"scale": 1e6},
    "inputs of 1e-6": {"scale": 1e-6},
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_survived(bad):
    options = dict(BAD[bad])
    x, labels = saturated(options.pop("n", 64))[1]
    batch = x * options.pop("scale", 1.0), labels
    losses, state = trained(lambda like: jk.kfac(like=like), batch, adapts=True, **options)
    losses = losses[np.isfinite(losses)]
    assert len(losses) >= STEPS - 1 and losses[-1] <= losses[0] == max(losses)
    assert state.skipped == (1 if bad.startswith("NaN") else 0)
    assert len(complaints(state)) == state.skipped


@pytest.mark.slow
def test_a_loss_of_zero_stays_zero():
    objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
    params, batch = {"w": jnp.zeros((3, 2))}, (jnp.eye(3), jnp.zeros((3, 2)))
    stats = jk.value_grad_and_factors(objective, fisher="exact")
    tx = jk.kfac(like=stats.factor_shapes(params, batch))

    @jax.jit
    def step(state):
        value, grads, factors = stats(params, batch)
        more = stats.adaptation(params, batch)
        return value, *tx.update(grads, state, params, factors=factors, **more)

    state = tx.init(params)
    for _ in range(3):
        value, updates, state = step(state)
        assert value == optax.tree.norm(updates) == 0
    adapted = state.adaptation
    assert (adapted.rejected, adapted.disagreed, state.skipped) == (0, 0, 0)
    assert np.isfinite(adapted.damping) and complaints(state) == []


@pytest.mark.slow
def test_the_remedies_for_a_fixed_rate_of_ten_work():
    """Unbounded, it diverges; the default norm constraint bounds even this rate."""
    unbounded = {"damping": 1e-3, "norm_constraint": None}
    losses, state = trained(lambda like: jk.kfac(10.0, like=like, **unbounded), adapts=False)
    assert not losses[-1] < losses[0]
    said = complaints(state)[0]
    assert re.search(r"state\.diverged.*jk\.kfac\(like=like\).*jk\.kfac\(0\.1, like=like\)", said)
    for make, adapts in (
        (lambda like: jk.kfac(like=like), True),
        (lambda like: jk.kfac(0.1, like=like), False),
        (lambda like: jk.kfac(10.0, like=like), False),
    ):
        losses, state = trained(make, adapts=adapts)
        assert losses[-1] < 0.1 * losses[0] and complaints(state) == []


@pytest.mark.exhaustive
def test_the_remedies_for_an_adaptive_rate_with_a_fixed_damping_work():
    losses, state = trained(lambda like: jk.kfac(like=like, damping=0.03), adapts=True)
    assert not losses[-1] < losses[0]
    said = complaints(state)[0]
    assert re.search(r"damping=jk\.LevenbergMarquardt\(\).*jk\.kfe_adam\(0\.01, like=like\)", said)
    for make, adapts in (
        (lambda like: jk.kfac(like=like, damping=jk.LevenbergMarquardt()), True),
        (lambda like: jk.kfe_adam(0.01, like=like), False),
    ):
        losses, state = trained(make, adapts=adapts)
        assert losses[-1] < 0.1 * losses[0] and complaints(state) == []


@pytest.mark.slow
def test_losses_that_disagree_are_named_and_do_not_raise_the_damping_without_end():
    losses, state = trained(lambda like: jk.kfac(like=like), adapts=True, rise=1e3, steps=80)
    assert losses[-1] == losses[0]
    adapted = state.adaptation
    assert adapted.rejected == 80 and adapted.disagreed >= 10
    assert adapted.damping < 1e12
    (said,) = complaints(state)
    assert re.search(r"state\.adaptation\.disagreed.*the same batch, key and state", said)
