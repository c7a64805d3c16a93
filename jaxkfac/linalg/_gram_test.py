"""Second moments: panels hold the same matrix, precision does not fall."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.linalg import _gram
from jaxkfac.linalg._gram import (
    _gathered,
    _written,
    gram,
    gram_panels,
    has_panels,
    panel_shapes,
    statistics_dtype,
    symmetric_gram,
    unpack_panels,
)


def rows(*shape, dtype=jnp.float64):
    return jax.random.normal(jax.random.key(0), shape).astype(dtype)


@pytest.mark.default(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [4, 5, 7, 13, 33, 50, 64, 513])
def test_panels_unpack_to_the_full_product(x64, size):
    x = rows(6, size)
    panels = gram_panels(x, 1)
    assert tuple(p.shape for p in panels) == panel_shapes(size)
    np.testing.assert_allclose(unpack_panels(panels), x.T @ x, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("number", [1, 2, 64])
def test_rows_computed_in_the_same_program_have_a_symmetric_product(number, dtype):
    """One row, whose products are no calls of a library, and rows that are rounded on the way."""
    x, border = rows(number, 600, dtype=dtype), (rows(600, dtype=jnp.float32), jnp.float32(number))

    def products(x):
        computed = jnp.tanh(2.5 * x)
        panels = gram_panels(computed, 1)
        framed = unpack_panels(panels, jax.tree.map(lambda x: 2 * x, border))
        return symmetric_gram(computed, 1), unpack_panels(panels), framed

    whole, unpacked, framed = jax.jit(products)(x)
    expected = np.asarray(jnp.tanh(2.5 * x), np.float64)
    for found in (whole, unpacked, framed[:-1, :-1]):
        np.testing.assert_allclose(found, expected.T @ expected, atol=1e-5 * number)
        # A processor's library may add the terms of two mirrored elements in different orders.
        bound = number * np.finfo(np.float32).eps * np.abs(expected).max() ** 2
        np.testing.assert_allclose(found, found.T, rtol=0, atol=bound)
    np.testing.assert_array_equal(framed[-1], np.append(2 * border[0], 2 * number))


def test_panels_of_a_middle_axis_sum_over_all_others(x64):
    x = rows(3, 50, 4)
    np.testing.assert_allclose(
        unpack_panels(gram_panels(x, 1)), jnp.einsum("nit,njt->ij", x, x), rtol=1e-12
    )


def test_stacked_panels_unpack_slice_by_slice(x64):
    x = rows(2, 6, 50)
    stacked = jax.vmap(lambda x: gram_panels(x, 1))(x)
    np.testing.assert_allclose(unpack_panels(stacked), jnp.einsum("kni,knj->kij", x, x), rtol=1e-12)


def test_a_border_is_one_more_row_and_column(x64):
    """Panels of rows with ones appended, without appending any."""
    x = rows(2, 6, 50)
    with_ones = jnp.concatenate([x, jnp.ones((2, 6, 1))], -1)
    border = x.sum(1), jnp.full(2, 6.0)
    found = unpack_panels(jax.vmap(lambda x: gram_panels(x, 1))(x), border)
    np.testing.assert_allclose(
        found, jnp.einsum("kni,knj->kij", with_ones, with_ones), rtol=1e-12, atol=1e-12
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 33, 50])
def test_panels_are_written_as_they_are_gathered(size):
    """What other devices do, bit for bit."""
    panels = jax.vmap(lambda x: gram_panels(x, 1))(rows(2, 6, size, dtype=jnp.float32))
    for border in (None, (rows(2, size, dtype=jnp.float32), jnp.ones(2))):
        np.testing.assert_array_equal(_written(panels, border), _gathered(panels, border))


def test_a_matrix_with_more_entries_than_an_index_counts_is_written(x64, monkeypatch):
    """The limit is lowered: the smallest such matrix has 16 GiB in double precision."""
    x = rows(6, 50)
    monkeypatch.setattr(_gram, "_MAX_INDEX", 50**2)
    monkeypatch.setattr(_gram, "_gathered", None)
    np.testing.assert_allclose(unpack_panels(gram_panels(x, 1)), x.T @ x, rtol=1e-12, atol=1e-12)


def test_a_stack_is_kept_apart(x64):
    x = rows(3, 2, 5, 4)
    np.testing.assert_allclose(
        gram(x, (0, 2), (1,)), jnp.einsum("nest,neso->eto", x, x), rtol=1e-12
    )


def test_bfloat16_rows_are_summed_in_float32():
    """4096 ones: a bfloat16 sum would stop at 256."""
    assert gram(jnp.ones((4096, 1), jnp.bfloat16), (0,))[0, 0] == 4096


def test_double_precision_is_for_double_rows(x64):
    assert statistics_dtype(jnp.bfloat16, jnp.float32) == jnp.float32
    assert statistics_dtype(jnp.float32, jnp.float64) == jnp.float64


@pytest.mark.slow
def test_a_side_that_has_panels_on_every_platform_has_the_full_product(x64):
    x = rows(3, 1030)
    expected = np.asarray(x.T @ x)
    assert has_panels(1030, "other") and not has_panels(1000, "other")
    np.testing.assert_allclose(symmetric_gram(x, 1), expected, rtol=1e-12, atol=1e-12)
    panels = gram_panels(x, 1)
    assert tuple(p.shape for p in panels) == panel_shapes(1030)
    np.testing.assert_allclose(unpack_panels(panels), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_an_empty_stack_of_panels_is_an_empty_stack_of_matrices():
    panels = tuple(jnp.zeros((0, *shape)) for shape in panel_shapes(24))
    assert unpack_panels(panels).shape == (0, 24, 24)
