"""Eigenvalues beyond a rank: their mean keeps the trace, and the error is that of the matrix."""

import numpy as np
import pytest

from jaxkfac.curvature.host._refresh import _with_mean_tail


@pytest.mark.parametrize("rank", [2, 0])
def test_the_mean_of_the_smallest_eigenvalues_keeps_the_trace(rank):
    values = np.sort(np.random.default_rng(0).gamma(1.0, size=(3, 5)), axis=-1)
    found, error = _with_mean_tail(values, rank)
    np.testing.assert_allclose(found.sum(-1), values.sum(-1), rtol=1e-12)
    np.testing.assert_array_equal(found[:, 5 - rank :], values[:, 5 - rank :])
    np.testing.assert_allclose(found[:, 1 : 5 - rank], found[:, :1].repeat(4 - rank, 1), rtol=1e-12)
    off = np.linalg.norm(found - values, axis=-1) / np.linalg.norm(values, axis=-1)
    np.testing.assert_allclose(error, off.max(), rtol=1e-12)
    assert error > 0


def test_a_rank_of_all_eigenvalues_changes_none():
    values = np.arange(4.0)
    found, error = _with_mean_tail(values, 4)
    assert found is values and error == 0
    assert _with_mean_tail(np.zeros((2, 3)), 1)[1] == 0
