"""NF4 against bitsandbytes (on the CPU) and qwix: codes, scales, decoded weights, checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxkfac.lslora import nf4
from jaxkfac.lslora.nf4._tensor import (
    LEVELS,
    MIDPOINTS,
    encode,
    encode_scales,
    nested_codes,
    nested_levels,
)

functional = pytest.importorskip("bitsandbytes.functional")


def random(seed, outs=96, ins=320):
    return np.random.default_rng(seed).normal(size=(outs, ins)).astype(np.float32)


def heavy_tails(seed):
    return np.random.default_rng(seed).standard_cauchy((40, 256)).astype(np.float32)


def midpoints():
    """Every midpoint and its neighbours, in blocks whose scale is one, a power of two, and odd."""
    up, down = np.float32(2), np.float32(-2)
    x = np.concatenate([MIDPOINTS, np.nextafter(MIDPOINTS, up), np.nextafter(MIDPOINTS, down)])
    x = np.concatenate([x, LEVELS, np.zeros(3, np.float32)])
    return np.stack([x, 4 * x, np.float32(0.3) * x, -x])


def one_huge():
    x = random(1, 8, 128) * np.float32(1e-6)
    x[3, 70] = 3e38
    return x


def zeros():
    x = random(2, 8, 128)
    x[2], x[5, :64] = 0.0, -0.0
    return x


def denormals():
    x = random(3, 8, 128) * np.float32(1e-39)
    x[0, 0], x[1, :] = 1.0, 1e-45
    return x


TENSORS = {
    "normal": random(0),
    "one row": random(4, 1, 64),
    "more than one nested block, and a rest": random(5, 70, 1024),
    "heavy tails": heavy_tails(6),
    "bounded": np.random.default_rng(7).uniform(-1, 1, (64, 128)).astype(np.float32),
    "few values": np.random.default_rng(8).choice(LEVELS, (64, 128)),
    "midpoints": midpoints(),
    "one huge value": one_huge(),
    "zeros": zeros(),
    "denormal numbers": denormals(),
    "all equal": np.full((16, 64), -0.7, np.float32),
}


def theirs(weight, dtype=torch.float32, block=64, nested=True):
    return functional.quantize_4bit(
        torch.tensor(weight).to(dtype),
        blocksize=block,
        quant_type="nf4",
        compress_statistics=nested,
    )


def state_dict(weight, name="proj.weight", **kwargs):
    """Tensors of a checkpoint, as bitsandbytes writes them."""
    packed, state = theirs(weight, **kwargs)
    parts = {f"{name}.{key}": x.numpy() for key, x in state.as_dict(packed=True).items()}
    return {name: packed.numpy(), **parts}, functional.dequantize_4bit(packed, state)


def bits(x):
    return np.asarray(x, np.float32).view(np.int32)


@pytest.mark.parametrize("name", TENSORS)
def test_codes_and_scales_are_those_of_bitsandbytes(name):
    weight = TENSORS[name]
    packed, state = theirs(weight, nested=False)
    codes, scales = encode(weight, 64)
    np.testing.assert_array_equal(codes.reshape(-1), packed.numpy().reshape(-1))
    np.testing.assert_array_equal(bits(scales.reshape(-1)), bits(state.absmax.numpy()))


@pytest.mark.parametrize("name", TENSORS)
def test_the_second_level_is_that_of_bitsandbytes_for_the_same_mean(name):
    _, state = theirs(TENSORS[name])
    _, scales = encode(TENSORS[name], 64)
    codes, nested, _ = encode_scales(scales, np.float32(state.offset))
    np.testing.assert_array_equal(codes.reshape(-1), state.absmax.numpy())
    np.testing.assert_array_equal(bits(nested), bits(state.state2.absmax.numpy()))


@pytest.mark.parametrize("name", TENSORS)
def test_the_mean_of_the_scales_is_pytorchs_but_for_its_last_bits(name):
    _, state = theirs(TENSORS[name])
    offset = encode_scales(encode(TENSORS[name], 64)[1])[2]
    # PyTorch adds in float32, in an order that depends on vectors and threads.
    np.testing.assert_allclose(offset, state.offset.numpy(), rtol=1e-6, atol=0)


def test_code_books_are_those_of_bitsandbytes():
    _, state = theirs(random(0))
    np.testing.assert_array_equal(bits(LEVELS), bits(state.code.numpy()))
    # PyTorch's linspace, of which bitsandbytes makes these, rounds as the processor's kernels do.
    np.testing.assert_array_max_ulp(nested_levels(), state.state2.code.numpy(), maxulp=2)
    grid = np.random.default_rng(0).uniform(-1, 1, 2**16).astype(np.float32)
    grid = np.concatenate([[1.0], grid, nested_levels(), [0.0]]).astype(np.float32)
    found = functional.quantize_blockwise(torch.tensor(grid), blocksize=grid.size)[0].numpy()
    position = (grid + np.float32(1)) * np.float32(0.5) * np.float32(65535) + np.float32(0.5)
    np.testing.assert_array_equal(nested_codes()[position.astype(int)], found)


# XLA on a CPU flushes denormal numbers to zero, so what decodes to one is compared to its size.
SMALLEST = float(np.finfo(np.float32).tiny)


@pytest.mark.default(7, slow=4)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_a_checkpoint_is_decoded_to_the_last_bit(name, nested):
    tensors, expected = state_dict(TENSORS[name], nested=nested)
    kernel = nf4.from_bitsandbytes(tensors, "proj.weight")
    decoded = np.asarray(jax.jit(nf4.dequantize)(kernel)).T
    expected = expected.numpy()
    normal = np.abs(expected) >= SMALLEST
    np.testing.assert_array_equal(decoded[normal], expected[normal])
    np.testing.assert_allclose(decoded[~normal], expected[~normal], rtol=0, atol=SMALLEST)
    assert normal.any() or name == "denormal numbers"


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_comes_back_byte_for_byte(nested):
    tensors, _ = state_dict(random(9), nested=nested)
    again = nf4.to_bitsandbytes(nf4.from_bitsandbytes(tensors, "proj.weight"), "proj.weight")
    assert again.keys() == tensors.keys()
    for key, value in tensors.items():
        assert again[key].dtype == value.dtype and again[key].shape == value.shape
        np.testing.assert_array_equal(again[key], value)


@pytest.mark.default(1, slow=1)
@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [
        (torch.bfloat16, jnp.bfloat16),
        pytest.param(torch.float16, jnp.float16, marks=pytest.mark.float16),
    ],
)
@pytest.mark.parametrize("block", [32, 128])
def test_other_blocks_and_narrow_dtypes_are_decoded_alike(block, dtype, narrow):
    tensors, expected = state_dict(random(10, 8, 256), dtype=dtype, block=block)
    decoded = nf4.dequantize(nf4.from_bitsandbytes(tensors, "proj.weight"))
    assert decoded.dtype == narrow
    np.testing.assert_array_equal(
        np.asarray(decoded, np.float32).T, expected.to(torch.float32).numpy()
    )


def test_own_codes_are_read_by_bitsandbytes():
    weight = random(11)
    kernel = nf4.quantize({"kernel": jnp.asarray(weight.T)})["kernel"]
    tensors = {k: torch.tensor(v) for k, v in nf4.to_bitsandbytes(kernel, "w").items()}
    parts = {k.removeprefix("w."): v for k, v in tensors.items() if k != "w"}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    expected = functional.dequantize_4bit(tensors["w"], state).numpy()
    np.testing.assert_array_equal(np.asarray(nf4.dequantize(kernel)).T, expected)


def test_bytes_stored_as_another_dtype_are_the_same_bytes():
    tensors, _ = state_dict(random(12))
    kernel = nf4.from_bitsandbytes(tensors, "proj.weight")
    viewed = tensors | {"proj.weight": tensors["proj.weight"].reshape(-1).view(np.float32)}
    again = nf4.from_bitsandbytes(viewed, "proj.weight")
    np.testing.assert_array_equal(again.codes, kernel.codes)


def broken(key, change):
    tensors, _ = state_dict(random(13))
    tensors[f"proj.weight{key}"] = change(tensors.pop(f"proj.weight{key}"))
    return {k: v for k, v in tensors.items() if v is not None}


def with_state(**changes):
    def change(packed):
        state = json.loads(bytes(packed)) | changes
        return np.frombuffer(json.dumps(state).encode(), np.uint8)

    return broken(".quant_state.bitsandbytes__nf4", change)


@pytest.mark.parametrize(
    "tensors, message",
    [
        (broken(".absmax", lambda x: None), "expected 'proj.weight.absmax'"),
        (broken(".absmax", lambda x: x[:-1]), "expected 480 elements, got 479"),
        (broken(".quant_map", lambda x: -x), "16 levels"),
        (broken("", lambda x: x[:-1]), "expected 15360 elements"),
        (with_state(shape=[320, 96]), "96 inputs are not divisible"),
        (with_state(shape=[96]), "expected a matrix"),
        (with_state(nested_blocksize=128), "nested blocks of 256, got 128"),
        (with_state(dtype="float64"), "got 'float64'"),
        ({"other.weight.quant_state.bitsandbytes__nf4": np.zeros(1)}, "'other.weight'"),
        ({"proj.weight.quant_state.bitsandbytes__fp4": np.zeros(1)}, "is FP4"),
        (broken(".quant_state.bitsandbytes__nf4", lambda x: x[:-3]), "expected JSON"),
    ],
)
def test_a_damaged_checkpoint_is_named(tensors, message):
    with pytest.raises(ValueError, match=message):
        nf4.from_bitsandbytes(tensors, "proj.weight")


def test_a_stack_or_an_unknown_block_is_not_exported():
    stacked = nf4.quantize({"kernel": jnp.ones((2, 64, 4))}, stack=1)["kernel"]
    with pytest.raises(ValueError, match="a stack"):
        nf4.to_bitsandbytes(stacked, "w")
    with pytest.raises(ValueError, match="blocks of"):
        nf4.to_bitsandbytes(nf4.quantize({"kernel": jnp.ones((64, 4))}, block=2)["kernel"], "w")


@pytest.mark.standard_promotion
def test_codes_and_scales_are_those_of_qwix():
    qwix = pytest.importorskip("qwix")
    kernel = jnp.asarray(random(14).T)
    own = nf4.quantize({"kernel": kernel}, double=False)["kernel"]
    theirs = qwix.quantize(kernel, "nf4", channelwise_axes=(1,), tiled_axes={0: 64})
    codes = np.stack([own.codes >> 4, own.codes & 15], -1).reshape(96, 320).T
    # A quotient there, a product with the reciprocal here and in bitsandbytes.
    different = np.asarray(theirs.qvalue).astype(np.uint8) != codes
    assert different.mean() < 1e-4
    np.testing.assert_array_equal(np.asarray(theirs.scale).reshape(5, 96), own.absmax.T)
