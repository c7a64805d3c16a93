"""Operands that are returned unchanged or read, through every structured primitive."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxkfac._interpreter import live_inputs
from jaxkfac.flax._nnx import passed_through

A, B = jnp.ones((3, 2)), jnp.zeros((3, 2))


def scanned(body, *args, **options):
    return lambda a, b: lax.scan(body, a[0], (a, b), *args, **options)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda a, b: (b, a, a + b, 1.0), [1, 0, None, None]),
        (jax.jit(lambda a, b: (b, 2 * a)), [1, None]),
        (jax.checkpoint(lambda a, b: (b, 2 * a)), [1, None]),
        (lambda a, b: lax.cond(a[0, 0] > 0, lambda: (a, b), lambda: (b, b)), [None, 1]),
        (scanned(lambda c, xs: (c, (xs[1], xs[0]))), [None, 1, 0]),
        (scanned(lambda c, xs: (xs[0], (c, xs[1] + 1, xs[0]))), [None, None, None, 0]),
        (
            lambda a, b: lax.scan(lambda c, _: ((c[0], c[1] + 1), c[0]), (a, b), length=2),
            [0, None, None],
        ),
        (
            lambda a, b: lax.while_loop(lambda c: c[0][0, 0] > 0, lambda c: (c[1], c[0]), (a, b)),
            [None, None],
        ),
    ],
)
def test_results_that_are_operands_are_found_and_no_others(fn, expected):
    closed = jax.make_jaxpr(fn)(A, B)
    assert passed_through(closed.jaxpr, closed.consts) == expected


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda a, b: (b, a, a + b, 1.0), [False, True, True, False]),
        (jax.jit(lambda a, b: (b, 2 * a)), [False, True]),
        (jax.checkpoint(lambda a, b: (b, a.at[0].set(0))), [False, True]),
        (lambda a, b: lax.cond(b[0, 0] > 0, lambda: (a, b), lambda: (b, 2 * b)), [True, False]),
        (lambda a, b: lax.cond(a[0, 0] > 0, lambda: b, lambda: 2 * b), [True]),
        # the first carry reads `a` two iterations later
        (
            lambda a, b: lax.scan(
                lambda c, _: ((c[1], c[2], c[2], c[3]), c[3]), (b, b, a, b), length=3
            ),
            [True, True, True, False, False],
        ),
        (scanned(lambda c, xs: (2 * c, xs[1])), [True, False]),
        (
            lambda a, b: lax.while_loop(
                lambda c: c[0] < a[0, 0], lambda c: (c[0] + 1, 2 * c[1]), (0.0, b)
            ),
            [True, True],
        ),
    ],
)
def test_results_that_read_the_first_operand_are_found(fn, expected):
    jaxpr = jax.make_jaxpr(fn)(A, B).jaxpr
    read = [live_inputs(jaxpr, {k}, lambda *_: None) for k in range(len(jaxpr.outvars))]
    assert [0 in inputs for inputs in read] == expected
