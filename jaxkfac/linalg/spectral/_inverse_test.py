import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.linalg import diagonal
from jaxkfac.linalg.spectral import damped_inverse, row_sums

pytestmark = pytest.mark.usefixtures("x64")


def matrices(number, n=5):
    x = jax.random.normal(jax.random.key(0), (number, n, 2 * n))
    return x @ x.mT


def test_damped_inverse_times_the_damped_matrix_is_the_identity():
    batch, shifts = matrices(3), jnp.array([0.0, 0.5, 2.0])
    found = jax.jit(damped_inverse)(batch, shifts)
    assert np.allclose(found @ (batch + shifts[:, None, None] * jnp.eye(5)), jnp.eye(5), atol=1e-12)


@pytest.mark.default(2, slow=1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [(0, 0), (4, 4), (3, 1)])
def test_all_of_an_inverse_is_nan_where_one_entry_of_the_matrix_is_not_finite(at, value):
    batch = matrices(2)
    i, j = at
    broken = batch.at[0, [i, j], [j, i]].set(value)
    found = damped_inverse(broken, jnp.ones(2))
    assert np.isnan(found[0]).all()
    assert np.array_equal(found[1], damped_inverse(batch, jnp.ones(2))[1])


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("k", [0, 2, 4])
def test_all_of_an_inverse_is_nan_where_the_matrix_is_not_positive(k):
    found = damped_inverse(matrices(1).at[0, k, k].set(-1.0), jnp.zeros(1))
    assert np.isnan(found).all()
    # Positive, but the inverse is beyond the largest number.
    tiny = jnp.eye(5).at[k, k].set(1e-310)
    assert np.isnan(damped_inverse(tiny, jnp.zeros(()))).all()


@pytest.mark.slow
def test_traces_of_matrices_and_stacks_of_any_size():
    traces = lambda matrices: row_sums([diagonal(x) for x in matrices])
    sizes = (3,), (5,), (2, 3), (2, 2, 7), (1,)
    given = [jax.random.normal(jax.random.key(i), (*s, s[-1])) for i, s in enumerate(sizes)]
    given[1] = given[1].astype(jnp.float32)
    for found in (traces(given), jax.jit(traces)(given)):
        for x, y in zip(found, given, strict=True):
            assert x.dtype == y.dtype
            assert np.allclose(x, jnp.trace(y, axis1=-2, axis2=-1), rtol=1e-6)
    assert traces([]) == []


def test_matrices_without_rows_have_sums_and_inverses():
    assert [x.tolist() for x in row_sums([jnp.ones((2, 0)), jnp.ones((1, 3))])] == [[0, 0], [3]]
    assert damped_inverse(jnp.zeros((2, 0, 0)), jnp.float32(1)).shape == (2, 0, 0)
