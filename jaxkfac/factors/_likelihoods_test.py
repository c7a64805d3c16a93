import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._likelihoods import Bernoulli, Categorical, Gaussian
from jaxkfac.factors._objective import Objective

pytestmark = pytest.mark.usefixtures("x64")
LIKELIHOODS = [Categorical(), Bernoulli(), Gaussian()]


def outputs():
    return jax.random.normal(jax.random.key(0), (2, 3, 4))


def targets_of(likelihood):
    return likelihood.sample(jax.random.key(1), outputs())


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_fisher_columns_and_products_are_those_of_the_hessian_of_a_term(likelihood):
    y, targets = outputs(), targets_of(likelihood)
    columns = [likelihood.fisher_column(y, jnp.asarray(c)) for c in range(4)]
    fisher = sum(jnp.einsum("ntc,ntd->ntcd", s, s) for s in columns)

    def term(one, target):
        return likelihood.terms(one, target)

    hessian = jax.vmap(jax.vmap(jax.hessian(term)))(y, targets)
    np.testing.assert_allclose(fisher, hessian, rtol=1e-12, atol=1e-15)
    vector = jax.random.normal(jax.random.key(3), y.shape)
    product = jnp.einsum("ntcd,ntd->ntc", hessian, vector)
    found = likelihood.fisher_product(y, vector)
    np.testing.assert_allclose(found, product, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_gradients_at_sampled_labels_have_the_fisher_as_second_moment(likelihood):
    y, number = outputs()[:1, :1], 40_000
    drawn = jax.vmap(lambda k: likelihood.sample(k, y))(jax.random.split(jax.random.key(2), number))
    g = jax.vmap(lambda t: jax.grad(lambda x: likelihood.terms(x, t).sum())(y))(drawn)[:, 0, 0]
    columns = [likelihood.fisher_column(y, jnp.asarray(c))[0, 0] for c in range(4)]
    expected = sum(jnp.outer(s, s) for s in columns)
    error = jnp.abs(g.T @ g / number - expected).max()
    # Entries are means of products with a variance of at most 3 (a Gaussian's fourth moment).
    assert error < 6 * np.sqrt(3 / number)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_fisher_columns_and_products_keep_the_dtype_of_the_outputs(likelihood, dtype):
    y = outputs().astype(dtype)
    assert likelihood.fisher_column(y, jnp.asarray(1)).dtype == dtype
    assert likelihood.fisher_product(y, y).dtype == dtype


@pytest.mark.parametrize("bad", [-1, 4])
def test_a_class_out_of_range_raises_unless_it_is_masked(bad):
    y, targets = outputs(), jnp.zeros((2, 3), int).at[1, 2].set(bad)
    objective = Objective(lambda p, x: x * p, Categorical())
    with pytest.raises(ValueError, match=r"expected classes from 0 to 3.*mask"):
        objective(jnp.ones(()), (y, targets))
    mask = jnp.ones((2, 3), bool).at[1, 2].set(False)
    assert jnp.isfinite(objective(jnp.ones(()), (y, targets, mask)))


@pytest.mark.parametrize("bad", [4, -1, -4, -5])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int64])
def test_a_class_out_of_range_gives_nan_where_values_are_traced(dtype, bad):
    """A negative one too: it is not the class that many from the end."""
    y, targets = outputs(), jnp.full((2, 3), bad, dtype)
    objective = Objective(lambda p, x: x * p, Categorical())
    assert jnp.isnan(jax.jit(objective)(jnp.ones(()), (y, targets)))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact", "forward"])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=repr)
def test_an_invalid_target_poisons_value_gradient_and_factors_alike(likelihood, fisher):
    x, params = outputs()[:, 0], {"w": jnp.eye(4), "s": jnp.ones(4)}
    objective = Objective(lambda p, x: (x @ p["w"]) * p["s"], likelihood)
    stats = jax.jit(value_grad_and_factors(objective, fisher=fisher))
    good = likelihood.sample(jax.random.key(1), x)
    for targets, finite in ((good, True), (good.at[0].add(7), False)):
        value, grads, factors = stats(params, (x, targets), jax.random.key(2))
        found = [value, *jax.tree.leaves(grads), factors["w"].g, factors["s"].diagonal]
        assert all(bool(jnp.isfinite(y).all()) == finite for y in found)
        assert all(bool(ok) == finite for ok in factors.is_finite().values())
    # an example that a mask leaves out may hold anything
    kept = jnp.ones(2, bool).at[0].set(False)
    assert jnp.isfinite(stats(params, (x, targets, kept), jax.random.key(2)).value)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_an_invalid_target_poisons_the_second_pass(fisher):
    """Sampled labels and columns do not show it."""
    x, params = outputs()[:, 0], {"w": jnp.eye(4), "s": jnp.arange(4.0)}
    objective = Objective(lambda p, x: x @ p["w"] * jnp.sort(p["s"]), Categorical())
    stats = jax.jit(value_grad_and_factors(objective, fisher=fisher, uncovered="diagonal"))
    for target, finite in ((1, True), (9, False)):
        batch = (x, jnp.full(len(x), target))
        factors = stats(params, batch, jax.random.key(2)).factors
        assert bool(jnp.isfinite(factors["s"].diagonal).all()) == finite


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("masked", [True, False])
def test_ignored_classes_are_masked_terms(fisher, masked):
    params, x = {"w": jnp.eye(4)}, outputs()
    objective = lambda kind: Objective(lambda p, x: x @ p["w"], kind)
    y = jnp.asarray([[1, -100, 3], [-100, 0, 2]])
    given = (jnp.asarray([[True, True, False], [True, True, True]]),) if masked else ()
    mask = (y != -100) & given[0] if masked else y != -100
    run = lambda o, batch: jax.jit(value_grad_and_factors(o, fisher=fisher))(params, batch)
    found = run(objective(Categorical(ignore_index=-100)), (x, y, *given))
    expected = run(objective(Categorical()), (x, y, mask))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(expected))
    assert int(found.factors.terms) == int(mask.sum())
    with pytest.raises(ValueError, match="masks every loss term"):
        objective(Categorical(ignore_index=-100))(params, (x, jnp.full((2, 3), -100)))


@pytest.mark.parametrize("bad", [-0.5, 1.5, jnp.nan])
def test_a_probability_out_of_range_raises_unless_it_is_masked(bad):
    y, targets = outputs(), jnp.full((2, 3, 4), 0.25).at[1, 2, 0].set(bad)
    objective = Objective(lambda p, x: x * p, Bernoulli())
    with pytest.raises(ValueError, match=r"expected probabilities from 0 to 1.*mask"):
        objective(jnp.ones(()), (y, targets))
    mask = jnp.ones((2, 3), bool).at[1, 2].set(False)
    assert jnp.isfinite(objective(jnp.ones(()), (y, targets, mask)))
    ends = jnp.zeros((2, 3, 4)).at[1].set(1)
    assert jnp.isfinite(objective(jnp.ones(()), (y, ends)))


@pytest.mark.parametrize(
    "likelihood, targets, words",
    [
        (Categorical(), jnp.zeros((2, 3)), "dtype float.*, expected integers"),
        (Categorical(), jnp.zeros((2, 3, 4), int), r"shape \(2, 3, 4\), expected \(2, 3\)"),
        (Bernoulli(), jnp.zeros((2, 3, 4), int), "dtype int.*, expected floating"),
        (Bernoulli(), jnp.zeros((2, 3)), r"shape \(2, 3\), expected \(2, 3, 4\)"),
        (Gaussian(), jnp.zeros((2, 4)), r"shape \(2, 4\), expected \(2, 3, 4\)"),
    ],
)
def test_targets_that_do_not_fit_the_outputs_are_refused(likelihood, targets, words):
    with pytest.raises(ValueError, match=words):
        likelihood.check(outputs(), targets)
