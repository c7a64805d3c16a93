"""Errors that say that memory ran out are known by what they say, and so are their bytes."""

import errno

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.memory import MemoryBudgetError, explain_out_of_memory, is_out_of_memory
from jaxkfac.memory._budget import asked_bytes

GIB = 2**30
RUN_OUT = [  # error, bytes it asks for
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 800 bytes."), 800),
    (
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device 0"
        ),
        184549376,
    ),
    (
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.50GiB."
        ),
        int(3.5 * GIB),
    ),
    (
        jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.00G of 15.48G hbm."
        ),
        18 * GIB,
    ),
    (RuntimeError("INTERNAL: cuSolver: CUDA_ERROR_OUT_OF_MEMORY: out of memory"), None),
    (MemoryError("std::bad_alloc"), None),
    (MemoryBudgetError("loading needs 2 GiB on cpu:0"), 2 * GIB),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), None),
]
OTHERS = [
    jax.errors.JaxRuntimeError("INVALID_ARGUMENT: memory"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Too many open files"),
    jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 239616"
    ),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("out of memory"),
]


@pytest.mark.parametrize(("error", "expected"), RUN_OUT, ids=lambda x: str(x)[:40])
def test_memory_that_ran_out_is_known_with_its_bytes(error, expected):
    assert is_out_of_memory(error) and asked_bytes(error) == expected
    assert explain_out_of_memory(error).startswith("out of memory")


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_left_alone(error):
    assert not is_out_of_memory(error) and asked_bytes(error) is None
    with pytest.raises(ValueError, match="expected an error that says that memory ran out"):
        explain_out_of_memory(error)


def test_what_an_error_was_raised_from_counts():
    with pytest.raises(ValueError) as caught:
        raise ValueError("the checkpoint could not be written") from MemoryError()
    assert is_out_of_memory(caught.value)


def test_numpys_error_says_what_its_shape_needs():
    with pytest.raises(MemoryError) as caught:
        np.empty((2**20, 2**35), np.float32)
    assert asked_bytes(caught.value) == 2**57


def test_jax_raises_such_an_error_and_the_answer_has_its_bytes():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jnp.ones(2**44, jnp.float32).block_until_ready()
    assert is_out_of_memory(caught.value)
    words = explain_out_of_memory(caught.value)
    assert "6.55e+04 GiB were asked for" in words and "jk.plan_memory" in words


def test_decimals_are_not_taken_for_a_count_of_bytes():
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00B")
    assert asked_bytes(error) is None
