"""Bytes that follow from equations, against counts by hand and against XLA."""

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.planning._temporaries import live_bytes

N = 64
SQUARE = 4 * N * N


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


x = shape(N, N)


def test_elementwise_results_take_no_room():
    assert live_bytes(lambda x: jnp.sin(2 * x + 1).sum(), x) == 0


def test_a_product_reads_what_has_been_written():
    # The last product's operand must lie somewhere; its result is the output.
    assert live_bytes(lambda x: ((2 * x) @ x).sum(), x) == 2 * SQUARE
    # Of three in a row, the first result lies where the third will.
    assert live_bytes(lambda x: ((x @ x) @ x) @ x, x) == SQUARE


def test_what_a_gradient_keeps_is_what_xla_allocates():
    def loss(w, x):
        for _ in range(5):
            x = jnp.tanh(x @ w)
        return (x * x).sum()

    rows = shape(8 * N, N)
    found = live_bytes(jax.grad(loss), x, rows)
    compiled = jax.jit(jax.grad(loss)).lower(x, rows).compile().memory_analysis()
    assert found == pytest.approx(compiled.temp_size_in_bytes, rel=0.1)
    assert found >= 5 * 8 * SQUARE  # one activation for each product


def test_a_scan_keeps_one_slice_for_each_iteration_and_a_checkpoint_only_its_carry():
    def loss(ws, x, *, remat):
        def body(x, w):
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

        body = jax.checkpoint(body) if remat else body
        return jax.lax.scan(body, x, ws)[0].sum()

    ws, rows = shape(16, N, N), shape(8 * N, N)
    kept, again = (
        live_bytes(jax.grad(lambda ws, x, r=remat: loss(ws, x, remat=r)), ws, rows)
        for remat in (False, True)
    )
    assert kept > 2 * 16 * 8 * SQUARE  # two results of tanh an iteration
    assert 16 * 8 * SQUARE < again < 0.75 * kept


def test_equal_equations_are_computed_once_but_not_across_a_barrier():
    def fn(x, y):
        a, b = (x @ x) @ x, (y @ y) @ y
        return a @ b

    def equal(x):
        z = x + 1
        return fn(z, z)

    def apart(x):
        z = x + 1
        return fn(z, jax.lax.optimization_barrier(z))

    assert live_bytes(equal, x) < live_bytes(apart, x)


def test_a_result_lies_where_a_donated_argument_was():
    def step(p, g):
        return p - (g @ g) * 0.1

    assert live_bytes(step, x, x) == 0  # the product lies where the result will
    assert live_bytes(step, x, x, donate_argnums=(0,)) == SQUARE  # there the old one is still read


def test_a_choice_by_platform_is_the_platforms():
    def fn(x):
        y = jax.lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: (2 * x) @ x)
        return y.sum()

    assert live_bytes(fn, x, platform="cpu") == 0
    assert live_bytes(fn, x, platform="cuda") == 2 * SQUARE


def test_transposed_operands_are_read_as_they_are():
    assert live_bytes(lambda x, y: x.T @ y, x, x) == 0


def test_a_stopped_gradient_is_no_copy():
    assert live_bytes(lambda x: (jax.lax.stop_gradient(x) @ x) @ x, x) == SQUARE


def test_what_a_scan_computes_and_nobody_reads_takes_no_room():
    """Neither its stack, nor what a carry that feeds the stack alone takes in an iteration."""

    def loss(w, x, both):
        def body(carry, _):
            x, other = carry
            other = other @ w
            return (jnp.tanh(x @ w), other), (x, other @ other.T)

        (last, _), (xs, squares) = jax.lax.scan(body, (x, x), None, length=6)
        return (last, xs, squares) if both else (last, xs)

    alone, both = (lambda w, x, b=b: loss(w, x, b) for b in (False, True))
    plain = live_bytes(alone, x, x)
    assert plain < live_bytes(both, x, x)
    assert live_bytes(both, x, x, only=2) == plain


def test_a_cpu_copies_the_operands_of_a_convolutions_derivative_in_its_kernel():
    """XLA transposes both: examples are summed over, where features were."""
    signal, kernel = shape(8, 16, 16, 4), shape(3, 3, 4, 4)

    def derivative(x, kernel, cotangent):
        def conv(kernel):
            axes = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes)

        return jax.vjp(conv, kernel)[1](cotangent)

    args = signal, kernel, signal
    compiled = jax.jit(derivative).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert live_bytes(derivative, *args, platform="cpu") == 2 * 4 * 8 * 16 * 16 * 4
    assert live_bytes(derivative, *args, platform="cpu") == pytest.approx(compiled, rel=0.05)
    assert live_bytes(derivative, *args, platform="cuda") == 0
