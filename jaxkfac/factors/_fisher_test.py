import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import LostRowsError
from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._likelihoods import Bernoulli, Categorical, Gaussian
from jaxkfac.factors._objective import Objective


def attend(params, x):
    """Two dense layers around an attention that mixes the tokens of an example."""
    h = jnp.tanh(x @ params["in"]) * params["scale"]
    weights = jax.nn.softmax(jnp.einsum("ntd,nsd->nts", h, h))
    return jnp.einsum("nts,nsd->ntd", weights, h) @ params["out"] + params["bias"]


def program(n=3, t=2, d=4, classes=3, likelihood=None):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": jax.random.normal(keys[0], (d, d)),
        "scale": jnp.full(d, 1.5),
        "out": 0.3 * jax.random.normal(keys[1], (d, classes)),  # no label is nearly certain
        "bias": jnp.zeros(classes),
    }
    x = jax.random.normal(keys[2], (n, t, d))
    likelihood = likelihood or Categorical()
    targets = likelihood.sample(keys[3], attend(params, x))
    return Objective(attend, likelihood), params, (x, targets)


def collect(objective, params, batch, key=None, labels=None, **options):
    stats = jax.jit(value_grad_and_factors(objective, **options))
    return stats(params, batch, key, labels=labels)


def assert_equal(left, right, rtol=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14), left, right)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("chunk", [2, 4, 6, 100])
def test_exact_does_not_depend_on_the_chunk(x64, chunk, sharing):
    objective, params, batch = program()
    one, other = (
        collect(objective, params, batch, fisher="exact", sharing=sharing, chunk=c)
        for c in (1, chunk)
    )
    assert_equal(one, other)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=repr)
def test_mc_over_every_label_weighted_by_its_probability_is_exact(x64, likelihood, sharing):
    # One term of one example: then every label can be listed.
    objective, params, (x, _) = program(n=1, t=1, classes=2, likelihood=likelihood)
    y = objective.apply_fn(params, x)
    if isinstance(likelihood, Categorical):
        labels = jnp.arange(2).reshape(2, 1, 1)
    else:
        labels = jnp.array([[0.0, 0], [0, 1], [1, 0], [1, 1]]).reshape(4, 1, 1, 2)
    weights = [jnp.exp(-likelihood.terms(y, label)[0, 0]) for label in labels]
    assert abs(sum(weights) - 1) < 1e-12
    stats = jax.jit(value_grad_and_factors(objective, fisher="mc", sharing=sharing))
    each = [stats(params, (x, labels[0]), labels=label[None]).factors for label in labels]
    expected = collect(objective, params, (x, labels[0]), fisher="exact", sharing=sharing).factors
    for name in ("in", "scale", "out"):
        outer = [w * jax.tree.leaves(f[name])[-1] for w, f in zip(weights, each)]
        np.testing.assert_allclose(
            sum(outer), jax.tree.leaves(expected[name])[-1], rtol=1e-10, atol=1e-14
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_several_samples_are_the_mean_over_them(x64, sharing):
    objective, params, batch = program()
    labels = jax.random.randint(jax.random.key(5), (3, *batch[1].shape), 0, 3)
    stats = jax.jit(value_grad_and_factors(objective, fisher="mc", sharing=sharing))
    each = [stats(params, batch, labels=label[None]).factors for label in labels]
    together = stats(params, batch, labels=labels).factors
    for name in together:
        mean = jax.tree.map(lambda *x: sum(x) / 3, *[f[name] for f in each])
        assert_equal(together[name], mean)


def test_one_sample_is_the_sample_of_the_likelihood(x64):
    objective, params, batch = program()
    key = jax.random.key(7)
    sampled = collect(objective, params, batch, key, fisher="mc").factors
    labels = objective.likelihood.sample(
        jax.random.fold_in(key, 0x6C61), objective.apply_fn(params, batch[0])
    )
    given = collect(objective, params, batch, labels=labels[None], fisher="mc").factors
    assert_equal(sampled, given)


@pytest.mark.exhaustive
def test_devices_draw_labels_of_their_own(x64):
    """Under ``shard_map`` one key serves every device: G is not that of equal labels."""
    objective, params, (x, y) = program(n=2)
    key, auto = jax.random.key(0), (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
    stats = value_grad_and_factors(objective, fisher="mc")

    def g(params, batch, key):
        params = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        return stats(params, batch, key).factors["out"].g[None]  # of both devices' batch

    data, none = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    split = jax.jit(jax.shard_map(g, mesh=mesh, in_specs=(none, data, none), out_specs=data))
    both = split(params, (jnp.concatenate([x, x]), jnp.concatenate([y, y])), key)
    np.testing.assert_array_equal(both[0], both[1])
    outputs = objective.apply_fn(params, x)

    def drawn(keys):
        labels = jnp.stack([objective.sample(k, outputs) for k in keys])
        return stats(params, (x, y), labels=labels).factors["out"].g

    base = jax.random.fold_in(key, 0x6C61)
    each = [jax.random.fold_in(base, device) for device in range(2)]
    np.testing.assert_allclose(both[0], drawn(each), rtol=1e-10)
    assert not np.allclose(both[0], drawn([base]))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["mc", "exact", "forward", "exact_if_terms_do_not_mix"])
def test_value_gradient_and_input_side_are_those_of_the_given_targets(x64, fisher):
    objective, params, batch = program()
    key = jax.random.key(1)
    value, grads, factors = collect(objective, params, batch, key, fisher=fisher)
    expected, gradient = jax.jit(jax.value_and_grad(objective))(params, batch)
    given = collect(objective, params, batch).factors
    assert_equal((value, grads), (expected, gradient))
    assert_equal(factors["in"].a, given["in"].a)
    assert not np.allclose(factors["in"].g, given["in"].g)


@pytest.mark.exhaustive
def test_one_type_more_costs_one_backward_pass_and_no_forward_pass():
    objective, params, batch = program(n=64, t=4, d=64, classes=64)

    def flops(fn, *args):
        return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]

    forward = flops(objective, params, batch)
    gradient = flops(jax.value_and_grad(objective), params, batch)
    empirical = flops(value_grad_and_factors(objective), params, batch)
    mc = flops(value_grad_and_factors(objective, fisher="mc"), params, batch, jax.random.key(0))
    # A backward pass without the parameters' own gradients costs about a forward pass.
    assert mc - empirical < 1.2 * forward < 0.7 * gradient


@pytest.mark.slow
def test_the_covariance_of_a_wide_side_takes_two_thirds_of_the_product():
    """Three panels hold one triangle; a side below 512 takes the full product."""

    def part_of_product(side, number=4000):
        objective = Objective(lambda p, x: x @ p["kernel"], Categorical())
        params = {"kernel": jax.ShapeDtypeStruct((side, 2), jnp.float32)}
        batch = jax.ShapeDtypeStruct((number, side), jnp.float32), jnp.zeros(number, int)

        def flops(fn):
            return jax.jit(fn).lower(params, batch).compile().cost_analysis()["flops"]

        more = flops(value_grad_and_factors(objective)) - flops(jax.value_and_grad(objective))
        return more / (2 * number * side**2)

    assert 0.66 < part_of_product(512) < 0.68
    assert 1.0 <= part_of_product(256) < 1.02


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_memory_of_exact_is_bounded_by_the_chunk(sharing):
    objective, params, batch = program(n=64, t=8, d=32, classes=32)

    def temporaries(**options):
        stats = value_grad_and_factors(objective, sharing=sharing, **options)
        compiled = jax.jit(stats).lower(params, batch, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one_pull = temporaries(fisher="mc")
    assert temporaries(fisher="exact", chunk=1) < 1.3 * one_pull
    assert temporaries(fisher="exact", chunk=4) < 4 * one_pull
    assert temporaries(fisher="exact", chunk=256) > 16 * one_pull  # all pulls at once


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_masked_terms_are_in_no_sum_and_no_count(x64, fisher):
    objective, params, (x, y) = program(t=3)
    mask = jnp.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
    labels = None if fisher == "exact" else y[None]
    batch = (x, jnp.where(mask, y, -100), mask)
    masked = collect(objective, params, batch, labels=labels, fisher=fisher).factors
    assert masked.terms == 6

    # A term that is masked is a term of another likelihood whose outputs get no gradient.
    def cut(params, x):
        return jnp.where(mask[..., None], attend(params, x), 0.0)

    kept = Objective(cut, Categorical())
    expected = collect(kept, params, (x, y), labels=labels, fisher=fisher).factors
    for name in ("in", "out"):
        np.testing.assert_allclose(masked[name].g * 6, expected[name].g * 9, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact", "exact_if_terms_do_not_mix"])
def test_the_second_pass_uses_the_same_fisher_type(x64, fisher):
    # exp of a parameter is no layer; exp(s) x is the scale exp(s): its diagonal is known.
    objective, params, batch = program(t=1)

    def hidden(params, x):
        return attend({**params, "scale": jnp.exp(params["scale"])}, x)

    options = {"fisher": fisher, "sharing": "reduce"}
    options["labels"] = batch[1][None] if fisher == "mc" else None
    raised = {**params, "scale": jnp.exp(params["scale"])}
    expected = collect(objective, raised, batch, **options).factors["scale"].diagonal
    second = Objective(hidden, Categorical())
    factors = collect(second, params, batch, uncovered="diagonal", **options).factors
    second = factors["scale"].diagonal
    np.testing.assert_allclose(second, expected * jnp.exp(2 * params["scale"]), rtol=1e-10)


def test_forward_is_the_identity_at_every_output(x64):
    objective, params, batch = program()
    factors = collect(objective, params, batch, fisher="forward").factors
    np.testing.assert_array_equal(factors["in"].g, jnp.eye(4))
    h = jnp.tanh(batch[0] @ params["in"])
    np.testing.assert_allclose(factors["scale"].diagonal, jnp.square(h).mean((0, 1)), rtol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"fisher": "mc"},
        {"fisher": "exact"},
        {"fisher": "forward"},
        {"fisher": "exact_if_terms_do_not_mix"},
        {"sharing": "reduce"},
        {"scales": "exact_diagonal"},
        {"scales": "full_block"},
    ],
)
def test_a_scalar_loss_refuses_what_needs_outputs(options):
    with pytest.raises(ValueError, match="needs the model's outputs.*jk.Objective"):
        value_grad_and_factors(lambda p, b: jnp.mean(b @ p), loss_terms=2, **options)


@pytest.mark.default(2, slow=0)
@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"samples": 0}, "samples=0: expected at least 1"),
        ({"chunk": 0}, "chunk=0: expected at least 1"),
        ({"fisher": "forward", "uncovered": "diagonal"}, "has none"),
    ],
)
def test_unknown_options_are_named(arguments, words):
    objective, *_ = program()
    with pytest.raises(ValueError, match=words):
        value_grad_and_factors(objective, **arguments)


def test_labels_that_do_not_fit_are_refused():
    objective, params, batch = program()
    stats = value_grad_and_factors(objective, fisher="mc")
    with pytest.raises(ValueError, match="pass key=, or labels="):
        stats(params, batch)
    with pytest.raises(ValueError, match=r"shape \(3, 2\), expected \(samples, \*targets\)"):
        stats(params, batch, labels=batch[1])
    with pytest.raises(ValueError, match='fisher="mc"'):
        value_grad_and_factors(objective)(params, batch, labels=batch[1][None])


@pytest.mark.parametrize("labels", [jnp.full((1, 3, 2), 3), jnp.full((2, 3, 2), -1)])
def test_labels_that_are_no_class_are_refused(labels):
    objective, params, batch = program()
    stats = value_grad_and_factors(objective, fisher="mc")
    with pytest.raises(ValueError, match="expected classes from 0 to 2"):
        stats(params, batch, labels=labels)
    with pytest.raises(ValueError, match=r"shape \(0, 3, 2\), expected \(samples"):
        stats(params, batch, labels=labels[:0])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()], ids=repr)
def test_targets_of_masked_terms_may_be_nan(x64, likelihood, fisher):
    objective, params, (x, y) = program(likelihood=likelihood)
    mask = jnp.array([[1, 0], [0, 0], [1, 1]], bool)
    wild = jnp.where(mask[..., None], y, jnp.nan)
    given = lambda targets: {"labels": targets[None]} if fisher == "mc" else {}
    clean = collect(objective, params, (x, y, mask), fisher=fisher, **given(y))
    found = collect(objective, params, (x, wild, mask), fisher=fisher, **given(wild))
    jax.tree.map(np.testing.assert_array_equal, found, clean)


@pytest.mark.exhaustive
def test_exact_in_bfloat16_divides_by_the_true_number_of_terms():
    """256 is the last number before which bfloat16 holds them all."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (257, 3)), jax.random.normal(keys[1], (3, 2))
    objective, y = Objective(lambda p, x: x @ p["w"], Categorical()), jnp.zeros(257, int)
    stats = value_grad_and_factors(objective, fisher="exact")
    half, single = (
        jnp.trace(stats({"w": w.astype(dtype)}, (x.astype(dtype), y)).factors["w"].g)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    # 1 / 256 for 1 / 257, squared, would be 0.8 % too much
    np.testing.assert_allclose(half, single, rtol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sharing": "reduce"}, {"scales": "exact_diagonal"}])
def test_rows_that_cannot_be_told_apart_by_example_are_refused(options):
    objective, params, batch = program(n=4)

    def mapped(params, x):
        return jax.lax.map(lambda one: attend(params, one[None])[0], x)

    stats = value_grad_and_factors(Objective(mapped, Gaussian()), **options)
    with pytest.raises(LostRowsError, match="example axis lost at `(dot_general|mul)`.*layers="):
        stats(params, (batch[0], jnp.zeros((4, 2, 3))))
