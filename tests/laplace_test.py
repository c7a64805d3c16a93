"""Laplace posteriors against dense ones, and against Bayesian linear regression, in float64."""

import dataclasses
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from jaxkfac.uses import _laplace_posterior
from jaxkfac.uses._linearised_variance import OutputDistribution, bridge
from jaxkfac.uses._posterior_precision import LogLikelihood
from tests._cases import CASES, case
from tests._checks import objective_of

pytestmark = [
    pytest.mark.usefixtures("x64"),
    # Where any curvature does, because the expectation is made of the same.
    pytest.mark.filterwarnings("ignore:the bases are of fisher='empirical'"),
]

INF = float("inf")
TOLERANCE = 1e-10
RNG = np.random.default_rng(0)


def normal(*shape):
    with jax.enable_x64(True):
        return jnp.asarray(RNG.normal(size=shape))


def bases_of(objective, params, batch, *, corrected=False, **options):
    options = {"fisher": "exact"} | options
    bases = jk.eigendecompose(jk.value_grad_and_factors(objective, **options)(params, batch)[2])
    return jk.correct_eigenvalues(objective, bases)(params, batch) if corrected else bases


def assert_close(found, expected, tolerance=TOLERANCE):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def perceptron(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["u"]


def elements(p, x):
    """A scale and a lone bias beside dense layers."""
    h = jnp.tanh(x @ p["w"])
    return (h * p["scale"] + p["shift"]) @ p["u"]


def scanned(p, x):
    """A stack of three layers with biases, then a head."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] + w[1]), None), x, (p["k"], p["c"]))
    return x @ p["u"]


PARAMS = {"w": normal(3, 4), "b": normal(4), "u": normal(4, 3)}
BATCH = (normal(6, 3), jnp.asarray([0, 1, 1, 0, 2, 0]))
OBJECTIVE = jk.Objective(perceptron, jk.Categorical())
WITHOUT_BIAS = {key: PARAMS[key] for key in "wu"}
NETS = {
    "perceptron": (perceptron, PARAMS),
    "elements": (elements, WITHOUT_BIAS | {"scale": normal(4), "shift": normal(4)}),
    "scanned": (scanned, {"k": normal(3, 3, 3), "c": normal(3, 3), "u": normal(3, 3)}),
}


def part(leaf, layer, matrix):
    return np.asarray(matrix.read(jnp.asarray(leaf))).reshape(
        math.prod(layer.stack), -1, layer.out_features
    )


def dense_curvature(bases, params):
    """F over ``ravel_pytree(params)``, block by block, from the eigendecompositions."""
    index = {
        path: np.asarray(x)
        for path, x in ravel_pytree(params)[1](jnp.arange(ravel_pytree(params)[0].size)).items()
    }
    dense = np.zeros([ravel_pytree(params)[0].size] * 2)

    def write(rows, block):
        dense[np.ix_(rows.ravel(), rows.ravel())] = block

    for layer in bases.layers:
        rows, basis = part(index[layer.weight.path], layer, layer.weight), bases[layer.name]
        if layer.is_diagonal:
            write(rows, np.diag(np.asarray(basis.raw_diagonal).ravel()))
            continue
        for k, own in zip(np.ndindex(layer.stack), rows, strict=True):
            one = jax.tree.map(lambda x, k=k: np.asarray(x[k]), basis)
            values = np.outer(np.maximum(one.a_raw_values, 0), np.maximum(one.g_raw_values, 0))
            values = values if one.raw_values is None else one.raw_values
            vectors = np.kron(one.a_vectors, one.g_vectors)
            if layer.bias is not None:
                every = part(index[layer.bias.path], layer, layer.bias)
                bias = every.reshape(*layer.stack, 1, -1)[k]
                if bases.bias == "joint":
                    own = np.concatenate([own, bias])
                else:
                    raw = one.g_raw_values if one.bias_raw_values is None else one.bias_raw_values
                    write(bias, one.g_vectors @ np.diag(raw) @ one.g_vectors.T)
            write(own, vectors @ np.diag(values.ravel()) @ vectors.T)
    return dense


def dense_prior(posterior, params):
    flat = {path: np.zeros(x.shape) for path, x in params.items()}
    values = np.broadcast_to(posterior.prior_precision, len(posterior.layers))
    for layer in posterior.bases.layers:
        for matrix in (layer.weight, layer.bias):
            if matrix is not None:
                flat[matrix.path][...] = values[posterior.layers.index(layer.name)]
    return np.asarray(ravel_pytree(flat)[0])


def dense(posterior, params, number):
    """Precision, and the Jacobian's function."""
    factor = number / float(posterior.noise) ** 2
    prior = dense_prior(posterior, params)
    return factor * dense_curvature(posterior.bases, params) + np.diag(prior), prior


def jacobians(model, params, inputs):
    flat, unravel = ravel_pytree(params)
    return np.asarray(jax.jacobian(lambda v: model(unravel(v), inputs))(flat))


def log_likelihood(objective, params, batch, noise=1.0):
    loss = float(objective(params, batch)) * batch[1].shape[0]
    if not isinstance(objective.likelihood, jk.Gaussian):
        return -loss
    return -loss / noise**2 - batch[1].size * np.log(noise * np.sqrt(2 * np.pi))


# ------------------------------------------------------------ the dense posterior


@pytest.mark.parametrize("corrected", [False, True], ids=["factors", "measured"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.sampled(1)
def test_evidence_and_variance_are_those_of_the_dense_posterior(net, bias, corrected):
    model, params = NETS[net]
    objective = jk.Objective(model, jk.Categorical())
    bases = bases_of(objective, params, BATCH, bias=bias, corrected=corrected)
    prior = 0.5 + np.arange(len(bases))
    posterior = jk.laplace(objective, params, bases, num_examples=6, prior_precision=prior)
    precision, prior = dense(posterior, params, 6)
    flat = np.asarray(ravel_pytree(params)[0])
    ratio = np.linalg.slogdet(precision)[1] - np.log(prior).sum()
    expected = log_likelihood(objective, params, BATCH) - (ratio + flat @ (prior * flat)) / 2
    assert_close(posterior.log_marginal_likelihood(BATCH), expected)
    each = jacobians(model, params, BATCH[0])
    expected = np.einsum("ncp,pq,ndq->ncd", each, np.linalg.inv(precision), each)
    assert_close(posterior.variance(BATCH[0]), expected)


@pytest.mark.slow
def test_a_log_likelihood_of_many_batches_keeps_its_digits(monkeypatch):
    """In float32, where a plain sum does not."""
    one = LogLikelihood(*(jnp.float32(x) for x in (0.7, 6, 0)))
    monkeypatch.setattr(_laplace_posterior, "summed_terms", lambda *_: one)
    bare: Any = types.SimpleNamespace(
        checked=lambda batch: batch, num_examples=12_000, terms_per_example=None
    )
    batches = (BATCH for _ in range(2000))
    found = _laplace_posterior.LaplacePosterior.log_likelihood(bare, batches)
    plain = np.float32(0)
    for _ in range(2000):
        plain += np.asarray(one.loss)
    expected = 2000 * float(one.loss)
    assert found.loss.dtype == jnp.float32 and found.terms == 12_000
    assert abs(float(found.loss) / expected - 1) < 2e-7 < 2e-6 < abs(plain / expected - 1)


@pytest.mark.exhaustive
def test_variance_is_the_same_whatever_fits_at_once():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    posterior = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6, prior_precision=0.3)
    whole = posterior.variance(BATCH[0])
    rows, parameters = 8 * (4 + 3), 3 * 8 * sum(x.size for x in PARAMS.values())
    for budget in (3 * rows * 2, 3 * rows, parameters):
        assert_close(posterior.variance(BATCH[0], max_bytes=budget), whole)
    with pytest.raises(jk.MemoryBudgetError, match="gradients of one output"):
        posterior.variance(BATCH[0], max_bytes=3 * rows - 1)


@pytest.mark.slow
def test_variance_holds_no_jacobian_of_all_examples():
    params = {"w": normal(32, 32), "u": normal(32, 8)}
    inputs, targets = normal(128, 32), jnp.zeros(128, int)
    objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["w"]) @ p["u"], jk.Categorical())
    bases = bases_of(objective, params, (inputs, targets))
    posterior = jk.laplace(objective, params, bases, num_examples=128)
    one = 8 * sum(x.size for x in params.values())  # bytes of an example's Jacobian by an output

    def variance(inputs):
        return posterior.variance(inputs, max_bytes=8 * one)

    taken = jax.jit(variance).lower(inputs).compile().memory_analysis().temp_size_in_bytes
    assert taken < 128 * 8 * one / 8


def check_variance(objective, params, batch):
    """Against whole Jacobians and ``natural_gradient``."""
    bases = bases_of(objective, params, batch, fisher="empirical")
    number = batch[1].size / len(batch[1])
    posterior = jk.laplace(
        objective, params, bases, num_examples=len(batch[1]), terms_per_example=number
    )
    outputs = jax.eval_shape(objective.apply_fn, params, batch[0]).shape
    each = jax.jacobian(objective.apply_fn)(params, batch[0])
    rows = jax.tree.map(lambda x: x.reshape(math.prod(outputs), *x.shape[len(outputs) :]), each)
    # Without a cut, the bases read the eigenvalues as the posterior does.
    exact = dataclasses.replace(bases, max_condition=INF)
    solve = jax.vmap(lambda v: jk.natural_gradient(v, exact, damping=1 / batch[1].size))
    solved = jax.tree.map(lambda x: x / batch[1].size, jax.jit(solve)(rows))
    flat = [np.asarray(jax.vmap(lambda v: ravel_pytree(v)[0])(x)) for x in (rows, solved)]
    flat = [x.reshape(-1, outputs[-1], x.shape[-1]) for x in flat]
    expected = np.einsum("tcp,tdp->tcd", *flat).reshape(*outputs, outputs[-1])
    assert_close(posterior.variance(batch[0]), expected, 1e-9)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_variance_of_each_kind_of_layer_is_that_of_whole_jacobians(name):
    model, _, params, batch = case(name)
    check_variance(objective_of(model), params, batch)


def convolutions(p, x):
    """One with several positions, and one that leaves a single one."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, p["k"], (2, 1), "SAME", dimension_numbers=numbers)
    x = jnp.tanh(x + p["b"])
    return jax.lax.conv_general_dilated(x, p["u"], (1, 1), "VALID", dimension_numbers=numbers)


def tied(p, ids):
    """An embedding whose transpose is the head, and one token that is read by itself."""
    x = p["table"][ids]
    return jnp.tanh(x + x.mean(1, keepdims=True) @ p["w"]) @ p["table"].T + p["own"][ids[:, :1]]


IDS = jnp.asarray(RNG.integers(0, 5, (3, 4)))
PROGRAMS = {
    "convolutions": (
        lambda p, x: convolutions(p, x)[:, 0, 0],
        {"k": normal(3, 2, 2, 3), "b": normal(3), "u": normal(3, 4, 3, 2)},
        (normal(3, 5, 4, 2), jnp.asarray([0, 1, 1])),
    ),
    "tied": (
        tied,
        {"table": normal(5, 3), "w": normal(3, 3), "own": normal(5, 5)},
        (IDS, jnp.roll(IDS, -1, 1)),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_variance_of_programs_that_are_no_matrix_product_of_rows(name):
    model, params, batch = PROGRAMS[name]
    check_variance(jk.Objective(model, jk.Categorical()), params, batch)


@pytest.mark.slow
def test_the_variance_of_one_reading_of_a_tied_table_is_refused():
    model, params, batch = PROGRAMS["tied"]
    objective = jk.Objective(model, jk.Categorical())
    bases = bases_of(objective, params, batch, fisher="empirical")
    options = {"num_examples": 3, "terms_per_example": 4}
    posterior = jk.laplace(objective, params, bases, layers="table@embedding", **options)
    with pytest.raises(ValueError, match="'table' reads the same elements.*layers='table'"):
        posterior.variance(batch[0])


@pytest.mark.parametrize(
    "times, error", [(0, ValueError), (np.nan, jk.NonFiniteFactorError)], ids=["zero", "NaN"]
)
def test_bases_without_curvature_are_refused(times, error):
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    g = {name: x._replace(values=times * x.values) for name, x in bases.g.items()}
    with pytest.raises(error, match="every eigenvalue is zero|eigenvalues of layer .* not finite"):
        jk.laplace(OBJECTIVE, PARAMS, dataclasses.replace(bases, g=g), num_examples=6)


@pytest.mark.exhaustive
def test_samples_have_the_covariance_of_the_dense_posterior():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    posterior = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6, prior_precision=0.7)
    number = 20000
    samples = posterior.sample(jax.random.key(0), number)
    flat = np.asarray(jax.vmap(lambda one: ravel_pytree(one)[0])(samples))
    whitening = np.linalg.cholesky(dense(posterior, PARAMS, 6)[0])
    white = (flat - np.asarray(ravel_pytree(PARAMS)[0])) @ whitening
    np.testing.assert_allclose(white.mean(0), 0, atol=5 / np.sqrt(number))
    np.testing.assert_allclose(np.cov(white.T), np.eye(flat.shape[1]), atol=8 / np.sqrt(number))


# ------------------------------------------------------------ linear regression

FEATURES, ANSWERS = normal(9, 4), normal(9, 1)
LINEAR = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
NOISE, PRIOR = 0.6, 1.7


def regression(precision, noise, features=FEATURES, answers=ANSWERS):
    """The textbook's: log p(y), the posterior's mean and covariance."""
    features, answers = np.asarray(features), np.asarray(answers)[:, 0]
    inverse = np.linalg.inv(features.T @ features / noise**2 + precision * np.eye(4))
    mean = inverse @ features.T @ answers / noise**2
    joint = noise**2 * np.eye(len(answers)) + features @ features.T / precision
    fit = answers @ np.linalg.solve(joint, answers)
    value = -(np.linalg.slogdet(joint)[1] + fit + len(answers) * np.log(2 * np.pi)) / 2
    return value, mean, inverse


def linear_posterior(precision=PRIOR, noise=NOISE):
    params = {"w": jnp.asarray(regression(precision, noise)[1])[:, None]}
    bases = bases_of(LINEAR, params, (FEATURES, ANSWERS))
    options = {"num_examples": 9, "prior_precision": precision, "noise": noise}
    return jk.laplace(LINEAR, params, bases, **options)


@pytest.mark.slow
def test_on_linear_regression_evidence_and_predictive_are_the_textbooks():
    posterior, (value, mean, covariance) = linear_posterior(), regression(PRIOR, NOISE)
    assert_close(posterior.log_marginal_likelihood((FEATURES, ANSWERS)), value)
    new = np.asarray(normal(2, 4))
    found = posterior.predict(jnp.asarray(new))
    assert_close(found.mean[:, 0], new @ mean)
    expected = np.einsum("np,pq,nq->n", new, covariance, new)
    assert_close(found.covariance[:, 0, 0], expected + NOISE**2)
    assert_close(posterior.variance(jnp.asarray(new))[:, 0, 0], expected)


def test_the_gradient_of_the_evidence_is_that_of_finite_differences():
    posterior, batch, step = linear_posterior(), (FEATURES, ANSWERS), 1e-5

    @jax.jit
    def value(posterior, batch, prior, noise):
        return posterior.log_marginal_likelihood(batch, prior_precision=prior, noise=noise)

    args = posterior, batch, jnp.asarray(PRIOR), jnp.asarray(NOISE)
    found = jax.grad(value, (2, 3))(*args)
    for k, gradient in zip((2, 3), found, strict=True):
        moved = [[x + s * step if i == k else x for i, x in enumerate(args)] for s in (1, -1)]
        difference = (value(*moved[0]) - value(*moved[1])) / (2 * step)
        np.testing.assert_allclose(gradient, difference, rtol=1e-7)


def test_what_was_read_of_the_data_stands_for_it_and_a_stream_for_one_batch():
    posterior, batch = linear_posterior(), (FEATURES, ANSWERS)
    whole = posterior.log_marginal_likelihood(batch)
    stream = iter([(FEATURES[:5], ANSWERS[:5]), (FEATURES[5:], ANSWERS[5:])])
    read = posterior.log_likelihood(stream)
    assert_close(posterior.log_marginal_likelihood(read), whole)
    padded = jnp.pad(FEATURES, ((0, 2), (0, 0))), jnp.pad(ANSWERS, ((0, 2), (0, 0)))
    mask = jnp.arange(11) < 9
    assert_close(posterior.log_marginal_likelihood((*padded, mask)), whole)


# ------------------------------------------------------------ tuning


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [False, True])
def test_tuning_finds_where_the_evidence_has_no_slope(by_layer):
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    posterior = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6).tune_prior(by_layer=by_layer)
    assert posterior.prior_precision.shape == ((2,) if by_layer else ())

    def value(prior):
        return posterior.log_marginal_likelihood(BATCH, prior_precision=prior)

    best = posterior.prior_precision
    np.testing.assert_allclose(jax.grad(value)(best), 0, atol=1e-9)
    assert value(best) > max(value(1.1 * best), value(best / 1.1), value(1e3 * best))


@pytest.mark.exhaustive
def test_tuning_fits_the_noise_of_a_gaussian_too():
    batch = FEATURES, FEATURES @ normal(4, 2) + 0.3 * normal(9, 2)
    params = {"w": jnp.linalg.lstsq(*batch)[0], "c": normal(2) / 10}
    objective = jk.Objective(lambda p, x: x @ p["w"] + p["c"], jk.Gaussian())
    bases = bases_of(objective, params, batch)
    posterior = jk.laplace(objective, params, bases, num_examples=9)
    read = posterior.log_likelihood(batch)
    for by_layer in (False, True):
        best = posterior.tune_prior(read, by_layer=by_layer)

        def value(prior, noise):
            return posterior.log_marginal_likelihood(read, prior_precision=prior, noise=noise)

        slopes = jax.grad(value, (0, 1))(best.prior_precision, best.noise)
        for slope in slopes:
            np.testing.assert_allclose(slope, 0, atol=1e-8)
    assert posterior.tune_prior().noise == 1


@pytest.mark.exhaustive
def test_tuning_on_validation_takes_the_best_of_the_grid():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    posterior = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6)
    grid = [0.01, 0.3, 3.0, 100.0]

    def loss(prior):
        found = posterior.replace(prior, 1.0).predict(BATCH[0])
        return -np.log(np.take_along_axis(np.asarray(found), BATCH[1][:, None], 1)).sum()

    one = posterior.tune_prior(validation=BATCH, grid=grid)
    assert one.prior_precision == min(grid, key=loss)
    stream = iter([(BATCH[0][:4], BATCH[1][:4]), (BATCH[0][4:], BATCH[1][4:])])
    own = posterior.tune_prior(validation=stream, grid=grid, by_layer=True)
    pairs = [np.asarray([x, y]) for x in grid for y in grid]
    assert loss(own.prior_precision) == pytest.approx(min(map(loss, pairs)))


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [False, True])
def test_validation_without_a_loss_tunes_nothing(by_layer):
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    posterior = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6)
    broken = BATCH[0].at[2].set(jnp.nan), BATCH[1]
    with pytest.raises(ValueError, match="validation: .* is NaN"):
        posterior.tune_prior(validation=broken, grid=[0.1, 1.0], by_layer=by_layer)


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [False, True])
def test_validation_with_an_infinite_loss_tunes_nothing(by_layer):
    """A class whose logit is -inf has probability 0 whatever the prior is."""

    def masked(p, x):
        return perceptron(p, x) + jnp.asarray([0.0, 0.0, -jnp.inf])

    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    objective = jk.Objective(masked, jk.Categorical())
    posterior = jk.laplace(objective, PARAMS, bases, num_examples=6)
    with pytest.raises(ValueError, match="validation: the least .* of the grid is inf"):
        posterior.tune_prior(validation=BATCH, grid=[0.1, 1.0], by_layer=by_layer)


# ------------------------------------------------------------ predictives


@pytest.mark.slow
def test_class_probabilities_are_those_of_the_formulas():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    posterior = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6)
    mean, covariance = perceptron(PARAMS, BATCH[0]), posterior.variance(BATCH[0])
    variances = jnp.diagonal(covariance, axis1=1, axis2=2)
    found = posterior.predict(BATCH[0])
    expected = jax.nn.softmax(mean / jnp.sqrt(1 + jnp.pi / 8 * variances))
    assert_close(found, expected)
    assert_close(posterior.predict(BATCH[0], "probit"), expected)
    # Conditioned on a sum of zero, by the textbook's formula.
    ones = np.ones(3)
    for n, one in enumerate(posterior.predict(BATCH[0], "bridge")):
        rows, total = covariance[n] @ ones, ones @ covariance[n] @ ones
        mu = mean[n] - rows * mean[n].sum() / total
        v = np.diag(covariance[n] - np.outer(rows, rows) / total)
        alpha = (1 - 2 / 3 + np.exp(mu) * np.exp(-mu).sum() / 9) / v
        assert_close(one, alpha / alpha.sum())
    drawn = posterior.predict(BATCH[0], "mc", key=jax.random.key(1), num_samples=4000)
    np.testing.assert_allclose(drawn.sum(-1), 1)
    root = np.linalg.cholesky(covariance)
    noise = jnp.asarray(RNG.normal(size=(4000, 6, 3)))
    expected = jax.nn.softmax(mean + jnp.einsum("nij,knj->kni", root, noise)).mean(0)
    np.testing.assert_allclose(drawn, expected, atol=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("classes", [2, 3])
def test_the_bridge_of_confident_logits_is_what_it_is_of_many_bits(classes):
    mean = normal(4, classes) + 90 * jnp.eye(4, classes)
    root = normal(4, classes, classes)
    outputs = OutputDistribution(mean, root @ jnp.swapaxes(root, 1, 2))
    few = OutputDistribution(*(x.astype(jnp.float32) for x in outputs))
    assert_close(bridge(few), bridge(outputs), 1e-3)
    ones, alpha = np.ones(classes), []
    for mu, covariance in zip(*map(np.asarray, outputs), strict=True):
        rows, total = covariance @ ones, ones @ covariance @ ones
        mu = mu - rows * mu.sum() / total
        v = np.diag(covariance - np.outer(rows, rows) / total)
        alpha.append((1 - 2 / classes + np.exp(mu) * np.exp(-mu).sum() / classes**2) / v)
    expected = np.stack(alpha) / np.sum(alpha, -1, keepdims=True)
    assert_close(bridge(outputs), expected)


@pytest.mark.slow
def test_one_logit_for_each_example_and_several():
    for params in ({"w": normal(3), "b": normal()}, {"w": normal(3, 2), "b": normal(2)}):
        objective = jk.Objective(lambda p, x: x @ p["w"] + p["b"], jk.Bernoulli())
        targets = jnp.asarray(RNG.integers(0, 2, (6, *params["b"].shape)), jnp.float64)
        bases = bases_of(objective, params, (BATCH[0], targets))
        posterior = jk.laplace(objective, params, bases, num_examples=6)
        variances = jnp.diagonal(posterior.variance(BATCH[0]), axis1=1, axis2=2)
        logits = objective.apply_fn(params, BATCH[0])
        moderated = logits / jnp.sqrt(1 + jnp.pi / 8 * variances.reshape(logits.shape))
        assert_close(posterior.predict(BATCH[0]), jax.nn.sigmoid(moderated))
        assert posterior.predict(BATCH[0], "mc", key=jax.random.key(0)).shape == logits.shape
        tuned = posterior.tune_prior(validation=(BATCH[0], targets), grid=[0.1, 1.0])
        assert float(tuned.prior_precision) in (0.1, 1.0)


# ------------------------------------------------------------ some layers, few bits


@pytest.mark.slow
def test_parameters_outside_the_layers_are_fixed_and_named():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    last = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6, layers="u")
    assert (last.layers, last.fixed) == (("u",), ("b", "w"))
    only = bases_of(OBJECTIVE, PARAMS, BATCH, layers="u")
    other = jk.laplace(OBJECTIVE, PARAMS, only, num_examples=6)
    assert other.fixed == last.fixed
    assert_close(other.variance(BATCH[0]), last.variance(BATCH[0]))
    assert_close(other.log_marginal_likelihood(BATCH), last.log_marginal_likelihood(BATCH))
    samples = last.sample(jax.random.key(0), 3)
    np.testing.assert_array_equal(samples["w"], np.broadcast_to(PARAMS["w"], (3, 3, 4)))
    assert np.ptp(samples["u"], 0).min() > 0


@pytest.mark.exhaustive
def test_bayes_over_adapters_leaves_the_model_as_it_is():
    config = jk.lslora.Config(rank=2, alpha=1.0, target="w|u")
    adapters = jk.lslora.init(perceptron, config, PARAMS, BATCH[0], key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    adapted = jk.lslora.attach(perceptron, config)
    objective = jk.Objective(lambda a, x: adapted(PARAMS, a, x), jk.Categorical())
    bases = bases_of(objective, adapters, BATCH, layers=".*/(a|b)")
    posterior = jk.laplace(objective, adapters, bases, num_examples=6).tune_prior()
    assert len(posterior.layers) == 4 and posterior.fixed
    variance = posterior.variance(BATCH[0])
    assert variance.shape == (6, 3, 3) and (jnp.linalg.eigvalsh(variance) > 0).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_few_bits_are_near_many(dtype):
    def cast(tree):
        return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float64 else x, tree)

    posteriors = [
        jk.laplace(OBJECTIVE, p, bases_of(OBJECTIVE, p, batch), num_examples=6)
        for p, batch in ((PARAMS, BATCH), (cast(PARAMS), cast(BATCH)))
    ]
    many, few = posteriors
    tolerance = 1e-4 if dtype == jnp.float32 else 0.1
    found = few.variance(cast(BATCH)[0])
    assert found.dtype == jnp.float32
    assert_close(found, many.variance(BATCH[0]), tolerance)
    assert_close(few.predict(cast(BATCH)[0]), many.predict(BATCH[0]), tolerance)
    expected = many.log_marginal_likelihood(BATCH)
    assert_close(few.log_marginal_likelihood(cast(BATCH)), expected, tolerance)
    assert few.sample(jax.random.key(0), 2)["w"].dtype == dtype


@pytest.mark.slow
def test_a_posterior_goes_into_compiled_functions_and_comes_out_of_them():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)

    @jax.jit
    def made(params, bases):
        return jk.laplace(OBJECTIVE, params, bases, num_examples=6).tune_prior()

    posterior = made(PARAMS, bases)
    plain = jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6).tune_prior()
    assert_close(posterior.prior_precision, plain.prior_precision)
    found = jax.jit(lambda posterior, x: posterior.predict(x))(posterior, BATCH[0])
    assert_close(found, plain.predict(BATCH[0]))


# ------------------------------------------------------------ what is refused


def coupled(p, x):
    h = x @ p["w"] + p["b"]
    return jnp.tanh(h - h.mean(0)) @ p["u"]


def refused(match, error=ValueError, *, use=None, model=perceptron, likelihood=None, **options):
    bases = bases_of(OBJECTIVE, PARAMS, BATCH)
    if isinstance(likelihood, jk.Bernoulli | jk.Gaussian):
        batch = BATCH[0], jnp.zeros((6, 3))
        bases = bases_of(jk.Objective(perceptron, likelihood), PARAMS, batch)
    objective = jk.Objective(model, likelihood or jk.Categorical())
    with pytest.raises(error, match=match):
        use(jk.laplace(objective, PARAMS, bases, **{"num_examples": 6, **options}))


@pytest.mark.slow
def test_bad_input_is_refused_by_name():
    x = BATCH[0]
    refused("num_examples=0: expected a positive number", num_examples=0)
    refused("prior_precision=-1.0: expected positive", prior_precision=-1.0)
    refused("one for each of 'w', 'u'", prior_precision=jnp.ones(3))
    refused("noise=2.0: only a Gaussian", noise=2.0)
    refused("noise=2.0: only a Gaussian", use=lambda p: p.replace(1.0, 2.0))
    for change in (lambda f: f, jax.jit):
        refused(
            "noise=.*: only a Gaussian",
            use=lambda p, change=change: change(
                lambda noise: p.log_marginal_likelihood(BATCH, noise=noise)
            )(2.0),
        )
    refused("matches no layer of the bases", jk.UnknownLayerError, layers="v")
    refused("needs one likelihood", likelihood={"a": jk.Categorical(), "b": jk.Gaussian()})
    refused(
        "'w', 'u': .* evaluation mode", jk.CoupledExamplesError, model=coupled,
        use=lambda posterior: posterior.variance(x),
    )  # fmt: skip
    refused(
        "'u' that the program lacks", jk.UnknownLayerError, model=lambda p, x: x @ p["w"] + p["b"],
        use=lambda posterior: posterior.variance(x),
    )  # fmt: skip
    refused(
        "method='bridge': Bernoulli has 'probit', 'mc'", likelihood=jk.Bernoulli(),
        use=lambda p: p.predict(x, "bridge"),
    )  # fmt: skip
    refused(
        "the predictive of a Gaussian is exact",
        likelihood=jk.Gaussian(),
        use=lambda p: p.predict(x, "probit"),
    )
    refused("pass key=", use=lambda p: p.predict(x, "mc"))
    refused("the iterable is empty", use=lambda p: p.log_likelihood(iter([])))
    refused("6 loss terms, .* is 7", num_examples=7, use=lambda p: p.log_likelihood(BATCH))
    refused("give train, .* or validation=", use=lambda p: p.tune_prior(BATCH, validation=BATCH))
    refused("grid= is for validation=", use=lambda p: p.tune_prior(BATCH, grid=[1.0]))
    refused("grid=.*: expected positive", use=lambda p: p.tune_prior(validation=BATCH, grid=[-1.0]))


@pytest.mark.slow
def test_tokens_need_the_number_of_terms():
    objective = jk.Objective(lambda p, x: x @ p["w"], jk.Categorical())
    params, batch = {"w": normal(3, 2)}, (normal(4, 5, 3), jnp.zeros((4, 5), int))
    bases = bases_of(objective, params, batch)
    with pytest.raises(ValueError, match="several loss terms .* pass terms_per_example="):
        jk.laplace(objective, params, bases, num_examples=4).variance(batch[0])


def test_parameters_that_are_zero_have_no_best_prior():
    zeros = PARAMS | {"u": jnp.zeros((4, 3))}
    bases = bases_of(OBJECTIVE, zeros, BATCH)
    posterior = jk.laplace(OBJECTIVE, zeros, bases, num_examples=6)
    with pytest.raises(ValueError, match="no maximum in the prior precision of 'w', 'u':"):
        posterior.tune_prior(by_layer=True)


@pytest.mark.slow
def test_a_layer_of_zeros_keeps_its_prior_while_the_others_are_tuned():
    params = WITHOUT_BIAS | {"scale": normal(4), "shift": jnp.zeros(4)}
    objective, batch = jk.Objective(elements, jk.Gaussian()), (BATCH[0], normal(6, 3))
    bases = bases_of(objective, params, batch)
    posterior = jk.laplace(objective, params, bases, num_examples=6, prior_precision=0.4)
    with pytest.warns(UserWarning, match="of 'shift': .* it stays as it is"):
        tuned = posterior.tune_prior(batch, by_layer=True)
    kept = dict(zip(tuned.layers, tuned.prior_precision, strict=True))
    assert kept["shift"] == 0.4 and tuned.noise != 1

    def value(prior, noise):
        return tuned.log_marginal_likelihood(batch, prior_precision=prior, noise=noise)

    slope, of_noise = jax.grad(value, (0, 1))(tuned.prior_precision, tuned.noise)
    others = np.asarray([name != "shift" for name in tuned.layers])
    np.testing.assert_allclose(np.append(slope[others], of_noise), 0, atol=1e-7)


def test_factors_without_gradients_are_no_curvature_and_it_is_said():
    bases = bases_of(OBJECTIVE, PARAMS, BATCH, fisher="forward")
    with pytest.warns(UserWarning, match="hold no curvature of the loss"):
        jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6)
