import jax.numpy as jnp
import pytest

from jaxkfac.linalg.spectral import (
    above_rcond,
    check_rcond,
    diagonal_power,
    kronecker_above_rcond,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_what_lies_at_the_cut_goes_and_what_lies_above_stays():
    values = jnp.array([-1e-9, 0.0, 1.0, 1.5, 4.0])
    assert above_rcond(values, 0.25).tolist() == [False, False, False, True, True]
    assert above_rcond(values, 1e-300).tolist() == [False, False, True, True, True]


def test_products_are_cut_by_their_own_largest_and_every_tie_goes():
    a, g = jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 2.0])
    expected = a[:, None] * g > 0.25 * 8
    assert jnp.array_equal(kronecker_above_rcond(a, g, 0.25), expected)
    assert int((~expected).sum()) == 3  # 1*1, and the tie 2 = 1*2 = 2*1


def test_every_slice_of_a_stack_has_its_own_largest():
    values = jnp.array([[1.0, 4.0], [10.0, 400.0]])
    assert above_rcond(values, 0.1).tolist() == [[True, True], [False, True]]
    kept = kronecker_above_rcond(values, jnp.ones((2, 1)), 0.1)
    assert kept[..., 0].tolist() == [[True, True], [False, True]]


def test_a_zero_block_is_cut_whole_and_nan_is_not_cut():
    assert not above_rcond(jnp.zeros(3), 1e-9).any()
    assert not kronecker_above_rcond(jnp.zeros(2), jnp.ones(2), 1e-9).any()
    bad = jnp.array([jnp.nan, 1.0])
    assert above_rcond(bad, 0.5).all() and kronecker_above_rcond(bad, jnp.ones(2), 0.5).all()


def test_the_scale_of_a_factor_does_not_matter_even_where_products_underflow():
    a, g = jnp.array([1e-3, 1.0], jnp.float32), jnp.array([1e-4, 1.0], jnp.float32)
    tiny = jnp.float32(1e-30)
    expected = kronecker_above_rcond(a, g, 1e-5)
    assert jnp.array_equal(kronecker_above_rcond(tiny * a, tiny * g, 1e-5), expected)


def test_a_diagonal_counts_as_zero_where_it_is_cut():
    values, kept = jnp.array([1.0, 2.0, 4.0]), jnp.array([True, False, True])
    found = diagonal_power(values, power=-1.0, damping=1.0, kept=kept)
    assert found.tolist() == [0.5, 0.0, 0.2]


@pytest.mark.parametrize("bad", [-0.1, 1.0, float("nan")])
def test_a_cut_out_of_range_is_named(bad):
    with pytest.raises(ValueError, match=r"cut must be in \[0, 1\).*got"):
        check_rcond(bad)
