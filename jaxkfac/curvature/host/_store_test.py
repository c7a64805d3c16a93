"""Files that arrays are mapped into have their blocks before they are written to."""

import os

import numpy as np
import pytest

from jaxkfac.curvature.host._store import Store, _reserve


@pytest.mark.parametrize("nbytes", [1, 1 << 20, (5 << 19) + 3])
@pytest.mark.parametrize("call", [True, False])
def test_a_file_has_all_its_bytes_where_the_system_has_no_call_for_it(
    tmp_path, monkeypatch, call, nbytes
):
    if not call:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with open(tmp_path / "file", "wb") as file:
        _reserve(file.fileno(), nbytes)
        found = os.fstat(file.fileno())
    assert found.st_size == nbytes <= found.st_blocks * 512


def test_arrays_on_disk_hold_what_is_written_without_that_call(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    array = Store(0, tmp_path).empty((3, 1000), np.dtype(np.float32), "an average")
    assert not array.any()
    array[...] = np.arange(3000.0).reshape(3, 1000)
    np.testing.assert_array_equal(array.sum(1), np.arange(3000.0).reshape(3, 1000).sum(1))
