"""The clipped matrix is that of the fix; where it is rebuilt changes no byte on the CPU."""

import pytest
import torch

from torch_ref import unfixed
from torch_ref.linalg import stabilize
from torch_ref.memory import track_storages

N = 64
ROWS = torch.linspace(-1, 1, 40 * N, dtype=torch.float64).reshape(40, N).mul(7).sin()
MATRIX = ROWS.T @ ROWS  # of rank 40


@pytest.mark.parametrize("rebuild_on_host", [False, True])
def test_matrix_is_that_of_the_fix(rebuild_on_host):
    found = unfixed.clip_and_rebuild(MATRIX, 10.0, rebuild_on_host=rebuild_on_host)
    torch.testing.assert_close(found, stabilize(MATRIX, 10.0, 0.0), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found, MATRIX)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrix_comes_back_in_its_dtype(dtype):
    for rebuild_on_host in (False, True):
        found = unfixed.clip_and_rebuild(MATRIX.to(dtype), 10.0, rebuild_on_host=rebuild_on_host)
        assert found.dtype == dtype


def test_three_matrices_are_alive_before_and_after():
    matrix = MATRIX.float()
    vector = N * 4
    for rebuild_on_host in (False, True):
        with track_storages() as made:
            unfixed.clip_and_rebuild(matrix, 10.0, rebuild_on_host=rebuild_on_host)
        # Q, Q Λ and the product; eigenvalues, raw and clipped, are vectors.
        assert made.peak_bytes == 3 * N * vector + 2 * vector


def test_transpose_shares_the_storage_and_the_product_copies_nothing():
    q = MATRIX.float()
    with track_storages() as made:
        transposed = q.t()
        assert made.peak_bytes == 0
        q @ transposed
    assert transposed.data_ptr() == q.data_ptr()
    assert made.peak_bytes == q.nbytes


@pytest.mark.gpu
def test_rebuilding_on_the_host_leaves_one_matrix_of_three_on_the_gpu():
    matrix = MATRIX.float().cuda()
    peaks = []
    for rebuild_on_host in (False, True):
        with track_storages("cuda") as made:
            found = unfixed.clip_and_rebuild(matrix, 10.0, rebuild_on_host=rebuild_on_host)
        assert found.device == matrix.device
        peaks.append(made.peak_bytes)
    assert peaks[0] >= 3 * matrix.nbytes
    assert peaks[1] < 1.5 * matrix.nbytes
