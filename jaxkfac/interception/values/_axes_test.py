"""Axis atoms: what is known to be the same axis, and what only looks like it."""

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.interception._analysis import Analysis
from jaxkfac.interception.values._axes import AxisTable


def output_axes(fn, *args):
    """``(table, axes of the inputs, axes of the first output)``, in today's atoms."""
    closed = jax.make_jaxpr(fn)(*args)
    analysis = Analysis(closed, [None] * len(closed.jaxpr.invars))
    table = analysis.table
    ins = [[table.atoms(a) for a in axes] for axes in analysis.data_axes]
    return table, ins, [table.atoms(a) for a in analysis.outputs[0].axes]


def test_regroup_splits_where_a_boundary_falls_inside():
    table = AxisTable()
    axis = table.new(12, "data")
    three, four = table.regroup([axis], [3, 4])
    assert [table.size(a) for a in table.atoms(axis)] == [3, 4]
    assert table.atoms(axis) == (*three, *four)


def test_regroup_refuses_boundaries_that_do_not_divide():
    table = AxisTable()
    assert table.regroup([table.new(4, "data"), table.new(3, "data")], [6, 2]) is None


@pytest.mark.parametrize("swapped", [False, True])
def test_unify_splits_the_larger_axis(swapped):
    table = AxisTable()
    merged = table.new(6, "data")
    parts = (*table.new(2, "data"), *table.new(3, "data"))
    table.unify(*((parts, merged) if swapped else (merged, parts)))
    assert table.atoms(merged) == table.atoms(parts)


def test_axes_of_size_one_have_no_atoms():
    assert AxisTable().new(1, "data") == ()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.exp(x).sum(-1),
        lambda x: x.reshape(15, 4).reshape(3, 5, 4).max(2),
        lambda x: jnp.swapaxes(jnp.swapaxes(x, 0, 1), 0, 1)[..., 0],
        lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=3)[0],
        lambda x: jax.checkpoint(jnp.sin)(x),
        lambda x: jax.nn.softmax(x @ jnp.swapaxes(x, 1, 2)) @ x,
        lambda x: x.at[:, :2].set(0.0),
        lambda x: jnp.stack([x, jnp.zeros_like(x)], 2),
        lambda x: jnp.stack([jnp.zeros_like(x), x], -1),
        lambda x: jax.lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 0), (1, 0, 0))),
        lambda x: jax.lax.top_k(x, 2)[0],
    ],
)
def test_examples_and_positions_are_followed(fn):
    _, (x,), out = output_axes(fn, jnp.ones((3, 5, 4)))
    assert out[:2] == x[:2]


def test_equal_sizes_are_not_the_same_axis():
    table, (x, y), _ = output_axes(lambda x, y: x @ y.T, jnp.ones((5, 4)), jnp.ones((5, 4)))
    assert x[0] != y[0]
    assert x[1] == y[1], "contracted together"


def test_constants_do_not_propagate():
    """A causal mask of shape (S, S) must not make queries and keys one axis."""

    def scores(q, k):
        return jnp.where(jnp.tri(5, dtype=bool), q @ jnp.swapaxes(k, 1, 2), 0.0)

    _, (q, k), out = output_axes(scores, jnp.ones((2, 5, 4)), jnp.ones((2, 5, 4)))
    assert out[1] == q[1]
    assert out[2] == k[1]
    assert q[1] != k[1]


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, 1:],
        lambda x: jax.lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))),  # of the same length, but shifted
        lambda x: jax.lax.top_k(x.T, 2, axis=0)[0].T,
    ],
)
def test_a_cut_axis_is_a_new_axis(cut):
    table, (x,), out = output_axes(cut, jnp.ones((3, 5)))
    assert out[0] == x[0]
    assert out[1] != x[1]
    assert table.kinds(out[1][0]) == {"derived"}


def test_an_unknown_primitive_claims_nothing():
    unknown = lambda x: jax.pure_callback(lambda x: x, x, x)
    table, _, out = output_axes(unknown, jnp.ones((3, 5)))
    assert all(table.kinds(a) == {"derived"} for axis in out for a in axis)


def test_a_transform_keeps_the_axes_that_it_does_not_transform():
    table, (x,), out = output_axes(lambda x: jnp.fft.fft2(x).real, jnp.ones((3, 4, 5)))
    assert out[0] == x[0]
    assert all(table.kinds(a) == {"derived"} for axis in out[1:] for a in axis)


def test_views_side_by_side_are_rows_again_once_they_are_cut():
    def crops(x):
        both = jnp.sin(jnp.concatenate([x, 2 * x]))
        one, other = jnp.split(both, 2)
        return one + other + both[5:]

    _, (given,), found = output_axes(crops, jnp.ones((5, 3)))
    assert found[0] == given[0] != ()


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: jnp.concatenate([x, x])[2:8],  # of two views
        lambda x: (x.reshape(2, 3, 4) * 1, x[:3])[1],  # a block of an axis that was split
        lambda x: jnp.concatenate([x, x[::-1]])[:6],  # beside other rows
    ],
)
def test_other_parts_are_axes_of_their_own(cut):
    _, (given,), found = output_axes(cut, jnp.ones((6, 4)))
    assert not set(found[0]) & set(given[0])
