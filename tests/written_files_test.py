"""Files that version 0.1 wrote hold the same numbers today, and today's files have their form."""

import numpy as np
import pytest

from tests.written import (
    COMMITTED,
    KINDS,
    close,
    expected_of,
    plain,
    structure_of,
)
from tests.written.__main__ import main

# Kinds that are read without tracing or running a model; reading the others compiles.
QUICK = {"service", "service-packed", "adapter", "adapter-of-bank", "adapter-for-peft"}
# Plain forms are used further, which reads them too; the others are compared with their numbers.
FURTHER = {"factors", "bases", "inverses", "kfac", "store"}
# Written anew in the slow suite: one kind of each form.
ANEW = {"factors-packed", "kfac-packed", "kfe-adam", "service", "store", "adapter"}
# Others of a form take as long again, and are exhaustive.
LONG = {"analysis", "bases-measured", "influence", "inverses", "kfac", "kfac-packed"}
LONG |= {"store-of-rank"}
SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive


def kinds(mark, others, names, exhaustive=()):
    """Every kind, those in ``names`` with ``mark`` and all others with ``others``."""
    marks = {name: EXHAUSTIVE if name in exhaustive else others for name in KINDS}
    marks |= dict.fromkeys(names, mark)
    return [pytest.param(name, marks=marks[name]) for name in KINDS]


def assert_read(found, expected, tolerance):
    """The same names, shapes and dtypes; numbers within ``tolerance`` of the largest entry."""
    found = plain(found)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = np.asarray(found[name])
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        if not np.issubdtype(want.dtype, np.inexact):
            np.testing.assert_array_equal(got, want, err_msg=name)
            continue
        bound = tolerance * np.abs(want).max(initial=0)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=name)


@pytest.fixture
def opened():
    """``opened(kind)``: what is read from a committed file; it is closed after the test."""
    objects = []

    def read(name):
        objects.append(KINDS[name].read(COMMITTED / name))
        return objects[-1]

    yield read
    for value in objects:
        close(value)


@pytest.mark.parametrize("name", kinds((), SLOW, QUICK, FURTHER | LONG - {"kfac-packed"}))
def test_a_file_holds_the_numbers_that_it_was_written_from(name, opened):
    assert_read(KINDS[name].readings(opened(name)), expected_of(name)[0], 1e-6)


# Another processor or compiler rounds otherwise, and small eigenvalues make more of the difference.
@pytest.mark.parametrize("name", kinds(SLOW, EXHAUSTIVE, FURTHER - LONG))
def test_what_a_file_holds_can_be_used_further(name, opened):
    assert_read(KINDS[name].go_on(opened(name)), expected_of(name)[1], 1e-3)


@pytest.mark.parametrize("name", kinds(SLOW, EXHAUSTIVE, ANEW - LONG))
def test_a_file_written_today_has_the_structure_of_the_committed_one(name, tmp_path):
    KINDS[name].write(tmp_path)
    assert structure_of(tmp_path) == structure_of(COMMITTED / name)


def test_every_kind_is_committed_and_all_are_small():
    files = [path for path in COMMITTED.rglob("*") if path.is_file()]
    expected = {*KINDS, *(f"{name}.safetensors.xz" for name in KINDS)}
    assert {path.name for path in COMMITTED.iterdir()} == expected
    assert sum(path.stat().st_size for path in files) < 1 << 20
    assert not [path for path in files if path.name.startswith(".")]


def test_committed_files_are_replaced_only_on_request(capsys):
    for folder in ([], [str(COMMITTED)], [str(COMMITTED / "kfac")]):
        with pytest.raises(SystemExit):
            main(folder)
        assert "give another folder, or --write" in capsys.readouterr().err
