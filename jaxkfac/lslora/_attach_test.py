"""The adapted model: what it computes, what it trains, what it refuses."""

import functools
import inspect
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxkfac._errors import UnknownLayerError
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.flax import from_nnx
from jaxkfac.interception import find_layers
from jaxkfac.lslora import Adapter, Config, attach, init, stack
from jaxkfac.lslora._config import only_adapters

X = jax.random.normal(jax.random.key(1), (3, 5, 4))


def moved(tree, seed=0):
    """Leaves away from their first values."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)]
    return jax.tree.unflatten(structure, moved)


class ProjectionBlock(nn.Module):
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, _):
        h = nn.DenseGeneral((2, 3), name="q_proj", dtype=self.dtype)(x)
        out = nn.DenseGeneral(4, axis=(-2, -1), name="o_proj", dtype=self.dtype)(jnp.tanh(h))
        return x + out, None


class ProjectionNet(nn.Module):
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(ProjectionBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return nn.Dense(3, name="head", dtype=self.dtype)(
            layers(self.dtype, name="layers")(x.astype(self.dtype), None)[0].mean(1)
        )


@functools.cache
def linen(dtype=jnp.float32):
    """A scanned, rematted model, a config for it, and adapters that do something."""
    model = ProjectionNet(dtype)
    params = model.init(jax.random.key(0), X)
    config = Config(rank=2, alpha=3, target=r".*(q|o)_proj/kernel", dropout=0.25)
    adapters = init(model.apply, config, params, X, key=jax.random.key(2))
    return model.apply, params, config, moved(adapters)


def phi(z, adapter):
    x = jnp.tanh(z / (jnp.abs(adapter.sigma) + 1e-6))
    c = adapter.coefficients
    return c[0] + c[1] * x + c[2] * jnp.sin(jnp.pi * x) + c[3] * jnp.cos(jnp.pi * x)


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_a_layer_computes_the_formula_and_a_fresh_one_the_base(placement, x64):
    def fn(p, x):
        return jnp.tanh(x @ p["kernel"] + p["bias"])

    params = {"kernel": jnp.linspace(-1, 1, 12).reshape(4, 3), "bias": jnp.arange(3.0)}
    x = jnp.linspace(-1, 2, 20).reshape(5, 4)
    config = Config(rank=2, alpha=3, target="kernel", fourier_placement=placement, init_sigma=0.7)
    fresh = init(fn, config, params, x, key=jax.random.key(0))
    adapted = attach(fn, config)
    np.testing.assert_array_equal(adapted(params, fresh, x), fn(params, x))
    adapters = moved(fresh)
    adapter = adapters["kernel"]
    inside = x @ adapter.a
    branch = {
        "output": phi(1.5 * inside @ adapter.b, adapter),
        "bottleneck": 1.5 * phi(inside, adapter) @ adapter.b,
    }[placement]
    want = jnp.tanh(x @ params["kernel"] + branch + params["bias"])
    np.testing.assert_allclose(adapted(params, adapters, x), want, rtol=1e-12)


@pytest.mark.exhaustive
def test_a_scanned_rematted_linen_model_is_the_model_written_out():
    apply, params, config, adapters = linen()
    p, names = params["params"], [f"params/layers/{n}_proj/kernel" for n in "qo"]
    assert set(adapters) == set(names)
    assert adapters[names[0]].a.shape == (2, 4, 2) and adapters[names[0]].b.shape == (2, 2, 6)
    h = X
    for i in range(2):
        one = functools.partial(jax.tree.map, operator.itemgetter(i))
        q, o = (one(p["layers"][f"{n}_proj"]) for n in "qo")
        of_q, of_o = (one(adapters[n]) for n in names)
        z = jnp.einsum("nsd,dhk->nshk", h, q["kernel"])
        z = z + phi(1.5 * h @ of_q.a @ of_q.b, of_q).reshape(z.shape) + q["bias"]
        rows = jnp.tanh(z).reshape(3, 5, 6)
        out = rows @ o["kernel"].reshape(6, 4) + phi(1.5 * rows @ of_o.a @ of_o.b, of_o)
        h = h + out + o["bias"]
    want = h.mean(1) @ p["head"]["kernel"] + p["head"]["bias"]
    got = jax.jit(attach(apply, config))(params, adapters, X)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_base_is_frozen_and_only_adapters_are_trained():
    apply, params, config, adapters = linen()
    adapted = attach(apply, config)

    @jax.jit
    def gradients(params, adapters):
        return jax.grad(lambda p, a: jnp.sin(adapted(p, a, X)).sum(), (0, 1))(params, adapters)

    base, own = gradients(params, adapters)
    assert all(not np.any(g) for g in jax.tree.leaves(base))
    assert all(np.all(g != 0) for g in jax.tree.leaves(own))


def test_curvature_of_the_adapters_covers_every_part_of_them():
    apply, params, config, adapters = linen()
    adapted = attach(apply, config)
    objective = Objective(lambda a, x: adapted(params, a, x), Categorical())
    batch = (X, jnp.array([0, 2, 1]))

    @jax.jit
    def statistics(params, adapters, batch):  # the base is an argument, and no constant
        objective = Objective(lambda a, x: adapted(params, a, x), Categorical())
        return value_grad_and_factors(objective, scales="exact_diagonal")(adapters, batch)

    want = jax.jit(jax.grad(objective))(adapters, batch)
    _, grads, factors = statistics(params, adapters, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), grads, want)
    for name, adapter in adapters.items():
        a, b = factors[f"{name}/a"], factors[f"{name}/b"]
        assert a.a.shape == (2, adapter.a.shape[1], adapter.a.shape[1])
        assert b.g.shape == (2, adapter.b.shape[2], adapter.b.shape[2])
        for part in ("coefficients", "sigma"):
            diagonal = factors[f"{name}/{part}"].diagonal
            assert diagonal.shape == getattr(adapter, part).shape
            assert np.all(diagonal > 0)

    def gradient(x, y):
        return jax.grad(objective)(adapters, (x[None], y[None]))[name]

    each = jax.jit(jax.vmap(gradient))(*batch)
    for part in ("coefficients", "sigma"):
        squares = jnp.square(getattr(each, part)).mean(0)
        np.testing.assert_allclose(factors[f"{name}/{part}"].diagonal, squares, rtol=1e-4)


def test_forward_mode_lets_jvp_through_and_leaves_nothing_uncovered(x64):
    def fn(p, x):
        return x @ p["kernel"]

    params, x = {"kernel": jnp.eye(4, 3)}, jnp.linspace(-1, 1, 20).reshape(5, 4)
    config = Config(rank=2, target="kernel")
    adapters = moved(init(fn, config, params, x, key=jax.random.key(0)))
    adapted = attach(fn, config, forward_mode=True)
    table = find_layers(lambda a, x: adapted(params, a, x), adapters, x)
    assert not table.problems
    _, tangent = jax.jvp(lambda a: adapted(params, a, x).sum(), (adapters,), (adapters,))
    grads = jax.grad(lambda a: attach(fn, config)(params, a, x).sum())(adapters)
    want = sum(jnp.vdot(a, g) for a, g in zip(jax.tree.leaves(adapters), jax.tree.leaves(grads)))
    np.testing.assert_allclose(tangent, want, rtol=1e-11)


@pytest.mark.slow
def test_dropout_is_of_the_key_and_right_on_average():
    def fn(p, x):
        return x @ p["kernel"]

    config = Config(rank=2, alpha=2, target="kernel", fourier_placement="none", dropout=0.25)
    adapter = {"kernel": Adapter(*moved((jnp.ones((6, 2)), jnp.ones((2, 4)))), None, None)}
    base, x = {"kernel": jnp.ones((6, 4))}, jnp.linspace(-1, 1, 12).reshape(2, 6)
    adapted = jax.jit(attach(fn, config))
    plain, key = adapted(base, adapter, x), jax.random.key(3)
    np.testing.assert_array_equal(
        adapted(base, adapter, x, key=key), adapted(base, adapter, x, key=key)
    )
    many = jax.jit(jax.vmap(lambda k: attach(fn, config)(base, adapter, x, key=k)))(
        jax.random.split(key, 4000)
    )
    error = many.std(0) / np.sqrt(4000)
    assert np.all(np.abs(many.mean(0) - plain) < 5 * error) and np.all(many.std(0) > 0)


@pytest.mark.slow
def test_slices_of_a_scan_drop_different_inputs():
    def fn(p, x):
        return jax.lax.scan(lambda c, w: (c, x @ w), x, p["kernel"])[1]

    config = Config(rank=1, target="kernel", dropout=0.5, fourier_placement="none")
    adapters = {"kernel": Adapter(jnp.ones((2, 8, 1)), jnp.ones((2, 1, 1)), None, None)}
    out = attach(fn, config)(
        {"kernel": jnp.zeros((2, 8, 1))}, adapters, jnp.eye(8), key=jax.random.key(0)
    )
    assert {0.0, 32.0} == set(np.unique(out)) and not np.array_equal(out[0], out[1])


def test_bfloat16_models_stay_bfloat16_and_phi_is_computed_in_float32():
    apply, params, config, adapters = linen(jnp.bfloat16)
    got = jax.jit(attach(apply, config))(params, adapters, X)
    assert got.dtype == jnp.bfloat16
    exact = linen()
    want = jax.jit(attach(exact[0], config))(params, adapters, X)
    # Numbers of order one, each rounded to 8 bits some ten times on the way.
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.05)


@pytest.mark.exhaustive
def test_scanned_rematted_nnx_models_and_their_own_dropout_key():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 6, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.down = nnx.Linear(6, 2, rngs=rngs)

            @nnx.split_rngs(splits=2)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(rngs):
                return nnx.Linear(6, 6, rngs=rngs)

            self.blocks = make(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat
            def block(layer, h):
                return jnp.tanh(layer(h))

            return self.down(self.drop(block(self.blocks, self.up(x))))

    apply, params = from_nnx(Model(nnx.Rngs(0)))
    config = Config(rank=2, target=("up", "blocks", "down"))
    adapters = moved(init(apply, config, params, X, key=jax.random.key(0)))
    assert set(adapters) == {"up/kernel", "blocks/kernel", "down/kernel"}
    assert adapters["blocks/kernel"].a.shape == (2, 6, 2)
    adapted = jax.jit(attach(apply, config))
    one, two = (adapted(params, adapters, X, key=jax.random.key(i)) for i in (1, 2))
    assert not np.array_equal(one, two)
    fresh = init(apply, config, params, X, key=jax.random.key(0))
    np.testing.assert_allclose(
        adapted(params, fresh, X, key=jax.random.key(1)),
        jax.jit(apply)(params, X, key=jax.random.key(1)),
        rtol=1e-6,
    )


@pytest.mark.exhaustive
def test_shards_of_a_batch_give_the_gradients_of_the_whole():
    def inside(p, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["s"])[0]

    devices = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(
        inside, mesh=devices, in_specs=(jax.sharding.PartitionSpec(), rows), out_specs=rows
    )
    params, x = {"s": jnp.linspace(-1, 1, 32).reshape(2, 4, 4)}, X.reshape(-1, 4)[:6]
    config = Config(rank=2, target="s")
    adapters = moved(init(inside, config, params, x, key=jax.random.key(0)))
    got, want = (
        jax.jit(jax.grad(lambda a, fn=fn: jnp.sin(attach(fn, config)(params, a, x)).sum()))(
            adapters
        )
        for fn in (sharded, inside)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.slow
def test_a_tied_kernel_is_adapted_in_the_orientation_of_its_layer():
    def fn(p, ids):
        return p["table"][ids] @ p["table"].T

    params, ids = {"table": jnp.linspace(-1, 1, 20).reshape(5, 4)}, jnp.arange(3)
    config = Config(rank=1, target="table", alpha=1, fourier_placement="none")
    adapters = moved(init(fn, config, params, ids, key=jax.random.key(0)))
    adapter = adapters["table"]
    rows = params["table"][ids]
    want = rows @ params["table"].T + rows @ adapter.a @ adapter.b
    np.testing.assert_allclose(attach(fn, config)(params, adapters, ids), want, rtol=1e-5)


@pytest.mark.slow
def test_modules_to_save_replace_the_base_parameters_and_are_trained():
    apply, params, _, _ = linen()
    config = Config(rank=2, target=r".*q_proj/kernel", modules_to_save="params/head/.*")
    adapters = init(apply, config, params, X, key=jax.random.key(0))
    assert {n for n in adapters if "head" in n} == {"params/head/kernel", "params/head/bias"}
    adapted = attach(apply, config)
    shifted = adapters | {"params/head/bias": adapters["params/head/bias"] + 2}
    np.testing.assert_allclose(
        adapted(params, shifted, X), adapted(params, adapters, X) + 2, rtol=1e-5
    )
    grads = jax.grad(lambda a: adapted(params, a, X).sum())(adapters)
    np.testing.assert_allclose(grads["params/head/bias"], np.full(3, 3.0))


def test_a_kernel_has_an_adapter_or_is_trained_itself():
    apply, params, _, _ = linen()
    saved = {"rank": 2, "modules_to_save": "params/head/.*"}
    fresh = lambda config: init(apply, config, params, X, key=jax.random.key(0))
    with pytest.raises(
        ValueError, match="both match 'params/head/kernel': a kernel has an adapter"
    ):
        fresh(Config(target=".*(q_proj|head)/kernel", **saved))
    adapters = fresh(Config(target="all-linear", **saved))
    assert isinstance(adapters["params/head/kernel"], jax.Array) and len(adapters) > 2


@pytest.mark.slow
def test_adapters_on_the_host_are_read_outside_jit():
    params = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3)}
    config, fn = Config(rank=2, target="w"), lambda p, x: x @ p["w"]
    adapters = moved(init(fn, config, params, X, key=jax.random.key(0)))
    adapted = attach(fn, config)
    np.testing.assert_array_equal(
        adapted(params, jax.device_get(adapters), X), adapted(params, adapters, X)
    )


def test_what_does_not_fit_is_named():
    apply, params, config, adapters = linen()
    name = "params/layers/q_proj/kernel"
    adapted = attach(apply, config)
    with pytest.raises(UnknownLayerError, match=r"q_prj.*nearest names are 'params/layers/q_proj"):
        adapted(params, {"params/layers/q_prj/kernel": adapters[name]}, X)
    wrong = adapters[name]._replace(b=jnp.zeros((2, 2, 5)))
    with pytest.raises(ValueError, match=r"q_proj/kernel': expected b of shape \(2, 2, 6\), got"):
        adapted(params, {name: wrong}, X)
    narrow = adapters[name]._replace(a=jnp.zeros((2, 4, 1)), b=jnp.zeros((2, 1, 6)))
    with pytest.raises(ValueError, match="the adapter has rank 1, and the config says 2"):
        adapted(params, {name: narrow}, X)
    plain = {name: adapters[name]._replace(coefficients=None, sigma=None)}
    with pytest.raises(ValueError, match="no coefficients, and fourier_placement is 'output'"):
        adapted(params, plain, X)
    row = {"w": Adapter(jnp.ones((4, 2)), jnp.ones((2, 3)), None, None)}
    plain_config = Config(rank=2, fourier_placement="none")
    with pytest.raises(UnknownLayerError, match="no such layers; w has the example axis lost at"):
        attach(lambda p, x: x @ p["w"], plain_config)({"w": jnp.ones((4, 3))}, row, X[0, 0])
    for other, name_of in ((None, "NoneType"), (stack({"a": {name: adapters[name]}}), "Bank")):
        with pytest.raises(TypeError, match=f"expected {{layer: Adapter}}.*got {name_of}"):
            inspect.unwrap(only_adapters)(other)  # without the type hook, which comes first here
    with pytest.raises(UnknownLayerError, match="whole parameter 'params/haed/bias'"):
        adapted(params, {"params/haed/bias": jnp.zeros(3)}, X)
    bank = stack({"a": {name: adapters[name]}})
    with pytest.raises(ValueError, match="needs the slot's index"):
        adapted(params, bank, X)
    with pytest.raises(ValueError, match="2 indices, and the outputs have 3 examples"):
        adapted(params, bank, X, adapter=jnp.zeros(2, int))
    with pytest.raises(ValueError, match="expected indices from -1 to 0"):
        adapted(params, bank, X, adapter=1)


def test_arguments_in_the_other_order_are_refused_with_the_right_call():
    config, fn = Config(rank=1), lambda params, x: x
    untyped_attach, untyped_init = map(inspect.unwrap, (attach, init))  # without the type hook
    key = jax.random.key(0)
    for call, right in (
        (lambda: untyped_attach(config, fn), "Config; write jk.lslora.attach(apply_fn, config)"),
        (lambda: untyped_init(config, fn, {}, X, key=key), "write jk.lslora.init(apply_fn"),
        (lambda: untyped_attach(fn, fn), "config: expected Config, as in jk.lslora.attach"),
    ):
        with pytest.raises(TypeError, match=re.escape(right)):
            call()
