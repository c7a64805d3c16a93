import numpy as np
import pytest

from jaxkfac.linalg._packed import pack, packed_shape, unpack


def symmetric(n, dtype=np.float32):
    half = np.random.default_rng(n).normal(size=(n, n)).astype(dtype)
    return half + half.T


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 64, 127, 128, 129, 200, 301])
def test_unpack_inverts_pack_bitwise_in_half_the_elements(n):
    matrix = symmetric(n)
    packed = pack(matrix, np.full(packed_shape(n), np.nan, np.float32))
    assert packed.size == n * (n + 1) // 2 and np.isfinite(packed).all()
    assert np.array_equal(unpack(packed, n), matrix)


@pytest.mark.parametrize("n", [5, 130])
def test_only_the_lower_triangle_is_read(n):
    matrix = symmetric(n)
    lower = np.where(np.tri(n, dtype=bool), matrix, np.nan)
    assert np.array_equal(unpack(pack(lower, np.empty(packed_shape(n))), n), matrix)


def test_sums_of_packed_matrices_are_packed_sums():
    a, b = symmetric(9, np.float64), symmetric(10, np.float64)[:9, :9]
    total = pack(a, np.empty(packed_shape(9))) + pack(b, np.empty(packed_shape(9)))
    assert np.array_equal(unpack(total, 9), a + b)


def test_packing_casts_to_the_dtype_of_the_target():
    matrix = symmetric(6, np.float64)
    packed = pack(matrix, np.empty(packed_shape(6), np.float32))
    assert np.array_equal(unpack(packed, 6), matrix.astype(np.float32))
