"""Sums of squares of gradients in an eigenbasis, by every route, against forming them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.kinds import _both_sides
from jaxkfac.kinds._both_sides import (
    BasisSquares,
    BothSides,
    Gradients,
    sum_over_strided_chunks,
)
from jaxkfac.kinds._squares import (
    PAIRS_UP_TO,
    Basis,
    gradients,
    rotate_gradients,
    squares_by_example,
    squares_by_row,
    squares_by_token,
)

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape))


def sides(positions, stack=(), n_in=3, n_out=4, n=5):
    return normal(n, positions, *stack, n_in), normal(n, positions, *stack, n_out)


def basis_of(stack, n_in, n_out, *, ones=False, dense=(True, True), constant=None):
    a, g = normal(*stack, n_in + ones, n_in + ones), normal(*stack, n_out, n_out)
    return Basis(a if dense[0] else None, g if dense[1] else None, ones, constant)


def formed(x, g, basis):
    """Every example's gradient in the eigenbasis, ``(stack..., n, in, out)``."""
    x = x if basis.constant is None else x * basis.constant
    x = jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1))], -1) if basis.ones else x
    gradient = jnp.einsum("ns...i,ns...o->...nio", x, g)
    if basis.a is not None:
        gradient = jnp.einsum("...nio,...ij->...njo", gradient, basis.a)
    if basis.g is not None:
        gradient = jnp.einsum("...nio,...op->...nip", gradient, basis.g)
    return gradient


def assert_close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("stack", [(), (2,), (2, 3)])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("dense", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("positions", [1, PAIRS_UP_TO, PAIRS_UP_TO + 1, 40])
def test_every_route_sums_the_same_squares(stack, ones, dense, positions):
    """Single rows, pairs, gradients of rotated rows, and rotated gradients."""
    x, g = sides(positions, stack)
    basis = basis_of(stack, 3, 4, ones=ones, dense=dense, constant=jnp.full(stack, 3.0))
    basis_by_hand = dataclasses.replace(basis, constant=3.0)
    expected = formed(x, g, basis_by_hand)
    assert_close(gradients(x, g, basis), expected)
    assert_close(squares_by_example(x, g, basis), jnp.square(expected).sum(-3))
    apart = formed(*(y.reshape(-1, 1, *y.shape[2:]) for y in (x, g)), basis_by_hand)
    assert_close(squares_by_row(x, g, basis, 2), jnp.square(apart).sum(-3))


def test_both_orders_of_rotation_are_used():
    """Otherwise the test above would hold one of them to nothing."""
    counts = {}
    for positions in (PAIRS_UP_TO + 1, 40):
        x, g = sides(positions, n_in=8, n_out=8)
        basis = basis_of((), 8, 8)
        jaxpr = jax.make_jaxpr(lambda x, g, basis=basis: gradients(x, g, basis))(x, g)
        first = next(e for e in jaxpr.eqns if e.primitive.name == "dot_general")
        counts[positions] = first.outvars[0].aval.shape
    assert counts == {PAIRS_UP_TO + 1: (5, PAIRS_UP_TO + 1, 8), 40: (5, 8, 8)}


def test_gradients_rotate_like_their_rows():
    x, g = sides(3, (2,))
    basis = basis_of((2,), 3, 4)
    plain = formed(x, g, Basis())
    assert_close(rotate_gradients(plain, basis.a, basis.g), formed(x, g, basis))


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("positions", [1, 7])
def test_tokens_of_an_example_are_summed_before_they_are_squared(positions):
    """Tokens out of range belong to no row of the table."""
    tokens, g = RNG.integers(0, 6, (5, positions)).astype(np.int32), normal(5, positions, 3)
    table = np.zeros((5, 6, 3))
    np.add.at(table, (np.arange(5)[:, None], tokens), np.asarray(g))
    found = squares_by_token(jnp.asarray(tokens), g, 4)
    assert_close(found, np.square(table[:, :4]).sum(0))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_chunks_add_up_whatever_is_left_over(size):
    x, y = normal(7, 3), normal(7, 2)
    found = jax.jit(lambda *xs: sum_over_strided_chunks(_sums, xs, size))(x, y)
    jax.tree.map(assert_close, found, _sums((x, y)))


def _sums(arrays):
    x, y = arrays
    return {"products": x.T @ y, "squares": jnp.square(x).sum(0)}


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_gradients_several_at_once_are_those_one_by_one(monkeypatch, at_once):
    """What accelerators do, and what the CPU does."""
    x, g = sides(9, (2,))
    basis, expected = basis_of((2,), 3, 4, ones=True), formed(x, g, Basis())
    monkeypatch.setattr(_both_sides, "one_by_one_on_cpu", lambda fn, arrays, _: fn(arrays, at_once))
    both = BothSides((x, g), by_example=True)
    like = BasisSquares(jnp.zeros((2, 4, 4)), jnp.zeros((2, 4)))
    found = both.squares(like, basis)
    assert_close(found.weight, jnp.square(formed(x, g, basis)).sum(-3))
    rotated = jnp.einsum("nseo,eop->enp", g, basis.g)
    assert_close(found.bias, jnp.square(rotated).sum(1))
    like = Gradients(jnp.zeros((2, 5, 3, 4)), jnp.zeros((2, 5, 4)))
    found = both.gradients(like)
    assert_close(found.weight, expected)
    assert_close(found.bias, g.sum(1).swapaxes(0, 1))
