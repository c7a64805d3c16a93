"""Weights of examples, of classes and of drawn rows, and what the library's uses make of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.factors import estimator_of

pytestmark = pytest.mark.usefixtures("x64")
N, CLASSES = 6, 3
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(4, 5)), "v": RNG.normal(size=(5, CLASSES))}
X, Y = RNG.normal(size=(N, 4)), RNG.integers(0, CLASSES, N)
WEIGHTS = np.array([1.0, 2.0, 1.0, 0.0, 3.0, 1.0])
TWICE = np.repeat(np.arange(N), WEIGHTS.astype(int))  # each example as often as its weight says
WEIGHED, REPEATED = (X, Y, WEIGHTS), (X[TWICE], Y[TWICE])


def model(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


OBJECTIVE = jk.Objective(model, jk.Categorical())


class Own(type(estimator_of("empirical", samples=1, chunk=1))):
    """The empirical Fisher, as a class that the library does not know."""

    name = "own"


def close(left, right, rtol=1e-11):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-13), left, right)


def factors_of(batch, objective=OBJECTIVE, **options):
    return jax.jit(jk.value_grad_and_factors(objective, **options))(PARAMS, batch).factors


def bases_of(batch=REPEATED):
    return jk.eigendecompose(factors_of(batch, fisher="exact"), max_condition=1e12)


@pytest.mark.exhaustive
def test_operators_of_weighted_examples_are_those_of_repeated_ones():
    vector = jax.tree.map(jnp.cos, PARAMS)
    for make in (jk.operators.ggn, jk.operators.hessian, jk.operators.fisher):
        one, other = (make(OBJECTIVE, PARAMS, batch) for batch in (WEIGHED, REPEATED))
        close(one @ vector, other @ vector)
    for fisher in ("empirical", Own()):  # an estimator of one's own runs on each example
        one, other = (
            jk.operators.fisher(OBJECTIVE, PARAMS, batch, fisher=fisher, chunk=chunk)
            for batch, chunk in ((WEIGHED, 3), (REPEATED, None))
        )
        close(one @ vector, other @ vector)
        assert one.loss_terms == other.loss_terms == len(TWICE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("per", ["example", "token"])
def test_measured_eigenvalues_of_weighted_examples_are_those_of_repeated_ones(per):
    bases = bases_of()
    for fisher in ("empirical", "exact"):
        measure = jax.jit(jk.correct_eigenvalues(OBJECTIVE, bases, fisher=fisher, per=per))
        close(*(measure(PARAMS, batch).corrections for batch in (WEIGHED, REPEATED)))


@pytest.mark.slow
def test_influence_of_a_weighted_example_is_the_sum_over_its_copies():
    bases, queries = bases_of(), (X[:2], Y[:2])
    scores = jk.influence(OBJECTIVE, PARAMS, bases, queries, WEIGHED)
    plain = jk.influence(OBJECTIVE, PARAMS, bases, queries, (X, Y))
    close(scores, plain * WEIGHTS)
    best = jk.influence(OBJECTIVE, PARAMS, bases, queries, WEIGHED, top_k=N)
    assert (best.indices[:, :-1] != 3).all() and (best.indices[:, -1] == -1).all()
    own, plain = (jk.self_influence(OBJECTIVE, PARAMS, bases, b) for b in (WEIGHED, (X, Y)))
    close(own, plain * WEIGHTS**2)


@pytest.mark.exhaustive
def test_the_evidence_of_weighted_examples_is_that_of_repeated_ones():
    of = {"num_examples": N, "terms_per_example": len(TWICE) / N}
    by_weight = jk.laplace(OBJECTIVE, PARAMS, bases_of(WEIGHED), **of)
    repeated = jk.laplace(OBJECTIVE, PARAMS, bases_of(), num_examples=len(TWICE))
    close(*(p.log_likelihood(b) for p, b in ((by_weight, WEIGHED), (repeated, REPEATED))))
    with pytest.raises(ValueError, match="train has 8 loss terms"):
        jk.laplace(OBJECTIVE, PARAMS, bases_of(), num_examples=N).log_likelihood(WEIGHED)
    one, other = (
        by_weight.tune_prior(validation=WEIGHED),
        repeated.tune_prior(validation=REPEATED),
    )
    assert one.prior_precision == other.prior_precision


@pytest.mark.exhaustive
def test_the_noise_of_weighted_examples_is_that_of_repeated_ones():
    objective, y = jk.Objective(model, jk.Gaussian()), np.sin(X[:, :CLASSES])
    weighed, repeated = (X, y, WEIGHTS), (X[TWICE], y[TWICE])
    factors = factors_of(repeated, objective, fisher="exact")
    bases = jk.eigendecompose(factors, max_condition=1e12)
    posterior = jk.laplace(objective, PARAMS, bases, num_examples=len(TWICE))
    for how in ("train", "validation"):
        one, other = (posterior.tune_prior(**{how: b}) for b in (weighed, repeated))
        close((one.noise, one.prior_precision), (other.noise, other.prior_precision))
    counting = jk.Objective(model, jk.Gaussian(), normalize="count")
    data = jk.laplace(counting, PARAMS, bases, num_examples=5).log_likelihood(weighed)
    close(list(data), [*list(posterior.log_likelihood(repeated))[:1], 5, len(TWICE) * CLASSES])


@pytest.mark.slow
def test_micro_batches_of_unequal_weights_are_one_batch():
    tx = jk.kfac(0.1, like=jk.value_grad_and_factors(OBJECTIVE).factor_shapes(PARAMS, WEIGHED))
    stats, steps = jax.jit(jk.value_grad_and_factors(OBJECTIVE)), []
    for parts in ([slice(0, 2), slice(2, 6)], [slice(0, 6)]):
        params = jax.tree.map(jnp.asarray, PARAMS)
        many = jk.multi_steps(tx, len(parts))
        state = many.init(params)
        for part in parts:
            batch = tuple(a[part] for a in (X, Y, WEIGHTS * 0.3))
            _, grads, factors = stats(params, batch)
            updates, state = many.update(grads, state, params, factors=factors)
        steps.append(updates)
    close(*steps, rtol=1e-8)


@pytest.mark.slow
def test_a_host_average_of_weighted_batches_is_that_of_repeated_ones():
    found = []
    for batch in (WEIGHED, REPEATED):
        with jk.HostCurvature(refresh_every=1, lag=0) as service:
            for step in range(2):
                service.push(factors_of(batch), step)
            found.append(service.bases(1)["v"].g_values)
    close(*found)


@pytest.mark.slow
def test_a_negative_weight_skips_the_update_and_is_counted():
    stats = jk.value_grad_and_factors(OBJECTIVE)
    counting = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical(), normalize="count"))
    tx = jk.kfac(0.1, like=stats.factor_shapes(PARAMS, WEIGHED))
    params = jax.tree.map(jnp.asarray, PARAMS)

    @jax.jit
    def step(weights):
        value, grads, factors = stats(params, (X, Y, weights))
        after = []
        for one in (tx, jk.multi_steps(tx, 2)):
            updates, state = one.update(grads, one.init(params), params, factors=factors)
            after.append((state.skipped, updates))
        return value, after, counting(params, (X, Y, weights))

    for bad in (-1.0, np.nan, np.inf):
        weights = np.where(np.arange(N) == 2, bad, WEIGHTS)
        with pytest.raises(
            ValueError, match=r"mask has the weight (-1|nan|inf) at \[2\], expected"
        ):
            OBJECTIVE(PARAMS, (X, Y, weights))
        value, after, by_count = step(weights)
        assert np.isnan(value) and np.isnan(by_count.value)
        assert np.isnan(by_count.factors["v"].g).all()
        for skipped, updates in after:
            assert int(skipped) == 1 and not any(map(np.any, jax.tree.leaves(updates)))


def test_weights_of_all_zero_or_of_whole_numbers():
    with pytest.raises(ValueError, match="the mask masks every loss term"):
        OBJECTIVE(PARAMS, (X, Y, np.zeros(N)))
    value, grads, factors = jax.jit(jk.value_grad_and_factors(OBJECTIVE))(
        PARAMS, (X, Y, np.zeros(N))
    )
    assert value == 0 and factors.terms == 0 and not any(map(np.any, jax.tree.leaves(grads)))
    with pytest.raises(
        ValueError, match=r"dtype int64, expected bool \(write mask > 0\), or float"
    ):
        OBJECTIVE(PARAMS, (X, Y, np.ones(N, int)))
    with pytest.raises(ValueError, match=r"mask has shape \(6, 1\), expected one entry per loss"):
        OBJECTIVE(PARAMS, (X, Y, np.ones((N, 1))))


def test_weights_below_one_in_sum():
    """A count is no whole number: half a term is not one term."""
    value, grads, factors = jax.jit(jk.value_grad_and_factors(OBJECTIVE))(
        PARAMS, (X, Y, WEIGHTS * 1e-3)
    )
    whole = jax.jit(jk.value_grad_and_factors(OBJECTIVE))(PARAMS, WEIGHED)
    close((value, grads, factors["v"]), (whole.value, whole.grads, whole.factors["v"]))
    close(factors.terms, whole.factors.terms * 1e-3)


@pytest.mark.slow
def test_class_weights_of_a_torch_user():
    torch = pytest.importorskip("torch")
    weights, y = np.array([0.2, 1.5, 3.0]), np.array([0, 1, 2, 2, -100, 1])
    for given in (weights, torch.tensor(weights).numpy(), jnp.asarray(weights), list(weights)):
        likelihood = jk.Categorical(class_weights=given, ignore_index=-100)
    value = jk.Objective(model, likelihood)(PARAMS, (X, y))
    outputs = torch.tensor(np.array(model(PARAMS, X)))
    expected = torch.nn.functional.cross_entropy(
        outputs, torch.tensor(y), weight=torch.tensor(weights)
    )
    close(value, expected.numpy())


def test_class_weights_count_once_where_a_checked_batch_is_checked_again():
    objective = jk.Objective(model, jk.Categorical(class_weights=[0.5, 2.0, 3.0]))
    once = objective.batch(WEIGHED)
    close(once.mask, WEIGHTS * np.array([0.5, 2.0, 3.0])[Y])
    by_example = jax.jit(lambda batch: jax.tree.map(lambda x: x[:2], batch))
    close(objective.batch(by_example(objective.batch(once))).mask, once.mask[:2])


@pytest.mark.exhaustive
def test_class_weights_count_once_in_every_use():
    """A use may check a batch that another one has checked; the weights are not squared."""
    classes = np.array([0.2, 1.5, 3.0])
    by_class, bases = jk.Objective(model, jk.Categorical(class_weights=classes)), bases_of()
    vector, weighed = jax.tree.map(jnp.cos, PARAMS), (X, Y, classes[Y] * WEIGHTS)
    found = []
    for objective, batch in ((by_class, WEIGHED), (OBJECTIVE, weighed)):
        numbers = [
            make(objective, PARAMS, batch) @ vector
            for make in (jk.operators.fisher, jk.operators.ggn, jk.operators.hessian)
        ]
        stats = jk.value_grad_and_factors(objective)
        numbers += jax.jit(stats)(PARAMS, batch, bases=bases)[:2]
        numbers += [stats(PARAMS, batch, bases=bases).factors["v"]]
        numbers += [jk.correct_eigenvalues(objective, bases)(PARAMS, batch)["v"].raw_values]
        adaptation = stats.adaptation(PARAMS, batch)
        numbers += [adaptation["value"], adaptation["value_fn"](PARAMS)]
        numbers += [jk.influence(objective, PARAMS, bases, batch, batch)]
        numbers += [jk.self_influence(objective, PARAMS, bases, batch)]
        total = float(batch[2].sum()) if objective is OBJECTIVE else float(weighed[2].sum())
        posterior = jk.laplace(objective, PARAMS, bases, num_examples=total)
        numbers += [list(posterior.log_likelihood(batch))]
        report = jk.check_coverage(objective, PARAMS, batch)
        assert max(*report.factors.values(), *report.products.values(), report.gradient) < 1e-10
        found.append(numbers)
    close(*found)


def test_class_weights_that_are_no_weights():
    for bad in ([1.0, -1.0], [0.0, 0.0], [1.0, np.nan], [[1.0]], []):
        with pytest.raises(ValueError, match="one finite number for each class"):
            jk.Categorical(class_weights=np.array(bad))
    objective = jk.Objective(model, jk.Categorical(class_weights=[1.0, 2.0]))
    with pytest.raises(
        ValueError, match="class_weights has 2 entries, expected one for each of the"
    ):
        objective(PARAMS, (X, Y % 2))
    full = jk.Objective(model, jk.Categorical(class_weights=[1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="targets run from 0 to 3, expected classes from 0 to 2"):
        full(PARAMS, (X, np.where(Y == 2, 3, 0)))
    assert np.isnan(jax.jit(full)(PARAMS, (X, np.where(Y == 2, 3, 0))))
    with pytest.raises(ValueError, match="class_weights= of Categorical is about targets"):
        jk.mark_outputs(jnp.ones((N, CLASSES)), full.likelihood)


@pytest.mark.slow
def test_drawn_rows_weighted_by_their_probabilities_are_unbiased():
    """Every draw of two rows, with its probability, averages to the full batch."""
    p = np.array([0.1, 0.3, 0.2, 0.05, 0.25, 0.1])
    objective = jk.Objective(model, jk.Categorical(), normalize="count")
    stats, total = jax.jit(jk.value_grad_and_factors(objective)), 0.0
    for rows in map(np.array, np.ndindex(N, N)):
        value, grads, factors = stats(PARAMS, (X[rows], Y[rows], 1 / (N * p[rows])))
        total = total + p[rows].prod() * np.concatenate(
            [np.ravel(x) for x in (value, grads["w"], grads["v"], factors["v"].g)]
        )
    value, grads, factors = stats(PARAMS, (X, Y))
    full = (value, grads["w"], grads["v"], factors["v"].g)
    close(total, np.concatenate([np.ravel(x) for x in full]))


@pytest.mark.slow
def test_coverage_is_checked_with_weights():
    report = jk.check_coverage(OBJECTIVE, PARAMS, (X, Y, WEIGHTS + 0.5))
    assert max(*report.factors.values(), *report.products.values(), report.gradient) < 1e-10


@pytest.mark.slow
def test_a_plan_of_a_training_with_weights():
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), WEIGHED)
    plan = jk.plan_memory(OBJECTIVE, PARAMS, batch, device_bytes=1e9, compiled="none")
    assert plan.fits


@pytest.mark.slow
def test_an_integer_mask_of_rows_inside_the_model():
    """Numbers other than 0 count as 1; weights of rows go into positions=."""
    for mask, count in ((np.array([1, 0, 2, 1, 1, 1]), 5), (np.ones(N, np.int8), N)):
        marked = jk.Objective(
            lambda p, x, m=mask: jk.mark_rows(x, jnp.asarray(m)) @ p, jk.Gaussian()
        )
        factors = jk.value_grad_and_factors(marked)(jnp.ones((4, 2)), (X, X[:, :2])).factors
        assert [float(n) for n in factors.a_counts.values()] == [count]
    with pytest.raises(ValueError, match="mask has dtype float64, expected bool"):
        jk.mark_rows(jnp.asarray(X), jnp.ones(N))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("masked", [True, False])
def test_a_weight_of_the_objective_multiplies_loss_gradient_and_fisher_everywhere(masked):
    """In every use it equals the same weight of all terms, over their number."""
    batch = (X, Y, np.arange(N) != 2) if masked else (X, Y)
    terms = 2.5 * (np.arange(N) != 2) if masked else np.full(N, 2.5)
    weighted = jk.Objective(model, jk.Categorical(), weight=2.5)
    by_terms = jk.Objective(model, jk.Categorical(), normalize="count")
    key, found = jax.random.key(3), []
    for objective, data in ((weighted, batch), (by_terms, (X, Y, terms))):
        stats = jk.value_grad_and_factors(objective)
        value, grads, factors = stats(PARAMS, data)
        numbers = [value, grads["w"], grads["v"], factors["v"].a, factors["v"].g, factors["w"].g]
        for fisher in ("mc", "exact"):
            other = jk.value_grad_and_factors(objective, fisher=fisher)
            numbers += list(other(PARAMS, data, key).factors["v"])
        bases = jk.eigendecompose(factors)
        numbers += [jk.correct_eigenvalues(objective, bases)(PARAMS, data)["v"].raw_values]
        vector = jax.tree.map(jnp.ones_like, PARAMS)
        for make in (jk.operators.fisher, jk.operators.ggn, jk.operators.hessian):
            numbers += jax.tree.leaves(make(objective, PARAMS, data) @ vector)
        numbers += [jk.influence(objective, PARAMS, bases, data, data)]
        numbers += [jk.self_influence(objective, PARAMS, bases, data)]
        posterior = jk.laplace(objective, PARAMS, bases, num_examples=float(N - masked))
        numbers += list(posterior.log_likelihood(data))[:1]
        numbers += [posterior.variance(X)]
        report = jk.check_coverage(objective, PARAMS, data)
        assert max(*report.factors.values(), *report.products.values(), report.gradient) < 1e-10
        found.append(numbers)
    close(*found)
    plain = jk.Objective(model, jk.Categorical())
    np.testing.assert_allclose(found[0][0], 2.5 * plain(PARAMS, batch), rtol=1e-12)


def test_the_mean_of_squares_is_a_gaussian_of_weight_two_over_the_outputs():
    loss = lambda p: jnp.mean((model(p, X) - X[:, :CLASSES]) ** 2)
    objective = jk.Objective(model, jk.Gaussian(), weight=2 / CLASSES)
    batch = X, X[:, :CLASSES]
    np.testing.assert_allclose(objective(PARAMS, batch), loss(PARAMS), rtol=1e-12)
    flat, tree = jax.flatten_util.ravel_pytree(PARAMS)
    jacobian = jax.jacobian(lambda v: model(tree(v), X).ravel())(flat)
    ggn = jk.operators.ggn(objective, PARAMS, batch).to_dense()
    close([ggn], [2 / CLASSES * jacobian.T @ jacobian / N])


def test_each_likelihood_has_its_weight_and_a_weight_is_a_positive_number():
    both = lambda p, x: {"a": model(p, x), "b": model(p, x)}
    likelihoods = {"a": jk.Categorical(), "b": jk.Gaussian()}
    one = jk.Objective(model, jk.Categorical())(PARAMS, (X, Y))
    other = jk.Objective(model, jk.Gaussian())(PARAMS, (X, X[:, :CLASSES]))
    batch = X, {"a": Y, "b": X[:, :CLASSES]}
    objective = jk.Objective(both, likelihoods, weight={"a": 3.0, "b": 0.5})
    np.testing.assert_allclose(objective(PARAMS, batch), 3 * one + 0.5 * other, rtol=1e-12)
    assert hash(objective) != hash(jk.Objective(both, likelihoods))
    for weight in (0.0, -1.0, np.inf, True, "2", jnp.ones(())):
        with pytest.raises(ValueError, match="expected a positive Python number"):
            jk.Objective(model, jk.Categorical(), weight=weight)
    with pytest.raises(ValueError, match="weight: expected .* without 'b'"):
        jk.Objective(both, likelihoods, weight={"a": 1.0})


@pytest.mark.parametrize(
    ("link", "likelihood", "expected"),
    [
        (jax.nn.softmax, jk.Categorical(), True),
        (jax.nn.sigmoid, jk.Bernoulli(), True),
        (lambda x: x, jk.Categorical(), False),
        (lambda x: x, jk.Bernoulli(), False),
        (jax.nn.sigmoid, jk.Gaussian(), False),
    ],
)
def test_probabilities_are_noticed_under_jit(link, likelihood, expected):
    objective = jk.Objective(model, likelihood)
    outputs = link(model(PARAMS, X) * 3)
    assert bool(jax.jit(objective.returns_probabilities)(outputs)) == expected
    assert bool(objective.returns_probabilities(outputs)) == expected
