"""Bad input raises at once and says what was expected, what came and what to do."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from tests._checks import objective_of
from tests._likelihoods import mean_loss
from tests._programs import labels, mlp, mlp_params, normal, scanned, scanned_params
from tests._taps import PLAIN


def BATCH(n=4):
    return normal(1, n, 4), labels(2, n)


@pytest.mark.parametrize("pattern", ["up/kernl", "up", "kernel", ".*q_proj.*"])
def test_unknown_layer_pattern_gives_the_nearest_names(x64, pattern):
    stats = jk.value_grad_and_factors(objective_of(mlp), layers=pattern)
    with pytest.raises(jk.UnknownLayerError, match="kernel") as error:
        stats(mlp_params(), BATCH())
    assert pattern in str(error.value)
    assert "up/kernel" in str(error.value)


def test_pattern_that_is_no_regular_expression_is_named():
    with pytest.raises(ValueError, match=r"\(up"):
        jk.value_grad_and_factors(objective_of(mlp), layers="(up")(mlp_params(), BATCH())


def test_unknown_factor_name_gives_the_nearest(x64):
    *_, factors = jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), BATCH())
    with pytest.raises(jk.UnknownLayerError, match="up/kernel"):
        factors["up/kernal"]


def test_uncovered_parameter_is_named_with_the_way_out(x64):
    def model(p, x, tap):
        return jnp.arctan2(mlp(p["net"], x, tap), jnp.sort(p["temperature"]))

    p = {"net": mlp_params(), "temperature": normal(3, 3)}
    with pytest.raises(jk.UncoveredParameterError, match="temperature") as error:
        jk.value_grad_and_factors(objective_of(model))(p, BATCH())
    assert "sort" in str(error.value)
    assert "uncovered" in str(error.value)  # the argument that chooses otherwise
    assert "net/up" not in str(error.value)


def test_every_uncovered_parameter_is_named_at_once(x64):
    def model(p, x, tap):
        return jnp.arctan2(jnp.arctan2(x, jnp.sort(p["a"])), jnp.sort(p["b"]))

    p = {"a": normal(1, 4), "b": normal(2, 4)}
    with pytest.raises(jk.UncoveredParameterError, match="(?s)a.*b"):
        jk.value_grad_and_factors(objective_of(model))(p, BATCH())


WRONG_LITERALS = """
import jaxkfac as jk
objective = jk.Objective(lambda p, x: x @ p["w"], jk.Categorical())
for option in ("fisher", "sharing", "bias", "scales", "uncovered"):
    try:
        jk.value_grad_and_factors(objective, **{option: "sideways"})
    except ValueError as error:
        print(option, "|", " ".join(str(error).split()))
"""


@pytest.mark.slow
def test_wrong_literals_raise_when_built_in_a_users_process():
    """Without the type hook of the tests: the message names option, value and choices."""
    done = subprocess.run(
        [sys.executable, "-c", WRONG_LITERALS], capture_output=True, text=True, check=True
    )
    messages = dict(line.split(" | ", 1) for line in done.stdout.splitlines())
    choices = {
        "fisher": "empirical",
        "sharing": "expand",
        "bias": "joint",
        "scales": "full_block",
        "uncovered": "raise",
    }
    assert set(messages) == set(choices)
    for option, choice in choices.items():
        assert all(word in messages[option] for word in (option, "sideways", choice))


NUMBERS = """
import jax.numpy as jnp, numpy as np, jaxkfac as jk
objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
params, batch = {"w": jnp.ones((4, 2))}, (jnp.eye(4)[:3], jnp.zeros((3, 2)))
factors = jk.value_grad_and_factors(objective)(params, batch).factors
bases = jk.eigendecompose(factors)
for name, call in {
    "pair": lambda: jk.self_influence(objective, params, bases, batch, damping=(0.1, 0.1)),
    "period": lambda: jk.kfe_adam(0.1, like=factors, refresh_every=2.5),
    "no period": lambda: jk.kfe_adam(0.1, like=factors, refresh_every=float("nan")),
}.items():
    try:
        call()
    except ValueError as error:
        print(name, "|", " ".join(str(error).split()))
found = jk.influence(objective, params, bases, batch, batch, top_k=np.int64(2))
expected = jk.influence(objective, params, bases, batch, batch, top_k=2)
print("NumPy's integer |", bool((found.indices == expected.indices).all()))
"""


@pytest.mark.slow
def test_numbers_of_another_form_are_refused_or_read_in_a_users_process():
    """Without the type hook of the tests, which lets none of them pass."""
    done = subprocess.run([sys.executable, "-c", NUMBERS], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    messages = dict(line.split(" | ", 1) for line in done.stdout.splitlines())
    assert set(messages) == {"pair", "period", "no period", "NumPy's integer"}
    assert "or one number: a pair is added" in messages["pair"]
    assert "refresh_every=2.5: expected a whole number" in messages["period"]
    assert "refresh_every=nan: expected at least 1" in messages["no period"]
    assert messages["NumPy's integer"] == "True"


WRONG_KINDS = """
import jax, jax.numpy as jnp, jaxkfac as jk, optax
objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
params, x, y = {"w": jnp.ones((4, 2))}, jnp.ones((3, 5, 4)), jnp.ones((3, 5, 2))
stats = jk.value_grad_and_factors(objective, fisher="mc")
key, rows = jax.random.key(0), [[True] * 5] * 3
_, grads, factors = stats(params, (x, y), key)
accumulating = jk.multi_steps(optax.sgd(1.0), 2)
calls = {
    "mask": lambda: objective(params, (x, y, rows)),
    "factors' mask": lambda: stats(params, (x, y, rows), key),
    "positions": lambda: stats(params, (x, y), key, positions=rows),
    "labels": lambda: stats(params, (x, y), labels=[y.tolist()]),
    "operator's labels": lambda: jk.operators.fisher(
        objective, params, (x, y), fisher="mc", labels=[y.tolist()]),
    "no likelihood": lambda: jk.Objective(objective.apply_fn, None),
    "likelihood's name": lambda: jk.Objective(objective.apply_fn, "categorical"),
    "bases": lambda: jk.apply_power(grads, factors),
    "factors": lambda: jk.eigendecompose(grads),
    "seed": lambda: stats(params, (x, y), 0),
    "seed of rows": lambda: jk.value_grad_and_factors(objective, subsample=0.5)(
        params, (x, y), jnp.int32(0)),
    "seed of a corrector": lambda: jk.correct_eigenvalues(
        objective, jk.eigendecompose(factors), fisher="mc")(params, (x, y), 0),
    "learning_rate": lambda: jk.kfac(None, like=factors),
    "damping": lambda: jk.kfac(0.1, like=factors, damping=(1.0, None)),
    "no momentum": lambda: jk.kfac(0.1, like=factors, momentum=None),
    "momentum's schedule": lambda: jk.kfac(0.1, like=factors, momentum=lambda step: 0.9),
    "refresh_every": lambda: jk.kfac(0.1, like=factors, refresh_every=None),
    "max_condition": lambda: jk.kfac(0.1, like=factors, max_condition=None),
    "no number of micro-batches": lambda: jk.multi_steps(optax.sgd(1.0), None),
    "micro-batches as text": lambda: jk.multi_steps(optax.sgd(1.0), "2"),
    "terms": lambda: accumulating.update(grads, accumulating.init(params), terms=jnp.ones(2)),
}
for name, call in calls.items():
    try:
        call()
    except TypeError as error:
        print(name, "|", " ".join(str(error).split()))
"""


@pytest.mark.exhaustive  # tests/wrong_arguments_test.py refuses them too
def test_arguments_of_another_kind_raise_in_words_in_a_users_process():
    """Without the type hook of the tests: what was wanted, what came."""
    done = subprocess.run(
        [sys.executable, "-c", WRONG_KINDS], capture_output=True, text=True, check=True
    )
    messages = dict(line.split(" | ", 1) for line in done.stdout.splitlines())
    likelihoods = ("jk.Categorical()", "jk.Bernoulli()", "jk.Gaussian()")
    words = {
        "mask": ("the mask", "expected an array", "list of 3", "jnp.asarray"),
        "factors' mask": ("the mask", "expected an array", "list of 3", "jnp.asarray"),
        "positions": ("positions", "expected an array", "list of 3", "jnp.asarray"),
        "labels": ("labels", "expected an array", "list of 1", "jnp.asarray"),
        "operator's labels": ("labels", "expected an array", "list of 1", "jnp.asarray"),
        "no likelihood": ("likelihood", *likelihoods, "None"),
        "likelihood's name": ("likelihood", *likelihoods, "'categorical'"),
        "bases": ("bases", "jk.eigendecompose(factors)", "got Factors"),
        "factors": ("factors", "jk.value_grad_and_factors", "got dict"),
        "seed": ("key", "jax.random.key(0)", "got int"),
        "seed of rows": ("key", "jax.random.key(0)", "got "),
        "seed of a corrector": ("key", "jax.random.key(0)", "got int"),
        "learning_rate": ("learning_rate", "a number or a schedule", "got None"),
        "damping": ("damping", "a number or a schedule", "0.0", "got None"),
        "no momentum": ("momentum", "0.0 for no momentum", "got None"),
        "momentum's schedule": ("momentum", "a function", "optax.inject_hyperparams"),
        "refresh_every": ("refresh_every", "at least 1", "got None"),
        "max_condition": ("max_condition", "at least 1", "got None"),
        "no number of micro-batches": ("every_k_schedule", "a whole number", "got None"),
        "micro-batches as text": ("every_k_schedule", "a whole number", "got '2'"),
        "terms": ("terms", "mask.sum()", "shape (2,)"),
    }
    assert set(messages) == set(words)
    for name, expected in words.items():
        assert all(word in messages[name] for word in expected), messages[name]


def test_scalar_loss_has_no_labels_to_sample():
    def loss(p, batch):
        return mean_loss(mlp, "categorical", p, batch)

    with pytest.raises((ValueError, TypeError), match="(?s)mc.*Objective|Objective.*mc"):
        jk.value_grad_and_factors(loss, fisher="mc", loss_terms=4)(
            mlp_params(), BATCH(), key=jax.random.key(0)
        )


def test_scalar_loss_without_its_number_of_terms_says_so(x64):
    def loss(p, batch):
        return mean_loss(mlp, "categorical", p, batch)

    with pytest.raises((ValueError, TypeError), match="loss_terms"):
        jk.value_grad_and_factors(loss)(mlp_params(), BATCH())


@pytest.mark.parametrize("terms", [0, -3])
def test_loss_terms_must_be_positive(terms):
    with pytest.raises(ValueError, match="loss_terms"):
        jk.value_grad_and_factors(lambda p, b: jnp.sum(p), loss_terms=terms)


def test_sampled_labels_need_a_key(x64):
    with pytest.raises((ValueError, TypeError), match="key"):
        jk.value_grad_and_factors(objective_of(mlp), fisher="mc")(mlp_params(), BATCH())


def test_empty_batch_raises(x64):
    batch = (jnp.zeros((0, 4)), jnp.zeros((0,), int))
    with pytest.raises(ValueError, match=r"(?i)empty|no example|0 example|\(0"):
        jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), batch)


def test_batch_of_no_terms_raises(x64):
    batch = (jnp.zeros((2, 0, 4)), jnp.zeros((2, 0), int))
    with pytest.raises(ValueError, match=r"(?i)empty|hold no .*\(2, 0"):
        jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), batch)


def test_batch_that_is_no_pair_raises(x64):
    for batch in (normal(1, 4, 4), (normal(1, 4, 4),), (*BATCH(), None, None)):
        with pytest.raises((ValueError, TypeError), match=r"inputs, targets"):
            jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), batch)


def test_integer_outputs_raise(x64):
    objective = jk.Objective(lambda p, x: x, jk.Categorical())
    with pytest.raises((ValueError, TypeError), match="(?i)int"):
        objective({}, (jnp.ones((4, 3), int), labels(2, 4)))


def test_integer_batch_where_the_model_multiplies_it_keeps_its_meaning(x64):
    """Integer inputs are data like any other once the model casts them; else JAX says so."""

    def model(p, x, tap):
        return tap.dense("w", x.astype(p["w"].dtype), x.astype(p["w"].dtype) @ p["w"])

    x = labels(1, 5, 4, classes=9)
    *_, factors = jk.value_grad_and_factors(objective_of(model))(
        {"w": normal(1, 4, 3)}, (x, labels(2, 5))
    )
    rows = np.asarray(x, float)
    np.testing.assert_allclose(factors["w"].a, rows.T @ rows / 5, rtol=1e-12)


def test_float_targets_for_categorical_raise(x64):
    with pytest.raises((ValueError, TypeError), match="(?i)integer|int"):
        objective_of(mlp)(mlp_params(), (normal(1, 4, 4), normal(2, 4)))


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "bernoulli"])
def test_targets_of_another_shape_raise_with_both_shapes(x64, likelihood):
    targets = labels(2, 5) if likelihood == "categorical" else normal(2, 4, 2)
    with pytest.raises(ValueError, match=r"\(4") as error:
        objective_of(mlp, likelihood)(mlp_params(), (normal(1, 4, 4), targets))
    assert str(targets.shape).strip("(),") in str(error.value)


def test_targets_that_would_only_broadcast_raise(x64):
    """(n, 1) against (n, c) would silently repeat one target over all outputs."""
    for shape in ((4, 1), (3,), (1, 3)):
        with pytest.raises(ValueError, match=r"(?i)target"):
            objective_of(mlp, "gaussian")(mlp_params(), (normal(1, 4, 4), normal(2, *shape)))


@pytest.mark.parametrize("shape", [(4, 3), (3,), (4, 1), ()])
def test_mask_of_another_shape_raises(x64, shape):
    batch = (*BATCH(), jnp.ones(shape, bool))
    with pytest.raises(ValueError, match="(?i)mask"):
        jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), batch)


@pytest.mark.parametrize("shape", [(3, 4), (2, 5), (3, 5, 4)])
def test_positions_of_another_shape_raise(x64, shape):
    batch = (normal(1, 3, 5, 4), labels(2, 3, 5))
    with pytest.raises(ValueError, match="(?i)positions"):
        jk.value_grad_and_factors(objective_of(mlp))(
            mlp_params(), batch, positions=jnp.ones(shape, bool)
        )


def test_concrete_mask_that_masks_all_raises(x64):
    with pytest.raises(ValueError, match="(?i)mask"):
        jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), (*BATCH(), jnp.zeros(4, bool)))


def test_traced_mask_that_masks_all_gives_zero_counts_and_nothing_poisonous(x64):
    """Inside jit it cannot raise: the result says terms = 0, and adding it to another
    micro-batch leaves that one's factors as they were.
    """
    stats = jax.jit(jk.value_grad_and_factors(objective_of(mlp)))
    p = mlp_params()
    _, grads, none = stats(p, (*BATCH(), jnp.zeros(4, bool)))
    *_, some = stats(p, (*BATCH(), jnp.ones(4, bool)))
    assert float(none.terms) == 0
    for name in some:
        assert not np.asarray(none[name].g).any()
        np.testing.assert_allclose((none + some)[name].g, some[name].g, rtol=1e-12)
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))


def test_non_finite_inputs_are_a_field_of_the_result_inside_jit(x64):
    def model(p, x, tap):
        return tap.dense("v", x[:, :2], x[:, :2] @ p["v"]) + tap.dense("w", x, x @ p["w"])

    x, y = BATCH()
    p = {"v": normal(1, 2, 3), "w": normal(2, 4, 3)}
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model)))
    assert all(bool(v) for v in stats(p, (x, y))[2].is_finite().values())
    finite = stats(p, (x.at[0, 3].set(jnp.nan), y))[2].is_finite()
    assert not bool(finite["w"])


@pytest.mark.parametrize("build", [jk.value_grad_and_factors, jk.Optimizer])
def test_an_option_that_does_not_exist_is_named_with_the_nearest(build):
    with pytest.raises(TypeError, match="has no option fischer=: the nearest are 'fisher'"):
        build(objective_of(mlp), fischer="mc")


def test_max_dense_must_be_positive():
    with pytest.raises(ValueError, match="max_dense"):
        jk.value_grad_and_factors(objective_of(mlp), max_dense=0)


def test_params_without_any_array_raise(x64):
    objective = jk.Objective(lambda p, x: x, jk.Categorical())
    with pytest.raises(ValueError, match="(?i)no .*parameter|no .*layer|param"):
        jk.value_grad_and_factors(objective)({}, (normal(1, 4, 3), labels(2, 4)))


def test_objective_needs_a_likelihood():
    with pytest.raises(TypeError):
        jk.Objective(lambda p, x: x)


def test_likelihood_class_instead_of_instance_is_named():
    with pytest.raises(Exception, match="Categorical"):
        jk.Objective(lambda p, x: mlp(p, x, PLAIN), jk.Categorical)(mlp_params(), BATCH())


@pytest.mark.slow
def test_factors_of_different_models_do_not_add(x64):
    one = jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), BATCH())[2]
    two = jk.value_grad_and_factors(objective_of(scanned))(scanned_params(), BATCH())[2]
    with pytest.raises(ValueError):
        one + two


def test_batch_statistics_among_the_parameters_are_refused(x64):
    """An optimizer would step them, along a gradient of zero or worse."""
    variables = {"params": {"w": normal(1, 4, 3)}, "batch_stats": {"mean": jnp.zeros(4)}}
    apply = lambda v, x: (x - v["batch_stats"]["mean"]) @ v["params"]["w"]
    objective = jk.Objective(apply, jk.Categorical())
    part = jk.Objective(lambda v, x: apply(v["net"], x), jk.Categorical())
    for call in (
        lambda: jk.value_grad_and_factors(objective)(variables, BATCH()),
        lambda: jk.operators.ggn(objective, variables, BATCH()),
        lambda: jk.value_grad_and_factors(part)({"net": variables}, BATCH()),
    ):
        with pytest.raises(ValueError, match=r"batch_stats/mean' is a batch statistic.*state="):
            call()


@pytest.mark.slow
def test_a_state_of_another_model_is_refused(x64):
    """Of the same layers' names and other shapes, too."""
    *_, factors = jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), BATCH())
    _, grads, other = jk.value_grad_and_factors(objective_of(scanned))(scanned_params(), BATCH())
    state = jk.kfac(0.1, like=factors).init(mlp_params())
    with pytest.raises(ValueError, match="the state belongs to another model"):
        jk.kfac(0.1, like=other).update(grads, state, scanned_params(), factors=other)
