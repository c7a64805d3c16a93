import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkfac.jobs.data import epoch_batches, num_batches


@given(st.integers(1, 200), st.data(), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_uses_no_example_twice_and_depends_on_seed_and_epoch_alone(n, data, seed, epoch):
    size = data.draw(st.integers(1, n))
    rows = epoch_batches(seed, epoch, num_examples=n, batch_size=size)
    assert rows.shape == (num_batches(n, size), size)
    assert len(np.unique(rows)) == rows.size
    assert rows.min() >= 0 and rows.max() < n
    np.testing.assert_array_equal(rows, epoch_batches(seed, epoch, num_examples=n, batch_size=size))


def test_epochs_differ_and_together_reach_every_example():
    epochs = [epoch_batches(0, e, num_examples=50, batch_size=16) for e in range(20)]
    assert not np.array_equal(epochs[0], epochs[1])
    assert len(np.unique(np.concatenate(epochs))) == 50


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_batch_that_does_not_fit_is_refused(batch_size):
    with pytest.raises(ValueError, match=r"batch_size must lie in 1 .. 10"):
        epoch_batches(0, 0, num_examples=10, batch_size=batch_size)
