"""A trial of a model: it finds what meets, and says what it compared."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.factors import Estimator, check_word
from tests import _couplings
from tests._couplings import APART, EXPECTED, MIXING
from tests._programs import labels, normal
from tests.custom_energy_test import energy as energy_of
from tests.custom_energy_test import problem as problem_of_energy

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.standard_promotion]


def problem(program, x=None):
    x = _couplings.batch() if x is None else x
    params = _couplings.params()
    width = jax.eval_shape(program, params, x).shape[1:]
    return jk.Objective(program, jk.Gaussian()), params, (x, jnp.zeros((len(x), *width)))


# What goes through a loop, or a solver, of which JAX has no reverse derivative.
NO_GRADIENT = {"while on the batch", "pmax under vmap", "pallas, whole", "matrix exponential"}


DERIVATIVES_ALONE = [name for name in MIXING if not EXPECTED[name].value]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(MIXING.keys() - NO_GRADIENT - {*DERIVATIVES_ALONE}))
def test_it_finds_each_program_that_mixes(name):
    report = jk.check_coverage(*problem(MIXING[name]))
    assert report.examples_meet and bool(report.seen) == EXPECTED[name].value


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVATIVES_ALONE)
def test_it_finds_derivatives_between_examples_whose_values_do_not_meet(name):
    report = jk.check_coverage(*problem(MIXING[name]))
    assert report.examples_meet and report.pulled and not report.seen
    assert "they meet in derivatives" in str(report)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(APART.keys() - {"pallas by rows", "while by example"}))
def test_it_sees_none_where_none_mix(name):
    report = jk.check_coverage(*problem(APART[name]))
    assert not report.examples_meet and report.tried == 12
    assert report.gradient < 1e-12


def mlp(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["u"]


@pytest.mark.slow
def test_gradient_and_factors_agree_to_rounding_and_it_says_so():
    report = jk.check_coverage(*problem(mlp))
    assert report.value.answer == report.derivative.answer == "no"
    assert set(report.factors) == set(report.products) == {"w", "u"}
    assert max(report.factors.values()) < 1e-12 and max(report.products.values()) < 1e-10
    said = str(report)
    assert "none seen to meet in 12 replacements" in said and "which proves nothing" in said
    assert "gradient beside plain JAX" in said and "2 layers, worst" in said


@pytest.mark.slow
def test_factors_of_coupled_examples_are_a_remark():
    report = jk.check_coverage(*problem(lambda p, x: mlp(p, x) - mlp(p, x).mean(0)))
    assert not report.factors
    assert any("no sum over examples" in remark for remark in report.remarks)
    assert any("the Fisher's diagonal" in remark for remark in report.remarks)
    assert "examples: they meet" in str(report)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [3, 5])
def test_stacks_masks_and_scales_are_compared(width):
    def model(p, x):
        for w, s in zip(p["w"], p["s"], strict=True):
            x = jnp.tanh(x @ w) * s
        return x

    params = {"w": normal(0, 2, width, width), "s": normal(1, 2, width)}
    batch = normal(2, 4, 3, width), labels(3, 4, 3), normal(4, 4, 3) > -1
    report = jk.check_coverage(jk.Objective(model, jk.Categorical()), params, batch)
    assert max(report.factors.values()) < 1e-12 and max(report.products.values()) < 1e-10


@pytest.mark.slow
def test_a_batch_of_one_and_identical_examples_are_not_tried():
    one = jk.check_coverage(*problem(mlp, _couplings.batch(1)))
    assert one.tried == 0 and "a batch of one" in str(one)
    alike = jk.check_coverage(*problem(mlp, jnp.ones((3, _couplings.D))))
    assert alike.tried == 0 and "identical" in str(alike) and not alike.examples_meet


@pytest.mark.slow
def test_outputs_that_are_no_numbers_are_named():
    report = jk.check_coverage(*problem(mlp, _couplings.batch().at[0, 0].set(jnp.nan)))
    assert report.tried == 0 and "not all finite" in str(report)
    assert "not a number" in str(report)


@pytest.mark.slow
def test_a_gradient_that_is_no_number_is_seen_whichever_parameter_has_it():
    """Zero times the derivative of a root at zero is NaN, in the last of three parameters."""
    model = lambda p, x: mlp(p, x) + 0 * jnp.sqrt(p["z"])
    objective, params, batch = problem(mlp)
    params |= {"z": jnp.zeros(batch[1].shape[-1])}
    report = jk.check_coverage(jk.Objective(model, jk.Gaussian()), params, batch)
    assert np.isnan(report.gradient) and "plain JAX: not a number" in str(report)
    assert np.isnan(report.factors["z"])


@pytest.mark.slow
def test_derivatives_that_are_no_numbers_are_named():
    """The NaN of a root at zero, in an input of every example: nobody knows whether they meet."""
    report = jk.check_coverage(*problem(lambda p, x: mlp(p, x) + jnp.sqrt((0 * x).sum())))
    assert not report.pulled
    assert any("not all finite for outputs of 0, 1" in remark for remark in report.remarks)


@pytest.mark.exhaustive
def test_layers_whose_products_are_not_compared_are_named():
    model = lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T @ p["u"]
    params, x = {"w": normal(0, 4, 3), "u": normal(1, 4, 2)}, normal(2, 5, 4)
    batch = x, jnp.zeros((5, 2))
    report = jk.check_coverage(jk.Objective(model, jk.Gaussian()), params, batch)
    assert set(report.products) == {"u"}
    (remark,) = report.remarks
    assert remark.startswith("the Fisher's diagonal of 'w', 'w@transposed':")


@pytest.mark.slow
def test_integers_keys_and_state():
    def model(p, x, key):
        kept = jax.random.bernoulli(key, 0.5, x["tokens"].shape)
        return p["table"][x["tokens"]] * kept[..., None] + p["number"] * 0

    params = {"table": normal(0, 7, 3), "number": jnp.arange(3)}
    inputs = {"tokens": labels(1, 4, 5) % 7, "keys": jax.random.split(jax.random.key(3), 4)}
    objective = jk.Objective(model, jk.Categorical())
    batch = inputs, labels(2, 4, 5) % 3
    report = jk.check_coverage(objective, params, batch, jax.random.key(0))
    assert report.tried == 8 and not report.examples_meet and report.gradient < 1e-12

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.up(x))

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)), mutable=nnx.BatchStat)
    objective, batch = jk.Objective(apply_fn, jk.Categorical()), (normal(1, 5, 4), labels(2, 5))
    report = jk.check_coverage(objective, params, batch, state=apply_fn.state)
    assert report.examples_meet and report.value.answer == "yes"


def test_of_a_scalar_loss_the_gradient_is_compared():
    loss = lambda p, batch: jnp.mean((batch[0] @ p["w"] - batch[1]) ** 2)
    batch = normal(1, 5, 3), normal(2, 5, 2)
    report = jk.check_coverage(loss, {"w": normal(0, 3, 2)}, batch, loss_terms=5)
    assert report.gradient < 1e-12 and report.tried == 0
    assert "a scalar loss does not show its examples" in str(report)


@pytest.mark.slow
def test_the_users_word_is_recorded_and_tested():
    """A gather by value that stays at home, which no rule can know."""

    def model(p, x):
        at = jnp.clip(jnp.arange(len(x)) + (jnp.abs(x[:, 0]) > 1e9), 0, len(x) - 1)
        return (jnp.tanh(x @ p["w"]))[at]

    objective, params, batch = problem(model)
    stats = jk.value_grad_and_factors(objective, fisher="exact", examples="apart")
    told = stats(params, batch).factors
    careful = jk.value_grad_and_factors(objective, fisher="exact")(params, batch).factors
    assert told.origin.examples == "apart" and "examples='apart'" in str(told.origin)
    assert careful.origin.examples is None
    np.testing.assert_allclose(told["w"].g, careful["w"].g, rtol=1e-10, atol=1e-14)
    report = jk.check_coverage(objective, params, batch)
    assert report.value.answer == "unknown" and not report.examples_meet
    with pytest.raises(ValueError, match="examples='yes': expected None, or 'apart'"):
        check_word("yes")


def test_the_users_word_does_not_speak_against_a_proof():
    objective, params, batch = problem(lambda p, x: mlp(p, x) - mlp(p, x).mean(0))
    factors = jk.value_grad_and_factors(objective)(params, batch).factors
    bases = jk.eigendecompose(factors)
    with pytest.raises(jk.CoupledExamplesError, match="the examples meet at"):
        jk.correct_eigenvalues(objective, bases, examples="apart")(params, batch)


def softmax_model(p, x):
    return jax.nn.softmax(x @ p["w"])


def sigmoid_model(p, x):
    return jax.nn.sigmoid(x @ p["w"])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "likelihood", "link"),
    [
        (softmax_model, jk.Categorical(), "softmax"),
        (sigmoid_model, jk.Bernoulli(), "sigmoid"),
        (lambda p, x: 0.5 + 1e-2 * (x @ p["w"]), jk.Bernoulli(), None),  # by chance in [0, 1]
        (lambda p, x: x @ p["w"] * 0, jk.Bernoulli(), None),  # a head that is initialized to zero
        (lambda p, x: x @ p["w"], jk.Categorical(), None),
        (lambda p, x: jax.nn.log_softmax(x @ p["w"]), jk.Categorical(), None),
    ],
)
def test_probabilities_where_logits_belong_are_a_warning_with_the_remedy(model, likelihood, link):
    targets = jnp.ones((5, 3)) if likelihood == jk.Bernoulli() else labels(2, 5)
    objective = jk.Objective(model, likelihood)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = jk.check_coverage(objective, {"w": normal(0, 4, 3)}, (normal(1, 5, 4), targets))
    said = [str(x.message) for x in caught]
    assert said == list(report.doubts) and len(said) == (link is not None)
    if link:
        assert f"return the values before the {link}" in said[0] and said[0] in str(report)


@pytest.mark.slow
def test_the_first_call_outside_jit_warns_of_probabilities_and_no_other():
    params, batch = {"w": normal(0, 4, 3)}, (normal(1, 5, 4), labels(2, 5))
    objective = jk.Objective(softmax_model, jk.Categorical())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(objective)(params, batch)
        jax.grad(objective)(params, batch)
        jk.value_grad_and_factors(objective)(params, batch)
    with pytest.warns(UserWarning, match=r"Categorical\(\) expects logits.*before the softmax"):
        objective(params, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective(params, batch)
        jk.Objective(lambda p, x: x @ p["w"], jk.Categorical())(params, batch)


# ---------------- no false alarm, and no miss


def agrees(report, digits=1e-10):
    assert report.gradient < digits
    assert max([*report.factors.values(), *report.products.values()]) < digits
    return report


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc", "forward"])
def test_dropout_draws_the_same_numbers_for_single_examples(fisher):
    def model(p, x, key):
        hidden = jnp.tanh(x @ p["w"])
        return (hidden * jax.random.bernoulli(key, 0.5, hidden.shape)) @ p["u"]

    params, batch = {"w": normal(0, 4, 6), "u": normal(1, 6, 3)}, (normal(2, 4, 4), labels(3, 4))
    objective = jk.Objective(model, jk.Categorical())
    report = agrees(jk.check_coverage(objective, params, batch, jax.random.key(5), fisher=fisher))
    assert set(report.factors) == set(report.products) == {"w", "u"}
    assert report.tried and not report.examples_meet
    assert any(remark.startswith("A of the factors") for remark in report.remarks)


class Crossed(Estimator):
    """A wrong Fisher type: it squares the sum of the cotangents of neighbors."""

    name = "crossed"

    def expectation(self, objective, outputs, batch, contribution):
        scores = objective.scores(outputs, batch.targets, batch.mask)
        return contribution(jax.tree.map(lambda x: x + jnp.roll(x, 1, 0), scores))


@pytest.mark.slow
def test_wrong_factors_are_seen():
    report = jk.check_coverage(*problem(mlp), fisher=Crossed())
    assert min(report.factors.values()) > 1e-3 and report.gradient < 1e-12


def graphs(params, batch):
    """Three graphs in one: nodes, edges, and counts of them that all have three rows."""
    of_node = jnp.repeat(jnp.arange(3), batch["n_node"], total_repeat_length=7)
    sent = jax.ops.segment_sum(batch["nodes"][batch["senders"]], batch["receivers"], 7)
    hidden = jnp.tanh((batch["nodes"] + sent) @ params["w"])
    return jax.ops.segment_sum(hidden, of_node, 3) @ params["u"]


@pytest.mark.slow
def test_rows_of_a_batched_graph_are_not_exchanged():
    batch = {
        "nodes": normal(0, 7, 4),
        "senders": jnp.array([0, 1, 4]),  # as many edges as graphs, by chance
        "receivers": jnp.array([1, 0, 3]),
        "n_node": jnp.array([2, 3, 2]),
    }
    params = {"w": normal(1, 4, 5), "u": normal(2, 5, 3)}
    objective = jk.Objective(graphs, jk.Categorical())
    report = jk.check_coverage(objective, params, (batch, labels(3, 3)))
    assert not report.examples_meet and not report.tried and report.gradient < 1e-10
    assert max(report.factors.values(), default=0) < 1e-10
    for name in ("senders", "receivers", "n_node"):
        assert any(f"inputs['{name}']" in remark for remark in report.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_computed_weights_and_batch_statistics_are_no_alarm(norm):
    """Weight norm and, in front of the normalization, a bias whose gradient is rounding."""

    def model(p, x):
        x = x @ (p["v"] / jnp.sqrt((p["v"] ** 2).sum(0))) + p["b"]
        x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5) if norm else x
        return jnp.tanh(x * p["s"]) @ p["u"]

    params = {"v": normal(0, 4, 6), "b": normal(4, 6), "s": normal(5, 6), "u": normal(1, 6, 3)}
    objective = jk.Objective(model, jk.Categorical())
    report = jk.check_coverage(objective, params, (normal(2, 5, 4), labels(3, 5)))
    assert report.gradient < 1e-10 and report.examples_meet == norm
    if norm:
        assert any("no sum over examples" in remark for remark in report.remarks)
    else:
        assert "v@effective" in agrees(report).factors
    assert not any("no layer" in x or "not a number" in x for x in str(report).splitlines())


@pytest.mark.slow
def test_remarks_are_not_cut():
    report = jk.check_coverage(*problem(lambda p, x: mlp(p, x) - mlp(p, x).mean(0)))
    (remark,) = [x for x in report.remarks if "the Fisher's diagonal" in x]
    assert remark.endswith("NNX: model.eval())") and len(remark) > 300


@pytest.mark.exhaustive
def test_auxiliary_outputs_and_marks_inside_a_custom_rule_of_a_scalar_loss():
    params, x = problem_of_energy()
    energy = lambda p, x: (energy_of("rule")(p, x), x.sum())
    report = jk.check_coverage(energy, params, x, has_aux=True)
    assert report.gradient < 1e-12
    assert any('fisher="mc"' in remark for remark in report.remarks)
    plain = jk.check_coverage(energy, params, x, has_aux=True, fisher="exact")
    assert plain.gradient < 1e-12 and len(plain.remarks) == 1
