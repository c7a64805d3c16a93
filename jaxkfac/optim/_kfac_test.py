import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac.blocks import update_average, zeros_like
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import eigendecompose, identity_bases, natural_gradient
from jaxkfac.factors._explicit_net_test import net_batch, net_like, net_params, net_statistics
from jaxkfac.linalg.spectral import check_damping
from jaxkfac.optim import _preconditioner as module
from jaxkfac.optim import kfac

pytestmark = pytest.mark.usefixtures("x64")

PLAIN = {"decay": 0.0, "refresh_every": 1, "momentum": 0.0, "norm_constraint": None}


@pytest.fixture
def problem():
    params = net_params(jax.random.key(0))
    batches = [net_batch(jax.random.key(i), 8) for i in range(6)]
    return params, batches, net_like(params, batches[0])


def assert_close(a, b, tol=1e-10):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.allclose(x, y, rtol=tol, atol=tol), (x, y)


def jitted(tx):
    return jax.jit(lambda g, s, p, f: tx.update(g, s, p, factors=f))


def run(step, params, state, batches):
    for batch in batches:
        grads, factors = net_statistics(params, batch)
        updates, state = step(grads, state, params, factors)
        params = optax.apply_updates(params, updates)
    return params, state


def inner_product(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum(float((x * y).sum()) for x, y in pairs)


@pytest.mark.exhaustive
def test_one_plain_step_is_the_natural_gradient(problem):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    tx = kfac(0.1, like=like, damping=0.2, damping_mode="pi", **PLAIN)
    updates, _ = tx.update(grads, tx.init(params), params, factors=factors)
    natural = natural_gradient(grads, eigendecompose(factors), damping=0.2, damping_mode="pi")
    assert_close(updates, jax.tree.map(lambda g: -0.1 * g, natural))


@pytest.mark.slow
def test_steps_without_factors_go_on_with_the_average_there_is(problem):
    """Factors at every second step from the second on: identities, then what they were."""
    params, batches, like = problem
    tx = kfac(
        0.1, like=like, damping=0.2, decay=0.7, refresh_every=4, momentum=0.0, norm_constraint=None
    )
    state, step = tx.init(params), jitted(tx)
    average = bases = None
    for t, batch in enumerate(batches):
        grads, factors = net_statistics(params, batch)
        if t % 2 == 0:
            updates, state = step(grads, state, params, zeros_like(factors))
        else:
            updates, state = step(grads, state, params, factors)
            average = factors if average is None else update_average(average, factors, 0.7)
        bases = eigendecompose(average) if t in (1, 4) else bases
        before = identity_bases(like) if bases is None else bases
        natural = natural_gradient(grads, before, damping=0.2, missing="identity")
        assert_close(updates, jax.tree.map(lambda g: -0.1 * g, natural))
    assert_close(state.average, average)
    assert int(state.step) == len(batches)


def test_every_step_equals_the_algorithm_written_out(problem):
    params, batches, like = problem
    lr, mu, decay, weight, limit = (lambda t: 0.1 / (1.0 + t)), 0.8, 0.7, 0.05, 1e-3
    tx = kfac(
        lr, like=like, damping=lambda t: 0.2 / (1 + t), decay=decay, refresh_every=2,
        momentum=mu, weight_decay=weight, norm_constraint=limit,
    )  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):  # the schedules divide by an int32 step
        got, state = run(jitted(tx), params, tx.init(params), batches)
    velocity = jax.tree.map(jnp.zeros_like, params)
    average, bases, factor_norms = zeros_like(like), None, []
    for t, batch in enumerate(batches):
        grads, factors = net_statistics(params, batch)
        average = update_average(average, factors, decay)
        if t % 2 == 0:
            bases = eigendecompose(average)
        p = natural_gradient(grads, bases, damping=0.2 / (1 + t))
        nu = min(1.0, (limit / (lr(t) ** 2 * inner_product(p, grads))) ** 0.5)
        factor_norms.append(nu)
        velocity = jax.tree.map(lambda v, x, nu=nu: mu * v + nu * x, velocity, p)
        params = jax.tree.map(lambda x, v, t=t: x - lr(t) * (v + weight * x), params, velocity)
    assert_close(got, params)
    assert_close(state.momentum, velocity)
    assert min(factor_norms) < 1 == max(factor_norms)  # the constraint binds, but not always
    assert int(state.step) == 6 and int(state.skipped) == 0 and int(state.kept) == 0


@pytest.mark.exhaustive  # it binds in the algorithm written out
def test_norm_constraint_bounds_the_quadratic_form(problem):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    for limit in (1e-4, 1e6):
        tx = kfac(0.1, like=like, damping=1e-3, **(PLAIN | {"norm_constraint": limit}))
        updates, _ = jitted(tx)(grads, tx.init(params), params, factors)
        natural = natural_gradient(grads, eigendecompose(factors), damping=1e-3)
        full = jax.tree.map(lambda g: -0.1 * g, natural)
        scale = min(1.0, (limit / (-0.1 * inner_product(full, grads))) ** 0.5)
        assert_close(updates, jax.tree.map(lambda x, s=scale: s * x, full))
        assert (scale < 1) == (limit == 1e-4)


@pytest.mark.exhaustive
def test_a_constraint_that_does_not_bind_has_no_part_in_derivatives(problem):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])

    def update(scale, **options):
        tx = kfac(0.1, like=like, **(PLAIN | options))
        return tx.update(optax.tree.scale(scale, grads), tx.init(params), factors=factors)[0]

    for scale in (1e-6, 1e-200, 0.0):  # of the second the square is zero, too
        found, expected = (
            jax.jvp(lambda z, o=options: update(z, **o), (scale,), (1.0,))[1]
            for options in ({"norm_constraint": 1.0}, {})
        )
        assert_close(found, expected)


@pytest.mark.slow
def test_a_product_out_of_range_leaves_no_nan(problem):
    """It is infinite times a learning rate of zero: the first step of a warm-up."""
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    tx = kfac(
        lambda step: jnp.where(step < 1, 0.0, 1e-150),
        like=like,
        **(PLAIN | {"norm_constraint": 1e-3}),
    )
    huge, state = optax.tree.scale(1e180, grads), tx.init(params)
    for given in (huge, huge, grads):
        updates, state = tx.update(given, state, params, factors=factors)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, state.momentum)))


def test_scan_equals_a_loop(problem):
    params, batches, like = problem
    tx = kfac(0.1, like=like, refresh_every=3)
    looped, state = run(jitted(tx), params, tx.init(params), batches)

    def step(carry, batch):
        params, state = carry
        grads, factors = net_statistics(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    (scanned, scanned_state), _ = jax.lax.scan(step, (params, tx.init(params)), stacked)
    assert_close(scanned, looped)
    assert_close(scanned_state.average, state.average)


@pytest.mark.slow
def test_outside_jit_one_trace_serves_every_step_and_changes_no_bit(problem, monkeypatch):
    params, batches, like = problem
    traces, solve = [], module.natural_gradient
    count = lambda *args, **options: traces.append(args) or solve(*args, **options)
    monkeypatch.setattr(module, "natural_gradient", count)
    tx = kfac(0.1, like=like, damping=0.2, norm_constraint=None)
    state = as_written = tx.init(params)
    for batch in batches:
        grads, factors = net_statistics(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
    assert len(traces) == 1
    for batch in batches:  # NumPy's arrays are not staged
        grads, factors = net_statistics(params, batch)
        on_host = jax.tree.map(np.asarray, params)
        expected, as_written = tx.update(grads, as_written, on_host, factors=factors)
    assert len(traces) == 1 + len(batches)
    ours, theirs = jax.tree.leaves((updates, state)), jax.tree.leaves((expected, as_written))
    assert all(jnp.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_outside_jit_a_schedule_is_read_at_every_step_and_may_be_pythons(problem):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    table = [0.1, 0.1, 0.0]
    tx = kfac(lambda step: jnp.asarray(table[int(step)]), like=like, damping=0.2, **PLAIN)
    first, state = tx.update(grads, tx.init(params), params, factors=factors)
    second, state = tx.update(grads, state, params, factors=factors)
    third, _ = tx.update(grads, state, params, factors=factors)
    assert_close(first, second)
    assert_close(third, jax.tree.map(jnp.zeros_like, params))


def test_bases_change_every_n_steps_and_on_the_first(problem):
    params, batches, like = problem
    tx = kfac(0.1, like=like, refresh_every=3)
    step, state, seen = jitted(tx), tx.init(params), []
    for batch in batches:
        _, state = run(step, params, state, [batch])
        seen.append(state.bases["head/kernel"].g_raw_values)
    changed = [not jnp.array_equal(a, b) for a, b in zip([jnp.ones(2), *seen], seen, strict=False)]
    assert changed == [True, False, False, True, False, False]


def broken_at(where, grads, factors):
    match where:
        case "gradient":
            grads["left"]["bias"] = grads["left"]["bias"].at[1].set(jnp.inf)
        case "input factor":
            factors.a_sums["left/kernel"] = factors.a_sums["left/kernel"].at[0, 1].set(jnp.nan)
        case "diagonal":
            factors.diagonals["scale"] = factors.diagonals["scale"].at[0].set(jnp.nan)
    return grads, factors


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax.adam multiplies floats by an integer count
@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [0, 2])
def test_a_non_finite_step_changes_nothing_and_is_counted(problem, at):
    params, batches, like = problem
    tx = kfac(0.1, like=like, refresh_every=2, others=optax.adam(1e-2), weight_decay=0.1)
    params["extra"] = jnp.ones(3)

    def statistics(batch):
        grads, factors = net_statistics(params, batch)
        return {**grads, "extra": jnp.ones(3)}, factors

    step, state = jitted(tx), tx.init(params)
    for batch in batches[:at]:
        grads, factors = statistics(batch)
        _, state = step(grads, state, params, factors)
    grads, factors = statistics(batches[3])
    expected, _ = step(grads, state, params, factors)
    for where in ("gradient", "input factor", "diagonal"):
        bad_grads, bad_factors = broken_at(where, *statistics(batches[at]))
        updates, after = step(bad_grads, state, params, bad_factors)
        assert all(not x.any() for x in jax.tree.leaves(updates)), where
        assert int(after.skipped) == 1 and int(after.step) == at
        for name in ("average", "momentum", "others"):
            assert_close(getattr(after, name), getattr(state, name), 0.0)
        # The next good step is as if the bad one had never been.
        got, _ = step(grads, after, params, factors)
        assert_close(got, expected, 1e-12)


@pytest.mark.slow
def test_a_failed_decomposition_keeps_the_basis_before_it(problem, monkeypatch):
    params, batches, like = problem
    tx = kfac(0.1, like=like, refresh_every=1, momentum=0.0)
    state = tx.init(params)
    good = module.refresh_bases

    def failing(bases, factors):
        broken = factors.g_sums | {"head/kernel": jnp.nan * factors.g_sums["head/kernel"]}
        return good(bases, dataclasses.replace(factors, g_sums=broken))

    grads, factors = net_statistics(params, batches[0])
    _, state = jitted(tx)(grads, state, params, factors)
    monkeypatch.setattr(module, "refresh_bases", failing)
    updates, after = jitted(tx)(grads, state, params, factors)
    assert int(after.kept) == 1
    assert_close(after.bases.g["head/kernel"], state.bases.g["head/kernel"], 0.0)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(updates))


@pytest.mark.exhaustive
def test_uncovered_parameters_follow_plain_descent_with_momentum(problem):
    params, batches, like = problem
    params["extra"] = {"x": jnp.ones(3)}
    tx = kfac(0.1, like=like, momentum=0.5, weight_decay=0.2, norm_constraint=1e-8)
    step, state = jitted(tx), tx.init(params)
    for expected in (-0.1 * (2.0 + 0.2), -0.1 * (0.5 * 2.0 + 2.0 + 0.2)):
        grads, factors = net_statistics(params, batches[0])
        grads = {**grads, "extra": {"x": 2 * jnp.ones(3)}}
        updates, state = step(grads, state, params, factors)
        assert_close(updates["extra"]["x"], jnp.full(3, expected))


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_others_looks_after_uncovered_parameters_alone(problem):
    params, batches, like = problem
    params["extra"] = {"x": jnp.ones(3)}
    adam = optax.adam(1e-2)
    tx = kfac(0.1, like=like, others=adam, weight_decay=0.2)
    alone = kfac(0.1, like=like, weight_decay=0.2)
    state, alone_state = tx.init(params), alone.init(params)
    step, alone_step, adam_state = jitted(tx), jitted(alone), adam.init(params["extra"])
    assert {x.shape for x in jax.tree.leaves(state.others)} == {(), (3,)}
    for i in range(2):
        grads, factors = net_statistics(params, batches[i])
        grads = {**grads, "extra": {"x": (1.0 + i) * jnp.arange(3.0)}}
        updates, state = step(grads, state, params, factors)
        ours, alone_state = alone_step(grads, alone_state, params, factors)
        theirs, adam_state = adam.update(grads["extra"], adam_state)
        assert_close(updates, {**ours, "extra": theirs}, 1e-12)
        assert not jnp.allclose(ours["extra"]["x"], theirs["x"])


@pytest.mark.slow
def test_updates_keep_the_gradients_dtype_and_the_state_its_own():
    like_layers = (layer("w", (3, 2), bias="b"),)
    factors = random_factors(like_layers, jax.random.key(0), dtype=jnp.float32)
    like = jax.eval_shape(lambda: factors)
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16)}
    tx = kfac(0.1, like=like, norm_constraint=1e-3, weight_decay=1e-2)
    state = tx.init(params)
    updates, after = jitted(tx)(params, state, params, factors)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    shapes = lambda t: [(x.shape, x.dtype) for x in jax.tree.leaves(t)]
    assert shapes(after) == shapes(state)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", [jnp.arange(3), jax.random.key(0), "float0"])
def test_integer_key_and_float0_leaves_pass_unchanged(problem, key):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    tx = kfac(0.1, like=like, norm_constraint=1e-6, weight_decay=0.1)
    expected, _ = jitted(tx)(grads, tx.init(params), params, factors)
    if isinstance(key, str):
        key = jnp.arange(3)
        grads["key"] = np.zeros(3, jax.dtypes.float0)
    else:
        grads["key"] = key
    params["key"] = key
    updates, _ = tx.update(grads, tx.init(params), params, factors=factors)
    assert updates.pop("key") is grads["key"]
    assert_close(updates, expected, 1e-12)


@pytest.mark.exhaustive  # tests/loops_test.py has it
def test_kfac_composes_in_a_chain(problem):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    tx = optax.chain(kfac(0.1, like=like, **PLAIN), optax.scale(0.5))
    alone = kfac(0.1, like=like, **PLAIN)
    updates, _ = jitted(tx)(grads, tx.init(params), params, factors)
    expected, _ = jitted(alone)(grads, alone.init(params), params, factors)
    assert_close(updates, jax.tree.map(lambda x: 0.5 * x, expected))


@pytest.mark.exhaustive
def test_one_full_step_solves_linear_least_squares():
    """With G = I the block A (x) I is the exact Hessian, whatever the inputs' scale."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (20, 3)) * jnp.array([1.0, 30.0, 0.03])
    y = jax.random.normal(jax.random.key(1), (20, 2))
    rows = jnp.concatenate([x, jnp.ones((20, 1))], axis=1)
    linear = layer("w", (3, 2), bias="b")
    factors = random_factors((linear,), key)
    factors.a_sums["w"], factors.a_counts["w"] = rows.T @ rows, jnp.asarray(20.0)
    factors.g_sums["w"] = factors.terms * jnp.eye(2)
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    residual = x @ params["w"] + params["b"] - y
    grads = {"w": x.T @ residual / 20, "b": residual.mean(0)}
    tx = kfac(1.0, like=factors, damping=0.0, max_condition=1e12, **PLAIN)
    updates, _ = tx.update(grads, tx.init(params), params, factors=factors)
    solved = jnp.linalg.lstsq(rows, y)[0]
    assert_close(optax.apply_updates(params, updates), {"w": solved[:-1], "b": solved[-1]}, 1e-8)


BAD = {
    "refresh_every": 0,
    "damping": -1e-3,
    "max_condition": 0.5,
    "floor": -1.0,
    "decay": 1.0,
    "momentum": 1.0,
    "norm_constraint": 0.0,
    "weight_decay": -0.1,
}


@pytest.mark.parametrize(("argument", "value"), BAD.items())
def test_arguments_out_of_range_are_named_when_built(problem, argument, value):
    _, _, like = problem
    with pytest.raises(ValueError, match=argument):
        kfac(0.1, like=like, **{argument: value})


def test_negative_learning_rate_and_unknown_mode_are_refused(problem):
    _, _, like = problem
    with pytest.raises(ValueError, match="learning_rate"):
        kfac(-0.1, like=like)
    with pytest.raises(ValueError, match="damping"):
        kfac(0.1, like=like, damping=(lambda t: t, -1.0))
    with pytest.raises(ValueError, match="damping_mode"):
        check_damping(0.1, "both")


def test_foreign_factors_and_missing_parameters_are_named(problem):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    tx = kfac(0.1, like=like, weight_decay=0.1)
    state = tx.init(params)
    with pytest.raises(ValueError, match="weight_decay needs the parameters"):
        tx.update(grads, state, factors=factors)
    other = random_factors((layer("w", (3, 2)),), jax.random.key(0))
    with pytest.raises(ValueError, match="factors lack the layer 'left/kernel'"):
        tx.update(grads, state, params, factors=other)


def test_parameters_of_another_model_are_refused_at_an_update(problem):
    params, batches, like = problem
    tx, (grads, factors) = kfac(0.1, like=like), net_statistics(params, batches[0])
    with pytest.raises(ValueError, match="params: none of the layers of like="):
        tx.update(grads, tx.init(params), {"other": jnp.ones(3)}, factors=factors)
