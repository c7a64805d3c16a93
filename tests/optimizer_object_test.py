"""``jk.Optimizer``: one object and one pure step, equal to the loop that is written out."""

import flax.core
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxkfac as jk

X = jax.random.normal(jax.random.key(0), (16, 3))
BATCH = X, jnp.sin(X[:, :2])
KEY = jax.random.key(7)
PARAMS = {
    "w": jax.random.normal(KEY, (3, 4)) / 2,
    "b": jnp.zeros(4),
    "v": jax.random.normal(jax.random.key(8), (4, 2)) / 2,
}


def model(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


OBJECTIVE = jk.Objective(model, jk.Gaussian())


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected, rtol=1e-6):
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


def written_out(tx, params, batch, steps, every):
    """The loop of the optax level, with stats(...) and stats.adaptation(...)."""
    stats = jk.value_grad_and_factors(OBJECTIVE, fisher="mc", every=every)
    state = tx.init(params, like=stats.factor_shapes(params, batch))

    @jax.jit
    def step(params, state, key):
        loss, grads, factors = stats(params, batch, key, step=state.step)
        extra = stats.adaptation(params, batch, key)
        updates, state = tx.update(grads, state, params, factors=factors, **extra)
        return optax.apply_updates(params, updates), state, loss

    for n in range(steps):
        params, state, loss = step(params, state, jax.random.fold_in(KEY, n))
    return params, state, loss


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize(("build", "every"), [(lambda: jk.kfe_adam(0.01), 10), (jk.kfac, 5)])
def test_a_step_is_that_of_the_loop_written_out(build, every):
    opt, params = jk.Optimizer(OBJECTIVE, build()), PARAMS
    state, step = opt.init(params, BATCH), jax.jit(opt.step)
    for n in range(12):
        params, state, loss = step(params, state, BATCH, jax.random.fold_in(KEY, n))
    expected, inner, value = written_out(build(), PARAMS, BATCH, 12, every)
    # Two programs, whose sums XLA may order in two ways.
    assert_close((params, loss), (expected, value), rtol=1e-4)
    assert jax.tree.structure(state.inner) == jax.tree.structure(inner)
    assert int(state.step) == 12


@pytest.mark.standard_promotion
def test_a_plain_optax_optimizer_runs_on_the_gradient_alone():
    params, opt = PARAMS, jk.Optimizer(OBJECTIVE, optax.adam(1e-2))
    params, state, loss = opt.step(params, opt.init(params, BATCH), BATCH)
    value, grads = jax.value_and_grad(OBJECTIVE)(PARAMS, BATCH)
    updates, _ = optax.adam(1e-2).update(grads, optax.adam(1e-2).init(PARAMS), PARAMS)
    assert_close((params, loss), (optax.apply_updates(PARAMS, updates), value))
    jk.check_state(state)


def test_shapes_will_do_for_the_batch_and_a_frozen_dictionary_for_params():
    opt, params = jk.Optimizer(OBJECTIVE), flax.core.freeze(PARAMS)
    shapes = jax.eval_shape(lambda: BATCH)
    state = opt.init(params, shapes)
    assert_equal(state, opt.init(params, BATCH))
    after = jax.eval_shape(opt.step, params, state, BATCH)
    assert jax.tree.structure(after[:2]) == jax.tree.structure((params, state))
    same = jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), after[1], state)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_it_is_scanned_with_batches_of_another_size_and_with_masks():
    opt, params = jk.Optimizer(OBJECTIVE), PARAMS
    state = opt.init(params, BATCH)
    parts = jax.tree.map(lambda x: x.reshape(4, 4, -1), BATCH)
    (params, state), losses = jax.lax.scan(
        lambda carry, batch: (lambda out: (out[:2], out[2]))(opt.step(*carry, batch)),
        (params, state),
        parts,
    )
    _, _, masked = jax.jit(opt.step)(params, state, (*BATCH, jnp.arange(16) < 12))
    np.testing.assert_allclose(
        masked, OBJECTIVE(params, jax.tree.map(lambda x: x[:12], BATCH)), rtol=1e-6
    )
    assert losses.shape == (4,)


@pytest.mark.parametrize("batch", [{"x": X}, ({"x": X}, X), X, (X,)])
def test_a_batch_of_another_structure_is_refused(batch):
    opt = jk.Optimizer(OBJECTIVE, optax.sgd(0.1))
    state = opt.init(PARAMS, BATCH)
    with pytest.raises(ValueError, match="batch: "):
        opt.step(PARAMS, state, batch)


def test_a_state_of_another_optimizer_is_refused():
    opt = jk.Optimizer(OBJECTIVE, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"expected OptimizerState, as opt.init\(params, batch\)"):
        opt.step(PARAMS, optax.sgd(0.1).init(PARAMS), BATCH)


def dropped(p, x, key):
    keep = jax.random.bernoulli(key, 0.5, (len(x), 4))
    return jnp.where(keep, jnp.tanh(x @ p["w"] + p["b"]), 0) @ p["v"]


def nnx_dropout():
    net = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    return jk.from_nnx(net)


@pytest.mark.parametrize("build", [lambda: (dropped, PARAMS), nnx_dropout])
def test_a_missing_key_is_named_where_dropout_needs_it_and_that_of_init_serves_all(build):
    apply_fn, params = build()
    batch = X, jnp.zeros((16, 4 if apply_fn is not dropped else 2))
    objective = jk.Objective(apply_fn, jk.Gaussian())
    opt = jk.Optimizer(objective, optax.sgd(0.0))
    with pytest.raises(ValueError, match="key: the model draws random numbers"):
        opt.step(params, opt.init(params, batch), batch)
    state, losses = opt.init(params, batch, KEY), []
    for _ in range(2):
        params, state, loss = opt.step(params, state, batch)
        losses.append(float(loss))
    assert losses[0] != losses[1]
    expected = [float(objective(params, batch, jax.random.fold_in(KEY, n))) for n in (0, 1)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
def test_the_key_of_init_may_be_of_any_generator(impl):
    opt, key = jk.Optimizer(OBJECTIVE, optax.sgd(0.1)), jax.random.key(3, impl=impl)
    made = opt._key(opt.init(PARAMS, BATCH, key), None)
    expected = jax.random.fold_in(key, 0)
    assert jax.random.key_impl(made) == jax.random.key_impl(expected)
    np.testing.assert_array_equal(jax.random.key_data(made), jax.random.key_data(expected))


def test_an_error_of_the_model_is_not_taken_for_a_missing_key():
    def broken(p, x, key=None):
        raise RuntimeError("of the model")

    opt = jk.Optimizer(jk.Objective(broken, jk.Gaussian()), optax.sgd(0.1))
    with pytest.raises(RuntimeError, match="of the model"):
        opt.init(PARAMS, BATCH)


def test_labels_without_a_key_differ_from_step_to_step_and_are_the_same_each_time():
    opt = jk.Optimizer(OBJECTIVE)
    state = opt.init(PARAMS, BATCH)
    keys = [opt._key(state._replace(step=jnp.int32(n)), None) for n in (0, 0, 1)]
    data = [jax.random.key_data(key).tolist() for key in keys]
    assert data[0] == data[1] != data[2]


def test_auxiliary_outputs_come_with_the_loss():
    objective = jk.Objective(lambda p, x: (model(p, x), x.sum()), jk.Gaussian(), has_aux=True)
    opt = jk.Optimizer(objective, optax.sgd(0.1))
    _, _, (loss, aux) = opt.step(PARAMS, opt.init(PARAMS, BATCH), BATCH)
    np.testing.assert_allclose((loss, aux), (OBJECTIVE(PARAMS, BATCH), X.sum()), rtol=1e-6)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dense(2)(jnp.tanh(x))


@pytest.mark.slow
@pytest.mark.parametrize("has_aux", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_what_the_model_changes_is_in_the_state(has_aux):
    variables = Normed().init(KEY, X)
    params, first = variables["params"], {"batch_stats": variables["batch_stats"]}

    def apply_fn(params, x, state):
        out, changed = Normed().apply({"params": params, **state}, x, mutable=list(state))
        return ((out, x.sum()) if has_aux else out), changed

    opt = jk.Optimizer(jk.Objective(apply_fn, jk.Gaussian(), has_aux=has_aux))
    state = opt.init(params, BATCH, state=first)
    _, after, _ = jax.jit(opt.step)(params, state, BATCH)
    expected = apply_fn(params, X, first)[1]
    jax.tree.map(np.testing.assert_allclose, after.model_state, expected)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_the_state_of_an_nnx_model_is_taken_from_it_and_copied():
    net = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(1)))
    apply_fn, params = jk.from_nnx(net, mutable=nnx.BatchStat)
    opt = jk.Optimizer(jk.Objective(apply_fn, jk.Gaussian()), optax.sgd(0.1))
    state = opt.init(params, BATCH)
    params, after, _ = jax.jit(opt.step, donate_argnums=(0, 1))(params, state, BATCH)
    nnx.update(net, params, after.model_state)
    mean = after.model_state["layers"][1]["mean"]
    assert_equal(net.layers[1].mean[...], mean)
    assert not np.isnan(apply_fn.state["layers"][1]["mean"]).any()  # it was not donated


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "build",
    [
        lambda: optax.chain(optax.clip_by_global_norm(1.0), jk.kfe_adam(0.01)),
        lambda: optax.inject_hyperparams(jk.kfac)(0.1, damping=0.2),
        lambda: jk.multi_steps(jk.kfe_adam(0.01), 2),
        lambda: jk.kfac(0.1, others=optax.adam(1e-3)),
    ],
)
def test_chains_and_wrappers_learn_their_factors_at_init(build):
    opt = jk.Optimizer(OBJECTIVE, build())
    params, state, step = PARAMS, opt.init(PARAMS, BATCH), jax.jit(opt.step)
    for _ in range(20):
        params, state, loss = step(params, state, BATCH)
    jk.check_state(state)
    assert float(loss) < float(OBJECTIVE(PARAMS, BATCH))
    assert step._cache_size() == 1


def test_without_the_object_an_optimizer_needs_its_factors_at_init():
    with pytest.raises(ValueError, match=r"tx.init\(params, like=like\)"):
        jk.kfac().init(PARAMS)
    with pytest.raises(TypeError, match="kfe_adam: the state"):
        jk.kfe_adam(0.1).update(PARAMS, (), PARAMS)


def test_micro_batches_of_an_adaptive_kfac_are_refused():
    opt = jk.Optimizer(OBJECTIVE, jk.multi_steps(jk.kfac(), 2))
    with pytest.raises(ValueError, match="needs the loss of the whole group"):
        opt.init(PARAMS, BATCH)


@pytest.mark.parametrize("optimizer", [3, jk.kfac, "adam"])
def test_what_is_no_transformation_is_refused(optimizer):
    with pytest.raises(TypeError, match="optimizer: expected"):
        jk.Optimizer(OBJECTIVE, optimizer)


def test_a_budget_is_refused():
    with pytest.raises(ValueError, match="max_factor_bytes"):
        jk.Optimizer(OBJECTIVE, max_factor_bytes="1GB")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [lambda: jk.kfe_adam(0.01), jk.kfac])
def test_a_step_with_nan_moves_nothing_and_training_goes_on(build):
    opt, step = jk.Optimizer(OBJECTIVE, build()), None
    state, step = opt.init(PARAMS, BATCH), jax.jit(opt.step)
    bad = BATCH[0].at[0, 0].set(jnp.nan), BATCH[1]
    params, state, loss = step(PARAMS, state, bad)
    assert np.isnan(loss)
    assert_equal(params, PARAMS)
    for _ in range(20):
        params, state, loss = step(params, state, BATCH)
    assert float(loss) < float(OBJECTIVE(PARAMS, BATCH))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [lambda: jk.kfe_adam(0.01), jk.kfac])
def test_a_loss_of_zero_and_a_batch_of_one_leave_finite_parameters(build):
    opt = jk.Optimizer(OBJECTIVE, build())
    one = jax.tree.map(lambda x: x[:1], BATCH)
    params, state, step = PARAMS, opt.init(PARAMS, one), jax.jit(opt.step)
    solved = one[0], model(PARAMS, one[0])
    params, state, loss = step(params, state, solved)
    assert float(loss) == 0
    for _ in range(10):
        params, state, loss = step(params, state, one)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    assert float(loss) <= float(OBJECTIVE(PARAMS, one))


@pytest.mark.slow
def test_integers_and_keys_among_the_parameters_stay():
    params = {**PARAMS, "rows": jnp.arange(3), "seed": jax.random.key(3)}
    opt = jk.Optimizer(OBJECTIVE)
    after, _, _ = jax.jit(opt.step)(params, opt.init(params, BATCH), BATCH)
    assert_equal(after["rows"], params["rows"])
    assert jnp.array_equal(jax.random.key_data(after["seed"]), jax.random.key_data(params["seed"]))


@pytest.mark.slow
def test_a_state_is_written_and_read():
    opt = jk.Optimizer(OBJECTIVE)
    state = opt.init(PARAMS, BATCH, KEY)
    params, state, _ = jax.jit(opt.step)(PARAMS, state, BATCH)
    empty = opt.init(PARAMS, BATCH, jax.random.key(0))
    read = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(state))
    again = jax.tree.map(jnp.asarray, read)
    assert_equal(opt.step(params, again, BATCH)[0], opt.step(params, state, BATCH)[0])


def linear_state(tx, **more):
    net = nn.Dense(2)
    params = net.init(KEY, X)
    state = jk.TrainState.create(apply_fn=net.apply, params=params, tx=tx(net), **more)
    return net, params, state


@pytest.mark.exhaustive
def test_a_train_state_holds_the_object():
    opt = lambda net: jk.Optimizer(jk.Objective(net.apply, jk.Gaussian()))
    net, params, state = linear_state(opt, batch=BATCH)
    state, loss = jax.jit(lambda state: state.train_step(BATCH))(state)
    expected, _, value = state.tx.step(params, state.tx.init(params, BATCH), BATCH)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), state.params, expected)
    assert int(state.step) == 1 and float(loss) == pytest.approx(float(value))
    with pytest.raises(TypeError, match="call train_step"):
        state.apply_gradients(grads=params)


@pytest.mark.slow
def test_a_train_state_passes_what_an_update_needs():
    class State(jk.TrainState):
        seen: int

    net = nn.Dense(2)
    stats = jk.value_grad_and_factors(jk.Objective(net.apply, jk.Gaussian()))
    params = net.init(KEY, X)
    like = stats.factor_shapes(params, BATCH)
    state = State.create(apply_fn=net.apply, params=params, tx=jk.kfac(), like=like, seen=0)
    _, grads, extra = stats.step(params, BATCH)
    after = state.apply_gradients(grads=grads, seen=16, **extra)
    assert (int(after.step), after.seen, int(after.opt_state.step)) == (1, 16, 1)
    assert after.tx is state.tx


def test_a_train_state_says_which_of_the_two_it_holds():
    with pytest.raises(ValueError, match="batch: an Optimizer needs a batch"):
        linear_state(lambda net: jk.Optimizer(jk.Objective(net.apply, jk.Gaussian())))
    _, params, state = linear_state(lambda net: optax.sgd(0.1))
    with pytest.raises(TypeError, match="tx: expected Optimizer"):
        state.train_step(BATCH)
    assert int(state.apply_gradients(grads=params).step) == 1


PROBABLE = {
    "softmax": (lambda p, x: jax.nn.softmax(model(p, x)), jk.Categorical()),
    "sigmoid": (lambda p, x: jax.nn.sigmoid(model(p, x)), jk.Bernoulli()),
    "logits": (model, jk.Bernoulli()),
    "first of two": (lambda p, x: (jax.nn.softmax(model(p, x)), model(p, x)), None),
}


@pytest.mark.parametrize("name", PROBABLE)
def test_probabilities_in_place_of_logits_are_counted_and_named(name):
    apply_fn, likelihood = PROBABLE[name]
    targets = jnp.zeros(16, jnp.int32) if name == "softmax" else jnp.zeros((16, 2))
    if likelihood is None:
        likelihood = jk.Categorical(), jk.Gaussian()
        targets = jnp.zeros(16, jnp.int32), targets
    opt = jk.Optimizer(jk.Objective(apply_fn, likelihood), optax.sgd(1e-3))
    params, state, step = PARAMS, opt.init(PARAMS, (X, targets)), jax.jit(opt.step)
    for _ in range(9):
        params, state, loss = step(params, state, (X, targets))
    jk.check_state(state)
    params, state, loss = step(params, state, (X, targets))
    assert loss.shape == () and int(state.probabilities) == (0 if name == "logits" else 10)
    if name != "logits":
        with pytest.warns(UserWarning, match="return the values before the softmax or sigmoid"):
            jk.check_state(state)


def test_factors_are_named_once():
    stats = jk.value_grad_and_factors(OBJECTIVE)
    like = stats.factor_shapes(PARAMS, BATCH)
    with pytest.raises(ValueError, match="like= is in jk.kfac"):
        jk.kfac(0.1, like=like).init(PARAMS, like=like)
