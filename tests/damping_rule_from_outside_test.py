"""A damping rule made outside the library has its own state, and needs only what it reads."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jaxkfac as jk

PARAMS = {"w": jnp.array([[0.5, -0.3], [0.2, 0.1], [-0.4, 0.6]]), "b": jnp.array([0.1, -0.2])}
X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)), jnp.float32)
BATCH = X, jnp.tanh(X[:, :2] * 3)
OBJECTIVE = jk.Objective(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), jk.Gaussian())
STATS = jk.value_grad_and_factors(OBJECTIVE, fisher="exact")
LIKE = STATS.factor_shapes(PARAMS, BATCH)


@dataclasses.dataclass(frozen=True)
class RootOfGradientNorm(jk.DampingRule):
    """A damping in proportion to the square root of the averaged gradient norm."""

    share: float = 0.3
    decay: float = 0.5

    def begin(self, params):
        return self.share, {"norm": jnp.zeros(()), "calls": jnp.zeros((), jnp.int32)}

    def before(self, damping, state, upcoming):
        now = optax.tree.norm(upcoming.gradient)
        average = self.decay * state["norm"] + (1 - self.decay) * now
        norm = jnp.where(upcoming.step == 0, now, average)
        return self.share * jnp.sqrt(norm), state | {"norm": norm}

    def after(self, damping, state, trial):
        return damping, state | {"calls": state["calls"] + 1}


def steps(tx, number, *, more=lambda params: {}, damaged=()):
    """Parameters, state and gradient norms of some steps."""

    def step(carry, i):
        params, state = carry
        _, grads, factors = STATS(params, BATCH)
        grads = jax.tree.map(
            lambda g: jnp.where(jnp.isin(i, jnp.array([-1, *damaged])), jnp.nan, g), grads
        )
        updates, state = tx.update(grads, state, params, factors=factors, **more(params))
        return (optax.apply_updates(params, updates), state), (
            optax.tree.norm(grads),
            state.adaptation.damping,
        )

    carry = PARAMS, tx.init(PARAMS)
    carry, (norms, dampings) = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(number)))(carry)
    return carry, np.asarray(norms), np.asarray(dampings)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["exact", "pi"])
def test_a_rule_of_gradients_needs_gradients_alone(mode):
    """Each step is that of a given damping, the damping that NumPy computes of the norms."""
    tx = jk.kfac(0.3, like=LIKE, damping=RootOfGradientNorm(), damping_mode=mode, refresh_every=1)
    (params, state), norms, dampings = steps(tx, 4)
    averages = [norms[0]]
    for norm in norms[1:]:
        averages.append(0.5 * averages[-1] + 0.5 * norm)
    np.testing.assert_allclose(dampings, 0.3 * np.sqrt(averages), rtol=1e-6)
    assert int(state.adaptation.rule["calls"]) == 4
    given = lambda step: jnp.asarray(dampings)[step]
    same = jk.kfac(0.3, like=LIKE, damping=given, damping_mode=mode, refresh_every=1)
    wanted, moved = PARAMS, same.init(PARAMS)
    for _ in range(4):
        _, grads, factors = STATS(wanted, BATCH)
        updates, moved = same.update(grads, moved, wanted, factors=factors)
        wanted = optax.apply_updates(wanted, updates)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], wanted[name], rtol=2e-6, atol=1e-7)


@pytest.mark.slow
def test_a_skipped_update_leaves_the_rule_as_it_was():
    tx = jk.kfac(0.3, like=LIKE, damping=RootOfGradientNorm())
    (params, state), *_ = steps(tx, 4, damaged=(0, 2))
    (wanted, clean), *_ = steps(tx, 2)
    assert (int(state.skipped), int(state.adaptation.rule["calls"])) == (2, 2)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], wanted[name], rtol=1e-6)
    np.testing.assert_allclose(state.adaptation.rule["norm"], clean.adaptation.rule["norm"])


@pytest.mark.slow
def test_a_chosen_rate_asks_for_the_curvature_and_the_loss_may_come():
    tx = jk.kfac(like=LIKE, damping=RootOfGradientNorm())
    _, grads, factors = STATS(PARAMS, BATCH)
    with pytest.raises(ValueError, match="needs curvature: tx.update"):
        tx.update(grads, tx.init(PARAMS), PARAMS, factors=factors)
    whole = lambda params: STATS.adaptation(params, BATCH)
    curvature = lambda params: {"curvature": whole(params)["curvature"]}
    (params, state), *_ = steps(tx, 5, more=curvature)
    (same, known), *_ = steps(tx, 5, more=whole)
    assert OBJECTIVE(params, BATCH) < 0.9 * OBJECTIVE(PARAMS, BATCH)
    np.testing.assert_allclose(params["w"], same["w"], rtol=1e-5)
    assert state.adaptation.ratio == 1 != known.adaptation.ratio
    assert state.adaptation.rejected == known.adaptation.rejected == 0


@dataclasses.dataclass(frozen=True)
class Recorded(RootOfGradientNorm):
    """Reads the loss, and keeps what it was told of the last update."""

    reads_loss: ClassVar[bool] = True
    every: int = 1
    safeguard: bool = True

    def after(self, damping, state, trial):
        told = {"ratio": trial.ratio, "change": trial.change, "due": trial.due}
        return damping, state | told

    def begin(self, params):
        damping, state = super().begin(params)
        numbers = {"ratio": jnp.zeros(()), "change": jnp.zeros(()), "due": jnp.asarray(False)}
        return damping, state | numbers


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, "quadratic"])
def test_a_rule_that_reads_the_loss_is_told_the_ratio(rate):
    tx = jk.kfac(rate, momentum=0.0, like=LIKE, damping=Recorded(), norm_constraint=None)
    value, grads, factors = STATS(PARAMS, BATCH)
    with pytest.raises(ValueError, match="needs value and value_fn and curvature: tx.update"):
        tx.update(grads, tx.init(PARAMS), PARAMS, factors=factors)
    more = STATS.adaptation(PARAMS, BATCH)
    updates, state = jax.jit(
        lambda state: tx.update(grads, state, PARAMS, factors=factors, **more)
    )(tx.init(PARAMS))
    told, moved = state.adaptation.rule, optax.apply_updates(PARAMS, updates)
    actual = OBJECTIVE(moved, BATCH) - value
    assert bool(told["due"])
    np.testing.assert_allclose(told["ratio"] * told["change"], actual, rtol=1e-3)
    np.testing.assert_allclose(told["ratio"], state.adaptation.ratio)


@pytest.mark.slow
def test_a_rule_of_ones_own_restarts_from_bytes_and_runs_in_groups():
    tx = jk.kfac(0.3, like=LIKE, damping=RootOfGradientNorm())
    (params, state), *_ = steps(tx, 3)
    restored = serialization.from_bytes(tx.init(PARAMS), serialization.to_bytes(state))
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)
    other = jk.kfac(0.3, like=LIKE, damping=jk.LevenbergMarquardt()).init(PARAMS)
    with pytest.raises(ValueError, match="the bytes hold rule"):
        serialization.from_bytes(other, serialization.to_bytes(state))
    whole = jk.multi_steps(tx, 2)
    group = whole.init(PARAMS)
    for half in (slice(None, 6), slice(6, None)):
        rows = jax.tree.map(lambda x, half=half: x[half], BATCH)
        _, grads, factors = STATS(PARAMS, rows)
        updates, group = whole.update(grads, group, PARAMS, factors=factors)
    _, grads, factors = STATS(PARAMS, BATCH)
    wanted, _ = tx.update(grads, tx.init(PARAMS), PARAMS, factors=factors)
    np.testing.assert_allclose(updates["w"], wanted["w"], rtol=1e-5)


def test_a_damping_that_is_no_rule_is_refused_with_what_may_be():
    with pytest.raises(TypeError, match=r"damping=<class .*: expected .* a number"):
        jk.kfac(0.1, like=LIKE, damping=RootOfGradientNorm)


@dataclasses.dataclass(frozen=True)
class Guarded(RootOfGradientNorm):
    """Has a safeguard, and reads no loss itself."""

    safeguard: bool = True


@pytest.mark.parametrize("rate", [0.1, "quadratic"])
def test_a_safeguard_asks_for_the_loss(rate):
    """Without the loss it would reject nothing, and not say so."""
    tx = jk.kfac(rate, like=LIKE, damping=Guarded())
    grads, factors = jax.tree.map(jnp.zeros_like, (PARAMS, LIKE))
    with pytest.raises(ValueError, match="needs value and value_fn and curvature: tx.update"):
        tx.update(grads, tx.init(PARAMS), PARAMS, factors=factors)
