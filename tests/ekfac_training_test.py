"""EKFAC in training: eigenvalues measured beside the factors, averaged, begun anew at a refresh."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxkfac as jk

pytestmark = pytest.mark.usefixtures("x64")


def apply_fn(params, x):
    for i in range(3):
        x = jnp.tanh(x @ params[f"l{i}"]["w"] + params[f"l{i}"]["b"])
    return (x * params["scale"]) @ params["head"]


OBJECTIVE = jk.Objective(apply_fn, jk.Categorical())
STATS = jk.value_grad_and_factors(OBJECTIVE)


@pytest.fixture
def params():
    keys = jax.random.split(jax.random.key(0), 4)
    kernels = jax.random.normal(keys[0], (3, 4, 4)), jax.random.normal(keys[1], (3, 4))
    params = {f"l{i}": {"w": kernels[0][i], "b": kernels[1][i]} for i in range(3)}
    return params | {"scale": jnp.ones(4), "head": jax.random.normal(keys[2], (4, 3))}


@pytest.fixture
def batches():
    keys, sizes = jax.random.split(jax.random.key(1), 5), (6, 7, 6, 7, 10)  # few programs
    return [(jax.random.normal(k, (n, 4)), jnp.arange(n) % 3) for n, k in zip(sizes, keys)]


def like_for(params, batch):
    return STATS.factor_shapes(params, batch)


def measuring_like(params, batch):
    """With shapes of measured eigenvalues."""
    start = jax.eval_shape(jk.kfac(0.1, like=like_for(params, batch), damping=0.1).init, params)
    return STATS.factor_shapes(params, batch, bases=start.bases)


def raw(basis):
    return basis.raw_values if hasattr(basis, "raw_values") else basis.raw_diagonal


def assert_close(a, b, tol=1e-12):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.allclose(x, y, rtol=tol, atol=tol)


@pytest.mark.exhaustive  # the steps below do
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_what_stats_measures_is_what_correct_eigenvalues_measures(params, batches, fisher, bias):
    stats = jk.value_grad_and_factors(OBJECTIVE, fisher=fisher, bias=bias)
    key, batch = jax.random.key(3), batches[0]
    bases = jk.eigendecompose(stats(params, batches[1], key).factors)
    factors = jax.jit(stats)(params, batch, key, bases=bases).factors
    expected = jk.correct_eigenvalues(OBJECTIVE, bases, fisher=fisher)(params, batch, key)
    for name in factors:
        assert_close(factors[name].corrected, raw(expected[name]))
    if bias == "separate":
        assert_close(factors["l1/w"].corrected_bias, expected["l1/w"].bias_raw_values)
    plain = stats(params, batch, key).factors
    assert_close(dataclasses.replace(factors, corrections=None), plain)


@pytest.mark.slow
def test_steps_use_measured_eigenvalues_begun_anew_at_a_refresh(params, batches):
    decay, every = 0.7, 3
    options = {"momentum": 0.0, "decay": decay, "refresh_every": every, "norm_constraint": None}
    tx = jk.kfac(0.1, like=like_for(params, batches[0]), damping=0.1, **options)
    state = tx.init(params)
    average = bases = measured = None
    update = jax.jit(lambda *a: tx.update(*a[:3], factors=a[3]))
    collect = jax.jit(lambda params, batch, bases: STATS(params, batch, bases=bases))
    for t, batch in enumerate(batches):
        _, grads, factors = collect(params, batch, state.bases)
        updates, state = update(grads, state, params, factors)
        bare = dataclasses.replace(factors, corrections=None)
        average = bare if average is None else jk.update_average(average, bare, decay)
        if t % every == 0:
            bases = measured = jk.eigendecompose(average, placement="device")
        else:
            one = jk.correct_eigenvalues(OBJECTIVE, bases)(params, batch)
            measured = jk.update_average(measured, one, decay)
        natural = jk.natural_gradient(grads, measured, damping=0.1)
        assert_close(updates, jax.tree.map(lambda x: -0.1 * x, natural), 1e-10)
        params = optax.apply_updates(params, updates)
    assert float(state.bases.corrections.terms) == len(batches[4][0])


@pytest.mark.exhaustive
def test_a_scan_needs_measured_eigenvalues_in_like(params, batches):
    like = measuring_like(params, batches[0])
    tx = jk.kfac(0.1, like=like, damping=0.1, damping_mode="pi", refresh_every=2)
    x, y = (jnp.stack([part[:6] for part in parts]) for parts in zip(*batches, strict=True))

    def step(carry, batch):
        params, state = carry
        _, grads, factors = STATS(params, batch, bases=state.bases)
        updates, state = tx.update(grads, state, params, factors=factors)
        return (optax.apply_updates(params, updates), state), None

    (scanned, state), _ = jax.lax.scan(step, (params, tx.init(params)), (x, y))
    looped = (params, tx.init(params))
    for batch in zip(x, y, strict=True):
        looped, _ = step(looped, batch)
    assert_close(scanned, looped[0], 1e-10)
    assert float(state.bases.corrections.terms) == 0  # the last step was a refresh


def test_what_a_scan_is_going_to_refuse_is_said_in_words(params, batches):
    tx = jk.kfac(0.1, like=like_for(params, batches[0]), damping=0.1)

    def step(carry, batch):
        params, state = carry
        _, grads, factors = STATS(params, batch, bases=state.bases)
        updates, state = tx.update(grads, state, params, factors=factors)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda x: x[None], batches[0])
    with (
        pytest.warns(UserWarning, match=r"like=stats.factor_shapes\(.*bases="),
        pytest.raises(TypeError),
    ):
        jax.lax.scan(step, (params, tx.init(params)), stacked)


@pytest.mark.exhaustive
def test_micro_batches_measure_like_one_batch(params, batches):
    x, y = batches[4]
    like = measuring_like(params, batches[0])
    tx = jk.kfac(0.1, like=like, damping=0.1, refresh_every=2, momentum=0.0)
    accumulated = jk.multi_steps(tx, 2)
    whole, split = (params, tx.init(params)), (params, accumulated.init(params))
    for _ in range(2):
        params, state = whole
        _, grads, factors = STATS(params, (x, y), bases=state.bases)
        updates, state = tx.update(grads, state, params, factors=factors)
        whole = optax.apply_updates(params, updates), state
    for i in range(4):
        params, state = split
        part = (x[:3], y[:3]) if i % 2 == 0 else (x[3:], y[3:])
        _, grads, factors = STATS(params, part, bases=state.inner.bases)
        updates, state = accumulated.update(grads, state, params, factors=factors)
        split = optax.apply_updates(params, updates), state
    assert_close(split[0], whole[0], 1e-10)


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused(params, batches):
    bases = jk.eigendecompose(STATS(params, batches[0]).factors)
    other = {"l0": params["l0"]}
    stats = jk.value_grad_and_factors(
        jk.Objective(lambda p, x: x @ p["l0"]["w"] + p["l0"]["b"], jk.Categorical())
    )
    with pytest.raises(jk.UnknownLayerError, match="a layer 'l1/w' that the program lacks"):
        stats(other, batches[0], bases=bases)
    forward = jk.value_grad_and_factors(OBJECTIVE, fisher="forward")
    with pytest.raises(ValueError, match="bases= measures.*'forward'"):
        forward(params, batches[0], bases=bases)
    _, grads, factors = STATS(params, batches[0], bases=bases)
    inverses = jk.kfac(0.1, like=like_for(params, batches[0]), damping=0.1, damping_mode="pi")
    with pytest.raises(ValueError, match="inverse='eigh'"):
        inverses.update(grads, inverses.init(params), params, factors=factors)
    staggered = jk.kfac(0.1, like=like_for(params, batches[0]), damping=0.1, stagger=True)
    with pytest.raises(ValueError, match="stagger=True"):
        staggered.update(grads, staggered.init(params), params, factors=factors)


@pytest.mark.exhaustive
def test_parameters_behind_a_computed_weight_keep_their_diagonal():
    """They are squared in the second pass already; the other layers are measured."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"v": jax.random.normal(keys[0], (4, 5)), "w": jax.random.normal(keys[1], (5, 3))}
    params["g"] = jnp.ones(3)

    def normed(p, x):
        return jnp.tanh(x @ p["v"]) @ (p["w"] / jnp.linalg.norm(p["w"], axis=0) * p["g"])

    objective = jk.Objective(normed, jk.Categorical())
    batch = jax.random.normal(keys[2], (8, 4)), jnp.arange(8) % 3
    stats = jk.value_grad_and_factors(objective)
    bases = jk.eigendecompose(stats(params, batch).factors)
    found = stats(params, batch, bases=bases).factors
    expected = jk.correct_eigenvalues(objective, bases)(params, batch)
    assert_close(found["v"].corrected, expected["v"].raw_values)
    tx = jk.kfac(0.1, like=stats.factor_shapes(params, batch), damping=0.1)
    state = tx.init(params)
    _, grads, factors = stats(params, batch, bases=state.bases)
    updates, _ = tx.update(grads, state, params, factors=factors)
    assert all(x.any() for x in jax.tree.leaves(updates))
