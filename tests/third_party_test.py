"""Models of other libraries: every parameter covered or named, gradient equal, factors right.

Twins written with taps give the factors where the architecture is short enough to write
down; the model zoo's vision transformer is checked at its first and last layers.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from tests._checks import assert_factors_close, assert_tree_close
from tests._oracle import oracle
from tests._programs import labels, normal
from tests._taps import patches

pytestmark = pytest.mark.standard_promotion  # these libraries rely on it


def run(apply_fn, params, batch, *, tolerance=1e-10, **options):
    """Factors, after checking that nothing is uncovered and the gradient is plain JAX's."""
    objective = jk.Objective(apply_fn, jk.Categorical())
    assert jk.find_layers(objective, params, batch).uncovered == []
    value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(params, batch, **options)
    loss, gradient = jax.jit(jax.value_and_grad(objective))(params, batch)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    assert_tree_close(grads, gradient, tolerance)
    covered = sum(layer.num_parameters for layer in factors.layers)
    assert covered == sum(leaf.size for leaf in jax.tree.leaves(params))
    return factors


def to_float64(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x, tree)


def flax_attention(prefix, p, x, tap):
    """Multi-head self-attention with the parameters of either Flax API."""
    n, s, _ = x.shape
    heads, k = p["query"]["kernel"].shape[1:]

    def project(name):
        y = jnp.einsum("nsd,dhk->nshk", x, p[name]["kernel"]) + p[name]["bias"]
        y = tap.dense(f"{prefix}/{name}/kernel", x, y.reshape(n, s, -1), bias=True)
        return y.reshape(n, s, heads, k)

    q, key, v = (project(name) for name in ("query", "key", "value"))
    mix = jax.nn.softmax(jnp.einsum("nshk,nthk->nhst", q, key) / np.sqrt(k), axis=-1)
    y = jnp.einsum("nhst,nthk->nshk", mix, v)
    out = jnp.einsum("nshk,hkd->nsd", y, p["out"]["kernel"]) + p["out"]["bias"]
    return tap.dense(f"{prefix}/out/kernel", y, out, in_axes=2, bias=True)


def flax_twin(p, x, tap):
    h = flax_attention("attention", p["attention"], x, tap)
    return tap.dense("head/kernel", h, h @ p["head"]["kernel"] + p["head"]["bias"], bias=True)


def with_biases(params):
    """Flax starts biases at zero, where a lost bias would not show."""
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten([x + normal(50 + i, *x.shape) for i, x in enumerate(leaves)])


@pytest.mark.exhaustive
def test_linen_multi_head_attention(x64):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.MultiHeadDotProductAttention(2, param_dtype=float, name="attention")(x)
            return nn.Dense(3, param_dtype=float, name="head")(h)

    params = with_biases(Net().init(jax.random.key(0), jnp.zeros((1, 3, 4)))["params"])
    batch = (normal(1, 2, 3, 4, scale=1.0), labels(2, 2, 3))
    factors = run(lambda p, x: Net().apply({"params": p}, x), params, batch)
    assert_factors_close(factors, oracle(flax_twin, params, batch), 1e-10)
    inputs = {factors.layer(f"attention/{n}/kernel").input for n in ("query", "key", "value")}
    assert len(inputs) == 1


@pytest.mark.exhaustive
def test_nnx_multi_head_attention(x64):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(
                2, 4, decode=False, param_dtype=jnp.float64, rngs=rngs
            )
            self.head = nnx.Linear(4, 3, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            return self.head(self.attention(x))

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)))
    params = with_biases(params)
    batch = (normal(1, 2, 3, 4, scale=1.0), labels(2, 2, 3))
    factors = run(apply_fn, params, batch)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    twin = {"attention": {}, "head": {}}
    for path, leaf in leaves.items():
        keys = path.removesuffix("/value").removesuffix("/raw_value").split("/")
        node = twin
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    # jax.nn.dot_product_attention takes the softmax in float32, whatever the inputs are
    assert_factors_close(factors, oracle(flax_twin, twin, batch), 1e-6)


@pytest.mark.exhaustive
def test_linen_attention_with_padding_mask_and_positions(x64):
    """The attention mask is the model's business, `positions` the library's."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            x, here = inputs
            mask = nn.make_attention_mask(here, here)
            h = nn.MultiHeadDotProductAttention(2, param_dtype=float, name="attention")(
                x, mask=mask
            )
            return nn.Dense(3, param_dtype=float, name="head")(h)

    here = jnp.asarray([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    x = normal(1, 2, 4, 4)
    params = with_biases(Net().init(jax.random.key(0), (x, here))["params"])
    objective = jk.Objective(lambda p, x: Net().apply({"params": p}, x), jk.Categorical())
    stats = jax.jit(jk.value_grad_and_factors(objective))
    y = labels(2, 2, 4)
    *_, padded = stats(params, ((x, here), y, here), positions=here)
    # the same data without padding: each example on its own, cut to its length
    parts = [
        stats(
            params,
            ((x[n : n + 1, :length], here[n : n + 1, :length]), y[n : n + 1, :length]),
        )[2]
        for n, length in ((0, 4), (1, 2))
    ]
    assert_tree_close(padded, parts[0] + parts[1], 1e-10)


# ---------------------------------------------------------------------- Haiku


@pytest.mark.exhaustive
def test_haiku_mlp(x64):
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([5, 3])(x)))
    params = with_biases(to_float64(net.init(jax.random.key(0), jnp.zeros((1, 4)))))

    def twin(p, x, tap):
        for i in range(2):
            w = p[f"mlp/~/linear_{i}"]
            x = tap.dense(f"mlp/~/linear_{i}/w", x, x @ w["w"] + w["b"], bias=True)
            x = jax.nn.relu(x) if i == 0 else x
        return x

    batch = (normal(1, 6, 4), labels(2, 6))
    assert_factors_close(run(net.apply, params, batch), oracle(twin, params, batch), 1e-10)


@pytest.mark.slow
def test_haiku_attention(x64):
    def forward(x):
        init = hk.initializers.VarianceScaling()
        return hk.MultiHeadAttention(2, 3, w_init=init, model_size=4)(x, x, x)

    net = hk.without_apply_rng(hk.transform(forward))
    params = with_biases(to_float64(net.init(jax.random.key(0), jnp.zeros((1, 3, 4)))))

    def twin(p, x, tap):
        n, s, _ = x.shape
        name = "multi_head_attention"
        q, k, v = (
            tap.dense(
                f"{name}/{part}/w",
                x,
                x @ p[f"{name}/{part}"]["w"] + p[f"{name}/{part}"]["b"],
                bias=True,
            ).reshape(n, s, 2, 3)
            for part in ("query", "key", "value")
        )
        mix = jax.nn.softmax(jnp.einsum("nshk,nthk->nhst", q, k) / np.sqrt(3), axis=-1)
        y = jnp.einsum("nhst,nthk->nshk", mix, v).reshape(n, s, 6)
        w = p[f"{name}/linear"]
        return tap.dense(f"{name}/linear/w", y, y @ w["w"] + w["b"], bias=True)

    batch = (normal(1, 2, 3, 4), labels(2, 2, 3, classes=4))
    assert_factors_close(run(net.apply, params, batch), oracle(twin, params, batch), 1e-10)


@pytest.mark.exhaustive
def test_haiku_residual_network_with_state(x64):
    def forward(x, is_training):
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=3,
            bottleneck=False,
            channels_per_group=(4, 4, 4, 4),
            use_projection=(False, True, False, False),
            strides=(1, 1, 1, 1),
            initial_conv_config={"output_channels": 4, "kernel_shape": 3, "stride": 1},
        )
        return net(x, is_training=is_training)

    net = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = net.init(jax.random.key(0), jnp.zeros((1, 6, 6, 1)), True)
    params, state = with_biases(to_float64(params)), to_float64(state)
    batch = (normal(1, 3, 6, 6, 1), labels(2, 3))
    apply_fn = lambda p, x: net.apply(p, state, x, False)[0]
    factors = run(apply_fn, params, batch)
    rows = np.asarray(patches(batch[0], (3, 3), None, ((1, 1), (1, 1)))).reshape(-1, 9)
    first = factors["res_net/~/initial_conv/w"]
    np.testing.assert_allclose(first.a, rows.T @ rows / len(rows), atol=1e-10)
    logits = jax.jit(apply_fn)(params, batch[0])
    g = np.asarray(jax.nn.softmax(logits) - jax.nn.one_hot(batch[1], 3))
    np.testing.assert_allclose(factors["res_net/~/logits/w"].g, g.T @ g / 3, atol=1e-10)


# -------------------------------------------------------------------- Equinox


def test_equinox_mlp_under_vmap(x64):
    model = eqx.nn.MLP(4, 3, 5, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def twin(p, x, tap):
        for i, layer in enumerate(p.layers):
            y = x @ layer.weight.T + layer.bias
            x = tap.dense(f"layers/{i}/weight", x, y, bias=True)
            x = jax.nn.relu(x) if i < 2 else x
        return x

    batch = (normal(1, 6, 4, scale=1.0), labels(2, 6))
    factors = run(lambda p, x: jax.vmap(eqx.combine(p, static))(x), params, batch)
    assert_factors_close(factors, oracle(twin, params, batch), 1e-10)


@pytest.mark.exhaustive
def test_equinox_attention_under_vmap(x64):
    model = eqx.nn.MultiheadAttention(
        2, 4, use_query_bias=True, use_output_bias=True, key=jax.random.key(0)
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def twin(p, x, tap):
        n, s, _ = x.shape

        def project(name):
            layer = getattr(p, name)
            y = x @ layer.weight.T
            y = y if layer.bias is None else y + layer.bias
            y = tap.dense(f"{name}/weight", x, y, bias=layer.bias is not None)
            return y.reshape(n, s, 2, 2)

        q, k, v = (project(f"{name}_proj") for name in ("query", "key", "value"))
        mix = jax.nn.softmax(jnp.einsum("nshk,nthk->nhst", q, k) / np.sqrt(2), axis=-1)
        y = jnp.einsum("nhst,nthk->nshk", mix, v).reshape(n, s, 4)
        out = y @ p.output_proj.weight.T + p.output_proj.bias
        return tap.dense("output_proj/weight", y, out, bias=True)

    batch = (normal(1, 2, 3, 4, scale=1.0), labels(2, 2, 3, classes=4))
    apply_fn = lambda p, x: jax.vmap(lambda x: eqx.combine(p, static)(x, x, x))(x)
    assert_factors_close(run(apply_fn, params, batch), oracle(twin, params, batch), 1e-10)


@pytest.mark.exhaustive
def test_equinox_convolution_under_vmap(x64):
    """The bias (out, 1, 1) is added to the product alone, so it is joined to it."""
    keys = jax.random.split(jax.random.key(0), 2)
    model = (
        eqx.nn.Conv2d(2, 4, 3, stride=2, padding=1, key=keys[0]),
        eqx.nn.Linear(4, 3, key=keys[1]),
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply_fn(p, x):
        conv, head = eqx.combine(p, static)
        return jax.vmap(lambda x: head(jnp.tanh(conv(x)).mean((1, 2))))(x)

    def twin(p, x, tap):
        conv, head = p
        rows = patches(jnp.moveaxis(x, 1, -1), (3, 3), (2, 2), ((1, 1), (1, 1)))
        rows = jnp.moveaxis(rows, -1, 3)
        y = jnp.einsum("nxyihw,oihw->nxyo", rows, conv.weight) + conv.bias[:, 0, 0]
        y = jnp.tanh(tap.dense("0/weight", rows, y, in_axes=3, bias=True)).mean((1, 2))
        return tap.dense("1/weight", y, y @ head.weight.T + head.bias, bias=True)

    batch = (normal(1, 3, 2, 6, 5, scale=1.0), labels(2, 3))
    assert_factors_close(run(apply_fn, params, batch), oracle(twin, params, batch), 1e-10)


# ------------------------------------------------------- a model zoo: equimo


@pytest.mark.exhaustive
def test_vision_transformer_of_the_equimo_zoo(x64):
    """Patch convolution, class token, position table, fused qkv, norms and head."""
    vit = pytest.importorskip("equimo.models.vit", reason="the zoo model needs `equimo`")
    model = vit.VisionTransformer(
        img_size=8, in_channels=1, dim=8, patch_size=4, num_heads=2, depths=[1],
        num_classes=3, reg_tokens=0, key=jax.random.key(0),
    )  # fmt: skip
    params, static = eqx.partition(to_float64(model), eqx.is_inexact_array)
    key = jax.random.key(1)

    def apply_fn(p, x):
        return jax.vmap(lambda x: eqx.combine(p, static)(x, key=key, inference=True))(x)

    x, y = normal(1, 4, 1, 8, 8, scale=1.0), labels(2, 4)
    factors = run(apply_fn, params, (x, y))
    kinds = {layer.weight.path: layer.kind for layer in factors.layers}
    assert kinds["cls_token"] == "bias" and kinds["norm/weight"] == "scale"
    for name in ("attn/qkv", "attn/proj", "mlp/fc1", "mlp/fc2"):
        layer = factors.layer(f"blocks/0/blocks/0/{name}/weight")
        assert layer.kind == "dense" and layer.bias is not None

    # the first layer: its rows are the patches themselves
    rows = np.asarray(x).reshape(4, 1, 2, 4, 2, 4).transpose(0, 2, 4, 1, 3, 5).reshape(16, 16)
    first = np.asarray(factors["patch_embed/proj/weight"].a)[:16, :16]
    np.testing.assert_allclose(first, rows.T @ rows / 16, atol=1e-10)

    # the last layer, one row per example: per-example gradients are g aᵀ with g known
    g = np.asarray(jax.nn.softmax(jax.jit(apply_fn)(params, x)) - jax.nn.one_hot(y, 3))
    np.testing.assert_allclose(factors["head/weight"].g, g.T @ g / 4, atol=1e-10)
    gradient = jax.jit(jax.grad(jk.Objective(apply_fn, jk.Categorical())))
    each = [gradient(params, (x[n : n + 1], y[n : n + 1])) for n in range(4)]
    a = np.stack([g[n] @ np.asarray(e.head.weight) / (g[n] @ g[n]) for n, e in enumerate(each)])
    a = np.concatenate([a, np.ones((4, 1))], axis=1)
    np.testing.assert_allclose(factors["head/weight"].a, a.T @ a / 4, atol=1e-9)

    # lone biases seen once per example: squared per-example gradients
    token = sum(np.asarray(e.cls_token) ** 2 for e in each) / 4
    np.testing.assert_allclose(factors["cls_token"].diagonal, token, atol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_convnext_of_the_equimo_zoo_is_covered_or_reported_by_name(x64):
    """Depthwise convolutions and layer scales: each parameter has a layer or a row."""
    convnext = pytest.importorskip("equimo.models.convnext", reason="the zoo needs `equimo`")
    model = convnext.ConvNeXt(
        in_channels=1, depths=[1], dims=[4], num_classes=3, key=jax.random.key(0)
    )
    params, static = eqx.partition(to_float64(model), eqx.is_inexact_array)
    key = jax.random.key(1)

    def apply_fn(p, x):
        return jax.vmap(lambda x: eqx.combine(p, static)(x, key=key, inference=True))(x)

    objective = jk.Objective(apply_fn, jk.Categorical())
    batch = (normal(1, 2, 1, 16, 16, scale=1.0), labels(2, 2))
    table = jk.find_layers(objective, params, batch)
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    reported = {path for path, _ in table.uncovered}
    assert reported <= paths
    layers = jax.tree.leaves(
        jk.value_grad_and_factors(objective, uncovered="ignore")
        .factor_shapes(params, batch)
        .layers,
        is_leaf=lambda layer: isinstance(layer, jk.Layer),
    )
    covered = {m.path for layer in layers for m in (layer.weight, layer.bias) if m is not None}
    silent = paths - covered - reported
    assert all(path in str(table) for path in silent), silent
    stats = jax.jit(jk.value_grad_and_factors(objective, uncovered="ignore"))
    _, grads, factors = stats(params, batch)
    assert_tree_close(grads, jax.jit(jax.grad(objective))(params, batch), 1e-9)
    assert all(bool(v) for v in factors.is_finite().values())
