"""Convolutions in loops and branches: the same numbers, in an order that a CPU has a kernel for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkfac.interception import fast_convolutions

# In float64: sums in another order differ by as much as a processor's kernels make of it.
pytestmark = pytest.mark.usefixtures("x64")
EXACT = {"rtol": 1e-12, "atol": 1e-12}

IMAGES = np.random.default_rng(0).normal(size=(4, 6, 6, 2))
KERNEL = np.random.default_rng(1).normal(size=(3, 3, 2, 4))


def convolved(kernel, x, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    return lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)


def channels_first(kernel, x):
    x, kernel = x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1)
    return lax.conv(x, kernel, (2, 2), "VALID")


def in_a_line(kernel, x):
    numbers = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(x[:, 0], kernel[0], (1,), "SAME", dimension_numbers=numbers)


def in_a_branch(kernel, x):
    return lax.cond(x.sum() < 1e9, lambda: convolved(kernel, x), lambda: x @ kernel[0, 0])


MODELS = {
    "same": convolved,
    "stride": lambda k, x: convolved(k, x, window_strides=(2, 2)),
    "dilated": lambda k, x: convolved(k, x, rhs_dilation=(2, 2)),
    "depthwise": lambda k, x: convolved(k.reshape(3, 3, 1, 8), x, feature_group_count=2),
    "channels first": channels_first,
    "in a line": in_a_line,
    "in a jit": jax.jit(convolved),
    "in a checkpoint": jax.checkpoint(convolved),
    "in a branch": in_a_branch,
    "none": lambda k, x: x @ k[0, 0],
}


def derivative(model):
    return jax.value_and_grad(lambda *args: (jnp.tanh(model(*args)) ** 2).sum(), argnums=(0, 1))


@pytest.mark.default(2, slow=2)
@pytest.mark.parametrize("name", MODELS)
def test_a_derivative_in_a_branch_has_the_numbers_and_the_order_of_one_outside(name):
    fn = derivative(MODELS[name])
    expected = jax.jit(fn)(KERNEL, IMAGES)

    def run(due, kernel, x):
        nothing = lambda *args: jax.tree.map(jnp.zeros_like, expected)
        return lax.cond(due, fast_convolutions(fn), nothing, kernel, x)

    program = jax.jit(run).lower(True, KERNEL, IMAGES).compile()
    for mine, other in zip(*map(jax.tree.leaves, (program(True, KERNEL, IMAGES), expected))):
        np.testing.assert_allclose(mine, other, **EXACT)
    orders = set(re.findall(r"dim_labels=(\S+?),", program.as_text()))
    assert bool(orders) == (name != "none")
    if name not in ("depthwise", "channels first"):  # XLA makes others of their derivatives
        assert orders <= {"b01f_01io->b01f", "b0f_0io->b0f"}


def test_other_platforms_get_the_program_as_it_is():
    fn = derivative(convolved)
    here, there = (
        jax.export.export(jax.jit(f), platforms=["cuda"])(KERNEL, IMAGES).mlir_module()
        for f in (fast_convolutions(fn), fn)
    )
    assert here.count("stablehlo.convolution") == there.count("stablehlo.convolution") == 3
    assert here.count("stablehlo.transpose") == there.count("stablehlo.transpose")


def test_results_that_are_known_beforehand_are_arrays():
    out = fast_convolutions(lambda k, x: (convolved(k, x), 1.0, k))(KERNEL, IMAGES)
    assert isinstance(out[1], jax.Array) and out[2] is not None


@pytest.mark.slow
def test_it_can_be_mapped_and_differentiated():
    fn = lambda k, x: (convolved(k, x) ** 2).sum()
    for transform in (jax.grad, jax.hessian, lambda f: jax.vmap(f, (None, 0))):
        x = IMAGES[:, None] if transform not in (jax.grad, jax.hessian) else IMAGES[:1]
        found, expected = (transform(f)(KERNEL, x) for f in (fast_convolutions(fn), fn))
        np.testing.assert_allclose(found, expected, **EXACT)


def test_a_constant_array_inside_of_a_checkpoint_goes_along():
    mask = np.asarray(np.arange(4) > 1, float)
    inner = jax.jit(lambda k, x: convolved(k, x) * mask)
    fn = derivative(jax.checkpoint(inner))
    found, expected = jax.jit(fast_convolutions(fn))(KERNEL, IMAGES), fn(KERNEL, IMAGES)
    for mine, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(mine, other, **EXACT)


def test_what_has_been_transposed_is_not_taken_apart_again():
    once = fast_convolutions(derivative(convolved))
    both = (jax.make_jaxpr(f)(KERNEL, IMAGES) for f in (once, fast_convolutions(once)))
    one, twice = (str(x).count("conv_general_dilated") for x in both)
    assert one == twice
