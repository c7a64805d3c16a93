"""``shard_map`` around the collector: each device has rows of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkfac as jk

pytestmark = pytest.mark.usefixtures("x64")
PARAMS = {"w": np.arange(12.0).reshape(3, 4) / 12}


def model(p, x):
    return x @ p["w"]


def marked(p, batch):
    z = jk.mark_outputs(model(p, batch[0]), jk.Categorical())
    return -jnp.take_along_axis(jax.nn.log_softmax(z), batch[1][:, None], -1).mean()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("loss", [jk.Objective(model, jk.Categorical()), marked])
def test_equal_parameters_have_the_gradients_sum_and_the_factors_of_all(loss, every):
    """The gradient is JAX's, of the sum of the devices' means; factors are the whole batch's."""
    x, y = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    stats = jk.value_grad_and_factors(loss, every=every)

    def of(p, x, y, step):
        out = stats(p, (x, y), step=step)
        return out.grads["w"], out.factors["w"].g

    auto, none, rows = (jax.sharding.AxisType.Auto,), P(), P("rows")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=auto)
    split = jax.shard_map(of, mesh=mesh, in_specs=(none, rows, rows, none), out_specs=none)
    found = jax.jit(split)(PARAMS, x, y, jnp.asarray(2))
    halves = [of(PARAMS, x[k : k + 4], y[k : k + 4], 2) for k in (0, 4)]
    grads, g = zip(*halves, strict=True)
    np.testing.assert_allclose(found[0], sum(grads), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found[1], sum(g) / 2, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found[1], of(PARAMS, x, y, 2)[1], rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_the_recipe_of_the_page_is_a_step_of_the_whole_batch():
    """Nothing is divided by hand: three steps of kfac equal those of one device."""
    x, y = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    objective = jk.Objective(model, jk.Categorical())
    params = jax.tree.map(jnp.asarray, PARAMS)
    like = jk.value_grad_and_factors(objective).factor_shapes(params, (x, y))
    tx = jk.kfac(0.1, like=like, damping=1e-2)

    def step(params, state, x, y, *, inside):
        stats = jk.value_grad_and_factors(objective, axis_name="rows" if inside else None)
        value, grads, factors = stats(params, (x, y))
        updates, state = tx.update(grads, state, params, factors=factors)
        return jax.tree.map(jnp.add, params, updates), state, value

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(
        functools.partial(step, inside=True),
        mesh=mesh,
        in_specs=(P(), P(), P("rows"), P("rows")),
        out_specs=P(),
    )
    one, both = (params, tx.init(params)), (params, tx.init(params))
    for _ in range(3):
        *one, expected = jax.jit(functools.partial(step, inside=False))(*one, x, y)
        *both, value = jax.jit(split)(*both, x, y)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_allclose(both[0]["w"], one[0]["w"], rtol=1e-10, atol=1e-14)


def test_a_mask_inside_is_refused_by_name():
    x, y = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()))
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    of = lambda x, y, mask: stats(PARAMS, (x, y, mask)).factors["w"].g
    split = jax.shard_map(of, mesh=mesh, in_specs=P("rows"), out_specs=P())
    with pytest.raises(ValueError, match="a mask inside jax.shard_map.*axis_name="):
        jax.jit(split)(x, y, jnp.arange(8) % 3 > 0)


@pytest.mark.exhaustive
def test_parameters_of_each_device_have_the_same_factors():
    """Their gradients are their own; factors are always those of all devices."""
    x, y = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    stats = jk.value_grad_and_factors(marked, fisher="exact", every=2)

    def of(p, x, y, step):
        own = jax.tree.map(lambda w: jax.lax.pcast(w, "rows", to="varying"), p)
        out = stats(own, (x, y), step=step)
        return out.grads["w"][None], out.factors["w"].g[None]

    auto, none, rows = (jax.sharding.AxisType.Auto,), P(), P("rows")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=auto)
    split = jax.shard_map(of, mesh=mesh, in_specs=(none, rows, rows, none), out_specs=rows)
    grads, g = jax.jit(split)(PARAMS, x, y, jnp.asarray(2))
    halves = [stats(PARAMS, (x[k : k + 4], y[k : k + 4]), step=2) for k in (0, 4)]
    for k, half in enumerate(halves):
        np.testing.assert_allclose(grads[k], half.grads["w"], rtol=1e-12, atol=1e-15)
        total = sum(h.factors["w"].g for h in halves) / 2
        np.testing.assert_allclose(g[k], total, rtol=1e-12, atol=1e-15)
    assert not jax.jit(split)(PARAMS, x, y, jnp.asarray(1))[1].any()


def unit(p, x):
    return x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0))


def _on_two_devices(stats, x, y):
    auto, rows = (jax.sharding.AxisType.Auto,), P("rows")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=auto)
    of = lambda p, x, y: stats(p, (x, y)).factors["w"].diagonal
    split = jax.shard_map(of, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P())
    return jax.jit(split)(PARAMS, x, y)


@pytest.mark.exhaustive
def test_the_second_pass_squares_before_it_sums_over_devices():
    x, y = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    stats = jk.value_grad_and_factors(jk.Objective(unit, jk.Categorical()))
    halves = [stats(PARAMS, (x[k : k + 4], y[k : k + 4])).factors["w"] for k in (0, 4)]
    expected = sum(half.diagonal for half in halves) / 2
    np.testing.assert_allclose(_on_two_devices(stats, x, y), expected, rtol=1e-12)


def test_beside_marks_the_second_pass_is_refused_inside():
    def loss(p, batch):
        z = jk.mark_outputs(unit(p, batch[0]), jk.Categorical())
        return -jnp.take_along_axis(jax.nn.log_softmax(z), batch[1][:, None], -1).mean()

    x, y = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    with pytest.raises(jk.UncoveredParameterError, match="which inside jax.shard_map are sums"):
        _on_two_devices(jk.value_grad_and_factors(loss), x, y)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("every", [1, 2])
def test_a_rematted_convolution_is_collected_at_times_inside(every):
    def images(p, x):
        x, kernel = x.reshape(-1, 3, 1, 1), p["w"].reshape(3, 1, 1, 4)
        numbers = ("NHWC", "HWIO", "NHWC")
        z = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.tanh(z).mean((1, 2))

    objective = jk.Objective(jax.checkpoint(images), jk.Categorical())
    stats = jk.value_grad_and_factors(objective, every=every)
    x, y = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P("rows"), P()), "out_specs": P()}
    found, expected = (
        jax.jit(jax.shard_map(of, **specs))(PARAMS, (x, y), 0)
        for of in (
            lambda p, batch, step: stats(p, batch, step=step).grads,
            lambda p, batch, step: jax.grad(objective)(p, batch),
        )
    )
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-12, atol=1e-15)


@pytest.mark.exhaustive
def test_uses_of_curvature_see_each_devices_examples_alone():
    """Their gradients are of one example: no sum over devices is theirs."""
    data = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    objective, params = jk.Objective(model, jk.Categorical()), jax.tree.map(jnp.asarray, PARAMS)
    factors = jk.value_grad_and_factors(objective, fisher="exact")(params, data).factors
    bases = jk.eigendecompose(factors)
    posterior = jk.laplace(objective, params, bases, num_examples=8)
    queries = data[0][:2], data[1][:2]

    def of(x, y):
        scores = jk.influence(objective, params, bases, queries, (x, y), damping=0.1)
        own = jk.self_influence(objective, params, bases, (x, y), damping=0.1)
        return scores.T, own, posterior.variance(x), posterior.predict(x)

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(of, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    for value, whole in zip(jax.jit(split)(*data), of(*data), strict=True):
        np.testing.assert_allclose(value, whole, rtol=1e-10, atol=1e-13)


@pytest.mark.exhaustive
def test_the_optimizer_takes_gradients_of_each_device():
    """Inside ``shard_map``, with factors that are alike on all: each device's own update."""
    x, y = jnp.sin(jnp.arange(24.0)).reshape(8, 3), jnp.arange(8) % 4
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()))
    _, grads, factors = stats(PARAMS, (x, y))
    like = stats.factor_shapes(PARAMS, (x, y))
    tx = jk.kfac(0.1, like=like, damping=1e-3, norm_constraint=1e-3, damping_mode="pi")
    state = tx.init(PARAMS)
    both = jax.tree.map(lambda g: jnp.stack([g, 3 * g[::-1]]), grads)

    def of(grads):
        own = jax.tree.map(lambda g: g[0], grads)
        return jax.tree.map(lambda x: x[None], tx.update(own, state, factors=factors)[0])

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    found = jax.jit(jax.shard_map(of, mesh=mesh, in_specs=P("rows"), out_specs=P("rows")))(both)
    for k in (0, 1):
        expected = of(jax.tree.map(lambda g, k=k: g[k : k + 1], both))
        np.testing.assert_allclose(found["w"][k], expected["w"][0], rtol=1e-12)
