"""Convolutions as programs write them: Flax layers, loops, walls and meshes.

The oracle is the Jacobian of the output with respect to the kernel: what one output channel
reads at a position is the derivative of that output with respect to its part of the kernel.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._likelihoods import Gaussian
from jaxkfac.factors._objective import Objective
from jaxkfac.interception._row_masks import mark_rows
from jaxkfac.interception._trace import find_layers
from jaxkfac.kinds import _patches

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("x64"),
    pytest.mark.standard_promotion,
]
NHC = ("NHC", "HIO", "NHC")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def by_jacobian(fn, k, out_axis, groups=1):
    """A and G (both as sums over rows) of ``0.5 * y**2`` for ``y = fn(k)``, channels last."""
    y, jacobian = np.asarray(fn(k)), np.asarray(jax.jacobian(fn)(k))
    size = y.shape[-1] // groups
    jacobian = np.moveaxis(jacobian, y.ndim + out_axis % k.ndim, -1).reshape(
        *y.shape, -1, y.shape[-1]
    )
    a, g = [], []
    for first in range(0, y.shape[-1], size):
        rows = jacobian[..., first, :, first].reshape(math.prod(y.shape[:-1]), -1)
        a.append(rows.T @ rows)
        rows = y[..., first : first + size].reshape(-1, size)
        g.append(rows.T @ rows)
    return (np.stack(a), np.stack(g)) if groups > 1 else (a[0], g[0])


def factors_of(fn, k, x, **options):
    """The layer of ``fn(k, x)`` under ``0.5 * y**2``, and its factors as sums over rows."""
    targets = jnp.zeros_like(fn(k, x))
    stats = jax.jit(value_grad_and_factors(Objective(fn, Gaussian()), **options))
    factors = stats(k, (x, targets)).factors
    (layer,) = factors.layers
    rows = math.prod(targets.shape[:-1])
    return layer, np.asarray(factors[layer.name].a) * rows, np.asarray(factors[layer.name].g) * rows


def linen(layer):
    return lambda k, x: layer.apply({"params": {"kernel": k}}, x)


def conv(features, size, **options):
    return linen(nn.Conv(features, size, use_bias=False, **options))


def transposed(features, size, **options):
    return linen(nn.ConvTranspose(features, size, use_bias=False, **options))


def channels_first(k, x):
    return jnp.moveaxis(lax.conv(x, k, (1, 2), "SAME"), 1, -1)


def under_vmap(k, x):
    def one(x):
        return lax.conv_general_dilated(x[None], k, (1,), "SAME", dimension_numbers=NHC)[0]

    return jax.vmap(one)(x)


def of_one_group(k, x):
    return lax.conv_general_dilated(
        x, k, (1,), "SAME", dimension_numbers=NHC, feature_group_count=2
    )  # fmt: skip


def scaled(k, x):
    return lax.conv_general_dilated(x, 0.5 * k, (1,), "SAME", dimension_numbers=NHC)


PROGRAMS = {  # fn, kernel, signal, the kernel's output axis, groups
    "circular": (conv(3, (3,), padding="CIRCULAR"), (3, 2, 3), (2, 5, 2), -1, 1),
    "causal": (conv(3, (3,), padding="CAUSAL", kernel_dilation=2), (3, 2, 3), (2, 6, 2), -1, 1),
    "input-dilated": (
        conv(3, (2, 3), input_dilation=(2, 1), padding=((1, 1), (0, 1))),
        (2, 3, 2, 3),
        (2, 3, 4, 2),
        -1,
        1,
    ),
    "depthwise": (conv(4, (3,), feature_group_count=2), (3, 1, 4), (2, 5, 2), -1, 2),
    "3d": (conv(3, (2, 1, 2), strides=(1, 2, 1)), (2, 1, 2, 2, 3), (2, 3, 2, 2, 2), -1, 1),
    "transposed": (transposed(3, (3,), strides=(2,)), (3, 2, 3), (2, 4, 2), -1, 1),
    "transposed-kernel": (
        transposed(3, (3, 2), strides=(1, 2), transpose_kernel=True),
        (3, 2, 3, 2),
        (2, 3, 3, 2),
        -2,
        1,
    ),
    "channels-first": (channels_first, (3, 2, 2, 3), (2, 2, 3, 5), 0, 1),
    "under-vmap": (under_vmap, (3, 2, 3), (2, 5, 2), -1, 1),
    "groups": (of_one_group, (3, 2, 6), (2, 5, 4), -1, 2),
    "scaled": (scaled, (3, 2, 3), (2, 5, 2), -1, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_factors_equal_those_of_the_kernels_jacobian(name):
    fn, kernel, signal, out_axis, groups = PROGRAMS[name]
    k, x = normal(0, *kernel), normal(1, *signal)
    layer, a, g = factors_of(fn, k, x)
    assert layer.kind == "conv"
    expected_a, expected_g = by_jacobian(lambda k: fn(k, x), k, out_axis, groups)
    np.testing.assert_allclose(a, expected_a, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(g, expected_g, rtol=1e-10, atol=1e-12)


def test_locally_connected_layers_are_a_stack_over_positions():
    layer = nn.ConvLocal(3, (2,), use_bias=False, padding="VALID")
    table = find_layers(linen(layer), jnp.ones((4, 4, 3)), jnp.ones((2, 5, 2)))
    assert (table[""].kind, table[""].stack) == ("dense", (4,))


def test_members_of_an_ensemble_have_the_factors_that_each_has_alone():
    """Sizes coincide, so that an axis taken for another one would fit."""

    def member(k, x):
        return lax.conv_general_dilated(x, k, (1,), "VALID", dimension_numbers=NHC)

    def ensemble(k, x):
        return jax.vmap(member, in_axes=(0, 1), out_axes=1)(k, x)

    k, x = normal(0, 3, 3, 3, 3), normal(1, 3, 3, 5, 3)
    for sharing in ("expand", "reduce"):
        layer, a, g = factors_of(ensemble, k, x, sharing=sharing)
        assert layer.stack == (3,)
        for i in range(3):
            _, a_i, g_i = factors_of(member, k[i], x[:, i], sharing=sharing)
            np.testing.assert_allclose(a[i], a_i * 3, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(g[i], g_i, rtol=1e-10, atol=1e-12)


def test_rows_of_an_ensemble_are_told_apart_from_its_members():
    """``vmap`` moves axes within a reshape; sizes coincide, so only identity can tell them."""
    there = jnp.asarray([[True, True, False]] * 3)

    def member(k, x):
        return lax.conv_general_dilated(x, k, (1,), "VALID", dimension_numbers=NHC)

    def ensemble(k, x):
        return jax.vmap(member, out_axes=1)(k, mark_rows(x, there))

    k, x = normal(0, 3, 3, 3, 3), normal(1, 3, 3, 5, 3)
    _, a, _ = factors_of(ensemble, k, x)
    for i in range(3):
        _, a_i, _ = factors_of(member, k[i], x[i, :2])
        np.testing.assert_allclose(a[i] / 27, a_i / 6, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------ loops, walls, meshes


def blocks(p, x):
    """Grouped convolutions with biases in a scan of remat of jit."""

    @jax.checkpoint
    def block(x, layer):
        return jnp.tanh(jax.jit(of_one_group)(layer["k"], x) + layer["b"]), None

    return lax.scan(block, x, p)[0]


def unrolled(p, x):
    for i in range(2):
        x = jnp.tanh(of_one_group(p[i]["k"], x) + p[i]["b"])
    return x


def block_params():
    return {"k": normal(0, 2, 3, 2, 4), "b": normal(1, 2, 4)}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_scan_of_remat_of_jit_gives_the_factors_of_its_blocks(monkeypatch, sharing):
    monkeypatch.setattr(_patches, "AT_ONCE", 1)
    p, x = block_params(), normal(2, 2, 8, 4)
    batch = x, jnp.zeros_like(x)
    (value, grads, factors), (value_1, grads_1, factors_1) = (
        jax.jit(value_grad_and_factors(Objective(fn, Gaussian()), sharing=sharing))(params, batch)
        for fn, params in (
            (blocks, p),
            (unrolled, [jax.tree.map(lambda v, i=i: v[i], p) for i in range(2)]),
        )
    )
    np.testing.assert_allclose(value, value_1, rtol=1e-12)
    assert (factors.layer("k").stack, factors["k"].a.shape) == ((2, 2), (2, 2, 7, 7))
    for i in range(2):
        for part in ("k", "b"):
            np.testing.assert_allclose(grads[part][i], grads_1[i][part], rtol=1e-10, atol=1e-14)
        for side in ("a", "g"):
            found, expected = getattr(factors["k"], side)[i], getattr(factors_1[f"{i}/k"], side)
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "mesh_type, sharing, masked",
    [
        ("shard_map", "expand", False),
        ("explicit", "expand", False),
        ("explicit", "expand", True),
        ("explicit", "reduce", False),
        ("explicit", "reduce", True),
        ("automatic", "expand", True),
        ("automatic", "reduce", False),
        ("automatic", "reduce", True),
    ],
)
def test_a_batch_split_over_devices_gives_the_factors_of_the_whole(
    monkeypatch, mesh_type, sharing, masked
):
    monkeypatch.setattr(_patches, "AT_ONCE", 1)
    devices = np.asarray(jax.devices()[:2])
    if len(devices) < 2:
        pytest.skip("needs two devices")
    kind = getattr(jax.sharding.AxisType, "Explicit" if mesh_type == "explicit" else "Auto")
    mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(kind,))
    k, x = normal(0, 3, 2, 4), normal(1, 4, 12, 4)
    there = jnp.asarray(np.arange(12) < np.array([[12], [5], [9], [7]]))
    stats = value_grad_and_factors(Objective(of_one_group, Gaussian()), sharing=sharing)
    batch, more = (x, jnp.zeros((4, 12, 4))), {"positions": there} if masked else {}
    expected = jax.jit(stats)(k, batch, **more).factors
    split = NamedSharding(mesh, P("data"))
    if mesh_type == "shard_map":

        def sharded(k, x):
            run = jax.shard_map(
                of_one_group, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
            )
            return run(k, x)

        stats = value_grad_and_factors(Objective(sharded, Gaussian()), sharing=sharing)
        found = jax.jit(stats)(k, batch).factors
    else:
        with jax.set_mesh(mesh):
            k = jax.device_put(k, NamedSharding(mesh, P()))
            batch, more = jax.device_put((batch, more), split)
            found = jax.jit(stats)(k, batch, **more).factors
    for side in ("a", "g"):
        np.testing.assert_allclose(
            getattr(found[""], side), getattr(expected[""], side), rtol=1e-10, atol=1e-12
        )
