import hashlib

import numpy as np
import pytest

from jaxkfac.jobs.data import load_digits
from jaxkfac.jobs.data._digits import DIGITS_SHA256


def test_the_embedded_file_equals_scikit_learns_digits():
    datasets = pytest.importorskip("sklearn.datasets")
    theirs, (images, labels) = datasets.load_digits(), load_digits()
    np.testing.assert_array_equal(images * 16, theirs.images)
    np.testing.assert_array_equal(labels, theirs.target)
    content = theirs.images.astype(np.uint8).tobytes() + theirs.target.astype(np.uint8).tobytes()
    assert hashlib.sha256(content).hexdigest() == DIGITS_SHA256


def test_train_and_test_are_a_partition_of_all():
    assert len(load_digits("validation").labels) == 0
    assert_partition(load_digits(split, seed=3) for split in ("train", "test"))


def test_a_validation_set_is_taken_from_the_test_set():
    halves = {"seed": 3, "test_fraction": 0.1, "validation_fraction": 0.1}
    parts = [load_digits(split, **halves) for split in ("train", "validation", "test")]
    assert_partition(parts)
    np.testing.assert_array_equal(parts[0].images, load_digits("train", seed=3).images)
    assert abs(len(parts[1].labels) - len(parts[2].labels)) <= 10


def assert_partition(parts):
    parts = list(parts)
    together = np.concatenate([part.images.reshape(len(part.images), -1) for part in parts])
    everything = load_digits().images.reshape(-1, 64)
    assert sorted(map(bytes, together)) == sorted(map(bytes, everything))


def test_every_class_gives_the_same_part_to_the_test_set():
    _, everything = load_digits()
    _, held_out = load_digits("test", seed=0, test_fraction=0.2)
    parts = np.bincount(held_out) / np.bincount(everything)
    assert np.all(np.abs(parts - 0.2) < 0.5 / 174 + 1e-9)


def test_a_seed_fixes_the_split_and_another_changes_it():
    first, again, other = (load_digits("test", seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="test_fraction"):
        load_digits("test", test_fraction=1.0)
    with pytest.raises(ValueError, match=r"validation_fraction must lie in \[0, 0.8\)"):
        load_digits("test", validation_fraction=0.8)
