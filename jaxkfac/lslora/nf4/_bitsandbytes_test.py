"""Tensors of a checkpoint and back; ``tests/nf4_test.py`` holds them to bitsandbytes' own."""

import json

import jax
import numpy as np
import pytest

from jaxkfac.lslora import nf4
from jaxkfac.memory import cast_once

KERNEL = nf4.quantize({"kernel": jax.random.normal(jax.random.key(0), (64, 6))})["kernel"]
STATE = "w.quant_state.bitsandbytes__nf4"


def with_state(**changes):
    tensors = nf4.to_bitsandbytes(KERNEL, "w")
    state = json.loads(bytes(tensors[STATE])) | changes
    return tensors | {STATE: np.frombuffer(json.dumps(state).encode(), np.uint8)}


@pytest.mark.parametrize("double", [False, True])
def test_a_kernel_comes_back_as_it_was(double):
    kernel = nf4.quantize({"kernel": jax.random.normal(jax.random.key(1), (128, 6))}, double=double)
    kernel = kernel["kernel"]
    again = nf4.from_bitsandbytes(nf4.to_bitsandbytes(kernel, "w"), "w")
    assert jax.tree.structure(again) == jax.tree.structure(kernel)
    jax.tree.map(np.testing.assert_array_equal, again, kernel)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [6, 64, 1]}, "expected a matrix in blocks"),
        ({"shape": "6, 64"}, "expected a matrix in blocks"),
        ({"blocksize": None}, "expected a matrix in blocks"),
        ({"blocksize": "64"}, "expected a matrix in blocks"),
        ({"blocksize": 0}, "64 inputs are not divisible by its blocks of 0"),
        ({"blocksize": -64}, "64 inputs are not divisible by its blocks of -64"),
        ({"nested_offset": None}, "expected a nested_offset"),
    ],
)
def test_a_shape_or_a_block_that_is_none_is_named(changes, message):
    with pytest.raises(ValueError, match=f"w: {message}"):
        nf4.from_bitsandbytes(with_state(**changes), "w")


def test_scales_of_another_level_are_refused():
    tensors = nf4.to_bitsandbytes(KERNEL, "w")
    alone = {key: x for key, x in tensors.items() if "nested" not in key}
    with pytest.raises(ValueError, match=r"w.absmax: expected float32 beside no second level"):
        nf4.from_bitsandbytes(alone, "w")
    decoded = tensors | {"w.absmax": np.asarray(KERNEL.scales()).reshape(-1)}
    with pytest.raises(ValueError, match=r"w.absmax: expected uint8 beside a second level"):
        nf4.from_bitsandbytes(decoded, "w")


@pytest.mark.parametrize("double", [False, True])
def test_scales_that_a_cast_of_the_tree_rounded_are_refused(double):
    params = nf4.quantize({"kernel": jax.random.normal(jax.random.key(1), (128, 6))}, double=double)
    with pytest.raises(TypeError, match="are bfloat16, and float32 is expected"):
        nf4.dequantize(cast_once(params, "bfloat16"))
