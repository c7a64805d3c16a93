"""A second call with the same objective, layers and shapes compiles nothing, and changes no bit."""

import gc
import inspect
import pickle
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac
import jaxkfac as jk
from jaxkfac.factors._objective import MOST
from jaxkfac.uses import load_kronfluence, scores_of_batches

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "up": jax.random.normal(KEYS[0], (5, 4)),
    "bias": jnp.zeros(4),
    "down": jax.random.normal(KEYS[1], (4, 3)),
}
BATCH = (jax.random.normal(KEYS[2], (6, 5)), jax.random.randint(KEYS[3], (6,), 0, 3))
TWICE = jax.tree.map(lambda x: 2 * x, PARAMS)
KEY = jax.random.key(7)
FILES = Path(__file__).parent / "kronfluence"


def model(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def loss(params, batch):
    return jnp.square(model(params, batch[0])).mean()


OBJECTIVE = jk.Objective(model, jk.Categorical())
STATS = jax.jit(jk.value_grad_and_factors(OBJECTIVE, fisher="exact"))


def collected():
    return STATS(PARAMS, BATCH).factors


@pytest.fixture(scope="module")
def bases():
    return jk.eigendecompose(collected())


@pytest.fixture(scope="module")
def counted():
    """How many programs the backend has compiled so far."""
    events = []

    def listen(name, duration, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(events)
    jax.monitoring.unregister_event_duration_listener(listen)


def store(bases):
    return jk.gradient_store(OBJECTIVE, PARAMS, bases, BATCH, dtype="float32")


def posterior(bases):
    return jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6)


def ggn():
    return jk.operators.ggn(OBJECTIVE, PARAMS, BATCH)


def margin(outputs, query):
    return outputs[query.targets] - outputs.mean()


def metrics(bases):
    return jk.capacity_metrics(bases, num_examples=6)


def kronfluences():
    """The bases of kronfluence's own run, which ``kronfluence_test`` compares."""
    params = {k: v for k, v in np.load(FILES / "problem.npz").items() if k.startswith("layers")}
    names = {f"layers.{i}.w": f"layers.{i}" for i in range(3)}

    def network(p, x):
        for i in range(3):
            x = (jnp.tanh(x) if i else x) @ p[f"layers.{i}.w"] + p[f"layers.{i}.b"]
        return x

    batch = jnp.ones((2, len(params["layers.0.w"]))), jnp.zeros(2, int)
    stats = jk.value_grad_and_factors(jk.Objective(network, jk.Categorical()))
    like = stats.factor_shapes(params, batch)
    return load_kronfluence(FILES, like, terms_per_example=1, names=names)


def times(data, vector):
    return jax.tree.map(lambda x: data * x, vector)


OPERATORS = jk.operators
CASES = {
    "influence, a measurement": lambda b: jk.influence(
        OBJECTIVE, PARAMS, b, BATCH, BATCH, measurement=margin
    ),
    "scores_of_batches": lambda b: list(
        scores_of_batches(
            OBJECTIVE, PARAMS, jk.prepare_queries(OBJECTIVE, PARAMS, b, BATCH), [BATCH]
        )
    ),
    "gradient_store, at low rank": lambda b: jk.influence(
        OBJECTIVE, PARAMS, b, BATCH, jk.gradient_store(OBJECTIVE, PARAMS, b, BATCH, rank=1)
    ),
    "quadratic_penalty": lambda b: jk.quadratic_penalty(collected(), PARAMS)(TWICE),
    "load_kronfluence": lambda b: kronfluences(),
    "from_function": lambda b: OPERATORS.from_function(times, jnp.ones(()), PARAMS) @ PARAMS,
    "capacity_interval": lambda b: str(jk.capacity_interval([metrics(b), metrics(b)])),
    "compare_capacity": lambda b: str(jk.compare_capacity(metrics(b), metrics(b))),
    "prepare_queries": lambda b: jk.prepare_queries(OBJECTIVE, PARAMS, b, BATCH, query_rank=1),
    "influence": lambda b: jk.influence(OBJECTIVE, PARAMS, b, BATCH, BATCH),
    "influence, by layer, a number": lambda b: jk.influence(
        OBJECTIVE, PARAMS, b, BATCH, BATCH, per="layer", damping=0.1, layers="up"
    ),
    "influence, the best": lambda b: jk.influence(
        OBJECTIVE, PARAMS, b, BATCH, iter([BATCH, BATCH]), top_k=2
    ),
    "self_influence": lambda b: jk.self_influence(OBJECTIVE, PARAMS, b, BATCH),
    "self_influence, in parts": lambda b: jk.self_influence(
        OBJECTIVE, PARAMS, b, BATCH, damping=0.1, max_bytes=600
    ),
    "gram": lambda b: (
        jk.gram(OBJECTIVE, PARAMS, BATCH, rows="losses"),
        jk.gram(OBJECTIVE, PARAMS, BATCH, BATCH),
        jk.gram(OBJECTIVE, PARAMS, BATCH, diagonal=True),
    ),
    "jacobian": lambda b: jk.jacobian(OBJECTIVE, PARAMS, BATCH, rows="losses").vjp(jnp.ones(6)),
    "gradient_store": lambda b: jk.gradient_store(OBJECTIVE, PARAMS, b, BATCH).bases,
    "influence of a store": lambda b: jk.influence(
        OBJECTIVE, PARAMS, b, BATCH, store(b), query_rank=1, layers="up"
    ),
    "self_influence of a store": lambda b: (
        jk.self_influence(OBJECTIVE, PARAMS, b, store(b)),
        jk.self_influence(OBJECTIVE, PARAMS, b, store(b), damping=0.1),
    ),
    "check_coverage": lambda b: str(jk.check_coverage(OBJECTIVE, PARAMS, BATCH, max_examples=2)),
    "laplace, evidence": lambda b: posterior(b).tune_prior().log_marginal_likelihood(BATCH),
    "laplace, predict": lambda b: posterior(b).predict(BATCH[0]),
    "laplace, validation": lambda b: (
        posterior(b).tune_prior(validation=BATCH, grid=[0.1, 1.0]).prior_precision
    ),
    "laplace, sample": lambda b: posterior(b).sample(KEY, 2),
    "ggn": lambda b: ggn() @ PARAMS,
    "ggn, inner products": lambda b: ggn().inner_products([PARAMS, PARAMS]),
    "ggn, dense": lambda b: ggn().to_dense(),
    "fisher": lambda b: OPERATORS.fisher(OBJECTIVE, PARAMS, BATCH, fisher="mc", key=KEY) @ PARAMS,
    "hessian": lambda b: OPERATORS.hessian(OBJECTIVE, PARAMS, BATCH) @ PARAMS,
    "hessian of a scalar loss": lambda b: OPERATORS.hessian(loss, PARAMS, BATCH) @ PARAMS,
    "kronecker": lambda b: OPERATORS.kronecker(b, PARAMS) @ PARAMS,
    "spectrum": lambda b: jk.spectrum(ggn(), 1, key=KEY, num_steps=3).eigenvalues,
    "trace": lambda b: OPERATORS.trace(ggn(), key=KEY, num_samples=3),
    "log_determinant": lambda b: OPERATORS.log_determinant(
        ggn(), damping=0.1, key=KEY, num_samples=3
    ),
    "spectral_density": lambda b: OPERATORS.spectral_density(ggn(), key=KEY),
    "solve": lambda b: OPERATORS.solve(ggn(), PARAMS, damping=0.1),
    "capacity_metrics": lambda b: str(jk.capacity_metrics(b, num_examples=6)),
}


def test_every_function_has_a_case():
    rooms = jaxkfac.uses, OPERATORS, jaxkfac.curvature.capacity
    functions = {
        name for room in rooms for name in room.__all__ if inspect.isfunction(getattr(room, name))
    }
    tested = {name.replace(",", " ").split()[0] for name in CASES}
    plain = {"columns", "legend", "metric", "mean_interval", "diagonal_rows"}  # tables, NumPy
    assert functions - tested - plain == set()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_a_second_call_compiles_nothing_and_returns_the_same_bits(name, bases, counted):
    first = CASES[name](bases)
    before = counted()
    second = CASES[name](bases)
    assert counted() == before
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_count_sees_what_is_compiled(counted):
    before = counted()
    jax.jit(lambda x: x * 3)(1.0)
    assert counted() > before


@pytest.mark.slow
def test_an_equal_shape_takes_other_values(bases):
    """What is kept is a program, and not the arrays it first ran with."""
    found = [jk.self_influence(OBJECTIVE, params, bases, BATCH) for params in (PARAMS, TWICE)]
    again = jk.Objective(lambda p, x: model(p, x), jk.Categorical())
    np.testing.assert_array_equal(found[1], jk.self_influence(again, TWICE, bases, BATCH))
    assert not np.allclose(found[0], found[1])
    smaller = [jk.self_influence(OBJECTIVE, PARAMS, bases, BATCH, damping=d) for d in (0.1, 10.0)]
    assert (smaller[0] > smaller[1]).all()


@pytest.mark.slow
def test_programs_go_with_their_objective_and_arrays_with_the_call(bases):
    class Closed:
        def __init__(self):
            self.scale = jnp.full(5, 2.0)

        def __call__(self, params, x):
            return model(params, x * self.scale)

    function = Closed()
    objective = jk.Objective(function, jk.Categorical())
    params = jax.tree.map(lambda x: x + 0, PARAMS)
    inputs = BATCH[0] + 0
    bases = jax.tree.map(lambda x: x + 0, bases)
    jk.influence(objective, params, bases, (inputs, BATCH[1]), (inputs, BATCH[1]))
    jk.self_influence(objective, params, bases, (inputs, BATCH[1]))
    arrays = [weakref.ref(x) for x in (*params.values(), *jax.tree.leaves(bases), inputs)]
    owned = [weakref.ref(function), weakref.ref(function.scale)]
    del params, inputs, bases
    gc.collect()
    assert not any(ref() is not None for ref in arrays)
    assert all(ref() is not None for ref in owned)
    del objective, function
    gc.collect()
    assert not any(ref() is not None for ref in owned)


def test_few_programs_are_kept_and_none_is_pickled(bases):
    objective = jk.Objective(model, jk.Categorical())
    for number in range(MOST + 5):
        objective.programs.get(number, object)
    assert len(objective.programs) == MOST
    other = pickle.loads(pickle.dumps(objective))
    assert other == objective and len(other.programs) == 0
