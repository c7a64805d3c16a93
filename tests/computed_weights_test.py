"""Weights computed from parameters: what takes their factors; see also `tests/zoo/weights.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import assert_factors_close, assert_tree_close, objective_of, squares
from tests._oracle import corrected_eigenvalues, oracle
from tests._programs import labels, normal, tree
from tests.zoo.weights import weight_norm

pytestmark = pytest.mark.usefixtures("x64")


def model(p, x, tap):
    y = tap.dense("v@effective", x, x @ weight_norm(p))
    y = jnp.tanh(tap.lone_bias("bias", y + p["bias"], shape=(5,)))
    return tap.dense("head", y, y @ p["head"])


def params():
    return tree(0, v=(4, 5), g=(5,), bias=(5,), head=(5, 3))


def tokens():
    return normal(8, 3, 2, 4), labels(9, 3, 2)


def collected(objective=None, **options):
    objective = objective_of(model) if objective is None else objective
    return jax.jit(jk.value_grad_and_factors(objective, **options))(params(), tokens())


def kernels(factors):
    return {name: factors[name] for name in factors if name not in ("v", "g")}


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_those_of_the_product(sharing):
    """The bias beside such a product is a lone one: no parameter has the row it would be."""
    factors = collected(sharing=sharing, scales="diagonal").factors
    expected = oracle(model, params(), tokens(), sharing=sharing)
    assert_factors_close(kernels(factors), expected, 1e-10)
    assert factors.layer("v@effective").computed_from == ("g", "v")


@pytest.mark.exhaustive
@pytest.mark.parametrize("wall", [jax.checkpoint, jax.jit], ids=["remat", "jit"])
def test_inside_walls(wall):
    plain = objective_of(model)
    walled = jk.Objective(wall(plain.apply_fn), jk.Categorical())
    found, expected = (collected(objective) for objective in (walled, plain))
    assert_tree_close(found.grads, expected.grads, 1e-12)
    assert_tree_close(found.factors, expected.factors, 1e-12)


@pytest.mark.exhaustive
def test_sampled_and_exact_labels():
    drawn = labels(5, 2, 3, 2)
    stats = jk.value_grad_and_factors(objective_of(model), fisher="mc", scales="diagonal")
    factors = stats(params(), tokens(), labels=drawn).factors
    expected = oracle(model, params(), tokens(), fisher="mc", labels=drawn)
    assert_factors_close(kernels(factors), expected, 1e-10)
    each = [squares(objective_of(model), params(), (tokens()[0], y), ["v"])["v"] for y in drawn]
    diagonal = sum(block.diagonal for block in each) / 2
    np.testing.assert_allclose(factors["v"].diagonal, diagonal, rtol=1e-10)
    exact = collected(fisher="exact", scales="diagonal").factors
    assert_factors_close(kernels(exact), oracle(model, params(), tokens(), fisher="exact"), 1e-10)


@pytest.mark.exhaustive
def test_masked_terms_have_no_gradient():
    mask = jnp.asarray([[True, False], [True, True], [False, True]])
    x, y = tokens()
    stats = jk.value_grad_and_factors(objective_of(model))
    factors = stats(params(), (x, y, mask)).factors

    def loss(p, n):
        logits = jax.nn.log_softmax(objective_of(model).apply_fn(p, x[n]))
        return -(
            jnp.take_along_axis(logits, y[n][:, None], 1)[:, 0] * jnp.where(mask[n], 1.0, 0.0)
        ).sum()

    each = jax.vmap(jax.grad(loss), (None, 0))(params(), jnp.arange(3))
    np.testing.assert_allclose(factors["v"].diagonal, (each["v"] ** 2).sum(0) / 4, rtol=1e-10)


@pytest.mark.exhaustive
def test_one_weight_read_twice_is_one_layer():
    def twice(p, x, tap):
        w = p["v"] / jnp.linalg.norm(p["v"], axis=0)
        y = jnp.tanh(tap.dense("v@effective", x, x @ w))
        return tap.dense("v@effective", y, y @ w)

    one = {"v": normal(3, 4, 4)}
    factors = jk.value_grad_and_factors(objective_of(twice))(one, tokens()).factors
    expected = squares(objective_of(twice), one, tokens(), ["v"])
    assert_factors_close(factors, expected | oracle(twice, one, tokens()), 1e-10)


@pytest.mark.exhaustive
def test_a_stack_computed_before_the_scan_has_factors_by_iteration():
    def apply_fn(p, x):
        kernels = p["v"] / jnp.linalg.norm(p["v"], axis=1, keepdims=True)
        step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return lax.scan(step, x, kernels)[0]

    def unrolled(p, x, tap):
        for i in range(3):
            w = p["v"][i] / jnp.linalg.norm(p["v"][i], axis=0)
            x = jnp.tanh(tap.dense("v@effective", x, x @ w, at=(i,)))
        return x

    one, objective = {"v": normal(3, 3, 4, 4)}, jk.Objective(apply_fn, jk.Categorical())
    expected = oracle(unrolled, one, tokens()) | squares(objective, one, tokens(), ["v"])
    factors = jax.jit(jk.value_grad_and_factors(objective))(one, tokens()).factors
    assert_factors_close(factors, expected, 1e-10)
    budget = jk.value_grad_and_factors(objective, max_factor_bytes=900)
    assert len(budget.plan(one, tokens()).passes) > 1
    assert_factors_close(budget(one, tokens()).factors, expected, 1e-10)


@pytest.mark.slow
def test_nothing_is_preconditioned_by_the_factors_of_a_computed_weight():
    _, grads, factors = collected()
    bases = jk.eigendecompose(factors)
    steps = jk.natural_gradient(grads, bases, damping=0.1)
    for name in ("v", "g"):
        expected = grads[name] / (factors[name].diagonal + 0.1)
        np.testing.assert_allclose(steps[name], expected, rtol=1e-10)
    assert "v@effective" in bases
    metrics = jk.capacity_metrics(bases, num_examples=6)
    assert "v@effective" in str(metrics)


@pytest.mark.slow
def test_kfac_keeps_no_average_of_it():
    stats = jk.value_grad_and_factors(objective_of(model))
    tx = jk.kfac(0.05, like=stats.factor_shapes(params(), tokens()), damping=1e-2)

    @jax.jit
    def step(params, state):
        value, grads, factors = stats(params, tokens())
        updates, state = tx.update(grads, state, params, factors=factors)
        return value, optax.apply_updates(params, updates), state

    before, trained, state = step(params(), tx.init(params()))
    assert list(state.average) == ["bias", "head", "v", "g"]
    assert objective_of(model)(trained, tokens()) < before


@pytest.mark.exhaustive
def test_micro_batches_are_one_batch():
    """The accumulator is what K-FAC keeps."""
    stats = jk.value_grad_and_factors(objective_of(model))
    like = stats.factor_shapes(params(), tokens())

    def first(tx, batches):
        state = tx.init(params())
        for batch in batches:
            _, grads, factors = stats(params(), batch)
            updates, state = tx.update(grads, state, params(), factors=factors)
        return updates

    parts = [jax.tree.map(lambda x, i=i: x[i : i + 1], tokens()) for i in range(3)]
    several = first(jk.multi_steps(jk.kfac(0.1, like=like), 3), parts)
    assert_tree_close(several, first(jk.kfac(0.1, like=like), [tokens()]), 1e-10)


@pytest.mark.exhaustive
def test_measured_eigenvalues():
    factors = collected().factors
    bases = jk.eigendecompose(factors)
    found = jk.correct_eigenvalues(objective_of(model), bases)(params(), tokens())
    vectors = {n: (bases[n].a_vectors, bases[n].g_vectors) for n in ("v@effective", "head")} | {
        "bias": (None, None)
    }
    expected = corrected_eigenvalues(model, params(), tokens(), vectors)
    for name in ("v@effective", "head"):
        want = expected[name].values
        np.testing.assert_allclose(found[name].raw_values, want, rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(found["v"].raw_diagonal, factors["v"].diagonal, rtol=1e-10)


@pytest.mark.exhaustive
def test_the_host_service_and_the_planner_take_it():
    _, _, factors = collected()
    with jk.HostCurvature(lag=0) as service:
        service.push(factors, 0)
        bases = service.bases(0)
    np.testing.assert_allclose(bases["v"].raw_diagonal, factors["v"].diagonal, rtol=1e-10)
    tx = jk.kfac(0.1, like=factors)
    plan = jk.plan_memory(objective_of(model), params(), tokens(), optimizer=tx, device_bytes="1GB")
    assert "factors" in str(plan)


@pytest.mark.slow
def test_a_pattern_takes_the_weight_without_what_stands_behind_it(capsys):
    assert list(collected(layers=".*@effective").factors) == ["v@effective"]
    assert "second pass" not in capsys.readouterr().err
    assert list(collected(layers="v|head").factors) == ["head", "v"]
    assert "1 parameters are covered by a second pass" in capsys.readouterr().err


def test_the_table_says_which_is_which():
    table = jk.find_layers(objective_of(model).apply_fn, params(), tokens()[0])
    kinds = {name: layer.kind for name, layer in table.items()}
    assert kinds["v@effective"] == "dense"
    assert kinds["v"] == kinds["g"] == "reparameterised"
    assert "cover 45 of 45 parameters (100.0%)" in str(table)
    assert ("v", "has a diagonal of whole examples' gradients, from a second pass") in table.notes


@pytest.mark.slow
def test_where_there_is_no_second_pass_the_parameters_are_not_covered():
    with pytest.raises(jk.UncoveredParameterError, match="Fisher type has none of"):
        collected(fisher="forward")

    def coupled(p, x):
        y = x @ weight_norm(p)
        return (y - y.mean((0, 1))) @ p["head"]

    objective = jk.Objective(coupled, jk.Categorical())
    kept = tree(0, v=(4, 5), g=(5,), head=(5, 3))
    with pytest.raises(jk.UncoveredParameterError, match="examples meet at `reduce_sum`"):
        jk.value_grad_and_factors(objective)(kept, tokens())
    stats = jk.value_grad_and_factors(objective, uncovered="ignore")
    assert list(stats(kept, tokens()).factors) == ["v@effective", "head"]

    def scalar(p, batch):
        return jnp.mean((batch[0] @ weight_norm(p)) ** 2)

    with pytest.raises(jk.UncoveredParameterError, match="need a jk.Objective or jk.mark"):
        jk.value_grad_and_factors(scalar, loss_terms=6)(tree(0, v=(4, 5), g=(5,)), tokens())


def two_marks(p, batch):
    (x, y), z = batch
    logits = jk.mark_outputs(objective_of(model).apply_fn(p, x), jk.Categorical(), weight=0.5)
    error = jk.mark_outputs(jnp.tanh(z @ weight_norm(p)).sum(-1), jk.Gaussian(), weight=2.0)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
    return -0.5 * log_p.mean() + jnp.square(error).mean() + 0.1 * jnp.square(p["v"]).sum()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fisher", ["empirical", "exact", pytest.param("mc", marks=pytest.mark.exhaustive)]
)
def test_beside_marks_a_parameter_has_the_squares_of_each_example_s_gradient(fisher):
    """An example's terms have the weight and number of their mark; those of two marks are two."""
    (x, y), z, p = tokens(), normal(6, 4, 4), params()
    drawn = [labels(5, 1, 3, 2), normal(4, 1, 4)]
    extra = {"labels": drawn} if fisher == "mc" else {}
    stats = jk.value_grad_and_factors(two_marks, fisher=fisher)
    value, grads, factors = jax.jit(stats)(p, ((x, y), z), **extra)
    assert_tree_close((value, grads), jax.value_and_grad(two_marks)(p, ((x, y), z)), 1e-10)

    def outputs(p):
        logits = objective_of(model).apply_fn(p, x)
        return logits, jnp.tanh(z @ weight_norm(p)).sum(-1)

    (logits, f), vjp = jax.vjp(outputs, p)
    probs, expected = jax.nn.softmax(logits), {"v": 0.0, "g": 0.0}

    if fisher == "exact":
        # A square root of each term's Fisher; terms of one example are taken one by one.
        root = jnp.sqrt(probs)[..., None] * (jnp.eye(3) - probs[..., None, :])
        at = jnp.eye(2)[None, :, :, None, None] * root[:, :, None]  # (n, s, s', c, c')
        pulls = [at.transpose(1, 3, 0, 2, 4).reshape(6, 3, 2, 3), jnp.ones((1, 4))]
    else:
        y, t = (drawn[0][0], drawn[1][0]) if fisher == "mc" else (y, 0.0)
        pulls = [(probs - jax.nn.one_hot(y, 3))[None], (f - t)[None]]
    zeros = jnp.zeros_like(logits), jnp.zeros_like(f)
    for mark, share in ((0, 0.5 / 6), (1, 2.0 / 4)):
        for pull in pulls[mark]:
            for n in range(len(pull)):
                alone = jnp.zeros_like(pull).at[n].set(pull[n])
                gradient = vjp((alone, zeros[1]) if mark == 0 else (zeros[0], alone))[0]
                expected = {name: expected[name] + share * gradient[name] ** 2 for name in expected}
    for name in ("v", "g"):
        np.testing.assert_allclose(factors[name].diagonal, expected[name], rtol=1e-10)


def test_beside_a_mark_of_coupled_examples_the_parameters_are_not_covered():
    def contrastive(p, batch):
        images, texts = (side @ weight_norm(p) for side in batch)
        logits = jk.mark_outputs(images @ texts.T, jk.Categorical())
        return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()

    kept, x = tree(0, v=(4, 5), g=(5,)), (normal(6, 4, 4), normal(7, 4, 4))
    with pytest.raises(jk.UncoveredParameterError, match="the examples meet at `dot_general`"):
        jk.value_grad_and_factors(contrastive)(kept, x)


@pytest.mark.exhaustive
def test_an_operation_without_batches_is_run_example_by_example():
    """A grouped product, behind a weight whose diagonal takes each example by itself."""

    def grouped(p, x, tap):
        y = jnp.tanh(x @ weight_norm(p))
        sizes = jnp.zeros(2, jnp.int32).at[1].set(len(x) * x.shape[1])
        y = lax.ragged_dot(y.reshape(-1, 5), jnp.stack([p["head"], p["head"] * 2]), sizes)
        return y.reshape(*x.shape[:2], 3)

    def alone(p, x, tap):
        return jnp.tanh(x @ weight_norm(p)) @ (p["head"] * 2)

    found, expected = (collected(objective_of(model)).factors for model in (grouped, alone))
    for name in ("v", "g"):
        np.testing.assert_allclose(found[name].diagonal, expected[name].diagonal, rtol=1e-10)


def test_the_table_lists_a_computed_weight_before_batch_statistics_as_the_statistics_do():
    """The diagonal of `v` needs single examples, which meet in the normalization behind it."""

    def apart(p, x):
        return jnp.tanh(x @ (p["v"] / jnp.sqrt((p["v"] ** 2).sum(0)))) @ p["u"]

    def model(p, x):
        x = x @ (p["v"] / jnp.sqrt((p["v"] ** 2).sum(0)))
        return jnp.tanh(x - x.mean(0)) @ p["u"]

    params = {"v": normal(0, 4, 3), "u": normal(1, 3, 2)}
    batch = normal(2, 5, 4), normal(3, 5, 2)
    objective = jk.Objective(model, jk.Gaussian())
    table = jk.find_layers(objective, params, batch)
    plain = jk.find_layers(model, params, batch[0])
    assert "v" in dict(table.problems) and "v" in dict(plain.problems)
    assert "the examples meet at" in dict(table.problems)["v"]
    with pytest.raises(jk.UncoveredParameterError, match="v: is behind a weight"):
        jk.value_grad_and_factors(objective).factor_shapes(params, batch)
    assert not jk.find_layers(jk.Objective(apart, jk.Gaussian()), params, batch).problems


def test_a_loss_without_outputs_and_one_whose_marks_are_not_reached_say_so_in_the_table():
    def model(p, x):
        return (x @ (p["v"] / jnp.sqrt((p["v"] ** 2).sum(0)))) @ p["u"]

    def loss(p, batch):
        return jnp.mean((model(p, batch[0]) - batch[1]) ** 2)

    def marked(p, batch):
        outputs = jk.mark_outputs(batch[0] @ p["v"], jk.Gaussian())
        return jnp.mean((outputs - batch[1]) ** 2) + jnp.mean((batch[0] @ p["u"]) ** 2)

    params, batch = {"v": normal(0, 4, 2), "u": normal(1, 2, 2)}, (normal(2, 5, 4), normal(3, 5, 2))
    assert "jk.mark_outputs" in dict(jk.find_layers(loss, params, batch).problems)["v"]
    with pytest.raises(jk.UncoveredParameterError, match="v: is behind"):
        jk.value_grad_and_factors(loss, loss_terms=5).factor_shapes(params, batch)
    params |= {"u": normal(1, 4, 2)}
    (problem,) = jk.find_layers(marked, params, batch).problems
    assert problem == ("u", "leads to none of the loss's jk.mark_outputs")
    with pytest.raises(jk.UncoveredParameterError, match="'u' lead to none"):
        jk.value_grad_and_factors(marked).factor_shapes(params, batch)


def test_a_tuple_of_inputs_is_unpacked_where_the_function_takes_its_entries():
    params, x = {"w": normal(0, 4, 3)}, normal(1, 5, 4)
    two = lambda p, x, y: x @ p["w"] + y
    one = lambda p, pair: pair[0] @ p["w"] + pair[1]
    for fn, args in ((two, ((x, 1.0),)), (two, (x, 1.0)), (one, ((x, 1.0),))):
        assert list(jk.find_layers(fn, params, *args)) == ["w"]
