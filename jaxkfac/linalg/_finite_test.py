"""One entry that is not finite is found wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.linalg import is_all_finite

CHECK = jax.jit(is_all_finite)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("shape", "dtype"), [((70, 41), "bfloat16"), ((1001, 1001), "float32")])
def test_an_entry_that_is_not_finite_is_found_at_any_place(bad, shape, dtype):
    """Large arrays go to another library than small ones."""
    whole = np.linspace(-3, 3, np.prod(shape)).astype(dtype).reshape(shape)
    assert CHECK(whole)
    for place in (0, 7, 8, 16, 31, 1000, whole.size // 2, whole.size - 2, whole.size - 1):
        found = whole.copy()
        found.reshape(-1)[place] = bad
        assert not CHECK(found)


def test_the_largest_and_smallest_numbers_are_finite():
    info = np.finfo(np.float32)
    assert CHECK(jnp.array([info.max, info.min, info.smallest_subnormal, 0]))


def test_an_empty_array_is_finite_and_nothing_has_a_derivative():
    assert CHECK(jnp.zeros((0, 3)))
    assert (
        jax.grad(lambda x: jnp.where(is_all_finite(x), x.sum(), 0))(jnp.ones(3)).tolist() == [1] * 3
    )
