import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxkfac.blocks import LongSum, Origin, update_average, zeros_like
from jaxkfac.factors import (
    Bernoulli,
    Categorical,
    Gaussian,
    Objective,
    value_grad_and_factors,
)
from jaxkfac.interception import mark_outputs

PARAMS = {"up": jnp.full((3, 4), 0.1), "down": jax.random.normal(jax.random.key(0), (4, 2))}
BATCH = jax.random.normal(jax.random.key(1), (6, 3)), jnp.arange(6) % 2
KEY = jax.random.key(2)
TYPES = ("empirical", "mc", "exact", "forward")


def net(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


CATEGORICAL = Objective(net, Categorical())


def factors(fisher="empirical", objective=CATEGORICAL, batch=BATCH, **options):
    return value_grad_and_factors(objective, fisher=fisher, **options)(PARAMS, batch, KEY).factors


def marked(params, batch):
    outputs = net(params, batch[0])
    first = mark_outputs(outputs, Categorical())
    second = mark_outputs(net(params, 2 * batch[0]), Gaussian())
    nll = -jnp.take_along_axis(jax.nn.log_softmax(first), batch[1][:, None], 1)
    return nll.mean() + 0.5 * jnp.square(second).sum(-1).mean()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", TYPES)
def test_factors_know_their_fisher_type_and_likelihood_and_so_do_their_shapes(fisher):
    stats = value_grad_and_factors(CATEGORICAL, fisher=fisher)
    expected = Origin(fisher, ("Categorical",))
    shapes = stats.factor_shapes(PARAMS, BATCH)
    for run in (stats, jax.jit(stats)):
        found = run(PARAMS, BATCH, KEY).factors
        assert found.origin == expected
        assert jax.tree.structure(found) == jax.tree.structure(shapes)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", TYPES)
def test_a_loss_with_marks_has_the_likelihoods_of_its_heads(fisher):
    found = factors(fisher, marked)
    assert found.origin == Origin(fisher, ("Categorical", "Gaussian"))
    shapes = value_grad_and_factors(marked, fisher=fisher).factor_shapes(PARAMS, BATCH)
    assert shapes.origin == found.origin


@pytest.mark.slow
def test_of_several_outputs_each_class_counts_once():
    heads = {"b": Gaussian(), "a": Bernoulli(), "c": Gaussian()}
    objective = Objective(lambda p, x: dict.fromkeys(heads, net(p, x)), heads)
    targets = {"a": jnp.ones((6, 2)), "b": jnp.ones((6, 2)), "c": jnp.ones((6, 2))}
    found = factors("exact", objective, (BATCH[0], targets))
    assert found.origin == Origin("exact", ("Bernoulli", "Gaussian"))


@pytest.mark.slow
def test_a_scalar_loss_without_marks_has_no_known_likelihood():
    loss = lambda params, batch: CATEGORICAL(params, batch)
    assert factors(objective=loss, loss_terms=6).origin == Origin("empirical")


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize(
    "options",
    [{"max_factor_bytes": 200}, {"max_factor_bytes": "1GB"}, {"uncovered": "diagonal"}],
)
def test_every_way_of_collecting_says_it(options):
    assert factors("mc", **options).origin == Origin("mc", ("Categorical",))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_factor_bytes": 200}])
def test_factors_of_a_step_without_collection_have_the_same_structure(options):
    stats = value_grad_and_factors(CATEGORICAL, fisher="exact", every=2, **options)
    first, second = (stats(PARAMS, BATCH, step=step).factors for step in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    if not options:
        run = jax.jit(lambda step: stats(PARAMS, BATCH, step=step).factors)
        assert run(0).origin == run(1).origin == Origin("exact", ("Categorical",), every=2)


@pytest.mark.exhaustive
def test_inside_shard_map_it_is_the_same():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(params, batch):
        out = value_grad_and_factors(CATEGORICAL, fisher="exact")(params, batch)
        return jax.tree.map(lambda x: jax.lax.psum(x, "data"), out.factors)

    split = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert split(PARAMS, BATCH).origin == Origin("exact", ("Categorical",))


# ------------------------------------------------------------ sums


def test_a_sum_of_unlike_fisher_types_is_refused_by_name():
    one, other = factors("exact"), factors("mc")
    with pytest.raises(ValueError, match="'mc' of Categorical cannot be added to .*'exact' of"):
        one + other
    with pytest.raises(ValueError, match="'mc' of Categorical cannot be added to .*'exact' of"):
        jax.jit(lambda a, b: 0.5 * a + b)(one, other)
    total = LongSum.zeros(one) + one
    with pytest.raises(ValueError, match="'mc' of Categorical cannot be added"):
        total + other
    meant = dataclasses.replace(other, origin=None)
    assert (one + meant).origin == (total + meant).total.origin == one.origin


def test_a_sum_of_unlike_likelihoods_is_refused_by_name():
    other = factors("exact", Objective(net, Gaussian()), (BATCH[0], jnp.zeros((6, 2))))
    with pytest.raises(ValueError, match="'exact' of Gaussian cannot be added to .* of Cat"):
        factors("exact") + other


def test_what_is_not_known_goes_with_everything_and_the_first_summand_says_what_the_sum_is():
    known = factors("empirical")
    unknown = dataclasses.replace(known, origin=None)
    scalar = dataclasses.replace(known, origin=Origin("empirical"))
    for one, other in ((known, unknown), (unknown, known), (known, scalar), (scalar, known)):
        assert (one + other).origin == one.origin
        assert update_average(one, other, 0.9).origin == one.origin
        total = LongSum.zeros(one) + other
        assert total.total.origin == one.origin


@pytest.mark.default(2)
@pytest.mark.parametrize("like", [*TYPES, None])
def test_an_average_keeps_its_structure_whatever_it_is_given(like):
    """Inside of ``scan``, and of ``cond`` beside itself."""
    new = factors("mc")
    start = zeros_like(dataclasses.replace(new, origin=like and Origin(like, ("Gaussian",))))

    def step(average, skip):
        update = lambda: update_average(average, new, 0.9)
        return jax.lax.cond(skip, lambda: average, update), None

    average, _ = jax.jit(lambda start: jax.lax.scan(step, start, jnp.arange(3) == 1))(start)
    assert average.origin == start.origin
    assert float(average.terms) == pytest.approx(6 * 1.9)
