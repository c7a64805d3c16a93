"""Convolutions against explicit patches, in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxkfac as jk
from tests._checks import assert_block_close, assert_factors_close, check, objective_of
from tests._convolutions import CONVOLUTIONS, LAST, Convolution
from tests._oracle import oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN, patches

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", list(CONVOLUTIONS))
def test_factors_are_those_of_explicit_patches(x64, name, sharing):
    model, _, params, batch = CONVOLUTIONS[name].case()
    *_, factors = check(model, params, batch, sharing=sharing)
    groups = CONVOLUTIONS[name].groups
    assert factors.layer("k").stack == ((groups,) if groups > 1 else ())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["2-D", "grouped", "2-D, channels first"])
def test_separate_bias(x64, name, sharing):
    model, _, params, batch = CONVOLUTIONS[name].case()
    check(model, params, batch, sharing=sharing, bias="separate")


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["mc", "exact", "forward"])
@pytest.mark.parametrize("name", ["2-D, strided and padded", "depthwise"])
def test_fisher_types(x64, name, fisher, sharing):
    model, _, params, (x, y) = CONVOLUTIONS[name].case()
    drawn = labels(3, 2, *y.shape) if fisher == "mc" else None
    check(model, params, (x, y), fisher=fisher, sharing=sharing, labels=drawn)


def test_masked_examples_leave_g_and_its_count(x64):
    model, _, params, batch = CONVOLUTIONS["grouped"].case(n=3)
    check(model, params, (*batch, jnp.asarray([True, False, True])))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_many_examples_and_wide_channels(x64, sharing):
    """Sizes at which another way of forming the products may be taken."""
    layer = Convolution((6, 6), (3, 3), padding=((1, 1), (1, 1)), channels=(16, 8))
    model, _, params, batch = layer.case(n=9)
    check(model, params, batch, sharing=sharing)


def test_a_large_window_on_few_channels(x64):
    layer = Convolution((12, 12), (7, 7), (2, 2), ((3, 3), (3, 3)), channels=(3, 4))
    model, _, params, batch = layer.case(n=3)
    check(model, params, batch)


# ----------------------------------------------------------------- transposed


def _transposed(strides, padding, dilation, flipped):
    """``lax.conv_transpose``; with ``transpose_kernel`` the kernel is (…, out, in), reversed."""

    def model(p, x, tap):
        y = lax.conv_transpose(
            x, p["k"], strides, padding, rhs_dilation=dilation,
            dimension_numbers=LAST[len(strides)], transpose_kernel=flipped,
        ) + p["b"]  # fmt: skip
        window = p["k"].shape[: len(strides)]
        rows = patches(x, window, None, padding, dilation=dilation, input_dilation=strides)
        if flipped:
            rows = jnp.flip(rows, range(1 + len(strides), 1 + 2 * len(strides)))
        y = tap.dense("k", rows, y, in_axes=1 + len(strides), bias=True)
        y = jnp.tanh(y).mean(axis=tuple(range(1, 1 + len(strides))))
        return tap.dense("w", y, y @ p["w"])

    return model


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(
    "strides, padding, dilation",
    [((2,), ((1, 2),), None), ((2, 1), ((2, 1), (1, 1)), None), ((1, 2), ((1, 0), (3, 2)), (1, 2))],
)
def test_transposed_convolution(x64, strides, padding, dilation, flipped, sharing):
    space, window = (4, 3)[: len(strides)], (3, 2)[: len(strides)]
    channels = (4, 2) if flipped else (2, 4)
    p = tree(82, k=(*window, *channels), b=(4,), w=(4, 3))
    batch = (normal(1, 2, *space, 2), labels(2, 2))
    check(_transposed(strides, padding, dilation, flipped), p, batch, sharing=sharing)


@pytest.mark.standard_promotion  # Flax mixes float32 constants into float64
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax_transposed_convolution(x64, library, flipped):
    options = {"strides": (2, 2), "padding": ((1, 2), (2, 1)), "transpose_kernel": flipped}
    x, y = normal(1, 2, 3, 4, 2), labels(2, 2)
    if library == "linen":
        net = nn.ConvTranspose(4, (3, 2), param_dtype=jnp.float64, **options)
        layer = net.init(jax.random.key(0), x)["params"]
        run = lambda p, x: net.apply({"params": p}, x)
    else:
        net = nnx.ConvTranspose(2, 4, (3, 2), param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options)
        run, layer = jk.from_nnx(net)
    head = normal(3, 4, 3)
    params = {"layer": layer, "head": head}
    objective = jk.Objective(
        lambda p, x: jnp.tanh(run(p["layer"], x)).mean((1, 2)) @ p["head"], jk.Categorical()
    )
    twin = {"k": layer["kernel"], "b": layer["bias"], "w": head}
    plain = _transposed((2, 2), options["padding"], None, flipped)
    expected = oracle(plain, twin, (x, y))
    factors = jax.jit(jk.value_grad_and_factors(objective))(params, (x, y))[2]
    assert_block_close(factors["layer/kernel"], expected["k"], 1e-10)
    assert_block_close(factors["head"], expected["w"], 1e-10)


# -------------------------------------------------------------- Flax's options


@pytest.mark.standard_promotion
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    "padding, options",
    [
        ("SAME", {"strides": (2,)}),
        ("CIRCULAR", {}),
        ("CAUSAL", {"kernel_dilation": (2,)}),
        ("VALID", {"feature_group_count": 2}),
        ([(0, 0)], {"input_dilation": (2,), "use_bias": False}),
    ],
)
def test_linen_convolution(x64, padding, options, sharing):
    x, y = normal(1, 2, 6, 4), labels(2, 2)
    net = nn.Conv(2, (3,), padding=padding, param_dtype=jnp.float64, **options)
    variables = net.init(jax.random.key(0), x)
    params = {"conv": variables["params"], "head": normal(3, 2, 3)}

    def model(p, x, tap):
        return jnp.tanh(net.apply({"params": p["conv"]}, x)).mean(axis=1) @ p["head"]

    step = options.get("strides", (1,))
    dilation = options.get("kernel_dilation", (1,))
    groups = options.get("feature_group_count", 1)
    pads = {"SAME": ((0, 1),), "CAUSAL": ((4, 0),)}.get(str(padding), ((0, 0),))
    layer = Convolution(
        (6,), (3,), step, pads, dilation, options.get("input_dilation", (1,)), groups,
        (4, 2), bias=options.get("use_bias", True),
    )  # fmt: skip

    def plain(p, x, tap):
        x = jnp.concatenate([x[:, -1:], x, x[:, :1]], axis=1) if padding == "CIRCULAR" else x
        h = layer(x, p["conv"]["kernel"], p["conv"].get("bias"))
        h = jnp.tanh(layer.tapped(tap, "conv/kernel", x, h)).mean(axis=1)
        return tap.dense("head", h, h @ p["head"])

    check(model, params, (x, y), oracle_model=plain, sharing=sharing)


# ---------------------------------------------------------- inside other things


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_in_a_scan_of_remat(x64, groups, sharing):
    layer = Convolution((5,), (3,), padding=((1, 1),), groups=groups, channels=(4, 4))

    def model(p, x, tap):
        body = jax.checkpoint(lambda x, w: (x + jnp.tanh(layer(x, w["k"], w["b"])), None))
        x, _ = lax.scan(body, x, p["blocks"])
        return x.mean(axis=1) @ p["w"]

    def plain(p, x, tap):
        for i in range(2):
            w = jax.tree.map(lambda v, i=i: v[i], p["blocks"])
            y = layer(x, w["k"], w["b"])
            x = x + jnp.tanh(layer.tapped(tap, "blocks/k", x, y, at=(i,)))
        x = x.mean(axis=1)
        return tap.dense("w", x, x @ p["w"])

    p = tree(83, blocks__k=(2, *layer.kernel_shape()), blocks__b=(2, 4), w=(4, 3))
    *_, factors = check(
        model, p, (normal(1, 2, 5, 4), labels(2, 2)), oracle_model=plain, sharing=sharing
    )
    assert factors.layer("blocks/k").stack == ((2, groups) if groups > 1 else (2,))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_convolution_of_one_example_under_vmap(x64, sharing):
    layer = Convolution((4, 4), (2, 3))
    _, _, p, batch = layer.case()

    def model(p, x, tap):
        y = jax.vmap(lambda x: layer(x[None], p["k"], p["b"])[0])(x)
        return jnp.tanh(y).mean(axis=(1, 2)) @ p["w"]

    check(model, p, batch, oracle_model=layer.model, sharing=sharing)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_pooling_between_convolutions(x64, sharing):
    first = Convolution((6, 6), (3, 3), channels=(1, 2))
    second = Convolution((2, 2), (2, 2), channels=(2, 3))

    def model(p, x, tap):
        y = jnp.tanh(first.tapped(tap, "first", x, first(x, p["first"], p["b"])))
        y = lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        y = second.tapped(tap, "second", y, second(y, p["second"], p["c"]))
        return y.mean(axis=(1, 2))

    p = tree(84, first=first.kernel_shape(), b=(2,), second=second.kernel_shape(), c=(3,))
    check(model, p, (normal(1, 3, 6, 6, 1), labels(2, 3)), sharing=sharing)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_one_kernel_used_on_two_sizes(x64, sharing):
    """As in a feature pyramid: the rows of both uses are one layer's."""
    layer = Convolution((5,), (3,))

    def model(p, x, tap):
        small = x[:, :4]
        parts = [layer.tapped(tap, "k", v, layer(v, p["k"], p["b"])) for v in (x, small)]
        y = sum(jnp.tanh(part).mean(axis=1) for part in parts)
        return tap.dense("w", y, y @ p["w"])

    _, _, p, batch = layer.case()
    *_, factors = check(model, p, batch, sharing=sharing)
    assert factors.layer("k").uses == 2


def test_two_convolutions_of_one_input_share_its_factor_only_if_their_patches_agree(x64):
    same = Convolution((6,), (3,), bias=False)
    other = Convolution((6,), (3,), (2,), bias=False)
    grouped = Convolution((6,), (3,), groups=2, bias=False)

    def model(p, x, tap):
        y = 0.0
        for name, layer in (("a", same), ("b", same), ("c", other), ("d", grouped)):
            y = y + jnp.tanh(layer.tapped(tap, name, x, layer(x, p[name]))).mean(axis=1)
        return y

    shapes = {"a": same, "b": same, "c": other, "d": grouped}
    p = tree(85, **{name: layer.kernel_shape() for name, layer in shapes.items()})
    batch = (normal(1, 2, 6, 2), labels(2, 2, classes=4))
    *_, factors = check(model, p, batch)
    inputs = {name: factors.layer(name).input for name in p}
    assert inputs["a"] == inputs["b"] and len(set(inputs.values())) == 3


def test_padding_values_of_the_input_may_be_nan_where_no_window_reads_them(x64):
    """Strided windows leave the last column out; zero times NaN would not."""
    layer = Convolution((5,), (2,), (2,))
    model, _, params, (x, y) = layer.case()
    spoiled = x.at[:, -1].set(jnp.nan)
    stats = jax.jit(jk.value_grad_and_factors(objective_of(model)))
    assert_factors_close(stats(params, (spoiled, y))[2], oracle(model, params, (x, y)), 1e-10)


def test_bfloat16_convolution_accumulates_in_float32():
    """bf16 rounds at 2^-8 = 0.4% and inputs are exact in it, so A has float32's error only."""
    with jax.enable_x64(False):
        layer = Convolution((4, 4), (2, 2), channels=(3, 4))
        x = jnp.round(4 * normal(1, 16, 4, 4, 3)).astype(jnp.float32) / 4
        p = jax.tree.map(lambda v: v.astype(jnp.float32), layer.case()[2])

        def model(p, x, tap):
            p, x = jax.tree.map(lambda v: v.astype(jnp.bfloat16), (p, x))
            return layer.model(p, x, tap).astype(jnp.float32)

        batch = (x, labels(2, 16).astype(jnp.int32))
        factors = jax.jit(jk.value_grad_and_factors(objective_of(model)))(p, batch)[2]
        expected = oracle(layer.model, p, batch)["k"]
        assert factors["k"].a.dtype == jnp.float32
        assert_block_close(factors["k"]._replace(g=expected.g), expected, 1e-6)
        error = np.abs(np.asarray(factors["k"].g) - expected.g).max()
        assert error <= 0.03 * np.abs(expected.g).max()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_uncovered_kinds_are_named(x64, sharing):
    """A kernel that differs from place to place is no shared weight."""

    def model(p, x, tap):
        y = lax.conv_general_dilated_local(
            x, p["k"], (1,), "VALID", (3,), dimension_numbers=LAST[1]
        )
        return jnp.tanh(y).mean(axis=1)

    p, batch = {"k": normal(5, 4, 6, 3)}, (normal(1, 2, 6, 2), labels(2, 2))
    table = jk.find_layers(lambda p, x: model(p, x, PLAIN), p, batch[0])
    if "k" in table:  # read as a batched product: a stack over places
        check(model, p, batch, oracle_model=_local, sharing=sharing)
    else:
        assert any(path == "k" for path, _ in table.uncovered)


def _local(p, x, tap):
    rows = jnp.swapaxes(patches(x, (3,)), 2, 3).reshape(len(x), 4, 6)
    y = [tap.dense("k", rows[:, t], rows[:, t] @ p["k"][t], at=(t,)) for t in range(4)]
    return jnp.tanh(jnp.stack(y, axis=1)).mean(axis=1)
