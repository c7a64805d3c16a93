"""Trees of NF4: their form, what is quantised, what is refused."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkfac._errors import UnknownLayerError
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.interception import find_layers
from jaxkfac.lslora import Config, attach, init, nf4
from jaxkfac.lslora.nf4 import _tensor
from jaxkfac.lslora.nf4._tensor import (
    LEVELS,
    MIDPOINTS,
    encode,
    encode_scales,
    nested_codes,
    nested_levels,
)


def weights(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and bool((x == y).all()) for x, y in pairs
    )


# ---------------------------------------------------------------- numbers


def test_every_value_gets_the_nearest_level():
    x = np.linspace(-1, 1, 100_001, dtype=np.float32).reshape(1, -1)[:, :100_000]
    x[0, 0] = 1.0  # so that the scale is one
    codes = encode(x, 100_000)[0]
    found = LEVELS[np.stack([codes >> 4, codes & 15], -1).reshape(-1)]
    best = np.abs(x[0][:, None] - LEVELS).min(-1)
    np.testing.assert_allclose(np.abs(x[0] - found), best, atol=1e-7)


def test_a_midpoint_goes_to_the_lower_level_and_the_next_number_to_the_upper():
    x = np.stack([MIDPOINTS, np.nextafter(MIDPOINTS, np.float32(2))])
    x = np.concatenate([x, np.ones((2, 1), np.float32)], 1)
    codes = encode(x, 16)[0]
    found = np.stack([codes >> 4, codes & 15], -1).reshape(2, 16)
    np.testing.assert_array_equal(found[:, :15], [np.arange(15), np.arange(15) + 1])


def test_levels_survive():
    kernel = jnp.asarray(np.tile(LEVELS, 4)[:, None] * np.float32(0.3))
    decoded = nf4.dequantize(nf4.quantize({"kernel": kernel}, double=False))["kernel"]
    np.testing.assert_array_equal(decoded, kernel)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from([2, 6, 16]))
def test_an_error_is_at_most_half_the_widest_gap_of_its_block(seed, block):
    kernel = weights(48, 3, seed=seed)
    decoded = nf4.dequantize(nf4.quantize({"kernel": kernel}, block=block, double=False))["kernel"]
    largest = jnp.abs(kernel.reshape(-1, block, 3)).max(1, keepdims=True)
    error = jnp.abs(kernel - decoded).reshape(-1, block, 3) / largest
    assert error.max() <= np.diff(LEVELS).max() / 2 + 1e-6


@pytest.mark.slow
def test_normal_weights_are_off_by_nine_percent():
    kernel = weights(512, 128)
    for double in (False, True):
        decoded = nf4.dequantize(nf4.quantize({"kernel": kernel}, double=double))["kernel"]
        relative = jnp.linalg.norm(decoded - kernel) / jnp.linalg.norm(kernel)
        assert 0.090 < relative < 0.095


def test_the_second_level_has_256_levels_with_zero_and_one():
    levels = nested_levels()
    assert levels.shape == (256,) and levels[127] == 0 and levels[255] == 1
    assert (np.diff(levels) > 0).all() and (np.diff(nested_codes().astype(int)) >= 0).all()


@pytest.mark.slow
def test_scales_lie_around_their_mean_and_are_half_a_level_off_at_most():
    kernel = weights(2, 128, 200, seed=3) * jnp.asarray([1.0, 5.0])[:, None, None]
    own = nf4.quantize({"kernel": kernel}, stack=1)["kernel"]
    scales = np.abs(np.asarray(kernel).reshape(2, 2, 64, 200)).max(2).transpose(0, 2, 1)
    assert own.nested is not None
    offset = scales.mean((1, 2), dtype=np.float64)
    np.testing.assert_allclose(own.nested.offset, offset, rtol=1e-6)
    deviation = (scales - offset[:, None, None]).reshape(2, -1)
    largest = [np.abs(np.pad(x, (0, 112)).reshape(2, 256)).max(1) for x in deviation]
    np.testing.assert_allclose(own.nested.absmax, largest, rtol=1e-5)
    half = np.repeat(largest, 256, 1)[:, :400] * np.diff(nested_levels()).max() / 2
    assert (np.abs(np.asarray(own.scales()) - scales).reshape(2, -1) <= 1.01 * half).all()


def test_an_outlier_costs_precision_in_its_own_256_scales_only():
    scales, offset = np.linspace(1, 2, 1000, dtype=np.float32), np.float32(1.5)
    before, *_ = encode_scales(scales, offset)
    scales[300] = 1e6
    after, nested, _ = encode_scales(scales, offset)
    assert nested.shape == (4,)
    others = np.delete(before != after, 300)
    assert not others[:256].any() and others[256:511].mean() > 0.9 and not others[511:].any()


def test_rows_are_encoded_a_few_at_a_time_as_all_at_once(monkeypatch):
    matrix = np.asarray(weights(10, 64))
    whole = encode(matrix, 16)
    monkeypatch.setattr(_tensor, "_AT_ONCE", 4 * 64)
    nearest, sizes = _tensor._nearest, []
    monkeypatch.setattr(_tensor, "_nearest", lambda x: sizes.append(x.size) or nearest(x))
    for one, other in zip(encode(matrix, 16), whole, strict=True):
        np.testing.assert_array_equal(one, other)
    assert sizes == [256, 256, 128]


@pytest.mark.slow
def test_zero_blocks_and_equal_scales_decode_to_themselves():
    kernel = jnp.concatenate([jnp.zeros((64, 3)), jnp.full((64, 3), -2.0)])
    for double in (False, True):
        part = {"kernel": kernel[64:]} if double else {"kernel": kernel}
        np.testing.assert_array_equal(
            nf4.dequantize(nf4.quantize(part, double=double))["kernel"], part["kernel"]
        )


@pytest.mark.slow  # only optimised kernels fuse a product into a sum: users_kernels_test
def test_a_jitted_decoding_is_the_decoding_to_the_last_bit():
    kernel = nf4.quantize({"kernel": weights(2, 256, 96)}, stack=1)["kernel"]
    np.testing.assert_array_equal(jax.jit(nf4.dequantize)(kernel), kernel.decode())


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.float16)]
)
def test_narrow_kernels_decode_to_their_dtype(dtype):
    kernel = weights(64, 4, dtype=dtype)
    decoded = nf4.dequantize(nf4.quantize({"kernel": kernel}))["kernel"]
    wide = nf4.dequantize(nf4.quantize({"kernel": kernel.astype(jnp.float32)}))["kernel"]
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded, wide.astype(dtype))


@pytest.mark.slow
def test_float64_kernels_are_quantised_as_float32(x64):
    kernel = weights(64, 4, dtype=jnp.float64)
    decoded = nf4.dequantize(nf4.quantize({"kernel": kernel}))["kernel"]
    narrow = nf4.dequantize(nf4.quantize({"kernel": kernel.astype(jnp.float32)}))["kernel"]
    assert decoded.dtype == jnp.float64
    np.testing.assert_array_equal(decoded, narrow.astype(jnp.float64))


# ---------------------------------------------------------------- form


@pytest.mark.slow
def test_slices_of_a_stack_are_the_stack_of_slices():
    kernel = weights(3, 64, 4)
    stacked = nf4.quantize({"kernel": kernel}, stack=1)["kernel"]
    singles = [nf4.quantize({"kernel": k})["kernel"] for k in kernel]
    assert equal(jax.tree.map(lambda x: x[1], stacked), singles[1])
    assert equal(jax.tree.map(lambda *x: jnp.stack(x), *singles), stacked)
    assert equal(nf4.quantize_slices(iter(kernel), length=3), stacked)
    assert stacked.shape == (3, 64, 4) and stacked.stack == (3,) and stacked.ndim == 3
    rows = jax.lax.scan(lambda c, w: (c, w.decode()), None, stacked)[1]
    np.testing.assert_array_equal(rows, stacked.decode())


def test_large_kernels_take_four_and_an_eighth_bits():
    kernel = jax.ShapeDtypeStruct((24, 3072, 3072), jnp.bfloat16)
    for double, bits in ((True, 4.128), (False, 4.5)):
        quantised = nf4.quantize({"kernel": kernel}, stack=1, double=double)["kernel"]
        assert 8 * quantised.nbytes / quantised.size == pytest.approx(bits, abs=1e-3)


@pytest.mark.exhaustive
def test_axes_of_a_kernel_are_those_of_the_program():
    params = {"q": weights(64, 2, 32), "o": weights(2, 32, 5), "e": weights(3, 64, 4)}

    def fn(p, x):  # experts of x, 2 x and 3 x
        heads = jnp.einsum("nd,dhk->nhk", x, p["q"])
        experts = jnp.einsum("ned,edo->neo", jnp.stack([x, 2 * x, 3 * x], 1), p["e"])
        return jnp.einsum("nhk,hkd->nd", heads, p["o"]), experts

    found = nf4.quantize(params, ".*", table=find_layers(fn, params, weights(4, 64)))
    plain = lambda w: nf4.quantize({"kernel": w})["kernel"]
    np.testing.assert_array_equal(found["q"].codes, plain(params["q"].reshape(64, 64)).codes)
    np.testing.assert_array_equal(found["o"].codes, plain(params["o"].reshape(64, 5)).codes)
    assert equal(jax.tree.map(lambda x: x[2], found["e"]), plain(params["e"][2]))
    decoded = nf4.dequantize(found)
    for name, kernel in params.items():
        assert found[name].shape == decoded[name].shape == kernel.shape
        assert jnp.abs(decoded[name] - kernel).max() < 0.16 * jnp.abs(kernel).max()


def test_only_what_is_named_is_quantised_and_nf4_stays():
    params = {"layers": {"kernel": weights(2, 64, 4), "bias": weights(2, 4)},
              "head": {"kernel": weights(64, 8)}, "step": jnp.int32(3)}  # fmt: skip
    once = nf4.quantize(params, "layers/kernel", stack=1)
    assert once["head"]["kernel"] is params["head"]["kernel"]
    twice = nf4.quantize(once)
    assert twice["layers"]["kernel"] is once["layers"]["kernel"]
    assert isinstance(twice["head"]["kernel"], nf4.NF4) and twice["step"] is params["step"]


@pytest.mark.exhaustive
def test_a_slice_is_gone_before_the_next_is_read():
    alive = []

    def slices():
        for i in range(4):
            gc.collect()
            assert not any(ref() is not None for ref in alive)
            kernel = np.full((64, 4), float(i), np.float32)
            alive.append(weakref.ref(kernel))
            yield kernel
            del kernel

    assert nf4.quantize_slices(slices(), length=4).shape == (4, 64, 4)


@pytest.mark.exhaustive
def test_curvature_of_adapters_is_that_on_the_decoded_base(x64):
    params = {"s": weights(2, 6, 6, dtype=jnp.float64), "w": weights(6, 3, dtype=jnp.float64)}
    batch = (weights(5, 6, dtype=jnp.float64), weights(5, 3, seed=1, dtype=jnp.float64))
    params4 = nf4.quantize(nf4.quantize(params, "s", stack=1, block=2), "w", block=6)

    def apply_fn(p, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["s"])[0] @ p["w"]

    config = Config(rank=2, target="s", fourier_placement="none")
    adapters = init(apply_fn, config, params4, batch[0], key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    adapted = attach(apply_fn, config)

    @jax.jit
    def statistics(adapters, params):
        objective = Objective(lambda adapters, x: adapted(params, adapters, x), Gaussian())
        return value_grad_and_factors(objective)(adapters, batch)

    found, expected = (statistics(adapters, p) for p in (params4, nf4.dequantize(params4)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layers": "kernl"}, "nearest names are .*kernel"),
        ({}, "kernel': 96 inputs are not divisible by block=64"),
        ({"block": 3}, "even number"),
        ({"layers": "stack"}, "'stack': with stack=0, .*got shape .*table="),
        ({"layers": "bad", "block": 2}, "'bad'.*: NaN or infinite"),
        ({"layers": "stack", "stack": 1, "block": 2}, r"'stack'\[1\]: NaN or infinite"),
    ],
)
def test_what_cannot_be_quantised_is_named(arguments, message):
    params = {"kernel": weights(96, 4), "stack": weights(2, 4, 4).at[1, 0, 0].set(jnp.inf),
              "bad": weights(4, 4).at[0, 1].set(jnp.nan)}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        nf4.quantize(params, **arguments)


def test_a_table_names_what_is_no_dense_layer():
    def fn(p, x):
        return (p["table"][x.argmax(-1)] @ p["table"].T) * p["scale"]

    params, x = {"table": weights(4, 4), "scale": weights(4)}, weights(2, 4)
    table = find_layers(fn, params, x)
    with pytest.raises(ValueError, match="'scale' is of kind 'scale'"):
        nf4.quantize(params, "scale", table=table, block=2)
    with pytest.raises(ValueError, match="'table'.*also read as an embedding"):
        nf4.quantize(params, "table", table=table, block=2)
    with pytest.raises(ValueError, match="made for a parameter of 16 elements"):
        nf4.quantize({"table": weights(6, 4)}, "table", table=table, block=2)
    with pytest.raises(ValueError, match="stack=1 and table="):
        nf4.quantize(params, table=table, stack=1)


def test_a_traced_kernel_and_one_too_large_for_float32_are_refused(x64):
    with pytest.raises(ValueError, match="'kernel' is traced"):
        jax.jit(nf4.quantize)({"kernel": weights(64, 2)})
    with pytest.raises(ValueError, match="infinite"):
        nf4.quantize({"kernel": jnp.full((64, 2), 1e300)})


@pytest.mark.parametrize(
    "shapes, length, message",
    [
        ([], 1, "expected 1 slices, got 0"),
        ([(64, 2)], 2, "expected 2 slices, got 1"),
        ([(64, 2)] * 2, 1, "expected 1 slices, got more"),
        ([(64, 2), (64, 3)], 2, r"slice 1: expected \(64, 2\)"),
        ([(60, 2)], 1, "60 inputs are not divisible"),
    ],
)
def test_slices_that_do_not_fit_are_refused(shapes, length, message):
    with pytest.raises(ValueError, match=message):
        nf4.quantize_slices((weights(*s) for s in shapes), length=length)


@pytest.mark.slow
def test_nothing_matched_is_an_unknown_layer():
    with pytest.raises(UnknownLayerError):
        nf4.quantize({"w": weights(64, 2)})
