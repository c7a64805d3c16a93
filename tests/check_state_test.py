"""``jk.check_state`` says once what went wrong, wherever the state is, and nothing if all is well.

Each complaint is of a training that really has what it names.
"""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxkfac as jk

X, Y = jax.random.normal(jax.random.key(0), (8, 3)), jnp.arange(8) % 4
BATCH = X, Y
PARAMS = {"w": 0.5 * jax.random.normal(jax.random.key(1), (3, 4))}
OBJECTIVE = jk.Objective(lambda p, x: x @ p["w"], jk.Categorical())
STATS = jk.value_grad_and_factors(OBJECTIVE, fisher="mc")
LIKE = STATS.factor_shapes(PARAMS, BATCH)
LOSS, GRADS, FACTORS = STATS(PARAMS, BATCH, jax.random.key(2))
NAN = jax.tree.map(lambda x: x * jnp.nan, GRADS)
TERMS = len(Y)


# ------------------------------------------------------------------ where a state may be


class Plain:
    """A loop's state, and one step of it: ``update(grads, factors, **more)``."""

    def __init__(self, tx):
        self.tx, self.params = tx, PARAMS
        self.state = self.first()

    def first(self):
        return self.tx.init(self.params)

    def update(self, grads, factors, **more):
        updates, self.state = self.tx.update(
            grads, self.state, self.params, factors=factors, **more
        )
        self.params = optax.apply_updates(self.params, updates)


class Chain(Plain):
    def __init__(self, tx):
        super().__init__(optax.chain(optax.scale(1.0), tx))


class MultiSteps(Plain):
    """Groups of one micro-batch, so that each is an update."""

    def __init__(self, tx):
        super().__init__(jk.multi_steps(tx, 1))

    def update(self, grads, factors, **more):
        # Adaptation holds a function, and without jit every call would compile lax.cond.
        update = self.tx.update if "value_fn" in more else jax.jit(self.tx.update)
        given = {"factors": factors, "terms": jnp.float32(TERMS)} | more
        updates, self.state = update(grads, self.state, self.params, **given)
        self.params = optax.apply_updates(self.params, updates)


class Train(Plain):
    class State(TrainState):
        """As ``docs/loops.md`` shows it."""

        def apply_gradients(self, *, grads, **extra):
            update = functools.partial(self.tx.update, **extra)
            bound = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
            return super(type(self), bound).apply_gradients(grads=grads).replace(tx=self.tx)

    def first(self):
        return self.State.create(apply_fn=OBJECTIVE.apply_fn, params=PARAMS, tx=self.tx)

    def update(self, grads, factors, **more):
        self.state = self.state.apply_gradients(grads=grads, factors=factors, **more)


class Nnx(Plain):
    class Net(nnx.Module):
        """The parameter alone: gradients are those of ``OBJECTIVE``."""

        def __init__(self):
            self.w = nnx.Param(PARAMS["w"])

    def first(self):
        self.net = self.Net()
        return nnx.Optimizer(self.net, self.tx, wrt=nnx.Param)

    def update(self, grads, factors, **more):
        self.state.update(self.net, jk.as_state(grads, self.net), factors=factors, **more)


KINDS = {"plain": Plain, "chain": Chain, "multi_steps": MultiSteps, "TrainState": Train,
         "nnx.Optimizer": Nnx}  # fmt: skip


def complaints(state):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        jk.check_state(state)
    return [str(warning.message) for warning in said]


# ------------------------------------------------------------------ what may be wrong


def healthy(loop):
    for _ in range(4):
        loop.update(GRADS, FACTORS, value=LOSS)


def diverged(loop):
    """The tenth loss in a row that is far above the first; outside of ``jit`` ``update`` warns."""
    loop.update(GRADS, FACTORS, value=1.0)
    for _ in range(9):
        loop.update(GRADS, FACTORS, value=1e3)
    assert complaints(loop.state) == []
    if isinstance(loop, MultiSteps):  # its update is inside of a lax.cond
        loop.update(GRADS, FACTORS, value=1e3)
        return
    with pytest.warns(UserWarning, match=r"ten updates or more.*three times smaller"):
        loop.update(GRADS, FACTORS, value=1e3)


def skipped(loop):
    loop.update(GRADS, FACTORS)
    loop.update(NAN, FACTORS)


def missed(loop):
    for _ in range(2):
        loop.update(GRADS, None)


def stale(loop):
    loop.update(GRADS, FACTORS)
    for _ in range(2):
        loop.update(GRADS, None)


def outsized(loop):
    """Finite factors, whose average of three was infinite."""
    loop.update(GRADS, FACTORS)
    for _ in range(3):
        sums = {name: 4.8e36 * x for name, x in FACTORS.a_sums.items()}
        loop.update(GRADS, dataclasses.replace(FACTORS, a_sums=sums))


SITUATIONS = {
    healthy: None,
    diverged: r"state\.diverged.*tx\.init\(params\).*jk\.kfac\(like=like\)",
    skipped: r"state\.skipped.*not finite.*NaN in the batches",
    missed: r"state\.missed.*gradient descent: pass factors=",
    outsized: r"above the square root.*out of all proportion",
    stale: r"state\.watch\.stale.*curvature is old: pass factors=",
}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda f: f.__name__)
def test_each_complaint_is_made_once_and_by_its_cause_alone(situation, kind):
    loop = KINDS[kind](jk.kfac(0.1, like=LIKE, refresh_every=1))
    situation(loop)
    said, words = complaints(loop.state), SITUATIONS[situation]
    if words is None:
        assert said == []
    else:
        assert len(said) == 1 and re.search(words, said[0]), said


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_adaptive_training_is_not_complained_of(kind):
    loop = KINDS[kind](jk.kfac(like=LIKE, refresh_every=1))
    for key in jax.random.split(jax.random.key(4), 3):
        _, grads, factors = STATS(params_of(loop), BATCH, key)
        loop.update(grads, factors, **STATS.adaptation(params_of(loop), BATCH, key))
    assert complaints(loop.state) == []


def params_of(loop):
    if isinstance(loop, Nnx):
        return nnx.to_pure_dict(nnx.state(loop.net, nnx.Param))
    return loop.state.params if isinstance(loop, Train) else loop.params


def adapted(after):
    """States of an adaptive training inside ``jit``, with something after ``kfac``."""
    tx = optax.chain(jk.kfac(like=LIKE), after)
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params, state, key):
        _, grads, factors = STATS(params, BATCH, key)
        more = STATS.adaptation(params, BATCH, key)
        updates, state = tx.update(grads, state, params, factors=factors, **more)
        return optax.apply_updates(params, updates), state

    for key in jax.random.split(jax.random.key(3), 3):
        params, state = step(params, state, key)
    return state


@pytest.mark.exhaustive
def test_a_transformation_after_the_adaptive_one_is_named():
    assert complaints(adapted(optax.identity())) == []
    (said,) = complaints(adapted(optax.scale(0.5)))
    assert re.search(r"state\.adaptation\.displaced.*must stand last in optax\.chain", said)


def test_the_adaptive_optimizer_has_a_remedy_of_its_own():
    state = jk.kfac(like=LIKE).init(PARAMS)
    watch = state.watch._replace(diverged=jnp.int32(10))
    (said,) = complaints(state._replace(watch=watch))
    assert re.search(r"damping=jk\.LevenbergMarquardt\(\), the default", said)
    assert "learning rate" not in said


def test_an_average_that_began_anew_is_named():
    tx = jk.kfac(0.1, like=LIKE)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS, factors=FACTORS)
    average = jax.tree.map(lambda x: x * jnp.inf, state.stacked_average.a_sums)
    lost = dataclasses.replace(state.stacked_average, a_sums=average)
    _, state = tx.update(GRADS, state._replace(stacked_average=lost), PARAMS, factors=FACTORS)
    (said,) = complaints(state)
    assert re.search(r"began anew \(state\.watch\.restarted\)", said)


def test_a_traced_state_is_refused():
    state = jk.kfac(0.1, like=LIKE).init(PARAMS)
    with pytest.raises(ValueError, match=r"traced; call jk\.check_state outside of jit"):
        jax.jit(lambda state: jk.check_state(state))(state)


def test_a_state_that_was_restored_into_numpy_arrays_is_read():
    tx = jk.kfac(0.1, like=LIKE)
    _, state = tx.update(NAN, tx.init(PARAMS), PARAMS, factors=FACTORS)
    with pytest.warns(UserWarning, match="updates were skipped"):
        jk.check_state(jax.device_get(state))


def test_a_state_of_several_models_is_refused():
    several = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    with pytest.raises(ValueError, match=r"counters have shape \(2,\), .* one model at a time"):
        jk.check_state(jax.vmap(jk.kfac(0.1, like=LIKE).init)(several))


@pytest.mark.parametrize("other", [None, PARAMS, optax.adam(0.1).init(PARAMS)])
def test_a_state_of_another_optimizer_is_refused(other):
    with pytest.raises(ValueError, match=r"no state of jk\.kfac.*expected what tx\.init"):
        jk.check_state(other)


# ------------------------------------------------------------------ state.diverged


def counts(*values):
    """``state.diverged`` after updates with these losses, inside of ``jit``."""
    tx = jk.kfac(0.1, like=LIKE)
    step = jax.jit(
        lambda state, value: tx.update(GRADS, state, PARAMS, factors=FACTORS, value=value)[1]
    )
    state, found = tx.init(PARAMS), []
    for value in values:
        state = step(state, jnp.float32(value))
        found.append(int(state.diverged))
    return found


@pytest.mark.slow
def test_a_loss_far_above_the_first_or_not_finite_counts_until_one_that_is_not():
    """More than first + 10 max(|first|, 1)."""
    assert counts(2.0, 22.0, 22.1, jnp.nan, jnp.inf, 21.9, 1e9) == [0, 0, 1, 2, 3, 0, 1]


@pytest.mark.slow
def test_losses_that_are_negative_or_begin_at_zero_do_not_count_by_themselves():
    assert counts(-3.0, -1e9, 0.0, 27.0, 27.1) == [0, 0, 0, 0, 1]
    assert counts(0.0, -5.0, 5.0, 10.0, 10.1) == [0, 0, 0, 0, 1]
    assert counts(1e-8, 1.0, 9.0, 11.0) == [0, 0, 0, 1]  # a small first loss is no yardstick


def test_the_first_finite_loss_is_the_yardstick():
    assert counts(jnp.nan, jnp.inf, 2.0, 21.0, 23.0) == [1, 2, 0, 0, 1]


@pytest.mark.slow
def test_without_a_loss_nothing_is_counted():
    tx = jk.kfac(0.1, like=LIKE)
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = tx.update(GRADS, state, PARAMS, factors=FACTORS)
    assert int(state.diverged) == 0 and np.isinf(state.watch.first_value)
