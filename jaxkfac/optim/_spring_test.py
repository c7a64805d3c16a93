"""Steps in sample space against dense solves in float64, and what happens around them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from jaxtyping import TypeCheckError

from jaxkfac._errors import CoupledExamplesError
from jaxkfac.factors import Bernoulli, Gaussian, Objective, value_grad_and_factors
from jaxkfac.interception import mark_outputs
from jaxkfac.memory import MemoryBudgetError
from jaxkfac.optim import Optimizer, check_state, multi_steps, spring
from tests._programs import normal, tree

pytestmark = pytest.mark.usefixtures("x64")


def network(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]


def two_terms(weights=False):
    """A loss of two marks with different examples, and its residuals."""

    def parts(p, batch):
        inside, edge = batch
        slope = jax.vmap(jax.grad(lambda x: network(p, x).sum()))(inside).sum(-1)
        return slope - jnp.sin(inside[:, 0]), network(p, edge)[:, 0] - 1.0

    def loss(p, batch):
        r, s = parts(p, batch)
        r = mark_outputs(r, Gaussian())
        s = mark_outputs(s, Gaussian(), weight=10.0)
        return 0.5 * jnp.square(r).mean() + 5.0 * jnp.square(s).mean()

    def residuals(p, batch):
        r, s = parts(p, batch)
        return jnp.concatenate([r / np.sqrt(len(r)), s * np.sqrt(10 / len(s))])

    return loss, residuals


def problem():
    params = tree(1, w=(3, 4), b=(4,), v=(4, 1))
    return params, (normal(2, 6, 3, scale=1.0), normal(3, 5, 3, scale=1.0))


def dense(residuals, params, batch, last, momentum, damping):
    """The direction from the explicit Jacobian, and the change of the loss that it predicts."""
    flat, unravel = ravel_pytree(params)
    of = lambda theta: residuals(unravel(theta), batch)
    r, J = np.asarray(of(flat)), np.asarray(jax.jacrev(of)(flat))
    K = J @ J.T
    shift = damping * np.trace(K)
    last = np.asarray(ravel_pytree(last)[0])
    x = np.linalg.solve(K + shift * np.eye(len(K)), r - momentum * J @ last)
    return momentum * last + J.T @ x


def updated(tx, loss, params, state, batch, **options):
    stats = value_grad_and_factors(loss, fisher="exact", **options)
    grads = jax.grad(loss)(params, batch)
    return tx.update(grads, state, params, **stats.adaptation(params, batch))


def assert_close(tree, flat, tolerance=1e-9):
    found = ravel_pytree(tree)[0]
    np.testing.assert_allclose(found, flat, rtol=0, atol=tolerance * np.abs(flat).max())


@pytest.mark.slow
def test_steps_are_those_of_the_explicit_jacobian():
    loss, residuals = two_terms()
    params, batch = problem()
    tx = spring(learning_rate=0.5, damping=1e-2)
    state = tx.init(params)
    for _ in range(2):
        expected = dense(residuals, params, batch, state.last, 0.9, 1e-2)
        updates, state = updated(tx, loss, params, state, batch)
        assert_close(updates, -0.5 * expected)
        assert_close(state.last, expected)
        params = optax.apply_updates(params, updates)


def linear():
    """A linear model, whose residuals are linear too; one step solves it."""
    params = {"w": normal(4, 8, 1), "unused": jnp.ones(2)}
    objective = Objective(lambda p, x: x @ p["w"], Gaussian())
    return objective, params, (normal(5, 3, 8, scale=1.0), normal(6, 3, 1, scale=1.0))


@functools.cache
def step_of(objective, tx):
    return jax.jit(Optimizer(objective, tx).step)


def train(objective, tx, params, batch, steps):
    state = Optimizer(objective, tx).init(params, batch)
    for _ in range(steps):
        params, state, loss = step_of(objective, tx)(params, state, batch)
    return params, state, loss


def test_a_linear_problem_is_solved_and_unused_parameters_stay():
    objective, params, batch = linear()
    after, state, loss = train(objective, spring(), params, batch, 8)
    assert loss < 1e-10 and objective(params, batch) > 1e-2
    np.testing.assert_array_equal(after["unused"], params["unused"])
    assert (int(state.inner.step), int(state.inner.skipped)) == (8, 0)
    check_state(state)


@pytest.mark.slow
def test_a_batch_that_is_not_finite_changes_nothing_but_a_counter():
    objective, params, batch = linear()
    tx = spring()
    params, state, _ = train(objective, tx, params, batch, 2)
    bad = batch[0].at[1, 2].set(jnp.nan), batch[1]
    after, new, _ = step_of(objective, tx)(params, state, bad)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    jax.tree.map(np.testing.assert_array_equal, new.inner.last, state.inner.last)
    assert int(new.inner.skipped) == 1 and int(new.inner.step) == 2
    with pytest.warns(UserWarning, match="updates were skipped"):
        check_state(new)
    after, new, loss = step_of(objective, tx)(after, new, batch)
    assert jnp.isfinite(loss) and int(new.inner.step) == 3


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one row", "equal rows", "zero residuals", "masked", "weights"])
def test_degenerate_batches_lower_the_loss_or_stay(case):
    objective, params, (x, y) = linear()
    batch = {
        "one row": (x[:1], y[:1]),
        "equal rows": (jnp.tile(x[:1], (3, 1)), jnp.tile(y[:1], (3, 1))),
        "zero residuals": (x, x @ params["w"]),
        "masked": (x, y.at[1].set(jnp.nan), jnp.array([True, False, True])),
        "weights": (x, y, jnp.array([0.5, 0.0, 2.0])),
    }[case]
    before = objective(params, batch)
    after, state, _ = train(objective, spring(damping=1e-6), params, batch, 3)
    assert objective(after, batch) <= 1e-8 * before + 1e-12
    assert int(state.inner.skipped) == 0


@pytest.mark.slow
def test_weights_are_those_of_repeated_rows():
    objective, params, (x, y) = linear()
    twice = jnp.concatenate([x, x[:1]]), jnp.concatenate([y, y[:1]])
    tx = spring(learning_rate=0.3, damping=1e-2)
    one = train(objective, tx, params, twice, 2)[0]
    two = train(objective, tx, params, (x, y, jnp.array([2.0, 1.0, 1.0])), 2)[0]
    # The trace of K, and with it the damping, is the same sum.
    np.testing.assert_allclose(one["w"], two["w"], rtol=1e-9)


@pytest.mark.slow
def test_last_steps_become_shorter_and_decay_of_weights_is_decoupled():
    objective, params, batch = linear()
    steps = []
    for tx in (spring(learning_rate=0.5), spring(2, learning_rate=0.5)):
        after, _, _ = train(objective, tx, params, batch, 1)
        steps.append(after["w"] - params["w"])
    np.testing.assert_allclose(steps[1], steps[0], rtol=1e-12)  # 2 of 2 steps are left
    one, state, _ = train(objective, spring(4, learning_rate=0.5), params, batch, 3)
    two, _, _ = step_of(objective, spring(4, learning_rate=0.5))(one, state, batch)
    long, _, _ = step_of(objective, spring(learning_rate=0.5))(one, state, batch)
    expected = (long["w"] - one["w"]) * (1 / 4) / 0.3
    np.testing.assert_allclose(two["w"] - one["w"], expected, rtol=1e-9)
    decayed, _, _ = train(objective, spring(learning_rate=0.5, weight_decay=0.1), params, batch, 1)
    np.testing.assert_allclose(decayed["w"] - params["w"], steps[0] - 0.05 * params["w"], rtol=1e-9)
    np.testing.assert_allclose(decayed["unused"], 0.95 * params["unused"], rtol=1e-9)


@jax.custom_jvp
def energy(p, walkers):
    """A loss with the derivative of an energy, whose rule marks log psi."""
    return jnp.cos(walkers[:, 0]).mean()


@energy.defjvp
def _energy_rule(primals, tangents):
    psi, dpsi = jax.jvp(lambda p, x: network(p, x)[:, 0], primals, tangents)
    mark_outputs(psi, Gaussian())
    values = jnp.cos(primals[1][:, 0])
    return values.mean(), jnp.dot(dpsi, values - values.mean()) / len(values)


@pytest.mark.slow
def test_scores_are_centered_and_their_step_is_that_of_the_covariance():
    params, (walkers, _) = problem()
    flat, unravel = ravel_pytree(params)
    rows = np.asarray(jax.jacrev(lambda t: network(unravel(t), walkers)[:, 0])(flat))
    rows = (rows - rows.mean(0)) / np.sqrt(len(rows))
    gradient = np.asarray(ravel_pytree(jax.grad(energy)(params, walkers))[0])
    shift = 1e-2 * np.trace(rows @ rows.T)
    curvature = rows.T @ rows
    d = np.linalg.solve(curvature + shift * np.eye(len(flat)), gradient)
    plain = spring(rows="scores", damping=1e-2, norm_constraint=None)
    updates, state = updated(plain, energy, params, plain.init(params), walkers)
    assert_close(updates, -0.05 * d)
    updates, _ = updated(plain, energy, params, state, walkers)
    more = np.linalg.solve(curvature + shift * np.eye(len(flat)), gradient - 0.95 * curvature @ d)
    assert_close(updates, -0.05 * (0.95 * d + more))
    bound = spring(rows="scores", damping=1e-2, norm_constraint=1e-6)
    updates, _ = updated(bound, energy, params, bound.init(params), walkers)
    moved = np.asarray(ravel_pytree(updates)[0])
    np.testing.assert_allclose(4 * np.square(rows @ moved).sum(), 1e-6, rtol=1e-9)


@pytest.mark.slow
def test_rows_of_all_devices_make_the_step_of_one():
    loss, _ = two_terms()
    params, (inside, edge) = problem()
    batch = inside, jnp.concatenate([edge, edge[:1]])
    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    tx = spring()
    one, together = Optimizer(loss, tx), Optimizer(loss, tx, axis_name="devices")
    state, states = (
        one.init(params, batch),
        together.init(params, jax.tree.map(lambda x: x[0], parts)),
    )
    step = jax.vmap(together.step, (None, None, 0), axis_name="devices")
    for _ in range(2):
        params, state, _ = one.step(params, state, batch)
    other = jax.tree.map(lambda x: x, problem()[0])
    for _ in range(2):
        other, states, _ = jax.tree.map(lambda x: x[0], step(other, states, parts))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-7), other, params)
    np.testing.assert_allclose(states.inner.damping, state.inner.damping, rtol=1e-9)


@pytest.mark.slow
def test_shard_map_knows_that_the_result_is_equal_on_all_devices():
    objective, params, (x, y) = linear()
    batch = jnp.concatenate([x, -x]), jnp.concatenate([y, y + 1])
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    one = Optimizer(objective, spring())
    together = Optimizer(objective, spring(), axis_name="devices")
    specs = {"in_specs": (P(), P(), P("devices")), "out_specs": P()}
    mapped = lambda opt: jax.jit(jax.shard_map(opt.step, mesh=mesh, **specs))
    state = one.init(params, batch)
    expected, expected_state, loss = jax.jit(one.step)(params, state, batch)
    found, found_state, found_loss = mapped(together)(params, state, batch)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-9)
    np.testing.assert_allclose(found_state.inner.damping, expected_state.inner.damping)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-12)
    with pytest.raises(ValueError, match=r"one device's batch.*axis_name"):
        mapped(one)(params, state, batch)


@pytest.mark.slow
def test_models_in_bfloat16_are_solved_in_float32():
    objective, params, batch = linear()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
    after, state, loss = train(objective, spring(), *half, 5)
    assert after["w"].dtype == jnp.bfloat16 and state.inner.last["w"].dtype == jnp.float32
    assert loss < 1e-2 * objective(*half)


def test_bad_arguments_are_named():
    for options, match in (
        ({"rows": "outputs"}, "rows"),
        ({"damping": float("nan")}, "damping must be finite and positive"),
        ({"damping": -1.0}, "damping must be finite and positive"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"floor": 0.0}, "floor must be between"),
        ({"num_steps": 0}, "num_steps"),
        ({"rows": "scores", "learning_rate": "search"}, "walkers belong to the old"),
        ({"learning_rate": 0.1, "damping": "adaptive"}, "compares full steps"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
    ):
        with pytest.raises((ValueError, TypeCheckError), match=match):
            spring(**options)
    params = {"w": jnp.ones((2, 1))}
    tx = spring()
    with pytest.raises(TypeError, match=r"curvature.*stats.adaptation"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match=r"jk.spring is inside.*fewer rows"):
        multi_steps(tx, 2).init(params)


@pytest.mark.slow
def test_losses_without_residuals_are_refused_with_the_remedy():
    objective, params, batch = linear()
    tx = spring()
    both = lambda loss, tx=tx: updated(tx, loss, params, tx.init(params), batch)
    squares = lambda p, b: 0.5 * jnp.square(b[0] @ p["w"] - b[1]).mean()
    with pytest.raises(TypeError, match="mark"):
        both(squares)

    def penalized(p, b):
        r = mark_outputs(b[0] @ p["w"] - b[1], Gaussian())
        return 0.5 * jnp.square(r).mean() + jnp.square(p["w"]).sum()

    with pytest.raises(ValueError, match="depends on 'w' past its .*weight_decay"):
        both(penalized)
    with pytest.raises(MemoryBudgetError, match="max_bytes=10: a result of 3 x 3 takes"):
        both(objective, spring(max_bytes=10))
    with pytest.raises(CoupledExamplesError):
        both(Objective(lambda p, x: (x - x.mean(0)) @ p["w"], Gaussian()))
    bernoulli = Objective(lambda p, x: x @ p["w"], Bernoulli())
    with pytest.raises(ValueError, match="no residuals"):
        updated(tx, bernoulli, params, tx.init(params), (batch[0], jnp.ones((3, 1))))
    params, (walkers, _) = problem()
    with pytest.raises(ValueError, match="derivative of its own.*scores"):
        updated(spring(), energy, params, spring().init(params), walkers)


@pytest.mark.slow
def test_a_scan_over_steps_is_a_loop_over_them_and_batches_may_change_their_size():
    objective, params, batch = linear()
    opt = Optimizer(objective, spring(6))
    state = opt.init(params, batch)

    def body(carry, _):
        params, state, loss = opt.step(*carry, batch)
        return (params, state), loss

    (scanned, _), losses = jax.lax.scan(body, (params, state), length=3)
    looped, state, loss = train(objective, spring(6), params, batch, 3)
    np.testing.assert_allclose(losses[-1], loss, rtol=1e-6)
    np.testing.assert_allclose(scanned["w"], looped["w"], rtol=1e-9)
    few = batch[0][:2], batch[1][:2]
    opt.step(looped, state, few)
