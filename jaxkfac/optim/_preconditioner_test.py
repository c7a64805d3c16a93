import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac.blocks import update_average, zeros_like
from jaxkfac.curvature import eigendecompose, natural_gradient
from jaxkfac.factors._explicit_net_test import net_batch, net_like, net_params, net_statistics
from jaxkfac.optim import kfac, multi_steps
from jaxkfac.optim._kfac_test import assert_close, jitted, run

pytestmark = pytest.mark.usefixtures("x64")

OPTIONS = {
    "decay": 0.7, "refresh_every": 3, "momentum": 0.0, "max_condition": float("inf"),
    "norm_constraint": None,
}  # fmt: skip


@pytest.fixture
def params():
    return net_params(jax.random.key(0))


@pytest.fixture
def batches():
    return [net_batch(jax.random.key(i), 8) for i in range(6)]


def like_for(params):
    return net_like(params, net_batch(jax.random.key(0), 8))


def written_out(params, damping, mode, batches, refreshes=(0, 3)):
    """Parameters after steps with the eigenvectors, and the damping, of the last refresh."""
    average = zeros_like(like_for(params))
    for t, batch in enumerate(batches):
        grads, factors = net_statistics(params, batch)
        average = update_average(average, factors, 0.7)
        if t in refreshes:
            bases, delta = eigendecompose(average, max_condition=float("inf")), damping(t)
        natural = natural_gradient(grads, bases, damping=delta, damping_mode=mode)
        params = jax.tree.map(lambda x, p: x - 0.1 * p, params, natural)
    return params


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["pi", "factored"])
def test_stored_inverses_step_like_eigenvectors_with_the_damping_of_the_refresh(
    params, batches, mode
):
    damping = lambda t: 0.3 / (1.0 + t)
    tx = kfac(0.1, like=like_for(params), damping=damping, damping_mode=mode, **OPTIONS)
    with jax.numpy_dtype_promotion("standard"):  # the schedule divides by an int32 step
        found, _ = run(jitted(tx), params, tx.init(params), batches)
    assert_close(found, written_out(params, damping, mode, batches))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("inverse", "mode", "damping"),
    [
        ("eigh", "pi", 0.2),
        ("host", "pi", 0.2),
        ("host", "exact", 0.2),
        ("cholesky", "exact", (0.2, 0.3)),
    ],
)
def test_every_way_of_keeping_a_refresh_gives_the_same_steps(
    params, batches, inverse, mode, damping
):
    options = {"damping": damping, "damping_mode": mode, **OPTIONS}
    tx = kfac(0.1, like=like_for(params), inverse=inverse, **options)
    step = jitted(tx) if inverse != "host" else lambda g, s, p, f: tx.update(g, s, p, factors=f)
    found, state = run(step, params, tx.init(params), batches)
    assert_close(found, written_out(params, lambda t: damping, mode, batches))
    assert int(state.step) == len(batches)


@pytest.mark.exhaustive
def test_stored_inverses_go_through_scan_multi_steps_and_injected_numbers(params, batches):
    tx = kfac(0.1, like=like_for(params), damping=0.2, damping_mode="pi", **OPTIONS)
    expected, _ = run(jitted(tx), params, tx.init(params), batches)

    def step(tx, carry, batch):
        params, state = carry
        grads, factors = net_statistics(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    injected = optax.inject_hyperparams(kfac, static_args=("like", "max_condition"))(
        0.1, like=like_for(params), damping=0.2, damping_mode="pi", **OPTIONS
    )
    for each in (tx, injected, multi_steps(tx, 1)):
        start = params, each.init(params)
        (found, _), _ = jax.lax.scan(lambda c, b, each=each: step(each, c, b), start, stacked)
        assert_close(found, expected, 1e-9)
    donated = jax.jit(lambda g, s, p, f: tx.update(g, s, p, factors=f), donate_argnums=1)
    one, _ = run(donated, params, tx.init(params), batches[:3])
    assert_close(one, run(jitted(tx), params, tx.init(params), batches[:3])[0], 0.0)


@pytest.mark.exhaustive
def test_a_nan_batch_changes_neither_average_nor_inverses(params, batches):
    tx = kfac(0.1, like=like_for(params), damping=0.2, damping_mode="pi", **OPTIONS)
    grads, factors = net_statistics(params, batches[0])
    _, state = jitted(tx)(grads, tx.init(params), params, factors)
    bad = jax.tree.map(lambda x: x * jnp.nan, factors)
    updates, after = jitted(tx)(grads, state, params, bad)
    assert not any(x.any() for x in jax.tree.leaves(updates)) and int(after.skipped) == 1
    assert_close(after._replace(skipped=state.skipped), state, 0.0)


@pytest.mark.slow
def test_an_inverse_that_fails_leaves_the_one_before_it(params, batches):
    """A factor that is not positive has none."""
    options = OPTIONS | {"refresh_every": 1, "decay": 0.0}
    tx = kfac(0.1, like=like_for(params), damping=0.0, damping_mode="factored", **options)
    grads, factors = net_statistics(params, batches[0])
    _, state = jitted(tx)(grads, tx.init(params), params, factors)
    assert int(state.kept) == 0
    factors.g_sums["head/kernel"] = -jnp.eye(2)
    _, after = jitted(tx)(grads, state, params, factors)
    held = lambda s: s.stacked_bases.g["head/kernel"]
    assert int(after.kept) == 1
    assert np.array_equal(held(after), held(state))


@pytest.mark.exhaustive
def test_bfloat16_parameters_keep_their_dtype(params, batches):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tx = kfac(0.1, like=like_for(params), damping=0.2, damping_mode="pi")
    grads, factors = net_statistics(params, batches[0])
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads)
    updates, _ = jitted(tx)(grads, tx.init(half), half, factors)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_the_host_decomposes_for_numpy_arrays_and_schedules_of_python_numbers(params, batches):
    """Neither is traced."""
    like = like_for(params)
    grads, factors = net_statistics(params, batches[0])
    tx, scheduled = (kfac(x, like=like, inverse="host") for x in (0.1, lambda step: 0.1))
    state = tx.init(params)
    expected, _ = tx.update(grads, state, params, factors=factors)
    assert_close(scheduled.update(grads, state, params, factors=factors)[0], expected, 0.0)
    params = jax.device_get(params)
    assert_close(tx.update(grads, state, params, factors=factors)[0], expected, 1e-12)


def test_what_cannot_be_is_refused(params, batches):
    like = like_for(params)
    grads, factors = net_statistics(params, batches[0])
    with pytest.raises(ValueError, match="damping_mode='exact'.*eigenvectors"):
        kfac(0.1, like=like, inverse="cholesky")
    with pytest.raises(ValueError, match="distribute='data'.*choose one"):
        kfac(0.1, like=like, inverse="host", distribute="data")
    with pytest.raises(ValueError, match="stagger=True.*inverse='host'"):
        kfac(0.1, like=like, inverse="host", stagger=True)
    host = kfac(0.1, like=like, inverse="host")
    with pytest.raises(ValueError, match="outside of jit"):
        jitted(host)(grads, host.init(params), params, factors)
    inverses, vectors = kfac(0.1, like=like, damping_mode="pi"), kfac(0.1, like=like)
    with pytest.raises(ValueError, match="keeps Eigenbases.*expected Inverses"):
        inverses.update(grads, vectors.init(params), params, factors=factors)
    with pytest.raises(ValueError, match="keeps inverses of damped factors"):
        _ = inverses.init(params).bases
