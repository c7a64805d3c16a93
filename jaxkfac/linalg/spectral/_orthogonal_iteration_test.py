import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.linalg.spectral import iterate_eigenvectors

pytestmark = pytest.mark.usefixtures("x64")


def symmetric(values, seed=0):
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.normal(size=(len(values), len(values))))[0]
    return jnp.asarray(vectors * values @ vectors.T), jnp.asarray(vectors)


def test_eigenvectors_stay_where_they_are():
    matrix, vectors = symmetric([1.0, 5.0, 2.0, 0.5])
    found = iterate_eigenvectors(matrix, vectors)
    np.testing.assert_allclose(found.values, [1.0, 5.0, 2.0, 0.5], rtol=1e-12)
    assert found.vectors is not None
    np.testing.assert_allclose(abs(found.vectors.T @ vectors), np.eye(4), atol=1e-12)


def test_iterations_reach_the_eigenvectors_of_a_matrix_nearby_column_by_column():
    matrix, _ = symmetric([16.0, 8.0, 4.0, 2.0, 1.0])
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(5, 5))
    near = matrix + 0.05 * (noise + noise.T)
    values, vectors = np.linalg.eigh(np.asarray(near))
    tracked = jnp.linalg.eigh(matrix)[1]
    for _ in range(80):
        found = iterate_eigenvectors(near, tracked)
        tracked = found.vectors
    np.testing.assert_allclose(found.values, values, rtol=1e-12)
    np.testing.assert_allclose(abs(tracked.T @ vectors), np.eye(5), atol=1e-10)


@pytest.mark.slow
def test_one_step_is_orthogonal_and_keeps_the_trace_of_a_matrix_of_any_rank():
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(3, 7, 2))
    matrix = jnp.asarray(rows @ rows.swapaxes(1, 2))  # rank 2 of 7, a stack of three
    start = jnp.broadcast_to(jnp.eye(7), matrix.shape)
    found = jax.jit(iterate_eigenvectors)(matrix, start)
    assert found.vectors is not None
    gram = found.vectors.mT @ found.vectors
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(7), gram.shape), atol=1e-12)
    np.testing.assert_allclose(
        found.values.sum(-1), jnp.trace(matrix, axis1=1, axis2=2), rtol=1e-12
    )
    for one, q, values in zip(matrix, found.vectors, found.values, strict=True):
        alone = iterate_eigenvectors(one, jnp.eye(7))
        np.testing.assert_allclose(alone.values, values, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(np.diag(q.T @ one @ q), values, rtol=1e-9, atol=1e-12)


def test_a_matrix_that_is_not_finite_gives_nan_values_for_itself_alone():
    matrix = jnp.stack([jnp.eye(3), jnp.eye(3).at[0, 1].set(jnp.nan)])
    found = iterate_eigenvectors(matrix, jnp.broadcast_to(jnp.eye(3), (2, 3, 3)))
    assert jnp.isfinite(found.values[0]).all() and jnp.isnan(found.values[1]).all()
