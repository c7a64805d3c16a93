"""Every script trains by the object at its defaults, without a warning, and is in the table."""

import re
import warnings

import pytest

from tests.scripts import SCRIPTS, end
from tests.scripts.__main__ import PAGE

# A script of NNX and one of another library; the others are exhaustive.
IN_SLOW = {"images: NNX, batch norm, dropout, a dictionary", "spirals: Equinox, a GRU"}


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_SLOW else pytest.mark.exhaustive)
        for name in SCRIPTS
    ],
)
def test_a_script_ends_below_its_start_at_the_defaults(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses = SCRIPTS[name](None, 0)
    start = losses[0]
    assert end(losses) < start - 0.25 * abs(start)


def test_the_table_has_every_script_and_none_above_its_start():
    rows = re.findall(
        r"^\| ([^|]+: [^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE
    )
    assert [name for name, *_ in rows] == list(SCRIPTS)
    for _, first, last in rows:
        starts, ends = ([float(x) for x in numbers.split(",")] for numbers in (first, last))
        assert all(y < x for x, y in zip(starts, ends, strict=True))


def test_every_script_that_is_slow_exists():
    assert set(SCRIPTS) > IN_SLOW
