"""A part of the rows: each as likely as any other, and only those that exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.kinds._moments import Products, draw_rows

KEYS = jax.random.split(jax.random.key(0), 4000)


def times_drawn(number, kept, there=None):
    index, count = jax.vmap(lambda key: draw_rows(key, number, kept, there))(KEYS)
    drawn = jax.vmap(lambda row: jnp.zeros(number).at[row].add(1.0))(index)
    return np.asarray(drawn), np.asarray(count)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "kept"), [(12, 3), (13, 5), (7, 6), (5, 1)])
def test_every_row_is_as_likely_as_any_other(number, kept):
    drawn, count = times_drawn(number, kept)
    assert (count == np.float32(number / kept)).all()
    error = drawn.std(0) / np.sqrt(len(KEYS))
    assert (abs(drawn.mean(0) - kept / number) < 4 * error).all()


@pytest.mark.slow
def test_rows_that_do_not_exist_are_not_drawn():
    there = jnp.array([1, 0, 0, 1, 1, 0, 1, 1, 0, 1], bool)
    drawn, count = times_drawn(10, 3, there)
    assert not drawn[:, ~there].any()
    assert (count == np.float32(6 / 3)).all()
    error = drawn.std(0) / np.sqrt(len(KEYS))
    assert (abs(drawn.mean(0) - 0.5)[there] < 4 * error[there]).all()


def test_where_no_row_exists_one_is_drawn_all_the_same():
    index, count = draw_rows(KEYS[0], 4, 2, jnp.zeros(4, bool))
    assert np.isfinite(count) and ((index >= 0) & (index < 4)).all()


def test_neighbours_in_a_draw_lie_apart():
    index, _ = draw_rows(KEYS[0], 1000, 10, None)
    gaps = np.diff(np.sort(index))
    assert gaps.max() <= 200 and len(set(index.tolist())) == 10


def test_the_precision_of_a_layer_is_the_better_of_its_two():
    def product(precision):
        return jax.make_jaxpr(lambda x: jnp.dot(x, x, precision=precision))(jnp.ones((2, 2)))

    own = Products(precision="auto")
    for given, expected in (
        (None, None),
        (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT),
        (("default", "highest"), jax.lax.Precision.HIGHEST),
    ):
        (eqn,) = product(given).jaxpr.eqns
        assert own.precision_of(eqn) == expected
        assert Products().precision_of(eqn) == jax.lax.Precision.HIGHEST
