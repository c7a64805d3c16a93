"""Adapted steps against a restatement of the paper in NumPy, and where nothing can be adapted."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac.curvature import operators
from jaxkfac.factors import Bernoulli, Categorical, Gaussian, Objective, value_grad_and_factors
from jaxkfac.interception import mark_outputs
from jaxkfac.optim import LevenbergMarquardt, Trial, kfac, multi_steps
from jaxkfac.optim._adaptation import Adaptation
from jaxkfac.optim._quadratic_model import BatchLoss, check_batch, minimum

N, SIZES = 24, (4, 5, 3)


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def problem(seed=0):
    rng = np.random.default_rng(seed)
    weights = [0.6 * rng.normal(size=(n + 1, m)) for n, m in zip(SIZES, SIZES[1:], strict=False)]
    x, y = rng.normal(size=(N, SIZES[0])), rng.normal(size=(N, SIZES[-1]))
    params = [{"kernel": jnp.asarray(w[:-1]), "bias": jnp.asarray(w[-1])} for w in weights]
    return weights, x, y, params, (jnp.asarray(x), jnp.asarray(y))


def network(params, x):
    hidden, out = params
    return jnp.tanh(x @ hidden["kernel"] + hidden["bias"]) @ out["kernel"] + out["bias"]


OBJECTIVE = Objective(network, Gaussian())


def marked(params, batch):
    """The loss of ``OBJECTIVE``, as a scalar loss."""
    outputs = mark_outputs(network(params, batch[0]), Gaussian())
    return 0.5 * ((outputs - batch[1]) ** 2).sum(1).mean()


def training(params, batch, objective=OBJECTIVE, **options):
    """``(tx, state, step)``; a step takes and returns parameters and state."""
    stats = value_grad_and_factors(objective, fisher="exact")
    options = {
        "learning_rate": "quadratic",
        "momentum": "quadratic",
        "damping_mode": "exact",
    } | options
    tx = kfac(like=stats.factor_shapes(params, batch), **options)

    def step(params, state, batch=batch):
        value, grads, factors = stats(params, batch)
        updates, state = tx.update(
            grads,
            state,
            params,
            factors=factors,
            value=value,
            value_fn=lambda params: objective(params, batch),
            curvature=operators.ggn(objective, params, batch),
        )
        return optax.apply_updates(params, updates), state

    return tx, tx.init(params), step


def with_ones(x):
    return np.concatenate([x, np.ones((len(x), 1))], 1)


def test_the_defaults_are_those_of_the_paper():
    """Sections 6.5 and 6.6: T1 = 5 and T2 = 20 updates, the damping times 19/20 to the power T1."""
    default = LevenbergMarquardt()
    assert (default.every, default.factor, default.factor_every) == (5, 19 / 20, 20)


class Paper:
    """Martens and Grosse (2015), sections 6 and 7, for one tanh layer, in NumPy."""

    def __init__(
        self, weights, x, y, *, damping, decay, weight_decay, refresh, every, factor, factor_every=0
    ):
        self.factor_every, self.factor_damping = factor_every, damping + weight_decay
        self.tried = []
        self.w, self.x, self.y = weights, x, y
        self.damping, self.decay, self.weight_decay = damping, decay, weight_decay
        self.refresh, self.every, self.factor = refresh, every, factor
        self.sums, self.count, self.steps = [0.0] * 4, 0.0, 0
        self.last, self.inverses, self.ratio = [np.zeros_like(w) for w in weights], [], 1.0

    def forward(self, weights):
        first = with_ones(self.x)
        second = with_ones(np.tanh(first @ weights[0]))
        return first, second, second @ weights[1]

    def loss(self, weights):
        return 0.5 * ((self.forward(weights)[2] - self.y) ** 2).sum(1).mean()

    def penalised(self, weights):
        return self.loss(weights) + self.weight_decay / 2 * self.inner(weights, weights)

    @staticmethod
    def inner(one, other):
        return sum((u * v).sum() for u, v in zip(one, other, strict=True))

    def step(self):
        first, second, out = self.forward(self.w)
        through = (1 - second[:, :-1] ** 2)[:, :, None] * self.w[1][:-1]  # n, hidden, out
        rows = [through, np.broadcast_to(np.eye(SIZES[-1]), (N, SIZES[-1], SIZES[-1]))]
        inputs = [first, second]
        new = [a.T @ a / N for a in inputs] + [np.einsum("nio,njo->ij", g, g) / N for g in rows]
        self.sums = [self.decay * old + x for old, x in zip(self.sums, new, strict=True)]
        self.count = self.decay * self.count + 1
        both = self.damping + self.weight_decay
        if not self.factor_every:
            self.factor_damping = both
        error = (out - self.y) / N
        slopes = [np.einsum("ni,nho,no->ih", first, through, error), second.T @ error]
        grads = [g + self.weight_decay * w for g, w in zip(slopes, self.w, strict=True)]

        def inverses(damping):
            found = []
            for a, g in zip(self.sums[:2], self.sums[2:], strict=True):
                a, g, gamma = a / self.count, g / self.count, np.sqrt(damping)
                pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
                left = np.linalg.inv(a + pi * gamma * np.eye(len(a)))
                found.append((left, np.linalg.inv(g + gamma / pi * np.eye(len(g)))))
            return found

        def pushed(v):
            parts = zip(inputs, v, rows, strict=True)
            return sum(np.einsum("ni,ih,nho->no", a, u, g) for a, u, g in parts)

        def form(u, v):
            return (pushed(u) * pushed(v)).sum() / N + both * self.inner(u, v)

        def least(inverses):
            down = [-a @ g @ b for (a, b), g in zip(inverses, grads, strict=True)]
            directions = [down, self.last] if self.steps else [down]
            matrix = np.array([[form(u, v) for v in directions] for u in directions])
            along = np.array([self.inner(grads, d) for d in directions])
            rates = -np.linalg.solve(matrix, along)
            pairs = zip(rates, directions, strict=True)
            step = [sum(x) for x in zip(*([c * u for u in d] for c, d in pairs), strict=True)]
            return form(step, step) / 2 + self.inner(grads, step), rates, step

        if self.factor_every and self.steps and self.steps % self.factor_every == 0:
            power = self.factor**self.factor_every
            near = [self.factor_damping * x for x in (1, power, 1 / power)]
            self.tried.append(int(np.argmin([least(inverses(x))[0] for x in near])))
            self.factor_damping = near[self.tried[-1]]
        if self.steps % self.refresh == 0:
            self.inverses = inverses(self.factor_damping)
        change, self.rates, self.last = least(self.inverses)
        moved = [w + d for w, d in zip(self.w, self.last, strict=True)]
        self.steps += 1
        if self.steps % self.every == 0:
            self.ratio = (self.penalised(moved) - self.penalised(self.w)) / change
            if self.ratio > 3 / 4:
                self.damping *= self.factor**self.every
            elif self.ratio < 1 / 4:
                self.damping /= self.factor**self.every
        if self.factor_every:
            self.factor_damping *= (self.damping + self.weight_decay) / both
        self.w = moved


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor_every", [0, 3])
@pytest.mark.parametrize(
    ("initial", "weight_decay", "scale", "rises"),
    [
        pytest.param(0.5, 0.01, 1.0, False, id="damping falls"),
        pytest.param(1e-3, 0.0, 5.0, True, id="damping rises"),
    ],
)
def test_ten_steps_are_those_of_the_paper(initial, weight_decay, scale, rises, factor_every):
    weights, x, y, params, batch = problem(3 if rises else 0)
    y, batch = scale * y, (batch[0], scale * batch[1])
    numbers = {"decay": 0.9, "weight_decay": weight_decay}
    shared = {"every": 2, "factor": 0.9, "factor_every": factor_every}
    paper = Paper(weights, x, y, damping=initial, refresh=3, **shared, **numbers)
    _, state, step = training(
        params,
        batch,
        damping=LevenbergMarquardt(initial=initial, safeguard=False, **shared),
        damping_mode="pi",
        refresh_every=3,
        max_condition=1e14,
        **numbers,
    )
    step, dampings = jax.jit(step), []
    for _ in range(10):
        paper.step()
        params, state = step(params, state)
        found = state.adaptation
        for part, w in zip(params, paper.w, strict=True):
            np.testing.assert_allclose(part["kernel"], w[:-1], rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(part["bias"], w[-1], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.learning_rate, paper.rates[0], rtol=1e-10)
        np.testing.assert_allclose(found.momentum, [*paper.rates, 0.0][1], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(found.damping, paper.damping, rtol=1e-12)
        np.testing.assert_allclose(found.factor_damping, paper.factor_damping, rtol=1e-12)
        np.testing.assert_allclose(found.ratio, paper.ratio, rtol=1e-9)
        dampings.append(float(found.damping))
    assert (found.rejected, found.displaced, state.skipped) == (0, 0, 0)
    assert any(np.diff(dampings) > 0) is rises
    assert len(paper.tried) == (3 if factor_every else 0)


def linear(params, x):
    return x @ params["kernel"]


LINEAR = Objective(linear, Gaussian())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_one_step_reaches_the_minimum_of_a_quadratic(weight_decay):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 6)), rng.normal(size=(30, 2))
    params, batch = (
        {"kernel": jnp.asarray(rng.normal(size=(6, 2)))},
        (jnp.asarray(x), jnp.asarray(y)),
    )
    options = {"damping": 1e-12, "weight_decay": weight_decay, "max_condition": 1e14}
    _, state, step = training(params, batch, LINEAR, **options)
    params, state = jax.jit(step)(params, state)
    expected = np.linalg.solve(x.T @ x / 30 + weight_decay * np.eye(6), x.T @ y / 30)
    np.testing.assert_allclose(params["kernel"], expected, atol=1e-9)
    np.testing.assert_allclose(state.adaptation.learning_rate, 1, atol=1e-9)


@pytest.mark.exhaustive  # the ten steps of the paper are there
@pytest.mark.parametrize(
    "given", [{}, {"learning_rate": 0.3}, {"momentum": 0.4}, {"momentum": 0.0}], ids=str
)
def test_a_step_is_where_the_damped_model_is_least(given):
    _, _, _, params, batch = problem()
    _, state, step = training(params, batch, **{"damping": 0.1, "weight_decay": 0.02} | given)
    before, state = step(params, state)
    last = jax.tree.map(jnp.subtract, before, params)
    moved, state = step(before, state)
    rate, momentum = state.adaptation.learning_rate, state.adaptation.momentum
    np.testing.assert_allclose(
        [rate, momentum], [given.get("learning_rate", rate), given.get("momentum", momentum)]
    )
    # The model's gradient at the step is orthogonal to what was free to vary.
    update = jax.tree.map(jnp.subtract, moved, before)
    slope = jax.grad(lambda p: OBJECTIVE(p, batch) + 0.01 * optax.tree.norm(p, squared=True))(
        before
    )
    curved = operators.ggn(OBJECTIVE, before, batch).damped(0.12) @ update
    residual = jax.tree.map(jnp.add, slope, curved)
    down = jax.tree.map(lambda u, d: (u - momentum * d) / rate, update, last)
    for name, along in (("learning_rate", down), ("momentum", last)):
        size = optax.tree.norm(slope) * optax.tree.norm(along)
        assert (abs(optax.tree.vdot(residual, along)) < 1e-9 * size).item() is (name not in given)


@pytest.mark.exhaustive
def test_damping_alone_is_adapted_to_the_steps_that_are_made():
    _, _, _, params, batch = problem()
    rule = LevenbergMarquardt(initial=0.1, every=1, factor=0.5)
    given = {"learning_rate": 0.2, "momentum": 0.0, "weight_decay": 0.05}
    _, state, step = training(params, batch, damping=rule, **given)
    moved, state = step(params, state)
    update = jax.tree.map(jnp.subtract, moved, params)
    slope = jax.grad(lambda p: OBJECTIVE(p, batch))(params)
    curved = operators.ggn(OBJECTIVE, params, batch).damped(0.1) @ update
    change = optax.tree.vdot(slope, update) + optax.tree.vdot(curved, update) / 2
    actual = OBJECTIVE(moved, batch) - OBJECTIVE(params, batch)
    np.testing.assert_allclose(state.adaptation.ratio, actual / change, rtol=1e-9)
    assert state.adaptation.damping == 0.05
    plain = kfac(0.2, like=state.average, damping=0.1, momentum=0.0, weight_decay=0.05)
    stats = value_grad_and_factors(OBJECTIVE, fisher="exact")
    _, grads, factors = stats(params, batch)
    expected, _ = plain.update(grads, plain.init(params), params, factors=factors)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), update, expected)


@pytest.mark.exhaustive
def test_scan_equals_a_loop():
    _, _, _, params, batch = problem()
    rule = LevenbergMarquardt(initial=0.3, every=2)
    _, state, step = training(params, batch, damping=rule, damping_mode="pi", refresh_every=2)
    loop = params, state
    for _ in range(5):
        loop = jax.jit(step)(*loop)
    scanned, _ = jax.lax.scan(lambda carry, _: (step(*carry), None), (params, state), length=5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13), scanned, loop
    )


@pytest.mark.exhaustive  # tests/adapted_loops_test.py has it
def test_accumulated_steps_are_those_of_the_whole_batch():
    _, _, _, params, batch = problem()
    rule = LevenbergMarquardt(initial=0.3, every=1)
    tx, state, step = training(params, batch, damping=rule)
    expected, one = params, state
    for _ in range(3):
        expected, one = step(expected, one)
    stats = value_grad_and_factors(OBJECTIVE, fisher="exact")
    accumulated = multi_steps(tx, 3)
    state = accumulated.init(params)

    @jax.jit
    def micro_step(params, state, micro):
        _, grads, factors = stats(params, micro)
        whole = {
            "value": OBJECTIVE(params, batch),
            "value_fn": lambda params: OBJECTIVE(params, batch),
            "curvature": operators.ggn(OBJECTIVE, params, batch),
        }
        updates, state = accumulated.update(grads, state, params, factors=factors, **whole)
        return optax.apply_updates(params, updates), state

    for i in range(9):
        start = N // 3 * (i % 3)
        params, state = micro_step(
            params, state, jax.tree.map(lambda x, s=start: x[s : s + N // 3], batch)
        )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), params, expected
    )
    np.testing.assert_allclose(state.inner.adaptation.ratio, one.adaptation.ratio, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_trial_that_is_not_finite_is_rejected_and_counted(bad):
    _, _, _, params, batch = problem()
    stats = value_grad_and_factors(OBJECTIVE, fisher="exact")
    rule = LevenbergMarquardt(initial=0.5, every=1, factor=0.5)
    like = stats.factor_shapes(params, batch)
    tx = kfac("quadratic", momentum="quadratic", like=like, damping=rule)
    state = tx.init(params)
    value, grads, factors = stats(params, batch)
    curvature = operators.ggn(OBJECTIVE, params, batch)
    loss = {"value": value, "curvature": curvature, "factors": factors}
    updates, state = tx.update(grads, state, params, value_fn=lambda _: bad, **loss)
    assert all(not x.any() for x in jax.tree.leaves((updates, state.momentum)))
    assert (state.adaptation.rejected, state.step) == (1, 1)
    assert state.adaptation.damping == 2.0
    updates, state = tx.update(grads, state, params, value_fn=lambda p: OBJECTIVE(p, batch), **loss)
    assert all(x.any() for x in jax.tree.leaves(updates))
    assert state.adaptation.rejected == 1


@pytest.mark.exhaustive
def test_a_state_can_be_donated():
    _, _, _, params, batch = problem()
    _, state, step = training(params, batch, damping=LevenbergMarquardt(initial=0.5))
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.adaptation)]
    assert len(set(buffers)) == len(buffers)
    moved, _ = jax.jit(step, donate_argnums=1)(params, state)
    assert moved[0]["kernel"].shape == params[0]["kernel"].shape


@pytest.mark.slow
def test_damping_stays_within_its_bounds():
    _, _, _, params, batch = problem()
    rule = LevenbergMarquardt(initial=0.5, every=1, factor=0.1, minimum=0.2, maximum=0.6)
    _, state, step = training(params, batch, damping=rule)
    _, state = step(params, state)
    assert state.adaptation.damping == 0.2


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"inverse": "host"}, {"stagger": True, "damping_mode": "pi"}], ids=str
)
def test_burn_in_averages_the_factors_and_moves_nothing(options):
    _, _, _, params, batch = problem()
    rule = LevenbergMarquardt(initial=0.5, burn_in=2)
    _, state, step = training(params, batch, damping=rule, **options)
    first = params
    for _ in range(2):
        moved, state = step(first, state)
        jax.tree.map(np.testing.assert_array_equal, moved, params)
    assert (state.step, state.adaptation.burned_in) == (0, 2)
    assert state.average.terms == N * (1 + 0.95)
    moved, state = step(params, state)
    assert (state.step, state.adaptation.burned_in) == (1, 2)
    # The factors are of one batch, so that their average is that of one update without it.
    _, plain, unburned = training(params, batch, damping=LevenbergMarquardt(initial=0.5), **options)
    expected, _ = unburned(params, plain)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), moved, expected)


@pytest.mark.exhaustive
def test_parameters_of_others_are_left_to_them():
    rng = np.random.default_rng(2)
    params = {"kernel": jnp.asarray(rng.normal(size=(4, 2)))}
    batch = jnp.asarray(rng.normal(size=(9, 4))), jnp.asarray(rng.normal(size=(9, 2)))
    stats = value_grad_and_factors(LINEAR, fisher="exact")
    options = {"like": stats.factor_shapes(params, batch), "damping": 0.1, "weight_decay": 0.1}
    value, grads, factors = stats(params, batch)
    found = []
    for more, others in (({}, None), ({"extra": jnp.arange(3.0)}, optax.sgd(1.0))):
        tx, whole = kfac("quadratic", **options, others=others), params | more
        updates, _ = tx.update(
            grads | more,
            tx.init(whole),
            whole,
            factors=factors,
            value=value,
            value_fn=lambda params: LINEAR(params, batch),
            curvature=operators.ggn(LINEAR, whole, batch),
        )
        found.append(updates)
    np.testing.assert_array_equal(found[1]["extra"], -jnp.arange(3.0))
    np.testing.assert_allclose(found[1]["kernel"], found[0]["kernel"], rtol=1e-12)


@pytest.mark.slow
def test_bfloat16_parameters_are_not_displaced_by_their_rounding():
    _, _, _, params, batch = problem()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch)
    _, state, step = training(params, batch, damping=LevenbergMarquardt(initial=0.3, every=1))
    step, first = jax.jit(step), OBJECTIVE(params, batch)
    for _ in range(6):
        params, state = step(params, state)
    assert (state.adaptation.displaced, state.adaptation.rejected) == (0, 0)
    assert OBJECTIVE(params, batch) < first
    assert state.adaptation.damping.dtype == jnp.float32


def test_a_wrong_word_as_damping_names_the_rule_that_adapts_it():
    with pytest.raises(TypeError, match=r"damping='adaptive': expected .*LevenbergMarquardt\(\)"):
        Adaptation.of(0.1, 0.9, "adaptive", None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"damping": 0.1},
        {
            "learning_rate": 0.5,
            "momentum": 0.5,
            "damping": LevenbergMarquardt(every=1),
            "weight_decay": 0.01,
        },
    ],
    ids=["rates", "damping alone"],
)
def test_kfac_that_is_not_last_in_its_chain_is_seen(options):
    _, _, _, params, batch = problem()
    tx, _, own_step = training(params, batch, **options)
    alone = params, tx.init(params)
    for _ in range(3):
        alone = jax.jit(own_step)(*alone)
    assert alone[1].adaptation.displaced == 0
    stats = value_grad_and_factors(OBJECTIVE, fisher="exact")
    chain = optax.chain(tx, optax.scale(0.5))

    def step(params, state):
        value, grads, factors = stats(params, batch)
        updates, state = chain.update(
            grads,
            state,
            params,
            factors=factors,
            value=value,
            value_fn=lambda params: OBJECTIVE(params, batch),
            curvature=operators.ggn(OBJECTIVE, params, batch),
        )
        return optax.apply_updates(params, updates), state

    moved = step(params, chain.init(params))
    with pytest.raises(ValueError, match=r"must stand last in optax\.chain"):
        step(*moved)
    _, state = jax.jit(step)(*jax.jit(step)(params, chain.init(params)))
    assert state[0].adaptation.displaced == 1


@pytest.mark.slow
def test_where_the_gradient_is_zero_nothing_is_rejected():
    x = jnp.eye(3)
    params, batch = {"kernel": jnp.ones((3, 2))}, (x, jnp.ones((3, 2)))
    _, state, step = training(params, batch, LINEAR, damping=LevenbergMarquardt(initial=1.0))
    moved, state = jax.jit(step)(params, state)
    np.testing.assert_array_equal(moved["kernel"], params["kernel"])
    assert (state.adaptation.rejected, state.adaptation.damping) == (0, 1.0)


@pytest.mark.slow
def test_a_rejected_update_leaves_the_parameters_of_others_too():
    _, _, _, params, batch = problem()
    stats = value_grad_and_factors(LINEAR, fisher="exact")
    params = {"kernel": jnp.ones((SIZES[0], SIZES[-1]))}
    value, grads, factors = stats(params, batch)
    rule = LevenbergMarquardt(every=1)
    tx = kfac("quadratic", like=factors, damping=rule, others=optax.sgd(1.0, momentum=0.9))
    whole = params | {"extra": jnp.ones(3)}
    curvature = operators.ggn(LINEAR, whole, batch)
    loss = {"value": value, "value_fn": lambda _: jnp.nan, "curvature": curvature}
    state = tx.init(whole)
    updates, after = tx.update(
        grads | {"extra": jnp.ones(3)}, state, whole, factors=factors, **loss
    )
    assert not any(x.any() for x in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, after.others, state.others)


def two_heads(params, x):
    hidden, out = params
    h = jnp.tanh(x @ hidden["kernel"] + hidden["bias"])
    return {"label": h @ out["kernel"] + out["bias"], "box": h}


@pytest.mark.exhaustive
@pytest.mark.parametrize("boxes", [0, 5])
def test_terms_of_a_masked_output_are_counted_as_the_factors_count_them(boxes):
    _, _, _, params, (x, _) = problem()
    objective = Objective(two_heads, {"label": Categorical(), "box": Gaussian()})
    targets = {"label": jnp.arange(N) % SIZES[-1], "box": jnp.zeros((N, SIZES[1]))}
    mask = {"label": jnp.ones(N, bool), "box": jnp.arange(N) < boxes}
    _, state, step = training(params, (x, targets, mask), objective, damping=0.1)
    _, state = step(params, state)
    assert state.average.terms == N + boxes


@pytest.mark.exhaustive
def test_a_micro_batch_that_is_not_finite_is_left_out_of_the_group():
    _, _, _, params, batch = problem()
    tx, _, _ = training(params, batch, damping=0.1)
    tx, stats = multi_steps(tx, 3), value_grad_and_factors(OBJECTIVE, fisher="exact")
    state, micro_batches = (
        tx.init(params),
        [jax.tree.map(lambda x, i=i: x[N // 3 * i : N // 3 * (i + 1)], batch) for i in range(3)],
    )

    def group(state, seen, bad):
        loss = {
            "value": OBJECTIVE(params, batch),
            "value_fn": lambda params: OBJECTIVE(params, batch),
            "curvature": operators.ggn(OBJECTIVE, params, seen),
        }
        for i, micro in enumerate(micro_batches):
            _, grads, factors = stats(params, micro)
            if i == bad:
                grads = jax.tree.map(lambda g: g * jnp.nan, grads)
            updates, state = tx.update(grads, state, params, factors=factors, **loss)
        return updates, state

    updates, state = group(state, batch, 1)
    assert all(x.any() for x in jax.tree.leaves(updates))
    assert (state.skipped, state.inner.step, state.inner.average.terms) == (1, 1, 2 * N // 3)
    with pytest.raises(ValueError, match="8 loss terms, and the gradient from 24"):
        group(state, micro_batches[2], None)


@pytest.mark.exhaustive
def test_a_scheduled_damping_is_reported_ahead_of_its_update():
    _, _, _, params, batch = problem()
    stats = value_grad_and_factors(OBJECTIVE)
    like = stats.factor_shapes(params, batch)
    value, grads, factors = stats(params, batch)
    loss = {"value": value, "value_fn": lambda params: OBJECTIVE(params, batch)}
    loss |= {"factors": factors, "curvature": operators.ggn(OBJECTIVE, params, batch)}
    tx = kfac("quadratic", like=like, damping=lambda step: 0.5 / (1 + step.astype(float)))
    state = tx.init(params)
    update = jax.jit(lambda grads, state: tx.update(grads, state, params, **loss)[1])
    assert state.adaptation.damping == 0.5
    state = update(grads, state)
    assert state.adaptation.damping == 0.25
    state = update(jax.tree.map(lambda g: g * jnp.nan, grads), state)
    assert (state.skipped, state.adaptation.damping) == (1, 0.25)
    tx = optax.inject_hyperparams(kfac, static_args=("learning_rate", "like"))(
        learning_rate="quadratic", like=like, damping=0.5
    )
    state = tx.init(params)
    state.hyperparams["damping"] = jnp.asarray(0.125)
    _, state = tx.update(grads, state, params, **loss)
    assert state.inner_state.adaptation.damping == 0.125


class TestRefused:
    @pytest.mark.slow
    def test_curvature_of_a_micro_batch(self):
        _, _, _, params, batch = problem()
        tx, _, _ = training(params, batch, damping=0.1)
        tx, half = multi_steps(tx, 2), jax.tree.map(lambda x: x[: N // 2], batch)
        value, grads, factors = value_grad_and_factors(OBJECTIVE)(params, half)
        loss = {
            "value": value,
            "value_fn": lambda params: OBJECTIVE(params, half),
            "curvature": operators.ggn(OBJECTIVE, params, half),
        }
        _, state = tx.update(grads, tx.init(params), params, factors=factors, **loss)
        with pytest.raises(ValueError, match="12 loss terms, and the gradient from 24"):
            tx.update(grads, state, params, factors=factors, **loss)

    @pytest.mark.slow
    def test_a_loss_that_is_no_number(self):
        _, _, _, params, batch = problem()
        tx, state, _ = training(params, batch, damping=LevenbergMarquardt(every=1))
        value, grads, factors = value_grad_and_factors(OBJECTIVE)(params, batch)
        with pytest.raises(TypeError, match="value_fn: expected a function that returns the loss"):
            tx.update(
                grads,
                state,
                params,
                factors=factors,
                value=value,
                value_fn=lambda params: (OBJECTIVE(params, batch), None),
                curvature=operators.ggn(OBJECTIVE, params, batch),
            )

    @pytest.mark.default(2, slow=0)
    @pytest.mark.parametrize("absent", ["value", "value_fn", "curvature", "params"])
    def test_without_the_loss(self, absent):
        _, _, _, params, batch = problem()
        tx, state, _ = training(params, batch, damping=LevenbergMarquardt(initial=0.1))
        value, grads, factors = value_grad_and_factors(OBJECTIVE)(params, batch)
        given = {
            "params": params,
            "value": value,
            "value_fn": lambda params: OBJECTIVE(params, batch),
            "curvature": operators.ggn(OBJECTIVE, params, batch),
        } | {absent: None}
        with pytest.raises(ValueError, match=f"needs {absent}: tx.update"):
            tx.update(grads, state, factors=factors, **given)

    @pytest.mark.slow
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("objective", [OBJECTIVE, marked], ids=["objective", "marked"])
    @pytest.mark.parametrize(
        "changed",
        [lambda op: op, lambda op: 2 * op, lambda op: op.damped(0.1)],
        ids=["as it is", "scaled", "damped"],
    )
    def test_an_operator_of_another_batch(self, objective, changed):
        _, _, _, params, batch = problem()
        tx, state, _ = training(params, batch, objective, damping=0.1)
        value, grads, factors = value_grad_and_factors(objective)(params, batch)
        half = jax.tree.map(lambda x: x[: N // 2], batch)
        with pytest.raises(ValueError, match="12 loss terms, and the gradient from 24"):
            tx.update(
                grads,
                state,
                params,
                factors=factors,
                value=value,
                value_fn=lambda params: objective(params, batch),
                curvature=changed(operators.ggn(objective, params, half)),
            )

    @pytest.mark.slow
    def test_an_operator_of_some_parameters(self):
        _, _, _, params, batch = problem()
        tx, state, _ = training(params, batch, damping=0.1)
        value, grads, factors = value_grad_and_factors(OBJECTIVE)(params, batch)
        with pytest.raises(ValueError, match="the operator has no leaf '0/bias'"):
            tx.update(
                grads,
                state,
                params,
                factors=factors,
                value=value,
                value_fn=lambda params: OBJECTIVE(params, batch),
                curvature=operators.ggn(OBJECTIVE, params, batch, only="1/.*"),
            )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"damping": (0.1, 0.1)}, "one damping, and a pair has one for each factor"),
            ({"norm_constraint": 1e-3}, "norm_constraint bounds a learning rate that is given"),
        ],
    )
    def test_what_does_not_go_together(self, options, message):
        _, _, _, params, batch = problem()
        with pytest.raises(ValueError, match=message):
            training(params, batch, **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"minimum": 2.0, "maximum": 1.0}, "minimum=2.0 and maximum=1.0"),
            ({"initial": 0.0}, "initial=0.0: expected a positive damping"),
            ({"initial": 5.0, "maximum": 4.0}, "initial=5.0"),
            ({"factor": 1.0}, "factor=1.0: expected a number between 0 and 1"),
            ({"every": 0}, "every=0: expected at least 1"),
            ({"initial": np.inf}, "initial=inf"),
            ({"burn_in": -1}, "burn_in=-1"),
        ],
    )
    def test_numbers_out_of_range(self, options, message):
        with pytest.raises(ValueError, match=message):
            LevenbergMarquardt(**options)

    @pytest.mark.slow
    def test_a_state_that_does_not_adapt(self):
        _, _, _, params, batch = problem()
        _, state, _ = training(params, batch, learning_rate=0.1, momentum=0.9)
        _, _, step = training(params, batch)
        with pytest.raises(ValueError, match="the state does not adapt itself, and this kfac does"):
            step(params, state)


@pytest.mark.exhaustive
def test_inner_products_are_those_of_products():
    _, _, _, params, batch = problem()
    labels = batch[0], (batch[1] > 0).astype(jnp.float64)
    vectors = [jax.tree.map(jnp.sin, params), jax.tree.map(jnp.cos, params)]
    key = jax.random.key(0)
    for objective, data in ((OBJECTIVE, batch), (Objective(network, Bernoulli()), labels)):
        for operator in (
            operators.ggn(objective, params, data, chunk=7),
            operators.fisher(objective, params, data),
            operators.fisher(objective, params, data, fisher="empirical"),
            operators.fisher(objective, params, data, fisher="mc", key=key, samples=2),
            2.0 * operators.hessian(objective, params, data).damped(0.1),
        ):
            expected = [[optax.tree.vdot(u, operator @ v) for v in vectors] for u in vectors]
            np.testing.assert_allclose(operator.inner_products(vectors), expected, rtol=1e-12)


class Precise(Gaussian):
    """Of variance a quarter: the columns are its own, and no product is."""

    def fisher_column(self, outputs, index):
        return 2 * super().fisher_column(outputs, index)


def test_a_subclass_with_columns_of_its_own_has_their_product():
    def loss(likelihood):
        return lambda params, x: mark_outputs(network(params, x), likelihood).sum()

    _, _, _, params, (x, _) = problem()
    plain, precise = (operators.ggn(loss(p), params, x) for p in (Gaussian(), Precise()))
    expected = jax.tree.map(lambda v: 4 * v, plain @ params)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-12), precise @ params, expected
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli(), Categorical()])
def test_inner_products_of_a_marked_loss_are_those_of_products(likelihood):
    _, _, _, params, (x, _) = problem()
    mask = jnp.arange(N) % 3 > 0

    def loss(params, x):
        marked = mark_outputs(network(params, x), likelihood, weight=0.3, mask=mask)
        first = mark_outputs(network(params, x[:5])[:, 0], Gaussian(), weight=2.0)
        return marked.sum() + first.sum()

    vectors = [jax.tree.map(jnp.sin, params), jax.tree.map(jnp.cos, params)]
    operator = operators.ggn(loss, params, x)
    expected = [[optax.tree.vdot(u, operator @ v) for v in vectors] for u in vectors]
    np.testing.assert_allclose(operator.inner_products(vectors), expected, rtol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("large", [-1e200, -np.inf, np.finfo(np.float64).min])
def test_a_parameter_whose_square_is_out_of_range_stops_no_update(large):
    """A mask among the parameters: its gradient is zero, and so is its update."""
    *_, params, batch = problem()

    def masked(params, x):
        weights, mask = params
        return network(weights, x) + jnp.where(mask < 0, 0.0, mask)

    held = params, jnp.full(3, large)
    _, state, step = training(held, batch, Objective(masked, Gaussian()), damping=0.1)
    _, plain, plain_step = training(params, batch, damping=0.1)
    step, plain_step = jax.jit(step), jax.jit(plain_step)
    for _ in range(6):  # the fifth has a trial
        held, state = step(held, state)
        params, plain = plain_step(params, plain)
    assert int(state.adaptation.rejected) == 0
    for x, y in zip(jax.tree.leaves(held[0]), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10)


def test_a_damping_of_0_leaves_the_factors_damping_as_it_is():
    """A rule with a minimum of 0 may reach it by underflow; 0 over 0 would reject every update."""
    adaptation = Adaptation.of("quadratic", "quadratic", LevenbergMarquardt(minimum=0.0), None)
    state = adaptation.initial({"w": jnp.ones(2)}, 0.0)._replace(damping=jnp.zeros(()))
    assert adaptation._following(jnp.asarray(0.5), state, state, 0.0) == 0.5


def test_a_model_of_one_direction_is_least_where_its_slope_ends():
    """Without momentum there is no second direction: -p / a, and the model falls by p² / 2a."""
    found = minimum(jnp.array([[4.0]]), jnp.array([-3.0]), None, None)
    np.testing.assert_allclose(found, (0.75, 0, -9 / 8), rtol=1e-15)
    given = minimum(jnp.array([[4.0]]), jnp.array([-3.0]), jnp.asarray(0.5), None)
    np.testing.assert_allclose(given, (0.5, 0, 0.5 - 1.5), rtol=1e-15)


def test_sums_of_weights_may_round_and_numbers_of_terms_may_not():
    def check(theirs, ours):
        check_batch(types.SimpleNamespace(loss_terms=np.float64(theirs)), np.float64(ours))

    check(np.float32(2.4) + np.float32(3e-7), np.float32(2.4))
    for theirs, ours in ((2.48, 2.4), (1_000_001.0, 1_000_000.0), (2.39, 2.4)):
        with pytest.raises(ValueError, match="the operator comes from a batch of"):
            check(theirs, ours)


def test_curvature_gathered_on_every_device_is_of_the_batch_that_it_was():
    *_, params, batch = problem()
    loss = BatchLoss(jnp.ones(()), None, operators.ggn(OBJECTIVE, params, batch))
    found = loss.of_whole(params).curvature.loss_terms
    assert found == loss.curvature.loss_terms > 0
    with pytest.raises(ValueError, match="the operator comes from a batch of"):
        check_batch(loss.of_whole(params).curvature, found + 1)


# ---------------- the safeguard


SAFE, PAPER = LevenbergMarquardt(), LevenbergMarquardt(safeguard=False)


def adapted_by(rule, ratio, change, *, rejected=False, negligible=False, damping=1.0, first=1.0):
    flags = {"due": True, "rejected": rejected, "negligible": negligible}
    numbers = {"ratio": ratio, "change": change, "first_damping": first, "num_updates": 30}
    trial = Trial(**{name: jnp.asarray(x) for name, x in (flags | numbers).items()})
    return float(rule.after(jnp.asarray(damping), None, trial)[0])


def test_a_rejected_step_multiplies_the_damping_by_four():
    assert adapted_by(SAFE, -1.0, -1.0, rejected=True) == 4
    assert adapted_by(PAPER, -1.0, -1.0, rejected=True) == pytest.approx((20 / 19) ** 5)
    assert adapted_by(SAFE, 0.1, -1.0) == pytest.approx((20 / 19) ** 5)
    assert adapted_by(SAFE, 0.9, -1.0) == pytest.approx((19 / 20) ** 5)
    assert adapted_by(SAFE, 0.5, -1.0) == 1


def test_the_damping_does_not_rise_below_the_rounding_of_the_loss_nor_without_end():
    assert adapted_by(SAFE, -9.0, -1e-9, rejected=True, negligible=True) == 1
    assert adapted_by(SAFE, 0.0, -1e-9, negligible=True) == 1
    assert adapted_by(SAFE, 0.9, -1e-9, negligible=True) < 1
    for first in (1.0, 100.0):
        found = adapted_by(SAFE, np.nan, np.nan, rejected=True, damping=5e11 * first, first=first)
        assert found == 1e12 * first
    beyond = adapted_by(SAFE, np.nan, np.nan, rejected=True, damping=5.0, first=1e-12)
    assert beyond == 5  # it never lowers a damping


def test_the_damping_is_adapted_at_the_first_updates_and_while_it_is_high():
    def due(rule, damping, n):
        return bool(rule.is_due(jnp.asarray(damping), jnp.asarray(1.0), jnp.asarray(n)))

    assert all(due(SAFE, 0.5, n) for n in range(1, 21))
    assert [due(SAFE, 0.5, n) for n in (21, 24, 25)] == [False, False, True]
    assert due(SAFE, 1.5, 21) and not due(SAFE, 1.0, 21)
    assert [due(PAPER, 1.5, n) for n in (1, 5, 21)] == [False, True, False]


def test_the_first_damping_follows_the_curvature_only_where_it_is_far_off():
    def first(curvature, rule=SAFE):
        return float(rule.initial_at(jnp.asarray(curvature)))

    assert [first(x) for x in (0.05, 1.0, 2e3)] == [0.03] * 3
    np.testing.assert_allclose([first(1e6), first(1e-3)], [10, 1e-3], rtol=1e-12)
    assert [first(x) for x in (np.nan, np.inf, 0.0, -1.0)] == [0.03] * 4
    assert first(1e6, LevenbergMarquardt(initial=0.5)) == 0.5
    assert first(1e6, LevenbergMarquardt(maximum=2.0)) == 2
    assert LevenbergMarquardt(minimum=0.1).initial_number == 0.1


def test_a_bounded_momentum_leaves_the_best_step_beside_it():
    second, first = jnp.array([[4.0, 1.0], [1.0, 2.0]]), jnp.array([-1.0, -8.0])
    free = minimum(second, first, None, None)
    assert free.momentum > 1
    found = minimum(second, first, None, None, bound=1.0)
    np.testing.assert_allclose(found, ((1 - 1) / 4, 1, -8 + 1), atol=1e-15)
    fixed = minimum(second, first, jnp.asarray(0.5), None, bound=1.0)
    np.testing.assert_allclose(fixed, (0.5, 1, -0.5 - 8 + 0.5 + 0.5 + 1), rtol=1e-15)


def tried(rule, *, rise, change=-1.0, value=1.0, dtype=jnp.float64, rate="quadratic"):
    """Whether a step is made and what is adapted, if the loss rises by ``rise``."""
    adaptation = Adaptation.of(rate, "quadratic", rule, None)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    params = {"w": jnp.ones(2, dtype)}
    loss = BatchLoss(jnp.asarray(value, wide), lambda _: jnp.asarray(value + rise, wide), None)
    return adaptation._tried(
        adaptation.initial(params, 0.0)._replace(
            damping=jnp.ones((), wide), first_damping=jnp.ones((), wide)
        ),
        params,
        {"w": jnp.ones(2, dtype)},
        lambda: jnp.asarray(change, wide),
        loss,
        0.0,
        jnp.asarray(21),
        jnp.asarray(True),
    )


@pytest.mark.parametrize(
    ("rule", "rise", "more", "outcome"),
    [
        pytest.param(SAFE, 1e-3, {}, (False, 4, 1, 0), id="rises"),
        pytest.param(SAFE, 1e-3, {"rate": 0.1}, (False, 4, 1, 0), id="a rate that is given"),
        pytest.param(SAFE, -1e-3, {}, (True, 1, 0, 0), id="falls, and no adaptation is due"),
        pytest.param(SAFE, 1e-15, {}, (True, 1, 0, 0), id="rounding"),
        pytest.param(SAFE, 0.01, {"dtype": jnp.bfloat16}, (True, 1, 0, 0), id="bfloat16 rounding"),
        pytest.param(SAFE, 1e-3, {"change": -1e-15}, (False, 1, 1, 1), id="disagrees"),
        pytest.param(SAFE, np.nan, {"change": -1e-15}, (False, 1, 1, 0), id="not finite"),
        pytest.param(SAFE, 0.0, {"value": 0.0, "change": 0.0}, (True, 1, 0, 0), id="zero"),
        pytest.param(PAPER, 1e-3, {}, (True, 1, 0, 0), id="no trial in the paper's rule"),
    ],
)
def test_a_step_that_raises_the_loss_is_not_made(rule, rise, more, outcome):
    made, state = tried(rule, rise=rise, **more)
    found = bool(made), float(state.damping), int(state.rejected), int(state.disagreed)
    assert found == outcome


def saturated(n=64):
    """A perceptron on features up to 30: where it is wrong, outputs saturate and F is small."""
    rng, sizes = np.random.default_rng(0), (9, 64, 64, 2)
    params = [{"w": rng.normal(size=s) / s[0] ** 0.5} for s in zip(sizes, sizes[1:], strict=False)]
    x = 30 * rng.random((n, 9))
    return jax.tree.map(jnp.asarray, (params, (x, (x[:, 0] > 15).astype(np.int32))))


def deep(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"])
    return x @ params[-1]["w"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("safeguard", [True, False])
def test_where_outputs_are_saturated_the_safeguard_keeps_the_loss_below_its_start(safeguard):
    params, batch = saturated()
    rule = LevenbergMarquardt(initial=0.03, safeguard=safeguard)
    objective, options = Objective(deep, Categorical()), {"damping_mode": "pi", "damping": rule}
    _, state, step = training(params, batch, objective, **options)

    def scanned(carry, _):
        new = step(*carry)
        return new, (objective(carry[0], batch), new[1].adaptation.momentum)

    (params, state), (losses, momenta) = jax.jit(
        lambda *carry: jax.lax.scan(scanned, carry, length=30)
    )(params, state)
    if not safeguard:
        assert max(losses) > 10 * losses[0]
        return
    assert max(losses) == losses[0] and losses[-1] < 0.1 * losses[0]
    assert max(abs(momenta)) <= 1 and state.adaptation.rejected > 0


@pytest.mark.slow
def test_a_rejected_step_leaves_no_momentum_behind():
    _, _, _, params, batch = problem()
    stats = value_grad_and_factors(OBJECTIVE, fisher="exact")
    tx = kfac(like=stats.factor_shapes(params, batch))
    value, grads, factors = stats(params, batch)
    loss = {"curvature": operators.ggn(OBJECTIVE, params, batch), "factors": factors}

    @jax.jit
    def update(params, state, rise):
        fn = lambda p: OBJECTIVE(p, batch) + rise
        return tx.update(grads, state, params, value=value, value_fn=fn, **loss)

    updates, state = update(params, tx.init(params), 0.0)
    assert optax.tree.norm(state.momentum) > 0
    first = state.adaptation.damping
    updates, state = update(optax.apply_updates(params, updates), state, 10.0)
    assert optax.tree.norm(updates) == optax.tree.norm(state.momentum) == 0
    adapted = state.adaptation
    assert (adapted.rejected, adapted.damping / first, adapted.travelled) == (1, 4, 0)
    np.testing.assert_allclose(adapted.factor_damping, adapted.damping)


@pytest.mark.exhaustive
def test_the_first_damping_is_read_at_the_first_update_that_is_made():
    """A gradient of NaN leaves it to the next update; a loss multiplied by c multiplies it by c."""
    _, _, _, params, batch = problem()
    dampings = []
    for scale in (1e6, 1e8):
        objective = Objective(lambda p, x, s=scale**0.5: s * network(p, x), Gaussian())
        data = batch[0], scale**0.5 * batch[1]
        _, state, step = training(params, data, objective, damping_mode="pi", damping=SAFE)
        bad = data[0] * jnp.nan, data[1]
        step = jax.jit(step)
        _, state = step(params, state, bad)
        assert (state.step, state.adaptation.first_damping) == (0, 0.03)
        slope = jax.grad(lambda p, o=objective, d=data: o(p, d))(params)
        curved = operators.ggn(objective, params, data) @ slope
        _, state = step(params, state, data)
        along = optax.tree.vdot(slope, curved) / optax.tree.vdot(slope, slope)
        np.testing.assert_allclose(state.adaptation.first_damping, 1e-5 * along, rtol=1e-9)
        dampings.append(float(state.adaptation.first_damping))
    np.testing.assert_allclose(dampings[1] / dampings[0], 100, rtol=1e-9)
