"""Every program of the interception table: handled with the right factors, or reported.

"Handled" means found, factors equal to the oracle's, gradient equal to `jax.grad`.
"Reported" means a row of the coverage table with the parameter's path and a reason that
names the primitive, and `UncoveredParameterError` unless the caller chooses otherwise.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkfac as jk
from tests._checks import (
    assert_factors_close,
    assert_gradient_is_exact,
    assert_reported,
    assert_reported_and_raises,
    assert_tree_close,
    check,
    equations,
    objective_of,
    squares,
    two_devices,
)
from tests._dense import fisher_block, root_fisher
from tests._likelihoods import mean_loss
from tests._oracle import oracle
from tests._programs import (
    attention,
    attention_params,
    labels,
    mlp,
    mlp_params,
    normal,
    recurrent,
    recurrent_unrolled,
    scanned,
    scanned_params,
    tree,
    unrolled,
)
from tests._taps import PLAIN


def BATCH(n=4, i=4, c=3):
    return normal(1, n, i), labels(2, n, classes=c)


def classifier(apply_fn):
    return jk.Objective(apply_fn, jk.Categorical())


# ------------------------------------------------------------------ bit for bit


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "model, params, batch",
    [
        (mlp, mlp_params, lambda: (normal(1, 4, 4), labels(2, 4))),
        (attention, attention_params, lambda: (normal(1, 2, 3, 4), labels(2, 2, 3))),
        (scanned, lambda: scanned_params(2), lambda: (normal(1, 2, 3, 4), labels(2, 2, 3))),
    ],
    ids=["mlp", "attention", "scan-remat-jit"],
)
def test_gradient_is_equal_bit_for_bit_without_the_compiler(model, params, batch, x64):
    assert_gradient_is_exact(objective_of(model), params(), batch())


# ------------------------------------------------------------------ Flax: NNX


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x))))


class Stacked(nnx.Module):
    """Blocks made by `nnx.vmap` and run by `nnx.scan`, rematerialised."""

    def __init__(self, rngs, remat=True, depth=3):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)
        self.head = nnx.Linear(4, 3, use_bias=False, rngs=rngs)
        self.remat = remat

    def __call__(self, x):
        step = lambda x, block: block(x)
        step = nnx.remat(step) if self.remat else step
        x = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.head(x)


def _stacked_unrolled(p, x, tap):
    for i in range(3):
        w = jax.tree.map(lambda v: v[i], p["blocks"])  # noqa: B023
        normed = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        scale, bias = w["norm"]["scale"], w["norm"]["bias"]
        h = tap.scale("blocks/norm/scale", normed, normed * scale, shape=(4,), at=(i,))
        h = tap.lone_bias("blocks/norm/bias", h + bias, shape=(4,), at=(i,))
        y = h @ w["linear"]["kernel"] + w["linear"]["bias"]
        x = x + jnp.tanh(tap.dense("blocks/linear/kernel", h, y, at=(i,), bias=True))
    return tap.dense("head/kernel", x, x @ p["head"]["kernel"])


def pure(params):
    """Nested dicts of arrays, whatever the framework wraps around them."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        keys = name.removesuffix("/value").removesuffix("/raw_value").split("/")
        node = leaves
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return leaves


@pytest.mark.exhaustive
@pytest.mark.standard_promotion  # Flax and jax.nn mix float32 constants into float64
@pytest.mark.parametrize("remat", [True, False])
def test_nnx_scan_and_remat(x64, remat):
    model = Stacked(nnx.Rngs(0), remat=remat)
    model.eval()
    model = jax.tree.map(lambda v: v.astype(jnp.float64) if v.dtype == jnp.float32 else v, model)
    apply_fn, params = jk.from_nnx(model)
    batch = (normal(1, 3, 4), labels(2, 3))
    objective = classifier(apply_fn)
    value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(params, batch)
    assert_factors_close(factors, oracle(_stacked_unrolled, pure(params), batch), 1e-9)
    assert_tree_close(grads, jax.jit(jax.grad(objective))(params, batch), 1e-10)
    np.testing.assert_allclose(
        value, mean_loss(_stacked_unrolled, "categorical", pure(params), batch), rtol=1e-9
    )


@pytest.mark.exhaustive
def test_nnx_dropout_in_scan_follows_the_key():
    apply_fn, params = jk.from_nnx(Stacked(nnx.Rngs(0)))
    batch = (normal(1, 3, 4), labels(2, 3))
    objective = classifier(apply_fn)
    stats = jax.jit(jk.value_grad_and_factors(objective))
    for seed in (1, 2):
        key = jax.random.key(seed)
        value, grads, factors = stats(params, batch, key=key)
        loss, gradient = jax.jit(jax.value_and_grad(objective))(params, batch, key=key)
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        assert_tree_close(grads, gradient, 1e-6)
    other = stats(params, batch, key=jax.random.key(1))
    assert not np.allclose(other[0], value)
    np.testing.assert_array_equal(other[0], stats(params, batch, key=jax.random.key(1))[0])


class BatchNormed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.linear(x))))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("training", [False, True])
def test_nnx_batch_norm_keeps_its_statistics_and_leaves_the_model_alone(training):
    model = BatchNormed(nnx.Rngs(0))
    model.set_attributes(use_running_average=not training)
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.BatchStat))
    apply_fn, params = jk.from_nnx(model, mutable=() if training else None)
    assert set(pure(params)["norm"]) == {"scale", "bias"}
    objective, batch = classifier(apply_fn), (normal(1, 6, 4), labels(2, 6))
    # while training, the scale meets 1/σ of the batch, which has no example axis: it may be
    # reported; with the running statistics there is nothing in the way
    uncovered = "ignore" if training else "raise"
    stats = jax.jit(jk.value_grad_and_factors(objective, uncovered=uncovered))
    _, grads, factors = stats(params, batch)
    assert_tree_close(grads, jax.jit(jax.grad(objective))(params, batch), 1e-5)
    reported = {path for path, _ in jk.find_layers(objective, params, batch).uncovered}
    assert reported <= ({"norm/scale"} if training else set())
    assert set(factors) == {"linear/kernel", "norm/scale", "norm/bias", "head/kernel"} - reported
    after = jax.tree.map(np.asarray, nnx.state(model, nnx.BatchStat))
    assert_tree_close(after, before, 0.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell])
def test_nnx_recurrent_cells_have_one_block_per_parameter(cell):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(cell(3, 4, rngs=rngs))
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.rnn(x)[:, -1])

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)))
    x = normal(1, 2, 5, 3).astype(jnp.float32)
    objective, batch = classifier(apply_fn), (x, labels(2, 2))
    _, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(params, batch)
    assert_tree_close(grads, jax.jit(jax.grad(objective))(params, batch), 1e-5)
    layers = {layer.weight.path: layer for layer in factors.layers}
    kernels = [p for p in layers if p.endswith("kernel")]
    assert kernels and all(layers[p].stack == () for p in kernels)
    # every input kernel sees the ten rows of x, with or without a ones column
    rows = np.asarray(x).reshape(-1, 3)
    from_input = [k for k in kernels if layers[k].in_features == 3]
    assert from_input
    for name in from_input:
        a = np.asarray(factors[layers[name].name].a)[:3, :3]
        np.testing.assert_allclose(a, rows.T @ rows / 10, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------- Flax: Linen


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm(name="norm")(x)
        return x + jnp.tanh(nn.Dense(4, name="linear")(h)), None


class LinenStacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            nn.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = block(name="blocks")(x, None)
        return nn.Dense(3, use_bias=False, name="head")(x)


@pytest.mark.exhaustive
@pytest.mark.standard_promotion  # Flax and jax.nn mix float32 constants into float64
def test_linen_scan_and_remat(x64):
    model = LinenStacked()
    params = model.init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    params = jax.tree.map(lambda v: v.astype(jnp.float64), params)
    batch = (normal(1, 3, 4), labels(2, 3))
    objective = classifier(lambda p, x: model.apply({"params": p}, x))
    value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(params, batch)
    assert_factors_close(factors, oracle(_stacked_unrolled, params, batch), 1e-9)
    assert_tree_close(grads, jax.jit(jax.grad(objective))(params, batch), 1e-10)


# ------------------------------------------------------------ loops over data


@pytest.mark.exhaustive
def test_lax_map_over_examples(x64):
    def model(p, x, tap):
        row = lambda x: jnp.tanh(x @ p["up"]["kernel"] + p["up"]["bias"])
        return lax.map(row, x) @ p["down"]["kernel"] + p["down"]["bias"]

    *_, factors = check(model, mlp_params(), BATCH(), oracle_model=mlp)
    assert factors.layer("up/kernel").stack == ()


@pytest.mark.exhaustive
def test_lax_map_in_batches(x64):
    def model(p, x, tap):
        row = lambda x: jnp.tanh(x @ p["up"]["kernel"] + p["up"]["bias"])
        return lax.map(row, x, batch_size=2) @ p["down"]["kernel"] + p["down"]["bias"]

    check(model, mlp_params(), BATCH(), oracle_model=mlp)


@pytest.mark.exhaustive
def test_fori_loop_over_data(x64):
    def model(p, x, tap):
        def body(t, h):
            return jnp.tanh(lax.dynamic_index_in_dim(x, t, 1, False) @ p["w"] + h @ p["u"] + p["b"])

        h = lax.fori_loop(0, x.shape[1], body, jnp.zeros((x.shape[0], 4), x.dtype))
        return tap.dense("head", h, h @ p["head"])

    p = tree(26, w=(2, 4), u=(4, 4), b=(4,), head=(4, 3))
    batch = (normal(1, 3, 6, 2), labels(2, 3))
    check(model, p, batch, oracle_model=recurrent_unrolled)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("scales", ["diagonal", "full_block"])
def test_a_bias_added_to_a_sum_of_products_belongs_to_neither(x64, scales):
    """It could be the ones column of either; as it is written, so it is read."""

    def of_the_sum(p, x, tap):
        z = tap.dense("w", x, x @ p["w"]) + tap.dense("u", jnp.sin(x), jnp.sin(x) @ p["u"])
        h = jnp.tanh(tap.lone_bias("b", z + p["b"], shape=(5,)))
        return tap.dense("head", h, h @ p["head"])

    def of_the_first(p, x, tap):
        z = tap.dense("w", x, x @ p["w"] + p["b"], bias=True)
        h = jnp.tanh(z + tap.dense("u", jnp.sin(x), jnp.sin(x) @ p["u"]))
        return tap.dense("head", h, h @ p["head"])

    p = tree(61, w=(4, 5), u=(4, 5), b=(5,), head=(5, 3))
    batch = (normal(1, 3, 2, 4), labels(2, 3, 2))
    *_, factors = check(of_the_sum, p, batch, scales=scales)
    assert factors.layer("b").kind == "bias" and factors.layer("w").bias is None
    *_, factors = check(of_the_first, p, batch, scales=scales)
    assert factors.layer("w").bias.path == "b" and factors.layer("u").bias is None


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("constant", [3.0, 0.5, -1.0, "neg"])
def test_a_bias_times_a_constant_is_a_block_of_its_own(x64, constant):
    """The ones column of its product would be c, which A does not know."""

    def model(p, x, tap):
        b = -p["b"] if constant == "neg" else constant * p["b"]
        return tap.dense("w", x, x @ p["w"]) + b

    p, batch = tree(62, w=(4, 3), b=(3,)), BATCH()
    objective = objective_of(model)
    *_, factors = jk.value_grad_and_factors(objective)(p, batch)
    assert factors.layer("b").kind == "bias" and factors.layer("w").bias is None
    root = root_fisher(model, p, batch, fisher="empirical")
    squares = np.diag(fisher_block(root, "b"))
    assert_factors_close({"w": factors["w"]}, {"w": oracle(model, p, batch)["w"]}, 1e-10)
    np.testing.assert_allclose(factors["b"].diagonal, squares, rtol=1e-10)
    corrected = jk.correct_eigenvalues(objective, jk.eigendecompose(factors))(p, batch)
    np.testing.assert_allclose(corrected["b"].raw_diagonal, squares, rtol=1e-10)
    trace = np.trace(fisher_block(root, "w"))
    np.testing.assert_allclose(corrected["w"].raw_values.sum(), trace, rtol=1e-10)


def test_debug_print_is_kept(capfd):
    def apply_fn(p, x):
        y = mlp(p, x, PLAIN)
        jax.debug.print("the largest output is finite: {}", jnp.isfinite(y).all())
        return y

    stats = jax.jit(jk.value_grad_and_factors(classifier(apply_fn)))
    jax.block_until_ready(stats(mlp_params(), BATCH()))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("the largest output is finite: True") == 1


@pytest.mark.slow
def test_debug_print_inside_scan_is_kept(capfd):
    def apply_fn(p, x):
        def step(x, w):
            jax.debug.print("step {}", x.shape[0] + 0 * x[0, 0].astype(int))
            return jnp.tanh(x @ w), None

        return lax.scan(step, x, p["w"])[0] @ p["head"]

    stats = jax.jit(jk.value_grad_and_factors(classifier(apply_fn)))
    jax.block_until_ready(stats(tree(1, w=(3, 4, 4), head=(4, 3)), BATCH()))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("step 4") == 3


def test_random_keys_may_be_part_of_the_inputs(x64):
    def apply_fn(p, inputs):
        x, key = inputs
        return mlp(p, jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0), PLAIN)

    x, y = BATCH()
    key = jax.random.key(3)
    value, grads, factors = jax.jit(jk.value_grad_and_factors(classifier(apply_fn)))(
        mlp_params(), ((x, key), y)
    )
    dropped = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)
    assert_factors_close(factors, oracle(mlp, mlp_params(), (dropped, y)), 1e-10)


@pytest.mark.slow
def test_vmap_over_the_whole_is_an_ensemble(x64):
    members = [mlp_params(seed) for seed in (1, 2, 3)]
    stacked = jax.tree.map(lambda *v: jnp.stack(v), *members)
    stats = jk.value_grad_and_factors(objective_of(mlp))
    value, grads, factors = jax.jit(jax.vmap(stats, in_axes=(0, None)))(stacked, BATCH())
    for i, member in enumerate(members):
        one = jax.tree.map(lambda v: v[i], factors)  # noqa: B023
        assert_factors_close(one, oracle(mlp, member, BATCH()), 1e-10)


def test_donated_parameters_are_taken_as_plain_jax_takes_them():
    def step(stats, p, batch):
        _, grads, *_ = stats(p, batch)
        return jax.tree.map(lambda w, g: w - g, p, grads)

    objective = objective_of(mlp)
    mine = jax.jit(functools.partial(step, jk.value_grad_and_factors(objective)), donate_argnums=0)
    plain = jax.jit(functools.partial(step, jax.value_and_grad(objective)), donate_argnums=0)
    ours, theirs = mlp_params(), mlp_params()
    moved, expected = mine(ours, BATCH()), plain(theirs, BATCH())
    assert_tree_close(moved, expected, 1e-6)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert x.is_deleted() == y.is_deleted()


def test_donation_to_an_inner_jit_is_kept_or_harmless(x64):
    def model(p, x, tap):
        inner = jax.jit(lambda w, x: jnp.tanh(x @ w), donate_argnums=1)
        return inner(p["up"]["kernel"], x * 1.0) @ p["down"]["kernel"]

    def plain(p, x, tap):
        h = jnp.tanh(tap.dense("up/kernel", x, x @ p["up"]["kernel"]))
        return tap.dense("down/kernel", h, h @ p["down"]["kernel"])

    p = tree(2, up__kernel=(4, 5), down__kernel=(5, 3))
    check(model, p, BATCH(), oracle_model=plain)


@pytest.mark.slow
def test_tracing_twice_leaks_nothing(x64):
    with jax.checking_leaks():
        jax.jit(jk.value_grad_and_factors(objective_of(scanned)))(
            scanned_params(), (normal(1, 2, 3, 4), labels(2, 2, 3))
        )


# ------------------------------------------------------------------ sharding


def _jit_shardings(jaxpr):
    found = []
    for eqn in equations(jaxpr):
        for key in ("in_shardings", "out_shardings", "sharding"):
            value = eqn.params.get(key, ())
            value = value if isinstance(value, tuple) else (value,)
            found += [s.spec for s in value if isinstance(s, NamedSharding)]
    return found


@pytest.mark.slow
def test_inner_jit_shardings_and_constraints_are_kept(x64):
    with two_devices() as devices:
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))
        rows = NamedSharding(mesh, P("data"))
        whole = NamedSharding(mesh, P())

        def model(p, x, tap):
            inner = jax.jit(
                lambda w, x: jnp.tanh(x @ w), in_shardings=(whole, rows), out_shardings=rows
            )
            h = inner(p["up"]["kernel"], x)
            h = lax.with_sharding_constraint(h, rows)
            return h @ p["down"]["kernel"]

        def plain(p, x, tap):
            h = jnp.tanh(tap.dense("up/kernel", x, x @ p["up"]["kernel"]))
            return tap.dense("down/kernel", h, h @ p["down"]["kernel"])

        p, batch = tree(2, up__kernel=(4, 5), down__kernel=(5, 3)), BATCH()
        stats = jk.value_grad_and_factors(objective_of(model))
        kept = _jit_shardings(jax.make_jaxpr(stats)(p, batch))
        original = _jit_shardings(jax.make_jaxpr(objective_of(model))(p, batch))
        assert original and kept.count(P("data")) >= original.count(P("data"))
        value, grads, factors = jax.jit(stats)(p, batch)
        assert_factors_close(factors, oracle(plain, p, batch), 1e-10)
        assert_tree_close(
            grads, jax.grad(lambda p: mean_loss(plain, "categorical", p, batch))(p), 1e-10
        )


@pytest.mark.exhaustive  # tests/explicit_mesh_test.py has it
def test_data_parallel_placement_leaves_the_factors_unchanged(x64):
    with two_devices() as devices:
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))
        p, batch = scanned_params(), (normal(1, 4, 3, 4), labels(2, 4, 3))
        expected = oracle(unrolled, p, batch)
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        p = jax.device_put(p, NamedSharding(mesh, P()))
        *_, factors = jax.jit(jk.value_grad_and_factors(objective_of(scanned)))(p, batch)
        assert_factors_close(factors, expected, 1e-10)


def test_shard_map_inside_the_model_counts_globally(x64):
    with two_devices() as devices:
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))

        def apply_fn(p, x):
            body = lambda p, x: mlp(p, x, PLAIN)
            return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(
                p, x
            )

        p, batch = mlp_params(), BATCH()
        objective = classifier(apply_fn)
        value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(p, batch)
        assert_tree_close(
            grads, jax.grad(lambda p: mean_loss(mlp, "categorical", p, batch))(p), 1e-10
        )
        assert_factors_close(factors, oracle(mlp, p, batch), 1e-10)
        assert float(factors.terms) == 4
        assert all(float(c) == 4 for c in factors.a_counts.values())


@pytest.mark.exhaustive
def test_shard_map_with_scan_and_explicit_cast(x64):
    """A cast of varying axes is a view: the parameter is still a parameter behind it."""
    with two_devices() as devices:
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))

        def apply_fn(p, x):
            def body(p, x):
                head = lax.pcast(p["head"], "data", to="varying")
                x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])
                return x @ head

            return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(
                p, x
            )

        def plain(p, x, tap):
            for i in range(2):
                x = jnp.tanh(tap.dense("w", x, x @ p["w"][i], at=(i,)))
            return tap.dense("head", x, x @ p["head"])

        p, batch = tree(3, w=(2, 4, 4), head=(4, 3)), BATCH()
        value, grads, factors = jax.jit(jk.value_grad_and_factors(classifier(apply_fn)))(p, batch)
        assert_factors_close(factors, oracle(plain, p, batch), 1e-10)
        assert_tree_close(
            grads, jax.grad(lambda p: mean_loss(plain, "categorical", p, batch))(p), 1e-10
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", ["rows", "outputs"])
def test_meshes_with_explicit_axis_types(x64, split):
    with two_devices():
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
        p, batch = tree(4, w=(4, 6), v=(6, 3)), BATCH()

        def plain(p, x, tap):
            h = jnp.tanh(tap.dense("w", x, x @ p["w"]))
            return tap.dense("v", h, h @ p["v"])

        def model(p, x, tap):
            h = jnp.tanh(x @ p["w"])
            if split == "outputs":  # the contraction over the split axis names its result
                return jnp.einsum("ni,io->no", h, p["v"], out_sharding=P())
            return h @ p["v"]

        expected = oracle(plain, p, batch)
        gradient = jax.grad(lambda p: mean_loss(plain, "categorical", p, batch))(p)
        with jax.set_mesh(mesh):
            if split == "rows":
                batch = jax.device_put(batch, P("x"))
                p = jax.device_put(p, P())
            else:
                batch = jax.device_put(batch, P())
                p = {"w": jax.device_put(p["w"], P(None, "x")), "v": jax.device_put(p["v"], P("x"))}
            jax.jit(jax.grad(objective_of(model)))(p, batch)  # plain JAX accepts the program
            value, grads, factors = jax.jit(jk.value_grad_and_factors(objective_of(model)))(
                p, batch
            )
        assert_tree_close(jax.tree.map(np.asarray, grads), gradient, 1e-10)
        assert_factors_close(factors, expected, 1e-10)


# -------------------------------------------------------- checkpoint policies


def _policy_model(policy):
    def apply_fn(p, x):
        @functools.partial(jax.checkpoint, policy=policy)
        def block(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return lax.scan(block, x, p)[0]

    return apply_fn


def _policy_case():
    p = tree(5, up=(3, 7, 11), down=(3, 11, 7))
    return p, (normal(1, 5, 7), labels(2, 5, classes=7))


def _first_scan_outputs(fn, *args):
    scan = next(e for e in equations(jax.make_jaxpr(fn)(*args)) if e.primitive.name == "scan")
    return [v.aval.shape for v in scan.outvars]


@pytest.mark.default(2, slow=0)
@pytest.mark.parametrize(
    "policy",
    [
        "dots_saveable",
        "nothing_saveable",
        "everything_saveable",
        "dots_with_no_batch_dims_saveable",
    ],
)
def test_slots_are_never_residuals_of_a_checkpoint(policy):
    """The forward scan hands the same shapes to the backward scan as without factors."""
    p, batch = _policy_case()
    objective = classifier(_policy_model(getattr(jax.checkpoint_policies, policy)))
    ours = _first_scan_outputs(jk.value_grad_and_factors(objective), p, batch)
    slots = [(3, 7, 7), (3, 11, 11)]
    assert not [shape for shape in ours if shape in slots]
    plain = _first_scan_outputs(jax.grad(objective), p, batch)
    size = lambda shapes: sum(int(np.prod(s)) for s in shapes)
    # inputs of a product are saved once; allow what the gradient itself keeps, nothing more
    assert size(ours) <= size(plain), (ours, plain)


def test_a_checkpoint_policy_is_kept():
    """dots_saveable keeps the products, so the backward pass has fewer than without."""
    p, batch = _policy_case()

    def forward_products(policy):
        objective = classifier(_policy_model(getattr(jax.checkpoint_policies, policy)))
        outputs = _first_scan_outputs(jk.value_grad_and_factors(objective), p, batch)
        return (3, 5, 11) in outputs

    assert forward_products("dots_saveable")
    assert not forward_products("nothing_saveable")


def test_named_values_are_saved_by_their_policy():
    from jax.ad_checkpoint import checkpoint_name

    p, batch = _policy_case()

    def apply_fn(p, x):
        @functools.partial(
            jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("hidden")
        )
        def block(x, w):
            return x + jnp.tanh(checkpoint_name(x @ w["up"], "hidden")) @ w["down"], None

        return lax.scan(block, x, p)[0]

    outputs = _first_scan_outputs(jk.value_grad_and_factors(classifier(apply_fn)), p, batch)
    assert (3, 5, 11) in outputs and (3, 7, 7) not in outputs


def test_prevent_cse_is_kept():
    def flags(fn, *args):
        return {
            e.params["prevent_cse"]
            for e in equations(jax.make_jaxpr(fn)(*args))
            if "prevent_cse" in e.params
        }

    def apply_fn(p, x):
        return jax.checkpoint(lambda x: jnp.tanh(x @ p["w"]), prevent_cse=False)(x)

    objective = classifier(apply_fn)
    p = tree(6, w=(4, 3))
    assert flags(jk.value_grad_and_factors(objective), p, BATCH()) == flags(
        jax.grad(objective), p, BATCH()
    )


def test_slots_of_scan_constants_are_not_stacked_over_time(x64):
    p = tree(26, w=(2, 9), u=(9, 9), b=(9,), head=(9, 3))
    batch = (normal(1, 3, 13, 2), labels(2, 3))
    jaxpr = jax.make_jaxpr(jk.value_grad_and_factors(objective_of(recurrent)))(p, batch)
    shapes = {v.aval.shape for e in equations(jaxpr) for v in e.outvars if hasattr(v.aval, "shape")}
    assert not [
        s for s in shapes if len(s) == 3 and s[0] == 13 and s[1:] in ((9, 9), (2, 2), (3, 3))
    ]


# ------------------------------------------------- views, dtypes, equations kept


def test_casts_for_each_projection_still_share_their_input():
    def apply_fn(p, x):
        q, k, v = (x.astype(jnp.bfloat16) @ p[n].astype(jnp.bfloat16) for n in "qkv")
        return (jnp.tanh(q) * k + v).astype(jnp.float32)

    p = jax.tree.map(lambda w: w.astype(jnp.float32), tree(7, q=(4, 3), k=(4, 3), v=(4, 3)))
    layers = jk.find_layers(apply_fn, p, normal(1, 5, 4).astype(jnp.float32))
    assert len({layers[n].input for n in "qkv"}) == 1


def test_casts_inside_remat_and_jit_still_share_their_input():
    def apply_fn(p, x):
        f = jax.jit(lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        q, k = f(p["q"], x), f(p["k"], x)
        v = jax.checkpoint(f)(p["v"], x)
        return (jnp.tanh(q) * k + v).astype(jnp.float32)

    p = jax.tree.map(lambda w: w.astype(jnp.float32), tree(7, q=(4, 3), k=(4, 3), v=(4, 3)))
    layers = jk.find_layers(apply_fn, p, normal(1, 5, 4).astype(jnp.float32))
    assert len({layers[n].input for n in "qkv"}) == 1


def test_different_values_are_not_shared(x64):
    def apply_fn(p, x):
        return jnp.tanh(x @ p["q"]) * (2 * x @ p["k"])

    layers = jk.find_layers(apply_fn, tree(8, q=(4, 3), k=(4, 3)), normal(1, 5, 4))
    assert layers["q"].input != layers["k"].input


@pytest.mark.slow
def test_precision_and_preferred_type_of_a_product_are_kept():
    def apply_fn(p, x):
        return lax.dot_general(
            x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16), (((1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip

    p = {"w": normal(1, 4, 3).astype(jnp.float32)}
    batch = (normal(1, 5, 4).astype(jnp.float32), labels(2, 5))
    objective = classifier(apply_fn)
    stats = jk.value_grad_and_factors(objective)
    value, grads, factors = stats(p, batch)
    loss, gradient = jax.value_and_grad(objective)(p, batch)
    np.testing.assert_array_equal(value, loss)
    np.testing.assert_array_equal(grads["w"], gradient["w"])
    kept = [
        e
        for e in equations(jax.make_jaxpr(stats)(p, batch))
        if e.primitive.name == "dot_general"
        and e.params["preferred_element_type"] == jnp.float32
        and e.invars[0].aval.dtype == jnp.bfloat16
        and e.outvars[0].aval.shape == (5, 3)
        and "HIGHEST" in str(e.params["precision"])
    ]
    assert kept


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("weight", ["w[None]", "w.T", "reshape", "cast", "w * 1.0"])
def test_views_of_a_parameter(x64, weight):
    def plain(p, x, tap):
        return tap.dense("w", x, x @ p["w"])

    def model(p, x, tap):
        w = p["w"]
        if weight == "w[None]":
            return (x[:, None] @ w[None])[:, 0]
        if weight == "w.T":
            return (w.T @ x.T).T
        if weight == "reshape":
            return jnp.einsum("nab,abo->no", x.reshape(-1, 2, 2), w.reshape(2, 2, 3))
        if weight == "cast":
            return (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(x.dtype)
        return x @ (w * 1.0)

    tolerance = 1e-6 if weight == "cast" else 1e-10
    check(model, tree(9, w=(4, 3)), BATCH(), oracle_model=plain, tolerance=tolerance)


@pytest.mark.default(2, slow=0)
@pytest.mark.parametrize("scale", ["w / sqrt(d)", "0.25 * w", "-w"])
def test_constant_scale_of_a_parameter(x64, scale):
    """The block is the curvature of W, not of the view c W: A ⊗ G has the factor c²."""

    def apply_fn(p, x):
        w = {"w / sqrt(d)": p["w"] / np.sqrt(4.0), "0.25 * w": 0.25 * p["w"], "-w": -p["w"]}[scale]
        return x @ w

    c = {"w / sqrt(d)": 0.5, "0.25 * w": 0.25, "-w": -1.0}[scale]

    def plain(p, x, tap):
        return tap.dense("w", x, x @ (c * p["w"]))

    p, batch = tree(10, w=(4, 3)), BATCH()
    value, grads, factors = jk.value_grad_and_factors(classifier(apply_fn))(p, batch)
    assert_tree_close(
        grads, jax.grad(lambda p: mean_loss(plain, "categorical", p, batch))(p), 1e-12
    )
    expected = oracle(plain, p, batch)["w"]
    found = np.kron(factors["w"].a, factors["w"].g)
    product = np.kron(expected.a, expected.g)
    np.testing.assert_allclose(found, c * c * product, rtol=1e-10, atol=1e-12)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("integer", [int, np.int64])  # named arrays of Penzai count in NumPy
def test_a_lookup_may_keep_its_axis(x64, integer):
    numbers = lax.GatherDimensionNumbers((0, integer(3)), (), (integer(1),))

    def model(p, ids, tap):
        y = lax.gather(p["e"], ids[..., None], numbers, (4, 1), mode="clip")  # (4, n, s, 1)
        y = tap.embedding("e", ids, jnp.moveaxis(y[..., 0], 0, -1), size=7)
        return tap.dense("head", y, y @ p["head"])

    check(model, tree(0, e=(4, 7), head=(4, 3)), (labels(3, 2, 3, classes=7), labels(9, 2, 3)))


@pytest.mark.slow
def test_indexed_slices_of_a_stacked_parameter_have_their_own_names(x64):
    def model(p, x, tap):
        h = jnp.tanh(tap.dense("w[1]", x, x @ p["w"][1]))
        return tap.dense("w[0]", h, h @ p["w"][0])

    p = tree(11, w=(2, 4, 4))
    check(model, p, BATCH(c=4))
    layers = jk.find_layers(lambda p, x: model(p, x, PLAIN), p, BATCH()[0])
    assert layers["w[1]"].weight.index == (1,)


def _dynamic_slices(p, x, tap):
    def step(x, i):
        return jnp.tanh(x @ lax.dynamic_index_in_dim(p["w"], i, 0, keepdims=False)), None

    return lax.scan(step, x, jnp.arange(3))[0] @ p["head"]


def _dynamic_slices_unrolled(p, x, tap):
    for i in range(3):
        x = jnp.tanh(tap.dense("w", x, x @ p["w"][i], at=(i,)))
    return tap.dense("head", x, x @ p["head"])


def _handled_or_reported(model, p, batch, path, primitive, **options):
    """Right factors if the table claims the layer, else a row and an error."""
    objective = objective_of(model)
    rows = [q for q, _ in jk.find_layers(objective, p, batch).uncovered]
    if path in rows:
        assert_reported_and_raises(objective, p, batch, path, primitive)
        return False
    check(model, p, batch, **options)
    return True


@pytest.mark.exhaustive
def test_dynamic_slices_in_a_loop(x64):
    p = tree(12, w=(3, 4, 4), head=(4, 3))
    _handled_or_reported(
        _dynamic_slices,
        p,
        BATCH(),
        "w",
        "dynamic_slice|gather",
        oracle_model=_dynamic_slices_unrolled,
    )


@pytest.mark.slow
def test_concatenated_projections(x64):
    def model(p, x, tap):
        q, k, v = jnp.split(x @ jnp.concatenate([p["q"], p["k"], p["v"]], axis=1), 3, axis=1)
        return jnp.tanh(q) * k + v

    def plain(p, x, tap):
        q, k, v = (tap.dense(n, x, x @ p[n]) for n in "qkv")
        return jnp.tanh(q) * k + v

    p = tree(13, q=(4, 3), k=(4, 3), v=(4, 3))
    _handled_or_reported(model, p, BATCH(), "q", "concatenate", oracle_model=plain)


@pytest.mark.slow
def test_stacked_projections(x64):
    def model(p, x, tap):
        q, k = jnp.einsum("ni,eio->eno", x, jnp.stack([p["q"], p["k"]]))
        return jnp.tanh(q) * k

    def plain(p, x, tap):
        q, k = (tap.dense(n, x, x @ p[n]) for n in "qk")
        return jnp.tanh(q) * k

    p = tree(13, q=(4, 3), k=(4, 3))
    _handled_or_reported(model, p, BATCH(), "q", "concatenate|stack", oracle_model=plain)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("op", ["reduce_precision", "optimization_barrier"])
def test_precision_reduction_and_barriers_around_weights(x64, op):
    def model(p, x, tap):
        w = p["w"]
        w = (
            lax.reduce_precision(w, 11, 52)
            if op == "reduce_precision"
            else lax.optimization_barrier(w)
        )
        return tap.dense("w", x, x @ w)

    _handled_or_reported(model, tree(14, w=(4, 3)), BATCH(), "w", op)


def test_parameter_sliced_into_two_layers(x64):
    """A fused kernel split by columns after the read: handled as parts, or reported."""

    def model(p, x, tap):
        gate, up = p["w"][:, :3], p["w"][:, 3:]
        return jnp.tanh(x @ gate) * (x @ up)

    objective, p, batch = objective_of(model), tree(15, w=(4, 6)), BATCH()
    uncovered = [q for q, _ in jk.find_layers(objective, p, batch).uncovered]
    if uncovered:
        assert_reported_and_raises(objective, p, batch, "w", "slice|cut .* before `dot_general`")
    else:
        _, grads, factors = jk.value_grad_and_factors(objective)(p, batch)
        assert_tree_close(grads, jax.grad(objective)(p, batch), 1e-12)
        x = np.asarray(batch[0])
        for name in factors:
            np.testing.assert_allclose(factors[name].a, x.T @ x / len(x), atol=1e-10)


# ------------------------------------------------- convolution and attention


@pytest.mark.exhaustive
def test_convolution_inside_vmap(x64):
    def model(p, x, tap):
        def one(x):
            return lax.conv_general_dilated(
                x[None], p["k"], (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC")
            )[0]

        return jnp.tanh(jax.vmap(one)(x)).mean(axis=1) @ p["w"]

    def plain(p, x, tap):
        from tests._taps import patches

        y = lax.conv_general_dilated(
            x, p["k"], (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC")
        )
        y = jnp.tanh(tap.dense("k", patches(x, (3,)), y, in_axes=2)).mean(axis=1)
        return tap.dense("w", y, y @ p["w"])

    p, batch = tree(16, k=(3, 2, 4), w=(4, 3)), (normal(1, 3, 7, 2), labels(2, 3))
    _handled_or_reported(model, p, batch, "k", "conv", oracle_model=plain)


@pytest.mark.slow
def test_grouped_convolution(x64):
    def model(p, x, tap):
        y = lax.conv_general_dilated(
            x, p["k"], (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=2
        )
        return jnp.tanh(y).mean(axis=1) @ p["w"]

    objective = objective_of(model)
    p, batch = tree(17, k=(3, 2, 6), w=(6, 3)), (normal(1, 3, 7, 4), labels(2, 3))
    if jk.find_layers(objective, p, batch).uncovered:
        assert_reported_and_raises(objective, p, batch, "k", "conv")
    else:  # one layer per group: three outputs and six inputs each
        _, grads, factors = jk.value_grad_and_factors(objective)(p, batch)
        assert factors.layer("k").stack == (2,)
        assert factors["k"].a.shape == (2, 6, 6) and factors["k"].g.shape == (2, 3, 3)
        assert_tree_close(grads, jax.grad(objective)(p, batch), 1e-10)


@pytest.mark.exhaustive
@pytest.mark.standard_promotion  # Flax and jax.nn mix float32 constants into float64
@pytest.mark.parametrize("grouped", [False, True])
def test_dot_product_attention(x64, grouped):
    kv = 1 if grouped else 2

    def attend(p, x, projections):
        q, k, v = projections
        n, s, _ = x.shape
        q, k, v = q.reshape(n, s, 2, 3), k.reshape(n, s, kv, 3), v.reshape(n, s, kv, 3)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    def model(p, x, tap):
        y = attend(p, x, [tap.dense(n, x, x @ p[n]) for n in "qkv"]).reshape(*x.shape[:2], 6)
        return tap.dense("o", y, y @ p["o"])

    p = tree(18, q=(4, 6), k=(4, 3 * kv), v=(4, 3 * kv), o=(6, 3))
    here = jnp.asarray(np.arange(5) < np.array([[5], [2]]))
    batch = (normal(1, 2, 5, 4), labels(2, 2, 5), here)
    check(model, p, batch, tolerance=1e-6)  # the softmax inside runs in float32
    check(model, p, batch, positions=here, tolerance=1e-6)


@pytest.mark.slow
def test_custom_derivatives_without_parameters_are_left_alone(x64):
    @jax.custom_vjp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))  # straight through

    @jax.custom_jvp
    def square(x):
        return x * x

    square.defjvp(lambda x, t: (square(x[0]), 3.0 * t[0]))  # deliberately not 2 x

    def model(p, x, tap):
        h = clipped(tap.dense("w", x, x @ p["w"])) + square(x[:, :3])
        h = jax.nn.silu(h)
        return tap.dense("v", square(h), square(h) @ p["v"])

    check(model, tree(19, w=(4, 3), v=(3, 3)), BATCH())


# ------------------------------------------------------------ low-rank products


@pytest.mark.slow
def test_unmerged_low_rank_adapters_are_two_dense_layers(x64):
    def model(p, x, tap):
        h = tap.dense("a", x, x @ p["a"])
        return lax.stop_gradient(x @ p["base"]) + tap.dense("b", h, h @ p["b"])

    p = tree(20, a=(4, 2), b=(2, 3), base=(4, 3))
    base = p.pop("base")

    def with_base(p, x, tap):
        return model({**p, "base": base}, x, tap)

    check(with_base, p, BATCH())


# ---------------------------------------------------------------- reported


def _weight_norm(p, x):
    return x @ (p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0))


def _spectral_norm(p, x):
    w = p["v"]
    u = lax.stop_gradient(jnp.ones(w.shape[1], w.dtype))
    return x @ (w / jnp.linalg.norm(w @ u)) * 1.0


def _merged_adapter(p, x):
    return x @ (p["w"] + p["a"] @ p["b"])


def _product_of_parameters(p, x):
    return x @ (p["a"] @ p["b"])


def _rounded(p, x):
    """The rule passes the cotangent on, where the primal's own derivative is zero."""

    @jax.custom_vjp
    def matmul(w, x):
        return jnp.round(8 * x @ w) / 8

    matmul.defvjp(lambda w, x: (matmul(w, x), (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))
    return matmul(p["w"], x)


def _modified_in_the_carry(p, x):
    """An inner loop that trains the weight: not a layer of the original weight."""

    def step(w, _):
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), None

    w, _ = lax.scan(step, p["w"], None, length=2)
    return x @ w


def _data_dependent_weight(p, x):
    return x[..., :3] + jnp.mean(x, tuple(range(x.ndim - 1))) @ p["w"]


def _sorted(p, x):
    return x @ jnp.sort(p["w"], axis=0)


def _parameter_squared(p, x):
    return jnp.einsum("ni,io,io->no", x, p["w"], p["w"])


COMPUTED = {
    "weight norm": (_weight_norm, dict(v=(4, 3), g=(3,)), ["v", "g"]),
    "spectral norm": (_spectral_norm, dict(v=(4, 3)), ["v"]),
    "W + A B": (_merged_adapter, dict(w=(4, 3), a=(4, 2), b=(2, 3)), ["a", "b"]),
    "A B": (_product_of_parameters, dict(a=(4, 2), b=(2, 3)), ["a", "b"]),
    "sorted W": (_sorted, dict(w=(4, 3)), ["w"]),
    "W squared": (_parameter_squared, dict(w=(4, 3)), ["w"]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", list(COMPUTED))
def test_what_is_behind_a_computed_weight_has_squares_of_each_examples_gradient(x64, case):
    apply_fn, shapes, behind = COMPUTED[case]
    p, batch, objective = tree(21, **shapes), BATCH(), classifier(apply_fn)
    factors = jk.value_grad_and_factors(objective)(p, batch).factors
    expected = squares(objective, p, batch, behind)
    assert_factors_close({name: factors[name] for name in behind}, expected, 1e-10)


REPORTED = {
    "custom_vjp": (_rounded, dict(w=(4, 3)), "w", "custom_vjp_call`, where `round`"),
    "carry, modified": (_modified_in_the_carry, dict(w=(4, 3)), "w", "scan|sub|dot_general|carr"),
    "W times data": (_data_dependent_weight, dict(w=(4, 3)), "w", "lost at `dot_general`"),
}


@pytest.mark.default(2, slow=0)
@pytest.mark.parametrize("case", list(REPORTED))
def test_program_is_reported_by_path_and_primitive(x64, case):
    apply_fn, shapes, path, primitive = REPORTED[case]
    p, batch = tree(21, **shapes), BATCH()
    assert_reported_and_raises(classifier(apply_fn), p, batch, path, primitive)


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", list(REPORTED))
def test_reported_programs_keep_their_gradient_when_ignored(x64, case):
    apply_fn, shapes, path, _ = REPORTED[case]
    p, batch = tree(21, **shapes), BATCH()
    objective = classifier(apply_fn)
    value, grads, factors = jk.value_grad_and_factors(objective, uncovered="ignore")(p, batch)
    assert_tree_close((value, grads), jax.value_and_grad(objective)(p, batch), 1e-12)
    assert path not in factors


def test_while_loop_is_reported(x64):
    """Reverse mode does not exist for it, but the table does."""

    def apply_fn(p, x):
        body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"]))
        return lax.while_loop(lambda c: c[0] < jnp.argmax(x[0]) + 1, body, (0, x))[1]

    p, batch = tree(22, w=(4, 4)), BATCH()
    assert_reported(apply_fn, p, (batch[0],), "w", "while")
    with pytest.raises(jk.UncoveredParameterError, match="w"):
        jk.value_grad_and_factors(classifier(apply_fn))(p, batch)


def test_foreign_kernel_is_reported(x64):
    def apply_fn(p, x):
        like = jax.ShapeDtypeStruct((x.shape[0], 3), x.dtype)
        return jax.pure_callback(lambda x, w: np.asarray(x) @ np.asarray(w), like, x, p["w"])

    assert_reported(apply_fn, tree(23, w=(4, 3)), (BATCH()[0],), "w", "pure_callback")


def test_one_reported_reader_beside_a_covered_one_is_still_reported(x64):
    """The second reader meets data in a way that no rule covers: it must not be silent."""

    def apply_fn(p, x):
        return x @ p["w"] + jnp.tanh(p["w"]).sum(0) * x.mean()

    assert_reported_and_raises(
        classifier(apply_fn), tree(24, w=(4, 3)), BATCH(), "w", "tanh|mul|sum"
    )


def test_reported_parameter_names_its_place_inside_scan(x64):
    def apply_fn(p, x):
        step = lambda x, w: (jnp.arctan2(x, (w @ w).sum(0)), None)
        return lax.scan(step, x, p["blocks"]["w"])[0] @ p["head"]

    p = {"blocks": tree(25, w=(2, 4, 4)), "head": normal(3, 4, 3)}
    assert_reported_and_raises(classifier(apply_fn), p, BATCH(), "blocks/w", "dot_general")


@pytest.mark.slow
def test_uncovered_parameters_get_a_diagonal_on_request(x64):
    """Squared per-example gradients over the number of terms, shaped like the parameter."""

    def apply_fn(p, x):
        return _weight_norm(p, jnp.tanh(x @ p["w"]))

    p, (x, y) = tree(26, w=(4, 4), v=(4, 3), g=(3,)), BATCH()
    objective = classifier(apply_fn)
    stats = jk.value_grad_and_factors(objective, uncovered="diagonal")
    _, grads, factors = stats(p, (x, y))
    each = [jax.grad(objective)(p, (x[n : n + 1], y[n : n + 1])) for n in range(4)]
    for name in ("v", "g"):
        expected = sum(np.asarray(g[name]) ** 2 for g in each) / 4
        np.testing.assert_allclose(factors[name].diagonal, expected, atol=1e-10)
    assert_tree_close(grads, jax.grad(objective)(p, (x, y)), 1e-10)


# ------------------------------------------------ rows that do not raise


@pytest.mark.slow
def test_penalty_on_a_parameter_is_a_row_and_does_not_raise(x64):
    p, batch = mlp_params(), BATCH()

    def loss(p, batch):
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
        return mean_loss(mlp, "categorical", p, batch) + 0.1 * penalty

    value, grads, factors = jax.jit(jk.value_grad_and_factors(loss, loss_terms=4))(p, batch)
    assert_tree_close((value, grads), jax.value_and_grad(loss)(p, batch), 1e-12)
    assert_factors_close(factors, oracle(mlp, p, batch), 1e-10)
    table = jk.find_layers(loss, p, batch)
    for path in ("up/kernel", "up/bias", "down/kernel", "down/bias"):
        assert re.search(f"{path}.*also in a parameter-only term", str(table))


def test_stopped_parameter_is_a_frozen_row_and_does_not_raise(x64):
    def model(p, x, tap):
        h = jnp.tanh(x @ lax.stop_gradient(p["w"]))
        return tap.dense("v", h, h @ p["v"])

    p, batch = tree(27, w=(4, 5), v=(5, 3)), BATCH()
    objective = objective_of(model)
    value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(p, batch)
    assert_factors_close(factors, oracle(model, p, batch), 1e-10)
    assert not np.asarray(grads["w"]).any()
    assert re.search(r"\bw\b.*frozen", str(jk.find_layers(objective, p, batch)))


@pytest.mark.slow
def test_frozen_subtree_inside_scan_does_not_raise(x64):
    def model(p, x, tap):
        frozen = lax.stop_gradient(p["w"])
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, frozen)
        return tap.dense("v", x, x @ p["v"])

    p, batch = tree(28, w=(2, 4, 4), v=(4, 3)), BATCH()
    check(model, p, batch)
    assert re.search(r"\bw\b.*frozen", str(jk.find_layers(objective_of(model), p, batch)))


@pytest.mark.slow
def test_integer_and_key_leaves_among_the_parameters_are_held_out(x64):
    def apply_fn(p, x):
        scale = p["steps"].astype(x.dtype)
        return mlp(p, x * scale + 0 * jax.random.normal(p["key"], x.shape), PLAIN)

    p = mlp_params() | {"steps": jnp.asarray(2), "key": jax.random.key(0)}
    x, y = BATCH()
    objective = classifier(apply_fn)
    value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(p, (x, y))
    twin = (2 * x, y)
    expected = jax.grad(lambda p: mean_loss(mlp, "categorical", p, twin))(mlp_params())
    for group in ("up", "down"):
        assert_tree_close(grads[group], expected[group], 1e-10)
    assert_factors_close(factors, oracle(mlp, mlp_params(), twin), 1e-10)
    table = jk.find_layers(objective, p, (x, y))
    for path in ("steps", "key"):
        assert path in str(table)


@pytest.mark.slow
def test_parameter_carried_unchanged_through_scan_is_a_view(x64):
    def model(p, x, tap):
        def step(carry, _):
            h, w = carry
            return (jnp.tanh(h @ w), w), None

        (h, w), _ = lax.scan(step, (x, p["w"]), None, length=3)
        return h @ p["head"]

    def plain(p, x, tap):
        for _ in range(3):
            x = jnp.tanh(tap.dense("w", x, x @ p["w"]))
        return tap.dense("head", x, x @ p["head"])

    check(model, tree(29, w=(4, 4), head=(4, 3)), BATCH(), oracle_model=plain)


def test_a_parameter_called_value_keeps_its_name(x64):
    """Only the wrapper that NNX puts around a parameter is left out of a path."""

    def model(p, x, tap):
        h = [tap.dense(f"attention/{n}", x, x @ p["attention"][n]) for n in ("key", "value")]
        return jnp.tanh(h[0]) * h[1]

    check(model, {"attention": tree(30, key=(4, 3), value=(4, 3))}, BATCH())


def test_two_parameters_never_share_a_name(x64):
    def model(p, x, tap):
        y = tap.dense("pair/value", x, x @ p["pair"]["value"])
        return jnp.tanh(y) * tap.dense("pair/raw_value", x, x @ p["pair"]["raw_value"])

    check(model, {"pair": tree(31, value=(4, 3), raw_value=(4, 3))}, BATCH())


# ------------------------------------------------------------------ the table


def test_table_names_path_kind_sizes_uses_and_what_is_not_covered(x64):
    def apply_fn(p, x):
        return jnp.arctan2(attention(p["net"], x, PLAIN), jnp.cumsum(p["gain"]))

    p = {"net": attention_params(), "gain": normal(5, 3)}
    table = jk.find_layers(apply_fn, p, normal(1, 2, 4, 4))
    text = str(table)
    for name in ("net/q", "net/o", "net/head", "net/norm", "head_bias"):
        assert name in text
    for word in ("dense", "scale", "gain", "cumsum"):
        assert word in text
    assert [path for path, _ in table.uncovered] == ["gain"]
    head = table["net/head"]
    assert (head.kind, head.in_features, head.out_features, head.uses) == ("dense", 4, 3, 1)
    assert head.bias is not None and head.bias.path == "net/head_bias"


def test_table_reads_from_shapes_alone(x64):
    p = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), scanned_params())
    x = jax.ShapeDtypeStruct((3, 5, 4), jnp.float64)
    layers = jk.find_layers(lambda p, x: scanned(p, x, PLAIN), p, x)
    layer = layers["blocks/kernel"]
    assert (layer.stack, layer.in_features, layer.out_features) == ((3,), 4, 4)
    assert layer.num_parameters == 3 * (16 + 4)


def test_unknown_name_in_the_table_gives_the_nearest(x64):
    layers = jk.find_layers(lambda p, x: mlp(p, x, PLAIN), mlp_params(), normal(1, 2, 4))
    with pytest.raises(jk.UnknownLayerError, match="up/kernel"):
        layers["up/kernl"]


@pytest.mark.slow
def test_parameter_matrix_reads_and_writes_the_gradient(x64):
    """a^T g over rows is the gradient in the layout that the table gives."""

    def model(p, x, tap):
        y = jnp.einsum("nkh,hdk->nd", x, p["w"])
        return tap.dense("w", jnp.swapaxes(x, 1, 2), y, in_axes=2)

    p, batch = tree(6, w=(2, 3, 4)), (normal(1, 1, 4, 2), labels(2, 1))
    _, grads, factors = jk.value_grad_and_factors(objective_of(model))(p, batch)
    matrix = factors.layer("w").weight.read(grads["w"])
    a, g = np.asarray(factors["w"].a), np.asarray(factors["w"].g)
    # one row: A = a aᵀ, G = g gᵀ, so the gradient a gᵀ is their common rank-one product
    np.testing.assert_allclose(matrix @ matrix.T, a * np.trace(g), atol=1e-10)
    np.testing.assert_allclose(matrix.T @ matrix, g * np.trace(a), atol=1e-10)
    back = factors.layer("w").weight.write(jnp.zeros_like(p["w"]), matrix)
    np.testing.assert_array_equal(back, grads["w"])
