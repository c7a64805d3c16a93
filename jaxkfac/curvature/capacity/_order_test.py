"""Counts, quantiles and streamed sums of products, against the products written out."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkfac.curvature.capacity import _eigenvalues as module
from jaxkfac.curvature.capacity._eigenvalues import (
    CapacityBlock,
    Settings,
    count_above,
    quantiles,
    sum_log1p,
    sums_of,
)

# Few distinct values, so that ties, zeros and products that round alike are common.
values = st.lists(
    st.sampled_from([0.0, 1e-9, 0.1, 0.2, 0.3, 1 / 3, 0.6, 1.0, 2.0, 1e5]), min_size=1, max_size=9
)
blocks = st.lists(st.tuples(values, values), min_size=1, max_size=4)


def block(a, g):
    rows, columns = sorted((np.sort(np.asarray(x, float)) for x in (a, g)), key=len)
    return CapacityBlock(rows, columns, (0.0, 0.0))


def written_out(block):
    return np.sort(np.multiply.outer(block.rows, block.columns).ravel())


@given(values, values, st.sampled_from([0.0, 1e-8, 0.06, 0.1 * 0.6, 0.2, 1.0, 1e5]))
def test_the_count_above_a_threshold_is_that_of_the_products(a, g, threshold):
    b = block(a, g)
    assert count_above(b, threshold) == (written_out(b) > threshold).sum()


@pytest.mark.parametrize("few", [0, 2**14], ids=["bisected to the end", "written out early"])
@given(blocks, st.integers(0, 100))
def test_a_quantile_is_the_eigenvalue_of_its_rank_among_all_blocks(few, parts, percent):
    found = [block(a, g) for a, g in parts]
    everything = np.sort(np.concatenate([written_out(b) for b in found]))
    rank = max(-(-percent * len(everything) // 100), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEW", few)
        (value,) = quantiles(found, [percent / 100]).values()
    assert value == everything[rank - 1]


def test_quantiles_of_large_blocks_are_those_of_numpy():
    rng = np.random.default_rng(0)
    found = [
        block(*(10 ** rng.uniform(-6, 1, n) for n in sizes)) for sizes in ((90, 300), (7, 999))
    ]
    everything = np.concatenate([written_out(b) for b in found])
    fractions = [0.0, 0.011, 0.5, 0.989, 1.0]
    expected = np.quantile(everything, fractions, method="inverted_cdf")
    np.testing.assert_array_equal(list(quantiles(found, fractions).values()), expected)


def settings(**changes):
    return Settings(100.0, 0.5, 1e-8, (0.5, 2.0), (0.5,))._replace(**changes)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 300_000), (50, 70_000), (900, 901)])
def test_streamed_sums_do_not_depend_on_how_the_products_are_cut(sizes):
    rng = np.random.default_rng(1)
    b = block(*(10 ** rng.uniform(-3, 1, n) for n in sizes))
    x = written_out(b)
    sums = sums_of(b, settings())
    np.testing.assert_allclose(sums.effective, (100 * x / (100 * x + 0.5)).sum(), rtol=1e-11)
    np.testing.assert_allclose(sums.log_damped, np.log(100 * x + 0.5).sum(), rtol=1e-11)
    np.testing.assert_allclose(sum_log1p([b], 3.0), np.log1p(3 * x).sum(), rtol=1e-11)


def peak_of_everything(n):
    rng = np.random.default_rng(2)
    b = block(*(10 ** rng.uniform(-8, 0, n) for _ in range(2)))
    tracemalloc.start()
    sums_of(b, settings())
    sum_log1p([b], 3.0)
    quantiles([b], [0.05, 0.5, 0.95])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_memory_is_that_of_the_factors_not_of_their_product():
    peak = peak_of_everything(4000)  # the products would be 128 MB
    assert peak < 8e6


@pytest.mark.exhaustive
@pytest.mark.slow  # 1.6e9 logarithms, three times
def test_products_of_13_gigabytes_are_never_formed():
    peak = peak_of_everything(40_000)
    assert peak < 16e6
