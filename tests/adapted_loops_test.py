"""``stats.adaptation`` tells an adaptive ``kfac`` what explicit arguments tell it, in each loop.

``docs/loops.md`` shows these loops.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkfac as jk
from tests._checks import assert_tree_close, two_devices

STEPS, TOLERANCE = 4, 1e-9
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


@functools.cache
def start():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": {"w": 0.5 * jax.random.normal(keys[0], (3, 5)), "b": jnp.zeros(5)},
        "down": {"w": 0.5 * jax.random.normal(keys[1], (5, 4))},
    }
    return params, (jax.random.normal(keys[2], (8, 3)), jnp.arange(8) % 4)


def apply_fn(p, x):
    return jnp.tanh(x @ p["up"]["w"] + p["up"]["b"]) @ p["down"]["w"]


OBJECTIVE = jk.Objective(apply_fn, jk.Categorical())
STATS = jk.value_grad_and_factors(OBJECTIVE, fisher="mc")


def keys():
    return jax.random.split(jax.random.key(1), STEPS)


def adaptive(stats, params, batch):
    """A trial every second update, so that ``value_fn`` counts."""
    like = stats.factor_shapes(params, batch)
    return jk.kfac(like=like, damping=jk.LevenbergMarquardt(every=2), refresh_every=2)


def explicit(params, batch):
    """What ``stats.adaptation`` stands for, written out."""
    return {
        "value": OBJECTIVE(params, batch),
        "value_fn": lambda params: OBJECTIVE(params, batch),
        "curvature": jk.operators.ggn(OBJECTIVE, params, batch),
    }


def trained(tx, given, micro=1):
    """Parameters and state of a plain loop, of ``micro`` micro-batches an update.

    Args:
        tx: The optimizer.
        given: Keywords of an update, from parameters, batch and key.
        micro: How many micro-batches the batch is.
    """
    params, batch = start()
    parts = jax.tree.map(lambda x: x.reshape(micro, -1, *x.shape[1:]), batch)

    @jax.jit
    def step(params, state, key):
        for i in range(micro):
            one = jax.tree.map(lambda x, i=i: x[i], parts)
            _, grads, factors = STATS(params, one, jax.random.fold_in(key, i) if i else key)
            more = given(params, batch, key)
            updates, state = tx.update(grads, state, params, factors=factors, **more)
            params = optax.apply_updates(params, updates)
        return params, state

    state = tx.init(params)
    for key in keys():
        params, state = step(params, state, key)
    return params, state


@functools.cache
def expected():
    params, batch = start()
    tx = adaptive(STATS, params, batch)
    params, state = trained(tx, lambda params, batch, key: explicit(params, batch))
    assert state.adaptation.damping != 0.03  # a trial has changed it
    assert OBJECTIVE(params, batch) < OBJECTIVE(start()[0], batch)
    return params


@pytest.mark.slow
def test_plain_loop():
    params, batch = start()
    found, _ = trained(adaptive(STATS, params, batch), STATS.adaptation)
    assert_tree_close(found, expected(), TOLERANCE)


@pytest.mark.exhaustive
def test_outside_of_jit():
    params, batch = start()
    tx = adaptive(STATS, params, batch)
    state = tx.init(params)
    for key in keys():
        _, grads, factors = STATS(params, batch, key)
        more = STATS.adaptation(params, batch, key)
        updates, state = tx.update(grads, state, params, factors=factors, **more)
        params = optax.apply_updates(params, updates)
    assert_tree_close(params, expected(), TOLERANCE)


class Net(nnx.Module):
    """The same net, its parameters under the same names."""

    def __init__(self):
        params, _ = start()
        self.up = nnx.Dict({name: nnx.Param(x) for name, x in params["up"].items()})
        self.down = nnx.Dict(w=nnx.Param(params["down"]["w"]))

    def __call__(self, x):
        return jnp.tanh(x @ self.up["w"][...] + self.up["b"][...]) @ self.down["w"][...]


@pytest.mark.exhaustive  # tests/loops_test.py has it without adaptation
@pytest.mark.parametrize("form", ["dictionary", "state"])
def test_nnx_optimizer(form):
    model, (_, batch) = Net(), start()
    run, params = jk.from_nnx(model)
    stats = jk.value_grad_and_factors(jk.Objective(run, jk.Categorical()), fisher="mc")
    optimizer = nnx.Optimizer(model, adaptive(stats, params, batch), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        params = nnx.state(model, nnx.Param)
        if form == "dictionary":
            _, grads, factors = stats(nnx.to_pure_dict(params), batch, key)
            grads = jk.as_state(grads, model)
        else:
            _, grads, factors = stats(params, batch, key)
        more = stats.adaptation(params, batch, key)
        optimizer.update(model, grads, factors=factors, **more)

    for key in keys():
        step(model, optimizer, key)
    assert_tree_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected(), TOLERANCE)


@pytest.mark.exhaustive
def test_train_state_that_hands_keywords_on():
    class State(TrainState):
        def apply_gradients(self, *, grads, **extra):
            update = functools.partial(self.tx.update, **extra)
            bound = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
            return super(State, bound).apply_gradients(grads=grads).replace(tx=self.tx)

    params, batch = start()
    state = State.create(apply_fn=apply_fn, params=params, tx=adaptive(STATS, params, batch))

    @jax.jit
    def step(state, key):
        _, grads, factors = STATS(state.params, batch, key)
        more = STATS.adaptation(state.params, batch, key)
        return state.apply_gradients(grads=grads, factors=factors, **more)

    for key in keys():
        state = step(state, key)
    assert_tree_close(state.params, expected(), TOLERANCE)


@pytest.mark.exhaustive
def test_equinox_filtered_loop():
    class Module(eqx.Module):
        up: dict
        down: dict
        activation: object

        def __call__(self, x):
            return self.activation(x @ self.up["w"] + self.up["b"]) @ self.down["w"]

    first, batch = start()
    model = Module(**first, activation=jnp.tanh)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    run = lambda params, x: jax.vmap(eqx.combine(params, static))(x)
    stats = jk.value_grad_and_factors(jk.Objective(run, jk.Categorical()), fisher="mc")
    tx = adaptive(stats, params, batch)
    state = tx.init(params)

    @eqx.filter_jit
    def step(model, state, key):
        params = eqx.filter(model, eqx.is_inexact_array)
        _, grads, factors = stats(params, batch, key)
        more = stats.adaptation(params, batch, key)
        updates, state = tx.update(grads, state, params, factors=factors, **more)
        return eqx.apply_updates(model, updates), state

    for key in keys():
        model, state = step(model, state, key)
    assert_tree_close({"up": model.up, "down": model.down}, expected(), TOLERANCE)


@pytest.mark.slow
def test_last_in_a_chain():
    """``optax.clip_by_global_norm`` that clips nothing hands everything on."""
    params, batch = start()
    tx = optax.chain(optax.clip_by_global_norm(1e9), adaptive(STATS, params, batch))
    assert_tree_close(trained(tx, STATS.adaptation)[0], expected(), TOLERANCE)


@pytest.mark.exhaustive  # TestRefused of _adaptation_test has micro-batches in the default run
def test_multi_steps_of_the_whole_group():
    """Each micro-step is given the adaptation of all of them, and sampled labels of its own."""
    params, batch = start()
    tx = jk.multi_steps(adaptive(STATS, params, batch), every_k_schedule=2)
    found, state = trained(tx, STATS.adaptation, micro=2)
    wanted, _ = trained(tx, lambda params, batch, key: explicit(params, batch), micro=2)
    assert_tree_close(found, wanted, TOLERANCE)
    assert state.inner.step == STEPS
    assert state.inner.adaptation.damping != 0.03


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_two_devices(kind):
    first, batch = start()
    tx = adaptive(STATS, first, batch)

    @jax.jit
    def step(params, state, batch, key):
        _, grads, factors = STATS(params, batch, key)
        more = STATS.adaptation(params, batch, key)
        updates, state = tx.update(grads, state, params, factors=factors, **more)
        return optax.apply_updates(params, updates), state

    with two_devices():
        mesh = jax.make_mesh((2,), ("data",), axis_types=(KINDS[kind],))
        with jax.set_mesh(mesh):
            params = jax.device_put(first, NamedSharding(mesh, P()))
            rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
            state = tx.init(params)
            for key in keys():
                params, state = step(params, state, rows, key)
    assert_tree_close(jax.device_get(params), expected(), TOLERANCE)


# ------------------------------------------------------------------ what it is made of


def same_model(found, value_fn, operator, params):
    """Value, loss elsewhere and curvature are those that are written out."""
    elsewhere = jax.tree.map(lambda x: x + 0.1, params)
    np.testing.assert_allclose(found["value"], value_fn(params), rtol=1e-12)
    np.testing.assert_allclose(found["value_fn"](elsewhere), value_fn(elsewhere), rtol=1e-12)
    parts = found["curvature"]
    made = jk.operators.ggn(*parts[:3], key=parts.key, state=parts.state)
    assert_tree_close(made @ elsewhere, operator @ elsewhere, 1e-12)


@pytest.mark.slow
def test_dropout_is_that_of_the_gradients_key():
    params, batch = start()

    def dropped(p, x, key):
        kept = jax.random.bernoulli(key, 0.5, (len(x), 5))
        hidden = jnp.tanh(x @ p["up"]["w"] + p["up"]["b"])
        return jnp.where(kept, hidden, 0.0) @ p["down"]["w"]

    objective = jk.Objective(dropped, jk.Categorical())
    stats, key = jk.value_grad_and_factors(objective, fisher="mc"), jax.random.key(3)
    found = stats.adaptation(params, batch, key)
    np.testing.assert_allclose(stats(params, batch, key).value, found["value"], rtol=1e-12)
    assert found["value"] != stats.adaptation(params, batch, jax.random.key(4))["value"]
    operator = jk.operators.ggn(objective, params, batch, key=key)
    same_model(found, lambda p: objective(p, batch, key), operator, params)


@pytest.mark.slow
def test_what_a_call_changes_and_returns_beside_the_loss_is_left_out():
    params, batch = start()

    def apply(p, x, state):
        out = apply_fn(p, x - state["mean"])
        return (out, jnp.sum(out)), {"mean": x.mean(0)}

    objective = jk.Objective(apply, jk.Categorical(), has_aux=True)
    stats, state = jk.value_grad_and_factors(objective), {"mean": batch[0].mean(0) / 2}
    found = stats.adaptation(params, batch, state=state)
    np.testing.assert_allclose(stats(params, batch, state=state).value[0], found["value"])
    operator = jk.operators.ggn(objective, params, batch, state=state)
    same_model(found, lambda p: objective(p, batch, state=state)[0], operator, params)


def test_a_scalar_loss_that_marks_its_outputs():
    params, batch = start()

    def loss(p, batch):
        out = jk.mark_outputs(apply_fn(p, batch[0]), jk.Gaussian())
        return 0.5 * jnp.mean(jnp.sum(out**2, axis=1))

    found = jk.value_grad_and_factors(loss, fisher="exact").adaptation(params, batch)
    same_model(found, lambda p: loss(p, batch), jk.operators.ggn(loss, params, batch), params)


def test_a_scalar_loss_that_marks_none_has_no_curvature():
    params, batch = start()
    loss = lambda p, batch: jnp.mean(apply_fn(p, batch[0]) ** 2)
    stats = jk.value_grad_and_factors(loss, loss_terms=8)
    with pytest.raises(TypeError, match=r"loss_terms=.*no curvature.*jk\.mark_outputs"):
        stats.adaptation(params, batch)
