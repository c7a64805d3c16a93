"""K-FAC whose factors come in turns: nothing moves until every group has come, then all does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

from jaxkfac.blocks import Factors, update_average, zeros_like
from jaxkfac.curvature import HostCurvature, eigendecompose, invert, natural_gradient
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.optim import check_state, kfac, kfe_adam, multi_steps

N, WIDTH, ITERATIONS = 8, 5, 3
KEYS = jax.random.split(jax.random.key(0), 6)


def model(params, x):
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]) * p["scale"], None

    x, _ = jax.lax.scan(layer, x @ params["in"], params["blocks"])
    return x @ params["out"]


def problem_of(width=WIDTH, iterations=ITERATIONS):
    normal = lambda i, *shape: jax.random.normal(KEYS[i], shape) / 2
    params = {
        "in": normal(0, 4, width),
        "blocks": {
            "w": normal(1, iterations, width, width),
            "b": jnp.zeros((iterations, width)),
            "scale": jnp.ones((iterations, width)),
        },
        "out": normal(2, width, 3),
    }
    return Objective(model, Categorical()), params, (normal(3, N, 4), jnp.arange(N) % 3)


def training(problem, groups, *, packed=False, wrap=lambda tx: tx, **options):
    """A jitted step of a training, its transformation, and the carry that it begins with."""
    objective, params, batch = problem
    stats = value_grad_and_factors(objective, collect=groups, packed=packed)
    tx = wrap(kfac(**options, like=stats.factor_shapes(params, batch), packed=packed))
    adapts = "learning_rate" not in options

    @jax.jit
    def step(carry, batch, number):
        params, state = carry
        of_turn = {} if groups == 1 else {"step": number}
        value, grads, factors = stats(params, batch, **of_turn)
        extra = stats.adaptation(params, batch) if adapts else {"value": value}
        updates, state = tx.update(grads, state, params, factors=factors, **extra)
        return optax.apply_updates(params, updates), state

    return step, tx, (params, tx.init(params))


def assert_close(tree, expected, **tolerances):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, **{"rtol": 1e-9, "atol": 1e-12} | tolerances)


def as_float64(problem):
    objective, params, (x, targets) = problem
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (params, x))
    return objective, wide[0], (wide[1], targets)


WAYS = {
    "exact": {"learning_rate": 0.1},
    "pi": {"learning_rate": 0.1, "damping_mode": "pi"},
    "eigenvectors, pi": {"learning_rate": 0.1, "damping_mode": "pi", "inverse": "eigh"},
    "factored, packed": {"learning_rate": 0.1, "damping_mode": "factored", "packed": True},
    "exact, packed": {"learning_rate": 0.1, "packed": True},
    "orthogonal iteration": {"learning_rate": 0.1, "inverse": "qr"},
    "staggered": {"learning_rate": 0.1, "stagger": True},
    "adaptive": {},
    "adaptive, exact": {"damping_mode": "exact"},
    "chain": {
        "learning_rate": 0.1,
        "wrap": lambda tx: optax.chain(optax.clip_by_global_norm(0.1), tx),
    },
}
# A chain goes through all that a fixed rate does.
MARKS = {"chain": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(x, marks=MARKS.get(x, [pytest.mark.exhaustive])) for x in WAYS]
)
def test_the_first_update_is_that_of_all_factors_and_comes_after_a_round(x64, way):
    options = WAYS[way]
    problem = as_float64(problem_of(66 if options.get("packed") else WIDTH))
    batch = problem[2]
    step, _, carry = training(problem, 2, **options)
    start = carry[0]
    carry = step(carry, batch, 0)
    assert_close(carry[0], start, rtol=0, atol=0)
    params, state = step(carry, batch, 1)
    complete, _, begin = training(problem, 1, **options)
    expected, complete_state = complete(begin, batch, 0)
    assert_close(params, expected)
    assert not np.allclose(params["out"], start["out"], rtol=0, atol=1e-7)
    (ours,), (theirs,) = (states_in(x) for x in (state, complete_state))
    assert ours.step == theirs.step == 1 and ours.missed == ours.skipped == 0
    for name in theirs.average:
        assert_close(ours.average[name], theirs.average[name], rtol=1e-12)
    params, state = step((params, state), batch, 2)
    assert states_in(state)[0].step == 2 and step._cache_size() == 1


def states_in(state):
    is_kfac = lambda x: hasattr(x, "stacked_average")
    return [x for x in jax.tree.leaves(state, is_leaf=is_kfac) if is_kfac(x)]


@pytest.mark.slow
def test_a_training_in_turns_is_that_of_averages_made_by_hand(x64):
    """NumPy averages each iteration by its own count, with masks of different size."""
    objective, params, (x, targets) = as_float64(problem_of())
    decay, damping, rate = 0.7, 0.03, 0.2
    batches = [(x * (1 + i), targets, jnp.arange(N) < 8 - i) for i in range(5)]
    options = {"momentum": 0.0, "norm_constraint": None, "refresh_every": 1, "decay": decay}
    step, _, carry = training(
        (objective, params, batches[0]), 2, learning_rate=rate, damping=damping, **options
    )
    every = jax.jit(value_grad_and_factors(objective))
    ours, a_sums, a_counts, g_means, g_counts = params, {}, {}, {}, {}
    for number, batch in enumerate(batches):
        carry = step(carry, batch, number)
        _, grads, factors = every(ours, batch)
        for layer in factors.layers:
            windowed = bool(layer.stack) and not layer.is_diagonal
            first, name = (number % 2) * ITERATIONS // 2, layer.name
            rows = slice(first, first + 2) if windowed else slice(None)
            table = factors.diagonals if layer.is_diagonal else factors.g_sums
            g, n = np.asarray(table[name]), float(factors.terms)
            shape = (ITERATIONS, *[1] * (g.ndim - 1)) if windowed else (1,) * g.ndim
            counts = g_counts.setdefault(name, np.zeros(shape))
            means = g_means.setdefault(name, np.zeros(g.shape))
            before = decay * counts[rows]
            counts[rows] = before + n
            means[rows] = (before * means[rows] + g[rows]) / counts[rows]
            if layer.is_diagonal:
                continue
            for made, new in ((a_sums, factors.a_sums), (a_counts, factors.a_counts)):
                total = made.setdefault(name, np.zeros(np.shape(new[name])))
                rows = rows if total.ndim else ...
                total[rows] = decay * total[rows] + np.asarray(new[name])[rows]
        if number < 1:
            continue
        diagonals = {k: jnp.asarray(x) for k, x in g_means.items() if k in factors.diagonals}
        average = Factors(
            {k: jnp.asarray(x) for k, x in a_sums.items()},
            {k: jnp.asarray(x) for k, x in a_counts.items()},
            {k: jnp.asarray(x) for k, x in g_means.items() if k not in diagonals},
            diagonals,
            jnp.ones(()),
            factors.layers,
            factors.bias,
        )
        steps = natural_gradient(grads, eigendecompose(average), damping=damping)
        ours = jax.tree.map(lambda p, s: p - rate * s, ours, steps)
    assert_close(carry[0], ours)
    assert carry[1].step == 4


@pytest.mark.exhaustive
def test_steps_of_a_scan_and_of_a_loop_agree(x64):
    problem = as_float64(problem_of())
    step, _, carry = training(problem, 3, learning_rate=0.1, refresh_every=2)
    looped = carry
    for number in range(7):
        looped = step(looped, problem[2], number)
    body = lambda carry, number: (step(carry, problem[2], number), None)
    carried, _ = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(7)))(carry)
    assert_close(carried, looped)
    assert carried[1].step == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"learning_rate": 0.1}, pytest.param({}, marks=pytest.mark.exhaustive)],
    ids=["fixed", "adaptive"],
)
def test_a_nan_in_one_turn_leaves_everything(options):
    problem = problem_of()
    step, _, carry = training(problem, 2, **options)
    bad = problem[2][0].at[0, 0].set(jnp.nan), problem[2][1]
    for number in range(4):
        before, after = carry, step(carry, bad, number)
        assert after[1].skipped == before[1].skipped + 1
        unskipped = after[1]._replace(skipped=before[1].skipped, watch=before[1].watch)
        assert_close((after[0], unskipped.stacked_average), (before[0], carry[1].stacked_average),
                     rtol=0, atol=0)  # fmt: skip
        carry = step(carry, problem[2], number)
    assert carry[1].step == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["exact", "pi"])
def test_staggered_refreshes_take_the_iterations_of_a_scan_in_turn(x64, mode):
    problem = as_float64(problem_of())
    options = {"learning_rate": 0.1, "damping_mode": mode, "refresh_every": 2, "stagger": True}
    step, tx, carry = training(problem, 2, **options, inverse="eigh")
    seen = {}
    for number in range(7):
        before, carry = carry[1].bases, step(carry, problem[2], number)
        state = carry[1]
        fresh = eigendecompose(state.average)
        for name in ("blocks/w", "in", "out"):
            old, new, expected = (x.g[name].values for x in (before, state.bases, fresh))
            for row in range(ITERATIONS) if name == "blocks/w" else [...]:
                if not np.array_equal(old[row], new[row]):
                    np.testing.assert_allclose(new[row], expected[row], rtol=1e-9)
                    seen.setdefault((name, row), []).append(int(state.step) - 1)
    # All at the first update, then iteration 0 at even steps and the others at odd ones; at step 1
    # the last iteration has no new factors.
    assert [seen["blocks/w", row] for row in range(3)] == [[0, 2, 4], [0, 1, 3, 5], [0, 3, 5]]
    assert seen["in", ...][1] % 2 != seen["out", ...][1] % 2


@pytest.mark.exhaustive
def test_gradients_wait_for_the_other_parameters_too():
    objective, params, batch = problem_of()
    stats = value_grad_and_factors(objective, collect=2, layers="blocks/.*|out", uncovered="ignore")
    like = stats.factor_shapes(params, batch)
    tx = kfac(0.1, like=like, others=optax.sgd(0.1, momentum=0.9), weight_decay=0.1)
    state = tx.init(params)
    for number, moves in ((0, False), (1, True)):
        _, grads, factors = stats(params, batch, step=number)
        updates, state = tx.update(grads, state, params, factors=factors)
        assert all(bool(jnp.any(x != 0)) == moves for x in jax.tree.leaves(updates))
    assert state.step == 1


# ---------------- accumulated, saved, watched


@pytest.mark.slow
@pytest.mark.parametrize("kept", [None, pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_micro_batches_of_a_turn_are_one_large_batch(x64, kept):
    objective, params, (x, targets) = as_float64(problem_of(66))
    stats = value_grad_and_factors(objective, collect=2, packed=True)
    like = stats.factor_shapes(params, (x, targets))
    tx = kfac(0.1, like=like, packed=True, decay=0.5)
    accumulating = multi_steps(tx, 2, accumulator_dtype=kept)
    gather = jax.jit(lambda batch, number: stats(params, batch, step=number)[1:])
    state, whole = accumulating.init(params), tx.init(params)
    accumulators = state.accumulation.acc_grads["factors"]
    assert accumulators.g_sums["blocks/w"].shape[0] == 2  # iterations of one turn, of three
    update, at_once = (
        jax.jit(lambda g, s, f, tx=tx: tx.update(g, s, params, factors=f))
        for tx in (accumulating, tx)
    )
    for number in range(3):
        for rows in (slice(0, 3), slice(3, None)):
            grads, factors = gather((x[rows], targets[rows]), number)
            updates, state = update(grads, state, factors)
        grads, factors = gather((x, targets), number)
        expected, whole = at_once(grads, whole, factors)
        # In bfloat16 gradients are rounded, and triangles are float32.
        tolerance = 1e-9 if kept is None else 1e-6
        if kept is None:
            for one, other in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
                assert jnp.linalg.norm(one - other) <= tolerance * jnp.linalg.norm(other)
        for name in ("in", "blocks/w", "out"):
            for one, other in zip(state.inner.average[name], whole.average[name], strict=True):
                assert jnp.linalg.norm(one - other) <= tolerance * jnp.linalg.norm(other)
    assert state.inner.step == 2 and state.skipped == 0


@pytest.mark.exhaustive
def test_a_group_of_micro_batches_of_two_turns_is_skipped_and_counted():
    objective, params, batch = problem_of()
    stats = value_grad_and_factors(objective, collect=2)
    tx = multi_steps(kfac(0.1, like=stats.factor_shapes(params, batch)), 2)

    @jax.jit
    def step(state, number):
        _, grads, factors = stats(params, batch, step=number)
        return tx.update(grads, state, params, factors=factors)

    state = tx.init(params)
    for number in (0, 0, 0, 1, 1, 1):
        updates, state = step(state, number)
    assert state.inner.skipped == 1 and state.inner.watch.outsized == 0 and state.inner.step == 1
    assert state.inner.stacked_average.turn.number == 2
    with pytest.warns(UserWarning, match="micro-batches of an update were of different groups"):
        check_state(state)
    updates, state = tx.update(updates, state, params, factors=None, terms=8)
    updates, state = step(state, 0)  # one micro-step of the group brings factors
    assert state.inner.stacked_average.turn.number == 3


@pytest.mark.exhaustive
def test_single_micro_batches_pass_turns_on():
    objective, params, batch = problem_of()
    stats = value_grad_and_factors(objective, collect=2)
    tx = kfac(0.1, like=stats.factor_shapes(params, batch))
    single = multi_steps(tx, 1)
    states = tx.init(params), single.init(params)
    for number in range(2):
        _, grads, factors = stats(params, batch, step=number)  # static: layers are divided
        plain, one = tx.update(grads, states[0], params, factors=factors)
        updates, other = single.update(grads, states[1], params, factors=factors)
        states = one, other
        assert_close(updates, plain, rtol=0, atol=0)
    updates, other = single.update(grads, other, params, factors=None, terms=8)
    assert other.inner.step == 2


@pytest.mark.exhaustive
def test_a_state_in_turns_is_saved_and_restored():
    problem = problem_of()
    step, tx, carry = training(problem, 3, learning_rate=0.1)
    carry = step(carry, problem[2], 0)
    written = serialization.to_bytes(carry[1])
    restored = serialization.from_bytes(tx.init(problem[1]), written)
    for number in (1, 2, 3):
        carry = step(carry, problem[2], number)
    again = problem[1], restored
    for number in (1, 2, 3):
        again = step(again, problem[2], number)
    assert_close(again, carry, rtol=0, atol=0)
    complete = training(problem, 1, learning_rate=0.1)[1].init(problem[1])
    with pytest.raises(ValueError, match="turn"):
        serialization.from_bytes(complete, written)


@pytest.mark.slow
def test_check_state_says_when_a_group_never_comes():
    problem = problem_of()
    step, _, carry = training(problem, 2, learning_rate=0.1)
    for _ in range(5):
        carry = step(carry, problem[2], carry[1].step)
    check_state(carry[1])
    carry = step(carry, problem[2], carry[1].step)
    with pytest.warns(UserWarning, match="factors of 6 steps.*never come.*state.step stays 0"):
        check_state(carry[1])
    assert carry[1].step == 0


# ---------------- memory


def bottlenecks(width, iterations):
    """Layers from a wide side to a narrow one and back: their factors outweigh all else."""
    normal = lambda i, *shape: jax.random.normal(KEYS[i], shape) / 8
    down, up = normal(0, iterations, width, 4), normal(1, iterations, 4, width)

    def apply(params, x):
        block = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["down"]) @ p["up"], None))
        return jax.lax.scan(block, x, params)[0]

    batch = normal(2, N, width), jnp.arange(N)
    return Objective(apply, Categorical()), {"down": down, "up": up}, batch


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pi", pytest.param("exact", marks=pytest.mark.exhaustive)])
def test_a_step_holds_the_factors_of_one_turn(mode):
    """Zeros of full size, or a copy of the average, would show here."""
    problem, nbytes = bottlenecks(128, 8), {}
    for groups in (1, 4):
        options = {"learning_rate": 0.1, "damping_mode": mode}
        step, _, carry = training(problem, groups, **options)
        donated = jax.jit(lambda c, b, n, step=step: step(c, b, n), donate_argnums=0)
        program = donated.lower(carry, problem[2], jnp.int32(0)).compile()
        nbytes[groups] = program.memory_analysis().temp_size_in_bytes
    matrix = 128 * 128 * 4  # one A and one G for each of eight iterations, or for two of them
    assert nbytes[1] - nbytes[4] > 2 * (8 - 2) * matrix - 4 * matrix  # and rows being written


# ---------------- what is refused


@pytest.mark.slow
def test_complete_factors_and_those_of_turns_do_not_meet():
    objective, params, batch = problem_of()
    complete, half = (value_grad_and_factors(objective, collect=k) for k in (1, 2))
    like = half.factor_shapes(params, batch)
    tx, usual = kfac(0.1, like=like), kfac(0.1, like=complete.factor_shapes(params, batch))
    _, grads, factors = complete(params, batch)
    in_turn = half(params, batch, step=0).factors
    average = update_average(zeros_like(like), in_turn, 0.5)
    refused = [
        (lambda: tx.update(grads, tx.init(params), params, factors=factors), "collect=1, exp"),
        (lambda: usual.update(grads, usual.init(params), params, factors=in_turn), "collect=2, e"),
        (lambda: tx.update(grads, tx.init(params), params, factors=average), "are an average"),
        (lambda: kfac(0.1, like=in_turn), "like=: the factors of one step of collect=2"),
        (lambda: multi_steps(optax.sgd(0.1), 2, like=in_turn), "like=: the factors of one step"),
        (lambda: kfe_adam(0.1, like=like), "kfe_adam averages"),
        (lambda: eigendecompose(in_turn), "eigendecompose: the factors of one step"),
        (lambda: invert(in_turn, damping=0.1, damping_mode="pi"), "invert: the factors of one"),
        (lambda: half.factor_shapes(params, batch, bases=eigendecompose(factors)), "and bases="),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert eigendecompose(average).g["out"].values.shape == (3,)
    accumulating = multi_steps(tx, 2)
    state = accumulating.init(params)
    with pytest.raises(ValueError, match="multi_steps: the factors of this step lack layer"):
        accumulating.update(grads, state, params, factors=in_turn)
    with HostCurvature() as service, pytest.raises(ValueError, match=r"push: .*\(collect=2\)"):
        service.push(in_turn, 0)
