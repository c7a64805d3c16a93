"""Tensors of a checkpoint and back; ``tests/nf4_test.py`` holds them to bitsandbytes' own."""

import json

import jax
import numpy as np
import pytest

from jaxkfac.lslora import nf4

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
    ],
)
def test_a_shape_or_a_block_that_is_none_is_named(changes, message):
    with pytest.raises(ValueError, match=f"w: {message}"):
        nf4.from_bitsandbytes(with_state(**changes), "w")
