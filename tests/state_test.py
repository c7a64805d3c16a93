"""State that a call changes goes in and out as a value: Linen and NNX, every entry point."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxkfac as jk

N, STEPS = 8, 20
X = jax.random.normal(jax.random.key(0), (STEPS, N, 3))
Y = jnp.arange(STEPS * N).reshape(STEPS, N) % 4
KEYS = jax.random.split(jax.random.key(1), STEPS)
OPTIONS = {"fisher": "mc"}


class Linen(nn.Module):
    """Dense layers, a batch norm, dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(5)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.2, deterministic=not train)(jnp.tanh(x))
        return nn.Dense(4)(x)


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        self.up = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(5, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jnp.tanh(self.norm(self.up(x)))))


def linen():
    """An apply function with a state, its parameters and its state."""
    model = Linen()
    variables = model.init(jax.random.key(0), X[0], train=False)
    state = {"batch_stats": variables["batch_stats"]}

    def apply_fn(params, x, key, state):
        variables = {"params": params, **state}
        return model.apply(variables, x, True, rngs={"dropout": key}, mutable=list(state))

    return apply_fn, variables["params"], state


def of_nnx():
    apply_fn, params = jk.from_nnx(Nnx(nnx.Rngs(0)), mutable=nnx.BatchStat)
    return apply_fn, params, apply_fn.state


MODELS = pytest.mark.parametrize("make", [linen, of_nnx])
MOSTLY_NNX = pytest.mark.parametrize(
    "make", [pytest.param(linen, marks=pytest.mark.exhaustive), of_nnx]
)


def plain_loss(apply_fn):
    """What a loop without this library differentiates."""

    def loss(params, state, x, y, key):
        logits, changed = apply_fn(params, x, key=key, state=state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), changed

    return loss


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@MODELS
def test_running_statistics_of_twenty_steps_are_those_of_plain_training(make):
    apply_fn, params, state = make()
    stats = jax.jit(jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()), **OPTIONS))
    plain = jax.jit(jax.value_and_grad(plain_loss(apply_fn), has_aux=True))
    own = other = (params, state)
    for x, y, key in zip(X, Y, KEYS):
        (value, state), grads, _ = stats(own[0], (x, y), key, state=own[1])
        (expected, changed), plain_grads = plain(*other, x, y, key)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        own, other = (
            (optax.apply_updates(p, jax.tree.map(lambda g: -0.1 * g, d)), s)
            for (p, _), d, s in ((own, grads, state), (other, plain_grads, changed))
        )
    assert_close(own, other)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), own[1], make()[2])
    assert all(x > 1e-3 for x in jax.tree.leaves(moved))


@pytest.mark.exhaustive
@MOSTLY_NNX
def test_state_is_carried_by_a_scan_over_steps(make):
    apply_fn, params, state = make()
    stats = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()), **OPTIONS)

    def step(carry, xs):
        params, state = carry
        x, y, key = xs
        (value, state), grads, _ = stats(params, (x, y), key, state=state)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state), value

    scanned, _ = jax.jit(lambda c: jax.lax.scan(step, c, (X[:3], Y[:3], KEYS[:3])))((params, state))
    looped = params, state
    for xs in zip(X[:3], Y[:3], KEYS[:3]):
        looped, _ = step(looped, xs)
    assert_close(scanned, looped)


@pytest.mark.slow
@MODELS
def test_the_objective_itself_returns_the_changed_state(make):
    apply_fn, params, state = make()
    objective = jk.Objective(apply_fn, jk.Categorical())
    value, changed = objective(params, (X[0], Y[0]), KEYS[0], state=state)
    expected, after = plain_loss(apply_fn)(params, state, X[0], Y[0], KEYS[0])
    assert_close((value, changed), (expected, after))


@pytest.mark.slow
@MODELS
def test_with_aux_the_changed_state_comes_beside_it(make):
    apply_fn, params, state = make()

    def with_aux(params, x, key, state):
        outputs, changed = apply_fn(params, x, key=key, state=state)
        return (outputs, {"mean": outputs.mean()}), changed

    objective = jk.Objective(with_aux, jk.Categorical(), has_aux=True)
    stats = jk.value_grad_and_factors(objective, **OPTIONS)
    call = (params, (X[0], Y[0]), KEYS[0])
    (value, (aux, changed)), _, _ = stats(*call, state=state)
    assert_close((value, (aux, changed)), objective(*call, state=state))
    assert set(aux) == {"mean"}
    assert_close(changed, plain_loss(apply_fn)(params, state, X[0], Y[0], KEYS[0])[1])


@pytest.mark.slow
@MOSTLY_NNX
def test_passes_under_a_budget_return_one_changed_state(make):
    apply_fn, params, state = make()
    objective = jk.Objective(apply_fn, jk.Categorical())
    one = jk.value_grad_and_factors(objective, **OPTIONS)
    several = jk.value_grad_and_factors(objective, **OPTIONS, max_factor_bytes=300)
    call = (params, (X[0], Y[0]), KEYS[0])
    assert len(several.plan(*call, state=state).passes) > 1
    found, expected = several(*call, state=state), one(*call, state=state)
    assert_close(found[:2], expected[:2])
    assert_close(found.factors, expected.factors)


@pytest.mark.exhaustive
@MOSTLY_NNX
def test_a_scalar_loss_returns_its_changed_state(make):
    apply_fn, params, state = make()
    own = plain_loss(apply_fn)

    def loss(params, batch, key, state):
        return own(params, state, *batch, key)

    stats = jk.value_grad_and_factors(loss, loss_terms=N)
    call = (params, (X[0], Y[0]), KEYS[0])
    expected = jax.grad(own, has_aux=True)(params, state, X[0], Y[0], KEYS[0])
    (_, changed), grads, _ = stats(*call, state=state)
    assert_close((grads, changed), expected)
    operator = jk.operators.hessian(loss, *call[:2], key=KEYS[0], state=state)
    same = jk.operators.hessian(
        jk.Objective(apply_fn, jk.Categorical()), *call[:2], key=KEYS[0], state=state
    )
    assert_close(operator @ params, same @ params)


@pytest.fixture
def evaluated():
    """A model in evaluation mode that reads its state: nothing couples the examples."""
    model, rng = Linen(), np.random.default_rng(0)
    variables = model.init(jax.random.key(0), X[0], train=False)
    state = {
        "batch_stats": jax.tree.map(
            lambda x: x + rng.uniform(0.5, 2, x.shape).astype(x.dtype), variables["batch_stats"]
        )
    }

    def apply_fn(params, x, state):
        return model.apply({"params": params, **state}, x, False), state

    closed = jk.Objective(lambda p, x: apply_fn(p, x, state)[0], jk.Categorical())
    return jk.Objective(apply_fn, jk.Categorical()), closed, variables["params"], state


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["ggn", "fisher", "hessian"])
@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.exhaustive), 3])
def test_operators_are_those_of_the_model_with_its_state_closed_over(evaluated, kind, chunk):
    objective, closed, params, state = evaluated
    build = getattr(jk.operators, kind)
    operator = build(objective, params, (X[0], Y[0]), state=state, chunk=chunk)
    assert_close(operator @ params, build(closed, params, (X[0], Y[0])) @ params)


@pytest.mark.slow
def test_eigenvalues_are_measured_at_the_state(evaluated):
    objective, closed, params, state = evaluated
    options = {"layers": "Dense.*"}
    stats = jk.value_grad_and_factors(objective, **options)
    (_, after), _, factors = stats(params, (X[0], Y[0]), state=state)
    assert_close(after, state)
    _, _, expected = jk.value_grad_and_factors(closed, **options)(params, (X[0], Y[0]))
    assert_close(factors, expected)
    bases = jk.eigendecompose(factors)
    found = jk.correct_eigenvalues(objective, bases)(params, (X[0], Y[0]), state=state)
    expected = jk.correct_eigenvalues(closed, bases)(params, (X[0], Y[0]))
    assert_close(found.corrections, expected.corrections)


@MODELS
def test_a_state_that_is_left_out_raises_in_words(make):
    apply_fn, params, _ = make()
    objective = jk.Objective(apply_fn, jk.Categorical())
    for call in (objective, jk.value_grad_and_factors(objective, **OPTIONS)):
        with pytest.raises(ValueError, match="apply_fn changes a state.*pass state="):
            call(params, (X[0], Y[0]), KEYS[0])


def test_a_state_that_nothing_takes_raises_in_words():
    objective = jk.Objective(lambda p, x: x @ p["w"], jk.Categorical())
    with pytest.raises(TypeError, match="state=: apply_fn takes none"):
        objective({"w": jnp.ones((3, 4))}, (X[0], Y[0]), state={})


def test_an_apply_function_that_forgets_its_state_raises_in_words():
    objective = jk.Objective(lambda p, x, state: x @ p["w"], jk.Categorical())
    with pytest.raises(ValueError, match=r"apply_fn: expected a pair \(\.\.\., changed\)"):
        objective({"w": jnp.ones((3, 4))}, (X[0], Y[0]), state={})


def test_a_changed_state_of_another_form_raises_in_words():
    """Carried on, it would grow at every step, and be compiled again."""

    def apply_fn(params, x, state):
        return x @ params, {"inner": state}

    stats = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()))
    with pytest.raises(ValueError, match="the changed state has 'inner/mean', which state= has"):
        stats(jnp.ones((4, 3)), (jnp.ones((2, 4)), jnp.zeros(2, int)), state={"mean": jnp.ones(3)})


@pytest.mark.exhaustive
def test_the_axes_of_a_state_are_not_taken_for_a_single_example():
    """A weight that is computed needs examples that do not meet; one alone meets no other."""

    def apply_fn(params, x, state):
        weight = params["v"] / jnp.linalg.norm(params["v"], axis=0)
        return (x - state["mean"]) @ weight, {"mean": 0.9 * state["mean"]}

    params = {"v": jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)}
    batch, state = (X[0, :1], Y[0, :1]), {"mean": jnp.ones(3)}
    stats = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()))
    found = stats(params, batch, state=state)
    gradient = np.asarray(found.grads["v"])
    np.testing.assert_allclose(found.factors["v"].diagonal, gradient**2, rtol=1e-5)


def test_a_state_comes_back_in_the_types_in_which_it_went_in():
    """A number in an array's place, or another weak type, would compile the next step anew."""

    def model(p, x, state):
        count = jnp.where(state["first"], 0.0, 1.0)  # a weak type
        return x @ p["w"], {"first": False, "count": count, "steps": state["steps"] + 1}

    objective = jk.Objective(model, jk.Gaussian())
    stats, kinds = jk.value_grad_and_factors(objective), []
    state = {"first": jnp.array(True), "count": jnp.zeros(()), "steps": 0}

    @jax.jit
    def step(params, state):
        changed = stats(params, (jnp.eye(3), jnp.ones((3, 2))), state=state).value[1]
        kinds.append([isinstance(x, jax.Array) for x in jax.tree.leaves(changed)])
        return changed

    traced = jax.tree.map(jax.typeof, jax.tree.map(jnp.asarray, state))
    for number in range(3):
        state = step({"w": jnp.ones((3, 2))}, state)
        assert jax.tree.map(jax.typeof, state) == traced and int(state["steps"]) == number + 1
    assert kinds == [[True] * 3]
    plain = objective({"w": jnp.ones((3, 2))}, (jnp.eye(3), jnp.ones((3, 2))), state=state)[1]
    assert jax.tree.map(jax.typeof, plain) == traced
